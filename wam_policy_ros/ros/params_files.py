"""What a person meant with a parameter file, when rcl rejects it or it sets nothing. Knows no rclpy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from wam_policy_ros.contract.errors import ConfigError

_MUST = "must start with `/**/wam_policy:` and, indented below it, `ros__parameters:`"


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments for the program and those for ROS: what follows ``--ros-args``, up to ``--``."""
    plain: list[str] = []
    ros: list[str] = []
    inside = False
    for argument in argv:
        if argument in ("--ros-args", "--") and (argument == "--ros-args" or inside):
            inside = argument == "--ros-args"
        else:
            (ros if inside else plain).append(argument)
    return plain, ros


def given_files(ros_arguments: Sequence[str]) -> list[Path]:
    """Every ``--params-file``, in order."""
    return [Path(value) for name, value in pairwise(ros_arguments) if name == "--params-file"]


def find_fault(path: Path) -> str | None:
    """Why rcl does not accept a parameter file, in one line, or None when nothing is found."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}"
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        return f"{path}: is not valid YAML: {' '.join(str(error).split())}"
    if tree is not None and not isinstance(tree, dict):
        return f"{path}: {_MUST}"
    for name, value in _leaves(tree or {}):
        if value is not None:
            return f"{path}: {_MUST}; got {name!r} outside of ros__parameters"
    return None


def names_of(path: Path) -> list[str]:
    """Full names, maybe with wildcards, of the nodes for which a file has parameters; empty for a faulty file."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return []
    return [name for name, _ in _sections(tree, ())] if isinstance(tree, dict) else []


def read_values(path: Path, node: str) -> dict[str, Any]:
    """Name -> value of what a file gives to a node, by its full name; later sections win over earlier ones.

    Raises:
        ConfigError: the file cannot be read or is faulty.
    """
    if (fault := find_fault(path)) is not None:
        raise ConfigError("a parameter file cannot be used", got=fault)
    out: dict[str, Any] = {}
    for name, values in _sections(yaml.safe_load(path.read_text(encoding="utf-8")) or {}, ()):
        if _matches(name, node):
            out |= _flat(values, "")
    return out


def unused(path: Path, node: str) -> str | None:
    """A line when a file sets nothing for a node, by its full name, else None."""
    names = names_of(path)
    if any(_matches(name, node) for name in names):
        return None
    given = f"it has parameters for {', '.join(names)}" if names else "it has no parameters"
    return f"{path} sets nothing for this node, {node}: {given}; remedy: it {_MUST}"


def _sections(tree: dict[Any, Any], above: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Full name, maybe with wildcards, and parameters of each node in a file."""
    for key, value in tree.items():
        if key == "ros__parameters":
            yield "/" + "/".join(part.strip("/") for part in above), value or {}
        elif isinstance(value, dict):
            yield from _sections(value, (*above, str(key)))


def _flat(tree: dict[str, Any], prefix: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out


def _leaves(tree: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Values that lie outside of ``ros__parameters``."""
    for key, value in tree.items():
        if key == "ros__parameters":
            continue
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield str(key), value


def _matches(pattern: str, node: str) -> bool:
    """As rcl does: ``*`` is one part of a name, ``**`` any number of them."""
    parts = {"*": "/[^/]+", "**": "(/[^/]+)*"}
    expression = "".join(parts.get(part, "/" + re.escape(part)) for part in pattern.strip("/").split("/"))
    return re.fullmatch(expression, node) is not None
