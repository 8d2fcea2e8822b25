"""What a trajectory controller does between two points: cubic with velocities, straight without (ROS spec 3.2).

Arrays are ``[M, J]``, M knots of J joints; ``times`` ``[M]`` in s, strictly increasing. Pure functions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Cubics(NamedTuple):
    """One cubic per segment and joint: ``p + v*u + c*u**2 + d*u**3`` for u in s from the segment's start.

    Attributes:
        h: ``[M-1, 1]`` length of the segments in s.
        p, v, c, d: ``[M-1, J]``.
    """

    h: Floats
    p: Floats
    v: Floats
    c: Floats
    d: Floats

    @classmethod
    def through(cls, times: Floats, positions: Floats, velocities: Floats | None) -> Cubics:
        """Hermite cubics, or straight lines when there are no velocities."""
        h = np.diff(times)[:, None]
        slope = np.diff(positions, axis=0) / h
        if velocities is None:
            zero = np.zeros_like(slope)
            return cls(h, positions[:-1], slope, zero, zero)
        v0, v1 = velocities[:-1], velocities[1:]
        return cls(h, positions[:-1], v0, (3 * slope - 2 * v0 - v1) / h, (v0 + v1 - 2 * slope) / h**2)

    def position(self, u: Floats) -> Floats:
        """``u`` broadcasts against ``[M-1, J]``."""
        return self.p + u * (self.v + u * (self.c + u * self.d))

    def velocity(self, u: Floats) -> Floats:
        return self.v + u * (2 * self.c + u * 3 * self.d)

    def highest_speed(self) -> Floats:
        """``[M-1, J]`` largest absolute velocity inside each segment."""
        with np.errstate(divide="ignore", invalid="ignore"):
            turn = np.nan_to_num(-self.c / (3 * self.d), nan=0.0, posinf=0.0, neginf=0.0)
        at = (np.zeros_like(self.h), self.h, np.clip(turn, 0.0, self.h))
        return np.asarray(np.max([np.abs(self.velocity(u)) for u in at], axis=0))

    def highest_acceleration(self) -> Floats:
        """``[M-1, J]`` largest absolute acceleration inside each segment; it is linear in time."""
        return np.maximum(np.abs(2 * self.c), np.abs(2 * self.c + 6 * self.d * self.h))

    def range(self) -> tuple[Floats, Floats]:
        """``[M-1, J]`` lowest and highest position inside each segment."""
        # Where the velocity v + 2c u + 3d u**2 is zero. The form that divides by q is stable for small d.
        with np.errstate(divide="ignore", invalid="ignore"):
            root = np.sqrt(np.maximum(self.c**2 - 3 * self.d * self.v, 0.0))
            q = -(self.c + np.where(self.c < 0, -root, root))
            turns = [np.nan_to_num(t, nan=0.0, posinf=0.0, neginf=0.0) for t in (q / (3 * self.d), self.v / q)]
        at = [np.zeros_like(self.h), self.h, *(np.clip(t, 0.0, self.h) for t in turns)]
        values = np.array([self.position(u) for u in at])
        return values.min(axis=0), values.max(axis=0)


def evaluate(times: Floats, positions: Floats, velocities: Floats | None, at: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Positions and velocities ``[len(at), J]`` at given times; at rest at the ends beyond both ends."""
    t = np.atleast_1d(np.asarray(at, dtype=np.float64))
    if len(times) == 1:
        q = np.repeat(positions, len(t), axis=0)
        return q, np.zeros_like(q)
    cubics = Cubics.through(times, positions, velocities)
    i = np.clip(np.searchsorted(times, t, side="right") - 1, 0, len(times) - 2)
    part = Cubics(*(field[i] for field in cubics))
    u = np.clip(t - times[i], 0.0, part.h[:, 0])[:, None]
    q, v = part.position(u), part.velocity(u)
    outside = (t < times[0]) | (t >= times[-1])
    v[outside] = 0.0
    return q, v


def minmod(times: Floats, positions: Floats) -> Floats:
    """``[M, J]`` velocities with which the cubics neither overshoot a knot nor exceed 1.5 times a segment's slope; zero
    at both ends."""
    out = np.zeros_like(positions)
    slope = np.diff(positions, axis=0) / np.diff(times)[:, None]
    left, right = slope[:-1], slope[1:]
    same = np.sign(left) == np.sign(right)
    out[1:-1] = np.where(same, np.sign(left) * np.minimum(np.abs(left), np.abs(right)), 0.0)
    return out
