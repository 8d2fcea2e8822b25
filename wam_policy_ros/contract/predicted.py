"""For which moments the predicted frames of a call were predicted. Pure functions.

A block of the network is one stretch of time: its rows are that stretch's targets, its frames what is seen meanwhile.
The published networks were trained with frames evenly over the rows' time (DreamZero spec 1.1: 24 rows, 8 frames three
steps apart). A checkpoint that says at which moments its calls look back was trained with exactly the frames that the
next call looks at, each of them encoded several times; its rows reach further than its frames (``train/samples.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from .interface import PolicySpec

KEY = "video_steps"
"""In ``PolicySpec.details``: what ``trained_steps`` gives, of checkpoints that say how they were trained."""


def trained_steps(frame_offsets: Sequence[int], block_steps: int, count: int) -> list[int] | None:
    """Control steps behind the newest observed frame at which ``count`` predicted frames are due, or None when they are
    not what the next call looks at.

    Args:
        frame_offsets: at which calls look, from their newest frame; block_steps: from one call to the next.
    """
    due = [block_steps + offset for offset in frame_offsets]
    if count % len(due) or min(due) <= 0:
        return None
    return [step for step in due for _ in range(count // len(due))]


def due_steps(spec: PolicySpec, count: int) -> list[float]:
    """Control steps behind the newest observed frame at which each of ``count`` predicted frames is due."""
    known = spec.details.get(KEY)
    if isinstance(known, list | tuple) and len(known) == count:
        return [float(step) for step in known]
    return [(k + 1) * spec.horizon / count for k in range(count)]
