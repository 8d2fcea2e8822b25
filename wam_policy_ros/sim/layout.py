"""What differs from seed to seed: poses, colours, light, cameras, where the arm starts. Numbers only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from . import cameras, objects
from .errors import SceneError

Array = npt.NDArray[np.float64]

TABLES = ("table_oak", "table_walnut", "table_stone")


@dataclass(frozen=True)
class Variation:
    """How much a seed changes besides the poses of the things. ``Variation.none()`` changes nothing else.

    Attributes:
        home_rad: largest change of each joint's start position.
        camera_m, camera_rad: largest shift and tilt of a camera along and around each axis.
        light: largest relative change of the light's strength; its direction changes along.
        colour: largest relative change of a colour channel.
        tables: another table top per seed; otherwise always the first.
    """

    home_rad: float = 0.05
    camera_m: float = 0.01
    camera_rad: float = 0.0175
    light: float = 0.2
    colour: float = 0.1
    tables: bool = True

    @classmethod
    def none(cls) -> Variation:
        return cls(0.0, 0.0, 0.0, 0.0, 0.0, False)


@dataclass(frozen=True)
class Layout:
    """One seed's scene.

    Attributes:
        poses: thing -> ``[7]`` position (m) and quaternion (w, x, y, z).
        home_offset_rad: ``[7]``.
        cameras: camera -> ``[6]`` shift (m) and rotation vector (rad) in the camera's own frame.
        light: ``[4]`` strength, ambient strength, direction x and y.
        tints: material -> ``[3]`` factor of its colour.
        table: material of the table top.
    """

    seed: int
    poses: dict[str, Array]
    home_offset_rad: Array
    cameras: dict[str, Array]
    light: Array
    tints: dict[str, Array]
    table: str


# Where the origin of a thing may be (x low, x high, y low, y high) and how far it may be turned, by kind. All of it is
# seen by the hand's camera at home and within reach.
_REGION: dict[str, tuple[float, float, float, float]] = {
    "mug": (0.42, 0.56, -0.13, 0.13),
    "apple": (0.38, 0.60, -0.24, 0.24),
    "book": (0.40, 0.60, -0.24, 0.24),
    "plate": (0.36, 0.66, -0.30, 0.30),
}
_YAW_RAD = {"mug": np.pi / 3, "apple": np.pi, "book": np.radians(35), "plate": np.radians(45)}
_ORDER = ("mug", "blue_book", "yellow_book", "red_apple", "green_apple", "plate")
GAP_M = 0.03
"""Between the outlines of any two things."""
GRIP_M = 0.070
"""From the middle of a thing that may be grasped to another's outline: an open finger and some room."""


def sample_layout(seed: int, variation: Variation | None = None) -> Layout:
    """Draw a scene. The same seed gives the same poses whatever the variation.

    Raises:
        SceneError: the seed is negative, or no room was found for the things.
    """
    v = variation or Variation()
    if seed < 0:
        raise SceneError("a seed is a whole number that is not negative", got=seed, expected=">= 0")
    poses_rng, home_rng, camera_rng, look_rng = (
        np.random.Generator(np.random.PCG64(s)) for s in np.random.SeedSequence(seed).spawn(4)
    )
    looks = look_rng.uniform(-1.0, 1.0, (1 + len(objects.MATERIALS) + 2, 4))
    names = ("table", "floor", *objects.MATERIALS)
    # Brightness of the whole plus a little of hue; the mug stays white.
    tints = {n: 1.0 + v.colour * (0.6 * row[0] + 0.3 * row[1:]) for n, row in zip(names, looks[1:], strict=True)}
    tints["mug"] = 1.0 + 0.4 * (tints["mug"] - 1.0)
    table = TABLES[int(look_rng.integers(len(TABLES)))] if v.tables else TABLES[0]
    light = np.array([1.0, 1.0, 0.0, 0.0]) + v.light * looks[0] * np.array([1.0, 0.5, 2.0, 2.0])
    jitter = camera_rng.uniform(-1.0, 1.0, (len(cameras.NAMES), 6))
    jitter *= np.repeat([v.camera_m, v.camera_rad], 3)
    return Layout(
        seed=seed,
        poses=_place(poses_rng),
        home_offset_rad=v.home_rad * home_rng.uniform(-1.0, 1.0, 7),
        cameras=dict(zip(cameras.NAMES, jitter, strict=True)),
        light=light,
        tints=tints,
        table=table,
    )


def _place(rng: np.random.Generator) -> dict[str, Array]:
    """Rejection sampling; when a thing finds no room, all begin anew."""
    for _ in range(200):
        placed: dict[str, tuple[float, float, float]] = {}
        for name in _ORDER:
            thing = objects.THINGS[name]
            low_x, high_x, low_y, high_y = _REGION[thing.kind]
            for _ in range(60):
                x, y, u = rng.random(3)
                yaw = float(_YAW_RAD[thing.kind] * (2 * u - 1))
                pose = (float(low_x + x * (high_x - low_x)), float(low_y + y * (high_y - low_y)), yaw)
                if all(_apart(name, pose, other, placed[other]) for other in placed):
                    placed[name] = pose
                    break
            else:
                break
        if len(placed) == len(_ORDER):
            return {
                n: np.array([x, y, objects.THINGS[n].rest_m, np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)])
                for n, (x, y, yaw) in placed.items()
            }
    raise SceneError("no room for the things on the table", remedy="try another seed")  # not seen in 100 000 seeds


def _discs(name: str, pose: tuple[float, float, float]) -> Array:
    x, y, yaw = pose
    c, s = np.cos(yaw), np.sin(yaw)
    return np.array([(x + c * a - s * b, y + s * a + c * b, r) for a, b, r in objects.THINGS[name].discs])


def _apart(name: str, pose: tuple[float, float, float], other: str, other_pose: tuple[float, float, float]) -> bool:
    a, b = _discs(name, pose), _discs(other, other_pose)
    gaps = np.hypot(a[:, None, 0] - b[None, :, 0], a[:, None, 1] - b[None, :, 1]) - a[:, None, 2] - b[None, :, 2]
    if gaps.min() < GAP_M:
        return False
    if "plate" in (name, other):  # so flat that fingers pass over it
        return True
    for at, discs in ((pose, b), (other_pose, a)):
        if (np.hypot(discs[:, 0] - at[0], discs[:, 1] - at[1]) - discs[:, 2]).min() < GRIP_M:
            return False
    return True
