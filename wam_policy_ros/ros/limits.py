"""Where the limits of the joints come from: the robot's URDF and the parameters. Knows no rclpy."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.contract.limits import JointLimits, Known, tightest

from .joints import JointMap
from .parameters import NodeParameters

DEFAULT_ACCELERATION = 10.0
"""rad/s^2, of joints of which neither URDF nor parameters say anything: URDFs seldom do."""

_ENDS = ("lower", "upper")
_MOVES = ("revolute", "continuous", "prismatic")


def read_urdf(text: str, source: str) -> dict[str, Known]:
    """Limits of every moving joint of a URDF. Soft limits (``safety_controller``) count where they are tighter.

    Args:
        text: XML.
        source: where it came from, for messages.

    Raises:
        ConfigError: not a URDF, or a limit that is not a number.
    """
    try:
        robot = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ConfigError(f"the robot's description from {source} is not XML", got=str(error)) from error
    if robot.tag != "robot":
        raise ConfigError(f"the robot's description from {source} is no URDF", got=f"<{robot.tag}>", expected="<robot>")
    found = {}
    for joint in robot.iter("joint"):
        if (kind := joint.get("type")) not in _MOVES:
            continue
        name = joint.get("name", "")
        limit, soft = joint.find("limit"), joint.find("safety_controller")
        lower: float | None = -math.inf
        upper: float | None = math.inf
        if kind != "continuous":
            # The format's default for an end that is not given is 0.
            ends = [
                0.0 if limit is not None and limit.get(k) is None else _number(limit, k, name, source) for k in _ENDS
            ]
            lower = _tighter(max, ends[0], _number(soft, "soft_lower_limit", name, source))
            upper = _tighter(min, ends[1], _number(soft, "soft_upper_limit", name, source))
        speed, sharpness = (_number(limit, k, name, source) for k in ("velocity", "acceleration"))
        found[name] = Known(lower, upper, speed, sharpness)
    return found


def _number(element: ElementTree.Element | None, key: str, joint: str, source: str) -> float | None:
    value = None if element is None else element.get(key)
    if value is None:
        return None
    try:
        out = float(value)
    except ValueError:
        out = math.nan
    if math.isnan(out):
        raise ConfigError(f"URDF from {source}: {key} of joint {joint!r} is not a number", got=value)
    return out


def _tighter(choose: Callable[..., float], *values: float | None) -> float | None:
    known = [v for v in values if v is not None]
    return choose(known) if known else None


def given_urdf(params: NodeParameters) -> tuple[str, str] | None:
    """Text and source of the URDF in ``safety.urdf``; None when it is not set.

    Raises:
        ConfigError: the file cannot be read.
    """
    given = params.safety_urdf.strip()
    if not given:
        return None
    if given.startswith("<"):
        return given, "safety.urdf"
    try:
        return Path(given).expanduser().read_text(encoding="utf-8"), given
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("safety.urdf cannot be read", got=given, remedy=str(error)) from error


def from_parameters(params: NodeParameters, joints: JointMap) -> dict[str, Known]:
    """What the parameters say, per commanded joint.

    Raises:
        ConfigError: a list of another length than the robot has joints.
    """
    names, arm = joints.command_names, [not g for g in joints.grippers]
    columns: dict[str, list[float | None]] = {}
    for key in ("position_min", "position_max", "max_velocity", "max_acceleration"):
        values = getattr(params, f"safety_{key}")
        if len(values) == len(names):
            columns[key] = list(values)
        elif len(values) == sum(arm):
            rest = iter(values)
            columns[key] = [next(rest) if a else None for a in arm]
        elif len(values) <= 1:
            columns[key] = [values[0] if values and a else None for a in arm]
        else:
            raise ConfigError(
                f"safety.{key} does not fit the robot",
                got=f"{len(values)} values",
                expected=f"1 for all joints, {sum(arm)} without grippers, or {len(names)}: {list(names)}",
            )
    return {n: Known(*(columns[k][i] for k in columns)) for i, n in enumerate(names)}


def resolve_limits(
    params: NodeParameters, joints: JointMap, description: tuple[str, str] | None
) -> tuple[JointLimits, list[str]]:
    """The limits everything that leaves is held against, see ``contract.limits.tightest``.

    Args:
        description: text and source of the robot's URDF, when there is one.

    Returns:
        The limits, and a line for each parameter that would have loosened the URDF's.

    Raises:
        ConfigError: limits are missing, contradict each other, or their source cannot be read.
    """
    robot = read_urdf(*description) if description else {}
    if description and (strange := [n for n in joints.command_names if n not in robot]):
        raise ConfigError(
            f"the robot's description from {description[1]} does not know some joints",
            got=strange,
            expected=sorted(robot),
            remedy="correct joints.names",
        )
    ends = (joints.gripper_open, joints.gripper_closed)
    limits, loose = tightest(
        joints.command_names,
        joints.grippers.tolist(),
        robot,
        from_parameters(params, joints),
        gripper_range=(min(ends), max(ends)),
        margin=params.safety_position_margin,
        acceleration=DEFAULT_ACCELERATION,
        max_first_step=params.safety_max_first_step_rad,
    )
    if params.gripper_mode not in ("in_trajectory", "trajectory"):
        # Single positions are sent; the gripper's own controller knows how fast it can be.
        limits = replace(limits, velocity=np.where(limits.gripper, np.inf, limits.velocity))
    return limits, loose
