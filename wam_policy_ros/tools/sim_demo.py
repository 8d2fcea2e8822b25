"""``wam demo --sim``: the robot of the simulator and a policy in one process, in lock-step, and a report with pictures.

No ROS and no clock: the simulated robot stands still while the policy thinks.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.model.packaged import packaged

from .lazy import load

REPORT_FILES = ("sim_demo.mp4", "sim_demo.png", "sim_demo.json", "sim_demo_predicted.png")
INSTRUCTION = "pick up the white mug"
HONEST = (
    "No checkpoint given: the network is TINY and has RANDOM WEIGHTS. It was never trained: it is NOT a policy, and\n"
    "will lift nothing. `--expert` shows the simulator's scripted expert instead, which is no network at all."
)


def run(args: argparse.Namespace) -> int:
    """One episode. Exit status 0 when it was played to its end, whether or not the thing was lifted.

    Raises:
        ConfigError: options that do not fit together; MissingDependency: an extra is not installed.
    """
    os.environ.setdefault("MUJOCO_GL", "egl")
    load("eval_suite.pictures", "wam demo --sim")  # says which extra is missing
    from wam_policy_ros.sim.world import RATE_HZ

    from .eval_suite.plan import Plan, task_names

    if args.expert and args.checkpoint is not None:
        raise ConfigError("the scripted expert is no checkpoint", got=f"--expert and --checkpoint {args.checkpoint}")
    instruction, seconds = args.instruction or INSTRUCTION, 12.0 if args.seconds is None else args.seconds
    network: dict[str, Any] = {"control": "expert"}
    if not args.expert:
        folder = args.checkpoint or next(iter(packaged().values()), None)
        network = {"checkpoint": str(folder)} if folder else {"random_weights": "tiny"}
        network |= {"device": args.device, "tokenizer": str(args.tokenizer) if args.tokenizer else None}
    if "random_weights" in network:
        print(HONEST + "\n")
    plan = Plan(
        **network, tasks=task_names("", instruction), instruction=instruction, threads=os.cpu_count() or 1,
        max_ticks=max(1, round(seconds * RATE_HZ)), pictures=str(args.report), every=True,
    )  # fmt: skip
    args.report.mkdir(parents=True, exist_ok=True)
    for name in REPORT_FILES:  # half a report of an earlier run would be taken for this one's
        (args.report / name).unlink(missing_ok=True)
    print(f'simulator: seed {args.seed}, "{instruction}", at most {seconds:g} simulated seconds', flush=True)
    return _play(plan, args)


def _play(plan: Any, args: argparse.Namespace) -> int:
    from .eval_suite.episode import EpisodePlayer
    from .eval_suite.summary import summary

    player = EpisodePlayer(plan, say=_Once())
    about = player.about
    print(f"policy: {about['weights']}, {about['execute']} of {about['horizon']} rows of a chunk are executed")
    try:
        episode, calls = player.play_and_keep(args.seed, on_call=_tell)
        print("drawing the report ...", flush=True)
        video, plot = player.draw(episode, calls)
    finally:
        player.close()
    report = summary(plan, [args.seed], [episode])
    video.rename(args.report / REPORT_FILES[0])
    predicted = plot.with_name(f"{plot.stem}_predicted.png")
    plot.rename(args.report / REPORT_FILES[1])
    if predicted.is_file():  # only a network predicts
        predicted.rename(args.report / REPORT_FILES[3])
    (args.report / REPORT_FILES[2]).write_text(json.dumps(report, indent=1), encoding="utf-8")
    others = "".join(f"; took the {n.replace('_', ' ')} instead" for n in episode.taken or ())
    print(f"{'LIFTED' if episode.success else 'not lifted'} after {episode.ticks / 15:.1f} simulated s, "
          f"highest {episode.highest_m:.2f} m{others}")  # fmt: skip
    for name in REPORT_FILES:
        if (args.report / name).is_file():
            print(f"  {args.report / name}")
    if about["random_weights"]:
        print("Reminder: random weights. Nothing above says anything about how well a policy moves a robot.")
    return 0


def _tell(tick: int, high_m: float, took_s: float) -> None:
    print(f"  {tick / 15:5.1f} s  call took {took_s:.2f} s  thing at {high_m:+.3f} m", flush=True)


class _Once:
    """Prints every new line of progress once."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, line: str) -> None:
        if line != self._last:
            self._last = line
            print(f"  {line}", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``wam demo``, for ``--sim``."""
    sim = parser.add_argument_group("in the simulator")
    sim.add_argument("--sim", action="store_true", help="in lock-step and without ROS, one scene")
    sim.add_argument("--seed", type=int, default=0, help="of the scene")
    sim.add_argument("--attempts", type=int, default=3, help="with ROS: scenes, until the thing was lifted")
    sim.add_argument("--expert", action="store_true", help="the scripted expert instead of a network")
