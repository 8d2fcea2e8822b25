"""Start the policy node: ros2 launch wam_policy_ros dreamzero.launch.py checkpoint:=/data/DreamZero-DROID

Parameters come from config/dreamzero.yaml (every default), then the file ``config``, then the arguments that are given.
"""

from pathlib import Path

from launch.actions import DeclareLaunchArgument, OpaqueFunction
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import LifecycleNode
from launch_ros.parameter_descriptions import ParameterValue

from launch import LaunchContext, LaunchDescription

CONFIG = Path(__file__).parent.parent / "config"

# argument -> type, description; the parameter of the node has the same name
OVERRIDES = {
    "backend": (str, "engine: the network in this process; openpi: a policy server; hold: a dry run"),
    "checkpoint": (str, "folder of the checkpoint, or the name of one that comes with the package"),
    "tokenizer": (str, "tokenizer.json or its folder, if it is not in the checkpoint"),
    "random_weights": (str, "tiny or 14b: an untrained network instead of a checkpoint"),
    "embodiment": (str, "tag of the robot in the checkpoint's metadata.json"),
    "device": (str, "torch device, or auto"),
    "instruction": (str, "what the robot shall do"),
    "autostart": (bool, "configure at start, activate when the policy is ready: true or false"),
}


PROFILE = "fastdds_profile"


def profile_environment(given: str) -> dict[str, str]:
    """Environment of the node for the argument ``fastdds_profile``: empty, ``true`` (the packaged file), or a file."""
    if given.lower() in ("", "false"):
        return {}
    path = CONFIG / "fastdds.xml" if given.lower() == "true" else Path(given).expanduser()
    if not path.is_file():
        raise RuntimeError(f"{PROFILE}: no such file: {path}; give true for the packaged one")
    return {"FASTDDS_DEFAULT_PROFILES_FILE": str(path.resolve())}


def start_node(context: LaunchContext) -> list[LifecycleNode]:
    """The node, once the arguments are known."""
    # An empty argument is one that was not given: it must not override the files.
    overrides = {
        name: ParameterValue(LaunchConfiguration(name), value_type=kind)
        for name, (kind, _) in OVERRIDES.items()
        if LaunchConfiguration(name).perform(context)
    }
    files = [str(CONFIG / "dreamzero.yaml"), LaunchConfiguration("config")]
    return [
        LifecycleNode(
            package="wam_policy_ros",
            executable="wam_policy",
            name="wam_policy",
            namespace=LaunchConfiguration("namespace"),
            parameters=[*files, overrides] if overrides else files,
            output="screen",
            emulate_tty=True,
            additional_env=profile_environment(LaunchConfiguration(PROFILE).perform(context)),
        )
    ]


def generate_launch_description() -> LaunchDescription:
    return LaunchDescription(
        [
            DeclareLaunchArgument(
                "config", default_value=str(CONFIG / "droid.yaml"), description="YAML file of this robot"
            ),
            DeclareLaunchArgument("namespace", default_value="", description="of the node and its topics"),
            DeclareLaunchArgument(
                PROFILE,
                default_value="",
                description="Fast DDS profile for raw images; true: config/fastdds.xml, or a file; empty: none",
            ),
            *(
                DeclareLaunchArgument(name, default_value="", description=f"{text}; empty: as in the files")
                for name, (_, text) in OVERRIDES.items()
            ),
            OpaqueFunction(function=start_node),
        ]
    )
