from __future__ import annotations

import numpy as np
import pytest

from wam_policy_ros.contract.embodiment import get_embodiment
from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.ros.joints import JointMap

NAMES = [f"j{i}" for i in range(7)] + ["finger"]


def droid(**changes: object) -> JointMap:
    e = get_embodiment("oxe_droid")
    values = {"names": NAMES, "gripper_open": 0.04, "gripper_closed": 0.0, **changes}
    return JointMap.build(e.state, e.action, **values)  # type: ignore[arg-type]


def test_gripper_is_mapped_both_ways_and_clipped_only_towards_the_robot() -> None:
    joints = droid()
    state = joints.state_fields(np.array([*range(7), 0.028]))
    np.testing.assert_allclose(state["gripper_position"], [0.3])
    np.testing.assert_array_equal(state["joint_position"], range(7))
    rows = np.zeros((5, 8))
    rows[:, 7] = [0.0, 0.3, 1.0, 1.2, -0.1]
    rows[:, 0] = 3.5
    out = joints.command(rows)
    np.testing.assert_allclose(out[:, 7], [0.04, 0.028, 0.0, 0.0, 0.04])
    np.testing.assert_array_equal(out[:, 0], 3.5)


def test_missing_names_list_the_fields_in_order() -> None:
    with pytest.raises(ConfigError) as error:
        droid(names=[])
    assert "joint_position[7] rad, gripper_position[1] (gripper)" in str(error.value)
    with pytest.raises(ConfigError, match="7 different"):
        droid(names=["j0", *NAMES[:7]])


def test_gripper_ends_must_be_set() -> None:
    with pytest.raises(ConfigError, match=r"gripper\.open and gripper\.closed"):
        droid(gripper_open=0.0, gripper_closed=0.0)


def test_fields_that_no_joint_can_execute_must_be_ignored_by_name() -> None:
    e = get_embodiment("agibot")
    names = [f"j{i}" for i in range(sum(f.dim for f in e.state))]
    ends = {"gripper_open": 1.0, "gripper_closed": 0.0}
    with pytest.raises(ConfigError, match="robot_velocity"):
        JointMap.build(e.state, e.action, names=names, **ends)
    with pytest.raises(ConfigError, match="robot_speed"):
        JointMap.build(e.state, e.action, names=names, ignore_fields=["robot_speed"], **ends)
    joints = JointMap.build(e.state, e.action, names=names, ignore_fields=["robot_velocity", "head_position"], **ends)
    rows = np.arange(22, dtype=np.float64)[None] * 0.01
    out = dict(zip(joints.command_names, joints.command(rows)[0], strict=True))
    assert set(out) == set(names) - {"j16", "j17"}  # the head
    assert out["j18"] == 0.18 and out["j14"] == pytest.approx(1 - 0.14)
