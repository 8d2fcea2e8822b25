"""What reaches the robot: the running plan and the hold. Nothing else publishes trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from wam_policy_ros.contract.chunking import velocities

from .messages import trajectory

HOLD_S = 0.2
"""How far ahead the hold point lies, in seconds."""


@dataclass(frozen=True)
class Plan:
    """The trajectory sent last, on the node's clock.

    Attributes:
        positions: ``[M, J]`` joint units.
        times_ns: int64 ``[M]``, when each row is due.
    """

    positions: npt.NDArray[np.float64]
    times_ns: npt.NDArray[np.int64]

    @property
    def end_ns(self) -> int:
        return int(self.times_ns[-1])

    def at(self, now_ns: int) -> npt.NDArray[np.float64]:
        """``[J]`` commanded position: linear between the rows; the last row after the end."""
        t = (self.times_ns - now_ns).astype(np.float64)  # differences first: float64 cannot hold ns since 1970
        return np.array([np.interp(0.0, t, column) for column in self.positions.T])


class TrajectoryOutput:
    """Streams trajectories to a controller's topic.

    A trajectory has a zero header stamp (it starts on receipt), strictly increasing times, and either complete
    velocities, the last one zero, or none.

    Args:
        publisher: lifecycle publisher of trajectory_msgs/JointTrajectory; silent while the node is inactive.
        names: joints, in column order.
        with_velocities: see ``control.publish_velocities``.
    """

    def __init__(self, publisher: Any, names: Sequence[str], *, with_velocities: bool) -> None:
        self._publisher, self._names, self._with_velocities = publisher, tuple(names), with_velocities
        self._plan: Plan | None = None
        self._holds = False

    @property
    def plan(self) -> Plan | None:
        """What the robot was told last, None when nothing was sent since ``forget``."""
        return self._plan

    def forget(self) -> None:
        """At activation: somebody else may have moved the robot, so the last command says nothing any more."""
        self._plan, self._holds = None, False

    def shift_clock(self, by_ns: int) -> None:
        """The node's clock jumped; the robot executes the plan on its own."""
        if self._plan is not None:
            self._plan = Plan(self._plan.positions, self._plan.times_ns + by_ns)

    def moving(self, now_ns: int) -> bool:
        """True while the robot executes something we sent."""
        return self._plan is not None and now_ns < self._plan.end_ns

    def publish(
        self,
        positions: npt.NDArray[np.float64],
        times_s: npt.NDArray[np.float64],
        now_ns: int,
        *,
        before: npt.NDArray[np.float64] | None = None,
    ) -> None:
        """Send a plan.

        Args:
            positions: ``[M, J]`` joint units.
            times_s: ``[M]`` time_from_start.
            now_ns: the node's clock.
            before: ``[J]`` the row before the first, already due; makes the first velocity a central difference.
        """
        speed = None
        if self._with_velocities:
            step_s = times_s[1] - times_s[0] if len(times_s) > 1 else times_s[0]
            speed = velocities(positions, times_s, before=None if before is None else (before, times_s[0] - step_s))
        self._publisher.publish(trajectory(self._names, positions, times_s, speed))
        # The controller starts from where it was commanded to be; for our first trajectory that is not known.
        start = positions[0] if self._plan is None else self._plan.at(now_ns)
        times_ns = now_ns + np.rint(np.concatenate([[0.0], times_s]) * 1e9).astype(np.int64)
        self._plan = Plan(np.concatenate([start[None], positions]), times_ns)
        self._holds = False

    def hold(self, now_ns: int, measured: npt.NDArray[np.float64] | None = None) -> bool:
        """Stop: one trajectory to the last commanded position, zero velocity. Sent once, then silence.

        Args:
            now_ns: the node's clock.
            measured: ``[J]`` where the joints are; used only when nothing was ever commanded. Without it nothing is
                sent in that case: the robot is not moving because of us, and a position is never made up.

        Returns:
            True when a trajectory was sent.
        """
        if self._holds:
            return False
        position = self._plan.at(now_ns) if self._plan is not None else measured
        if position is None:
            return False
        times = np.array([HOLD_S])
        still = np.zeros((1, len(position))) if self._with_velocities else None
        self._publisher.publish(trajectory(self._names, position[None], times, still))
        self._plan = Plan(position[None], np.array([now_ns + round(HOLD_S * 1e9)]))
        self._holds = True
        return True
