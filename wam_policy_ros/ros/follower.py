"""Joints that do exactly what they are told, by the rules of joint_trajectory_controller (ROS spec 3.2): the simulated
follower of ``wam_clip_robot``, and the strict oracle of tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from wam_policy_ros.contract.hermite import evaluate


class Follower:
    """Follows JointTrajectory messages: cubic with velocities, straight without.

    A new trajectory replaces the old one, which is forgotten; the motion goes on from where it was commanded to be at
    that moment (``interpolate_from_desired_state``). A zero stamp starts on receipt; with another one the points count
    from it, and those that have passed are skipped. Joints that are not named stay, or the message is rejected.

    Args:
        names: joints.
        home: ``[len(names)]`` start position.
        partial: messages need not name every joint (``allow_partial_joints_goal``).
        goal_tolerance: trajectories are rejected that begin with a state further than this (joint units) from the one
            commanded now, whatever time they give it; None: not looked at, as the controller does by default.

    Attributes:
        accepted, rejected: number of messages.
    """

    def __init__(
        self, names: Sequence[str], home: Sequence[float], *, partial: bool = True, goal_tolerance: float | None = None
    ) -> None:
        self.names = tuple(names)
        position = np.array(home, dtype=np.float64)
        if position.shape != (len(self.names),):
            raise ValueError(f"{len(self.names)} joints, {position.shape} home values")
        self._partial, self._tolerance = partial, goal_tolerance
        self._times_s: npt.NDArray[np.float64] = np.zeros(1)
        self._positions: npt.NDArray[np.float64] = position[None]
        self._velocities: npt.NDArray[np.float64] | None = None
        self.accepted = self.rejected = 0

    def on_trajectory(self, msg: Any, now_s: float) -> None:
        """Take a trajectory.

        Args:
            msg: trajectory_msgs/JointTrajectory, or what has its fields.
            now_s: the controller's clock.

        Raises:
            ValueError: what a controller rejects, drops, or would be broken by.
        """
        try:
            self._take(msg, now_s)
        except ValueError:
            self.rejected += 1
            raise
        self.accepted += 1

    def _take(self, msg: Any, now_s: float) -> None:
        names = list(msg.joint_names)
        unknown = [n for n in names if n not in self.names]
        if unknown or len(set(names)) != len(names) or (not self._partial and len(names) != len(self.names)):
            raise ValueError(f"joints {names}: unknown {unknown}, or named twice, or not all of {list(self.names)}")
        if not msg.points:
            raise ValueError("no points")
        sizes = {len(p.positions) for p in msg.points}, {len(p.velocities) for p in msg.points}
        if sizes[0] != {len(names)} or sizes[1] not in ({0}, {len(names)}):
            raise ValueError(f"{len(names)} joints, but positions and velocities of sizes {sizes}")
        stamp_s = msg.header.stamp.sec + msg.header.stamp.nanosec * 1e-9
        after_s = np.array([p.time_from_start.sec + p.time_from_start.nanosec * 1e-9 for p in msg.points])
        if (np.diff(after_s) <= 0).any() or after_s[0] < 0:
            raise ValueError(f"times do not increase strictly from zero: {after_s}")
        times_s = (stamp_s or now_s) + after_s
        ahead = times_s > now_s
        if not ahead.any():
            raise ValueError(f"the trajectory ends {now_s - times_s[-1]:.3f} s in the past")
        columns = [self.names.index(n) for n in names]
        start, speed = self.state_at(now_s)
        positions = np.tile(start, (len(msg.points), 1))
        positions[:, columns] = [list(p.positions) for p in msg.points]
        velocities = None
        if sizes[1] != {0}:
            velocities = np.zeros_like(positions)
            velocities[:, columns] = [list(p.velocities) for p in msg.points]
            if velocities[-1].any():
                raise ValueError("the last velocity is not zero")
            velocities = np.concatenate([speed[None], velocities[ahead]])
        if not np.isfinite(positions).all() or (velocities is not None and not np.isfinite(velocities).all()):
            raise ValueError("not finite")
        if self._tolerance is not None and np.abs(positions[ahead][0] - start).max() > self._tolerance:
            raise ValueError(f"the first point is {np.abs(positions[ahead][0] - start).max():.3f} away")
        self._times_s = np.concatenate([[now_s], times_s[ahead]])
        self._positions, self._velocities = np.concatenate([start[None], positions[ahead]]), velocities

    def rebase(self, now_s: float) -> None:
        """Make ``now_s`` the new zero of time."""
        self._times_s = self._times_s - now_s

    def sample(self, times_s: npt.ArrayLike) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Positions and velocities ``[N, len(names)]`` at times not before the last message."""
        return evaluate(self._times_s, self._positions, self._velocities, times_s)

    def state_at(self, now_s: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """``[len(names)]`` commanded position and velocity."""
        q, v = self.sample(now_s)
        return q[0], v[0]

    def at(self, now_s: float) -> npt.NDArray[np.float64]:
        """``[len(names)]`` position at a time."""
        return self.state_at(now_s)[0]
