"""A simulated robot and the policy node: ros2 launch wam_policy_ros sim_demo.launch.py

The policy is the small network that comes with the package, ``mug``, unless checkpoint:=FOLDER or the file ``config``
names another. random_weights:=tiny is an untrained network, which shows the machinery and lifts nothing.
Parameters come from config/dreamzero.yaml (every default), then the file ``config`` (sim_demo.yaml, for both nodes),
then the arguments that are given. The simulator tells the policy node what its task is.
"""

from pathlib import Path
from typing import Any

from ament_index_python.packages import PackageNotFoundError, get_package_prefix
from launch.actions import DeclareLaunchArgument, LogInfo, OpaqueFunction, Shutdown
from launch.events.process import ProcessExited
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import LifecycleNode, Node
from launch_ros.parameter_descriptions import ParameterValue

from launch import LaunchContext, LaunchDescription

CONFIG = Path(__file__).parent.parent / "config"

# argument -> type, description; the parameter of the node has the same name
SIMULATOR = {
    "seed": (int, "of the scene; -1 at a reset: the one after the last"),
    "task": (str, "name or instruction, e.g. lift_mug"),
    "lockstep": (bool, "true: simulated time waits for the policy; false: it goes on by itself"),
    "real_time_factor": (float, "simulated seconds per second, at most; 0: as fast as it can"),
}
POLICY = {
    "backend": (str, "engine: the network in the node's process; openpi: a policy server; hold: none, it stands still"),
    "checkpoint": (str, "folder of the checkpoint, or the name of one that comes with the package"),
    "tokenizer": (str, "tokenizer.json or its folder, if it is not in the checkpoint"),
    "random_weights": (str, "tiny or 14b: an untrained network instead of a checkpoint"),
    "device": (str, "torch device, or auto"),
}
WEIGHTS = ("backend", "checkpoint", "random_weights")
VIEWS = ("none", "rviz", "foxglove")


def given(context: LaunchContext, arguments: dict[str, tuple[type, str]]) -> list[dict[str, Any]]:
    """Of the arguments those that are not empty: an empty one must not override the files."""
    found = {
        name: ParameterValue(LaunchConfiguration(name), value_type=kind)
        for name, (kind, _) in arguments.items()
        if LaunchConfiguration(name).perform(context)
    }
    return [found] if found else []


def instead_of_the_file_s(context: LaunchContext) -> list[dict[str, Any]]:
    """Exactly one of checkpoint and random_weights may be set, and none with another backend than the engine: who names
    one in an argument takes back what the file has."""
    named = {name: LaunchConfiguration(name).perform(context) for name in WEIGHTS}
    if named["checkpoint"] and not named["random_weights"]:
        return [{"random_weights": ""}]
    if not named["checkpoint"] and (named["random_weights"] or named["backend"] not in ("", "engine")):
        return [{"checkpoint": ""}]
    return []


def installed(package: str) -> str:
    """Its name. Looked for before anything is started: launch does not end what runs when it cannot start the rest.

    Raises:
        RuntimeError: it is not installed.
    """
    try:
        get_package_prefix(package)
    except PackageNotFoundError as error:
        apt = f"apt install ros-$ROS_DISTRO-{package.replace('_', '-')}"
        raise RuntimeError(f"the view needs {error}; remedy: {apt}, or view:=none") from None
    return package


def viewer(context: LaunchContext, simulated: dict[str, bool]) -> list[Node | LogInfo]:
    """The view that was asked for; its package is not a dependency of this one."""
    view = LaunchConfiguration("view").perform(context)
    if view == "rviz":
        arguments = ["-d", str(CONFIG / "wam_policy.rviz")]
        return [Node(package=installed("rviz2"), executable="rviz2", arguments=arguments, parameters=[simulated])]
    if view == "foxglove":
        bridge = installed("foxglove_bridge")
        layout = CONFIG / "foxglove_layout.json"
        told = LogInfo(msg=f"Foxglove: open ws://localhost:8765, then import the layout {layout}")
        return [Node(package=bridge, executable="foxglove_bridge", parameters=[simulated]), told]
    return []


def end(event: ProcessExited, context: LaunchContext) -> Shutdown | None:
    """One of the two alone does nothing: the launch ends with the first that ends by itself."""
    return None if context.is_shutdown else Shutdown(reason=f"{event.process_name} has ended")


def start_nodes(context: LaunchContext) -> list[Node | LogInfo]:
    """The nodes, once the arguments are known."""
    namespace, config = LaunchConfiguration("namespace"), LaunchConfiguration("config")
    shown = {"output": "screen", "emulate_tty": True, "on_exit": end}
    simulator = Node(
        package="wam_policy_ros",
        executable="wam_sim",
        name="wam_sim",
        namespace=namespace,
        parameters=[config, *given(context, SIMULATOR)],
        remappings=[("sim/instruction", "wam_policy/prompt")],
        **shown,
    )
    policy = LifecycleNode(
        package="wam_policy_ros",
        executable="wam_policy",
        name="wam_policy",
        namespace=namespace,
        parameters=[
            str(CONFIG / "dreamzero.yaml"),
            # A refused configuration ends the launch with its reason; nobody waits here to correct it.
            {"exit_on_failure": True},
            config,
            *instead_of_the_file_s(context),
            *given(context, POLICY),
        ],
        **shown,
    )
    return [simulator, policy, *viewer(context, {"use_sim_time": True})]


def generate_launch_description() -> LaunchDescription:
    return LaunchDescription(
        [
            DeclareLaunchArgument(
                "config", default_value=str(CONFIG / "sim_demo.yaml"), description="YAML file for both nodes"
            ),
            DeclareLaunchArgument("namespace", default_value="", description="of the nodes and their topics"),
            DeclareLaunchArgument(
                "view", default_value="none", description="rviz, foxglove (its bridge), or none", choices=list(VIEWS)
            ),
            *(
                DeclareLaunchArgument(name, default_value="", description=f"{text}; empty: as in the files")
                for name, (_, text) in {**SIMULATOR, **POLICY}.items()
            ),
            OpaqueFunction(function=start_nodes),
        ]
    )
