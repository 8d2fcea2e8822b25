from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rclpy.parameter import Parameter

from wam_policy_ros.contract.embodiment import get_embodiment
from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.engine.memory import windows_of
from wam_policy_ros.ros.backend import _engine_factory
from wam_policy_ros.ros.joints import JointMap
from wam_policy_ros.ros.parameters import NodeParameters, refusal

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


NAMES = list(NodeParameters.names())


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_has_description_unit_and_range_where_they_mean_something(name: str) -> None:
    f = NodeParameters.names()[name]
    meta, kind = f.metadata, type(f.default)
    assert len(meta["doc"]) > 10 or meta["unit"]
    if kind in (int, float):
        assert meta["low"] is not None and meta["high"] is not None and meta["low"] < meta["high"]
        assert meta["low"] <= f.default <= meta["high"]
    for suffix, unit in (("_s", "s"), ("_hz", "Hz"), ("_rad", "rad"), ("_steps", "steps")):
        if name.endswith(suffix):
            assert meta["unit"] == unit
    if meta["choices"]:
        assert f.default in meta["choices"]


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_refuses_what_it_cannot_be_and_takes_integers_for_doubles(name: str) -> None:
    f = NodeParameters.names()[name]
    meta, kind = f.metadata, type(f.default)
    above = (meta["high"] or 0) + 1
    bad: list[Any] = {
        float: ["1.0", True, above, float("nan"), [1.0]],
        int: ["1", True, 1.5, above],
        bool: [1, "true"],
        str: [1, True, ["a"]],
        tuple: [{"a": 1}, [True, "a"]],
    }[kind]
    if meta["choices"]:
        bad.append("no such choice")
    for value in bad:
        assert name in refusal({name: value}, configured=False), value
    default = list(f.default) if kind is tuple else f.default
    assert refusal({name: default}, configured=False) == ""
    if kind is float:
        whole = next(v for v in range(int(meta["low"]), int(meta["high"]) + 1) if v >= meta["low"])
        assert refusal({name: whole}, configured=False) == ""
    assert "cannot be removed" in refusal({name: None}, configured=False)
    fixed = refusal({name: default}, configured=True)
    assert ("only after cleanup" in fixed) != meta["live"]


def test_other_nodes_names_are_not_judged() -> None:
    assert refusal({"use_sim_time": True, "qos_overrides./t.publisher.depth": 3}, configured=True) == ""


@pytest.fixture
def node(ros: None) -> Iterator[Any]:
    from wam_policy_ros.ros.policy_node import PolicyNode

    made = PolicyNode(namespace="/params", parameter_overrides=[Parameter("autostart", value=False)])
    yield made
    made.close(5.0)
    made.destroy_node()


def test_descriptors_of_a_real_node_say_all_of_it(node: Any) -> None:
    for name, f in NodeParameters.names().items():
        told, meta = node.describe_parameter(name), f.metadata
        assert told.description == meta["doc"] and told.read_only == meta["read_only"], name
        if meta["unit"]:
            assert f"unit {meta['unit']}" in told.additional_constraints, name
        ranges = {float: told.floating_point_range, int: told.integer_range}.get(type(f.default))
        if ranges is not None:
            assert (ranges[0].from_value, ranges[0].to_value) == (meta["low"], meta["high"]), name
        for choice in meta["choices"]:
            assert repr(choice) in told.additional_constraints, name


def test_what_the_parameter_services_answer(node: Any) -> None:
    def put(name: str, value: Any) -> Any:
        return node.set_parameters_atomically([Parameter(name, value=value)])

    assert put("sync.max_age_s", 1).successful and node.get_parameter("sync.max_age_s").value == 1
    assert "out of range" in put("sync.max_age_s", 61.0).reason
    assert "out of range" in put("sync.max_age_s", 61).reason, "an integer, too"
    assert "a number" in put("sync.max_age_s", "soon").reason
    assert "one of" in put("image.resize", "crop").reason
    assert "read-only" in put("executor", "events").reason
    assert "did you mean sync.max_age_s" in put("sync.max_ages", 0.3).reason
    assert put("use_sim_time", False).successful
    assert node.get_parameter("image.resize").value == "pad"


def test_a_file_with_a_value_out_of_range_does_not_end_the_process_but_configure_says_it(ros: None) -> None:
    from wam_policy_ros.ros.policy_node import PolicyNode

    given = {"autostart": False, "sync.max_age_s": 61.0, "control.execute_steps": 0}
    made = PolicyNode(namespace="/range", parameter_overrides=[Parameter(k, value=v) for k, v in given.items()])
    made.trigger_configure()
    assert "sync.max_age_s: out of range" in made.refused and "control.execute_steps: out of range" in made.refused
    assert made.set_parameters_atomically([Parameter("sync.max_age_s", value=0.5)]).successful
    made.close(5.0)
    made.destroy_node()


@pytest.mark.parametrize(
    ("given", "windows"),
    [
        ({}, 2),
        ({"openpi.enabled": True, "openpi.max_sessions": 4}, 7),
        ({"openpi.enabled": True, "openpi.max_sessions": 64}, 16),
        ({"openpi.enabled": True, "engine.prepared_windows": 40}, 40),
    ],
)
def test_as_many_windows_are_prepared_as_sessions_are_admitted(given: dict[str, Any], windows: int) -> None:
    params = NodeParameters.from_values({"backend": "engine", "random_weights": "tiny", **given})
    assert _engine_factory(params).options["prepared_windows"] == windows
    if windows < 16:
        assert windows_of(1 + given.get("openpi.max_sessions", 0)) == windows
