"""``wam demo``: the node and a robot to talk to, two processes over real DDS, and a report with pictures.

With a checkpoint, given or packaged, the robot is the simulator's, see ``ros_demo``. With clips its cameras play these,
and its joints are a simulated follower of what the node publishes. With neither the package draws a scene, and the
network is tiny and untrained, which is said wherever it is shown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.model.packaged import packaged

from . import ros_demo, sim_demo
from .dashboard import write_dashboard
from .report import Recording, write_plot, write_video
from .ros_processes import isolated, running, stop
from .up import config_file

HONEST = (
    "No checkpoint given: the network is TINY and has RANDOM WEIGHTS. It was never trained.\n"
    "This shows that the machinery runs: topics, timing, trajectories, pictures. It is NOT a policy: the motion is\n"
    "meaningless noise that wanders, and the predicted video is noise."
)
INSTRUCTION = "pick up the block and put it in the bowl"
# Its own namespace and domain: nothing of a demo may reach a robot on the same host or network.
NAMESPACE = "wam_demo"
REPORT_FILES = ("demo.mp4", "trajectory.png", "dashboard.png", "summary.json", "node.log", "clip_robot.npz")
# The robot is simulated and shares a few cores with the node: a late message means a busy host, not a dead camera.
PATIENCE = {
    "sync.max_age_s": "1.0",
    "sync.joint_max_age_s": "1.0",
    "sync.max_skew_s": "0.2",
    "safety.executor_stall_s": "5.0",
    "control.mode": "auto",
}

# Noise asks for more than any arm allows, and would be refused. Nothing but a simulated follower executes it.
NOISE_LIMITS = {
    "safety.max_velocity": "[20.0]",
    "safety.max_acceleration": "[2000.0]",
    "safety.max_first_step_rad": "1.0",
    "safety.on_violation": "clamp",
    "safety.clamp_excess": "10.0",
    "safety.clamp_outside": "1.0",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--clips", type=Path, metavar="FOLDER", help="mp4 clips named after the cameras, instead of the simulator"
    )
    parser.add_argument("--checkpoint", type=Path, help="checkpoint folder, or a packaged one's name; default: the "
                        "packaged one, if there is one, else a tiny network with random weights")  # fmt: skip
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json of umt5-xxl")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--instruction", help=f"default: {INSTRUCTION!r}; with --sim: {sim_demo.INSTRUCTION!r}")
    parser.add_argument("--seconds", type=float, help="play time once the node is active; default: 30; simulated 12")
    parser.add_argument("--start-timeout", type=float, default=900.0, help="longest wait for the weights [s]")
    parser.add_argument("--report", type=Path, default=Path("demo_report"), help="folder for the report")
    sim_demo.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.sim:
        return sim_demo.run(args)
    if args.expert:
        raise ConfigError("the scripted expert plays in lock-step", got="--expert without --sim", expected="both")
    if args.clips is None and (network := args.checkpoint or next(iter(packaged().values()), None)) is not None:
        return ros_demo.run(args, str(network))
    args.seconds = 30.0 if args.seconds is None else args.seconds
    args.instruction = args.instruction or INSTRUCTION
    random_weights = args.checkpoint is None
    source = f"clips in {args.clips}" if args.clips else "a scene drawn by the package (no clips given)"
    print(f"cameras: {source}\njoints: a simulated follower of the published trajectories\n")
    if random_weights:
        print(HONEST + "\n")
    args.report.mkdir(parents=True, exist_ok=True)
    for name in REPORT_FILES:  # half a report of an earlier run would be taken for this one's
        (args.report / name).unlink(missing_ok=True)
    environment = isolated()
    log = args.report / "node.log"
    with open(log, "w", encoding="utf-8") as sink, running(_node_command(args), environment, sink) as node:
        robot_command = _robot_command(args)
        with running(robot_command, environment, subprocess.PIPE) as robot:
            watcher = threading.Thread(target=_end_robot_if_node_dies, args=(node, robot), daemon=True)
            watcher.start()
            assert robot.stdout is not None
            for line in robot.stdout:
                print("  " + line.rstrip(), flush=True)
            robot_status = robot.wait()
        node_status = stop(node)
    if robot_status != 0 or node_status != 0:
        print(f"\nthe robot ended with status {robot_status}, the node with {node_status}; the node's log:")
        print("\n".join(log.read_text(encoding="utf-8").splitlines()[-25:]))
        return 1
    return _report(args, random_weights)


def _node_command(args: argparse.Namespace) -> list[str]:
    given = {"instruction": args.instruction, "device": args.device}
    given |= {"random_weights": "tiny"} if args.checkpoint is None else {"checkpoint": str(args.checkpoint)}
    if args.tokenizer is not None:
        given["tokenizer"] = str(args.tokenizer)
    command = [sys.executable, "-m", "wam_policy_ros.ros.main", "--ros-args"]
    for name in ("dreamzero", "droid"):
        command += ["--params-file", str(config_file(name))]
    for key, value in given.items():
        command += ["-p", f"{key}:='{value.replace(chr(39), chr(39) * 2)}'"]
    for key, value in {**PATIENCE, **(NOISE_LIMITS if args.checkpoint is None else {})}.items():
        command += ["-p", f"{key}:={value}"]
    command += ["-p", "pictures.time_share:=1.0"]  # the report wants every prediction
    return [*command, "-p", "exit_on_failure:=true", "-r", f"__ns:=/{NAMESPACE}"]


def _robot_command(args: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "wam_policy_ros.ros.clip_robot", "--seconds", str(args.seconds)]
    command += ["--namespace", NAMESPACE]
    command += ["--wait-for-node", str(args.start_timeout), "--record", str(args.report)]
    return command + (["--clips", str(args.clips)] if args.clips else ["--scene"])


def _end_robot_if_node_dies(node: subprocess.Popen[str], robot: subprocess.Popen[str]) -> None:
    while robot.poll() is None:
        if node.poll() is not None:
            stop(robot)
            return
        time.sleep(0.2)


def _report(args: argparse.Namespace, random_weights: bool) -> int:
    recording = Recording.load(args.report / "clip_robot.npz")
    chunks = [t for t in recording.trajectories if len(t.positions) > 1]
    if not chunks:
        raise ConfigError(
            "the node published no trajectory",
            got=f"log in {args.report / 'node.log'}",
            expected=f"at least one chunk in {args.seconds:g} s",
            remedy="a longer --seconds (make demo DURATION=), or the log's reason",
        )
    weights = "RANDOM WEIGHTS, not a policy" if random_weights else f"checkpoint {args.checkpoint.name}"
    print("\ndrawing the report ...", flush=True)
    frames = write_video(recording, args.report / "demo.mp4", f"{weights} | {args.instruction[:90]}")
    write_plot(recording, args.report / "trajectory.png", f"published joint trajectories ({weights})")
    write_dashboard(recording, args.report / "dashboard.png", weights)
    intervals = np.diff([t.arrival_s for t in chunks])
    spacing = {"p50": float(np.median(intervals)), "max": float(intervals.max())} if len(intervals) else {}
    summary = {
        "weights": weights,
        "random_weights": random_weights,
        "instruction": args.instruction,
        "chunks": len(chunks),
        "chunk_interval_s": spacing,
        "camera_frames_sent": frames,
        "predicted_frames_received": len(recording.predicted),
    }
    (args.report / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    print(
        f"chunks published: {len(chunks)}"
        + (f", median spacing {np.median(intervals):.2f} s" if len(intervals) else "")
    )
    print(f"camera frames sent: {frames}, predicted frames received: {len(recording.predicted)}")
    for name in ("demo.mp4", "trajectory.png", "dashboard.png", "summary.json", "node.log"):
        print(f"  {args.report / name}")
    if random_weights:
        print("Reminder: random weights. Nothing above says anything about how well DreamZero moves a robot.")
    return 0
