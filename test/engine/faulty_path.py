"""Faults where a test wants them: a ``StepPath`` around another one, and a device that can be lost.

policy, path = make_faulty(config)
path.arm(Fault("evaluate", "nan", nth=3))       # the next call that comes by there
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from test.engine.tiny_policy import make_policy
from wam_policy_ros.contract.errors import NotDeterministic
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.policy import DreamZeroPolicy
from wam_policy_ros.engine.session import WindowState
from wam_policy_ros.engine.step_path import Denoised, StepPath

ILLEGAL = "CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA` to enable ..."
ERRORS: dict[str, Callable[[], Exception]] = {
    "memory": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 6.00 GiB. GPU 0 has ..."),
    "library memory": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    "kernel": lambda: RuntimeError("CUDA error: invalid configuration argument"),
    "sticky": lambda: getattr(torch, "AcceleratorError", RuntimeError)(ILLEGAL),
    "undetermined": lambda: NotDeterministic("aten::cumsum", "sums or writes in no fixed order on a GPU"),
}
"""Kind of fault -> what is raised. Besides them: ``nan`` (at ``evaluate`` of the action, ``video`` of the video,
``prefill`` of the window's new rows, ``text`` of a prompt's states) and ``hang`` until ``FaultyPath.released``."""

POINTS = ("text", "first frame", "encode", "prefill", "evaluate", "decode")
"""Where a call comes by: ``first frame`` when its window begins, ``encode`` when it goes on; ``evaluate`` often.
``video`` is a point for ``nan`` only: after the n-th step of the solver."""


@dataclass(frozen=True)
class Fault:
    """One fault. ``nth``: of the times that the point is passed in a call, from 1."""

    point: str
    kind: str
    nth: int = 1


class Device:
    """Stands for a GPU. ``ask`` is what ``DeviceWatch`` asks. ``sticks``: a ``sticky`` fault is the end of it."""

    def __init__(self) -> None:
        self.dead, self.sticks = False, True
        self.asked = 0

    def ask(self) -> None:
        self.asked += 1
        if self.dead:
            raise ERRORS["sticky"]()


@dataclass
class _Call:
    """One call: its fault, how often it has passed each point, whether its next evaluation is to be poisoned."""

    fault: Fault | None
    passed: dict[str, int] = field(default_factory=dict)
    poison: bool = False


class FaultyPath:
    """See ``StepPath``. Without a fault it does what ``inner`` does, bit for bit; whoever asks what it is
    (``isinstance``) is told what ``inner`` is. Calls may run inside one another, where the outer asks ``cancelled``.

    Attributes:
        device: lost with the first ``sticky`` fault; from then on everything fails that would run there.
        hanging: a call hangs; released: set, it ends; hang_s: as it does by itself after so long, unless that is 0.
        struck: faults that happened.
        choose: asked at the beginning of every call which fault it shall have; by default the one that is armed.
    """

    def __init__(self, inner: StepPath, device: Device) -> None:
        self.inner, self.device = inner, device
        self.hanging, self.released, self.hang_s = threading.Event(), threading.Event(), 0.0
        self.struck: list[Fault] = []
        self.armed: Fault | None = None
        self.choose: Callable[[], Fault | None] = self._armed
        self._call = self._over = _Call(None, {"text": 2})
        self._drafts: dict[int, _Call] = {}
        self.prompts = _Prompts(self)

    def arm(self, fault: Fault) -> None:
        self.armed = fault

    def _armed(self) -> Fault | None:
        fault, self.armed = self.armed, None
        return fault

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return type(self.inner)

    def passes(self, point: str) -> bool:
        """Whether what runs here has to be poisoned; raises or hangs when that is the fault."""
        if point == "text" and self._call.passed.get("text", 0) >= 2:  # the instruction; the negative one was second
            self._call = _Call(self.choose())
        call, fault = self._call, self._call.fault
        if self.device.dead:
            self._call = self._over
            raise ERRORS["sticky"]()
        call.passed[point] = call.passed.get(point, 0) + 1
        if fault is None or (fault.point, fault.nth) != (point, call.passed[point]):
            return False
        self.struck.append(fault)
        if fault.kind == "hang":
            self.hanging.set()
            assert self.released.wait(self.hang_s or 60) or self.hang_s, "nobody released it"
            return False
        if fault.kind == "nan":
            return True
        self._call = self._over
        self.device.dead = fault.kind == "sticky" and self.device.sticks
        raise ERRORS[fault.kind]()

    # -- StepPath ---------------------------------------------------------------------------------------------------

    def encode_clip(self, clip: Tensor) -> Tensor:
        poisoned = self.passes("encode")
        out = self.inner.encode_clip(clip)
        return out * float("nan") if poisoned else out

    def encode_first(self, frame: Tensor) -> Any:
        self.passes("first frame")
        return self.inner.encode_first(frame)

    def restarted(self, *args: Any) -> WindowState:
        return self._mine(self.inner.restarted(*args))

    def continued(self, *args: Any) -> WindowState:
        return self._mine(self.inner.continued(*args))

    def _mine(self, draft: WindowState) -> WindowState:
        """Before its prefill the step asks, and another call may run."""
        self._drafts[id(draft)] = self._call
        return draft

    def prefill(self, draft: WindowState, latents: Tensor, start_frame: int, probe: Any) -> WindowState:
        self._call = self._drafts.pop(id(draft), self._call)
        poisoned = self.passes("prefill")
        begin = draft.cached if draft.slot is not None else draft.cond.length if draft.cond is not None else 0
        out = self.inner.prefill(draft, latents, start_frame, probe)
        if poisoned:
            _poison_window(out, begin)
        return out

    def draw_noise(self, seed: int, latents: Tensor) -> Any:
        return self.inner.draw_noise(seed, latents)

    def denoise(self, draft: WindowState, noise: Any, proprio: Tensor, **options: Any) -> Denoised:
        asked, given, call = options.pop("cancelled"), options.pop("probe"), self._call

        def cancelled() -> bool:
            wanted = bool(asked is not None and asked())
            self._call = call  # another one may have run meanwhile
            call.poison |= self.passes("evaluate")  # until the next evaluation: the plain path asks at every step
            return wanted

        def probe(name: str, value: Tensor) -> None:
            # What the paths report is what they go on with.
            if name.endswith("action_flow_cond") and call.poison:
                call.poison = False
                value.fill_(float("nan"))
            if name.startswith("after_step") and name.endswith("video") and self.passes("video"):
                value.fill_(float("nan"))
            if given is not None:
                given(name, value)

        return self.inner.denoise(draft, noise, proprio, cancelled=cancelled, probe=probe, **options)

    def let_go(self, unwanted: WindowState, kept: WindowState) -> None:
        self._drafts.pop(id(unwanted), None)
        self.inner.let_go(unwanted, kept)

    def wait(self) -> None:
        self.passes("decode")
        self.inner.wait()

    def __getattr__(self, name: str) -> Any:
        """What no call comes by."""
        return getattr(self.inner, name)


class _Prompts:
    def __init__(self, path: FaultyPath) -> None:
        self._path = path

    def __call__(self, ids: Tensor, mask: Tensor, between: Callable[[], None] | None = None) -> Any:
        path = self._path
        poisoned, call = path.passes("text"), path._call

        def asked() -> None:
            assert between is not None
            between()
            path._call = call  # another one may have run meanwhile

        prompt = path.inner.prompts(ids, mask, asked if between else None)
        if poisoned:
            _poison_keys(prompt.keys)
        return prompt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._path.inner.prompts, name)


def _poison_keys(keys: Any) -> None:
    """A prompt's keys as an encoder would leave them that had computed NaN: kept for whoever asks next."""
    if isinstance(keys, list):
        for layer in keys:
            layer.k.fill_(float("nan"))
    else:
        keys.k.fill_(float("nan"))


def _poison_window(state: WindowState, begin: int) -> None:
    """The rows behind ``begin`` of every layer and branch: keys and values of what this call observed."""
    if state.slot is not None:
        for k, v in zip(state.slot.k, state.slot.v, strict=True):
            k[:, begin : state.cached].fill_(float("nan"))
            v[:, begin : state.cached].fill_(float("nan"))
        return
    for window in (state.cond, state.uncond):
        for layer in (window.past() or []) if window is not None else []:
            layer.k[:, min(begin, layer.k.shape[1] - 1) :].fill_(float("nan"))
            layer.v[:, min(begin, layer.v.shape[1] - 1) :].fill_(float("nan"))


def make_faulty(config: EngineConfig, **options: Any) -> tuple[DreamZeroPolicy, FaultyPath]:
    """A tiny policy on a device that can be lost."""
    device = Device()
    policy = make_policy(config, ask_device=device.ask, **options)
    policy.path = path = FaultyPath(policy.path, device)
    return policy, path
