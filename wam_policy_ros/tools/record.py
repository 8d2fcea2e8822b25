"""``wam record DIR serve ...`` and ``wam record DIR up ...``: those commands with a record of what the policy gets and
gives. The same as ``wam serve --record DIR`` and the node's parameter ``record.folder``."""

from __future__ import annotations

import argparse
from pathlib import Path

from wam_policy_ros.contract.errors import ConfigError

from .lazy import load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="where; made if need be")
    parser.add_argument("--stages", action="store_true", help="and a digest of every stage of a call; slower")
    parser.add_argument("--max-mb", type=float, default=1024.0, help="size of a file; default: 1024")
    parser.add_argument("which", choices=["serve", "up"], help="what to run: wam serve, or wam up")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def run(args: argparse.Namespace) -> int:
    module = load(args.which, f"wam {args.which}")
    parser = argparse.ArgumentParser(prog=f"wam {args.which}")
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(words(args))))


def words(args: argparse.Namespace) -> list[str]:
    """Arguments of the other command.

    Raises:
        ConfigError: it is told to record already.
    """
    rest = list(args.rest)
    if any(word.startswith(("--record", "record.")) for word in rest):
        raise ConfigError("the record is given twice", got=rest, remedy="leave it out of the inner command")
    folder = str(args.folder.expanduser().resolve())
    if args.which == "serve":
        stages = ["--record-stages"] if args.stages else []
        return ["--record", folder, *stages, "--record-mb", f"{args.max_mb:g}", *rest]
    quoted = folder.replace("'", "''")
    values = {"folder": f"'{quoted}'", "stages": str(args.stages).lower(), "max_file_mb": repr(args.max_mb)}
    given = [word for name, value in values.items() for word in ("-p", f"record.{name}:={value}")]
    # ROS arguments stand behind "--", which argparse keeps or removes as its version sees fit.
    begin = next((i for i, word in enumerate(rest) if word in ("--", "-p", "-r", "--ros-args")), len(rest))
    return [*rest[:begin], "--", *(word for word in rest[begin:] if word != "--"), *given]
