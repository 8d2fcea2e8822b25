"""The robot's side of the thread that owns the policy: newest request first, one session at a time. No ROS here."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from wam_policy_ros.contract.errors import Cancelled, EngineError, NotReady, Overloaded, Superseded, WamError
from wam_policy_ros.contract.interface import ActionChunk, EncodesAhead, Observation, Policy
from wam_policy_ros.contract.places import place_of
from wam_policy_ros.contract.policy_thread import (
    AskCancelled,
    Log,
    OwnerLimits,
    Phase,
    PolicyFactory,
    PolicyThread,
    Priority,
    Progress,
)
from wam_policy_ros.contract.policy_thread import OwnerStatus as WorkerStatus

from .observations import Foreseen, PendingObservation

__all__ = ["InferenceWorker", "Phase", "PolicyFactory", "Progress", "Request", "Result", "WorkerStatus"]

AfterStep = Callable[[Policy, ActionChunk, Observation], None]

LANE, PICTURES = "robot", "robot's pictures"

IDLE_STEPS = 1.5
"""``after_step`` waits this many control steps for the next request, which comes first. A request that is due at once
is submitted at the next control tick, so within one step."""


@dataclass(frozen=True)
class Request:
    """One call to make. ``generation`` changes with every new session; ``submitted_s`` is ``time.monotonic``."""

    generation: int
    session_id: str
    observation: PendingObservation
    submitted_s: float


@dataclass(frozen=True)
class Result:
    """The answer to a request: a chunk or an error, never both.

    Attributes:
        request: as submitted.
        chunk: None when there is an error.
        error: a ``WamError`` without traceback or cause; anything else becomes an ``EngineError`` with its text.
        latency_s: submission to answer on the steady clock.
        started_s, ended_s: of the call itself, ``time.monotonic``; None when it was never made.
    """

    request: Request
    chunk: ActionChunk | None
    error: WamError | None
    latency_s: float
    started_s: float | None = None
    ended_s: float | None = None


@dataclass
class _Episode:
    """The robot's session at the policy; touched by the owner's thread only, one job at a time."""

    session: Any
    generation: int
    calls: int = 0


class InferenceWorker:
    """Makes the robot's calls in ``owner``'s thread, before everybody else's. A 1-slot inbox (newest wins), a 1-slot
    mailbox for the result.

    Args:
        factory: makes the policy; called in the thread with a progress callback, which raises ``Cancelled`` when the
            worker is asked to stop.
        notify: called from the thread when a result or a new status is there; must be thread-safe and quick.
        log: called from the thread with a level (``error``) and text, tracebacks included.
        after_step: called in the thread after a chunk was handed over, for work that may not delay the next request
            by more than ``after_step_share`` of the time: beyond that it is left out, and counted in
            ``after_step_skipped``, when a request comes within ``IDLE_STEPS``.
        after_step_share: more than 0: requests without a pause, as a policy gets that is slower than
            ``control.execute_steps``, would put ``after_step`` off for ever.
        after_step_wanted: asked before each; while it says no, nothing is kept for ``after_step``.
        video_wanted: asked before each step: shall the policy predict the video, too?
        limits: of the owner's queue, for those who share it.

    Attributes:
        owner: owns the policy; others may submit jobs to it.
        superseded: requests that a newer one replaced.
    """

    def __init__(
        self,
        factory: PolicyFactory,
        *,
        notify: Callable[[], None],
        log: Log,
        after_step: AfterStep,
        after_step_wanted: Callable[[], bool] = lambda: True,
        video_wanted: Callable[[], bool] = lambda: True,
        after_step_share: float = 0.1,
        limits: OwnerLimits | None = None,
    ) -> None:
        self.owner = PolicyThread(factory, log=log, limits=limits)
        self.owner.subscribe(notify)
        self.owner.subscribe(self._reserve_when_ready)
        self.owner.at_end(self._leave)
        self._notify, self._log = notify, log
        self._after_step, self._after_step_wanted = after_step, after_step_wanted
        self._video_wanted = video_wanted
        self._after_step_share = after_step_share
        self._lock = threading.Lock()
        self._stopped = False
        self._generation = 0
        self._mailbox: Result | None = None
        self._episode: _Episode | None = None
        self._seat: Any = None  # the robot's place at the policy, while no episode holds it
        self._reserves = False
        self.superseded = self.after_step_skipped = 0
        self._after_step_due_s = 0.0

    def start(self) -> None:
        """Begin loading."""
        self.owner.start()

    @property
    def status(self) -> WorkerStatus:
        return self.owner.status

    @property
    def alive(self) -> bool:
        return self.owner.alive

    @property
    def hung(self) -> bool:
        """Asked to stop, but still running."""
        return self.owner.hung

    def new_generation(self, generation: int) -> None:
        """Everything of older generations is void: a running step is cancelled, its session closed, its result lost."""
        with self._lock:
            self._generation = generation
            self._mailbox = None
        with suppress(NotReady):  # then there is no session
            self.owner.submit(self._close_old, lane=LANE, priority=Priority.ROBOT, upkeep=True, about=self._where)

    def submit(self, request: Request) -> None:
        """Ask for a call. One that still waits is superseded and counted; a client's step gives way."""
        try:
            ticket = self.owner.submit(
                lambda policy, cancelled: self._call(policy, request, cancelled),
                lane=LANE,
                priority=Priority.ROBOT,
                newest_wins=True,
                preempt=True,
                about=self._where,
            )
        except NotReady as error:
            self._hand_over(Result(request, None, error, 0.0))
            return
        ticket.future.add_done_callback(lambda future: self._guarded(self._ended, request, future))

    def foresee(self, generation: int, foreseen: Foreseen) -> None:
        """Let the policy work on frames that the next request of this generation will look at. Returns at once.

        A guess: whatever goes wrong with it is found, and said, by the request itself.
        """
        with suppress(NotReady):
            self.owner.submit(
                lambda policy, cancelled: self._observe(policy, generation, foreseen, cancelled),
                lane=LANE,
                priority=Priority.ROBOT,
                newest_wins=True,
                about=self._where,
            )

    def _where(self) -> Any:
        """The robot's session at the policy, or its place there, unless that is where no call succeeds now."""
        if (episode := self._episode) is not None:
            return episode.session
        seat = self._seat
        troubled = {place.index for place in self.owner.places if place.trouble}
        return None if place_of(seat) in troubled else seat

    def _observe(self, policy: Policy, generation: int, foreseen: Foreseen, cancelled: AskCancelled) -> None:
        episode = self._episode
        if episode is None or episode.generation != generation or not isinstance(policy, EncodesAhead):
            return
        for slot in range(len(foreseen)):
            if cancelled() or self._void(generation):
                return
            with suppress(WamError):
                policy.observe(episode.session, slot, foreseen.views(slot))

    def take_result(self) -> Result | None:
        """Empty the mailbox."""
        with self._lock:
            result, self._mailbox = self._mailbox, None
            return result

    def stop(self, timeout_s: float) -> bool:
        """Cancel and join. False when the thread is still running after ``timeout_s`` (see ``hung``)."""
        with self._lock:
            self._stopped = True
            self._mailbox = None
        return self.owner.stop(timeout_s)

    def _call(
        self, policy: Policy, request: Request, cancelled: AskCancelled
    ) -> tuple[ActionChunk, Observation, float, float]:
        generation = request.generation
        if self._void(generation):
            raise Cancelled("a new session has begun")
        if self._episode is None or self._episode.generation != generation:
            self._close_episode(policy)
            self._episode = _Episode(self._opened(policy, request.session_id), generation)
        episode = self._episode
        observation = request.observation.materialise(policy.spec.cameras, first_call=episode.calls == 0)
        observation = replace(observation, want_video=self._video_wanted())
        started_s = time.monotonic()

        def unwanted() -> bool:
            return cancelled() or self._void(generation)

        while True:
            try:
                chunk = policy.infer(episode.session, observation, cancelled=unwanted)
                break
            except Overloaded:  # clients have the memory
                if not self.owner.make_room(policy):
                    raise
        episode.calls += 1
        return chunk, observation, started_s, time.monotonic()

    def _opened(self, policy: Policy, session_id: str) -> Any:
        """In the robot's place."""
        self._give_up_seat(policy)
        while True:
            try:
                return policy.open(session_id)
            except Overloaded:  # a place that was lost with its process, and clients have the others
                if not self.owner.make_room(policy):
                    raise

    def _reserve_when_ready(self) -> None:
        """A listener of the owner: before any client can, the robot takes its place."""
        status = self.owner.status
        if status.phase is not Phase.READY or status.spec is None or self._reserves:
            return
        self._reserves = True
        if (memory := status.spec.details.get("memory")) is not None:
            self._log("info", str(memory))
        if status.spec.details.get("sessions_capacity") is not None:
            with suppress(NotReady):
                self.owner.submit(
                    lambda policy, cancelled: self._reserve(policy), lane=LANE, priority=Priority.ROBOT, upkeep=True
                )

    def _reserve(self, policy: Policy) -> None:
        """Keep the robot's place while it has no session: clients may have all others."""
        reserve = getattr(policy, "reserve", None)  # not by protocol: one that is recorded has it from the one inside
        if reserve is not None and self._reserves and self._seat is None and self._episode is None:
            try:
                self._seat = reserve()
            except WamError as error:
                self._log("warn", f"no place is kept for the robot's next session: {error}")

    def _give_up_seat(self, policy: Policy) -> None:
        seat, self._seat = self._seat, None
        if seat is not None:
            policy.close(seat)

    def _leave(self, policy: Policy) -> None:
        """No more calls will be made."""
        self._reserves = False
        self._close_episode(policy)
        self._give_up_seat(policy)

    def _close_old(self, policy: Policy, cancelled: AskCancelled) -> None:
        if self._episode is not None and self._episode.generation != self._generation:
            self._close_episode(policy)

    def _close_episode(self, policy: Policy) -> None:
        if self._episode is not None:
            session, self._episode = self._episode.session, None
            policy.close(session)
            self._reserve(policy)

    def _guarded(self, step: Callable[..., None], *args: Any) -> None:
        """A callback of a future must not raise: nobody would see it."""
        try:
            step(*args)
        except Exception:
            self._log("error", f"defect in the worker\n{traceback.format_exc()}")

    def _ended(self, request: Request, future: Future[tuple[ActionChunk, Observation, float, float]]) -> None:
        """In the owner's thread, but for what never ran."""
        ended_s = time.monotonic()
        try:
            raised = future.exception()
        except CancelledError:
            raised = Cancelled("the call was cancelled")
        if isinstance(raised, Superseded):
            self.superseded += 1
            return
        if raised is not None:
            error = raised if isinstance(raised, WamError) else EngineError(f"{type(raised).__name__}: {raised}")
            self._hand_over(Result(request, None, error, ended_s - request.submitted_s, None, ended_s))
            return
        chunk, observation, started_s, ended_s = future.result()
        self._hand_over(Result(request, chunk, None, ended_s - request.submitted_s, started_s, ended_s))
        if self._after_step_wanted():
            self._plan_after_step(request.generation, chunk, observation)

    def _plan_after_step(self, generation: int, chunk: ActionChunk, observation: Observation) -> None:
        """Now, when its share of the time allows it; else when nobody wants the policy for a while."""
        due = time.monotonic() >= self._after_step_due_s

        def work(policy: Policy, cancelled: AskCancelled) -> None:
            start_s = time.monotonic()
            if due or self._stays_idle(generation, IDLE_STEPS * policy.spec.dt_s):
                start_s = time.monotonic()
                self._after_step(policy, chunk, observation)
                end_s = time.monotonic()
                self._after_step_due_s = end_s + (end_s - start_s) * (1 / self._after_step_share - 1)
            else:
                self.after_step_skipped += 1

        def skipped(future: Future[None]) -> None:
            if isinstance(future.exception(), Superseded):
                self.after_step_skipped += 1

        with suppress(NotReady):
            ticket = self.owner.submit(
                work,
                lane=PICTURES,
                priority=Priority.ROBOT if due else Priority.IDLE,
                newest_wins=True,
                about=self._where,
            )
            ticket.future.add_done_callback(lambda future: self._guarded(skipped, future))

    def _stays_idle(self, generation: int, timeout_s: float) -> bool:
        return self.owner.idle_for(timeout_s) and not self._void(generation)

    def _void(self, generation: int) -> bool:
        return self._stopped or generation != self._generation

    def _hand_over(self, result: Result) -> None:
        with self._lock:
            if self._stopped or result.request.generation != self._generation:
                return
            self._mailbox = result
        self._notify()
