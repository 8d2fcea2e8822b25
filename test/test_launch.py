"""Structure of the launch file. launch and launch_ros are on no package index, so this runs only where ROS 2 is."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[1] / "launch" / "dreamzero.launch.py"

try:
    # The folder launch/ of this repository is an importable namespace, so the name alone says nothing.
    from launch.actions import DeclareLaunchArgument, OpaqueFunction
    from launch_ros.utilities import evaluate_parameters

    from launch import LaunchContext
except ImportError as error:
    pytest.skip(f"launch or launch_ros cannot be imported ({error})", allow_module_level=True)


def load() -> Any:
    spec = importlib.util.spec_from_file_location("dreamzero_launch", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(**arguments: str) -> tuple[Any, list[Any]]:
    """The node action and its evaluated parameters: paths and dictionaries in order."""
    context = LaunchContext()
    context.launch_configurations.update(arguments)
    (node,) = (
        action
        for entity in load().generate_launch_description().entities
        for action in (entity.execute(context) or [])
        if isinstance(entity, (DeclareLaunchArgument, OpaqueFunction))
    )
    return node, list(evaluate_parameters(context, node._Node__parameters))


def test_every_argument_is_declared_and_described() -> None:
    declared = {
        e.name: e.description
        for e in load().generate_launch_description().entities
        if isinstance(e, DeclareLaunchArgument)
    }
    assert set(declared) == {
        "config",
        "backend",
        "checkpoint",
        "tokenizer",
        "embodiment",
        "device",
        "namespace",
        "autostart",
        "instruction",
        "random_weights",
        "fastdds_profile",
    }
    assert all(declared.values())


def test_files_are_layered_and_exist() -> None:
    _, parameters = start()
    assert [Path(p).name for p in parameters] == ["dreamzero.yaml", "droid.yaml"]
    assert all(Path(p).is_file() for p in parameters)


def test_only_given_arguments_override_and_keep_their_type(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("/**/wam_policy: {ros__parameters: {embodiment: yam}}\n")
    _, parameters = start(config=str(mine), instruction="pick: 3", autostart="false", checkpoint="/data/7")
    assert Path(parameters[1]) == mine
    assert parameters[2] == {"instruction": "pick: 3", "autostart": False, "checkpoint": "/data/7"}


def test_the_profile_is_the_packaged_one_a_file_or_none(tmp_path: Path) -> None:
    name, environment = "FASTDDS_DEFAULT_PROFILES_FILE", load().profile_environment
    assert environment("") == environment("false") == {}
    assert Path(environment("true")[name]).name == "fastdds.xml" and Path(environment("true")[name]).is_file()
    mine = tmp_path / "mine.xml"
    mine.write_text("<dds/>")
    assert environment(str(mine)) == {name: str(mine)}
    with pytest.raises(RuntimeError, match="no such file"):
        environment(str(tmp_path / "other.xml"))


def test_the_overrides_are_parameters_of_the_node() -> None:
    pytest.importorskip("rclpy")
    from wam_policy_ros.ros.parameters import NodeParameters

    assert set(load().OVERRIDES) <= set(NodeParameters.names())
