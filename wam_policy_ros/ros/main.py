"""The process ``wam_policy``: checks, executor, signals, and an orderly end."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

JOIN_S = 10.0
"""How long the end of the process waits for the worker thread."""


def find_problem() -> str | None:
    """Why ROS cannot be used in this process, in one line, or None. Imports nothing: rclpy would end the process."""
    found = importlib.util.find_spec("rclpy")
    if found is None or found.origin is None:
        return (
            "rclpy is not installed: source /opt/ros/<distro>/setup.bash, or on a machine without ROS: "
            "pip install 'wam_policy_ros[ros-kilted]'"
        )
    rmw = os.environ.get("RMW_IMPLEMENTATION", "")
    from_wheels = (Path(found.origin).parents[1] / "ros_wheels_bootstrapper").exists()
    if from_wheels and rmw not in ("", "rmw_fastrtps_cpp"):
        return (
            f"RMW_IMPLEMENTATION={rmw}, but the rclpy wheels ship rmw_fastrtps_cpp only: unset RMW_IMPLEMENTATION, or "
            "source a ROS 2 distribution that has it"
        )
    return None


def spin(node: Any, executor: Any, stop: Callable[[], bool]) -> None:
    """Until ``stop()`` is true. In slices: a Python signal handler runs only between them."""
    while not stop() and node.context.ok():
        executor.spin_once(timeout_sec=0.1)


def run(node: Any, *, executor: str = "single") -> int:
    """Spin a node until SIGINT or SIGTERM, then stop it: hold, worker joined, everything destroyed.

    Args:
        node: a ``PolicyNode``; rclpy must be initialised without signal handlers of its own.
        executor: ``single``, or ``events``.

    Returns:
        Exit code: 0; 1 when the worker thread did not stop (the process then ends without joining it).
    """
    import rclpy
    from rclpy.executors import SingleThreadedExecutor

    if executor == "events":
        # Only spin_once with a finite timeout: its spin() busy-loops and deadlocks in the wheels.
        from rclpy.experimental import EventsExecutor

        spinner: Any = EventsExecutor()
    else:
        spinner = SingleThreadedExecutor()
    asked: list[int] = []

    def on_signal(number: int, frame: Any) -> None:
        asked.append(number)

    before = {s: signal.signal(s, on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
    spinner.add_node(node)
    try:
        spin(node, spinner, lambda: bool(asked))
        if asked:
            node.get_logger().info(f"{signal.Signals(asked[0]).name}: stopping")
        joined = node.close(JOIN_S)
        if not joined:
            node.get_logger().fatal(f"the worker thread still runs {JOIN_S} s after it was asked to stop")
    finally:
        spinner.shutdown(1.0)
        node.destroy_node()
        rclpy.try_shutdown()
        for number, handler in before.items():
            signal.signal(number, handler)
    if not joined:
        # An interpreter that ends beside a running device thread aborts; there is nothing left to lose.
        sys.stderr.flush()
        os._exit(1)
    return 0


def main(args: Sequence[str] | None = None) -> int:
    """Entry point of ``wam_policy``."""
    if (problem := find_problem()) is not None:
        print(f"wam_policy: {problem}", file=sys.stderr)
        return 2
    import rclpy
    from rclpy.signals import SignalHandlerOptions

    from .policy_node import PolicyNode

    # Own handlers: rclpy's shut the context down at once, and then no hold could be sent.
    rclpy.init(args=list(sys.argv if args is None else args), signal_handler_options=SignalHandlerOptions.NO)
    node = PolicyNode()
    return run(node, executor=str(node.get_parameter("executor").value))


if __name__ == "__main__":
    sys.exit(main())
