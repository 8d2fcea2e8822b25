"""The last door before the robot. Pure; a chunk comes out as it went in, or not at all.

``SafetyGate.admit`` looks at what the policy gave, ``violations`` at what is about to leave: joint targets after row
selection and joining, with the interpolation the controller will use.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .errors import UnsafeChunk
from .hermite import Cubics, Floats
from .interface import PolicySpec
from .limits import JointLimits
from .plan import Plan

TOLERANCE = 1e-6
"""Relative: limits are met up to rounding."""


@dataclass(frozen=True)
class SafetyGate:
    """Refuses chunks that may not reach the robot.

    The checks run in this order: shape, dtype, step time, finiteness.

    Attributes:
        horizon, action_dim: rows and columns of a chunk.
        dt_s: seconds between rows.
    """

    horizon: int
    action_dim: int
    dt_s: float

    @classmethod
    def for_policy(cls, spec: PolicySpec) -> SafetyGate:
        return cls(horizon=spec.horizon, action_dim=spec.action_dim, dt_s=spec.dt_s)

    def admit(self, rows: object, *, dt_s: float) -> npt.NDArray[np.float64]:
        """Check a whole chunk.

        Args:
            rows: ``[horizon, action_dim]``, any floating dtype.
            dt_s: the chunk's own step time.

        Returns:
            The rows as float64, unchanged in value.

        Raises:
            UnsafeChunk: names the first check that failed.
        """
        expected = (self.horizon, self.action_dim)
        if not isinstance(rows, np.ndarray):
            raise UnsafeChunk("the chunk is not an array", got=type(rows).__name__, expected=f"{expected} floats")
        if rows.shape != expected:
            raise UnsafeChunk(
                "the chunk has the wrong shape", got=rows.shape, expected=f"{expected} (rows, action columns)"
            )
        if not np.issubdtype(rows.dtype, np.floating):
            raise UnsafeChunk("the chunk has the wrong dtype", got=rows.dtype, expected="floating point")
        if not np.isclose(dt_s, self.dt_s, rtol=1e-6, atol=0.0):
            raise UnsafeChunk(
                "the chunk's step time is not the policy's", got=f"{dt_s:.6f} s", expected=f"{self.dt_s:.6f} s"
            )
        finite = np.isfinite(rows)
        if not finite.all():
            row, column = np.argwhere(~finite)[0]
            raise UnsafeChunk(
                "the chunk is not finite",
                got=f"{rows[row, column]} in row {row}, column {column} ({int((~finite).sum())} such values)",
                expected="finite numbers only",
            )
        return rows.astype(np.float64)


@dataclass(frozen=True)
class Violation:
    """One limit that a plan would break.

    Attributes:
        kind: ``first step``, ``position``, ``speed`` or ``acceleration``, in the order of the checks.
        joint: its name.
        row: row of the plan that the motion leads to.
        value, limit: joint units, per s, per s^2.
    """

    kind: str
    joint: str
    row: int
    value: float
    limit: float

    @property
    def excess(self) -> float:
        """How far beyond the limit: 0.5 is one and a half times. Infinite for a position: slowness does not cure it."""
        return np.inf if self.kind == "position" else self.value / self.limit - 1.0

    def text(self) -> str:
        return f"{self.kind} of {self.joint} at row {self.row}: {self.value:.4g}, limit {self.limit:.4g}"


def first_step(rows: Floats, expected: Floats, limits: JointLimits) -> Violation | None:
    """The worst joint whose first row lies too far from where the robot is told to be at that time.

    Args:
        rows: ``[M, J]`` joint targets of the chunk, before blending: blending would hide a jump.
        expected: ``[J]``.
    """
    return _worst("first step", np.abs(rows[:1] - expected), limits.max_first_step, limits.names)


def outside(rows: Floats, limits: JointLimits, *, by: float = 0.0) -> Violation | None:
    """The joint, grippers aside, whose rows are farthest outside its positions, if by more than ``by`` (joint units).

    Args:
        rows: ``[M, J]``.
    """
    beyond = np.maximum(rows - limits.position_max, limits.position_min - rows)
    beyond[:, limits.gripper] = -np.inf
    row, column = np.unravel_index(np.argmax(beyond), beyond.shape)
    if beyond[row, column] <= by:
        return None
    value = rows[row, column]
    limit = limits.position_max[column] if value > limits.position_max[column] else limits.position_min[column]
    return Violation("position", limits.names[column], int(row), float(value), float(limit))


def row_speed(rows: Floats, times_s: Floats, limits: JointLimits) -> Violation | None:
    """The fastest joint, grippers aside, if a chunk's own rows are further apart than the limit of speed allows.

    Asked before blending, which would water a chunk that is too fast down for a while.

    Args:
        rows: ``[M, J]``.
        times_s: ``[M]``.
    """
    if len(rows) < 2:
        return None
    limit = np.where(limits.gripper, np.inf, limits.velocity)
    return _worst("speed", np.abs(np.diff(rows, axis=0)) / np.diff(times_s)[:, None], limit, limits.names)


def violation(plan: Plan, limits: JointLimits, start_velocity: Floats | None = None) -> Violation | None:
    """The first limit, in the order position, speed, acceleration, that a plan would break; None when it is sound.

    Between the rows the motion is a cubic (a line for a plan without velocities), and its extremes are computed, not
    sampled. On lines the acceleration is the change of speed from one row to the next over the time between their
    middles. Grippers: rows only, and speed; see ``contract.joining`` for why.

    Args:
        plan: its first row is the robot's state at the moment of publication. It may lie outside the limits of
            position: the robot stands there. It may come back, over as many rows as it takes, and not go further out.
        limits: of its joints.
        start_velocity: ``[J]`` commanded velocity at the moment of publication; for plans without velocities.
    """
    cubics = Cubics.through(plan.times_s, plan.positions, plan.velocities)
    low, high = cubics.range()
    low, high = np.minimum(low, plan.positions[1:]), np.maximum(high, plan.positions[1:])
    low[:, limits.gripper] = high[:, limits.gripper] = plan.positions[1:, limits.gripper]
    slack = TOLERANCE * np.maximum(1.0, np.abs(plan.positions[0]))
    least = np.minimum(limits.position_min, plan.positions[0]) - slack
    most = np.maximum(limits.position_max, plan.positions[0]) + slack
    for value, out, limit in ((high, high > most, limits.position_max), (low, low < least, limits.position_min)):
        if out.any():
            row, column = np.argwhere(out)[0]
            at = float(value[row, column])
            return Violation("position", limits.names[column], int(row), at, float(limit[column]))
    return too_sharp(plan, limits, start_velocity)


def too_sharp(plan: Plan, limits: JointLimits, start_velocity: Floats | None = None) -> Violation | None:
    """As ``violation``, but speed and acceleration only."""
    cubics = Cubics.through(plan.times_s, plan.positions, plan.velocities)
    fast = _worst("speed", cubics.highest_speed(), limits.velocity, limits.names)
    return fast or _worst(
        "acceleration", _acceleration(plan, cubics, start_velocity), limits.acceleration, limits.names
    )


def _acceleration(plan: Plan, cubics: Cubics, start_velocity: Floats | None) -> Floats:
    if plan.velocities is not None:
        return cubics.highest_acceleration()
    h, still = cubics.h[:, 0], np.zeros((1, cubics.v.shape[1]))
    speed = np.concatenate([still if start_velocity is None else start_velocity[None], cubics.v, still])
    between = np.concatenate([h[:1], (h[1:] + h[:-1]) / 2, h[-1:]])
    return np.asarray(np.abs(np.diff(speed, axis=0)) / between[:, None])


def _worst(kind: str, values: Floats, limit: Floats, names: tuple[str, ...]) -> Violation | None:
    """``values``: ``[M, J]``, at least one of each."""
    part = values / limit
    row, column = np.unravel_index(np.argmax(part), part.shape)
    if part[row, column] <= 1.0 + TOLERANCE:
        return None
    return Violation(kind, names[column], int(row), float(values[row, column]), float(limit[column]))
