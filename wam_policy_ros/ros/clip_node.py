"""The rclpy node behind ``wam_clip_robot``."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import String
from trajectory_msgs.msg import JointTrajectory

from wam_policy_ros.contract.interface import CameraSpec

from .clip_robot import CAMERA_HZ, JOINT_HZ, Pictures, describe_chunk
from .follower import Follower
from .lifecycle import steady_clock
from .messages import image_to_rgb, rgb_to_image, stamp_to_ns
from .qos import latched_qos, sensor_qos

_THUMB = (160, 90)  # width, height of recorded camera frames


class Recorder:
    """Collects what went over the wire; times are seconds since the start on the steady clock.

    Args:
        start_stamp_ns: the node clock's time at the start, so that message stamps can be placed on the same axis.
    """

    def __init__(self, names: Sequence[str], cameras: Sequence[CameraSpec], start_stamp_ns: int) -> None:
        self.start_stamp_ns = start_stamp_ns
        self._names, self._cameras = list(names), [c.name for c in cameras]
        self.trajectories: list[tuple[float, np.ndarray, np.ndarray, np.ndarray]] = []
        self.joints: list[tuple[float, np.ndarray]] = []
        self.frames: list[tuple[float, np.ndarray]] = []
        self.pictures: dict[str, list[tuple[float, int, np.ndarray]]] = {"observed": [], "predicted": []}
        self.statuses: list[tuple[float, str]] = []

    def write(self, folder: Path) -> Path:
        """``<folder>/clip_robot.npz``, without pickles. Ragged lists are stored one array per entry."""
        folder.mkdir(parents=True, exist_ok=True)
        out: dict[str, Any] = {"joint_names": np.array(self._names), "camera_names": np.array(self._cameras)}
        out["start_stamp_ns"] = np.array(self.start_stamp_ns, dtype=np.int64)
        out["trajectory_arrival_s"] = np.array([t[0] for t in self.trajectories])
        for i, (_, times_s, positions, velocities) in enumerate(self.trajectories):
            out[f"trajectory_{i:04d}_time_from_start_s"] = times_s
            out[f"trajectory_{i:04d}_positions"] = positions
            out[f"trajectory_{i:04d}_velocities"] = velocities
        out["joint_time_s"] = np.array([t for t, _ in self.joints])
        out["joint_positions"] = np.array([p for _, p in self.joints])
        out["frame_time_s"] = np.array([t for t, _ in self.frames])
        out["frames"] = np.array([f for _, f in self.frames], dtype=np.uint8)
        for name, pictures in self.pictures.items():
            out[f"{name}_arrival_s"] = np.array([t for t, _, _ in pictures])
            out[f"{name}_stamp_ns"] = np.array([s for _, s, _ in pictures], dtype=np.int64)
            same = [p for _, _, p in pictures if p.shape == pictures[0][2].shape]
            out[f"{name}_images"] = np.array(same, dtype=np.uint8)
        out["status_arrival_s"] = np.array([t for t, _ in self.statuses])
        out["status_texts"] = np.array([text for _, text in self.statuses], dtype=np.str_)
        path = folder / "clip_robot.npz"
        np.savez_compressed(path, allow_pickle=False, **out)
        return path


class ClipRobot(Node):
    """Cameras with one stamp at 15 Hz, joint states at 60 Hz, a follower of the trajectories.

    Args:
        options: see ``clip_robot.parse``.
        cameras: the embodiment's.
        pictures: one list of images per camera period.
        say: prints a line.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        cameras: Sequence[CameraSpec],
        pictures: Pictures,
        say: Callable[[str], None],
    ) -> None:
        super().__init__("wam_clip_robot", namespace=options.namespace or None)
        self.received = 0
        self._options, self._specs = options, tuple(cameras)
        self.node_active, self.node_failed = False, ""
        self.recorder = self._new_recorder()
        self._say, self._pictures, self._record = say, pictures, options.record is not None
        self._follower = Follower(options.joint_names, options.home)
        self._start_s = time.monotonic()
        self._last_s: float | None = None
        self._state: dict[str, Any] = {}
        self._untold: tuple[float, float | None, np.ndarray, str] | None = None
        topics = options.camera_topics or [f"{c.topic}/image_raw" for c in cameras]
        if len(topics) != len(cameras):
            raise ValueError(f"{len(topics)} camera topics for {len(cameras)} cameras")
        best_effort = sensor_qos(5)
        self._cameras = [self.create_publisher(Image, t, best_effort) for t in topics]
        self._frame_ids = [c.topic for c in cameras]
        self._joints = self.create_publisher(JointState, options.joint_topic, 10)
        self.create_subscription(JointTrajectory, options.trajectory_topic, self._on_trajectory, 10)
        self.create_subscription(String, f"{options.node}/state", self._on_state, latched_qos())
        if self._record:
            many = QoSProfile(depth=64, reliability=ReliabilityPolicy.RELIABLE)
            for name, topic in (("observed", "observed"), ("predicted", "predicted_video")):
                self.create_subscription(
                    Image, f"{options.node}/{topic}/image_raw", lambda m, n=name: self._on_picture(n, m), many
                )
            self.create_subscription(String, f"{options.node}/status", self._on_status, latched_qos())
        if options.prompt is not None:
            self._prompt = self.create_publisher(String, f"{options.node}/prompt", latched_qos())
            self._prompt.publish(String(data=options.prompt))
        self.create_timer(1 / CAMERA_HZ, self._send_pictures, clock=steady_clock())
        self.create_timer(1 / JOINT_HZ, self._send_joints, clock=steady_clock())

    def begin(self) -> None:
        """Start counting now: what was recorded while waiting for the node is dropped."""
        self._follower.rebase(self._now_s())
        self._start_s = time.monotonic()
        self.recorder = self._new_recorder()
        self.received, self._last_s = 0, None

    def _new_recorder(self) -> Recorder:
        return Recorder(self._options.joint_names, self._specs, self.get_clock().now().nanoseconds)

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s

    def _send_pictures(self) -> None:
        images = next(self._pictures)
        stamp_ns = self.get_clock().now().nanoseconds
        for publisher, image, frame_id in zip(self._cameras, images, self._frame_ids, strict=True):
            publisher.publish(rgb_to_image(image, stamp_ns=stamp_ns, frame_id=frame_id))
        if self._record:
            thumbs = np.stack([cv2.resize(i, _THUMB, interpolation=cv2.INTER_AREA) for i in images])
            self.recorder.frames.append((self._now_s(), thumbs))

    def _send_joints(self) -> None:
        now_s = self._now_s()
        position = self._follower.at(now_s)
        msg = JointState(name=list(self._follower.names), position=position.tolist())
        msg.header.stamp = self.get_clock().now().to_msg()
        self._joints.publish(msg)
        if self._record:
            self.recorder.joints.append((now_s, position))

    def _on_trajectory(self, msg: JointTrajectory) -> None:
        now_s = self._now_s()
        try:
            self._follower.on_trajectory(msg, now_s)
        except ValueError as error:
            self._say(f"{now_s:8.3f}s  REJECTED: {error}")
            return
        positions = np.array([p.positions for p in msg.points])
        after_s = np.array([p.time_from_start.sec + p.time_from_start.nanosec * 1e-9 for p in msg.points])
        speeds = np.array([p.velocities for p in msg.points])
        if self._record:
            self.recorder.trajectories.append((now_s, after_s, positions, speeds))
        interval_s = None if self._last_s is None else now_s - self._last_s
        self._last_s, self.received = now_s, self.received + 1
        kind = "  (hold)" if len(positions) == 1 else ""
        self._tell_chunk()
        self._untold = (now_s, interval_s, positions, kind)

    def _tell_chunk(self) -> None:
        """Print the last trajectory, once the node has said in ~/state how long its step took."""
        if self._untold is not None:
            now_s, interval_s, positions, kind = self._untold
            self._say(describe_chunk(now_s, interval_s, self._state, positions) + kind)
            self._untold = None

    def _on_state(self, msg: String) -> None:
        state = json.loads(msg.data)
        old, self._state = self._state, state
        self._tell_chunk()
        loading = state.get("loading") or {}
        self.node_active = state.get("lifecycle") == "active"
        self.node_failed = str(state.get("refused") or (loading.get("phase") == "failed" and loading["message"]) or "")
        shown = [state.get(k) for k in ("lifecycle", "substate", "fault")]
        before = [old.get(k) for k in ("lifecycle", "substate", "fault")]
        # Progress in tenths: a checkpoint loads tensor by tensor.
        progress = (loading.get("phase"), loading.get("message"), int(10 * loading.get("fraction", 0)))
        was = old.get("loading") or {}
        if not self.node_active and progress[0] in ("loading", "warming up"):
            if progress != (was.get("phase"), was.get("message"), int(10 * was.get("fraction", 0))):
                self._say(f"{self._now_s():8.3f}s  node {loading['message']} {loading['fraction']:.0%}")
        elif shown != before:
            line = f"{self._now_s():8.3f}s  node {state.get('lifecycle')}, {state.get('substate')}"
            why = state.get("fault") or state.get("reason")
            self._say(f"{line}: {why}" if why else line)

    def _on_status(self, msg: String) -> None:
        self.recorder.statuses.append((self._now_s(), msg.data))

    def _on_picture(self, name: str, msg: Image) -> None:
        image = image_to_rgb(msg, name)
        self.recorder.pictures[name].append((self._now_s(), stamp_to_ns(msg.header.stamp), image))
