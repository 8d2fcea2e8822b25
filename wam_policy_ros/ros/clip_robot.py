"""``wam_clip_robot``: a robot to talk to when there is none. Camera clips or a drawn scene, and a simulated follower.

Everything goes over real topics; the policy node cannot tell the difference.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from wam_policy_ros.contract.embodiment import get_embodiment
from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.contract.interface import CameraSpec

from .scene import render

CAMERA_HZ, JOINT_HZ = 15.0, 60.0
PANDA = tuple(f"panda_joint{i}" for i in range(1, 8))
DROID_NAMES = (*PANDA, "finger_joint")
DROID_HOME = (0.0, -0.628, 0.0, -2.513, 0.0, 1.885, 0.0, 0.0)

Pictures = Iterator[list[npt.NDArray[np.uint8]]]


def clip_pictures(folder: Path, cameras: Sequence[CameraSpec]) -> Pictures:
    """Frames of ``<folder>/*<camera name>*.mp4``, all cameras in step, looped for ever; decoded once.

    Raises:
        ConfigError: a camera has no clip, or a clip cannot be decoded.
    """
    clips = []
    for camera in cameras:
        found = sorted(folder.glob(f"*{camera.name}*.mp4"))
        frames = _decode(found[0]) if found else []
        if not frames:
            raise ConfigError(
                f"no clip for camera {camera.name!r}",
                got=sorted(p.name for p in folder.glob("*")) or f"nothing in {folder}",
                expected=f"an mp4 with {camera.name} in its name",
            )
        clips.append(frames)
    count = min(len(c) for c in clips)
    while True:
        for i in range(count):
            yield [clip[i] for clip in clips]


def _decode(path: Path) -> list[npt.NDArray[np.uint8]]:
    video = cv2.VideoCapture(str(path))
    out: list[npt.NDArray[np.uint8]] = []
    while True:
        good, bgr = video.read()
        if not good:
            video.release()
            return out
        out.append(np.asarray(cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB), dtype=np.uint8))


def scene_pictures(cameras: Sequence[CameraSpec]) -> Pictures:
    """The drawn scene at 15 Hz, one view per camera."""
    step = 0
    while True:
        yield render(step / CAMERA_HZ, height=cameras[0].height, width=cameras[0].width)[: len(cameras)]
        step += 1


def parse(args: Sequence[str]) -> argparse.Namespace:
    """Command line; ROS arguments (--ros-args ...) must be removed first."""
    parser = argparse.ArgumentParser(
        prog="wam_clip_robot",
        description="Plays a robot for the node wam_policy over real topics: cameras from clips or from a drawn scene, "
        "and joint states. THE JOINTS ARE A SIMULATED FOLLOWER: they start at --home and follow the published "
        "JointTrajectory by linear interpolation; they do not belong to the clips, whose pictures do not react.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--clips", type=Path, metavar="FOLDER", help="mp4 files with the camera names in their names")
    source.add_argument("--scene", action="store_true", help="a drawn scene: table, bowl, moving block")
    parser.add_argument("--embodiment", default="oxe_droid")
    parser.add_argument("--camera-topics", nargs="+", metavar="TOPIC", help="in the embodiment's camera order")
    parser.add_argument("--joint-topic", default="joint_states")
    parser.add_argument("--trajectory-topic", default="joint_trajectory")
    parser.add_argument("--node", default="wam_policy", help="name of the policy node, for its ~/state and pictures")
    parser.add_argument("--namespace", default="", help="of the robot and the policy node")
    parser.add_argument("--joint-names", nargs="+", metavar="NAME", help="default: a Panda with a Robotiq gripper")
    parser.add_argument("--home", nargs="+", type=float, metavar="POSITION", help="start of the joints [rad]")
    parser.add_argument("--prompt", help="publish this instruction on the node's ~/prompt")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="end by itself after this time [s]; default: at Ctrl-C"
    )
    parser.add_argument(
        "--wait-for-node",
        type=float,
        metavar="S",
        help="count --seconds from when the node is active; wait S at most",
    )
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="write clip_robot.npz at the end")
    options = parser.parse_args(args)
    if options.joint_names is None:
        options.joint_names = list(DROID_NAMES)
    if options.home is None:
        if tuple(options.joint_names) != DROID_NAMES:
            parser.error("--home is needed with other --joint-names: a start pose is never made up")
        options.home = list(DROID_HOME)
    if len(options.home) != len(options.joint_names):
        parser.error(f"--home has {len(options.home)} values for {len(options.joint_names)} joints")
    return options


def describe_chunk(t_s: float, interval_s: float | None, state: dict[str, Any], positions: npt.NDArray[Any]) -> str:
    """The line printed for every received trajectory."""
    interval = "  first" if interval_s is None else f"{interval_s:6.3f}s"
    latency = state.get("latency_s")
    step = "   n/a" if latency is None else f"{latency:6.3f}s"
    first = " ".join(f"{p:+.3f}" for p in positions[0][:4])
    return f"{t_s:8.3f}s  interval {interval}  step {step}  rows {len(positions):3d}  first joints {first} ..."


def play(options: argparse.Namespace, say: Callable[[str], None] = print) -> int:
    """Run until the time is over or SIGINT. Needs rclpy initialised. Returns the number of trajectories received."""
    import rclpy
    from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor

    from .clip_node import ClipRobot

    cameras = get_embodiment(options.embodiment).cameras
    pictures = clip_pictures(options.clips, cameras) if options.clips else scene_pictures(cameras)
    robot = ClipRobot(options, cameras, pictures, say)
    executor = SingleThreadedExecutor()
    executor.add_node(robot)
    try:
        if options.wait_for_node is not None:
            _wait(robot, executor, options.wait_for_node)
        robot.begin()
        end = time.monotonic() + options.seconds
        while rclpy.ok() and time.monotonic() < end:
            executor.spin_once(timeout_sec=0.1)
    except (KeyboardInterrupt, ExternalShutdownException):
        pass
    except RuntimeError:  # rclpy's own kinds are not public
        if rclpy.ok():  # else a signal came while a callback was publishing
            raise
    finally:
        if options.record:
            say(f"wrote {robot.recorder.write(options.record)}")
        executor.shutdown(1.0)
        robot.destroy_node()
    return robot.received


def _wait(robot: Any, executor: Any, timeout_s: float) -> None:
    """Play until the policy node is active.

    Raises:
        ConfigError: it refused, failed, or took longer than ``timeout_s``.
    """
    import rclpy

    end = time.monotonic() + timeout_s
    while rclpy.ok() and not robot.node_active:
        executor.spin_once(timeout_sec=0.1)
        if robot.node_failed:
            raise ConfigError("the policy node cannot start", got=robot.node_failed, remedy="see its log")
        if time.monotonic() > end:
            raise ConfigError("the policy node did not become active", got=f"waited {timeout_s:.0f} s")


def main(args: Sequence[str] | None = None) -> int:
    """Entry point of ``wam_clip_robot``."""
    from .main import find_problem

    words = list(sys.argv[1:] if args is None else args)
    if (problem := find_problem()) is not None and not {"-h", "--help"} & set(words):
        print(f"wam_clip_robot: {problem}", file=sys.stderr)
        return 2
    ros = words.index("--ros-args") if "--ros-args" in words else len(words)
    options = parse(words[:ros])
    import rclpy

    rclpy.init(args=words[ros:])
    try:
        received = play(options, lambda line: print(line, flush=True))
    except ConfigError as error:
        print(f"wam_clip_robot: {error}", file=sys.stderr)
        return 2
    finally:
        rclpy.try_shutdown()
    print(json.dumps({"trajectories": received}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
