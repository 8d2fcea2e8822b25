"""Episodes of the expert, disturbed on purpose: what a network learns recovery from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .expert import Action, Expert
from .tasks import Task
from .world import RATE_HZ, Frame, World

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Noise:
    """What is done to the expert's targets before they are executed.

    Attributes:
        joint_rad: standard deviation per joint of a slowly wandering error (Ornstein-Uhlenbeck).
        correlation_s: its memory; 0: none, each tick another error.
        burst: chance per tick that a burst begins: the arm is pushed off its way.
        burst_ticks: shortest and longest.
        burst_rad: largest push per joint and tick.
        burst_grip: chance that a burst also turns the gripper's order round.
    """

    joint_rad: float = 0.006
    correlation_s: float = 0.15
    burst: float = 0.03
    burst_ticks: tuple[int, int] = (3, 7)
    burst_rad: float = 0.02
    burst_grip: float = 0.1

    @classmethod
    def none(cls) -> Noise:
        return cls(joint_rad=0.0, burst=0.0)


@dataclass(frozen=True)
class DemoStep:
    """One tick of a demonstration.

    Attributes:
        frame: what was seen before it.
        label: what the expert does there.
        executed: what the arm was told: the label, disturbed.
        burst: a burst was on.
    """

    frame: Frame
    label: Action
    executed: Action
    burst: bool


class Disturbance:
    """The noise of one episode, from a seed."""

    def __init__(self, noise: Noise, seed: int) -> None:
        self._noise = noise
        self._rng = np.random.Generator(np.random.PCG64([seed, 7919]))
        self._error = noise.joint_rad * self._rng.standard_normal(7)
        self._left, self._push, self._turned = 0, np.zeros(7), False

    @property
    def bursting(self) -> bool:
        return self._left > 0

    def apply(self, action: Action) -> Action:
        """The action as it is executed in this tick; call it once per tick."""
        n, rng = self._noise, self._rng
        keep = float(np.exp(-1.0 / (RATE_HZ * n.correlation_s))) if n.correlation_s else 0.0
        self._error = keep * self._error + np.sqrt(1 - keep**2) * n.joint_rad * rng.standard_normal(7)
        self._left = max(0, self._left - 1)
        if not self._left and rng.random() < n.burst:
            self._left = int(rng.integers(n.burst_ticks[0], n.burst_ticks[1] + 1))
            self._push = rng.uniform(-n.burst_rad, n.burst_rad, 7)
            self._turned = bool(rng.random() < n.burst_grip)
        joints = action.joints_rad + self._error + (self._push if self._left else 0.0)
        return Action(joints, 1.0 - action.gripper if self._left and self._turned else action.gripper)


def demonstrate(
    world: World,
    expert: Expert,
    seed: int,
    task: str | Task,
    *,
    noise: Noise | None = None,
    max_ticks: int = 150,
    after: int = 8,
    images: bool = True,
) -> Iterator[DemoStep]:
    """One episode, tick by tick; ``world.outcome`` tells afterwards whether it succeeded.

    Args:
        seed: of the scene and of the noise.
        noise: None: as ``Noise()``.
        max_ticks: the end without success.
        after: ticks that follow the success.
        images: False: frames without pictures.

    Raises:
        UnknownTask, SceneError: see ``World.reset``.
    """
    disturbance = Disturbance(noise or Noise(), seed)
    frame, left = world.reset(seed, task, images=images), after
    for _ in range(max_ticks):
        if world.outcome.success:
            left -= 1
            if left < 0:
                return
        label = expert.act(world)
        executed = disturbance.apply(label)
        yield DemoStep(frame, label, executed, disturbance.bursting)
        frame = world.step(executed.joints_rad, executed.gripper, images=images)
