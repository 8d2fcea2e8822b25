"""Rows as an arm executes them, the same behind every door, and one name for many of them. Pure functions."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from .errors import UnsafeChunk

Rows = npt.NDArray[np.float64]

GRIPPER_THRESHOLD = 0.5
"""The gripper is told to open or to close, nothing between, as clients of DROID's policies do."""


def carried(values: Rows) -> Rows:
    """Rounded to float32, as the OpenPI protocol carries them, in float64; zero has no sign."""
    return np.asarray(values, dtype=np.float64).astype(np.float32).astype(np.float64) + 0.0


def as_executed(rows: Rows) -> Rows:
    """What an arm with a gripper is told by rows ``[.., 8]``: joints as carried, the last column 0 open or 1 closed.

    Raises:
        UnsafeChunk: a number that is not finite; a gripper would take it for "open".
    """
    out = carried(rows)
    if not np.isfinite(out).all():
        raise UnsafeChunk("rows that are not finite cannot be executed", got=rows, expected="finite numbers")
    out[..., -1] = out[..., -1] > GRIPPER_THRESHOLD
    return out


def sha256_of(rows: Rows) -> str:
    """Of rows as executed ``[N, D]``: float64 little-endian, row by row."""
    return hashlib.sha256(np.ascontiguousarray(rows, dtype="<f8").tobytes()).hexdigest()
