"""Where the three cameras are and how they see.

They carry the names of the DROID embodiment in its order: the exterior camera to the left of the robot, the one to its
right, and the one on its hand.
"""

from __future__ import annotations

from dataclasses import dataclass

import mujoco
import numpy as np
import numpy.typing as npt

from wam_policy_ros.contract.embodiments import DROID

Vector = tuple[float, float, float]

NAMES: tuple[str, str, str] = (DROID.cameras[0].name, DROID.cameras[1].name, DROID.cameras[2].name)
LEFT, RIGHT, WRIST = NAMES
SIZE = (DROID.cameras[0].width, DROID.cameras[0].height)
"""Width and height in pixels that the embodiment asks for: 320 x 180."""


@dataclass(frozen=True)
class Mount:
    """A camera before the seed moves it a little.

    Attributes:
        on_hand: fixed to the hand; otherwise to the world.
        pos_m, look_at_m, up: in the frame it is fixed to.
        fovy_deg: vertical field of view.
    """

    on_hand: bool
    pos_m: Vector
    look_at_m: Vector
    up: Vector
    fovy_deg: float

    @property
    def quat(self) -> npt.NDArray[np.float64]:
        """(w, x, y, z); MuJoCo's cameras look along -z, x to the right, y up."""
        look = np.array(self.look_at_m) - np.array(self.pos_m)
        back = -look / np.linalg.norm(look)
        right = np.cross(self.up, back)
        right /= np.linalg.norm(right)
        quat = np.empty(4)
        mujoco.mju_mat2Quat(quat, np.stack([right, np.cross(back, right), back], axis=1).ravel())
        return quat


MOUNTS: dict[str, Mount] = {
    LEFT: Mount(False, (0.87, 0.62, 0.50), (0.40, 0.0, 0.125), (0, 0, 1), 49.0),
    RIGHT: Mount(False, (0.87, -0.62, 0.50), (0.40, 0.0, 0.125), (0, 0, 1), 49.0),
    WRIST: Mount(True, (0.078, 0.0, 0.03), (0.050, 0.0, 0.12), (1, 0, 0), 65.0),
}


def intrinsics(name: str, size: tuple[int, int] = SIZE) -> npt.NDArray[np.float64]:
    """Pinhole matrix ``[3, 3]`` in pixels; the first pixel's centre is (0, 0), no distortion.

    Args:
        size: width and height in pixels.
    """
    width, height = size
    focal = height / 2 / np.tan(np.radians(MOUNTS[name].fovy_deg) / 2)
    return np.array([[focal, 0.0, (width - 1) / 2], [0.0, focal, (height - 1) / 2], [0.0, 0.0, 1.0]])
