"""The package's ROS processes, started from the command line's room, which knows no ROS."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from wam_policy_ros.contract.errors import MissingDependency

from .up import config_file

NODE, SIMULATOR = "wam_policy_ros.ros.main", "wam_policy_ros.sim.main"


def need_rclpy(what: str) -> None:
    """Raises MissingDependency."""
    if importlib.util.find_spec("rclpy") is None:
        raise MissingDependency("rclpy", "ros-kilted", what)


def isolated() -> dict[str, str]:
    """An environment with a DDS domain of its own on this host: nothing of it ever talks to a robot."""
    environment = dict(os.environ)
    environment["ROS_DOMAIN_ID"] = str(random.SystemRandom().randint(60, 100))
    environment["ROS_AUTOMATIC_DISCOVERY_RANGE"] = "LOCALHOST"
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


def ros_command(
    module: str, namespace: str, configs: tuple[str, ...], values: Mapping[str, Any], *, remap: Mapping[str, str] = {}
) -> list[str]:
    """A node's command line.

    Args:
        module: ``NODE`` or ``SIMULATOR``.
        configs: packaged parameter files by name; values: name -> value of parameters on top of these.
    """
    command = [sys.executable, "-m", module, "--ros-args"]
    for name in configs:
        command += ["--params-file", str(config_file(name))]
    for key, value in values.items():
        command += ["-p", f"{key}:={_yaml(value)}"]
    for old, new in {"__ns": f"/{namespace}", **remap}.items():
        command += ["-r", f"{old}:={new}"]
    return command


def _yaml(value: Any) -> str:
    """YAML would read "on" or "42" as something else than text, and 3 as no number with a point."""
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_yaml(v) for v in value) + "]"
    return str(value).lower() if isinstance(value, bool) else repr(value)


@contextlib.contextmanager
def running(
    command: list[str], environment: Mapping[str, str], stdout: int | IO[str]
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, env=environment, stdout=stdout, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[Any]) -> int:
    """SIGINT, then patience, then force; the exit status."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(15.0)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


def last_words(log: Path, lines: int = 4) -> str:
    """Of a process that has ended."""
    return " | ".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-lines:])
