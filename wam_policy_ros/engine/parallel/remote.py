"""A call's far side on other ranks: small commands through pipes, tensors through collective operations."""

from __future__ import annotations

import itertools
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wam_policy_ros.contract.errors import WamError
from wam_policy_ros.contract.interface import ResetReason
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.encode import FirstFrame, Prompt
from wam_policy_ros.engine.sampler import Probe

from .far import TextStates
from .ranks import START_S, Progress, RankReport, Ranks

MAX_PROMPTS = 4
_PATHS = itertools.count()
_PAUSE_S = 5e-5


@dataclass(frozen=True)
class FarWindow:
    """A window on other ranks, by its number."""

    number: int


class RemoteFar:
    """See ``Far``. Every command goes out before the operation that belongs to it, and in the same order.

    Nothing here makes the host wait for the device, but for ``confirm``, ``pace`` and ``wait``.

    Args:
        ranks: joined.
        config: of the path that followers build for it.
        device, dtype: of this rank's network.
    """

    def __init__(self, ranks: Ranks, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.ranks = ranks
        self._device, self._dtype = device, dtype
        self._path = next(_PATHS)
        self._numbers = itertools.count()
        # Those that followers have.
        self._prompts: OrderedDict[int, TextStates] = OrderedDict()
        self._buffers: dict[tuple[Any, ...], Tensor] = {}
        self._events: deque[torch.cuda.Event] = deque()
        self._flow_shape: torch.Size | None = None
        self._key: tuple[Any, ...] = ()
        ranks.hold(self)
        ranks.send("path", self._path, config)
        self._dropped = weakref.finalize(self, ranks.forgotten.append, self._path)

    def ready(self) -> None:
        """Until followers have their path.

        Raises:
            ConfigError: one of them cannot run it.
        """
        self.ranks.answers(START_S)

    @property
    def lost(self) -> WamError | None:
        return self.ranks.lost

    # -- windows ------------------------------------------------------------------------------------------------

    def restarted(
        self, old: FarWindow | None, first: FirstFrame, prompt: Prompt, negative: Prompt | None, reason: ResetReason
    ) -> FarWindow:
        new, texts = FarWindow(next(self._numbers)), self._texts(prompt, negative)
        shapes = tuple(first.clip_features.shape), tuple(first.ys.shape)
        self._send("restarted", new.number, _number(old), texts, reason, shapes)
        with self.ranks.exchanging(("restarted", reason)) as groups:
            groups.from_leader(first.clip_features.contiguous())
            groups.from_leader(first.ys.contiguous())
        return new

    def confirm(self) -> None:
        self.ranks.answers()

    def continued(self, old: FarWindow, prompt: Prompt, negative: Prompt | None) -> FarWindow:
        new, texts = FarWindow(next(self._numbers)), self._texts(prompt, negative)
        self._send("continued", new.number, old.number, texts)
        return new

    def cloned(self, window: FarWindow) -> FarWindow:
        new = FarWindow(next(self._numbers))
        self._send("cloned", new.number, window.number)
        return new

    def let_go(self, unwanted: FarWindow | None, kept: FarWindow | None) -> None:
        if unwanted is not None and self.ranks.lost is None:
            self._send("let_go", unwanted.number, _number(kept))

    def _texts(self, prompt: Prompt, negative: Prompt | None) -> tuple[int | None, ...]:
        """Numbers of the prompts by branch, sent where they are needed and not there yet; None where nobody does."""
        grid = self.ranks.grid
        wanted = [prompt if grid.sequence > 1 else None, negative if grid.guidance > 1 else None]
        return tuple(None if text is None else self._text(text.keys) for text in wanted)

    def _text(self, text: TextStates) -> int:
        number = id(text)  # unique while it is kept below
        if number in self._prompts:
            self._prompts.move_to_end(number)
            return number
        self._prompts[number] = text
        forgotten = self._prompts.popitem(last=False)[0] if len(self._prompts) > MAX_PROMPTS else None
        self._send("prompt", number, forgotten, text.length, tuple(text.states.shape))
        with self.ranks.exchanging("prompt") as groups:
            groups.from_leader(text.states.contiguous())
        return number

    # -- the two kinds of call ----------------------------------------------------------------------------------

    def prefill(self, draft: FarWindow, latents: Tensor, start_frame: int, probe: Probe | None) -> FarWindow:
        self._send("prefill", draft.number, start_frame, tuple(latents.shape))
        with self.ranks.exchanging(("prefill", start_frame, latents.shape)) as groups:
            groups.from_leader(latents.contiguous())
        return draft

    def begin(
        self,
        draft: FarWindow,
        start_frame: int,
        step: int,
        video: Tensor,
        action: Tensor,
        proprio: Tensor,
        *,
        with_video: bool,
        guided: bool,
    ) -> None:
        self._key, self._flow_shape = ("evaluate", start_frame, with_video, guided), video.shape
        if self.ranks.grid.sequence == 1 and not guided:
            self.ranks.asked(self._key)
            return  # the other branch has no part in it
        parts = (video, action, proprio)
        samples = self._buffer("samples", sum(part.numel() for part in parts))
        torch.cat([part.reshape(-1) for part in parts], out=samples)
        shapes = tuple(tuple(part.shape) for part in parts)
        self._send("evaluate", draft.number, start_frame, step, shapes, with_video, guided)
        with self.ranks.exchanging(self._key) as groups:
            groups.from_leader(samples)

    def together(self) -> AbstractContextManager[object]:
        return self.ranks.together() if self.ranks.grid.sequence > 1 else nullcontext()

    def flow(self) -> Tensor:
        assert self._flow_shape is not None
        flow = self._buffer("flow", self._flow_shape.numel())
        with self.ranks.exchanging(self._key) as groups:
            groups.from_branch(1, flow)
        return flow.view(self._flow_shape).clone()  # the next one comes into the same memory

    def watched(self) -> AbstractContextManager[object]:
        return self.ranks.watched()

    # -- waiting ------------------------------------------------------------------------------------------------

    def pace(self) -> None:
        self.ranks.check()
        if self._device.type == "cuda":  # passed when all evaluations before this one are done
            self._events.append(torch.cuda.Event())
            self._events[-1].record(torch.cuda.current_stream(self._device))
        while len(self._events) > 1:
            self._until(self._events.popleft())

    def wait(self) -> None:
        self._events.clear()
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            self._until(event)
        self.ranks.settled()

    def _until(self, event: torch.cuda.Event) -> None:
        # Asking instead of waiting: an exchange that another rank never joins never ends.
        self.ranks.wait(event.query, lambda: time.sleep(_PAUSE_S))

    # -- the rest -----------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        self._send("prepare")

    def prepared(self, progress: Progress, fitting: Callable[[], int | None]) -> None:
        self.ranks.answers(START_S, progress)

    def reports(self) -> list[RankReport]:
        self._send("report")
        return self.ranks.answers()

    def close(self) -> None:
        self._dropped()
        self._prompts.clear()
        self.ranks.close(self)

    def _send(self, name: str, *content: Any) -> None:
        self.ranks.send(name, self._path, *content)

    def _buffer(self, name: str, size: int) -> Tensor:
        if (name, size) not in self._buffers:
            self._buffers[name, size] = torch.empty(size, dtype=self._dtype, device=self._device)
        return self._buffers[name, size]


def _number(window: FarWindow | None) -> int | None:
    return None if window is None else window.number
