"""The ``wam`` command. Sub-commands are imported when they are asked for, so that ``wam up`` needs no torch."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from collections.abc import Sequence

from wam_policy_ros import __version__
from wam_policy_ros.contract.errors import MissingDependency, WamError

from .lazy import StrictParser, load

COMMANDS = {
    "inspect": "what a checkpoint folder holds and what is missing, without loading weights",
    "demo": "play a robot over real DDS, run the node, write a report with pictures",
    "replay": "feed a recording (rosbag2) through the node's own path, without ROS, and say what it would do; or "
    "--verify that a recorded policy gives the same bits again",
    "record": "serve or start the node, and record what its policy gets and gives",
    "up": "start the node without a ROS installation",
    "serve": "answer OpenPI clients, without ROS",
    "golden": "compare the engine with recorded reference runs",
    "quantize": "write an FP8 checkpoint, which loads in seconds",
    "train": "make a small network that lifts things in the simulator: all, dagger, eval",
    "eval": "success of a policy in the simulator, closed loop: engine, policy server, controls, price list of tiers",
    "data": "record the scripted expert in the simulator as a LeRobot data set",
    "bench": "measure: step, and what else wam bench --help lists",
}


def reader_has_gone(error: BrokenPipeError) -> int:
    """`wam inspect ... | head`: the exit status of a command whose output nobody reads any more, as a shell counts it.

    Raises:
        BrokenPipeError: ``error``, where it was not of the output.
    """
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # nobody at the other end is told unasked
    if not output.poll(0):
        raise error
    # What is still in its buffer would be tried again, and complained about, when the interpreter ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status. Errors of the package are printed as one message, without a traceback."""
    # Before torch loads its thread pool: pools that spin while they wait are useless on a host that does anything else.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="wam", description="DreamZero on a robot: tools of wam_policy_ros.")
    parser.add_argument("--version", action="version", version=f"wam_policy_ros {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=StrictParser)
    named = next((a for a in arguments if not a.startswith("-")), None)
    try:
        for name, text in COMMANDS.items():
            sub = commands.add_parser(name, help=text, description=text)
            if name == named:
                module = load(name, f"wam {name}")
                module.add_arguments(sub)
        args = parser.parse_args(arguments)
    except MissingDependency as error:
        print(f"wam {named}: {error}", file=sys.stderr)
        return 2
    try:
        status = int(module.run(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError as error:
        return reader_has_gone(error)
    except WamError as error:
        print(f"wam {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
