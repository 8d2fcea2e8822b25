from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.contract.limits import JointLimits, Known, tightest

from .motion import limits

ROBOT = {"a": Known(-2.9, 2.9, 2.0), "finger": Known(0.0, 0.05, 0.3)}


def resolve(robot: dict[str, Known], given: dict[str, Known], **changes: Any) -> tuple[JointLimits, list[str]]:
    values: dict[str, Any] = {"gripper_range": (0.0, 0.04), "margin": 0.1, "acceleration": 10.0, "max_first_step": 0.2}
    return tightest(["a", "finger"], [False, True], robot, given, **{**values, **changes})


def test_the_robots_own_limits_less_the_margin() -> None:
    found, loose = resolve(ROBOT, {})
    np.testing.assert_allclose(found.position_min, [-2.8, 0.0])
    np.testing.assert_allclose(found.position_max, [2.8, 0.04])
    np.testing.assert_allclose(found.velocity, [2.0, 0.3])
    np.testing.assert_array_equal(found.acceleration, [10.0, np.inf])
    np.testing.assert_array_equal(found.max_first_step, [0.2, np.inf])
    assert not loose
    assert found.describe()[0] == "a: position -2.8 to 2.8, speed 2, acceleration 10"


def test_parameters_tighten_and_never_loosen() -> None:
    given = {"a": Known(-1.0, 3.5, 5.0, 4.0), "finger": Known(0.01, None, 0.1)}
    found, loose = resolve(ROBOT, given)
    np.testing.assert_allclose(found.position_min, [-1.0, 0.01])
    np.testing.assert_allclose(found.position_max, [2.8, 0.04])
    np.testing.assert_allclose(found.velocity, [2.0, 0.1])
    np.testing.assert_allclose(found.acceleration[0], 4.0)
    assert len(loose) == 2 and "max_velocity of a: 5 is looser than the robot's 2" in loose[1]


def test_parameters_alone_are_enough_and_their_positions_have_no_margin() -> None:
    found, _ = resolve({}, {"a": Known(-1.0, 1.0, 0.5)})
    assert (found.position_min[0], found.position_max[0], found.velocity[0]) == (-1.0, 1.0, 0.5)
    assert found.velocity[1] == np.inf, "a gripper may have none"


def test_a_joint_without_limits_is_named_with_what_it_lacks() -> None:
    with pytest.raises(ConfigError, match=r"a \(position_min, position_max\).*robot_description"):
        resolve({"a": Known(velocity=2.0)}, {})
    with pytest.raises(ConfigError, match=r"a \(max_velocity\)"):
        resolve({"a": Known(-np.inf, np.inf)}, {})


def test_limits_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match=r"lowest position.*'a'"):
        resolve(ROBOT, {"a": Known(3.0, 3.0, 1.0)})
    with pytest.raises(ConfigError, match=r"greater than zero.*'a'"):
        resolve(ROBOT, {"a": Known(velocity=0.0)})


def test_limits_of_another_number_of_joints() -> None:
    good = limits()
    with pytest.raises(ConfigError, match="velocity"):
        JointLimits(
            good.names,
            good.position_min,
            good.position_max,
            good.velocity[:2],
            good.acceleration,
            good.gripper,
            good.max_first_step,
        )
