"""A user's own arm in our scene."""

from __future__ import annotations

from pathlib import Path

import mujoco
import numpy as np
import pytest

from wam_policy_ros.sim import panda
from wam_policy_ros.sim.arm import ArmModel
from wam_policy_ros.sim.errors import SceneError
from wam_policy_ros.sim.world import World

_LINK = '<body name="{body}" pos="{pos}"><joint name="{joint}" axis="{axis}" range="-2.9 2.9"/>{geom}'


@pytest.fixture
def stick_arm(tmp_path: Path) -> Path:
    """Seven capsules and two fingers, with names, an actuator and a keyframe of its own."""
    xml, axes = "", ("0 0 1", "0 1 0", "0 0 1", "0 -1 0", "0 0 1", "0 -1 0", "0 0 1")
    for k in range(7):
        geom = '<geom type="capsule" fromto="0 0 0.02 0 0 0.13" size="0.02" mass="0.5"/>'
        xml += _LINK.format(body=f"l{k}", pos="0 0 0.15", joint=f"a{k}", axis=axes[k], geom=geom)
    for side in (1, -1):
        xml += f"""<body name="f{side}" pos="0 0 0.14">
          <joint name="g{side}" type="slide" axis="0 {side} 0" range="0 0.03"/>
          <geom type="box" size="0.01 0.004 0.03" pos="0 {0.004 * side} 0" mass="0.02"/></body>"""
    path = tmp_path / "stick.xml"
    path.write_text(f"""<mujoco><compiler angle="radian"/>
      <worldbody><body name="base"><geom type="box" size="0.05 0.05 0.05" mass="1"/>
      {xml}{"</body>" * 7}</body></worldbody>
      <actuator><motor name="mine" joint="a0"/></actuator>
      <keyframe><key name="k" qpos="{"0 " * 9}"/></keyframe></mujoco>""")
    return path


def _stick(path: Path, **change: object) -> ArmModel:
    settings: dict = {
        "mjcf": path,
        "joints": tuple(f"a{k}" for k in range(7)),
        "fingers": ("g1", "g-1"),
        "hand": "l6",
        "finger_open": 0.03,
        "home_rad": (0.0, 0.3, 0.0, -0.9, 0.0, -0.5, 0.0),
    }
    return ArmModel(**{**settings, **change})


def test_a_users_arm_is_driven_like_ours(stick_arm: Path) -> None:
    world = World(render=False, arm=_stick(stick_arm))
    frame = world.reset(0)
    assert world.model.nu == 9
    goal = frame.joint_position + 0.1
    for k in range(20):
        frame = world.step(goal if k else frame.joint_position + 0.05, 1.0)
    assert np.abs(frame.joint_position - goal).max() < 5e-3
    assert frame.gripper_position > 0.95


def test_our_own_panda_as_a_users_file_moves_the_same(tmp_path: Path) -> None:
    spec = mujoco.MjSpec()
    spec.compiler.degree = False
    panda.add_panda(spec)
    spec.compile()
    path = tmp_path / "panda.xml"
    path.write_text(spec.to_xml())
    ours, theirs = World(render=False), World(render=False, arm=ArmModel(mjcf=path))
    a, b = ours.reset(2), theirs.reset(2)
    for _ in range(10):
        a, b = (w.step(w.target_rad + 0.03, 1.0) for w in (ours, theirs))
    np.testing.assert_allclose(a.joint_position, b.joint_position, atol=1e-4)


def test_what_a_users_arm_lacks_is_named(stick_arm: Path, tmp_path: Path) -> None:
    with pytest.raises(SceneError, match=r"joint 'joint1'.*finger_joint1.*body 'hand'"):
        World(render=False, arm=ArmModel(mjcf=stick_arm))
    with pytest.raises(SceneError, match="cannot be read"):
        World(render=False, arm=ArmModel(mjcf=tmp_path / "none.xml"))
    with pytest.raises(SceneError, match="seven joints"):
        World(render=False, arm=_stick(stick_arm, joints=("a0", "a1"), home_rad=(0.0, 0.0)))
