"""A small moving scene seen from three places: a table, a bowl that stands still and a block that circles.

Simple shaded polygons through a pinhole camera; enough to have three consistent views that change over time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

TABLE_HALF_M = 0.6
BLOCK_HALF_M = 0.05
PERIOD_S = 8.0

_WALL, _TABLE = (196, 201, 208), (150, 111, 74)
_BLOCK_FACES = ((200, 40, 40), (150, 28, 28), (170, 34, 34), (120, 22, 22), (225, 60, 60))
_BOWL = (58, 95, 160)


@dataclass(frozen=True)
class View:
    """A pinhole camera: position and target in m (table centre at the origin, z up), focal length in image widths."""

    eye: tuple[float, float, float]
    target: tuple[float, float, float]
    focal: float = 0.9


VIEWS = (
    View((-1.1, -1.0, 0.9), (0.0, 0.0, 0.0)),
    View((-1.1, 1.0, 0.9), (0.0, 0.0, 0.0)),
    View((0.0, 0.01, 1.1), (0.0, 0.0, 0.0), 0.7),
)


def render(
    t_s: float, *, height: int = 180, width: int = 320, views: Sequence[View] = VIEWS
) -> list[npt.NDArray[np.uint8]]:
    """The scene at a time: one uint8 ``[height, width, 3]`` RGB image per view."""
    angle = 2 * np.pi * t_s / PERIOD_S
    block = np.array([0.3 * np.cos(angle), 0.3 * np.sin(angle), 0.0])
    return [_render_one(view, block, angle, height, width) for view in views]


def _render_one(
    view: View, block: npt.NDArray[np.float64], angle: float, height: int, width: int
) -> npt.NDArray[np.uint8]:
    image = np.full((height, width, 3), _WALL, np.uint8)
    h = TABLE_HALF_M
    table = np.array([[-h, -h, 0], [h, -h, 0], [h, h, 0], [-h, h, 0]], dtype=np.float64)
    _fill(image, view, table, _TABLE)
    ring = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    bowl = np.stack([0.12 * np.cos(ring) - 0.05, 0.12 * np.sin(ring) + 0.05, np.zeros(24)], axis=1)
    _fill(image, view, bowl, _BOWL)
    _fill(image, view, bowl * [0.8, 0.8, 1] + [-0.01, 0.01, 0.0], tuple(min(255, c + 60) for c in _BOWL))
    for points, colour in sorted(_faces(block, angle), key=lambda f: -_distance(view, f[0])):
        _fill(image, view, points, colour)
    return image


def _faces(centre: npt.NDArray[np.float64], angle: float) -> list[tuple[npt.NDArray[np.float64], tuple[int, ...]]]:
    b, c, s = BLOCK_HALF_M, np.cos(angle), np.sin(angle)
    corners = np.array([[-b, -b], [b, -b], [b, b], [-b, b]]) @ np.array([[c, s], [-s, c]]) + centre[:2]
    low = np.column_stack([corners, np.zeros(4)])
    high = np.column_stack([corners, np.full(4, 2 * b)])
    sides = [np.array([low[i], low[(i + 1) % 4], high[(i + 1) % 4], high[i]]) for i in range(4)]
    return [*zip(sides, _BLOCK_FACES[:4], strict=True), (high, _BLOCK_FACES[4])]


def _axes(view: View) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    eye = np.array(view.eye)
    forward = np.array(view.target) - eye
    forward /= np.linalg.norm(forward)
    right = np.cross(forward, [0.0, 0.0, 1.0])
    right /= np.linalg.norm(right)
    return eye, np.stack([right, np.cross(forward, right), forward])


def _distance(view: View, points: npt.NDArray[np.float64]) -> float:
    return float(np.linalg.norm(points.mean(0) - np.array(view.eye)))


def _fill(image: npt.NDArray[np.uint8], view: View, points: npt.NDArray[np.float64], colour: tuple[int, ...]) -> None:
    eye, axes = _axes(view)
    x, y, depth = (axes @ (points - eye).T).clip([[-1e3], [-1e3], [0.05]])
    height, width = image.shape[:2]
    scale = view.focal * width
    pixels = np.stack([width / 2 + scale * x / depth, height / 2 + scale * y / depth], axis=1)
    cv2.fillPoly(image, [np.round(pixels * 16).astype(np.int32)], colour, lineType=cv2.LINE_AA, shift=4)
