"""``wam replay``: what the node would have made of a recording. The work is done by ``wam_policy_ros.ros.replay``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from .up import config_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recording", type=Path, help="rosbag2 folder, mcap or sqlite3")
    parser.add_argument("--config", default="droid", help="packaged configuration by name (droid) or a YAML file")
    parser.add_argument("--checkpoint", help="checkpoint folder; without one and without --random-weights: hold still")
    parser.add_argument("--random-weights", choices=["tiny", "14b"], help="an untrained network instead: not a policy")
    parser.add_argument("--tokenizer", help="folder with tokenizer.json of umt5-xxl")
    parser.add_argument("--instruction", default="replay", help="what the policy is told to do")
    parser.add_argument("--latency", default="measured", help="seconds a step takes, or measured on this machine")
    parser.add_argument("--namespace", default="", help="of the node, for relative topics")
    parser.add_argument("--sim-time", choices=["auto", "yes", "no"], default="auto", help="use the recording's /clock")
    parser.add_argument("--json", type=Path, help="write the report here, too")
    parser.add_argument(
        "-p", dest="given", action="append", default=[], metavar="NAME:=VALUE", help="a parameter of the node"
    )


def run(args: argparse.Namespace) -> int:
    command = [sys.executable, "-m", "wam_policy_ros.ros.replay", *arguments(args)]
    print("running:", shlex.join(command), file=sys.stderr, flush=True)
    os.execv(sys.executable, command)


def arguments(args: argparse.Namespace) -> list[str]:
    """Those of ``wam_policy_ros.ros.replay``."""
    out = [str(args.recording), "--params-file", str(config_file("dreamzero"))]
    out += ["--params-file", str(config_file(args.config))]
    given = {
        "backend": "engine" if args.checkpoint or args.random_weights else "hold",
        "checkpoint": args.checkpoint or "",
        "random_weights": args.random_weights or "",
        "tokenizer": args.tokenizer or "",
        "instruction": args.instruction,
    }
    for name, value in given.items():
        # YAML would read "on" or "42" as something else than text.
        out += ["-p", f"{name}:='{value.replace(chr(39), chr(39) * 2)}'"]
    for one in args.given:
        out += ["-p", one]
    out += ["--latency", args.latency, "--sim-time", args.sim_time, "--namespace", args.namespace]
    return out + (["--json", str(args.json)] if args.json else [])
