"""What a joint_trajectory_controller rejects, drops or crashes on, read from a message that is about to leave."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any


def trajectory_faults(msg: Any, *, absolute: bool = False) -> list[str]:
    """Why a controller would not execute a JointTrajectory as meant; empty for a sound one.

    Args:
        msg: trajectory_msgs/JointTrajectory, or what has its fields.
        absolute: its times count from the header's stamp; otherwise the stamp must be zero (start on receipt): one
            that ends in the past is dropped by the controller.

    Returns:
        One line per kind of fault.
    """
    out = []
    names, points = list(msg.joint_names), list(msg.points)
    stamped = bool(msg.header.stamp.sec or msg.header.stamp.nanosec)
    if stamped != absolute:
        out.append("the header stamp must be zero" if stamped else "the header stamp is zero")
    if not names or len(set(names)) != len(names) or "" in names:
        out.append(f"joint names must be there and differ: {names}")
    if not points:
        return [*out, "there are no points"]
    times_ns = [int(p.time_from_start.sec) * 1_000_000_000 + int(p.time_from_start.nanosec) for p in points]
    if times_ns[0] <= 0:
        out.append("time_from_start of the first point must be positive")
    if any(b <= a for a, b in pairwise(times_ns)):
        out.append("time_from_start must strictly increase")
    if any(len(p.positions) != len(names) for p in points):
        out.append(f"each point needs {len(names)} positions")
    for kind in ("velocities", "accelerations", "effort"):
        sizes = {len(getattr(p, kind)) for p in points}
        if sizes not in ({0}, {len(names)}):
            out.append(f"{kind} must be absent, or complete in every point: sizes {sorted(sizes)}")
    kinds = ("positions", "velocities", "accelerations", "effort")
    values = [v for p in points for kind in kinds for v in getattr(p, kind)]
    if not all(math.isfinite(v) for v in values):
        out.append("every value must be finite")
    if any(v != 0.0 for v in points[-1].velocities):
        out.append("the velocities of the last point must be zero")
    return out
