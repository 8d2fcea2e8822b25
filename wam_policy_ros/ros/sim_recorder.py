"""Plays one seed through a simulator and a policy node that run, tells what happens, and records all of it off the
topics: the robot's side of ``wam demo`` in the simulator.

Lines for people on stdout; the last one is JSON, as ``ros/sim_episodes`` writes it. The record is ``clip_robot.npz``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rclpy
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import String
from std_srvs.srv import SetBool
from trajectory_msgs.msg import JointTrajectory

from wam_policy_ros.contract.embodiment import get_embodiment
from wam_policy_ros.contract.errors import WamError

from .clip_node import Recorder
from .clip_robot import PANDA
from .messages import image_to_rgb, stamp_to_ns
from .params_files import split_arguments
from .qos import latched_qos, sensor_qos
from .sim_episodes import SimEpisodes

NAMES = (*PANDA, "panda_gripper")
TRAJECTORY = "panda_arm_controller/joint_trajectory"
QUIET_S, LAST_S = 0.7, 6.0
"""Behind the end: until no predicted frame came for so long; at most."""


class RecordedEpisodes(SimEpisodes):
    """A client that also listens. Times of the record are seconds of the simulator's clock since the reset.

    Args:
        say: prints a line.
        kwargs: of ``SimEpisodes``.

    Attributes:
        recorder: of the episode that was reset last; None before.
    """

    def __init__(self, say: Callable[[str], None], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._say = say
        self.recorder: Recorder | None = None
        self._specs = get_embodiment("oxe_droid").cameras
        self._views: dict[int, dict[str, np.ndarray]] = {}
        self._told, self._predicted_s = "", 0.0
        many = QoSProfile(depth=200, reliability=ReliabilityPolicy.RELIABLE)
        for camera in self._specs:
            self.create_subscription(
                Image,
                f"{camera.topic}/image_raw",
                lambda m, name=camera.name: self._on_image(name, m),
                sensor_qos(200, reliable=True),
            )
        self.create_subscription(JointState, "joint_states", self._on_joints, 200)
        self.create_subscription(JointTrajectory, TRAJECTORY, self._on_trajectory, 50)
        self.create_subscription(Image, f"{self._policy}/predicted_video/image_raw", self._on_predicted, many)
        self.create_subscription(String, f"{self._policy}/status", self._on_status, latched_qos())

    def record(self, seed: int, task: str, max_ticks: int, instruction: str) -> dict[str, Any]:
        """As ``play``, and until the predicted video of the last call is there."""
        done = self.play(seed, task, max_ticks, instruction)
        self._wait(self._hold.call_async(SetBool.Request(data=True)))  # no call more than were needed
        end_s = time.monotonic() + LAST_S
        self._predicted_s = time.monotonic()
        while time.monotonic() < min(end_s, self._predicted_s + QUIET_S):
            rclpy.spin_once(self, timeout_sec=0.1)
        return done

    def _began(self, first: dict[str, Any]) -> None:
        self._views = {}
        self.recorder = Recorder(NAMES, self._specs, first["stamp_ns"])

    def _since(self, stamp_ns: int) -> float | None:
        """Seconds since the reset; None before it, or for what belongs to no episode."""
        if self.recorder is None or stamp_ns < self.recorder.start_stamp_ns or self._status.get("over"):
            return None
        return (stamp_ns - self.recorder.start_stamp_ns) * 1e-9

    def _on_image(self, name: str, msg: Image) -> None:
        stamp_ns = stamp_to_ns(msg.header.stamp)
        if (t_s := self._since(stamp_ns)) is None or self.recorder is None:
            return
        views = self._views.setdefault(stamp_ns, {})
        views[name] = image_to_rgb(msg, name)
        if len(views) == len(self._specs):
            self.recorder.frames.append((t_s, np.stack([views[c.name] for c in self._specs])))
            del self._views[stamp_ns]

    def _on_joints(self, msg: JointState) -> None:
        if (t_s := self._since(stamp_to_ns(msg.header.stamp))) is not None and self.recorder is not None:
            by_name = dict(zip(msg.name, msg.position, strict=True))
            self.recorder.joints.append((t_s, np.array([by_name[n] for n in NAMES])))

    def _on_trajectory(self, msg: JointTrajectory) -> None:
        if (t_s := self._since(stamp_to_ns(msg.header.stamp))) is None or self.recorder is None:
            return
        rows = np.array([p.positions for p in msg.points])
        after_s = np.array([p.time_from_start.sec + p.time_from_start.nanosec * 1e-9 for p in msg.points])
        self.recorder.trajectories.append((t_s, after_s, rows, np.array([p.velocities for p in msg.points])))
        took_s = self._state.get("latency_s")
        took = "" if took_s is None else f"  the last call took {took_s:.2f} s"
        high = f"  thing at {self._status['lifted_m']:+.3f} m" if "lifted_m" in self._status else ""
        self._say(f"  {t_s:5.1f} s  chunk {len(self.recorder.trajectories):2d} of {len(rows)} rows{high}{took}")

    def _on_predicted(self, msg: Image) -> None:
        stamp_ns = stamp_to_ns(msg.header.stamp)
        self._predicted_s = time.monotonic()
        if self.recorder is not None and stamp_ns >= self.recorder.start_stamp_ns:
            t_s = (stamp_ns - self.recorder.start_stamp_ns) * 1e-9
            self.recorder.pictures["predicted"].append((t_s, stamp_ns, image_to_rgb(msg, "predicted")))

    def _on_status(self, msg: String) -> None:
        if self.recorder is not None:
            t_s = (self._status.get("stamp_ns", 0) - self.recorder.start_stamp_ns) * 1e-9
            self.recorder.statuses.append((max(t_s, 0.0), msg.data))

    def _on_state(self, msg: String) -> None:
        super()._on_state(msg)
        loading = self._state.get("loading") or {}
        line = f"node {self._state.get('lifecycle')}: {loading.get('message') or self._state.get('reason')}"
        if self._state.get("lifecycle") != "active" and line != self._told:
            self._told = line
            self._say(f"  {line}")


def main(args: Sequence[str] | None = None) -> int:
    """Exit status 0 when an episode was played, 1 with a line on stderr otherwise."""
    argv = list(sys.argv if args is None else args)
    parser = argparse.ArgumentParser(description="Play and record an episode of a running simulator and policy node.")
    parser.add_argument("--episodes", required=True, help='JSON: [[seed, "task", "instruction"], ..]; ends at success')
    parser.add_argument("--max-ticks", type=int, default=160)
    parser.add_argument("--record", type=Path, required=True, metavar="FOLDER", help="for clip_robot.npz")
    parser.add_argument("--start-s", type=float, default=900.0, help="for the policy node to become active")
    options = parser.parse_args(split_arguments(argv[1:])[0])

    def say(line: str) -> None:
        print(line, flush=True)

    rclpy.init(args=argv)
    try:
        node = RecordedEpisodes(say, start_s=options.start_s)
        played = []
        for seed, task, words in json.loads(options.episodes):
            say(f'  scene {seed}: "{words}"')
            played.append(node.record(seed, task, options.max_ticks, words))
            last = played[-1]
            how = "LIFTED" if last["success"] else "not lifted"
            say(f"  {how} after {last['tick'] / 15:.1f} simulated s, highest {last['highest_m']:.2f} m")
            if last["success"]:
                break
        assert node.recorder is not None
        say(f"  wrote {node.recorder.write(options.record)}")
        say(json.dumps(played))
    except WamError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        rclpy.try_shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
