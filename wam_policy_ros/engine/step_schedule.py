"""Which of the solver's steps evaluate the network; the others reuse the last flow (DreamZero spec 4.6).

Compared with ``full`` all of them are another algorithm with another result, which is why every report names its
evaluations. The static masks, of which eight is the default, and the dynamic rule are what upstream ships.

``dynamic_best`` is for benchmarks only: the steps that the dynamic rule evaluates when every cosine is above 0.95. The
rule decides by the flows, so with other flows it evaluates more; a robot runs ``dynamic``.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

STATIC_MASKS: dict[int, tuple[int, ...]] = {
    5: (0, 1, 2, 7, 12),
    6: (0, 1, 5, 10, 14, 15),
    7: (0, 1, 2, 6, 10, 14, 15),
    8: (0, 1, 2, 6, 10, 13, 14, 15),
}

DYNAMIC_BEST: tuple[int, ...] = (0, 1, 6, 11)
BENCHMARK_ONLY = frozenset({"dynamic_best"})


class StepSchedule(Protocol):
    """One call's decisions. A fresh object per call."""

    def should_run(self, step: int) -> bool: ...

    def evaluated(self, flow: Tensor) -> None:
        """Told the guided video flow ``[B, 16, F, h, w]`` of an evaluation."""
        ...


class StaticSchedule:
    """A fixed set of step indices."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        self.steps = frozenset(steps)

    def should_run(self, step: int) -> bool:
        return step in self.steps

    def evaluated(self, flow: Tensor) -> None:
        pass


class DynamicSchedule:
    """Skip while the last two evaluated video flows point the same way.

    Cosine above 0.95: skip this step and three more; above 0.93: this one and one more; the step after a pause runs.
    """

    def __init__(self) -> None:
        self._countdown = 0
        self._flows: list[Tensor] = []

    def should_run(self, step: int) -> bool:
        if len(self._flows) < 2:
            return True
        if self._countdown > 1:
            self._countdown -= 1
            return False
        if self._countdown == 1:
            self._countdown = 0
            return True
        previous, last = (flow.float().flatten(1) for flow in self._flows)
        similarity = float(F.cosine_similarity(last, previous, dim=1).mean())
        if similarity > 0.95:
            self._countdown = 4
            return False
        if similarity > 0.93:
            self._countdown = 2
            return False
        return True

    def evaluated(self, flow: Tensor) -> None:
        self._flows = [*self._flows, flow][-2:]


def make_schedule(kind: str, evaluations: int, num_steps: int) -> StepSchedule:
    """``kind`` as in ``EngineConfig.schedule``; ``evaluations`` picks the static mask (any other value: all steps)."""
    if kind == "dynamic":
        return DynamicSchedule()
    steps = fixed_steps(kind, evaluations, num_steps)
    assert steps is not None  # only the dynamic rule is not fixed
    return StaticSchedule(steps)


def fixed_steps(kind: str, evaluations: int, num_steps: int) -> tuple[int, ...] | None:
    """The steps a schedule evaluates, or None when the flows decide."""
    if kind == "dynamic":
        return None
    if kind == "dynamic_best" and num_steps == 16:
        return DYNAMIC_BEST
    mask = STATIC_MASKS.get(evaluations) if kind == "static" and num_steps == 16 else None
    return mask if mask is not None else tuple(range(num_steps))


__all__ = [
    "BENCHMARK_ONLY",
    "DYNAMIC_BEST",
    "STATIC_MASKS",
    "DynamicSchedule",
    "StaticSchedule",
    "StepSchedule",
    "fixed_steps",
    "make_schedule",
]
