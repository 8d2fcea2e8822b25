"""The process ``wam_sim``: says what is missing before anything is imported that needs it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence


def find_missing() -> str | None:
    """What must be installed first, in one line, or None."""
    without = "on a machine without ROS: pip install 'wam_policy_ros[ros-kilted]'"
    for name, remedy in {
        "mujoco": "pip install 'wam_policy_ros[sim]'",
        "rclpy": f"source /opt/ros/<distro>/setup.bash, or {without}",
    }.items():
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed: {remedy}"
    return None


def main(args: Sequence[str] | None = None) -> int:
    """Entry point of ``wam_sim``."""
    if (missing := find_missing()) is not None:
        print(f"wam_sim: {missing}", file=sys.stderr)
        return 2
    from .sim_node import main as run

    return run(args)


if __name__ == "__main__":
    sys.exit(main())
