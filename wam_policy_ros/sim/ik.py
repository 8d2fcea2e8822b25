"""Inverse kinematics of the arm in the scene: damped least squares, spare freedom towards home."""

from __future__ import annotations

import mujoco
import numpy as np
import numpy.typing as npt

from .arm import ArmModel

Array = npt.NDArray[np.float64]


def pointing_down(yaw_rad: float) -> Array:
    """Rotation ``[3, 3]`` of a hand whose fingers point down and whose x axis has this heading."""
    c, s = np.cos(yaw_rad), np.sin(yaw_rad)
    return np.array([[c, s, 0.0], [s, -c, 0.0], [0.0, 0.0, -1.0]])


def rotation_error(wanted: Array, present: Array) -> Array:
    """Rotation vector (rad, ``[3]``, world frame) that turns ``present`` to ``wanted``."""
    quat, error = np.empty(4), np.empty(3)
    mujoco.mju_mat2Quat(quat, np.ascontiguousarray(wanted @ present.T).ravel())
    mujoco.mju_quat2Vel(error, quat, 1.0)
    return error


class Kinematics:
    """Positions and Jacobians of the tcp, on data of its own: the world is only read.

    Args:
        model: of the scene.
        arm: whose names and home are used.
    """

    DAMPING = 0.02
    HOMING = 0.1

    def __init__(self, model: mujoco.MjModel, arm: ArmModel) -> None:
        self._model, self._data = model, mujoco.MjData(model)
        self._site = model.site("tcp").id
        joints = [model.joint(arm.prefix + n) for n in arm.joints]
        self._qpos = np.array([j.qposadr[0] for j in joints])
        self._dofs = np.array([j.dofadr[0] for j in joints])
        self._range = np.stack([j.range for j in joints], axis=1)
        self._home = np.array(arm.home_rad)
        self._jacobian = np.empty((6, model.nv))

    def forward(self, joints_rad: Array) -> tuple[Array, Array, Array]:
        """Position ``[3]``, rotation ``[3, 3]`` and Jacobian ``[6, 7]`` (linear, angular) of the tcp in the world."""
        self._data.qpos[self._qpos] = joints_rad
        mujoco.mj_kinematics(self._model, self._data)
        mujoco.mj_comPos(self._model, self._data)
        mujoco.mj_jacSite(self._model, self._data, self._jacobian[:3], self._jacobian[3:], self._site)
        pos, rot = self._data.site_xpos[self._site], self._data.site_xmat[self._site].reshape(3, 3)
        return pos.copy(), rot.copy(), self._jacobian[:, self._dofs].copy()

    def solve(self, start_rad: Array, position: Array, rotation: Array, *, rounds: int = 12) -> Array:
        """Joints ``[7]`` within their ranges that bring the tcp to a pose, or as near as they got.

        Args:
            start_rad: ``[7]``; near the solution few rounds are enough.
        """
        joints = np.clip(start_rad, *self._range)
        for _ in range(rounds):
            pos, rot, jacobian = self.forward(joints)
            error = np.concatenate([position - pos, rotation_error(rotation, rot)])
            if np.abs(error).max() < 1e-4:
                break
            inverse = jacobian.T @ np.linalg.inv(jacobian @ jacobian.T + self.DAMPING**2 * np.eye(6))
            spare = self.HOMING * (self._home - joints)
            step = inverse @ error + spare - inverse @ (jacobian @ spare)
            joints = np.clip(joints + np.clip(step, -0.3, 0.3), *self._range)
        return joints
