"""The node without ROS, in virtual time: its parts, fed with messages at given moments, asked at every control tick.

Replays of recordings and tests use it. What is modelled is the host: messages arrive when they are said to, a step
takes as long as it is said to, and nothing else takes any time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from wam_policy_ros.contract.errors import EngineError, WamError
from wam_policy_ros.contract.interface import ActionChunk, Observation, Policy

from .assembly import assemble
from .joint_states import JointStateInput
from .messages import Trajectory, stamp_to_ns
from .observations import Foreseen
from .parameters import NodeParameters
from .streams import CameraInput, Now
from .worker import Phase, Request, Result, WorkerStatus

CLOCK_TOPIC = "/clock"

STEADY_0_NS = 10**9
"""The steady clock at the beginning; any but 0, which means "never" in some places."""


class VirtualClock:
    """Both clocks. The steady one is moved by the run, the node's follows it or, simulated, /clock."""

    def __init__(self, *, start_ns: int, simulated: bool) -> None:
        self.steady_ns, self._simulated = STEADY_0_NS, simulated
        self._offset_ns, self._clock_ns = start_ns - STEADY_0_NS, 0

    def __call__(self) -> Now:
        return Now(self._clock_ns if self._simulated else self.steady_ns + self._offset_ns, self.steady_ns)

    def on_clock(self, stamp_ns: int) -> None:
        """A message on /clock."""
        self._clock_ns = stamp_ns

    def set_by(self, delta_ns: int) -> None:
        """Somebody sets the system's clock."""
        self._offset_ns += delta_ns


@dataclass(frozen=True)
class Call:
    """A request, as the policy saw it.

    Attributes:
        at_ns: steady clock, when it was submitted.
        request: with the chosen messages.
        observation: None when it could not be made.
        result: the answer, delivered later or never.
        latency_s: how much later.
    """

    at_ns: int
    request: Request
    observation: Observation | None
    result: Result
    latency_s: float


class VirtualWorker:
    """Stands for ``InferenceWorker``: calls the policy at once and hands the answer over when virtual time has come.

    Args:
        policy: owned by this worker.
        latency_s: tells from the number of the call (0-based) and its measured duration how long it takes. ``inf``: it
            is never answered.
        clock: read at every call.
        warm_up_s: duration of a first and of a later call, as a node measures them before it is active.
    """

    def __init__(
        self,
        policy: Policy,
        latency_s: Callable[[int, float], float],
        clock: VirtualClock,
        warm_up_s: tuple[float, ...] = (),
    ) -> None:
        self._policy, self._latency_s, self._clock = policy, latency_s, clock
        ready = WorkerStatus(phase=Phase.READY, message="ready", fraction=1.0, spec=policy.spec)
        self.status = replace(ready, warm_up_s=warm_up_s)
        self.superseded = self.after_step_skipped = 0
        self.calls: list[Call] = []
        self.keep_observations = False
        self._generation, self._made = 0, 0
        self._session: Any = None
        self._pending: tuple[int, Result] | None = None
        self._mailbox: Result | None = None

    @property
    def due_ns(self) -> int | None:
        """When the next answer comes, on the steady clock; None when none is under way."""
        return self._pending[0] if self._pending is not None else None

    def new_generation(self, generation: int) -> None:
        self._generation = generation
        self._pending = self._mailbox = None
        self._close()

    def submit(self, request: Request) -> None:
        if request.generation != self._generation:
            return
        if self._pending is not None:
            self.superseded += 1
        start_s = time.perf_counter()
        chunk, observation, error = self._call(request)
        latency_s = self._latency_s(len(self.calls), time.perf_counter() - start_s)
        now_s = self._clock.steady_ns * 1e-9
        result = Result(request, chunk, error, latency_s, now_s, now_s + latency_s)
        seen = observation if self.keep_observations else None
        self.calls.append(Call(self._clock.steady_ns, request, seen, result, latency_s))
        if latency_s != float("inf"):
            self._pending = (self._clock.steady_ns + round(latency_s * 1e9), result)

    def deliver(self) -> None:
        """Virtual time has come."""
        assert self._pending is not None
        (_, self._mailbox), self._pending = self._pending, None

    def foresee(self, generation: int, foreseen: Foreseen) -> None:
        """Nothing: it changes when a chunk is there, not what it is, and here the latency is given."""

    def take_result(self) -> Result | None:
        result, self._mailbox = self._mailbox, None
        return result

    def close(self) -> None:
        """End the session at the policy."""
        self._close()

    def _close(self) -> None:
        if self._session is not None:
            self._policy.close(self._session)
            self._session = None

    def _call(self, request: Request) -> tuple[ActionChunk | None, Observation | None, WamError | None]:
        observation = None
        try:
            if self._session is None:
                self._session, self._made = self._policy.open(request.session_id), 0
            cameras = self._policy.spec.cameras
            observation = request.observation.materialise(cameras, first_call=self._made == 0)
            chunk = self._policy.infer(self._session, observation, cancelled=lambda: False)
        except WamError as error:
            return None, observation, error
        except Exception as error:
            return None, observation, EngineError(f"the policy raised {type(error).__name__}: {error}")
        self._made += 1
        return chunk, observation, None


@dataclass(frozen=True)
class Arrival:
    """What became of a message. ``reason``: why it was dropped, empty when it was not."""

    at_ns: int
    stream: str
    stamp_ns: int
    reason: str


@dataclass(frozen=True)
class Sent:
    """A trajectory that left for the controller. ``hold``: it only stops the robot."""

    at_ns: int
    plan: Trajectory
    hold: bool


@dataclass(frozen=True)
class Said:
    """What the node says of itself from a moment on."""

    at_ns: int
    substate: str
    reason: str
    session: str


@dataclass
class Journal:
    """Everything that happened; times on the steady clock in ns."""

    arrivals: list[Arrival] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    log: list[tuple[int, str, str]] = field(default_factory=list)
    ticks: list[int] = field(default_factory=list)


class VirtualRun:
    """One node in virtual time. Call ``advance`` and the others in the order of time.

    Args:
        params: as for the node.
        policy: what drives the robot.
        start_ns: the node's clock at the beginning.
        simulated: the node's clock is /clock.
        latency_s, warm_up_s: see ``VirtualWorker``.
        tick_phase_s: when the first control tick comes.
        description: text and source of the robot's URDF, as the node has them from ``robot_description``.
        resolve: topic -> its full name.

    Attributes:
        robot: the parts.
        journal: what happened.
        missed: topics of messages that nobody subscribes.
    """

    def __init__(
        self,
        params: NodeParameters,
        policy: Policy,
        *,
        start_ns: int,
        simulated: bool = False,
        latency_s: Callable[[int, float], float] = lambda call, measured_s: measured_s,
        warm_up_s: tuple[float, ...] = (),
        tick_phase_s: float = 0.0,
        description: tuple[str, str] | None = None,
        resolve: Callable[[str], str] = lambda topic: topic,
    ) -> None:
        self.clock = VirtualClock(start_ns=start_ns, simulated=simulated)
        self.journal = Journal()
        self.worker = VirtualWorker(policy, latency_s, self.clock, warm_up_s)
        self._active = False
        self.robot = assemble(
            params,
            worker=self.worker,
            send=self._on_sent,
            clock=self.clock,
            simulated=simulated,
            changed=self._on_changed,
            log=lambda level, line: self.journal.log.append((self.clock.steady_ns, level, line)),
            resolve=resolve,
        )
        inputs = self.robot.inputs
        streams: list[CameraInput | JointStateInput] = [*inputs.cameras.values(), inputs.joint_states]
        self._streams: dict[str, list[CameraInput | JointStateInput]] = {}
        for stream in streams:
            self._streams.setdefault(resolve(stream.topic), []).append(stream)
        self._period_ns = round(1e9 / self.robot.expected.control_rate_hz)
        self._next_tick_ns = STEADY_0_NS + round(tick_phase_s * 1e9)
        self.robot.control.description = description
        self.robot.activate(policy.spec)
        self._active = True

    @property
    def control(self) -> Any:
        return self.robot.control

    @property
    def topics(self) -> Mapping[str, list[CameraInput | JointStateInput]]:
        """Full name of a topic -> the streams it feeds."""
        return self._streams

    def elapsed_s(self, at_ns: int) -> float:
        """Steady clock -> seconds since the beginning."""
        return (at_ns - STEADY_0_NS) * 1e-9

    def advance(self, to_s: float) -> None:
        """Let virtual time pass: ticks and answers, in their order."""
        to_ns = STEADY_0_NS + round(to_s * 1e9)
        while True:
            due_ns = self.worker.due_ns
            next_ns = self._next_tick_ns if due_ns is None else min(due_ns, self._next_tick_ns)
            if next_ns > to_ns:
                break
            self.clock.steady_ns = max(self.clock.steady_ns, next_ns)
            if due_ns is not None and due_ns <= self._next_tick_ns:
                self.worker.deliver()
                self.control.on_worker()
            else:
                self._next_tick_ns += self._period_ns
                self.tick()
        self.clock.steady_ns = max(self.clock.steady_ns, to_ns)

    def tick(self) -> None:
        """A control tick, now."""
        self.journal.ticks.append(self.clock.steady_ns)
        self.control.on_tick()
        self._on_changed()

    def message(self, topic: str, msg: Any) -> bool:
        """A message arrives, now. False when nobody subscribes its topic."""
        if topic == CLOCK_TOPIC:
            self.clock.on_clock(stamp_to_ns(msg.clock))
            return True
        for stream in self._streams.get(topic, ()):
            before = dict(stream.drops.by_reason)
            stream.on_message(msg, self.clock())
            dropped = [r for r, n in stream.drops.by_reason.items() if n > before.get(r, 0)]
            name = stream.name if isinstance(stream, CameraInput) else stream.topic
            stamp_ns = stamp_to_ns(msg.header.stamp)
            self.journal.arrivals.append(Arrival(self.clock.steady_ns, name, stamp_ns, ", ".join(dropped)))
            if isinstance(stream, CameraInput):
                self.control.on_image()
        return topic in self._streams

    def close(self) -> None:
        """Deactivate, as at the end of the process."""
        if self._active:
            self._active = False
            self.control.deactivate()
            self.worker.close()

    def _on_sent(self, plan: Trajectory) -> None:
        self.journal.sent.append(Sent(self.clock.steady_ns, plan, len(plan.positions) == 1))

    def _on_changed(self) -> None:
        if not hasattr(self, "robot"):
            return
        control = self.robot.control
        said = Said(self.clock.steady_ns, control.substate.value, control.reason, control.session_id)
        last = self.journal.said[-1] if self.journal.said else None
        if last is None or (last.substate, last.reason, last.session) != (said.substate, said.reason, said.session):
            self.journal.said.append(said)
