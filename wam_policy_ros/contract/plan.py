"""What the robot was told last, and where that puts it at any moment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .hermite import Floats, evaluate


@dataclass(frozen=True)
class Plan:
    """A trajectory on the robot's clock, its start included. Before the start and after the end the robot stands.

    Attributes:
        times_ns: int64 ``[M]``, when each row is due; the first is the moment of publication.
        positions: ``[M, J]`` joint units.
        velocities: ``[M, J]`` joint units per second, or None: the controller then interpolates linearly.
    """

    times_ns: npt.NDArray[np.int64]
    positions: Floats
    velocities: Floats | None = None

    @classmethod
    def standing(cls, position: Floats, now_ns: int) -> Plan:
        """A robot that does not move. ``position``: ``[J]``."""
        return cls(np.array([now_ns], dtype=np.int64), position[None].astype(np.float64))

    @property
    def end_ns(self) -> int:
        """When the last row is reached."""
        return int(self.times_ns[-1])

    @property
    def times_s(self) -> Floats:
        """``[M]`` seconds since the first row. float64 cannot hold ns since 1970, differences it can."""
        return np.asarray((self.times_ns - self.times_ns[0]) * 1e-9, dtype=np.float64)

    def sample(self, times_ns: npt.ArrayLike) -> tuple[Floats, Floats]:
        """Positions and velocities ``[N, J]`` that are commanded at these times, as the controller interpolates."""
        at = (np.atleast_1d(np.asarray(times_ns, dtype=np.int64)) - self.times_ns[0]) * 1e-9
        return evaluate(self.times_s, self.positions, self.velocities, at)

    def at(self, now_ns: int) -> Floats:
        """``[J]`` commanded position."""
        return self.sample(now_ns)[0][0]

    def state_at(self, now_ns: int) -> tuple[Floats, Floats]:
        """``[J]`` commanded position and velocity."""
        q, v = self.sample(now_ns)
        return q[0], v[0]

    def shifted(self, by_ns: int) -> Plan:
        """The same on a clock that was set by ``by_ns``."""
        return Plan(self.times_ns + by_ns, self.positions, self.velocities)
