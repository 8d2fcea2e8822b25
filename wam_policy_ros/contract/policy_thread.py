"""The one thread that owns a policy: loads it, warms it up, then runs jobs from a bounded queue, the robot's first.

Whoever wants something of the policy submits a *job*, a function of the policy and of a question it asks between
network evaluations (``cancelled``). The node's worker and the OpenPI server share one owner that way, and neither
knows the other. Knows nothing of ROS, of sockets or of a network.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import Any, Generic, TypeVar

from .errors import (
    Cancelled,
    DeadlineExceeded,
    EngineError,
    NotReady,
    ObservationError,
    Overloaded,
    PolicyUnavailable,
    SessionError,
    Superseded,
    WamError,
    bare,
)
from .fakes import example_observation
from .interface import Policy, PolicySpec

T = TypeVar("T")
Progress = Callable[[str, float], None]
PolicyFactory = Callable[[Progress], Policy]
AskCancelled = Callable[[], bool]
Work = Callable[[Policy, AskCancelled], T]
Log = Callable[[str, str], None]

CLIENT_FAULTS = (ObservationError, SessionError, Cancelled, Overloaded)
"""Errors that say nothing about the health of the policy."""


WARNING = "warning: "
"""A factory's progress text that begins with this is logged."""

LOOK_S = 0.25
"""An idle owner asks so often whether its policy is lost, when that can happen to it."""

RELOAD_S = 1.0
"""Pause before a policy that went away while it was loaded or warmed up is loaded again."""


class Priority(IntEnum):
    """Who goes first. Within a priority the lanes take turns."""

    ROBOT = 0
    CLIENT = 1
    IDLE = 2


class Phase(str, Enum):
    """Where the owner is."""

    LOADING = "loading"
    WARMING_UP = "warming up"
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


_FAILED = {
    Phase.LOADING: "the policy cannot be loaded",
    Phase.WARMING_UP: "the policy failed in its warm-up",
    Phase.READY: "the policy failed",
}


@dataclass(frozen=True)
class OwnerLimits:
    """Bounds of the queue.

    Attributes:
        max_queued: jobs of all lanes together that may wait; upkeep is not counted.
        max_per_lane: jobs of one lane that may wait.
        max_preemptions: a step that the robot interrupted this many times is refused instead of started again.
        stuck_after_s: a job that runs longer makes the owner not healthy; 0 switches that off.
    """

    max_queued: int = 256
    max_per_lane: int = 16
    max_preemptions: int = 8
    stuck_after_s: float = 120.0


@dataclass(frozen=True)
class OwnerStatus:
    """What the owner is doing.

    Attributes:
        phase: see ``Phase``.
        message, fraction: progress of the phase; fraction 0 to 1.
        spec: the policy's spec once it is loaded.
        warm_up_s: duration of the first and of a later call, measured in the warm-up.
        failures: jobs in a row that the policy itself failed; 0 after a success.
        last_error: text of the newest of them, empty after a success.
    """

    phase: Phase = Phase.LOADING
    message: str = "not started"
    fraction: float = 0.0
    spec: PolicySpec | None = None
    warm_up_s: tuple[float, ...] = ()
    failures: int = 0
    last_error: str = ""


class Ticket(Generic[T]):
    """A submitted job.

    Attributes:
        future: its result, or a ``WamError`` without traceback. ``asyncio.wrap_future`` makes it awaitable; callbacks
            added to it run in the owner's thread.
        submitted_s, started_s, ended_s: ``time.monotonic``; None while it has not happened.
        preemptions: how often the robot interrupted it.
    """

    def __init__(
        self, work: Work[T], lane: Hashable, priority: Priority, deadline_s: float | None, *, upkeep: bool
    ) -> None:
        self.lane, self.priority, self.deadline_s, self.upkeep = lane, priority, deadline_s, upkeep
        self.future: Future[T] = Future()
        self.submitted_s = time.monotonic()
        self.started_s: float | None = None
        self.ended_s: float | None = None
        self.preemptions = 0
        self._work: Work[T] | None = work
        self._error: WamError | None = None
        self._preempt = False
        self._owner: PolicyThread | None = None

    def cancel(self, error: WamError | None = None) -> None:
        """Give up: a waiting job never starts, a running one ends at its next ``cancelled``. ``future`` then holds
        ``error``, by default ``Cancelled``. Too late for a job that has ended. Any thread."""
        if self._owner is not None:
            self._owner._cancel(self, error or Cancelled("the job was cancelled"))

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the result. Raises the job's error, or TimeoutError."""
        return self.future.result(timeout_s)


class PolicyThread:
    """One thread, one policy, one bounded queue.

    Args:
        factory: makes the policy; called in the thread with a progress callback, which raises ``Cancelled`` when the
            owner is asked to stop.
        log: called from the thread with a level (``error``) and text, tracebacks included.
        limits: bounds of the queue.
        warm_up: make a first and a later call in a throwaway session before ``READY``.
    """

    def __init__(
        self, factory: PolicyFactory, *, log: Log, limits: OwnerLimits | None = None, warm_up: bool = True
    ) -> None:
        self._factory, self._log, self._warms_up = factory, log, warm_up
        self.limits = limits or OwnerLimits()
        self._cond = threading.Condition()
        self._stop = False
        self._queues: dict[Priority, OrderedDict[Hashable, deque[Ticket[Any]]]] = {p: OrderedDict() for p in Priority}
        self._running: Ticket[Any] | None = None
        self._status = OwnerStatus()
        self._listeners: list[Callable[[], None]] = []
        self._farewells: list[Callable[[Policy], None]] = []
        self._yielders: list[Callable[[Policy], bool]] = []
        self._thread = threading.Thread(target=self._run, name="wam_policy_owner", daemon=True)

    # -- any thread -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin loading."""
        self._thread.start()

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Have ``listener`` called, in the owner's thread, whenever ``status`` has changed. Returns how to end it."""
        self._listeners = [*self._listeners, listener]
        return lambda: setattr(self, "_listeners", [one for one in self._listeners if one is not listener])

    def at_end(self, farewell: Callable[[Policy], None]) -> None:
        """Have ``farewell`` called in the owner's thread when no more jobs will run, unless the policy never was ready:
        to close sessions that are still open. Several are called in their order; an error is logged."""
        with self._cond:
            self._farewells.append(farewell)

    def at_need(self, yielder: Callable[[Policy], bool]) -> None:
        """Have ``yielder`` called, in the owner's thread, when the robot's step finds no memory: it ends one session of
        its own and returns True, or False when it has none."""
        self._yielders = [*self._yielders, yielder]

    def make_room(self, policy: Policy) -> bool:
        """For the robot's job, whose step was ``Overloaded``: True when memory was given up and it may try again."""
        return any(yielder(policy) for yielder in self._yielders)

    @property
    def status(self) -> OwnerStatus:
        return self._status

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def hung(self) -> bool:
        """Asked to stop, but still running."""
        return self._stop and self.alive

    @property
    def waiting(self) -> int:
        """Jobs that wait, upkeep included."""
        with self._cond:
            return sum(len(lane) for queue in self._queues.values() for lane in queue.values())

    @property
    def running_s(self) -> float:
        """How long the current job has been running; 0 when there is none."""
        ticket = self._running
        return 0.0 if ticket is None or ticket.started_s is None else time.monotonic() - ticket.started_s

    def trouble(self) -> str | None:
        """Why a job submitted now would probably not succeed; None when the owner is ready."""
        status, limit = self._status, self.limits.stuck_after_s
        if status.phase is not Phase.READY:
            return f"{status.phase.value}: {status.message}"
        if status.failures:
            return f"the last {status.failures} call(s) failed: {status.last_error}"
        if limit and (running_s := self.running_s) > limit:
            return f"a call has been running for {running_s:.0f} s"
        return None if self.alive else "the policy's thread has ended"

    def submit(
        self,
        work: Work[T],
        *,
        lane: Hashable,
        priority: Priority = Priority.CLIENT,
        deadline_s: float | None = None,
        newest_wins: bool = False,
        preempt: bool = False,
        upkeep: bool = False,
    ) -> Ticket[T]:
        """Queue a job. Jobs of one lane run in order; lanes of one priority take turns.

        Args:
            work: called in the owner's thread with the policy and ``cancelled``. It may be started again after it
                raised ``Cancelled``, so until then it changes nothing.
            lane: whose job it is, e.g. a connection.
            deadline_s: on ``time.monotonic``; a job that has not ended by then fails with ``DeadlineExceeded``.
            newest_wins: the lane's steps that still wait fail with ``Superseded``.
            preempt: a running step of lower priority is interrupted, put back and started again later.
            upkeep: frees memory: always accepted, never interrupted by ``cancelled`` (which stays False until the
                owner stops).

        Raises:
            NotReady: the policy is not loaded, or the owner has stopped.
            Overloaded: the queue is full.
        """
        ticket = Ticket(work, lane, priority, deadline_s, upkeep=upkeep)
        ticket._owner = self
        dropped: list[Ticket[Any]] = []
        with self._cond:
            self._check_accepts(ticket, newest_wins)
            queue = self._queues[priority]
            waiting = queue.setdefault(lane, deque())
            if newest_wins:
                dropped = [t for t in waiting if not t.upkeep]
                for old in dropped:
                    waiting.remove(old)
            waiting.append(ticket)
            running = self._running
            if preempt and running is not None and running.priority > priority and not running.upkeep:
                running._preempt = True
            self._cond.notify_all()
        for old in dropped:
            _fail(old, Superseded("a newer observation took this one's place"))
        return ticket

    def idle_for(self, timeout_s: float) -> bool:
        """For a job: wait for somebody else's. False as soon as one is submitted or the owner stops."""
        with self._cond:
            return not self._cond.wait_for(lambda: self._stop or any(self._queues.values()), timeout_s)

    def stop(self, timeout_s: float) -> bool:
        """Cancel everything and join. False when the thread is still running after ``timeout_s`` (see ``hung``)."""
        with self._cond:
            self._stop = True
            self._cond.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        self._drain(Cancelled("the policy's owner was stopped"))
        return not self.alive

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            policy = self._loaded()
            self._set(phase=Phase.READY, message="ready", fraction=1.0)
            try:
                self._serve(policy)
            finally:
                self._say_farewell(policy)
            self._set(phase=Phase.STOPPED, message="stopped")
        except Cancelled:
            self._set(phase=Phase.STOPPED, message="stopped")
        except WamError as error:
            # A person can cure it, and its text says how.
            self._log("error", f"{_FAILED[self._status.phase]}: {error}")
            self._set(phase=Phase.FAILED, message=str(error))
        except Exception as error:
            # As text: the traceback's frames hold the policy, all its weights included.
            self._log("error", f"{_FAILED[self._status.phase]}\n{traceback.format_exc()}")
            self._set(phase=Phase.FAILED, message=f"{type(error).__name__}: {error}")
        finally:
            ended = NotReady("the policy's owner has ended", got=self._status.message)
            self._drain(Cancelled("the policy's owner was stopped") if self._stop else ended)

    def _loaded(self) -> Policy:
        """The policy, warmed up. One that goes away meanwhile is loaded again: it may come back by itself."""
        while True:
            self._set(phase=Phase.LOADING, message="loading the policy", fraction=0.0, warm_up_s=())
            try:
                policy = self._factory(self._progress)
                try:
                    self._set(phase=Phase.WARMING_UP, message="warming up", fraction=0.0, spec=policy.spec)
                    if self._warms_up:
                        self._warm_up(policy)
                except BaseException:
                    _disconnect(policy)
                    raise
                return policy
            except PolicyUnavailable as error:
                self._set(message=error.what)
            with self._cond:
                if self._cond.wait_for(lambda: self._stop, RELOAD_S):
                    raise Cancelled("stopped while loading")

    def _say_farewell(self, policy: Policy) -> None:
        for farewell in self._farewells:
            try:
                farewell(policy)
            except Exception:
                self._log("error", f"the policy was not left in good order\n{traceback.format_exc()}")
        _disconnect(policy)

    def _set(self, **changes: Any) -> None:
        self._status = replace(self._status, **changes)
        for listener in self._listeners:
            listener()

    def _progress(self, message: str, fraction: float) -> None:
        if self._stop:
            raise Cancelled("stopped while loading")
        if message.startswith(WARNING):
            self._log("warn", message.removeprefix(WARNING))
            return
        self._set(message=message, fraction=float(fraction))

    def _warm_up(self, policy: Policy) -> None:
        """A first and a later call in a throwaway session, so that no robot waits for kernels to be built."""
        spec, session = policy.spec, policy.open()
        step_ns = 1e9 / spec.control_rate_hz
        later = len(spec.frame_offsets)
        try:
            for call, frames in enumerate((1, later)):
                self._progress(f"warm-up call {call + 1} of 2", call / 2)
                stamp_ns = 10**9 - round(min(spec.frame_offsets) * step_ns) * (call + 1)
                observation = example_observation(spec, frames=frames, stamp_ns=stamp_ns)
                start = time.monotonic()
                policy.infer(session, observation, cancelled=lambda: self._stop)
                self._set(warm_up_s=(*self._status.warm_up_s, time.monotonic() - start))
        finally:
            policy.close(session)

    def _serve(self, policy: Policy) -> None:
        look_s = LOOK_S if hasattr(policy, "lost") else None
        while True:
            with self._cond:
                asked = self._cond.wait_for(lambda: self._stop or any(self._queues.values()), look_s)
                if self._stop:
                    return
                lost: WamError | None = getattr(policy, "lost", None)
                if lost is None and not asked:
                    continue
                ticket = None if lost is not None else self._next()
                self._running = ticket
            if lost is not None:
                # Not ready from now on: to leave it may take a while.
                self._set(failures=self._status.failures + 1, last_error=str(lost))
                raise lost  # nobody's job can succeed again
            assert ticket is not None
            try:
                self._execute(policy, ticket)
            finally:
                self._running = None
            del ticket  # what is not needed may not wait here for the next job

    def _next(self) -> Ticket[Any]:
        for queue in self._queues.values():
            if queue:
                lane, waiting = queue.popitem(last=False)
                ticket = waiting.popleft()
                if waiting:
                    queue[lane] = waiting  # at the end: the other lanes come first
                return ticket
        raise AssertionError("nothing waits")

    def _execute(self, policy: Policy, ticket: Ticket[Any]) -> None:
        if ticket.started_s is None and not ticket.future.set_running_or_notify_cancel():
            return
        ticket.started_s = time.monotonic()
        if (early := self._expired(ticket)) is not None:
            _fail(ticket, early)
            return
        work = ticket._work
        assert work is not None
        try:
            result = work(policy, lambda: self._asked_to_end(ticket))
        except Cancelled as error:
            self._interrupted(ticket, bare(error))
        except Exception as error:
            self._failed(ticket, error)
        else:
            if self._status.failures and not ticket.upkeep:
                self._set(failures=0, last_error="")
            ticket.ended_s, ticket._work = time.monotonic(), None
            ticket.future.set_result(result)

    def _asked_to_end(self, ticket: Ticket[Any]) -> bool:
        if ticket.upkeep:
            return self._stop
        return self._stop or ticket._preempt or ticket._error is not None or self._expired(ticket) is not None

    @staticmethod
    def _expired(ticket: Ticket[Any]) -> WamError | None:
        if ticket.deadline_s is None or (late_s := time.monotonic() - ticket.deadline_s) <= 0:
            return None
        return DeadlineExceeded("the deadline of this call has passed", got=f"{late_s * 1e3:.0f} ms late")

    def _interrupted(self, ticket: Ticket[Any], error: WamError) -> None:
        wanted = ticket._error or self._expired(ticket)
        if self._stop or wanted is not None or not ticket._preempt:
            _fail(ticket, wanted or error)
            return
        ticket._preempt = False
        ticket.preemptions += 1
        if ticket.preemptions > self.limits.max_preemptions:
            _fail(ticket, Overloaded("the robot needs the policy", got=f"interrupted {ticket.preemptions} times"))
            return
        with self._cond:
            queue = self._queues[ticket.priority]
            queue.setdefault(ticket.lane, deque()).appendleft(ticket)
            queue.move_to_end(ticket.lane, last=False)

    def _failed(self, ticket: Ticket[Any], error: Exception) -> None:
        if isinstance(error, CLIENT_FAULTS):
            _fail(ticket, bare(error))
            return
        if not isinstance(error, PolicyUnavailable):  # its text says it all, and it is said by whoever asked
            self._log("error", f"the policy raised\n{traceback.format_exc()}")
        shown = error if isinstance(error, WamError) else EngineError(f"the policy raised {_one_line(error)}")
        self._set(failures=self._status.failures + 1, last_error=str(shown))
        _fail(ticket, bare(shown))

    # -- the queue --------------------------------------------------------------------------------------------------

    def _check_accepts(self, ticket: Ticket[Any], newest_wins: bool) -> None:
        status = self._status
        if self._stop or status.phase is not Phase.READY:
            raise NotReady("the policy takes no calls", got=f"{status.phase.value}: {status.message}")
        if ticket.upkeep:
            return
        lane = self._queues[ticket.priority].get(ticket.lane, ())
        mine = 0 if newest_wins else sum(not t.upkeep for t in lane)
        if mine >= self.limits.max_per_lane:
            raise Overloaded(
                "too many calls of one client wait", got=mine, expected=f"below {self.limits.max_per_lane}"
            )
        if ticket.priority is Priority.ROBOT:
            return
        total = sum(not t.upkeep for queue in self._queues.values() for waiting in queue.values() for t in waiting)
        if total >= self.limits.max_queued:
            raise Overloaded("too many calls wait", got=total, expected=f"below {self.limits.max_queued}")

    def _cancel(self, ticket: Ticket[Any], error: WamError) -> None:
        with self._cond:
            queue = self._queues[ticket.priority]
            waiting = queue.get(ticket.lane, deque())
            queued = ticket in waiting
            if queued:
                waiting.remove(ticket)
                if not waiting:
                    del queue[ticket.lane]
            else:
                ticket._error = ticket._error or error
        if queued:
            _fail(ticket, error)

    def _drain(self, error: WamError) -> None:
        with self._cond:
            left = [t for queue in self._queues.values() for waiting in queue.values() for t in waiting]
            for queue in self._queues.values():
                queue.clear()
        for ticket in left:
            _fail(ticket, error)


def _disconnect(policy: Policy) -> None:
    """Of a policy on another machine, or on several GPUs."""
    leave = getattr(policy, "disconnect", None)
    if leave is not None:
        leave()


def _fail(ticket: Ticket[Any], error: WamError) -> None:
    ticket.ended_s, ticket._work = time.monotonic(), None
    if ticket.started_s is not None or ticket.future.set_running_or_notify_cancel():
        ticket.future.set_exception(error)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
