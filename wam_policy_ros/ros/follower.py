"""Joints that do exactly what they are told: the simulated follower of ``wam_clip_robot``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


class Follower:
    """Follows JointTrajectory messages by linear interpolation, from the position at the moment of receipt.

    A new trajectory replaces the old one, as joint_trajectory_controller does; joints that are not named stay.

    Args:
        names: joints.
        home: ``[len(names)]`` start position.
    """

    def __init__(self, names: Sequence[str], home: Sequence[float]) -> None:
        self.names = tuple(names)
        self._position = np.array(home, dtype=np.float64)
        if self._position.shape != (len(self.names),):
            raise ValueError(f"{len(self.names)} joints, {self._position.shape} home values")
        self._times_s = np.zeros(1)
        self._points = self._position[None]

    def on_trajectory(self, msg: Any, now_s: float) -> None:
        """Take a trajectory that starts now.

        Raises:
            ValueError: what a controller rejects: unknown joint, no points, times not strictly increasing, not finite.
        """
        unknown = [n for n in msg.joint_names if n not in self.names]
        if unknown or not msg.points:
            raise ValueError(f"unknown joints {unknown}" if unknown else "no points")
        start = self.at(now_s)
        columns = [self.names.index(n) for n in msg.joint_names]
        points = np.tile(start, (len(msg.points) + 1, 1))
        points[1:, columns] = [p.positions for p in msg.points]
        after_s = [p.time_from_start.sec + p.time_from_start.nanosec * 1e-9 for p in msg.points]
        times_s = now_s + np.array([0.0, *after_s])
        if not np.isfinite(points).all() or (np.diff(times_s) <= 0).any():
            raise ValueError("points are not finite, or times do not increase strictly from zero")
        self._times_s, self._points = times_s, points

    def rebase(self, now_s: float) -> None:
        """Make ``now_s`` the new zero of time."""
        self._times_s = self._times_s - now_s

    def at(self, now_s: float) -> npt.NDArray[np.float64]:
        """``[len(names)]`` position at a time."""
        return np.array([np.interp(now_s, self._times_s, column) for column in self._points.T])
