"""``wam data``: the scripted expert in the simulator, recorded as a LeRobot v3 data set. Every seed is one episode."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from wam_policy_ros.contract.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--episodes", type=int, required=True, help="how many scenes; those the expert fails are left out"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder; an interrupted recording goes on in it")
    parser.add_argument("--first-seed", type=int, default=10_000)
    parser.add_argument("--tasks", help="names with commas between them; default: all")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="simulators side by side")
    parser.add_argument("--undisturbed", action="store_true", help="never push the arm off its way")


def run(args: argparse.Namespace) -> int:
    # The processes that draw are told here; on a machine with a GPU the same value means the GPU.
    os.environ.setdefault("MUJOCO_GL", "egl")
    from wam_policy_ros.sim.cameras import NAMES, SIZE
    from wam_policy_ros.sim.tasks import TASKS, find_task
    from wam_policy_ros.train.errors import DataError
    from wam_policy_ros.train.generate import Generator
    from wam_policy_ros.train.lerobot import finish
    from wam_policy_ros.train.record import Recorder, Recording

    if args.episodes < 1 or args.workers < 1:
        raise ConfigError("--episodes and --workers must be at least 1", got=f"{args.episodes}, {args.workers}")
    tasks = tuple(find_task(n.strip()).name for n in args.tasks.split(",")) if args.tasks else tuple(TASKS)
    what = Recording(tasks=tasks, per_shard=min(8, args.episodes), disturbed=not args.undisturbed)
    count = -(-args.episodes // what.per_shard)
    generator = Generator(
        args.out, what, workers=min(args.workers, count), first_seed=args.first_seed, count=count, make=Recorder
    )
    begin = time.monotonic()
    try:
        while generator.running:
            p, spent = generator.progress, time.monotonic() - begin
            bar = "#" * round(30 * p.shards / count)
            print(f"\r[{bar:30}] {p.episodes} episodes, {p.steps} steps, {p.steps / max(spent, 1e-9):.0f} steps/s ",
                  end="", file=sys.stderr, flush=True)  # fmt: skip
            time.sleep(0.5)
    finally:
        done = generator.stop()
        print(file=sys.stderr)
    for line in generator.errors[:3]:
        print(f"a simulator ended: {line}", file=sys.stderr)
    if generator.errors and not done.shards:
        raise DataError("the simulator does not run", got=generator.errors[0])
    info = finish(args.out, what.fps, SIZE, NAMES)
    counts = f"{info['total_episodes']} episodes, {info['total_frames']} frames, {info['total_tasks']} instructions"
    print(f"{args.out}: {counts}; the expert failed {done.dropped} scenes of this run")
    return 1 if generator.errors else 0
