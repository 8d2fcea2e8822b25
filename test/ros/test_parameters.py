from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from wam_policy_ros.contract.embodiment import get_embodiment
from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.ros.joints import JointMap
from wam_policy_ros.ros.parameters import NodeParameters

CONFIG = Path(__file__).parents[2] / "config"


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out


def load(name: str) -> dict[str, Any]:
    return flatten(yaml.safe_load((CONFIG / name).read_text())["/**/wam_policy"]["ros__parameters"])


def test_dreamzero_yaml_is_the_dataclass() -> None:
    given = load("dreamzero.yaml")
    expected = {
        name: list(f.default) if isinstance(f.default, tuple) else f.default
        for name, f in NodeParameters.names().items()
    }
    assert list(given) == list(expected), "names and order"
    for name, value in expected.items():
        assert given[name] == value and type(given[name]) is type(value), name


def test_every_parameter_is_commented_with_its_unit() -> None:
    lines = (CONFIG / "dreamzero.yaml").read_text().splitlines()
    for name, f in NodeParameters.names().items():
        key = name.rsplit(".", 1)[-1] + ":"
        comments = [lines[i - 1] for i, line in enumerate(lines) if line.strip().startswith(key)]
        assert any(f.metadata["doc"] in c and f.metadata["unit"] in c for c in comments), name


def test_droid_yaml_only_needs_a_checkpoint() -> None:
    params = NodeParameters.from_values({**load("dreamzero.yaml"), **load("droid.yaml"), "checkpoint": "/c"})
    e = get_embodiment(params.embodiment)
    joints = JointMap.build(
        e.state,
        e.action,
        names=params.joints_names,
        gripper_open=params.gripper_open,
        gripper_closed=params.gripper_closed,
    )
    assert joints.command_names[-1] == "finger_joint"


def test_integers_are_accepted_for_doubles() -> None:
    params = NodeParameters.from_values({"backend": "hold", "sync.max_age_s": 1, "control.rate_hz": 15})
    assert (params.sync_max_age_s, params.control_rate_hz) == (1.0, 15.0)
    assert type(params.sync_max_age_s) is float


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("sync.max_age_s", "0.2", "a number"),
        ("sync.max_age_s", True, "a number"),
        ("sync.max_age_s", float("nan"), "out of range"),
        ("safety.deadline_s", -1, "0.01 to 3600"),
        ("control.execute_steps", 0, "1 to 1000"),
        ("control.execute_steps", 2.5, "whole number"),
        ("autostart", 1, "true or false"),
        ("image.resize", "crop", "'pad', 'stretch'"),
        ("sync.stamp_source", "clock", "'header', 'receive'"),
        ("executor", "multi", "'single', 'events'"),
        ("joints.names", "panda_joint1", "a list of text"),
    ],
)
def test_wrong_values_are_named(name: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        NodeParameters.from_values({"backend": "hold", name: value})
    assert name in str(error.value) and says in str(error.value)


def test_a_typo_names_the_parameter_and_close_matches() -> None:
    with pytest.raises(ConfigError) as error:
        NodeParameters.from_values(
            {"backend": "hold", "control.execute_step": 8, "max_age_s": 1.0, "use_sim_time": True}
        )
    text = str(error.value)
    assert "'control.execute_step' (did you mean control.execute_steps" in text
    assert "sync.max_age_s" in text and "sync.joint_max_age_s" in text and "use_sim_time" not in text


@pytest.mark.parametrize("values", [{}, {"checkpoint": "/c", "random_weights": "tiny"}])
def test_exactly_one_source_of_weights(values: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="exactly one of checkpoint and random_weights"):
        NodeParameters.from_values(values)


def test_a_dry_run_takes_no_weights() -> None:
    with pytest.raises(ConfigError, match="backend hold"):
        NodeParameters.from_values({"backend": "hold", "checkpoint": "/c"})
