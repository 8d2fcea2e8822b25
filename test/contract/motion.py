"""A small robot for tests of what leaves: limits, and what a controller makes of a plan at 500 Hz."""

from __future__ import annotations

import numpy as np

from wam_policy_ros.contract.hermite import evaluate
from wam_policy_ros.contract.limits import JointLimits
from wam_policy_ros.contract.plan import Plan

DT = 1 / 15
T0 = 1_800_000_000_000_000_000
NAMES = ("a", "b", "finger")


def limits(velocity: float = 2.0, acceleration: float = 10.0, finger_speed: float = 0.2) -> JointLimits:
    """Two joints of +-2.9 rad and a finger of 0 to 0.04 m."""
    return JointLimits(
        NAMES,
        position_min=np.array([-2.9, -2.9, 0.0]),
        position_max=np.array([2.9, 2.9, 0.04]),
        velocity=np.array([velocity, velocity, finger_speed]),
        acceleration=np.array([acceleration, acceleration, np.inf]),
        gripper=np.array([False, False, True]),
        max_first_step=np.array([0.2, 0.2, np.inf]),
    )


def times_s(count: int = 24, first: float = DT) -> np.ndarray:
    return first + np.arange(count) * DT


def rows(*columns: np.ndarray | float, count: int = 24) -> np.ndarray:
    """``[count, 3]``."""
    return np.stack([np.broadcast_to(np.asarray(c, dtype=np.float64), (count,)) for c in columns], axis=1)


def at_500_hz(plan: Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions, velocities, accelerations ``[N, J]``; accelerations as differences of the velocities."""
    t = np.arange(0.0, plan.times_s[-1] + 0.01, 0.002)
    q, v = evaluate(plan.times_s, plan.positions, plan.velocities, t)
    return q, v, np.diff(v, axis=0) / 0.002


def broken_at_500_hz(plan: Plan, allowed: JointLimits) -> list[str]:
    """Which limits a controller would break, judged by samples alone."""
    q, v, a = at_500_hz(plan)
    arm = ~allowed.gripper
    low = np.minimum(allowed.position_min, plan.positions[0])
    high = np.maximum(allowed.position_max, plan.positions[0])
    found = []
    if ((q < low - 1e-5) | (q > high + 1e-5))[:, arm].any():
        found.append("position")
    if (np.abs(v) > allowed.velocity * (1 + 1e-5)).any():
        found.append("speed")
    if plan.velocities is not None and (np.abs(a) > allowed.acceleration * (1 + 1e-5))[:, arm].any():
        found.append("acceleration")
    return found
