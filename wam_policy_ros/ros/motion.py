"""From a policy's chunk to what is sent: gate, rows still ahead, joint targets, joining. Knows no rclpy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from wam_policy_ros.contract.chunking import committed_weights, rows_to_run
from wam_policy_ros.contract.errors import ConfigError, LimitViolation
from wam_policy_ros.contract.executed import carried
from wam_policy_ros.contract.interface import ActionChunk, CommittedRows, PolicySpec
from wam_policy_ros.contract.joining import Joined, Rules, join
from wam_policy_ros.contract.limits import JointLimits
from wam_policy_ros.contract.plan import Plan
from wam_policy_ros.contract.safety import SafetyGate, violation

from .gripper import open_or_closed
from .joints import JointMap
from .outputs import TrajectoryOutput
from .parameters import NodeParameters

MOVED_RAD = 0.05
"""A robot that stands this far from where we left it was moved by somebody else."""


@dataclass(frozen=True)
class Sent:
    """A chunk under way.

    Attributes:
        rows: number of rows that were still ahead.
        origin_ns: row k of the whole chunk is due at ``origin_ns + (k + 1) * dt``.
        joined: how it was joined to the plan before.
    """

    rows: int
    origin_ns: int
    joined: Joined


class Motion:
    """One robot's motion. The only one that gives plans to the output.

    Args:
        params, joints, output: its parts.
    """

    def __init__(self, params: NodeParameters, joints: JointMap, output: TrajectoryOutput) -> None:
        self._params, self._joints, self._output = params, joints, output
        self._spec: PolicySpec | None = None
        self._gate: SafetyGate | None = None
        self._limits: JointLimits | None = None
        self._chunk: tuple[npt.NDArray[np.float64], int] | None = None  # last one under way, and its origin
        self._way_home: Plan | None = None
        self._rules = Rules(
            blend_steps=params.control_blend_steps,
            with_velocities=params.control_publish_velocities,
            clamp=params.safety_on_violation == "clamp",
            max_excess=params.safety_clamp_excess,
            max_outside=params.safety_clamp_outside,
            jitter_s=params.control_jitter_s,
            absolute=params.control_stamp == "absolute",
            ease_grippers=params.gripper_ease and params.gripper_mode in ("in_trajectory", "trajectory"),
        )

    def activate(self, spec: PolicySpec, limits: JointLimits) -> None:
        """Nothing moves before this was called."""
        self._spec, self._gate, self._limits = spec, SafetyGate.for_policy(spec), limits
        self._chunk = self._way_home = None
        self._output.use(limits)

    def shift_clock(self, by_ns: int) -> None:
        """The node's clock was set; the robot's is another."""
        self._output.shift_clock(by_ns)
        if self._chunk is not None:
            self._chunk = self._chunk[0], self._chunk[1] + by_ns
        if self._way_home is not None:
            self._way_home = self._way_home.shifted(by_ns)

    def tighten(self, limits: JointLimits) -> bool:
        """From now on nothing leaves that breaks these. True when the plan under way does."""
        self._limits, plan = limits, self._output.plan
        self._output.use(limits)
        return plan is not None and len(plan.positions) > 1 and violation(plan, limits) is not None

    @property
    def min_lead_s(self) -> float:
        """Rows due sooner are dropped."""
        assert self._spec is not None
        return self._params.control_min_lead_s or self._spec.dt_s

    def run(self, chunk: ActionChunk, stamp_ns: int, now_ns: int, measured: npt.NDArray[np.float64] | None) -> Sent:
        """Send what is still ahead of a chunk.

        Args:
            chunk: as the policy gave it.
            stamp_ns: of the observation it answers, on the node's clock.
            now_ns: the node's clock.
            measured: ``[J]`` positions of the commanded joints; needed when nothing was commanded before.

        Raises:
            UnsafeChunk: refused; nothing was sent.
            LateChunk: too few rows are ahead; nothing was sent.
        """
        assert self._spec is not None and self._gate is not None and self._limits is not None
        rows = self._gate.admit(chunk.actions, dt_s=chunk.dt_s)
        at_rest = self._output.rest_ns <= stamp_ns
        run = rows_to_run(
            replace(chunk, actions=rows, stamp_ns=stamp_ns, dt_s=self._spec.dt_s),
            now_ns,
            min_lead_s=self.min_lead_s,
            first_of_session=at_rest,
        )
        old = self._before(now_ns, measured, at_rest=at_rest)
        targets = self._joints.command(self._binary(run.rows, old, now_ns))
        joined = join(old, targets, run.time_from_start_s, now_ns, self._limits, self._rules, at_rest=at_rest)
        self._output.publish(joined.plan)
        skipped = len(rows) - len(run.rows)
        origin_ns = now_ns + round((run.time_from_start_s[0] - (skipped + 1) * self._spec.dt_s) * 1e9)
        self._chunk = rows, origin_ns
        return Sent(len(run.rows), origin_ns, joined)

    def hold(self, now_ns: int) -> bool:
        """Stop. True when something had to be sent."""
        self._chunk = self._way_home = None
        return self._output.hold(now_ns)

    def _before(self, now_ns: int, measured: npt.NDArray[np.float64] | None, *, at_rest: bool) -> Plan:
        plan, arm = self._output.plan, ~self._joints.grippers
        if plan is not None and (
            not at_rest or measured is None or np.abs(plan.at(now_ns) - measured)[arm].max(initial=0.0) < MOVED_RAD
        ):
            return plan
        if measured is None:
            raise LimitViolation(
                "where the robot stands is not known", kind="position", expected="a position of every commanded joint"
            )
        return Plan.standing(measured, now_ns)

    def _binary(self, rows: npt.NDArray[np.float64], old: Plan, now_ns: int) -> npt.NDArray[np.float64]:
        if self._params.gripper_command != "binary":
            return rows
        rows, told = rows.copy(), self._output.plan is not None
        for j in np.flatnonzero(self._joints.grippers):
            column = self._joints.columns[j]
            closed = self._joints.fraction(float(old.at(now_ns)[j])) > 0.5 if told else None
            rows[:, column] = open_or_closed(
                carried(rows[:, column]),  # as a client of the same policy decides
                closed,
                threshold=self._params.gripper_threshold,
                hysteresis=self._params.gripper_hysteresis,
            )
        return rows

    def home(self, now_ns: int, measured: npt.NDArray[np.float64]) -> float:
        """Go to ``home.positions`` at ``home.max_velocity``, through the same gate, as soon as the robot is at rest:
        ``go_on`` sends it.

        Args:
            measured: ``[J]`` positions of the commanded joints.

        Returns:
            How long it takes in s.

        Raises:
            ConfigError: no pose is set, or not one value per joint.
            LimitViolation: the way would break a limit.
        """
        assert self._spec is not None and self._limits is not None
        names, goal = self._joints.command_names, np.array(self._params.home_positions)
        if len(goal) != len(names):
            raise ConfigError(
                "home.positions is not set" if not len(goal) else "home.positions does not fit the robot",
                got=f"{len(goal)} values",
                expected=f"one for each of {list(names)}",
            )
        at_ns = max(now_ns, self._output.rest_ns)
        start = self._before(at_ns, measured if at_ns == now_ns else None, at_rest=True).at(at_ns)
        arm = ~self._limits.gripper
        way = np.abs(goal - start)
        # A quintic from rest to rest has 1.875 times the mean speed and 5.774 D/T^2 of acceleration at its sharpest.
        top = np.minimum(self._limits.velocity, self._params.home_max_velocity)
        seconds = np.maximum(1.9 * way / top, np.sqrt(5.9 * way / self._limits.acceleration))[arm].max(initial=0.0)
        # And time enough for a gripper that may not be fast.
        seconds = max(seconds, float((2.0 * way / self._limits.velocity)[~arm].max(initial=0.0)), 4 * self._spec.dt_s)
        steps = int(np.ceil(seconds / self._spec.dt_s))
        u = (np.arange(steps + 1) / steps)[:, None]
        s = u**3 * (10.0 + u * (6.0 * u - 15.0))
        rate = 30.0 * u**2 * (1.0 - u) ** 2 / (steps * self._spec.dt_s)
        times_ns = at_ns + np.rint(np.arange(steps + 1) * self._spec.dt_s * 1e9).astype(np.int64)
        v = rate * (goal - start) if self._params.control_publish_velocities else None
        plan = Plan(times_ns, start + s * (goal - start), v)
        if (found := violation(plan, self._limits)) is not None:
            raise LimitViolation("the way home breaks a limit", kind=found.kind, got=found.text())
        self._chunk, self._way_home = None, plan
        self.go_on(now_ns)
        return steps * self._spec.dt_s

    def go_on(self, now_ns: int) -> None:
        """At every tick of a robot that the policy does not run: send the way home when its time has come."""
        plan = self._way_home
        if plan is not None and now_ns >= plan.times_ns[0]:
            self._way_home = None
            self._output.publish(plan.shifted(now_ns - int(plan.times_ns[0])))

    def committed(self, stamp_ns: int, arrival_ns: int) -> CommittedRows | None:
        """What the robot will do after an observation unless a chunk changes it; None when it stands.

        Args:
            stamp_ns: of the observation.
            arrival_ns: when its chunk is expected.
        """
        plan = self._output.plan
        if self._spec is None or plan is None or self._chunk is None or plan.end_ns <= stamp_ns:
            return None
        dt_s, (rows, origin_ns) = self._spec.dt_s, self._chunk
        due_s = np.arange(1, self._spec.horizon + 1, dtype=np.float64) * dt_s
        end_s = (plan.end_ns - stamp_ns) * 1e-9
        due_s = due_s[due_s <= end_s + 1e-6]
        if not len(due_s):
            return None
        due_ns = stamp_ns + np.rint(due_s * 1e9).astype(np.int64)
        # Columns that no joint executes go on as the last chunk had them.
        place = (due_ns - origin_ns) * 1e-9 / dt_s - 1.0
        others = np.stack([np.interp(place, np.arange(len(rows)), column) for column in rows.T], axis=1)
        arrival_s = (arrival_ns - stamp_ns) * 1e-9 + self.min_lead_s
        weights = committed_weights(np.asarray(due_s, dtype=np.float64), arrival_s=arrival_s, end_s=end_s)
        return CommittedRows(self._joints.action_rows(plan.sample(due_ns)[0], others), weights)
