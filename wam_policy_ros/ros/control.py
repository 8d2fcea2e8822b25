"""The control loop of an active node: when to ask the policy, what to do with its answer, when to stop.

Knows no rclpy: it is handed its inputs, worker, output and clock, and is called at every tick and for every result.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from wam_policy_ros.contract.errors import (
    Cancelled,
    ConfigError,
    LateChunk,
    LimitViolation,
    MissingInput,
    ObservationError,
    PolicyUnavailable,
    PromptError,
    UnsafeChunk,
    WamError,
)
from wam_policy_ros.contract.interface import PolicySpec
from wam_policy_ros.contract.limits import JointLimits

from .clock_watch import ClockWatch
from .inputs import Inputs
from .joints import JointMap
from .limits import given_urdf, resolve_limits
from .motion import Motion, Sent
from .operator import Operator
from .outputs import TrajectoryOutput
from .pace import Pace
from .parameters import NodeParameters
from .standing import Standing, Substate
from .streams import Now
from .worker import InferenceWorker, Phase, Request, Result

MAX_LATE_IN_A_ROW = 2
RETRY_S = 1.0
AFTER_JUMP_S = 0.5
"""After a jump of the clock the buffers are empty: for so long that is no news."""
"""How often a policy that went away is asked again."""

FORESIGHT_S = 0.045
"""The worker is told of a request's older frames so long before it is due, or a set of frames before, if that is
longer: what it does with them takes 30 ms."""

FRESH_S = 0.005
"""A frame that has just arrived: no need to wait for the next one."""


class ControlLoop(Standing):
    """One robot, one policy, one session at a time. All methods are called on the executor's thread.

    Args:
        params, joints, inputs, worker, output: its parts.
        clock: reads both clocks.
        simulated: the node's clock is /clock.
        changed: called after a change of substate, reason, session or prompt.
        log: called with a level (``info``, ``warn``, ``error``) and a line.
        operator: what a person has asked for, when that is older than this loop.
        prompt_topic, reset_service: their full names, for people.

    Attributes:
        description: text and source of the robot's URDF, once it is known; read at activation.
        operator: what a person has asked for; ``commands`` gives it orders.
        motion, pace: see there.
        controller: asked at every tick why nothing that is sent would be executed; empty when it would.
    """

    def __init__(
        self,
        params: NodeParameters,
        joints: JointMap,
        inputs: Inputs,
        worker: InferenceWorker,
        output: TrajectoryOutput,
        *,
        clock: Callable[[], Now],
        simulated: bool,
        changed: Callable[[], None],
        log: Callable[[str, str], None],
        operator: Operator | None = None,
        prompt_topic: str = "~/prompt",
        reset_service: str = "~/reset",
    ) -> None:
        self._prompt_topic, self._reset_service = prompt_topic, reset_service
        self._params, self._joints, self._inputs = params, joints, inputs
        self._limits_of = params  # as they are tightened while the node is configured
        self._worker, self._output, self._clock = worker, output, clock
        super().__init__(params.instruction.strip(), changed, log)
        self._simulated = simulated
        self._watch = ClockWatch(simulated=simulated)
        self._spec: PolicySpec | None = None
        self.description: tuple[str, str] | None = None
        self._loose: list[str] = []
        self.operator = operator or Operator()
        self.controller: Callable[[], str] = lambda: ""
        self.motion, self.pace = Motion(params, joints, output), Pace(params)
        self._generation = 0
        self._session_start_ns = 0
        self._due_ns = 0
        self._foreseen_ns = 0  # the due time whose request the worker was told of
        self._asked_ns = 0  # stamp of the newest observation the policy was asked about in this session
        self._asked_at_ns = 0  # the node's clock then
        self._reference_ns = 0  # the newest moment that every camera had reached at the last image; 0: images not told
        self._in_flight: Request | None = None
        self._input_lost = self._input_refused = self._was_sound = self._policy_lost = False
        self._alone = False  # nobody takes trajectories
        self._dry = False  # the plan has ended, and that is said
        self._starved = False  # the robot stands still for want of a chunk
        self._set_by_ns = self._asked_set_by_ns = 0  # by how much the clock was set so far, and until the last request
        self._refused_prompt: str | None = None
        self._late_in_a_row = self._refused_in_a_row = self._rejected_in_a_row = 0
        self._ticked_ns = 0  # steady time of the last tick; 0: none since the activation
        self._jumped_ns: int | None = None  # steady time of the last jump of the node's clock

    def prepare(self, spec: PolicySpec) -> JointLimits:
        """May a robot be run with this policy? Changes nothing but the expected latency.

        Raises:
            ConfigError: limits of joints are missing, or steps outlast chunks; see ``resolve_limits`` and ``Pace``.
        """
        if self._params.control_rtc == "denoiser" and not spec.inpainting:
            raise ConfigError(
                "control.rtc is denoiser, but the policy cannot take committed rows into account",
                remedy="set control.rtc: blend",
            )
        limits, loose = self._resolve(self._limits_of)
        self._loose = loose
        # How long a step takes on a simulated clock, which may be slow or wait for it, only steps can show.
        warm_up_s = () if self._simulated else self._worker.status.warm_up_s
        self.pace.activate(spec, self._params.control_min_lead_s or spec.dt_s, warm_up_s)
        return limits

    def _resolve(self, params: NodeParameters) -> tuple[JointLimits, list[str]]:
        return resolve_limits(params, self._joints, given_urdf(params) or self.description)

    def tighten(self, params: NodeParameters) -> None:
        """Take over limits that are nowhere looser than those in force. A plan under way that breaks them ends in a
        hold.

        Args:
            params: with other ``safety.*`` than before.

        Raises:
            ConfigError: some are looser, or contradict each other.
        """
        limits, _ = self._resolve(params)
        try:
            in_force, _ = self._resolve(self._limits_of)
        except ConfigError:
            pass  # too few for a robot to be activated: whatever comes is tighter
        else:
            if looser := limits.looser_than(in_force):
                raise ConfigError(
                    "limits are only tightened while the node is configured",
                    got=looser,
                    remedy="clean up, set them, configure and activate",
                )
        self._limits_of = params
        if self.active and self.motion.tighten(limits):
            self._new_session()
            if not self.fault:
                self._say(Substate.HOLDING, "the plan under way broke limits that were tightened")

    def activate(self, spec: PolicySpec) -> None:
        """Start with a fresh session.

        Raises:
            ConfigError: see ``prepare``.
        """
        limits = self.prepare(spec)
        for line in self._loose:
            self._log("warn", line)
        self._spec = spec
        self._inputs.decode_for(spec.cameras)
        self.motion.activate(spec, limits)
        self._watch = ClockWatch(simulated=self._simulated)
        self._output.forget(self._clock().ros_ns)
        self.fault, self._refused_prompt = "", None
        self._input_lost = self._input_refused = self._was_sound = self._policy_lost = self._alone = False
        self._refused_in_a_row = self._rejected_in_a_row = self._ticked_ns = 0
        self._say(Substate.WAITING, "activated", log=False)
        if self.operator.latched:
            self.latch("e-stop")
        else:
            self._new_session()

    def deactivate(self) -> None:
        """Hold, void everything under way. The publisher must still be active."""
        if not self.active:
            return
        try:
            self._new_session()
        finally:
            self.session_id = ""
            self._say(Substate.INACTIVE, "")
            self.pace.tick(0, None)

    def reset(self) -> None:
        """Clear a latched fault, start a new session.

        Raises:
            ConfigError: the e-stop is pressed.
        """
        self.operator.reset()
        self.fault, self._refused_prompt = "", None
        self._refused_in_a_row = self._rejected_in_a_row = 0
        if self.active:
            self._new_session()
            self._say(Substate.WAITING, "reset")

    def stand_still(self, reason: str) -> None:
        """Hold because a person asked for it; ``on_tick`` goes on when ``operator`` has no reason any more."""
        if self.active:
            self._new_session()
            if not self.fault:
                self._say(Substate.HOLDING, reason)

    def go_home(self, measured: npt.NDArray[np.float64]) -> float:
        """See ``Motion.home``. The robot stands still already, by order of ``operator``."""
        return self.motion.home(self._clock().ros_ns, measured)

    def controller_rejected(self, what: str) -> None:
        """The robot's controller did not take a trajectory: hold, and latch when it goes on."""
        if not self.active:
            return
        self.counters["controller_rejections"] += 1
        self._rejected_in_a_row += 1
        if self._rejected_in_a_row >= self._params.safety_max_consecutive_rejects:
            self.latch(f"the controller rejected {self._rejected_in_a_row} trajectories in a row; {what}")
        elif not self.fault:
            self._new_session()
            self._say(Substate.HOLDING, f"the controller rejected a trajectory: {what}")

    @property
    def ticked_ns(self) -> int:
        """Steady time of the last tick while the robot is run by the policy; 0 otherwise."""
        return self._ticked_ns if self.substate is Substate.RUNNING else 0

    def controller_accepted(self) -> None:
        self._rejected_in_a_row = 0

    def measured(self) -> npt.NDArray[np.float64] | None:
        """``[J]`` positions of the commanded joints now; None when they are not known well enough."""
        return self._measured_at(self._clock().ros_ns)

    def _measured_at(self, time_ns: int) -> npt.NDArray[np.float64] | None:
        states = self._inputs.joint_states
        try:
            return None if states.missing() else self._joints.commanded_of(states.at(time_ns))
        except ObservationError:
            return None

    def set_prompt(self, prompt: str) -> None:
        """A different instruction starts a new session."""
        prompt = prompt.strip()
        if prompt == self.prompt:
            return
        self.prompt, self._refused_prompt = prompt, None
        self._log("info", f"instruction: {prompt!r}")
        if self.active:
            self._new_session()
            if not self.fault:
                self._say(Substate.WAITING, "instruction changed", log=False)
        self._changed()

    def on_tick(self) -> None:
        """One control period: watch clocks, deadline and inputs, then ask the policy if it is time."""
        if not self.active:
            return
        now = self._clock()
        stalled_s, self._ticked_ns = self._stalled_s(now), now.steady_ns
        jumped = self._clock_jumped(now)
        plan = self._output.plan if self.substate is Substate.RUNNING or self._starved else None
        self.pace.tick(now.ros_ns, plan.end_ns if plan else None)
        if stalled_s:
            self.counters["executor_stalls"] += 1
            self._new_session()
            self._say(Substate.HOLDING, f"the node's callbacks stood still for {stalled_s:.2f} s", "stood still")
            return  # what has arrived meanwhile is looked at first
        if jumped:
            return
        if self._in_flight is not None:
            busy_s = now.steady_ns * 1e-9 - self._in_flight.submitted_s
            if busy_s > self._params.safety_deadline_s:
                self.latch(f"no answer from the policy for {busy_s:.2f} s (safety.deadline_s)")
        alone = self._look_for_controller(now)
        if self.fault or self._worker_failed():
            return
        if alone:
            self._say(Substate.HOLDING if self.counters["chunks"] else Substate.WAITING, alone)
            return
        if self._simulated and now.ros_ns == 0:
            self._say(Substate.WAITING, "use_sim_time is true, but nothing arrives on /clock")
            return
        if reason := self.operator.reason:
            self.motion.go_on(now.ros_ns)
            self._say(Substate.HOLDING, reason)
            return
        try:
            self._inputs.check(now)
        except ObservationError as error:
            if not self._just_jumped(now, error):
                self._lose_input(error)
            return
        if self._input_lost:
            self._recover()
        self._was_sound = True
        if not self._frame_comes(now):
            self._ask(now)
        self._tell_of_dry(now)

    def _tell_of_dry(self, now: Now) -> None:
        """The plan under way has ended, at rest, and the next chunk is not there."""
        plan = self._output.plan
        if self.pace.stops or plan is None or self._spec is None:
            return
        dry_s = (now.ros_ns - plan.end_ns) * 1e-9
        if (self.substate is Substate.RUNNING or self._dry) and dry_s > self._spec.dt_s:
            self._dry = self._starved = True
            busy_s = now.steady_ns * 1e-9 - self._in_flight.submitted_s if self._in_flight else 0.0
            work = f"the policy has worked on the next one for {busy_s:.1f} s" if busy_s else "none is being made"
            self._say(Substate.HOLDING, f"the last chunk has ended; {work}", "the last chunk has ended")

    def _clock_jumped(self, now: Now) -> bool:
        """Keep the plan under way where the robot is, whose controller knows nothing of our clock; after a jump begin
        anew. Asked before anything else is done with a time."""
        jump_s = self._watch.update(now)
        step_ns = self._watch.step_ns if jump_s is None else round(jump_s * 1e9)
        if step_ns:
            self.motion.shift_clock(step_ns)
            self.pace.shift_clock(step_ns)
            self._set_by_ns += step_ns
        if jump_s is None:
            return False
        self._inputs.clear()
        self._new_session()
        self._input_lost, self._jumped_ns = True, now.steady_ns
        self.counters["clock_jumps"] += 1
        if not self.fault:
            self._say(Substate.HOLDING, f"the node's clock jumped by {jump_s:+.3f} s: new session")
        return True

    def _just_jumped(self, now: Now, error: ObservationError) -> bool:
        """Is nothing there because the clock jumped? That is said already, and no publisher is to be looked at yet."""
        after_s = float("inf") if self._jumped_ns is None else (now.steady_ns - self._jumped_ns) * 1e-9
        return isinstance(error, MissingInput) and self._input_lost and after_s < AFTER_JUMP_S

    def _stalled_s(self, now: Now) -> float:
        """How long no tick has come, if that is a stall, else 0. The robot has been held from outside then, and nothing
        may move it before a tick has looked at everything anew."""
        gap_s = (now.steady_ns - self._ticked_ns) * 1e-9 if self._ticked_ns else 0.0
        limit_s = self._params.safety_executor_stall_s
        return gap_s if self.substate is Substate.RUNNING and 0.0 < limit_s < gap_s else 0.0

    def _look_for_controller(self, now: Now) -> str:
        """Why nothing would be executed. A controller that comes back begins where the robot stands then, wherever that
        is: whatever was sent before says nothing any more."""
        alone = self.controller()
        if bool(alone) != self._alone:
            self._alone = bool(alone)
            self._new_session()
            self._output.forget(now.ros_ns)
        return alone

    def on_image(self) -> None:
        """A camera frame has arrived. A request that is due goes out with the frame that completes a set, at once:
        at the next tick it would be old. Whoever calls this calls it after every image."""
        if not self.active:
            return
        reference_ns = self._inputs.newest_common_ns()
        completes = reference_ns not in (None, self._reference_ns)
        self._reference_ns = reference_ns or self._reference_ns
        now = self._clock()
        if self._clock_jumped(now):
            return
        if completes and reference_ns is not None:
            self._foresee(now, reference_ns)
        if (
            self.fault
            or self.operator.reason
            or self._input_lost
            or self._alone
            or self._in_flight is not None
            or now.ros_ns < self._due_ns
        ):
            return
        if not completes:
            self._inputs.decode_newest()
            return
        if self._simulated and self._shows_earlier() and self._frame_comes(now):
            return
        try:
            self._inputs.check(now)
        except ObservationError:
            return  # the next tick deals with it
        self._ask(now)

    def _foresee(self, now: Now, reference_ns: int) -> None:
        """Shortly before a request is due, tell the worker which older frames it will look at."""
        left_ns = self._due_ns - now.ros_ns
        if left_ns <= 0 or self._foreseen_ns == self._due_ns or self.substate is not Substate.RUNNING:
            return
        period_ns = self._inputs.period_ns()
        if period_ns is None or left_ns > max(FORESIGHT_S * 1e9, 1.1 * period_ns):
            return
        self._foreseen_ns = self._due_ns
        # The request leaves with the first set of frames that comes when it is due.
        sets = -(-left_ns // period_ns)
        foreseen = self._inputs.foresee(reference_ns + sets * period_ns, self._session_start_ns)
        if foreseen is not None and self._in_flight is None:
            self._worker.foresee(self._generation, foreseen)

    def _frame_comes(self, now: Now) -> bool:
        """Is it better to wait for the next frame than to ask with one that is getting old?"""
        if self._spec is None or not self._reference_ns:
            return False
        due_s = (now.ros_ns - max(self._due_ns, self._session_start_ns)) * 1e-9
        # Half a step more than a camera at the control rate needs.
        patience_s, quiet_s = 1.5 * self._spec.dt_s, self._inputs.newest_arrival_s(now)
        # On the steady clock: a simulator that waits for us sends nothing; one that has just moved its clock does.
        still_s = (now.steady_ns - self._watch.moved_ns) * 1e-9
        if self._simulated and min(quiet_s, still_s) > patience_s:
            return False
        return due_s < patience_s and (quiet_s > FRESH_S or (self._simulated and self._shows_earlier()))

    def _shows_earlier(self) -> bool:
        """The newest frame is of a moment before the one a request is due at. Clock and pictures of a simulator are
        different topics: on a loaded machine the time may be known before the picture."""
        assert self._spec is not None
        return self._due_ns - self._reference_ns > 0.5e9 * self._spec.dt_s

    def on_worker(self) -> None:
        """The worker has a result or a new status."""
        result = self._worker.take_result()
        if not self.active:
            return
        if result is not None:
            now = self._clock()
            if self._clock_jumped(now) or result.request.generation != self._generation or self._stalled_s(now):
                self.counters["discarded"] += 1
                return
            self._in_flight = None
            if result.error is not None:
                self._on_refusal(result.error)
            else:
                self._on_chunk(result)
        elif not self.fault:
            self._worker_failed()

    def _worker_failed(self) -> bool:
        """Latch when the worker has ended with an error. Asked at every tick: after a reset no event tells it again."""
        status = self._worker.status
        if status.phase is not Phase.FAILED:
            return False
        remedy = "" if "remedy: " in status.message else "; remedy: clean up, configure and activate again"
        self.latch(f"the policy failed: {status.message}{remedy}")
        return True

    def _ask(self, now: Now) -> None:
        if self._in_flight is not None or now.ros_ns < self._due_ns:
            return
        if not self.prompt:
            self._say(Substate.WAITING, self._no_instruction())
            return
        if self._refused_prompt == self.prompt:
            return
        try:
            observation = self._inputs.snapshot(now, self._session_start_ns, self.prompt)
        except ObservationError as error:
            # That there is no frame of this session yet is over with the next one: not worth a line, nor the place of
            # what made the policy refuse the last one.
            waits = isinstance(error, MissingInput)
            if not (waits and (self._input_refused or self._policy_lost)):
                substate = self.substate if self.substate is Substate.RUNNING else Substate.WAITING
                self._say(substate, str(error), error.what, log=not waits)
            return
        if observation.stamp_ns <= self._asked_ns:
            return
        if observation.stamp_ns < self._output.rest_ns <= now.ros_ns:
            # The robot has come to rest, but this shows it in motion: its chunk would skip rows that nobody executes,
            # or be late. The next frame shows it standing.
            return
        self.counters["sessions"] += self._asked_ns == 0
        self._asked_ns, self._asked_set_by_ns = observation.stamp_ns, self._set_by_ns
        self._asked_at_ns = now.ros_ns
        self.counters["off_schedule"] += observation.off_schedule
        self.counters["padded"] += observation.padded
        if self._params.control_rtc == "denoiser":
            arrival_ns = now.ros_ns + round((self.pace.mean_s or 0.0) * 1e9)
            observation = replace(observation, committed=self.motion.committed(observation.stamp_ns, arrival_ns))
        self._in_flight = Request(self._generation, self.session_id, observation, now.steady_ns * 1e-9)
        self._worker.submit(self._in_flight)
        if self.step == 0 and not self._input_refused and not self._policy_lost:
            self._say(Substate.WAITING, "the policy works on its first chunk", log=False)

    def _on_chunk(self, result: Result) -> None:
        assert result.chunk is not None
        now, stamp_ns = self._clock(), result.request.observation.stamp_ns + self._set_by_ns - self._asked_set_by_ns
        self.latency_s, self.timings_s = result.latency_s, dict(result.chunk.timings_s)
        if self.step > 0 and result.chunk.reset is None:
            # A call that starts from an empty window takes another time than the next one will. Simulated: what it
            # took on the clock that chunks are due on.
            self.pace.took((now.ros_ns - self._asked_at_ns) * 1e-9 if self._simulated else self.latency_s)
        self.step += 1
        try:
            measured = self.measured()
            if measured is None:
                # Only needed of a robot that stands still, and then where it was seen will do.
                measured = self._measured_at(stamp_ns)
            sent = self.motion.run(result.chunk, stamp_ns, now.ros_ns, measured)
        except UnsafeChunk as error:
            self._on_unsafe(error)
            return
        except LateChunk as error:
            self._on_late(error, (now.ros_ns - stamp_ns) * 1e-9)
            return
        self._measure(result)
        self._late_in_a_row, self._input_refused, self._policy_lost = 0, False, False
        self._dry = self._starved = False
        self._refused_in_a_row = 0
        self._count(sent)
        self._due_ns = self.pace.next_due_ns(sent.origin_ns, sent.joined.plan.end_ns)
        if self.substate is not Substate.RUNNING:
            self._log("info", f"running: first chunk of {sent.rows} rows, step {result.latency_s:.2f} s")
        self._say(Substate.RUNNING, "")
        self._changed()

    def _count(self, sent: Sent) -> None:
        self.counters["chunks"] += 1
        self.counters["clamped"] += bool(sent.joined.clamped)
        for line in sent.joined.clamped:
            self._log("warn", f"clamped: {line}")
        if self.pace.stops and not self.counters["stop_and_go"]:
            self._log("warn", "stop and go: the robot executes a whole chunk and stands still until the next is there")
        self.counters["stop_and_go"] += self.pace.stops

    def _measure(self, result: Result) -> None:
        """To be called when the chunk has just been published."""
        assert result.chunk is not None
        self.durations.add_all({"latency": result.latency_s, **result.chunk.timings_s})
        if result.started_s is not None and result.ended_s is not None:
            arrived_s = result.request.observation.arrived_ns * 1e-9
            self.durations.add("frame_to_request", result.request.submitted_s - arrived_s)
            self.durations.add("frame_to_step", result.started_s - arrived_s)
            self.durations.add("step_to_publish", self._clock().steady_ns * 1e-9 - result.ended_s)

    def _on_unsafe(self, error: UnsafeChunk) -> None:
        """Nothing of the chunk was sent. A matter of degree holds and is tried again, up to a number of times in a row;
        anything else latches."""
        self.counters["refused"] += 1
        self.refusals[error.kind if isinstance(error, LimitViolation) else error.what] += 1
        self._refused_in_a_row += 1
        if not isinstance(error, LimitViolation) or error.far or self._params.safety_on_violation == "fault":
            self.latch(str(error))
        elif self._refused_in_a_row >= self._params.safety_max_consecutive_rejects:
            self.latch(f"{self._refused_in_a_row} chunks in a row were refused; {error}")
        else:
            self._new_session()
            self._say(Substate.HOLDING, str(error))

    def _on_late(self, error: LateChunk, age_s: float) -> None:
        self.counters["late"] += 1
        self._late_in_a_row += 1
        if self._late_in_a_row > MAX_LATE_IN_A_ROW:
            self.latch(f"{self._late_in_a_row} chunks in a row came too late; {error}")
            return
        self.pace.was_late(age_s)
        self._dry, self._starved = False, True
        now = self._clock()
        self.motion.hold(now.ros_ns)
        # Only what shows the robot at rest is of use now.
        self._session_start_ns, self._due_ns = max(now.ros_ns, self._output.rest_ns), 0
        self._say(Substate.HOLDING, str(error), error.what)

    def _on_refusal(self, error: WamError) -> None:
        if isinstance(error, Cancelled):
            return
        self.counters["refused"] += 1
        if isinstance(error, PromptError):
            self._refused_prompt = self.prompt
            self._new_session()
            self._say(Substate.HOLDING, str(error), error.what)
        elif isinstance(error, ObservationError):
            self._lose_input(error)
            self._input_refused = True
        elif isinstance(error, PolicyUnavailable):
            self._lose_policy(error)
        else:
            self.latch(str(error))

    def _lose_input(self, error: ObservationError) -> None:
        if not self._input_lost:
            self._input_lost = True
            self._new_session()
        never_moved = self._output.plan is None and isinstance(error, MissingInput)
        reason, key = str(error), error.field
        if not self.prompt:
            reason, key = f"{self._no_instruction()}; {reason}", f"{key}, instruction"
        self._say(Substate.WAITING if never_moved else Substate.HOLDING, reason, key)

    def _lose_policy(self, error: PolicyUnavailable) -> None:
        """A policy on another machine that is out of reach is no fault of the robot's: hold, and go on with a new
        session when it is back, as after lost input."""
        self._policy_lost = True
        self.counters["policy_lost"] += 1
        self._new_session()
        self._due_ns = self._clock().ros_ns + round(RETRY_S * 1e9)
        self._say(Substate.HOLDING, str(error), error.what)

    def _recover(self) -> None:
        """Go on with the session that began when the inputs were lost."""
        self._input_lost = False
        if self._input_refused:
            # The policy could not use what was sound here: only newer frames may do, and until then nothing is sound.
            return
        # Frames that have come while the robot stood still are as good as the next one. On a loaded host, where the
        # inputs are sound for moments only, the next one may find them unsound, and so for ever.
        reference_ns = self._inputs.reference_ns() - round(self._params.sync_max_skew_s * 1e9)
        self._session_start_ns = max(self._output.rest_ns, reference_ns)
        self._say(Substate.WAITING, "the inputs are sound again: new session", log=self._was_sound)

    def _no_instruction(self) -> str:
        return f"no instruction: set the parameter instruction or publish on {self._prompt_topic}"

    def latch(self, reason: str) -> None:
        """Stop and stay stopped until ``reset``."""
        self.fault, self._input_refused, self._policy_lost = reason, False, False
        self._log("error", f"fault: {reason}; holding until {self._reset_service} is called")
        try:
            self._new_session()
        finally:
            self._say(Substate.HOLDING, reason)

    def _new_session(self) -> None:
        """Stop the robot, void everything under way, forget the episode."""
        now = self._clock()
        try:
            self._stop(now.ros_ns)
        finally:
            # The first chunk of a session assumes a robot that stands still, so nothing seen while it brakes is used.
            self._session_start_ns = max(now.ros_ns, self._output.rest_ns)
            self._generation += 1
            self._worker.new_generation(self._generation)
            self._in_flight = None
            self._dry = self._starved = False
            self.session_id, self.step = uuid.uuid4().hex, 0
            self._due_ns = self._asked_ns = self._late_in_a_row = 0

    def _stop(self, now_ns: int) -> None:
        if self.fault and self._params.safety_on_fault == "stop_publishing" and not self.operator.estop:
            return
        self.motion.hold(now_ns)

    def summary(self) -> dict[str, Any]:
        """The loop's part of ``~/state``; JSON-serialisable."""
        out = super().summary()
        out["expected_latency_s"], out["stall_share"] = self.pace.mean_s, self.pace.stall_share
        out["counters"] |= {
            "holds": self._output.holds,
            "superseded": self._worker.superseded,
            "pictures_skipped": self._worker.after_step_skipped,
            "streams": self._inputs.counters(),
        }
        return out
