"""Where fingers go to take a thing, from its true pose however it lies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from . import objects

Array = npt.NDArray[np.float64]

# The hand's underside is 37 mm above the tcp; this much stays free above the thing.
_UNDERSIDE_M, _ROOM_M = 0.0375, 0.007
_LOWEST_M = 0.018


@dataclass(frozen=True)
class Grasp:
    """A grasp from above.

    Attributes:
        point_m: ``[3]`` where the tcp goes.
        yaw_rad: heading of the hand, within 90 degrees of straight ahead.
        top_m: height of the thing above the table.
        slack_m: how far the hand may be off in the direction in which the fingers open.
        reach_m: and across to that.
    """

    point_m: Array
    yaw_rad: float
    top_m: float
    slack_m: float
    reach_m: float


def grasp_of(kind: str, position: Array, rotation: Array) -> Grasp:
    """The grasp for a thing of this kind.

    Args:
        position, rotation: ``[3]``, ``[3, 3]`` of the thing in the world.
    """
    if kind == "apple":
        return Grasp(position + np.array([0.0, 0.0, 0.008]), 0.0, position[2] + objects.APPLE_RADIUS_M, 0.010, 0.012)
    return _mug(position, rotation) if kind == "mug" else _book(position, rotation)


def _mug(position: Array, rotation: Array) -> Grasp:
    axis, h, r = rotation[:, 2], objects.MUG_HEIGHT_M, objects.MUG_RADIUS_M
    middle = position + axis * h / 2
    if abs(axis[2]) > 0.7:
        top = middle[2] + h / 2
        # Half of the handle's heading: the fingers keep clear of it and the wrist turns little.
        yaw = half_circle(np.arctan2(rotation[1, 0], rotation[0, 0])) / 2
        point = np.array([middle[0], middle[1], top - _UNDERSIDE_M + _ROOM_M])
        return Grasp(point, yaw, top, 0.008, 0.012)
    # On its side: by the handle when that is up, else across the foot, where the handle is not in the way.
    yaw, handle = half_circle(np.arctan2(axis[1], axis[0])), rotation[:, 0]
    if handle[2] > 0.5:
        point = position + axis * objects.MUG_HANDLE_M[2] + handle * (objects.MUG_HANDLE_M[0] + 0.010)
        return Grasp(point, yaw, position[2] + r + 0.021, 0.015, 0.008)
    point = position + axis * 0.006
    return Grasp(np.array([point[0], point[1], max(point[2], _LOWEST_M)]), yaw, position[2] + r, 0.008, 0.008)


def _book(position: Array, rotation: Array) -> Grasp:
    half = np.array(objects.BOOK_HALF_M)
    upright = int(np.argmax(np.abs(rotation[2])))
    across = min((k for k in range(3) if k != upright), key=lambda k: half[k])
    top = position[2] + half[upright]
    # The hand's y axis goes across: its x axis is a quarter turn further.
    yaw = half_circle(np.arctan2(rotation[1, across], rotation[0, across]) + np.pi / 2)
    height = max(top - _UNDERSIDE_M + _ROOM_M, _LOWEST_M)
    return Grasp(
        np.array([position[0], position[1], height]), yaw, top, float(np.clip(0.037 - half[across], 0.004, 0.013)), 0.02
    )


def half_circle(angle: float) -> float:
    """A direction without sense, within (-90, 90] degrees."""
    return float((angle + np.pi / 2) % np.pi - np.pi / 2)
