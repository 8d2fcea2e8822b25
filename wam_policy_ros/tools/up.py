"""``wam up``: start the node with the packaged configuration where there is no ``ros2`` command line."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from wam_policy_ros.contract.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default="droid", help="packaged configuration by name (droid) or a YAML file")
    parser.add_argument("--checkpoint", help="checkpoint folder, or a packaged one's name")
    parser.add_argument("--random-weights", choices=["tiny", "14b"], help="an untrained network instead: not a policy")
    parser.add_argument("--tokenizer", help="folder with tokenizer.json of umt5-xxl")
    parser.add_argument("--embodiment")
    parser.add_argument("--device")
    parser.add_argument("--instruction")
    parser.add_argument("--namespace", default="")
    parser.add_argument("--no-autostart", action="store_true", help="wait for lifecycle transitions from outside")
    parser.add_argument(
        "--fastdds-profile",
        nargs="?",
        const="",
        metavar="FILE",
        help="Fast DDS with room for raw images: config/fastdds.xml, or FILE; the cameras need it, too",
    )
    parser.add_argument(
        "ros_args", nargs="*", metavar="-- ARGS", help="more ROS arguments, e.g. -- -p executor:=events"
    )


def run(args: argparse.Namespace) -> int:
    command = [sys.executable, "-m", "wam_policy_ros.ros.main", *ros_arguments(args)]
    if args.fastdds_profile is not None:
        os.environ["FASTDDS_DEFAULT_PROFILES_FILE"] = str(profile_file(args.fastdds_profile))
    print("starting:", shown(command), file=sys.stderr, flush=True)
    # The node replaces this process, so that signals and the exit status are its own.
    os.execv(sys.executable, command)


def shown(command: Sequence[str]) -> str:
    """For people and shells: as ``shlex.join``, but what holds single quotes is put into double ones."""
    return " ".join(
        f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else shlex.quote(word) for word in command
    )


def ros_arguments(args: argparse.Namespace) -> list[str]:
    """``--ros-args`` for the node: packaged defaults, the chosen file, then what was given on the command line."""
    out = ["--ros-args", "--params-file", str(config_file("dreamzero")), "--params-file", str(config_file(args.config))]
    given = {
        "checkpoint": args.checkpoint,
        "random_weights": args.random_weights,
        "tokenizer": args.tokenizer,
        "embodiment": args.embodiment,
        "device": args.device,
        "instruction": args.instruction,
    }
    if args.random_weights is not None and args.checkpoint is None:
        given["checkpoint"] = ""  # only one of the two may be set: who names this one takes back what the file has
    for name, value in given.items():
        if value is not None:
            # YAML would read "on" or "42" as something else than text.
            out += ["-p", f"{name}:='{str(value).replace(chr(39), chr(39) * 2)}'"]
    # Nobody is there to configure it again: end with an error instead of waiting.
    out += ["-p", "autostart:=false"] if args.no_autostart else ["-p", "exit_on_failure:=true"]
    if args.namespace:
        out += ["-r", f"__ns:=/{args.namespace.strip('/')}"]
    return out + list(args.ros_args)


def profile_file(given: str) -> Path:
    """The packaged Fast DDS profile, or a file.

    Raises:
        ConfigError: the file does not exist; Fast DDS would go on without a word.
    """
    path = Path(given).expanduser().resolve() if given else packaged_file("fastdds.xml")
    if not path.is_file():
        raise ConfigError(
            "Fast DDS profile not found", got=given, remedy="--fastdds-profile alone takes the packaged one"
        )
    return path


def config_file(name: str) -> Path:
    """A packaged configuration by name, or a file by path.

    Raises:
        ConfigError: neither exists; the message lists the places and the packaged names.
    """
    if name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser()
        if path.is_file():
            return path
        raise ConfigError("configuration file not found", got=name)
    try:
        return packaged_file(f"{name}.yaml")
    except ConfigError as error:
        packaged = sorted({p.stem for place in _config_folders() for p in place.glob("*.yaml")})
        raise ConfigError(
            "no packaged configuration of this name",
            got=repr(name),
            expected=f"one of {packaged}, or a path that ends in .yaml",
            remedy=error.remedy,
        ) from None


def packaged_file(name: str) -> Path:
    """A file of ``config/`` by its name.

    Raises:
        ConfigError: it is nowhere; the message lists the places.
    """
    places = _config_folders()
    for place in places:
        if (place / name).is_file():
            return place / name
    raise ConfigError("packaged file not found", got=name, remedy=f"looked in {[str(p) for p in places]}")


def _config_folders() -> list[Path]:
    """ament prefixes, this Python environment, the source tree."""
    share = Path("share") / "wam_policy_ros" / "config"
    prefixes = [Path(p) for p in os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep) if p]
    folders = [p / share for p in (*prefixes, Path(sys.prefix))]
    return [p for p in (*folders, Path(__file__).resolve().parents[2] / "config") if p.is_dir()]
