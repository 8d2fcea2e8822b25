"""What reaches the robot: the running plan and the hold. Nothing else sends motion. Knows no rclpy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from wam_policy_ros.contract.limits import JointLimits
from wam_policy_ros.contract.plan import Plan

from .messages import Trajectory

HOLD_S = 0.2
"""How far ahead the hold point lies, in seconds, unless the robot is too fast to stop so soon."""

BRAKING = 0.9
"""Part of the limit of acceleration that a hold uses: the controller may begin it a little later than it was sent."""


class TrajectoryOutput:
    """Streams trajectories to a controller.

    A trajectory has strictly increasing times and either complete velocities, the last one zero, or none. All joints
    of one moment are handed over in one call. Thread-safe: a hold may come from a watchdog's thread.

    Args:
        send: hands a trajectory to the controller.
        names: joints, in column order.
        with_velocities: see ``control.publish_velocities``.

    Attributes:
        holds: number of holds sent.
    """

    def __init__(self, send: Callable[[Trajectory], None], names: Sequence[str], *, with_velocities: bool) -> None:
        self._send, self.names, self.with_velocities = send, tuple(names), with_velocities
        self._lock = threading.RLock()
        self._plan: Plan | None = None
        self._limits: JointLimits | None = None
        self._holds = False
        self._rest_ns = 0
        self.holds = 0

    @property
    def plan(self) -> Plan | None:
        """What the robot was told last, None when nothing was sent since ``forget``."""
        return self._plan

    @property
    def rest_ns(self) -> int:
        """Since when the robot stands still, or will; 0 when we never moved it."""
        return self._rest_ns

    def use(self, limits: JointLimits) -> None:
        """Of acceleration: they say how soon a hold may stop the robot."""
        self._limits = limits

    def forget(self, now_ns: int) -> None:
        """At activation: somebody else may have moved the robot, so the last command says nothing any more.

        A robot that still brakes from our last hold goes on braking.
        """
        with self._lock:
            # While the node was inactive nobody watched its clock, which may have been set back by hours.
            braking_ns = (
                0 if self._plan is None or not self._holds else int(self._plan.times_ns[-1] - self._plan.times_ns[0])
            )
            self._rest_ns = min(self._rest_ns, now_ns + (braking_ns or round(HOLD_S * 1e9)))
            self._plan, self._holds = None, False

    def shift_clock(self, by_ns: int) -> None:
        """The node's clock jumped; the robot executes the plan on its own."""
        with self._lock:
            if self._plan is not None:
                self._plan = self._plan.shifted(by_ns)
            if self._rest_ns:
                self._rest_ns += by_ns

    def publish(self, plan: Plan) -> None:
        """Send a plan. Its first row, the robot's state at the moment of publication, stays here."""
        with self._lock:
            self._hand_over(plan)
            self._holds = False

    def hold(self, now_ns: int) -> bool:
        """Stop: one trajectory of one point at the commanded position, zero velocity. Sent once, then silence.

        A robot too fast to be back at that position within its limits of acceleration stops as much further along as
        these need. Nothing is sent when the robot is not moving because of us: nothing was commanded, or the plan has
        ended. A hold is not refused by any limit.

        Returns:
            True when a trajectory was sent.
        """
        with self._lock:
            if self._holds or self._plan is None or now_ns >= self._rest_ns:
                return False
            self._hand_over(self._braked(self._plan, now_ns))
            self._holds = True
            self.holds += 1
            return True

    def _hand_over(self, plan: Plan) -> None:
        v = None if plan.velocities is None else plan.velocities[1:]
        self._send(Trajectory(self.names, plan.positions[1:], plan.times_s[1:], v, stamp_ns=int(plan.times_ns[0])))
        self._plan, self._rest_ns = plan, plan.end_ns

    def _braked(self, plan: Plan, now_ns: int) -> Plan:
        """A cubic from (q, v) to (q + b*v*T, 0) begins with the deceleration (4 - 6b) v/T; with b = 1/2 it is v/T
        throughout, the least there is. So: b as small as the limits allow, T longer when b = 1/2 is not enough."""
        q, v = plan.state_at(now_ns)
        times = np.array([now_ns, now_ns + round(HOLD_S * 1e9)])
        if plan.velocities is None:
            return Plan(times, np.stack([q, q]))
        target, time_s = q.copy(), HOLD_S
        if self._limits is not None:
            a, arm = BRAKING * self._limits.acceleration, ~self._limits.gripper
            time_s = max(HOLD_S, float((np.abs(v) / a)[arm].max(initial=0.0)))
            with np.errstate(divide="ignore", invalid="ignore"):
                b = np.nan_to_num((4.0 - a * time_s / np.abs(v)) / 6.0, nan=0.0, posinf=0.0, neginf=0.0)
            target[arm] += (np.clip(b, 0.0, 0.5) * v * time_s)[arm]
            target[~arm] += (v * time_s / 3)[~arm]  # without coming back
            least, most = np.minimum(self._limits.position_min, q), np.maximum(self._limits.position_max, q)
            target = np.clip(target, least, most)
        times[1] = now_ns + round(time_s * 1e9)
        return Plan(times, np.stack([q, target]), np.stack([v, np.zeros_like(v)]))


class JointCommandStream:
    """Joint positions one by one, at the control rate, for a robot that takes no trajectories (Isaac Sim).

    Args:
        output: whose plan is streamed.
        send: hands names, positions and velocities of this moment to the robot.
    """

    def __init__(
        self,
        output: Callable[[], Plan | None],
        send: Callable[[npt.NDArray[np.float64], npt.NDArray[np.float64]], None],
    ) -> None:
        self._output, self._send = output, send
        self._done: Plan | None = None

    def on_tick(self, now_ns: int) -> None:
        """Send what is commanded now; after the plan's end once more, then nothing."""
        plan = self._output()
        if plan is None or plan is self._done:
            return
        if now_ns >= plan.end_ns:
            self._done = plan
        self._send(*plan.state_at(now_ns))
