"""Where a call runs beside the leader's own network: on other ranks, or, as their twin, in the same process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from wam_policy_ros.contract.errors import WamError
from wam_policy_ros.contract.interface import ResetReason
from wam_policy_ros.engine.encode import FirstFrame, Prompt
from wam_policy_ros.engine.sampler import Probe
from wam_policy_ros.engine.session import WindowState
from wam_policy_ros.engine.step_path import StepPath

from .ranks import Progress, RankReport


@dataclass(eq=False)
class TextStates:
    """A prompt as ``Prompt.keys`` has it before a network has made keys of it.

    Attributes:
        states: ``[1, text_len, text_dim]``; length: of the text in tokens.
        keys: of the network that runs here, once they were asked for.
    """

    states: Tensor
    length: int
    keys: Any = None


class BranchPath(StepPath, Protocol):
    """A path of one guidance branch, whose evaluations can be had one by one."""

    @property
    def encode_text(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Runs the text encoder."""
        ...

    def keys_of(self, states: Tensor, length: int) -> Any:
        """``Prompt.keys`` from ``TextStates``."""
        ...

    def evaluate_branch(
        self, state: WindowState, step: int, video: Tensor, action: Tensor, proprio: Tensor, *, with_video: bool
    ) -> tuple[Tensor | None, Tensor]:
        """One evaluation at the noise level of a solver step: the flows of video, or None, and of action.

        Args:
            video ``[1, z, F, h, w]``, action ``[1, N, action_dim]``: samples. proprio: ``[1, 1, max_state_dim]``.
        """
        ...

    def prepare(self, progress: Progress, fitting: Callable[[], int | None] = lambda: None) -> None:
        """Compile and record; see ``FusedPath.prepare``."""
        ...


def own(path: BranchPath, prompt: Prompt) -> Prompt:
    """``prompt`` with the keys of this path's network, made once."""
    text = prompt.keys
    assert isinstance(text, TextStates)
    if text.keys is None:
        text.keys = path.keys_of(text.states, text.length)
    return Prompt(prompt.ids, prompt.embedding, text.keys, of=prompt)


def report(rank: int, device: torch.device, path: BranchPath, windows: int, fit: int | None = None) -> RankReport:
    pool = getattr(path, "pool", None)  # of the fused step
    slots, idle = (0, 0) if pool is None else (pool.made, pool.idle)
    peak = 0
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    return RankReport(rank, windows, slots, idle, peak, fit)


class Far(Protocol):
    """The rest of a call: the unguided branch, where guidance is split, and the other ranks of a sequence.

    Mirrors the calls of ``StepPath`` with windows of its own: opaque, in ``WindowState.far``. What it is asked for
    happens in the order of the asking.
    """

    @property
    def lost(self) -> WamError | None:
        """Why nothing can be asked for again. Any thread."""
        ...

    def restarted(
        self, old: Any, first: FirstFrame, prompt: Prompt, negative: Prompt | None, reason: ResetReason
    ) -> Any: ...

    def confirm(self) -> None:
        """After ``restarted`` and ``cloned``.

        Raises:
            Overloaded: somewhere there was no memory; what there is of the window has to be let go.
        """
        ...

    def continued(self, old: Any, prompt: Prompt, negative: Prompt | None) -> Any: ...

    def cloned(self, window: Any) -> Any: ...

    def prefill(self, draft: Any, latents: Tensor, start_frame: int, probe: Probe | None) -> Any: ...

    def begin(
        self,
        draft: Any,
        start_frame: int,
        step: int,
        video: Tensor,
        action: Tensor,
        proprio: Tensor,
        *,
        with_video: bool,
        guided: bool,
    ) -> None:
        """Start an evaluation; arguments as of ``BranchPath.evaluate_branch``."""
        ...

    def together(self) -> AbstractContextManager[object]:
        """Around this rank's part of what ``prefill`` and ``begin`` have begun. Where ranks share a branch, a failure
        here leaves the others in the middle of an exchange, and nothing can be done together again."""
        ...

    def flow(self) -> Tensor:
        """The unguided flow of the evaluation begun last, which was ``guided``: ``[1, z, F, h, w]``."""
        ...

    def let_go(self, unwanted: Any, kept: Any) -> None: ...

    def watched(self) -> AbstractContextManager[object]:
        """Around all evaluations of a call: it may wait for the other side wherever it asks the device."""
        ...

    def pace(self) -> None:
        """Before an evaluation: wait until no more than one other is under way, so that a call can be cancelled."""
        ...

    def wait(self) -> None:
        """Until everything that was begun has been done.

        Raises:
            PolicyLost: it never will be.
        """
        ...

    def prepare(self) -> None:
        """Begin to compile and record; see ``FusedPath.prepare``."""
        ...

    def prepared(self, progress: Progress, fitting: Callable[[], int | None]) -> None:
        """Until that is done. ``fitting``: of the process that asks."""
        ...

    def reports(self) -> list[RankReport]:
        """Of the other ranks."""
        ...

    def close(self) -> None:
        """No call is made again."""
        ...


class LocalFar:
    """The unguided branch on the same device, after the conditional one. The twin of ``RemoteFar``: the same bits."""

    def __init__(self, path: BranchPath) -> None:
        self.path = path
        self._evaluate: Callable[[], Tensor | None] = lambda: None
        self.lost = None

    def restarted(
        self, old: Any, first: FirstFrame, prompt: Prompt, negative: Prompt | None, reason: ResetReason
    ) -> WindowState:
        assert negative is not None
        return self.path.restarted(old or WindowState(), first, own(self.path, negative), None, reason)

    def confirm(self) -> None:
        pass

    def continued(self, old: Any, prompt: Prompt, negative: Prompt | None) -> WindowState:
        assert negative is not None
        return self.path.continued(old, own(self.path, negative), None)

    def cloned(self, window: Any) -> WindowState:
        return self.path.cloned(window)

    def prefill(self, draft: Any, latents: Tensor, start_frame: int, probe: Probe | None) -> WindowState:
        return self.path.prefill(draft, latents, start_frame, None)

    def begin(
        self,
        draft: Any,
        start_frame: int,
        step: int,
        video: Tensor,
        action: Tensor,
        proprio: Tensor,
        *,
        with_video: bool,
        guided: bool,
    ) -> None:
        state = replace(draft, current_start_frame=start_frame)
        self._evaluate = lambda: self.path.evaluate_branch(state, step, video, action, proprio, with_video=True)[0]

    def together(self) -> AbstractContextManager[object]:
        return nullcontext()

    def flow(self) -> Tensor:
        flow = self._evaluate()
        assert flow is not None
        return flow

    def let_go(self, unwanted: Any, kept: Any) -> None:
        if unwanted is not None:
            self.path.let_go(unwanted, kept or WindowState())

    def watched(self) -> AbstractContextManager[object]:
        return nullcontext()

    def pace(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def prepare(self) -> None:
        pass

    def prepared(self, progress: Progress, fitting: Callable[[], int | None]) -> None:
        self.path.prepare(progress, fitting)

    def reports(self) -> list[RankReport]:
        return []

    def close(self) -> None:
        pass
