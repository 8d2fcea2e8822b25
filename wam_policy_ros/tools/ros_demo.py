"""``wam demo`` with trained weights: the simulator and the policy node, two processes over real DDS, and a report.

In lock-step: the simulated robot stands still while the policy thinks, so a slow machine shows the same motion. The
node runs as behind the door ``ros`` of ``wam eval``, whose figures therefore hold for it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from wam_policy_ros.contract.errors import ConfigError

from .lazy import load
from .ros_processes import need_rclpy

SECONDS = 12.0
SHOWN = ("demo.mp4", "trajectory.png", "dashboard.png", "summary.json", "wam_policy.log", "wam_sim.log")
REPORT_FILES = (*SHOWN, "clip_robot.npz")


def run(args: argparse.Namespace, checkpoint: str) -> int:
    """Scenes until the thing was lifted, at most ``args.attempts``. Exit status 0 when they were played to their end,
    whether or not it was.

    Raises:
        MissingDependency: no rclpy, or an extra is not installed. ConfigError: simulator or node cannot start.
    """
    os.environ.setdefault("MUJOCO_GL", "egl")
    need_rclpy("wam demo")
    load("eval_suite.ros_door", "wam demo")  # says which extra is missing
    from .eval_suite.plan import Plan, task_names
    from .eval_suite.ros_door import cell
    from .sim_demo import INSTRUCTION

    instruction = args.instruction or INSTRUCTION
    seconds = SECONDS if args.seconds is None else args.seconds
    plan = Plan(
        door="ros", checkpoint=checkpoint, tokenizer=str(args.tokenizer) if args.tokenizer else None,
        device=args.device, tasks=task_names("", instruction), instruction=instruction,
        threads=os.cpu_count() or 1, max_ticks=max(1, round(15 * seconds)),
    )  # fmt: skip
    args.report.mkdir(parents=True, exist_ok=True)
    for name in REPORT_FILES:  # half a report of an earlier run would be taken for this one's
        (args.report / name).unlink(missing_ok=True)
    print(f"robot: wam_sim, a simulated Panda with three cameras, in lock-step\npolicy: wam_policy, {checkpoint}\n")
    begin_s = time.monotonic()
    with cell(plan, print, args.report, more={"pictures.time_share": 1.0}) as (environment, namespace, trouble):
        command = [sys.executable, "-m", "wam_policy_ros.ros.sim_recorder", "--record", str(args.report)]
        seeds = range(args.seed, args.seed + max(1, args.attempts))
        command += ["--episodes", json.dumps([[s, plan.tasks[0], instruction] for s in seeds])]
        command += ["--max-ticks", str(plan.max_ticks), "--start-s", str(args.start_timeout)]
        command += ["--ros-args", "-r", f"__ns:=/{namespace}"]
        played = _follow(command, environment, trouble)
    return _report(args, played, instruction, begin_s)


def _follow(command: Sequence[str], environment: dict[str, str], trouble: Any) -> list[dict[str, Any]]:
    """Print what the recorder says; what it gives at its end."""
    from .eval_suite.ros_door import end_with

    last = told = ""
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        threading.Thread(target=end_with, args=(process, trouble), daemon=True).start()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                last = line.rstrip()
                if last.startswith("[{"):  # a library may have a word after it
                    told = last
                else:
                    print(last, flush=True)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0 or not told:
        raise ConfigError("the demo ended before its report", got=trouble() or last or f"status {process.returncode}")
    played: list[dict[str, Any]] = json.loads(told)
    return played


def _report(args: argparse.Namespace, played: list[dict[str, Any]], instruction: str, begin_s: float) -> int:
    from .dashboard import write_dashboard
    from .report import Recording, write_plot, write_video

    print("\ndrawing the report ...", flush=True)
    shown, folder = played[-1], args.report
    recording = Recording.load(folder / "clip_robot.npz")
    weights = str(shown["policy"]["weights"])
    weights = f"RANDOM WEIGHTS: {weights}" if shown["policy"]["random_weights"] else weights
    ended = "lifted" if shown["success"] else "not lifted"
    caption = f"scene {shown['seed']}: {ended} | {textwrap.shorten(instruction, 80, placeholder=' ..')} | {weights}"
    frames = write_video(recording, folder / "demo.mp4", caption)
    write_plot(recording, folder / "trajectory.png", caption)
    write_dashboard(recording, folder / "dashboard.png", weights)
    attempts = [{n: p[n] for n in ("seed", "success", "tick", "highest_m", "others_taken")} for p in played]
    summary = {
        "weights": weights,
        "random_weights": shown["policy"]["random_weights"],
        "instruction": instruction,
        "success": shown["success"],
        "scenes": attempts,
        "chunks": len([t for t in recording.trajectories if len(t.positions) > 1]),
        "camera_frames": frames,
        "predicted_frames_received": len(recording.predicted),
        "greatest_motion_rad": round(float(np.ptp(recording.joints[:, :7], axis=0).max()), 3),
        "seconds": round(time.monotonic() - begin_s, 1),
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    tried = f" in scene {shown['seed']}" + (f", the {len(played)}. that was tried" if len(played) > 1 else "")
    others = "".join(f"; took the {n.replace('_', ' ')} instead" for n in shown["others_taken"])
    print(f"{ended.upper()}{tried}, highest {shown['highest_m']:.2f} m{others}; {summary['seconds']:.0f} s in all")
    for name in SHOWN:
        print(f"  {folder / name}")
    return 0
