"""The process ``wam_policy``: checks, executor, signals, and an orderly end."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .params_files import find_fault, given_files, split_arguments, unused

JOIN_S = 4.0
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


HELP = """\
wam_policy: the ROS 2 lifecycle node that drives a robot with a World Action Model.

usage: wam_policy --ros-args [--params-file FILE]... [-p NAME:=VALUE]... [-r FROM:=TO]...

Every option is a ROS parameter, given as -p NAME:=VALUE or in a FILE of this form:

  /**/wam_policy:
    ros__parameters:
      NAME: VALUE

A dry run without a network, up to the joint names of the robot:

  wam_policy --ros-args -p backend:=hold -p "joints.names:=[j1, ..., gripper]" -p gripper.closed:=0.8

Names and topics are moved as usual: -r __ns:=/robot, -r joint_states:=/robot/joint_states.
`wam up` and `ros2 launch wam_policy_ros dreamzero.launch.py` start the same node with less typing.

Parameters (default):
"""


def help_text() -> str:
    """What ``--help`` prints: what it is, how to give parameters, and all of them."""
    from .parameters import NodeParameters

    lines = []
    for name, f in NodeParameters.names().items():
        meta, default = f.metadata, list(f.default) if isinstance(f.default, tuple) else f.default
        unit = f" [{meta['unit']}]" if meta["unit"] else ""
        shown = repr(default).lower() if isinstance(default, bool) else repr(default)
        lines.append(f"  {name} ({shown}): {meta['doc']}{unit}")
    return HELP + "\n".join(lines)


class StopSignals:
    """Turns SIGINT and SIGTERM into a flag from now on; a second one changes nothing."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda n, frame: self.received.append(signal.Signals(n)))

    @staticmethod
    def ignore() -> None:
        """At the very end. Ctrl-C under ros2 launch arrives twice, from the terminal and from launch."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def quiet_process() -> None:
    """When the policy is loaded: what may interrupt a step or a callback for long, does no more."""
    gc.collect()
    gc.freeze()  # a network has a million objects that stay; every full collection would look at each of them
    import cv2

    # Resizing a camera image in two threads takes twice as long as in one: waking the second costs more than it does.
    cv2.setNumThreads(1)
    # A step that waits for the interpreter waits this long for a callback that computes (5 ms unless set).
    sys.setswitchinterval(2e-4)


def load_quietly(factory: Callable[..., Any]) -> Callable[..., Any]:
    """A policy factory after which the process is quiet: before the robot moves, and in the worker's thread."""

    def load(*args: Any) -> Any:
        policy = factory(*args)
        quiet_process()
        return policy

    return load


def run(node: Any, stop: StopSignals, *, executor: str = "single") -> int:
    """Spin a node until SIGINT, SIGTERM or its ``ended``, then stop it: hold, worker joined, everything destroyed.

    An exception that ends the spinning is logged and ends the node in the same way.

    Args:
        node: a ``PolicyNode``; rclpy must be initialised without signal handlers of its own.
        stop: installed before.
        executor: ``single``, or ``events``.

    Returns:
        Exit code: 0; 1 after an exception, for a node that ended by itself, and when the worker thread did not stop
        (the process then ends without joining it).
    """
    import rclpy
    from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor

    if executor == "events":
        # Only spin_once with a finite timeout: its spin() busy-loops and deadlocks in the wheels.
        from rclpy.experimental import EventsExecutor

        spinner: Any = EventsExecutor()
    else:
        spinner = SingleThreadedExecutor()
    spinner.add_node(node)
    code, joined, log = 0, False, node.get_logger()
    try:
        with ExitStack() as end:  # last one first, and all of them whatever any of them raises
            end.callback(stop.ignore)
            end.callback(rclpy.try_shutdown)
            end.callback(node.destroy_node)
            end.callback(spinner.shutdown, 1.0)
            try:
                # In slices: a Python signal handler runs only between them.
                while not stop.received and not node.ended and node.context.ok():
                    spinner.spin_once(timeout_sec=0.1)
                code = int(node.ended)
                if stop.received:
                    log.info(f"{stop.received[0].name}: stopping")
            except ExternalShutdownException:
                pass
            except BaseException:
                # Whatever it is, the robot must be held and the worker joined, or the interpreter aborts beside it.
                code = 1
                log.fatal(f"the executor ended\n{traceback.format_exc()}")
            try:
                joined = node.close(JOIN_S)
            except BaseException:
                log.fatal(f"the node could not be closed\n{traceback.format_exc()}")
            if not joined:
                log.fatal(f"the worker thread still runs {JOIN_S} s after it was asked to stop")
    except BaseException:
        code = 1
        traceback.print_exc()
    if not joined:
        # An interpreter that ends beside a running device thread aborts; there is nothing left to lose.
        sys.stderr.flush()
        os._exit(1)
    return code


def main(args: Sequence[str] | None = None) -> int:
    """Entry point of ``wam_policy``."""
    argv = list(sys.argv if args is None else args)
    plain, ros_arguments = split_arguments(argv[1:])
    if "-h" in plain or "--help" in plain:
        print(help_text())
        return 0
    if plain:
        print(f"wam_policy: unknown argument {plain[0]!r}; options are ROS parameters, see --help", file=sys.stderr)
        return 2
    if (problem := find_problem()) is not None:
        print(f"wam_policy: {problem}", file=sys.stderr)
        return 2
    # Read when torch loads its thread pool. Pools that spin while they wait starve the executor and, on a host with few
    # cores, each other: a step took 24 s instead of 1.3 s beside two busy processes (2 cores).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    stop = StopSignals()
    import rclpy
    from rclpy.signals import SignalHandlerOptions

    from .backend import make_policy
    from .policy_node import PolicyNode

    files = given_files(ros_arguments)
    try:
        # Own handlers: rclpy's shut the context down at once, and then no hold could be sent.
        rclpy.init(args=argv, signal_handler_options=SignalHandlerOptions.NO)
    except Exception as error:  # rclpy has several kinds, not all of them public
        faults = [fault for path in files if (fault := find_fault(path)) is not None]
        print(f"wam_policy: {faults[0] if faults else ' '.join(str(error).split())}", file=sys.stderr)
        return 2
    try:
        node = PolicyNode(load_quietly(make_policy))
        for path in files:
            if (line := unused(path, node.get_fully_qualified_name())) is not None:
                node.get_logger().warning(line)
        return run(node, stop, executor=str(node.get_parameter("executor").value))
    finally:
        gc.unfreeze()  # what was frozen would be missed, and reported as leaked, by libraries when the process ends
        rclpy.try_shutdown()


if __name__ == "__main__":
    sys.exit(main())
