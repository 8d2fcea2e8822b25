"""How far, how fast and how sharply each commanded joint may move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .errors import ConfigError
from .hermite import Floats


@dataclass(frozen=True)
class JointLimits:
    """Limits of the commanded joints, in trajectory order. Every one is a number: what is not known is not there.

    Attributes:
        names: joints.
        position_min, position_max: ``[J]`` joint units; infinite for a joint that turns without end.
        velocity, acceleration: ``[J]`` joint units per s, per s^2; infinite where nothing limits a gripper.
        gripper: bool ``[J]``: rate-limited instead of refused, see ``contract.joining``.
        max_first_step: ``[J]``: how far the first row of a chunk may be from where the robot is told to be by then.
    """

    names: tuple[str, ...]
    position_min: Floats
    position_max: Floats
    velocity: Floats
    acceleration: Floats
    gripper: np.ndarray
    max_first_step: Floats

    def __post_init__(self) -> None:
        for name in ("position_min", "position_max", "velocity", "acceleration", "gripper", "max_first_step"):
            value = getattr(self, name)
            if value.shape != (len(self.names),) or np.isnan(value.astype(np.float64)).any():
                raise ConfigError(
                    f"limits of the joints: {name}", got=value, expected=f"{len(self.names)} numbers: {self.names}"
                )
        if bad := self.named(~(self.position_min < self.position_max)):
            raise ConfigError("the lowest position is not below the highest", got=bad)
        if bad := self.named(~((self.velocity > 0) & (self.acceleration > 0))):
            raise ConfigError("limits of speed and acceleration must be greater than zero", got=bad)

    def named(self, which: np.ndarray) -> list[str]:
        """Names of the joints where a bool ``[J]`` is true."""
        return [n for n, w in zip(self.names, which, strict=True) if w]

    def looser_than(self, other: JointLimits) -> list[str]:
        """``limit of joint`` for each that allows more than in ``other``, which has the same joints."""
        more = {
            "position_min": self.position_min < other.position_min,
            "position_max": self.position_max > other.position_max,
            "velocity": self.velocity > other.velocity,
            "acceleration": self.acceleration > other.acceleration,
            "max_first_step": self.max_first_step > other.max_first_step,
        }
        return [f"{limit} of {name}" for limit, which in more.items() for name in self.named(which)]

    def describe(self) -> list[str]:
        """One line per joint, for people."""
        return [
            f"{n}: position {lo:.4g} to {hi:.4g}, speed {v:.4g}, acceleration {a:.4g}"
            for n, lo, hi, v, a in zip(
                self.names, self.position_min, self.position_max, self.velocity, self.acceleration, strict=True
            )
        ]


@dataclass(frozen=True)
class Known:
    """What one source says about one joint; None: nothing.

    Attributes:
        lower, upper: position, joint units; ``-inf`` and ``inf`` for a continuous joint.
        velocity, acceleration: joint units per s, per s^2.
    """

    lower: float | None = None
    upper: float | None = None
    velocity: float | None = None
    acceleration: float | None = None


def tightest(
    names: Sequence[str],
    gripper: Sequence[bool],
    robot: Mapping[str, Known],
    given: Mapping[str, Known],
    *,
    gripper_range: tuple[float, float],
    margin: float,
    acceleration: float,
    max_first_step: float,
) -> tuple[JointLimits, list[str]]:
    """Both sources together: of each limit the tighter one.

    Args:
        names, gripper: commanded joints and which of them are grippers.
        robot: from the robot's description. ``margin`` (joint units) is taken off both ends of its positions,
            except a gripper's.
        given: from parameters; tightens, never loosens.
        gripper_range: lowest and highest position the node ever commands of a gripper.
        acceleration: of joints other than grippers for which neither source knows one.
        max_first_step: see ``JointLimits``.

    Returns:
        The limits, and a line for each parameter that would have loosened what the robot says.

    Raises:
        ConfigError: a joint that is no gripper has no limits of position or speed; every such joint is named.
    """
    rows, loose, missing = [], [], []
    for name, is_gripper in zip(names, gripper, strict=True):
        r, g = robot.get(name, Known()), given.get(name, Known())
        inside = 0.0 if is_gripper else margin
        r_lower = None if r.lower is None else r.lower + inside
        r_upper = None if r.upper is None else r.upper - inside
        pairs = {
            "position_min": (r_lower, g.lower, max),
            "position_max": (r_upper, g.upper, min),
            "max_velocity": (r.velocity, g.velocity, min),
            "max_acceleration": (r.acceleration, g.acceleration, min),
        }
        chosen: dict[str, float | None] = {}
        for what, (of_robot, of_parameter, tighter) in pairs.items():
            both = [v for v in (of_robot, of_parameter) if v is not None]
            chosen[what] = tighter(both) if both else None
            if len(both) == 2 and chosen[what] == of_robot != of_parameter:
                loose.append(f"safety.{what} of {name}: {of_parameter:.4g} is looser than the robot's {of_robot:.4g}")
        if is_gripper:
            chosen["position_min"] = max(gripper_range[0], _or(chosen["position_min"], -np.inf))
            chosen["position_max"] = min(gripper_range[1], _or(chosen["position_max"], np.inf))
            chosen["max_velocity"] = _or(chosen["max_velocity"], np.inf)
            chosen["max_acceleration"] = np.inf
        else:
            lacks = [w for w in ("position_min", "position_max", "max_velocity") if chosen[w] is None]
            if lacks:
                missing.append(f"{name} ({', '.join(lacks)})")
            chosen["max_acceleration"] = _or(chosen["max_acceleration"], acceleration)
        rows.append([_or(v, np.nan) for v in chosen.values()])
    if missing:
        raise ConfigError(
            "no limits are known for some joints, so nothing may move",
            got=", ".join(missing),
            expected="limits of position and speed for every commanded joint",
            remedy="publish robot_description, or set safety.urdf, or safety.position_min, safety.position_max and "
            "safety.max_velocity",
        )
    lower, upper, speed, sharpness = np.array(rows, dtype=np.float64).T
    mask = np.array(gripper, dtype=bool)
    first = np.where(mask, np.inf, max_first_step)
    return JointLimits(tuple(names), lower, upper, speed, sharpness, mask, first), loose


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
