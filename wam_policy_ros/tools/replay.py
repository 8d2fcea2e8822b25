"""``wam replay``: what the node would have made of a recording, or whether a recorded policy gives the same bits again.

The first is done by ``wam_policy_ros.ros.replay``, the second (``--verify``) by ``verify_record``.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from wam_policy_ros.contract.errors import ConfigError, MissingDependency

from .up import config_file, shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recording", type=Path, help="rosbag2 folder, mcap or sqlite3; or a record of a policy")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="of a record that wam serve --record or record.folder made: the same bits?",
    )
    parser.add_argument("--device", help="with --verify: another device than the recorded one")
    parser.add_argument("--engine", action="append", default=[], metavar="OPTION=VALUE", help="with --verify: another "
                        "engine option than the recorded one")  # fmt: skip
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
    if args.verify or _is_record(args.recording):
        from . import verify_record

        return verify_record.run(args) if args.verify else verify_record.describe(args)
    if args.device or args.engine:
        raise ConfigError("--device and --engine belong to --verify", remedy="-p device:=... is for the node")
    command = [sys.executable, "-m", "wam_policy_ros.ros.replay", *arguments(args)]
    print("running:", shown(command), file=sys.stderr, flush=True)
    return _become(command)


def _become(command: list[str]) -> NoReturn:
    os.execv(command[0], command)


def _is_record(path: Path) -> bool:
    """False for recordings of ROS, also where what reads records is not installed."""
    if (path / "metadata.yaml").is_file():
        return False
    try:
        from .verify_record import is_record
    except MissingDependency:
        return False
    return is_record(path)


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
