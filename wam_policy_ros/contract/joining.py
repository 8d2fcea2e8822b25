"""From the rows of a chunk to a motion that leaves: joined to the running plan, ended at rest, inside every limit.

The robot's controller forgets the old trajectory when a new one arrives and starts from where it was commanded to be
(ROS spec 3.2). So the new plan begins at the commanded position and velocity of that moment, leaves the old plan
gradually (smoothstep weights), and ends at rest, because nobody knows whether another chunk will come. Pure functions.

Grippers are not blended and never a reason to refuse: a policy switches them from one row to the next. Their rows are
clipped to their range and limited in speed, and their velocities neither overshoot nor exceed it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from .chunking import velocities
from .errors import ConfigError, LimitViolation
from .hermite import Cubics, Floats, evaluate, minmod
from .limits import JointLimits
from .plan import Plan
from .safety import Violation, first_step, outside, row_speed, too_sharp, violation

PEAK = 1.5
"""Highest speed of a cubic that does not overshoot, over its mean speed."""

EASE = 0.5
"""Part of the way to the end of its range that an eased gripper goes in one row."""

BRAKES = (0, 2, 4, 8, 16)
"""Rows over which a plan comes to rest at its end, tried in this order."""

EASES = (0, 2, 4, 8, 12)
"""Rows over which a robot at rest gets up to speed, tried in this order."""

CALM = 0.7
"""Part of the limits of acceleration that a plan gets along with when it can."""

RAMP = 2
"""Rows in which a plan that is slowed down gets from the robot's speed to its own."""

SLOWER = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
"""Speeds, as parts of the policy's, that clamping tries."""


@dataclass(frozen=True)
class Rules:
    """How chunks are joined and what happens to one that breaks a limit.

    Attributes:
        blend_steps: over so many rows a chunk takes over from the plan before it; more when the limits need it.
        with_velocities: points carry velocities.
        clamp: slow a plan that is too fast down, and clip positions, instead of refusing it.
        max_excess: clamping is for values up to ``1 + max_excess`` times their limit; what is beyond is refused.
        max_outside: positions further outside their limits than this (joint units) are refused in every mode: nobody
            asked for them, they are degrees or a different joint.
        jitter_s: the controller begins a plan up to so much later after its publication than the plan before, or
            earlier; the limits are kept all the same. Without velocities it is not looked at.
        absolute: the controller is told when to begin, so it only begins late, and ends in time.
        ease_grippers: a gripper comes to the ends of its range over some rows. Otherwise one that is replanned in
            mid-stroke is led beyond: the controller goes on at the speed of the moment for up to two rows. For
            grippers that are told their rows one by one it is of no use.
    """

    blend_steps: int = 6
    with_velocities: bool = True
    clamp: bool = False
    max_excess: float = 0.5
    max_outside: float = 0.1
    jitter_s: float = 0.0
    absolute: bool = False
    ease_grippers: bool = False

    def __post_init__(self) -> None:
        if min(self.blend_steps, self.max_excess, self.max_outside, self.jitter_s) < 0:
            raise ConfigError("rules for joining chunks", got=self, expected="nothing negative")


@dataclass(frozen=True)
class Joined:
    """A motion that may leave.

    Attributes:
        plan: its first row is the commanded state at the moment of publication, which is not sent.
        clamped: what was changed beyond joining, one line each; empty as a rule.
        step: largest distance, over the joints, between the chunk's first row and the old plan at that time.
        blended: rows over which the chunk takes over.
        eased: rows over which a robot at rest gets up to the chunk's speed.
        braked: rows at the end over which the robot comes to rest.
    """

    plan: Plan
    clamped: tuple[str, ...]
    step: float
    blended: int
    eased: int
    braked: int


class _Shape(NamedTuple):
    """One way to make a plan of the rows: part of the policy's speed, rows to blend, to ease into, to brake over."""

    speed: float
    blend: int
    ease: int
    brake: int


def join(
    old: Plan, targets: Floats, times_s: Floats, now_ns: int, limits: JointLimits, rules: Rules, *, at_rest: bool
) -> Joined:
    """Make a plan of a chunk's rows, or refuse the chunk.

    Args:
        old: what the robot was told before; ``Plan.standing`` when nothing.
        targets: ``[M, J]`` joint targets of the rows that are still ahead.
        times_s: ``[M]`` when they are due, from now.
        now_ns: moment of publication, on the clock of ``old``.
        limits, rules: see there.
        at_rest: the chunk was made for a robot that stands still, as this one does. Then its rows are sent as they are
            if the limits allow it; otherwise the robot gets up to the chunk's speed gradually, along the chunk's path.

    Returns:
        A plan that breaks no limit.

    Raises:
        LimitViolation: nothing of the chunk may leave. ``far`` says that it is not a matter of degree.
    """
    arm = ~limits.gripper
    clamped: list[str] = []
    times_ns = now_ns + np.rint(np.concatenate([[0.0], times_s]) * 1e9).astype(np.int64)
    kept, kept_rates = old.sample(times_ns[1:])
    targets = np.where(arm, targets, np.clip(targets, limits.position_min, limits.position_max))
    # Far away first: what comes after may be asked for by a policy that means well.
    if (worst := outside(targets, limits, by=rules.max_outside)) is not None:
        raise _refused(worst, far=True)
    if (worst := outside(targets, limits)) is not None:
        if not rules.clamp:
            raise _refused(worst)
        clamped.append(worst.text())
    targets = np.clip(targets, limits.position_min, limits.position_max)
    # In motion a chunk begins where a robot that had followed it from its observation on would be, and may be far from
    # the plan; what of that reaches the robot is judged by speed and acceleration.
    if at_rest and (worst := first_step(targets, kept[0], limits)) is not None:
        raise _refused(worst)
    worst = too_fast = row_speed(targets, times_s, limits)
    if worst is not None and not (rules.clamp and worst.excess <= rules.max_excess):
        raise _refused(worst)
    start = old.state_at(now_ns)
    step_ns = times_ns[2] - times_ns[1] if len(times_ns) > 2 else times_ns[1] - times_ns[0]
    before = old.at(int(times_ns[1] - step_ns))
    wanted = velocities(targets, times_s, before=(before, times_s[0] - step_ns * 1e-9))
    gripper = _gripper(times_ns, start, targets, limits, ease=rules.ease_grippers)
    for allowed, shape in _tries(limits, rules, len(targets), at_rest):
        if shape.speed < 1.0 and (worst is None or worst.excess > rules.max_excess):
            break
        rows, rates = targets, wanted
        if shape.blend:
            w, slope = smoothstep(shape.blend, len(targets))
            w, slope = w[:, None], slope[:, None] / (step_ns * 1e-9)
            rows = kept + w * (targets - kept)
            rates = kept_rates + w * (wanted - kept_rates) + slope * (targets - kept)
            rates[-1] = 0.0
        plan = _plan(times_ns, start, rows, rates, gripper, limits, rules, shape)
        # The cheap question first: of a chunk that is refused in the end, every way is tried while the robot waits.
        if (found := too_sharp(plan, allowed, start[1])) is None:
            plan = _inside(plan, limits)
            found = violation(plan, allowed, start[1]) or _jittered(plan, old, allowed, rules)
        if found is None:
            if worst is not None and (shape.speed < 1.0 or too_fast is not None):
                clamped.append(f"{(too_fast or worst).text()}; the plan runs at {shape.speed:.0%} of its speed")
            step = float(np.abs(targets[0] - kept[0])[arm].max(initial=0.0))
            return Joined(plan, tuple(clamped), step, shape.blend, shape.ease, shape.brake)
        if allowed is limits and (worst is None or found.excess < worst.excess):
            worst = found
    assert worst is not None
    raise _refused(worst)


def _jittered(plan: Plan, old: Plan, limits: JointLimits, rules: Rules) -> Violation | None:
    """The limit that the first segment breaks when the controller begins the plan at another moment than it was made
    for: it then starts from another place of the old plan."""
    if not rules.jitter_s or plan.velocities is None:
        return None
    by_ns = round(rules.jitter_s * 1e9)
    for late_ns in (by_ns,) if rules.absolute else (by_ns, -by_ns):
        q, v = old.state_at(int(plan.times_ns[0]) + late_ns)
        times_ns = plan.times_ns[:2] + np.array([late_ns if rules.absolute else 0, 0])
        q, v = np.stack([q, plan.positions[1]]), np.stack([v, plan.velocities[1]])
        if (found := too_sharp(Plan(times_ns, q, v), limits)) is not None:
            return found
    return None


def smoothstep(steps: int, count: int) -> tuple[Floats, Floats]:
    """Weights ``[count]`` of the new chunk, from just above 0 to 1 after ``steps`` rows, without a kink at either end,
    and their slopes per row."""
    u = np.clip(np.arange(1, count + 1) / (steps + 1), 0.0, 1.0)
    return np.asarray(u * u * (3.0 - 2.0 * u)), np.asarray(6.0 * u * (1.0 - u) / (steps + 1))


def _tries(limits: JointLimits, rules: Rules, count: int, at_rest: bool) -> Iterator[tuple[JointLimits, _Shape]]:
    """A plan at the limits leaves the next one little choice, so calmer ones come first."""
    shapes = list(_shapes(rules, count, at_rest))
    if at_rest:
        yield limits, shapes[0]
    calm = replace(limits, acceleration=CALM * limits.acceleration)
    yield from ((calm, shape) for shape in shapes if shape.speed == 1.0)
    yield from ((limits, shape) for shape in shapes)


def _shapes(rules: Rules, count: int, at_rest: bool) -> Iterator[_Shape]:
    """What changes the chunk least first."""
    least = max(rules.blend_steps, 3)
    starts = [(min(b, count), 0) for b in sorted({rules.blend_steps, least, 2 * least, 3 * least})]
    if at_rest:
        # Along the chunk's path; if that has a kink, as after a step from the robot to its first row, away from where
        # the robot stands.
        starts = [(0, k) for k in EASES if k <= count] + starts
    brakes = [k for k in BRAKES if k <= count]
    for speed in (1.0, *SLOWER) if rules.clamp else (1.0,):
        yield from (_Shape(speed, blend, ease, brake) for blend, ease in starts for brake in brakes)


def _plan(
    times_ns: np.ndarray,
    start: tuple[Floats, Floats],
    rows: Floats,
    rates: Floats,
    gripper: tuple[Floats, Floats],
    limits: JointLimits,
    rules: Rules,
    shape: _Shape,
) -> Plan:
    times_s = np.asarray((times_ns - times_ns[0]) * 1e-9)
    q = np.concatenate([start[0][None], rows])
    v = np.concatenate([start[1][None], rates])
    if shape.speed < 1.0 or shape.ease or shape.brake:
        q, v = _paced(times_s, q, v if rules.with_velocities else None, shape)
        v[0] = start[1]
    q[:, limits.gripper], v[:, limits.gripper] = gripper
    return Plan(times_ns, q, v if rules.with_velocities else None)


def _inside(plan: Plan, limits: JointLimits) -> Plan:
    """Two rows close to a limit can lead a cubic beyond it."""
    if plan.velocities is None:
        return plan
    times_s, q = plan.times_s, plan.positions
    low, high = Cubics.through(times_s, q, plan.velocities).range()
    bulges = ((low < limits.position_min) | (high > limits.position_max)).any(axis=0) & ~limits.gripper
    if not bulges.any():
        return plan
    v = plan.velocities.copy()
    v[1:, bulges] = minmod(times_s, q)[1:, bulges]
    return Plan(plan.times_ns, q, v)


def _paced(times_s: Floats, q: Floats, v: Floats | None, shape: _Shape) -> tuple[Floats, Floats]:
    """The same path at another pace: evenly faster from rest over ``ease`` rows, at a part of its speed, evenly slower
    to rest over the last ``brake`` rows. The times of the rows stay; what the robot does not reach in time the next
    chunk has to ask for again."""
    last = len(times_s) - 1
    pace = np.full(len(times_s), shape.speed)
    if shape.ease:
        pace[: shape.ease + 1] *= np.arange(shape.ease + 1) / shape.ease
    else:
        pace[: RAMP + 1] = np.linspace(1.0, shape.speed, RAMP + 1)[: len(pace)]
    if shape.brake:
        pace[last - shape.brake :] *= 1.0 - np.arange(shape.brake + 1) / shape.brake
    along = np.concatenate([[0.0], np.cumsum(np.diff(times_s) * (pace[1:] + pace[:-1]) / 2)])
    if v is not None:
        v = v.copy()
        v[-1] = (q[-1] - q[-2]) / (times_s[-1] - times_s[-2])  # the path goes on; the pace brings the robot to rest
        if shape.ease:
            v[0] = (q[1] - q[0]) / times_s[1]
    positions, rates = evaluate(times_s, q, v, along)
    if not shape.brake:
        pace[-1] = 0.0
    return positions, np.asarray(rates * pace[:, None])


def _gripper(
    times_ns: np.ndarray, start: tuple[Floats, Floats], targets: Floats, limits: JointLimits, *, ease: bool
) -> tuple[Floats, Floats]:
    """Positions and velocities ``[M + 1, G]`` of the grippers: towards their targets as fast as allowed, on the rows'
    own times."""
    low, high = limits.position_min[limits.gripper], limits.position_max[limits.gripper]
    times_s, columns = np.asarray((times_ns - times_ns[0]) * 1e-9), np.flatnonzero(limits.gripper)
    q = np.concatenate([start[0][None], targets])[:, columns]
    v0, top = np.abs(start[1][columns]), limits.velocity[columns]
    for k in range(1, len(q)):
        reach = (top - (v0 / 2 if k == 1 else 0.0)) * (times_s[k] - times_s[k - 1]) / PEAK
        down, up = -reach, reach
        if ease:
            # So a cubic that begins anywhere on the way with its speed v stays inside: v * 0.2 s / 3 is less than what
            # is left to the end.
            down = np.maximum(down, -EASE * np.maximum(q[k - 1] - low, 0.0))
            up = np.minimum(up, EASE * np.maximum(high - q[k - 1], 0.0))
        q[k] = q[k - 1] + np.clip(q[k] - q[k - 1], down, up)
    v = minmod(times_s, q)
    v[0] = start[1][columns]
    return q, v


def _refused(worst: Violation, *, far: bool = False) -> LimitViolation:
    what = "the chunk is far outside the limits" if far else "the chunk breaks a limit"
    remedy = "check units (radians, not degrees) and joints.names" if far else None
    return LimitViolation(
        what,
        kind=worst.kind,
        far=far,
        got=f"{worst.kind} of {worst.joint}: {worst.value:.4g} at row {worst.row}",
        expected=f"limit {worst.limit:.4g}",
        remedy=remedy,
    )
