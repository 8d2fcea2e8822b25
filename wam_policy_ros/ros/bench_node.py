"""The two processes behind ``wam bench node``: cameras and joints, and the policy node with a step that only waits.

``python -m wam_policy_ros.ros.bench_node node|robot ...``; each writes what it measured as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wam_policy_ros.contract.embodiment import get_embodiment
from wam_policy_ros.contract.fakes import HoldPolicy

EMBODIMENT = "oxe_droid"
JOINTS = tuple(f"joint_{i}" for i in range(1, 9))
JOINT_HZ = 100.0
WARM_UP_S = 2.0
"""Discovery, first allocations and the first chunk are not what is measured."""


class AllDurations:
    """As ``meters.Durations``, but keeps every value since ``clear``, with the time it was told."""

    def __init__(self) -> None:
        self.values: dict[str, list[tuple[float, float]]] = {}

    def add(self, name: str, seconds: float) -> None:
        self.values.setdefault(name, []).append((time.monotonic(), seconds))

    def until(self, end_s: float) -> dict[str, list[float]]:
        """Name -> values told not later than ``end_s`` on the steady clock."""
        return {name: [v for t, v in values if t <= end_s] for name, values in self.values.items()}

    def add_all(self, seconds: dict[str, float]) -> None:
        for name, value in seconds.items():
            self.add(name, value)

    def summary(self) -> dict[str, dict[str, float]]:
        return {}

    def clear(self) -> None:
        self.values.clear()


def parse(args: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="wam_policy_ros.ros.bench_node")
    parser.add_argument("role", choices=["node", "robot"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--step-s", type=float, default=0.15)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--hz", type=float, default=30.0)
    parser.add_argument("--reliable", action="store_true")
    parser.add_argument("--executor", choices=["single", "events"], default="single")
    return parser.parse_args(args)


def cpu_s() -> float:
    """Seconds of processor time this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def play(options: argparse.Namespace) -> dict[str, Any]:
    """Publish images, all cameras at the same moment, and joint states, until the time is over.

    The images are made once; only stamps change, so that the load is the transport's and not the camera's.
    """
    import numpy as np
    import rclpy
    from rclpy.node import Node
    from sensor_msgs.msg import Image, JointState
    from trajectory_msgs.msg import JointTrajectory

    from .messages import ns_to_stamp, rgb_to_image
    from .qos import sensor_qos

    rclpy.init()
    node = Node("wam_bench_robot")
    pixels = np.random.default_rng(0).integers(0, 256, (options.height, options.width, 3), dtype=np.uint8)
    image = rgb_to_image(pixels)
    qos = sensor_qos(5, reliable=options.reliable)
    topics = [f"{c.topic}/image_raw" for c in get_embodiment(EMBODIMENT).cameras]
    cameras = [node.create_publisher(Image, topic, qos) for topic in topics]
    joints = node.create_publisher(JointState, "joint_states", 10)
    node.create_subscription(JointTrajectory, "joint_trajectory", lambda msg: None, 1)  # the controller's place
    state = JointState(name=list(JOINTS), position=[0.1] * len(JOINTS))
    _wait(lambda: all(p.get_subscription_count() for p in (*cameras, joints)), "the node does not subscribe")
    time.sleep(0.5)  # the other side has to match as well
    sent, late = 0, 0.0
    publish_s: list[float] = []
    start_s, cpu_at_start = time.monotonic(), cpu_s()
    next_image_s = next_joints_s = start_s
    end_s = start_s + WARM_UP_S + options.seconds
    while (now_s := time.monotonic()) < end_s:
        stamp = ns_to_stamp(node.get_clock().now().nanoseconds)
        if now_s >= next_joints_s:
            state.header.stamp = stamp
            joints.publish(state)
            next_joints_s += 1 / JOINT_HZ
        if now_s >= next_image_s:
            late = max(late, now_s - next_image_s)
            image.header.stamp = stamp
            for publisher in cameras:
                publisher.publish(image)
            publish_s.append(time.monotonic() - now_s)
            sent += 1
            next_image_s += 1 / options.hz
        time.sleep(max(0.0, min(next_image_s, next_joints_s) - time.monotonic()))
    used = (cpu_s() - cpu_at_start) / (time.monotonic() - start_s)
    time.sleep(0.5)  # the last images have to arrive
    node.destroy_node()
    rclpy.shutdown()
    return {"sent": dict.fromkeys(topics, sent), "cpu_cores": used, "late_s": late, "publish_burst_s": publish_s}


def serve(options: argparse.Namespace) -> dict[str, Any]:
    """Run the node until the process gets SIGTERM, as ``wam_policy`` does."""
    import rclpy
    from rclpy.parameter import Parameter
    from rclpy.signals import SignalHandlerOptions

    from .lifecycle import steady_clock
    from .main import StopSignals, load_quietly, run
    from .policy_node import PolicyNode

    stop = StopSignals()
    rclpy.init(signal_handler_options=SignalHandlerOptions.NO)
    given = {
        "backend": "hold",
        "joints.names": list(JOINTS),
        "gripper.closed": 0.8,
        "instruction": "measure",
        "executor": options.executor,
        "image.reliable": options.reliable,
        "exit_on_failure": True,
        # A busy host is what is measured, not a reason to stop.
        "sync.max_age_s": 1.0,
        "sync.joint_max_age_s": 1.0,
        "sync.max_skew_s": 0.2,
        "safety.executor_stall_s": 5.0,
        "safety.position_min": -3.0,
        "safety.position_max": 3.0,
        "safety.max_velocity": 2.0,
    }
    node = PolicyNode(
        load_quietly(lambda params, progress: HoldPolicy(embodiment=EMBODIMENT, latency_s=options.step_s)),
        parameter_overrides=[Parameter(name, value=value) for name, value in given.items()],
    )
    recorder, begun = AllDurations(), dict[str, float]()
    out: dict[str, Any] = {}

    def look() -> None:
        control = node.control
        if control is None:
            return
        control.durations = recorder  # type: ignore[assignment]
        summary = node.state_summary()
        if not begun and any(s["received"] for s in summary["streams"]):
            begun["first_s"] = time.monotonic()
        if begun and "cpu" not in begun and time.monotonic() - begun["first_s"] > WARM_UP_S:
            recorder.clear()
            begun["cpu"], begun["at_s"] = cpu_s(), time.monotonic()
        if "cpu" in begun:
            ages_s = [s["arrival_age_s"] for s in summary["streams"] if s["arrival_age_s"] is not None]
            begun["last_s"] = time.monotonic() - max(ages_s)
            if max(ages_s) < 0.25:
                out["cpu_cores"] = (cpu_s() - begun["cpu"]) / max(time.monotonic() - begun["at_s"], 1e-9)
            out["received"] = {s["topic"].lstrip("/"): s["received"] for s in summary["streams"]}
            out["dropped"] = {s["topic"].lstrip("/"): s["dropped"] for s in summary["streams"] if s["dropped"]}
            out["counters"] = {k: v for k, v in summary["counters"].items() if isinstance(v, int)}
            out["control_rate_hz"] = summary["control_rate_hz"]
            out["stall_share"] = summary.get("stall_share")

    node.create_timer(0.25, look, clock=steady_clock())
    status = run(node, stop, executor=options.executor)
    return {**out, "durations_s": recorder.until(begun.get("last_s", 0.0)), "status": status}


def _wait(condition: Any, problem: str, timeout_s: float = 60.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            raise SystemExit(problem)
        time.sleep(0.02)


def main() -> int:
    options = parse(sys.argv[1:])
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    measured = play(options) if options.role == "robot" else serve(options)
    options.out.write_text(json.dumps(measured), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
