"""The things on the table: a mug with a handle, two apples, two books and a square plate."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np

from .meshes import lathe, sweep
from .shapes import THING_BITS, Geom, capsule_between, collider, surface, visible_box

MUG_RADIUS_M, MUG_HEIGHT_M, MUG_WALL_M = 0.0315, 0.075, 0.0035
MUG_HANDLE_M = (MUG_RADIUS_M - 0.002, 0.0, 0.52 * MUG_HEIGHT_M)
"""Middle of the handle's bow."""
APPLE_RADIUS_M = 0.032
BOOK_HALF_M = (0.060, 0.019, 0.036)  # along the spine, thickness, height; it stands on its long edge
PLATE_HALF_M, PLATE_HEIGHT_M = 0.065, 0.012

Disc = tuple[float, float, float]


@dataclass(frozen=True)
class Thing:
    """What is known about a thing by its make.

    Attributes:
        kind: ``mug``, ``apple``, ``book`` or ``plate``.
        rest_m: height of its origin above the table at rest.
        discs: ``(x, y, radius)`` in its own frame that together cover its outline, for placing things apart.
    """

    kind: str
    rest_m: float
    discs: tuple[Disc, ...]


_MUG: tuple[Disc, ...] = ((0.0, 0.0, MUG_RADIUS_M), (0.047, 0.0, 0.012))
_APPLE: tuple[Disc, ...] = ((0.0, 0.0, APPLE_RADIUS_M),)
_BOOK: tuple[Disc, ...] = ((-0.045, 0.0, 0.024), (0.0, 0.0, 0.024), (0.045, 0.0, 0.024))
_PLATE: tuple[Disc, ...] = ((0.0, 0.0, 0.080),)

THINGS: dict[str, Thing] = {
    "mug": Thing("mug", 0.0, _MUG),
    "red_apple": Thing("apple", APPLE_RADIUS_M, _APPLE),
    "green_apple": Thing("apple", APPLE_RADIUS_M, _APPLE),
    "blue_book": Thing("book", BOOK_HALF_M[2], _BOOK),
    "yellow_book": Thing("book", BOOK_HALF_M[2], _BOOK),
    "plate": Thing("plate", 0.0, _PLATE),
}

MATERIALS: dict[str, dict[str, Any]] = {
    "mug": {"rgba": [0.97, 0.97, 0.95, 1], "specular": 0.6, "shininess": 0.7},
    "red_apple": {"rgba": [0.78, 0.09, 0.08, 1], "specular": 0.5, "shininess": 0.6},
    "green_apple": {"rgba": [0.45, 0.72, 0.14, 1], "specular": 0.5, "shininess": 0.6},
    "blue_book": {"rgba": [0.10, 0.26, 0.66, 1], "specular": 0.2, "shininess": 0.3},
    "yellow_book": {"rgba": [0.92, 0.72, 0.08, 1], "specular": 0.2, "shininess": 0.3},
    "plate": {"rgba": [0.20, 0.24, 0.28, 1], "specular": 0.4, "shininess": 0.5},
}
"""Look of each thing; its colour varies a little from seed to seed."""
_STALK, _PAPER = "stalk", "paper"
_FIXED: dict[str, dict[str, Any]] = {
    _STALK: {"rgba": [0.27, 0.17, 0.08, 1], "specular": 0.1},
    _PAPER: {"rgba": [0.93, 0.90, 0.82, 1], "specular": 0.05},
}


def add_things(spec: mujoco.MjSpec) -> None:
    """Add a free body per entry of ``THINGS``, each named as its entry."""
    for name, look in {**MATERIALS, **_FIXED}.items():
        spec.add_material(name=name, **look)
    for name, thing in THINGS.items():
        body = spec.worldbody.add_body(name=name, pos=[0.4, 0, thing.rest_m])
        body.add_freejoint(name=name)
        _MAKERS[thing.kind](spec, body, name)


def _mug(spec: mujoco.MjSpec, body: mujoco.MjsBody, name: str) -> None:
    """Origin at the middle of its foot, handle towards +x. Hollow: its wall is sixteen boxes."""
    r, h, wall = MUG_RADIUS_M, MUG_HEIGHT_M, MUG_WALL_M
    profile = [(0.0, 0.0), (r - 0.006, 0.0), (r - 0.001, 0.005), (r, 0.012), (r, h - 0.001), (r - 0.0015, h)]
    profile += [(r - wall, h - 0.001), (r - wall, 0.008), (r - wall - 0.004, 0.004), (0.0, 0.004)]
    surface(spec, body, f"{name}_cup", lathe(profile, 28), name)
    t = np.linspace(-np.pi / 2 - 0.25, np.pi / 2 + 0.25, 12)
    path = np.array(MUG_HANDLE_M) + np.stack([0.021 * np.cos(t), 0 * t, 0.0225 * np.sin(t)], axis=1)
    surface(spec, body, f"{name}_handle", sweep(path, [0.0036] * len(t), sides=10, flat=1.5), name)
    sides = 16
    half_width = (r - wall / 2) * np.tan(np.pi / sides)
    for k in range(sides):
        a = 2 * np.pi * k / sides
        # Not down to the table: it stands on its foot, and contacts cost time.
        centre = ((r - wall / 2) * np.cos(a), (r - wall / 2) * np.sin(a), h / 2 + 0.0015)
        size = (wall / 2, half_width, h / 2 - 0.0015)
        collider(body, Geom.mjGEOM_BOX, size, 0.012, THING_BITS, pos=centre, quat=(np.cos(a / 2), 0, 0, np.sin(a / 2)))
    # A square foot: four contacts that stay where they are, a round one rocks with some versions of the engine.
    foot = (r - 0.001) * np.sqrt(0.5)
    collider(body, Geom.mjGEOM_BOX, (foot, foot, 0.002), 0.05, THING_BITS, pos=(0, 0, 0.002))
    knots = path[[0, 3, 6, 8, 11]]
    for start, end in itertools.pairwise(knots):
        capsule_between(body, start, end, 0.0042, 0.005, THING_BITS)


def _apple(spec: mujoco.MjSpec, body: mujoco.MjsBody, name: str) -> None:
    r = APPLE_RADIUS_M
    t = np.linspace(0.0, np.pi, 13)
    # Dimples at both poles, widest a little above the middle.
    radius = r * np.sin(t) * (1.0 + 0.05 * np.cos(t))
    height = -r * np.cos(t) * (1.0 - 0.30 * np.exp(-((np.sin(t) / 0.33) ** 2))) + 0.0
    profile = [
        (0.0 if k in (0, 12) else float(a), float(b)) for k, (a, b) in enumerate(zip(radius, height, strict=True))
    ]
    surface(spec, body, f"{name}_flesh", lathe(profile, 20), name)
    s = np.linspace(0.0, 1.0, 4)
    path = np.stack([0.004 * s**2, 0 * s, r * (0.68 + 0.5 * s)], axis=1)
    surface(spec, body, f"{name}_stalk", sweep(path, [0.0014] * 4, sides=6), _STALK)
    # Rolling friction: it stays where it is put.
    collider(body, Geom.mjGEOM_SPHERE, (r,), 0.14, THING_BITS, friction=(1.0, 0.01, 0.004), condim=6)


def _book(spec: mujoco.MjSpec, body: mujoco.MjsBody, name: str) -> None:
    """Origin at its middle, spine upwards, so that fingers can straddle it."""
    x, y, z = BOOK_HALF_M
    board = 0.0022
    for side in (-1, 1):
        visible_box(body, (x, board, z), name, pos=(0, side * (y - board), 0))
    visible_box(body, (x, y - board, board), name, pos=(0, 0, z - board))
    visible_box(body, (x - 0.003, y - 2 * board, z - 0.004), _PAPER, pos=(0, 0, 0))
    for along in (-0.6, 0.6):
        visible_box(body, (0.004, y + 0.0003, 0.0006), _PAPER, pos=(along * x, 0, z))
    collider(body, Geom.mjGEOM_BOX, BOOK_HALF_M, 0.25, THING_BITS)


def _plate(spec: mujoco.MjSpec, body: mujoco.MjsBody, name: str) -> None:
    """Origin at the middle of its underside; four sloping rims around a flat middle."""
    flat, h = PLATE_HALF_M - 0.017, 0.003
    visible_box(body, (flat + 0.003, flat + 0.003, h), name, pos=(0, 0, h))
    collider(body, Geom.mjGEOM_BOX, (flat, flat, h), 0.2, THING_BITS, pos=(0, 0, h))
    tilt = np.arctan2(PLATE_HEIGHT_M - 2 * h, 0.017)
    for k in range(4):
        a = k * np.pi / 2
        quat = np.empty(4)
        mujoco.mju_mulQuat(
            quat,
            np.array([np.cos(a / 2), 0, 0, np.sin(a / 2)]),
            np.array([np.cos(tilt / 2), 0, -np.sin(tilt / 2), 0]),
        )
        middle = flat + 0.0085
        pos = (middle * np.cos(a), middle * np.sin(a), PLATE_HEIGHT_M / 2 + 0.0015)
        half = (0.0095, PLATE_HALF_M - 0.001, 0.0022)
        visible_box(body, half, name, pos=pos, quat=quat)
        collider(body, Geom.mjGEOM_BOX, half, 0.05, THING_BITS, pos=pos, quat=quat)


_MAKERS = {"mug": _mug, "apple": _apple, "book": _book, "plate": _plate}
