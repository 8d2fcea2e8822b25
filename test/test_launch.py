"""Structure of the launch file. launch and launch_ros are on no package index, so this runs only where ROS 2 is."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml

from wam_policy_ros.model.packaged import packaged

FOLDER = Path(__file__).parents[1] / "launch"

try:
    # The folder launch/ of this repository is an importable namespace, so the name alone says nothing.
    from launch.actions import DeclareLaunchArgument, OpaqueFunction, Shutdown
    from launch.events.process import ProcessExited
    from launch_ros.actions import Node
    from launch_ros.utilities import evaluate_parameters

    from launch import LaunchContext
except ImportError as error:
    pytest.skip(f"launch or launch_ros cannot be imported ({error})", allow_module_level=True)


def load(name: str = "dreamzero.launch.py") -> Any:
    spec = importlib.util.spec_from_file_location(name.split(".")[0], FOLDER / name)
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


def demo(**arguments: str) -> list[tuple[Any, list[Any]]]:
    """The nodes of the simulator's launch file and their evaluated parameters."""
    context = LaunchContext()
    context.launch_configurations.update(arguments)
    nodes = [
        action
        for entity in load("sim_demo.launch.py").generate_launch_description().entities
        for action in (entity.execute(context) or [])
        if isinstance(entity, (DeclareLaunchArgument, OpaqueFunction))
    ]
    nodes = [node for node in nodes if isinstance(node, Node)]
    return [(node, list(evaluate_parameters(context, node._Node__parameters))) for node in nodes]


def test_the_demo_starts_a_simulator_and_the_node_with_one_file() -> None:
    (_, simulator), (_, policy) = demo(random_weights="tiny", seed="3", lockstep="false")
    assert [Path(p).name for p in simulator[:-1]] == ["sim_demo.yaml"]
    assert simulator[-1] == {"seed": 3, "lockstep": False}
    defaults, ends, config, *given = policy
    assert [Path(p).name for p in (defaults, config)] == ["dreamzero.yaml", "sim_demo.yaml"]
    assert ends == {"exit_on_failure": True}  # before the user's file, which may want it otherwise
    assert given == [{"checkpoint": ""}, {"random_weights": "tiny"}]
    with pytest.raises(RuntimeError, match="is not valid"):
        demo(view="window")


def test_the_demo_without_an_argument_uses_the_weights_that_ship() -> None:
    _, (_, policy) = demo()
    defaults, _, config = policy
    assert [Path(p).name for p in (defaults, config)] == ["dreamzero.yaml", "sim_demo.yaml"]
    given = yaml.safe_load(Path(config).read_text())["/**/wam_policy"]["ros__parameters"]
    assert given["checkpoint"] in packaged()


def test_weights_named_in_an_argument_take_back_those_of_the_file() -> None:
    def values(**arguments: str) -> dict[str, Any]:
        _, (_, policy) = demo(**arguments)
        given = [p for p in policy if isinstance(p, dict)][1:]  # the first says how a failure ends
        return {k: v for p in given for k, v in p.items()}

    assert values(checkpoint="/data/x") == {"checkpoint": "/data/x", "random_weights": ""}
    assert values(backend="hold") == {"backend": "hold", "checkpoint": ""}
    assert values(backend="engine") == {"backend": "engine"}
    assert values(checkpoint="a", random_weights="tiny") == {"checkpoint": "a", "random_weights": "tiny"}, "refused"


@pytest.mark.parametrize(("view", "package"), [("rviz", "rviz2"), ("foxglove", "foxglove_bridge")])
def test_a_view_starts_its_package_or_says_before_anything_starts_that_it_is_not_there(
    view: str, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    index = tmp_path / "share" / "ament_index" / "resource_index" / "packages"
    index.mkdir(parents=True)
    monkeypatch.setenv("AMENT_PREFIX_PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=f"{package}.* not found.*remedy"):
        demo(view=view)
    (index / package).touch()
    *_, (shown, (simulated,)) = demo(view=view)
    assert shown.node_package == shown.node_executable == package and simulated == {"use_sim_time": True}


def test_the_files_of_the_views_exist() -> None:
    assert {"wam_policy.rviz", "foxglove_layout.json"} <= {p.name for p in load("sim_demo.launch.py").CONFIG.iterdir()}


def test_the_demo_ends_with_the_first_that_ends_by_itself() -> None:
    end, context = load("sim_demo.launch.py").end, LaunchContext()
    ended = ProcessExited(returncode=1, action=None, name="wam_sim-1", cmd=[], cwd=None, env=None, pid=1)
    assert isinstance(end(ended, context), Shutdown)
    context._set_is_shutdown(True)
    assert end(ended, context) is None, "everything ends already"


def test_the_demo_s_arguments_are_parameters_of_its_nodes() -> None:
    pytest.importorskip("rclpy")
    pytest.importorskip("mujoco")
    from wam_policy_ros.ros.parameters import NodeParameters
    from wam_policy_ros.sim.sim_node import PARAMETERS

    made = load("sim_demo.launch.py")
    assert set(made.POLICY) <= set(NodeParameters.names()) and set(made.SIMULATOR) <= set(PARAMETERS)
