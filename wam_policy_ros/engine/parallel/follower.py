"""What a rank does that does not lead: it mirrors the leader's calls on a path of its own, and decides nothing."""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wam_policy_ros.contract.errors import Overloaded, WamError, bare
from wam_policy_ros.contract.interface import ResetReason
from wam_policy_ros.engine.account import account_of, capacity_of
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.determinism import Determinism
from wam_policy_ros.engine.device import on_device
from wam_policy_ros.engine.encode import FirstFrame, Prompt
from wam_policy_ros.engine.paths import branch_path
from wam_policy_ros.engine.session import WindowState
from wam_policy_ros.engine.weights import DIT

from .far import BranchPath, report
from .groups import Groups, connect
from .ranks import Setup
from .start import Line


def follow(line: Line) -> None:
    """Do what the leader says until it ends this process. A failure that the leader cannot mend is told, and ends it
    here."""
    try:
        setup = line.receive()
        device = torch.device(setup.device)
        torch.set_num_threads(setup.threads)
        with on_device(device):
            follower = _Follower(line, setup, device)
            with torch.inference_mode():
                follower.run()
    except BaseException as error:
        known = isinstance(error, WamError)
        if not known:
            traceback.print_exc()
        line.send("failed", str(error) if known else f"{type(error).__name__}: {error}")
        os._exit(1)  # whatever else waits here, waits for nothing


class _Mirror:
    """One path of the leader's, as this rank has it."""

    def __init__(self, path: BranchPath, config: EngineConfig, determinism: Determinism) -> None:
        self.path, self.config, self.determinism = path, config, determinism
        self.windows: dict[int, WindowState] = {}
        self.prompts: dict[int, Prompt] = {}


class _Follower:
    def __init__(self, line: Line, setup: Setup, device: torch.device) -> None:
        self._line, self._setup, self._device = line, setup, device
        self._branch = setup.grid.branch(setup.rank)
        self._mirrors: dict[int, _Mirror] = {}
        self._like: BranchPath | None = None
        self._network = setup.weights.load(
            setup.config, device, setup.dtype, lambda text, fraction: line.send("progress", text, fraction), only=DIT
        )
        self._groups: Groups | None = None

    def run(self) -> None:
        setup = self._setup
        self._line.send("answer", None)
        assert self._line.receive() == ("join",)
        self._groups = connect(setup.grid, setup.rank, self._device, setup.place, setup.backend)
        self._line.send("answer", None)
        commands: dict[str, Callable[..., None]] = {
            "path": self._path,
            "drop": self._drop,
            "prepare": self._prepare,
            "report": self._report,
            "prompt": self._prompt,
            "restarted": self._restarted,
            "continued": self._continued,
            "cloned": self._cloned,
            "prefill": self._prefill,
            "evaluate": self._evaluate,
            "let_go": self._let_go,
        }
        while True:
            name, number, *content = self._line.receive()
            mirror = self._mirrors.get(number)
            with nullcontext() if mirror is None else mirror.determinism.around(name, self._form(name, content)):
                commands[name](number, *content)

    # -- paths --------------------------------------------------------------------------------------------------

    def _path(self, number: int, config: EngineConfig) -> None:
        assert self._groups is not None
        determinism = Determinism(self._device, enabled=config.deterministic)
        try:
            with torch.inference_mode(False), determinism.switched():
                path = branch_path(
                    self._network, config, self._setup.picture_hw, self._like, encoders=False, groups=self._groups
                )
        except WamError as error:
            self._line.send("answer", bare(error))
            return
        self._like = path
        self._mirrors[number] = _Mirror(path, config, determinism)
        self._line.send("answer", None)

    def _drop(self, number: int) -> None:
        mirror = self._mirrors.pop(number, None)
        if mirror is not None:
            mirror.path.close()
        del mirror
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _prepare(self, number: int) -> None:
        self._mirrors[number].path.prepare(
            lambda text, fraction: self._line.send("progress", text, fraction), lambda: self._fitting(number)
        )
        self._line.send("answer", None)

    def _report(self, number: int) -> None:
        mirror = self._mirrors[number]
        fit = self._fitting(number)
        self._line.send("answer", report(self._setup.rank, self._device, mirror.path, len(mirror.windows), fit))

    def _fitting(self, number: int) -> int | None:
        """Windows that there is room for here."""
        mirror = self._mirrors[number]
        account = account_of(self._network, mirror.path, mirror.windows.values(), others=mirror.prompts)
        return capacity_of(self._network, mirror.config, mirror.path, account).windows

    @staticmethod
    def _form(name: str, content: Sequence[Any]) -> Any:
        """What decides the operations of a command, beside its name."""
        return tuple(content[-2:]) if name == "evaluate" else None

    # -- mirrored calls -----------------------------------------------------------------------------------------

    def _prompt(self, number: int, key: int, forgotten: int | None, length: int, shape: tuple[int, ...]) -> None:
        mirror, states = self._mirrors[number], self._received(shape)
        if forgotten is not None:
            del mirror.prompts[forgotten]
        mirror.prompts[key] = Prompt(torch.empty(0), states, mirror.path.keys_of(states, length))

    def _restarted(
        self,
        number: int,
        new: int,
        old: int | None,
        texts: tuple[int | None, ...],
        reason: ResetReason,
        shapes: tuple[tuple[int, ...], ...],
    ) -> None:
        mirror = self._mirrors[number]
        clip_features, ys = (self._received(shape) for shape in shapes)
        channels = ys.shape[1] - 4  # the first four are the mask
        first = FirstFrame(clip_features, ys, ys[:, -channels:, :1])
        state = WindowState() if old is None else mirror.windows[old]
        try:
            mirror.windows[new] = mirror.path.restarted(state, first, self._text(mirror, texts), None, reason)
        except Overloaded as error:
            self._line.send("answer", bare(error))
        else:
            self._line.send("answer", None)

    def _continued(self, number: int, new: int, old: int, texts: tuple[int | None, ...]) -> None:
        mirror = self._mirrors[number]
        mirror.windows[new] = mirror.path.continued(mirror.windows[old], self._text(mirror, texts), None)

    def _cloned(self, number: int, new: int, old: int) -> None:
        mirror = self._mirrors[number]
        try:
            mirror.windows[new] = mirror.path.cloned(mirror.windows[old])
        except Overloaded as error:
            self._line.send("answer", bare(error))
        else:
            self._line.send("answer", None)

    def _prefill(self, number: int, window: int, start_frame: int, shape: tuple[int, ...]) -> None:
        mirror, latents = self._mirrors[number], self._received(shape)
        mirror.windows[window] = mirror.path.prefill(mirror.windows[window], latents, start_frame, None)

    def _evaluate(
        self,
        number: int,
        window: int,
        start_frame: int,
        step: int,
        shapes: tuple[tuple[int, ...], ...],
        with_video: bool,
        guided: bool,
    ) -> None:
        mirror, groups = self._mirrors[number], self._groups
        assert groups is not None
        sizes = [torch.Size(shape).numel() for shape in shapes]
        parts = self._received((sum(sizes),)).split(sizes)
        if self._branch == 1 and not guided:
            return
        video, action, proprio = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
        state = replace(mirror.windows[window], current_start_frame=start_frame)
        flow, _ = mirror.path.evaluate_branch(state, step, video, action, proprio, with_video=with_video)
        if self._branch == 1 and groups.heads is not None:
            assert flow is not None  # guided evaluations have one
            groups.from_branch(1, flow.contiguous())

    def _let_go(self, number: int, unwanted: int, kept: int | None) -> None:
        mirror = self._mirrors[number]
        state = WindowState() if kept is None else mirror.windows[kept]
        window = mirror.windows.pop(unwanted, None)  # None: there was no memory for it here
        if window is not None:
            mirror.path.let_go(window, state)

    # -- details ------------------------------------------------------------------------------------------------

    def _received(self, shape: tuple[int, ...]) -> Tensor:
        assert self._groups is not None
        return self._groups.from_leader(torch.empty(shape, dtype=self._setup.dtype, device=self._device))

    def _text(self, mirror: _Mirror, texts: tuple[int | None, ...]) -> Prompt:
        key = texts[self._branch]
        assert key is not None
        return mirror.prompts[key]
