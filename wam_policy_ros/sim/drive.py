"""What the simulated arm is told: trajectories by the rules of joint_trajectory_controller, or targets one by one.

Knows no ROS: messages are read by their fields, times are ns on the simulator's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from wam_policy_ros.contract.plan import Plan

from .errors import InvalidTarget

ARM = tuple(f"panda_joint{i}" for i in range(1, 8))
FINGERS = ("panda_finger_joint1", "panda_finger_joint2")
GRIPPER = "panda_gripper"
"""The gripper as policies count it, 0 open .. 1 closed, beside the fingers in m."""

SNAP_NS = 1_000
"""A tick so close to a point of a trajectory gets exactly that point."""

_GRIP = len(ARM)
Array = npt.NDArray[np.float64]
Faults = Callable[..., list[str]]


class Next(Enum):
    """May the next tick come? ``GO``: it has a command. ``WAIT``: it must be waited for. ``REST``: nothing is under
    way, the arm stands."""

    GO, WAIT, REST = "go", "wait", "rest"


class Drive:
    """The commands of one arm with its gripper.

    A trajectory replaces what was there from its stamp on, zero: from its receipt on; until then the old one goes on.
    Points that have passed are skipped, joints that are not named stay, at the end the arm holds.

    Args:
        finger_open_m: position of a finger when open; closed is 0.
        dt_ns: length of a tick.
        ticks: in lock-step a trajectory is good for so many ticks, if it does not end before.
        faults: why a controller would not execute a JointTrajectory, see ``ros.trajectory_faults``.
    """

    def __init__(self, *, finger_open_m: float, dt_ns: int, ticks: int, faults: Faults) -> None:
        self._open_m, self._dt_ns, self._ticks, self._faults = finger_open_m, dt_ns, ticks, faults
        self._plans: list[Plan] = []
        self._leads_gripper = self._single = False
        self._target, self._gripper = np.zeros(_GRIP), 0.0
        self._good_until_ns = 0

    def begin(self, joints_rad: Array, now_ns: int) -> None:
        """A new episode: the arm stands at ``joints_rad`` ``[7]``, the gripper is open, nothing is under way."""
        self._plans = [Plan.standing(np.append(joints_rad, 0.0), now_ns)]
        self._leads_gripper = self._single = False
        self._target, self._gripper = np.array(joints_rad, dtype=np.float64), 0.0
        self._good_until_ns = now_ns

    def on_trajectory(self, msg: Any, now_ns: int) -> None:
        """Take a trajectory_msgs/JointTrajectory.

        Raises:
            InvalidTarget: what a controller rejects, drops or would be broken by; the old one goes on.
        """
        stamp_ns = _ns(msg.header.stamp)
        if faults := self._faults(msg, absolute=stamp_ns != 0):
            raise InvalidTarget("trajectory", got="; ".join(faults), expected="one that a controller executes")
        columns, sources, scales, offsets = self._columns(list(msg.joint_names))
        start_ns = max(stamp_ns or now_ns, now_ns)
        times_ns = (stamp_ns or now_ns) + np.array([_ns(p.time_from_start) for p in msg.points], dtype=np.int64)
        ahead = times_ns > start_ns
        if not ahead.any():
            raise InvalidTarget(
                "trajectory", got=f"its end is {(start_ns - times_ns[-1]) * 1e-9:.3f} s in the past", expected="later"
            )
        q, v = self._state_at(start_ns)
        positions = np.tile(q, (len(times_ns), 1))
        positions[:, columns] = offsets + scales * np.array([p.positions for p in msg.points])[:, sources]
        velocities = None
        if len(msg.points[0].velocities):
            velocities = np.zeros_like(positions)
            velocities[:, columns] = scales * np.array([p.velocities for p in msg.points])[:, sources]
            velocities = np.concatenate([v[None], velocities[ahead]])
        plan = Plan(
            np.concatenate([[start_ns], times_ns[ahead]]), np.concatenate([q[None], positions[ahead]]), velocities
        )
        self._plans = [p for p in self._plans if p.times_ns[0] < start_ns] + [plan]
        # Those that are over before the present one begins are not asked again.
        while len(self._plans) > 1 and self._plans[1].times_ns[0] <= now_ns:
            self._plans.pop(0)
        self._leads_gripper, self._single = _GRIP in columns, False
        self._good_until_ns = min(start_ns + self._ticks * self._dt_ns, plan.end_ns)

    def on_joint_command(self, names: Sequence[str], positions: Sequence[float], now_ns: int) -> None:
        """Targets from the next tick on, as of a sensor_msgs/JointState; joints that are not named stay.

        Raises:
            InvalidTarget: unknown joints, not finite, or not one position per name; nothing changes.
        """
        if not names or len(names) != len(positions) or not np.isfinite(np.asarray(positions, dtype=np.float64)).all():
            raise InvalidTarget(
                "joint command", got=f"{list(names)}: {list(positions)}", expected="a finite position for each name"
            )
        columns, sources, scales, offsets = self._columns(list(names))
        values = self._state_at(now_ns)[0]
        values[columns] = offsets + scales * np.array(positions, dtype=np.float64)[sources]
        self._target = values[:_GRIP]
        if _GRIP in columns:
            self._gripper = float(values[_GRIP])
        self._plans = [Plan.standing(values, now_ns)]
        self._leads_gripper, self._single = False, True
        self._good_until_ns = now_ns + self._dt_ns

    def on_gripper(self, closed: float) -> None:
        """0 open .. 1 closed, from the next tick on. Does not count as a tick's command in lock-step.

        Raises:
            InvalidTarget: outside of 0..1.
        """
        if not 0.0 <= closed <= 1.0:
            raise InvalidTarget("gripper command", got=closed, expected="0 (open) to 1 (closed)")
        self._gripper, self._leads_gripper = float(closed), False

    def target(self, at_ns: int) -> tuple[Array, float]:
        """``[7]`` rad and gripper, for the tick that ends at a time."""
        values = self._state_at(at_ns)[0]
        return values[:_GRIP], float(np.clip(values[_GRIP], 0.0, 1.0))

    def next(self, now_ns: int) -> Next:
        """In lock-step: what is to become of the tick that begins now."""
        if now_ns < self._good_until_ns:
            return Next.GO
        return Next.WAIT if self._single or now_ns < self._plans[-1].end_ns else Next.REST

    def give_up(self, now_ns: int) -> None:
        """Nothing came for too long: what is under way goes on to its end."""
        self._good_until_ns, self._single = max(self._plans[-1].end_ns, now_ns), False

    # -- inside -------------------------------------------------------------------------------------------------

    def _state_at(self, at_ns: int) -> tuple[Array, Array]:
        """``[8]`` positions and velocities."""
        plan = next((p for p in reversed(self._plans) if p.times_ns[0] <= at_ns), self._plans[0])
        q, v = plan.state_at(at_ns)
        k = int(np.argmin(np.abs(plan.times_ns - at_ns)))
        if abs(int(plan.times_ns[k]) - at_ns) <= SNAP_NS:
            q = plan.positions[k].copy()
        if not self._leads_gripper:
            q[_GRIP], v[_GRIP] = self._gripper, 0.0
        return q, v

    def _columns(self, names: list[str]) -> tuple[list[int], list[int], Array, Array]:
        """Columns of our 8 that are named, where in the message, and how its unit becomes ours."""
        known = {**{n: i for i, n in enumerate(ARM)}, **dict.fromkeys((*FINGERS, GRIPPER), _GRIP)}
        if unknown := [n for n in names if n not in known]:
            raise InvalidTarget("unknown joints", got=unknown, expected=f"of {[*ARM, *FINGERS, GRIPPER]}")
        sources: dict[int, int] = {}
        for k, name in enumerate(names):  # both fingers do the same: the first one counts
            sources.setdefault(known[name], k)
        metres = [names[k] in FINGERS for k in sources.values()]
        scales = np.where(metres, -1.0 / self._open_m, 1.0)
        return list(sources), list(sources.values()), scales, np.where(metres, 1.0, 0.0)


def _ns(time: Any) -> int:
    nanoseconds = time.nanosec
    return int(time.sec) * 1_000_000_000 + int(nanoseconds)
