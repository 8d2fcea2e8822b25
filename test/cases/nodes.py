"""Cases that need the real node, over real DDS or as a process of its own. rclpy is imported when it is needed."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from . import robot
from .case import Case, Outcome

_number = itertools.count()
WAIT_S = 20.0


def _node(case: Case, stack: ExitStack, **changes: Any) -> tuple[Any, Any, list[str]]:
    """A node with the reference configuration in a namespace of its own, spun by a thread; and what it logs."""
    from rclpy.parameter import Parameter

    from test.ros.harness import RecordingLogger, Spinner
    from wam_policy_ros.contract.fakes import HoldPolicy
    from wam_policy_ros.ros.policy_node import PolicyNode

    values = robot.values(case, **changes)
    node = PolicyNode(
        lambda params, progress: HoldPolicy(),
        namespace=f"/case{next(_number)}",
        parameter_overrides=[Parameter(k, value=v) for k, v in values.items()],
    )
    logger = RecordingLogger()
    node.get_logger = lambda: logger  # type: ignore[method-assign,assignment,return-value]
    spinner = Spinner(node)

    def close() -> None:
        joined = spinner.call(lambda: node.close(5.0))
        spinner.close()
        assert joined, "the worker's thread ends"

    stack.callback(close)
    return node, spinner, logger.lines


def _wait(condition: Any, timeout_s: float = WAIT_S) -> bool:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def timers_are_steady(case: Case) -> bool:
    """Whether every timer of a configured node runs on the steady clock, as a clock that is set cannot stall them."""
    from rclpy.clock import ClockType

    with ExitStack() as stack:
        node, _, _ = _node(case, stack)
        assert _wait(lambda: node.lifecycle == "active"), node.refused
        return all(timer.clock.clock_type is ClockType.STEADY_TIME for timer in node.timers)


def publishers(case: Case) -> Outcome:
    """Publishers with all kinds of QoS; a second run with one that cannot match."""
    from rclpy.node import Node
    from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
    from sensor_msgs.msg import Image, JointState

    from test.ros.harness import Spinner
    from wam_policy_ros.ros.messages import rgb_to_image

    with ExitStack() as stack:
        sender = Node("cameras", namespace=f"/senders{next(_number)}")
        made: dict[str, Any] = {}
        for one in case.json()["publishers"]:
            qos = QoSProfile(
                depth=one["depth"],
                reliability=ReliabilityPolicy[one["reliability"].upper()],
                durability=DurabilityPolicy[one["durability"].upper()],
            )
            kind = JointState if one["topic"] == case.config["joint_states_topic"] else Image
            made[one["topic"]] = sender.create_publisher(kind, one["topic"], qos)
        spinner = Spinner(sender)
        stack.callback(spinner.close)
        node, _, lines = _node(case, stack)
        assert _wait(lambda: node.lifecycle == "active"), node.refused
        inputs = node.control._inputs
        streams = {s.topic: s for s in (*inputs.cameras.values(), inputs.joint_states)}

        def received() -> bool:
            for topic, publisher in made.items():
                raw = streams[topic] is inputs.joint_states
                publisher.publish(JointState() if raw else rgb_to_image(_picture(), stamp_ns=1))
            return all(streams[t].received for t in made)

        matched = _wait(received) and all(p.get_subscription_count() for p in made.values())
        facts = {"all_matched": matched}
        silent = [t for t in made if not streams[t].received]
    outcome = Outcome(frozenset({"accept"} if matched else {"hold"}), f"silent: {silent}; {lines}", facts)
    outcome.checks["on_mismatch"] = _mismatch
    return outcome


def _mismatch(expected: Any, case: Case, outcome: Outcome) -> str | None:
    """A best-effort camera for a node that asks for reliable ones."""
    from rclpy.node import Node
    from rclpy.qos import QoSProfile, ReliabilityPolicy
    from sensor_msgs.msg import Image

    from test.ros.harness import Spinner

    with ExitStack() as stack:
        sender = Node("camera", namespace=f"/senders{next(_number)}")
        topic = robot.topic(case.config, "wrist")
        sender.create_publisher(Image, topic, QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT))
        spinner = Spinner(sender)
        stack.callback(spinner.close)
        _, _, lines = _node(case, stack, image__reliable=True)
        _wait(lambda: any("incompatible QoS" in line for line in lines))
        said = [line for line in lines if "incompatible QoS" in line]
    return None if said and topic in said[0] else f"not said of {topic}: {lines}"


def _picture() -> Any:
    import numpy as np

    return np.random.default_rng(1).integers(0, 256, (9, 16, 3), dtype=np.uint8)


def signalled(case: Case, folder: Path) -> Outcome:
    """A process of the node, active, gets a signal at the time of the scenario."""
    events = case.json()["events"]
    sign = next(e for e in events if e["do"].startswith("SIG"))
    config = folder / "params.yaml"
    config.write_text(yaml.safe_dump({"/**/wam_policy": {"ros__parameters": robot.values(case)}}))
    command = [sys.executable, "-m", "wam_policy_ros.ros.main", "--ros-args", "--params-file", str(config)]
    with ExitStack() as stack:
        seen, publish = _robot_beside(case, stack)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        stack.callback(process.kill)
        if "running" in {e["do"] for e in events}:
            assert _wait(lambda: (publish(), seen)[1], 40.0), "it never moved the robot"
        end = time.monotonic() + sign["t"]
        while time.monotonic() < end:
            publish()
            time.sleep(0.02)
        os.kill(process.pid, getattr(signal, sign["do"]))
        start_s = time.monotonic()
        output, _ = process.communicate(timeout=30)
        took_s = time.monotonic() - start_s
        after = len(seen)
        for _ in range(10):
            publish()
            time.sleep(0.02)
        late = len(seen) - after
    kinds = [("hold" if len(m.points) == 1 else "chunk") for m in seen]
    last = kinds[-1] if kinds else "nothing"
    facts = {"exit_code": process.returncode}
    good = process.returncode == 0 and late == 0 and "Traceback" not in output
    outcome = Outcome(frozenset({"accept"} if good else set()), output[-2000:], facts)
    outcome.checks |= {
        "within_s": lambda e, c, o: None if took_s <= e else f"took {took_s:.1f} s",
        # A process whose interpreter ended has none; it aborts, and not with 0, when one still runs.
        "threads_left": lambda e, c, o: None if e == 0 and process.returncode == 0 else f"exit {process.returncode}",
        "last_published": lambda e, c, o: None if last in str(e) and not late else f"{last}, {late} after the end",
        "never": lambda e, c, o: None,
    }
    return outcome


def _robot_beside(case: Case, stack: ExitStack) -> tuple[list[Any], Any]:
    """Cameras, joints, and ears for trajectories; call the second value to publish once."""
    from rclpy.node import Node
    from sensor_msgs.msg import Image, JointState
    from trajectory_msgs.msg import JointTrajectory

    from test.ros.harness import Spinner
    from wam_policy_ros.ros.messages import rgb_to_image
    from wam_policy_ros.ros.qos import sensor_qos

    node = Node("robot", namespace=f"/robot{next(_number)}")
    cameras = [node.create_publisher(Image, robot.topic(case.config, n), sensor_qos(5)) for n in case.config["cameras"]]
    joints = node.create_publisher(JointState, case.config["joint_states_topic"], 10)
    seen: list[Any] = []
    node.create_subscription(JointTrajectory, "/joint_trajectory", seen.append, 10)
    spinner = Spinner(node)
    stack.callback(spinner.close)

    def publish() -> None:
        now = node.get_clock().now()
        for camera in cameras:
            camera.publish(rgb_to_image(_picture(), stamp_ns=now.nanoseconds))
        msg = JointState(name=robot.names(case.config), position=[0.02] * 8)
        msg.header.stamp = now.to_msg()
        joints.publish(msg)

    return seen, publish
