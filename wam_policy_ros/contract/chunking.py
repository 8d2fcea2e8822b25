"""Which row of a chunk runs when: latency compensation, velocities, the next request. Pure functions.

Times in ns are on the robot's clock (the one of ``Observation.stamp_ns``); ``now_ns`` is when the rows are handed to
the controller, which starts a trajectory on receipt.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import ChunkError, LateChunk
from .interface import ActionChunk

MIN_ROWS = 3
"""A chunk with fewer rows left than this is late (ROS spec 4.6)."""

LEAD_TOLERANCE = 1e-3
"""Part of a step."""


class Run(NamedTuple):
    """Rows that still lie ahead.

    Attributes:
        rows: float64 ``[M, D]``, the last M rows of the chunk.
        time_from_start_s: float64 ``[M]``, strictly increasing, the first at least ``min_lead_s``.
    """

    rows: npt.NDArray[np.float64]
    time_from_start_s: npt.NDArray[np.float64]


def rows_to_run(chunk: ActionChunk, now_ns: int, *, min_lead_s: float, first_of_session: bool) -> Run:
    """Drop the rows whose time has passed.

    Row k is due at ``stamp + (k + 1) * dt``. Rows stay when they are due at ``now + min_lead_s`` or later, so with a
    lead of one step ``ceil(latency / dt)`` rows are dropped.

    Args:
        chunk: as the policy gave it.
        now_ns: time of publication.
        min_lead_s: rows due sooner than this are dropped: the controller could only reach them with a jerk. A
            thousandth of a step of tolerance is given, for stamps are rounded.
        first_of_session: the robot has stood still since the observation, so the plan is as good as new: no row is
            dropped and the first one is due one step from now. So it is after a stop between chunks, too.

    Raises:
        LateChunk: fewer than ``MIN_ROWS`` rows are left.
        ChunkError: the chunk carries no stamp.
    """
    rows = np.asarray(chunk.actions, dtype=np.float64)
    steps = np.arange(1, len(rows) + 1)
    if first_of_session:
        return Run(rows, np.asarray(steps * chunk.dt_s, dtype=np.float64))
    if chunk.stamp_ns is None:
        raise ChunkError("the chunk has no observation stamp", remedy="give Observation.stamp_ns to the policy")
    ahead = np.asarray(steps * chunk.dt_s - (now_ns - chunk.stamp_ns) * 1e-9, dtype=np.float64)
    keep = (ahead >= min_lead_s - LEAD_TOLERANCE * chunk.dt_s) & (ahead > 0.0)
    if (left := int(keep.sum())) < MIN_ROWS:
        raise LateChunk(
            "the chunk came too late",
            got=f"{left} of {len(rows)} rows ahead, {(now_ns - chunk.stamp_ns) * 1e-9:.3f} s after the observation",
            expected=f"at least {MIN_ROWS} rows {min_lead_s:.3f} s ahead or more",
        )
    return Run(rows[keep], ahead[keep])


def velocities(
    rows: npt.NDArray[np.float64],
    times_s: npt.NDArray[np.float64],
    *,
    before: tuple[npt.NDArray[np.float64], float] | None = None,
) -> npt.NDArray[np.float64]:
    """Velocities for every row: central differences, the last row zero.

    Args:
        rows: ``[M, D]``.
        times_s: ``[M]``, strictly increasing.
        before: the row before the first and its time, when there is one; without it the first velocity is the
            difference to the second row.

    Returns:
        ``[M, D]``, unit of the rows per second.
    """
    count = len(rows)
    if before is not None:
        rows = np.concatenate([before[0][None], rows])
        times_s = np.concatenate([[before[1]], times_s])
    slope = np.zeros_like(rows, dtype=np.float64)
    if len(rows) > 1:
        slope[0] = (rows[1] - rows[0]) / (times_s[1] - times_s[0])
    if len(rows) > 2:
        slope[1:-1] = (rows[2:] - rows[:-2]) / (times_s[2:] - times_s[:-2])[:, None]
    return slope[-count:]


def stops_between_chunks(*, latency_s: float | None, horizon: int, dt_s: float, min_lead_s: float) -> bool:
    """True when a chunk computed while the robot moves would always be late, so the robot has to stop and think."""
    return latency_s is not None and latency_s + min_lead_s >= (horizon - MIN_ROWS) * dt_s


def next_request_due(
    origin_ns: int,
    *,
    execute_steps: int,
    dt_s: float,
    latency_s: float | None,
    plan_end_ns: int,
    stops: bool,
) -> int:
    """When to ask the policy again, in ns.

    Args:
        origin_ns: the time that makes row k of the running chunk due at ``origin + (k + 1) * dt``.
        execute_steps: steps from the observation until the next chunk takes over; the rows up to that one are used.
        dt_s: seconds per row.
        latency_s: expected duration of the request, None when nothing has been measured.
        plan_end_ns: time of the last published row.
        stops: see ``stops_between_chunks``; the robot then executes the whole chunk before it looks again, and what it
            looks at must not be older than ``plan_end_ns``: it would show the robot in motion.
    """
    if stops:
        return plan_end_ns
    return origin_ns + round((execute_steps * dt_s - (latency_s or 0.0)) * 1e9)


def committed_weights(due_s: npt.NDArray[np.float64], *, arrival_s: float, end_s: float) -> npt.NDArray[np.float64]:
    """How firmly rows of the running plan hold the next chunk: 1 until the chunk is expected, then falling smoothly to
    0 where the plan ends.

    Args:
        due_s: ``[K]`` when the rows are due, from the observation.
        arrival_s: when the chunk is expected to take over.
        end_s: when the running plan ends.
    """
    span = max(end_s - arrival_s, 1e-9)
    u = np.clip((due_s - arrival_s) / span, 0.0, 1.0)
    return np.asarray(1.0 - u * u * (3.0 - 2.0 * u))
