"""Surfaces made of numbers: turned on a lathe, extruded, or swept along a path. No mesh file ships.

All return ``(vertices [V, 3] in metres, faces [F, 3])``, faces counter-clockwise seen from outside.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Surface = tuple[npt.NDArray[np.float64], npt.NDArray[np.int32]]
Points = Sequence[tuple[float, float]]


def lathe(profile: Points, segments: int = 20) -> Surface:
    """Turn a profile around z.

    Args:
        profile: ``(radius, z)`` in metres; a body is closed when it begins and ends with radius 0. Walked so that the
            outside lies to the right (upwards along an outer wall).
        segments: around the axis.
    """
    radii, heights = np.array(profile, dtype=np.float64).T
    angles = np.arange(segments) * (2 * np.pi / segments)
    rings = [
        np.stack([r * np.cos(angles), r * np.sin(angles), np.full(segments, z)], axis=1)
        if r > 0
        else np.array([[0.0, 0.0, z]])
        for r, z in zip(radii, heights, strict=True)
    ]
    return _skin(rings)


def rounded(radius: float, low: float, high: float, bevel: float = 0.008) -> Points:
    """Profile of a cylinder from z = ``low`` to ``high`` whose edges are rounded."""
    c = bevel * (1 - np.sqrt(0.5))
    return (
        *((0.0, low), (radius - bevel, low), (radius - c, low + c), (radius, low + bevel)),
        *((radius, high - bevel), (radius - c, high - c), (radius - bevel, high), (0.0, high)),
    )


def extrude(outline: Points, low: float, high: float, bevel: float = 0.0) -> Surface:
    """A prism over a convex outline, its upper and lower edge drawn in by ``bevel``.

    Args:
        outline: ``(x, y)`` counter-clockwise, around the origin.
    """
    xy = np.array(outline, dtype=np.float64)
    size = np.abs(xy).max(axis=0)
    small = xy * (1 - bevel / size)
    levels = [(small, low), (xy, low + bevel), (xy, high - bevel), (small, high)] if bevel else [(xy, low), (xy, high)]
    rings = [np.column_stack([p, np.full(len(p), z)]) for p, z in levels]
    return _skin([np.array([[0.0, 0.0, low]]), *rings, np.array([[0.0, 0.0, high]])])


def rounded_rectangle(half_x: float, half_y: float, radius: float, corner: int = 4) -> Points:
    """Outline of a rectangle with round corners, ``corner`` points each."""
    points = []
    for k, (sx, sy) in enumerate(((1, 1), (-1, 1), (-1, -1), (1, -1))):
        for a in np.linspace(0, np.pi / 2, corner) + k * np.pi / 2:
            points.append((sx * (half_x - radius) + radius * np.cos(a), sy * (half_y - radius) + radius * np.sin(a)))
    return points


def sweep(path: npt.NDArray[np.float64], radii: Sequence[float], sides: int = 10, flat: float = 1.0) -> Surface:
    """A tube along a path in the x-z plane, closed at both ends.

    Args:
        path: ``[N, 3]`` with y = 0.
        radii: ``[N]``, in the plane.
        flat: thickness across the plane relative to the radius.
    """
    tangents = np.gradient(path, axis=0)
    tangents /= np.linalg.norm(tangents, axis=1, keepdims=True)
    across = np.array([0.0, 1.0, 0.0])
    angles = np.arange(sides) * (2 * np.pi / sides)
    rings = []
    for point, tangent, radius in zip(path, tangents, radii, strict=True):
        normal = np.cross(tangent, across)
        rings.append(point + radius * (np.outer(np.cos(angles), -normal) + flat * np.outer(np.sin(angles), across)))
    return _skin([path[:1], *rings, path[-1:]])


def _skin(rings: list[npt.NDArray[np.float64]]) -> Surface:
    """Join rings (or single points) of a common size, in order, by triangles."""
    starts = np.cumsum([0, *(len(r) for r in rings)])
    faces = []
    for k, (a, b) in enumerate(itertools.pairwise(rings)):
        n = max(len(a), len(b))
        i = np.arange(n)
        j = (i + 1) % n
        low, high = starts[k], starts[k + 1]
        if len(a) > 1:
            faces.append(np.stack([low + i, low + j, high + (i if len(b) > 1 else 0 * i)], axis=1))
        if len(b) > 1:
            faces.append(np.stack([low + (j if len(a) > 1 else 0 * i), high + j, high + i], axis=1))
    return np.concatenate(rings), np.concatenate(faces).astype(np.int32)
