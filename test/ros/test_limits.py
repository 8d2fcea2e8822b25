"""Limits from a URDF and from parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wam_policy_ros.contract.embodiment import get_embodiment
from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.contract.limits import JointLimits
from wam_policy_ros.ros.joints import JointMap
from wam_policy_ros.ros.limits import given_urdf, read_urdf, resolve_limits
from wam_policy_ros.ros.parameters import NodeParameters

NAMES = [f"j{i}" for i in range(7)] + ["finger"]
E = get_embodiment("oxe_droid")
JOINTS = JointMap.build(E.state, E.action, names=NAMES, gripper_open=0.04, gripper_closed=0.0)
LIMIT = '<limit lower="-2.9" upper="2.9" velocity="2.0" effort="80"/>'
FINGER = '<limit lower="0.0" upper="0.05" velocity="0.2" effort="80"/>'


def urdf(names: list[str] = NAMES, limit: str = LIMIT, kind: str = "revolute") -> str:
    def joint(name: str, kind: str, limit: str) -> str:
        return f'<joint name="{name}" type="{kind}"><parent link="a"/><child link="b"/>{limit}</joint>'

    arm = "".join(joint(n, kind, limit) for n in names if n != "finger")
    fixed = joint("mount", "fixed", "")
    return f'<robot name="r">{fixed}{arm}{joint("finger", "prismatic", FINGER)}</robot>'


def resolve(text: str | None, **params: Any) -> tuple[JointLimits, list[str]]:
    values = NodeParameters.from_values({"backend": "hold", **params})
    return resolve_limits(values, JOINTS, None if text is None else (text, "a test"))


def test_limits_of_the_urdf() -> None:
    limits, loose = resolve(urdf())
    np.testing.assert_allclose(limits.position_max, [2.89] * 7 + [0.04])
    np.testing.assert_allclose(limits.velocity, [2.0] * 7 + [0.2])
    np.testing.assert_allclose(limits.acceleration, [10.0] * 7 + [np.inf])
    assert not loose
    assert set(read_urdf(urdf(), "x")) == set(NAMES), "fixed joints do not move"


def test_parameters_tighten_the_urdf_and_never_loosen_it() -> None:
    limits, loose = resolve(
        urdf(), **{"safety.max_velocity": [1.0], "safety.position_max": [5.0], "safety.max_acceleration": 4.0}
    )
    np.testing.assert_allclose(limits.velocity[:7], 1.0)
    np.testing.assert_allclose(limits.position_max[:7], 2.89)
    np.testing.assert_allclose(limits.acceleration[:7], 4.0)
    assert len(loose) == 7 and "position_max of j0" in loose[0]


PARAMS: dict[str, Any] = {"safety.position_min": -2.9, "safety.position_max": 2.9, "safety.max_velocity": 2}


def test_parameters_alone() -> None:
    limits, _ = resolve(None, **PARAMS)
    np.testing.assert_allclose(limits.position_min, [-2.9] * 7 + [0.0])
    np.testing.assert_allclose(limits.velocity, [2.0] * 7 + [np.inf])
    limits, _ = resolve(None, **{**PARAMS, "safety.max_velocity": [1, 2, 3, 4, 5, 6, 7]})
    np.testing.assert_allclose(limits.velocity, [1, 2, 3, 4, 5, 6, 7, np.inf])
    limits, _ = resolve(None, **{**PARAMS, "safety.max_velocity": [1, 2, 3, 4, 5, 6, 7, 0.1]})
    np.testing.assert_allclose(limits.velocity[7], 0.1)
    limits, _ = resolve(None, **{**PARAMS, "safety.max_velocity": [1] * 7 + [0.1], "gripper.mode": "float64"})
    assert limits.velocity[7] == np.inf, "its own controller knows how fast it is"


def test_none_at_all_names_the_joints_and_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"j0 \(position_min.*j6 .*robot_description.*safety.max_velocity"):
        resolve(None)


def test_a_list_of_the_wrong_length_is_said_with_the_right_ones() -> None:
    with pytest.raises(ConfigError, match=r"max_velocity.*3 values.*1 for all joints, 7 without grippers, or 8"):
        resolve(None, **{**PARAMS, "safety.max_velocity": [1, 2, 3]})


def test_joints_the_urdf_does_not_know() -> None:
    with pytest.raises(ConfigError, match=r"does not know.*'j6'"):
        resolve(urdf([*NAMES[:6], "finger"]))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("not xml", "not XML"),
        ("<sdf/>", "no URDF.*<sdf>"),
        (urdf(limit=LIMIT.replace("2.0", "fast")), "velocity of joint 'j0' is not a number.*fast"),
        (urdf(limit=LIMIT.replace('"2.9"', '"nan"')), "upper of joint 'j0' is not a number"),
        (urdf(limit=""), "no limits are known"),
        (urdf(limit='<limit velocity="2"/>'), "lowest position"),
        (urdf(limit='<limit lower="-1" upper="1" effort="1"/>'), "max_velocity"),
        (urdf(limit='<limit lower="-1" upper="1" velocity="0"/>'), "greater than zero"),
    ],
)
def test_descriptions_that_say_nothing_useful(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve(text)


def test_continuous_joints_and_soft_limits() -> None:
    limits, _ = resolve(urdf(kind="continuous"))
    assert limits.position_max[0] == np.inf and limits.velocity[0] == 2.0
    soft = '<safety_controller soft_lower_limit="-1" soft_upper_limit="3" k_velocity="1"/>'
    limits, _ = resolve(urdf(limit=LIMIT + soft))
    np.testing.assert_allclose([limits.position_min[0], limits.position_max[0]], [-0.99, 2.89])


def test_the_parameter_is_a_file_or_the_text(tmp_path: Path) -> None:
    file = tmp_path / "robot.urdf"
    file.write_text(urdf())

    def given(value: str) -> Any:
        return given_urdf(NodeParameters.from_values({"backend": "hold", "safety.urdf": value}))

    assert given("") is None
    assert given(urdf()) == (urdf(), "safety.urdf") and given(str(file)) == (urdf(), str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        given(str(tmp_path / "none"))
