"""The arm in the scene: ours, or a user's own MJCF model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mujoco

from . import panda
from .errors import SceneError


@dataclass(frozen=True)
class ArmModel:
    """An arm of seven hinge joints and a gripper of sliding fingers.

    Attributes:
        mjcf: the user's own model of the arm alone (no floor, no lights), base at its origin, z up. None: the
            procedural Panda. Its actuators, keyframes and sensors are not used: the world drives the joints itself.
        joints: the seven joints, base to hand.
        fingers: finger joints; 0 is closed, ``finger_open`` open. Two are coupled, as gears would.
        hand: body that carries the wrist camera.
        tcp_m: the middle between the fingertips in the hand's frame, whose z points along the fingers and whose y is
            the direction in which they open.
        home_rad: where an episode starts.
        speed_rad_s: what a joint's target may move per second.
        finger_open: joint value (m) of an open finger.
    """

    mjcf: Path | None = None
    joints: tuple[str, ...] = tuple(f"joint{k}" for k in range(1, 8))
    fingers: tuple[str, ...] = ("finger_joint1", "finger_joint2")
    hand: str = "hand"
    tcp_m: tuple[float, float, float] = (0.0, 0.0, panda.TCP_M)
    home_rad: tuple[float, ...] = panda.HOME_RAD
    speed_rad_s: tuple[float, ...] = panda.SPEED_RAD_S
    torque_nm: tuple[float, ...] = panda.TORQUE_NM
    stiffness_nm_rad: tuple[float, ...] = (4500.0, 4500.0, 3500.0, 3500.0, 2000.0, 2000.0, 2000.0)
    damping_nms_rad: tuple[float, ...] = (180.0, 180.0, 140.0, 140.0, 40.0, 40.0, 35.0)
    finger_open: float = panda.FINGER_TRAVEL_M
    grip_n: float = 20.0

    @property
    def prefix(self) -> str:
        """Of the arm's names in the scene: a user's model cannot clash with ours."""
        return "arm_" if self.mjcf else ""


def add_arm(spec: mujoco.MjSpec, arm: ArmModel) -> None:
    """Put the arm on the table at the origin, without weight, and give its joints position drives.

    Raises:
        SceneError: the model cannot be read, or lacks a named joint or body.
    """
    if arm.mjcf is None:
        panda.add_panda(spec)
    else:
        _attach(spec, arm, arm.mjcf)
    hand = spec.body(arm.prefix + arm.hand)
    hand.add_site(name="tcp", pos=list(arm.tcp_m), size=[0.004, 0.004, 0.004], group=4)
    base = hand
    while base.parent is not None and base.parent.name != "world":
        base = base.parent
    for body in (base, *base.find_all(mujoco.mjtObj.mjOBJ_BODY)):
        body.gravcomp = 1.0
    per_joint = (arm.joints, arm.stiffness_nm_rad, arm.damping_nms_rad, arm.torque_nm)
    for name, kp, kv, torque in zip(*per_joint, strict=True):
        _drive(spec, arm.prefix + name, kp, kv, torque)
    for name in arm.fingers:
        # So stiff that it squeezes with its full force whatever the thing's width.
        _drive(spec, arm.prefix + name, 6000.0, 90.0, arm.grip_n)
    if len(arm.fingers) == 2:
        gear = spec.add_equality(type=mujoco.mjtEq.mjEQ_JOINT, objtype=mujoco.mjtObj.mjOBJ_JOINT)
        gear.name1, gear.name2 = (arm.prefix + f for f in arm.fingers)
        gear.data[:5] = [0.0, 1.0, 0.0, 0.0, 0.0]
        gear.solref = [0.005, 1.0]


def _drive(spec: mujoco.MjSpec, joint: str, stiffness: float, damping: float, limit: float) -> None:
    drive = spec.add_actuator(name=joint, target=joint, trntype=mujoco.mjtTrn.mjTRN_JOINT)
    drive.gaintype, drive.biastype = mujoco.mjtGain.mjGAIN_FIXED, mujoco.mjtBias.mjBIAS_AFFINE
    drive.gainprm[0] = stiffness
    drive.biasprm[:3] = [0.0, -stiffness, -damping]
    drive.forcelimited = mujoco.mjtLimited.mjLIMITED_TRUE
    drive.forcerange = [-limit, limit]


def _attach(spec: mujoco.MjSpec, arm: ArmModel, path: Path) -> None:
    remedy = "give ArmModel the names of your model: seven joints, the finger joints, the hand's body"
    try:
        own = mujoco.MjSpec.from_file(str(path))
    except (ValueError, OSError) as error:
        raise SceneError("the arm's MJCF model cannot be read", got=f"{path}: {error}", expected="MJCF") from error
    for part in (*own.actuators, *own.keys, *own.sensors):
        own.delete(part)
    names = {"joint": [j.name for j in own.joints], "body": [b.name for b in own.bodies]}
    wanted = [("joint", n) for n in (*arm.joints, *arm.fingers)] + [("body", arm.hand)]
    lacking = [f"{kind} {name!r}" for kind, name in wanted if name not in names[kind]]
    if lacking:
        raise SceneError(f"the arm's model lacks {', '.join(lacking)}", got=str(path), expected=names, remedy=remedy)
    lengths = {len(arm.joints), len(arm.home_rad), len(arm.speed_rad_s), len(arm.torque_nm)}
    if lengths != {7}:
        raise SceneError("an arm has seven joints", got=sorted(lengths), expected=7, remedy=remedy)
    spec.attach(own, prefix=arm.prefix, frame=spec.worldbody.add_frame())
