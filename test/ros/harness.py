"""A robot and a policy node in one process, each with its own executor thread, talking over real DDS."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import cv2
import numpy as np
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import Parameter
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import String
from std_srvs.srv import Trigger
from trajectory_msgs.msg import JointTrajectory

from wam_policy_ros.contract.fakes import spec_of
from wam_policy_ros.contract.interface import Policy
from wam_policy_ros.ros.lifecycle import steady_clock
from wam_policy_ros.ros.messages import rgb_to_image
from wam_policy_ros.ros.policy_node import PolicyNode
from wam_policy_ros.ros.qos import latched_qos, sensor_qos

from .conftest import wait_for

NAMES = [f"panda_joint{i}" for i in range(1, 8)] + ["finger_joint"]
HOME = [0.1, -0.5, 0.2, -1.2, 0.3, 1.4, -0.2, 0.2]
SPEC = spec_of("oxe_droid", weights="none")
CAMERAS = [c.name for c in SPEC.cameras]
_number = itertools.count()


class Spinner:
    """A node spun by a thread of its own."""

    def __init__(self, node: Node) -> None:
        self.node, self.stop = node, False
        self.executor = SingleThreadedExecutor()
        self.executor.add_node(node)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with suppress(ExternalShutdownException):
            while not self.stop:
                self.executor.spin_once(timeout_sec=0.1)

    def call(self, function: Callable[[], Any]) -> Any:
        """Run on the node's executor thread, as its own callbacks do."""
        done, out = threading.Event(), []

        def once() -> None:
            if not done.is_set():
                out.append(function())
                done.set()

        timer = self.node.create_timer(0.0, once, clock=steady_clock())
        assert done.wait(10), "the executor does not run"
        self.node.destroy_timer(timer)
        return out[0]

    def close(self) -> None:
        self.stop = True
        self.thread.join(5)
        assert not self.thread.is_alive()
        self.executor.shutdown(1)
        self.node.destroy_node()


class Robot(Node):
    """Three cameras at 15 Hz with one stamp, joint states at 60 Hz in shuffled order between foreign joints."""

    def __init__(self, namespace: str, *, compressed: bool = False) -> None:
        super().__init__("robot", namespace=namespace)
        self.compressed = compressed
        self.on = {**dict.fromkeys(CAMERAS, True), "joints": True}
        self.positions = list(HOME)
        self.sent = 0
        self.trajectories: list[tuple[float, JointTrajectory]] = []
        self.states: list[dict[str, Any]] = []
        self.images: dict[str, list[Image]] = {"observed": [], "predicted_video": []}
        self._order = np.random.default_rng(7).permutation(8)
        self._cameras = {
            c.name: self.create_publisher(
                CompressedImage if compressed else Image,
                f"{c.topic}/image_raw" + "/compressed" * compressed,
                sensor_qos(5),
            )
            for c in SPEC.cameras
        }
        self._joints = self.create_publisher(JointState, "joint_states", 10)
        self._prompt = self.create_publisher(String, "wam_policy/prompt", latched_qos())
        self.create_subscription(JointTrajectory, "joint_trajectory", self._on_trajectory, 10)
        self.create_subscription(String, "wam_policy/state", self._on_state, latched_qos())
        self.reset_client = self.create_client(Trigger, "wam_policy/reset")
        self.create_timer(1 / 15, self._send_images, clock=steady_clock())
        self.create_timer(1 / 60, self._send_joints, clock=steady_clock())

    def watch_pictures(self) -> None:
        for name, images in self.images.items():
            self.create_subscription(Image, f"wam_policy/{name}/image_raw", images.append, 64)

    def say(self, prompt: str) -> None:
        self._prompt.publish(String(data=prompt))

    def _send_images(self) -> None:
        stamp_ns = self.get_clock().now().nanoseconds
        self.sent += 1
        for i, (name, publisher) in enumerate(self._cameras.items()):
            if self.on[name]:
                image = np.full((180, 320, 3), (self.sent * 3 + i) % 256, np.uint8)
                msg = rgb_to_image(image, stamp_ns=stamp_ns)
                if self.compressed:
                    png = cv2.imencode(".png", image)[1].tobytes()
                    msg = CompressedImage(header=msg.header, format="png", data=png)
                publisher.publish(msg)

    def _send_joints(self) -> None:
        if self.on["joints"]:
            names = ["foreign", *(NAMES[i] for i in self._order)]
            msg = JointState(name=names, position=[99.0, *(self.positions[i] for i in self._order)])
            msg.velocity = [float("nan")] * len(names)
            msg.header.stamp = self.get_clock().now().to_msg()
            self._joints.publish(msg)

    def _on_trajectory(self, msg: JointTrajectory) -> None:
        self.trajectories.append((time.monotonic(), msg))

    def _on_state(self, msg: String) -> None:
        self.states.append(json.loads(msg.data))

    @property
    def state(self) -> dict[str, Any]:
        return self.states[-1] if self.states else {}

    def loading(self, key: str) -> Any:
        return self.state.get("loading", {}).get(key)

    def wait_state(self, timeout_s: float = 10.0, **want: Any) -> dict[str, Any]:
        wait_for(lambda: all(self.state.get(k) == v for k, v in want.items()), timeout_s, f"{want}, last {self.state}")
        return self.state

    def plans(self) -> list[JointTrajectory]:
        return [m for _, m in list(self.trajectories) if len(m.points) > 1]

    def holds(self) -> list[JointTrajectory]:
        return [m for _, m in list(self.trajectories) if len(m.points) == 1]


class RecordingLogger:
    """Stands for a node's logger; keeps ``level: text``."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __getattr__(self, level: str) -> Callable[..., None]:
        return lambda text, **kwargs: self.lines.append(f"{level}: {text}")


class System:
    """Policy node and robot in a namespace of their own. ``lines``: what the node logs."""

    def __init__(self, policy: Policy | Callable[..., Policy], **params: Any) -> None:
        namespace = f"/t{next(_number)}"
        factory = policy if callable(policy) else lambda params, progress: policy
        values = {
            "backend": "hold",
            "joints.names": NAMES,
            "gripper.open": 0.0,
            "gripper.closed": 0.8,
            "instruction": "stir the pot",
            "safety.position_min": -2.9,
            "safety.position_max": 2.9,
            "safety.max_velocity": 2.0,
            "safety.max_acceleration": 50.0,
            # a busy test machine is not what is tested here
            "safety.executor_stall_s": 5.0,
            # generous ages: a busy test machine is not what is tested here
            "sync.max_age_s": 0.5,
            "sync.joint_max_age_s": 0.5,
            **params,
        }
        overrides = [Parameter(k, value=v) for k, v in values.items()]
        self.node = PolicyNode(factory, namespace=namespace, parameter_overrides=overrides)
        logger = RecordingLogger()
        self.lines = logger.lines
        self.node.get_logger = lambda: logger  # type: ignore[method-assign,assignment,return-value]
        self.robot = Robot(namespace, compressed=params.get("image.compressed", False))
        self.spinners = [Spinner(self.node), Spinner(self.robot)]

    def on_node(self, function: Callable[[], Any]) -> Any:
        return self.spinners[0].call(function)

    def reset(self) -> Trigger.Response:
        assert self.robot.reset_client.wait_for_service(5)
        future = self.robot.reset_client.call_async(Trigger.Request())
        wait_for(future.done, what="reset")
        return future.result()

    def close(self) -> None:
        joined = self.on_node(lambda: self.node.close(5.0))
        for spinner in self.spinners:
            spinner.close()
        assert joined, "the worker thread ends"


def positions(msg: JointTrajectory, names: Sequence[str] = NAMES) -> np.ndarray:
    """``[M, J]`` in the order of ``names``."""
    columns = [list(msg.joint_names).index(n) for n in names]
    return np.array([p.positions for p in msg.points])[:, columns]


def times_s(msg: JointTrajectory) -> np.ndarray:
    return np.array([p.time_from_start.sec + p.time_from_start.nanosec * 1e-9 for p in msg.points])
