"""The last door before the robot. Pure; a chunk comes out as it went in, or not at all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .errors import UnsafeChunk
from .interface import PolicySpec


@dataclass(frozen=True)
class SafetyGate:
    """Refuses chunks that may not reach the robot.

    The checks run in this order: shape, dtype, step time, finiteness. Limits of position, speed and first step
    belong after them.

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
