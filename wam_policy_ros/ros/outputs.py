"""What reaches the robot: the running plan and the hold. Nothing else publishes trajectories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wam_policy_ros.contract.chunking import velocities

from .messages import Trajectory

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
        send: hands a trajectory to the controller.
        names: joints, in column order.
        with_velocities: see ``control.publish_velocities``.
    """

    def __init__(self, send: Callable[[Trajectory], None], names: Sequence[str], *, with_velocities: bool) -> None:
        self._send, self._names, self._with_velocities = send, tuple(names), with_velocities
        self._plan: Plan | None = None
        self._holds = False
        self._rest_ns = 0

    @property
    def plan(self) -> Plan | None:
        """What the robot was told last, None when nothing was sent since ``forget``."""
        return self._plan

    @property
    def rest_ns(self) -> int:
        """Since when the robot stands still, or will; 0 when we never moved it."""
        return self._rest_ns

    def forget(self, now_ns: int) -> None:
        """At activation: somebody else may have moved the robot, so the last command says nothing any more.

        A robot that still brakes from our last hold goes on braking.
        """
        self._plan, self._holds = None, False
        # While the node was inactive nobody watched its clock, which may have been set back by hours.
        self._rest_ns = min(self._rest_ns, now_ns + round(HOLD_S * 1e9))

    def shift_clock(self, by_ns: int) -> None:
        """The node's clock jumped; the robot executes the plan on its own."""
        if self._plan is not None:
            self._plan = Plan(self._plan.positions, self._plan.times_ns + by_ns)
        if self._rest_ns:
            self._rest_ns += by_ns

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
        self._send(Trajectory(self._names, positions, times_s, speed))
        # The controller starts from where it was commanded to be; for our first trajectory that is not known.
        start = positions[0] if self._plan is None else self._plan.at(now_ns)
        times_ns = now_ns + np.rint(np.concatenate([[0.0], times_s]) * 1e9).astype(np.int64)
        self._plan, self._rest_ns = Plan(np.concatenate([start[None], positions]), times_ns), int(times_ns[-1])
        self._holds = False

    def hold(self, now_ns: int) -> bool:
        """Stop: one trajectory to the commanded position, zero velocity. Sent once, then silence.

        Nothing is sent when the robot is not moving because of us: nothing was commanded, or the plan has ended.

        Returns:
            True when a trajectory was sent.
        """
        if self._holds or self._plan is None or now_ns >= self._rest_ns:
            return False
        position = self._plan.at(now_ns)[None]
        still = np.zeros_like(position) if self._with_velocities else None
        self._send(Trajectory(self._names, position, np.array([HOLD_S]), still))
        self._rest_ns = now_ns + round(HOLD_S * 1e9)
        self._plan = Plan(position, np.array([self._rest_ns]))
        self._holds = True
        return True
