"""Runs the jobs of a policy at its places, as ``schedule.decide`` says: the part of the owner that knows no life cycle.

A step of a policy that interleaves asks between network evaluations whether it may go on. More urgent jobs run right
there, in the same thread, on other sessions; then it goes on where it was, and nothing is computed twice. Steps of
other policies are interrupted, put back and started again.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .errors import (
    Cancelled,
    DeadlineExceeded,
    EngineError,
    ObservationError,
    Overloaded,
    PolicyUnavailable,
    ReplicaDied,
    SessionError,
    WamError,
    bare,
)
from .jobs import JobQueue, OwnerLimits, Ticket
from .places import PlaceState, place_of
from .schedule import WAIT, Decision, Do, Priority, Refusal, Running, Waiting, decide

CLIENT_FAULTS = (ObservationError, SessionError, Cancelled, Overloaded)
"""Errors that say nothing about the health of the policy."""

LOOK_S = 0.25
"""An idle place asks so often whether its policy is lost, when that can happen to it."""


@dataclass(frozen=True)
class Traffic:
    """What became of the jobs so far.

    Attributes:
        interleaved: jobs that ran inside another one's step.
        restarted: steps that were interrupted and put back, to start again.
        refused: jobs that were not run, or not again, by reason.
        waiting: jobs that wait now, by priority.
    """

    interleaved: int = 0
    restarted: int = 0
    refused: dict[Refusal, int] = field(default_factory=dict)
    waiting: dict[Priority, int] = field(default_factory=dict)


class Runner:
    """The queue of a policy, and the jobs that run.

    Args:
        limits: of the queue.
        log: called from a place's thread with a level and text.
        health: told the failures in a row of the healthiest place, and the text of its last.

    Attributes:
        cond: its lock is held around everything that touches the queue or a place's jobs.
        stopping: set under the lock: nothing begins any more, what runs is cancelled.
    """

    def __init__(
        self, limits: OwnerLimits, *, log: Callable[[str, str], None], health: Callable[[int, str], None]
    ) -> None:
        self.limits, self._log, self._health = limits, log, health
        self.cond = threading.Condition()
        self.stopping = False
        self.queue = JobQueue(limits)
        self.places: list[PlaceState] = []
        self._here = threading.local()
        self._interleaved = self._restarted = 0
        self._refused: Counter[Refusal] = Counter()

    # -- any thread -------------------------------------------------------------------------------------------------

    @property
    def traffic(self) -> Traffic:
        with self.cond:
            waiting = {priority: self.queue.waiting(priority) for priority in Priority}
            return Traffic(self._interleaved, self._restarted, dict(self._refused), waiting)

    def add(self, ticket: Ticket[Any], *, newest_wins: bool) -> list[Ticket[Any]]:
        """Queue a job, with the lock held. Returns what has to give way.

        Raises:
            Overloaded: no room.
        """
        if (full := self.queue.refusal(ticket, newest_wins=newest_wins)) is not None:
            self._refused[full[0]] += 1
            raise full[1]
        ticket.canceller = self._cancel
        return self.queue.add(ticket, newest_wins=newest_wins)

    @property
    def inside(self) -> bool:
        """For a job: it runs inside another one's."""
        place = getattr(self._here, "place", None)
        return place is not None and len(place.stack) > 1

    def idle_for(self, timeout_s: float) -> bool:
        """See ``PolicyThread.idle_for``."""
        place = getattr(self._here, "place", None) or self.places[0]

        def wanted() -> bool:
            # As if the job that waits here had ended: the next one may be about its session.
            return self.stopping or self._decide(place, around=place.stack[:-1])[1] is not None

        with self.cond:
            return not self.cond.wait_for(wanted, timeout_s)

    def drain(self, error: WamError) -> None:
        """Nothing that waits will run."""
        with self.cond:
            left = self.queue.clear()
        for ticket in left:
            ticket.fail(error)

    def _cancel(self, ticket: Ticket[Any], error: WamError) -> None:
        with self.cond:
            queued = self.queue.remove(ticket)
            if not queued:
                ticket.error = ticket.error or error
            elif isinstance(error, DeadlineExceeded):  # whoever submitted it had a clock of its own
                self._refused[Refusal.LATE] += 1
        if queued:
            ticket.fail(error)

    # -- a place's thread -------------------------------------------------------------------------------------------

    def serve(self, place: PlaceState) -> None:
        """Run jobs until the owner stops.

        Raises:
            WamError: the place's policy can answer no call again.
        """
        self._here.place = place
        while (ticket := self._turn(place)) is not None:
            self._run(place, ticket)
            del ticket  # what is not needed may not wait here for the next job

    def _turn(self, place: PlaceState) -> Ticket[Any] | None:
        """Wait for the next job; it has begun. None: the owner stops."""
        # With several places, which one a new session goes to changes without a word when one of them goes away.
        pause_s = LOOK_S if hasattr(place.policy, "lost") or len(self.places) > 1 else None
        while True:
            with self.cond:
                while True:
                    decision, ticket = self._decide(place)
                    if self.stopping or place.lost is not None or ticket is not None:
                        break
                    self.cond.wait(pause_s)
                if self.stopping:
                    return None
                lost = place.lost
                if lost is None and ticket is not None:
                    self._begin(place, ticket, decision)
            if lost is not None:
                # Not ready from now on: to leave it may take a while.
                self._note(place, place.failures + 1, str(lost))
                raise lost  # nobody's job can succeed again
            assert ticket is not None
            if decision.do is not Do.REFUSE:
                return ticket
            self._refuse(ticket, decision)

    def _begin(self, place: PlaceState, ticket: Ticket[Any], decision: Decision) -> None:
        if decision.do is Do.REFUSE:
            self.queue.remove(ticket)
            return
        self.queue.take(ticket)
        place.stack.append(ticket)

    def _run(self, place: PlaceState, ticket: Ticket[Any]) -> None:
        try:
            self._execute(place, ticket)
        finally:
            with self.cond:
                assert place.stack[-1] is ticket
                place.stack.pop()
                self.queue.done(ticket)
                self.cond.notify_all()

    def _execute(self, place: PlaceState, ticket: Ticket[Any]) -> None:
        if ticket.started_s is None and not ticket.future.set_running_or_notify_cancel():
            return
        ticket.begin()
        if (early := self._expired(ticket)) is not None:
            self._count(Refusal.LATE)
            ticket.fail(early)
            return
        work = ticket.work
        assert work is not None
        try:
            result = work(place.policy, lambda: self._asked(place, ticket))
        except Cancelled as error:
            self._interrupted(ticket, bare(error))
        except Overloaded as error:
            if not self._unnested(place, ticket):
                ticket.fail(bare(error))
        except Exception as error:
            self._failed(place, ticket, error)
        else:
            ticket.ended_s, ticket.work = time.monotonic(), None
            if not ticket.upkeep:
                place.took(ticket)
                self._note(place, 0, "")
            ticket.future.set_result(result)

    # -- while a job runs -------------------------------------------------------------------------------------------

    def _asked(self, place: PlaceState, ticket: Ticket[Any]) -> bool:
        """``cancelled`` of a running job: whether it has to end. More urgent ones run in here."""
        asked_s = time.monotonic()
        while not self._has_to_end(ticket):
            with self.cond:
                decision, urgent = self._decide(place, ticket, asked_s)
                if decision.do is Do.NEST and urgent is not None:
                    assert all(urgent.lane != t.lane for t in place.stack)
                    self._begin(place, urgent, decision)
                    self._interleaved += 1
                elif decision.do is Do.INTERRUPT and urgent is not None:
                    ticket.preempt = urgent.made_way = True
                elif urgent is not None:
                    self._begin(place, urgent, decision)
            if urgent is None:
                return False
            if decision.do is Do.REFUSE:
                self._refuse(urgent, decision)
            elif decision.do is Do.NEST:
                self._run_inside(place, ticket, urgent)
            del urgent
        return True

    def _run_inside(self, place: PlaceState, outer: Ticket[Any], urgent: Ticket[Any]) -> None:
        outer.pause()
        try:
            self._run(place, urgent)
        finally:
            outer.resume()

    def _has_to_end(self, ticket: Ticket[Any]) -> bool:
        if ticket.upkeep:
            return self.stopping
        return self.stopping or ticket.preempt or ticket.error is not None or self._expired(ticket) is not None

    @staticmethod
    def _expired(ticket: Ticket[Any]) -> WamError | None:
        if ticket.deadline_s is None or (late_s := time.monotonic() - ticket.deadline_s) <= 0:
            return None
        return DeadlineExceeded("the deadline of this call has passed", got=f"{late_s * 1e3:.0f} ms late")

    def _interrupted(self, ticket: Ticket[Any], error: WamError) -> None:
        wanted = ticket.error or self._expired(ticket)
        if self.stopping or wanted is not None or not ticket.preempt:
            ticket.fail(wanted or error)
            return
        ticket.preempt = False
        ticket.preemptions += 1
        if ticket.preemptions > self.limits.max_preemptions:
            self._count(Refusal.INTERRUPTED)
            ticket.fail(Overloaded("the robot needs the policy", got=f"interrupted {ticket.preemptions} times"))
            return
        with self.cond:
            self._restarted += 1
            self.queue.put_back(ticket)

    def _unnested(self, place: PlaceState, ticket: Ticket[Any]) -> bool:
        """The robot's step found no memory inside another one's: that one is given up, and starts again after it."""
        around = place.stack[:-1]
        if not ticket.preempts or not around or self._has_to_end(ticket):
            return False
        for outer in around:
            outer.preempt = True
        with self.cond:
            self.queue.put_back(ticket)
        return True

    def _failed(self, place: PlaceState, ticket: Ticket[Any], error: Exception) -> None:
        if isinstance(error, CLIENT_FAULTS):
            ticket.fail(bare(error))
            return
        if not isinstance(error, PolicyUnavailable):  # its text says it all, and it is said by whoever asked
            self._log("error", f"the policy raised\n{traceback.format_exc()}")
        shown = error if isinstance(error, WamError) else EngineError(f"the policy raised {_one_line(error)}")
        if not isinstance(error, ReplicaDied):  # what takes its place is as good as new, and ``away`` until it is there
            self._note(place, place.failures + 1, str(shown))
        ticket.fail(bare(shown))

    def _refuse(self, ticket: Ticket[Any], decision: Decision) -> None:
        """Its turn has come too late."""
        assert decision.refusal is not None and ticket.deadline_s is not None
        self._count(decision.refusal)
        left_s = ticket.deadline_s - time.monotonic()
        what = "the deadline of this call has passed" if left_s < 0 else "the deadline of this call cannot be met"
        ticket.fail(
            DeadlineExceeded(what, got=f"{left_s * 1e3:.0f} ms left", remedy="allow more time, or ask less often")
        )

    def _count(self, refusal: Refusal) -> None:
        with self.cond:  # several places refuse at once
            self._refused[refusal] += 1

    def _note(self, place: PlaceState, failures: int, last_error: str) -> None:
        """Health of a place. That of the owner is the best one's."""
        if not place.failures and not failures:
            return
        place.failures, place.last_error = failures, last_error
        best = min(self.places, key=lambda p: p.failures)
        self._health(best.failures, best.last_error)

    # -- decisions, with the lock held ------------------------------------------------------------------------------

    def _decide(
        self,
        place: PlaceState,
        running: Ticket[Any] | None = None,
        asked_s: float = 0.0,
        *,
        around: list[Ticket[Any]] | None = None,
    ) -> tuple[Decision, Ticket[Any] | None]:
        """What happens next at a place, and with which job. ``around``: jobs that have begun; default: all of them."""
        heads = [ticket for ticket in self.queue.heads() if self._fits(place, ticket)]
        if not heads:
            return WAIT, None
        now_s = time.monotonic()
        view = None
        if running is not None:
            view = Running(running.priority, place.interleaves, asked_s, running.upkeep)
        at_work = [session for t in (place.stack if around is None else around) if (session := t.about()) is not None]
        decision = decide([self._seen(place, t, at_work, now_s) for t in heads], view, now_s)
        return (WAIT, None) if decision.do is Do.WAIT else (decision, heads[decision.job])

    def _seen(self, place: PlaceState, ticket: Ticket[Any], at_work: list[Any], now_s: float) -> Waiting:
        session = ticket.about() if at_work else None
        return Waiting(
            ticket.priority,
            ticket.submitted_s,
            ticket.deadline_s,
            upkeep=ticket.upkeep,
            preempts=ticket.preempts and not self._has_room(ticket),
            busy=self.queue.is_busy(ticket.lane) or any(session is one for one in at_work),
            least_s=place.least_s(ticket.priority, now_s) if ticket.deadline_s is not None else 0.0,
        )

    def _has_room(self, ticket: Ticket[Any]) -> bool:
        """Nobody has to be interrupted for it: a place where it could run is idle, or will be."""
        if ticket.made_way:
            return True
        fitting = [p for p in self.places if self._fits(p, ticket)]
        return any(p.running is None or p.running.preempt for p in fitting)

    def _fits(self, place: PlaceState, ticket: Ticket[Any]) -> bool:
        """Whether a job may run at this place."""
        if len(self.places) == 1:
            return True
        session = ticket.about()
        at = place_of(session)
        if at is not None:
            return at == place.index
        return session is not None or place in self._freest()

    def _freest(self) -> list[PlaceState]:
        """Where a new session would go. With all of them away: any, which then says why not."""
        there = [p for p in self.places if not p.away] or self.places
        least = min(p.load for p in there)
        return [p for p in there if p.load == least]


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
