"""The owner of a policy: loads it, warms it up, then runs jobs from a bounded queue, the robot's first.

Whoever wants something of the policy submits a *job*, a function of the policy and of a question it asks between
network evaluations (``cancelled``). The node's worker and the OpenPI server share one owner that way, and neither
knows the other. A policy is called by one thread; one that consists of several (``places``) has a thread for each, and
a session's jobs run where the session is. Knows nothing of ROS, of sockets or of a network.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, TypeVar

from .errors import Cancelled, NotReady, PolicyUnavailable, Superseded, WamError
from .interface import Policy
from .jobs import AskCancelled, OwnerLimits, Ticket, Work
from .places import Placed, PlaceState, PlaceStatus
from .runner import Runner, Traffic
from .schedule import Priority
from .status import OwnerStatus, Phase
from .warm_up import warm_up

__all__ = [
    "AskCancelled", "OwnerLimits", "OwnerStatus", "Phase", "PolicyThread", "Priority", "Ticket", "Traffic", "Work",
]  # fmt: skip

T = TypeVar("T")
Progress = Callable[[str, float], None]
PolicyFactory = Callable[[Progress], Policy]
Log = Callable[[str, str], None]

WARNING = "warning: "
"""A factory's progress text that begins with this is logged."""

RELOAD_S = 1.0
"""Pause before a policy that went away while it was loaded or warmed up is loaded again."""


_FAILED = {
    Phase.LOADING: "the policy cannot be loaded",
    Phase.WARMING_UP: "the policy failed in its warm-up",
    Phase.READY: "the policy failed",
}


class PolicyThread:
    """One policy, one bounded queue, one thread for each of the policy's places.

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
        self._runner = Runner(
            self.limits,
            log=log,
            health=lambda failures, last_error: self._set(failures=failures, last_error=last_error),
        )
        self._cond = self._runner.cond
        self._status, self._status_lock = OwnerStatus(), threading.Lock()
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
        its own and returns True, or False when it has none. Its session has to be at the same place."""
        self._yielders = [*self._yielders, yielder]

    def make_room(self, policy: Policy) -> bool:
        """For the robot's job, whose step was ``Overloaded``: True when memory was given up and it may try again. False
        inside a client's step, which is given up before any session is; let the job fail, and it is run again."""
        return not self._runner.inside and any(yielder(policy) for yielder in self._yielders)

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
            return len(self._runner.queue)

    @property
    def traffic(self) -> Traffic:
        """Jobs that were interleaved, restarted and refused so far, and those that wait."""
        return self._runner.traffic

    @property
    def _stop(self) -> bool:
        return self._runner.stopping

    @property
    def _places(self) -> list[PlaceState]:
        return self._runner.places

    @property
    def running_s(self) -> float:
        """How long the current job has been running, of several the longest; 0 when there is none."""
        return max((place.running_s for place in self._places), default=0.0)

    @property
    def hang(self) -> str:
        """Why nothing that waits can expect its turn; empty when it can. Of several places each looks after itself."""
        place = self._places[0] if len(self._places) == 1 else None
        return "" if place is None else place.hang(self.limits.stuck_after_s)

    @property
    def places(self) -> list[PlaceStatus]:
        """Of a policy that consists of several; of any other it is one."""
        return [place.status(self.limits.stuck_after_s) for place in self._places]

    def trouble(self) -> str | None:
        """Why a job submitted now would probably not succeed; None when the owner is ready, with one of several places
        at least."""
        status = self._status
        if status.phase is not Phase.READY:
            return f"{status.phase.value}: {status.message}"
        found = [(p.index, p.trouble(self.limits.stuck_after_s)) for p in self._places]
        if found and all(text for _, text in found):
            return found[0][1] if len(found) == 1 else "; ".join(f"replica {i}: {text}" for i, text in found)
        return None if self.alive else "the policy's thread has ended"

    def capacity(self) -> str:
        """What is left of several places, empty when there is one."""
        if len(self._places) < 2:
            return ""
        found = [(p.index, p.trouble(self.limits.stuck_after_s)) for p in self._places]
        lost = [f"replica {i}: {text}" for i, text in found if text]
        return "; ".join([f"{len(found) - len(lost)} of {len(found)} replicas", *lost])

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
        about: Callable[[], Any] = lambda: None,
    ) -> Ticket[T]:
        """Queue a job. Jobs of one lane run in order; lanes of one priority take turns.

        Args:
            work: called in the owner's thread with the policy and ``cancelled``. It may be started again after it
                raised ``Cancelled``, so until then it changes nothing. While it asks ``cancelled``, more urgent jobs of
                other sessions may run.
            lane: whose job it is, e.g. a connection.
            deadline_s: on ``time.monotonic``; a job that has not ended by then fails with ``DeadlineExceeded``, and one
                that cannot, judged by the shortest of those before it, is not started.
            newest_wins: the lane's steps that still wait fail with ``Superseded``.
            preempt: a running step of lower priority that cannot be interleaved is interrupted, put back and started
                again later. Where steps can be interleaved, every job of higher priority runs inside a running one.
            upkeep: frees memory: always accepted, never interrupted by ``cancelled`` (which stays False until the
                owner stops).
            about: gives the policy's session that the job works on, asked when its turn may have come; it runs where
                that session is. None: a session that the job will open, at the place with the fewest; or no session.

        Raises:
            NotReady: the policy is not loaded, or the owner has stopped.
            Overloaded: the queue is full.
        """
        ticket = Ticket(work, lane, priority, deadline_s, upkeep=upkeep, preempts=preempt, about=about)
        with self._cond:
            status = self._status
            if self._stop or status.phase is not Phase.READY:
                raise NotReady("the policy takes no calls", got=f"{status.phase.value}: {status.message}")
            dropped = self._runner.add(ticket, newest_wins=newest_wins)
            self._cond.notify_all()
        for old in dropped:
            old.fail(Superseded("a newer observation took this one's place"))
        return ticket

    def idle_for(self, timeout_s: float) -> bool:
        """For a job: wait for somebody else's. False as soon as one is submitted or the owner stops."""
        return self._runner.idle_for(timeout_s)

    def stop(self, timeout_s: float) -> bool:
        """Cancel everything and join. False when the thread is still running after ``timeout_s`` (see ``hung``)."""
        with self._cond:
            self._runner.stopping = True
            self._cond.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        self._runner.drain(Cancelled("the policy's owner was stopped"))
        return not self.alive

    # -- the threads ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            policy = self._loaded()
            try:
                self._set(phase=Phase.READY, message="ready", fraction=1.0)
                self._serve_places()
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
            self._runner.places = []  # they hold the policy
            ended = NotReady("the policy's owner has ended", got=self._status.message)
            self._runner.drain(Cancelled("the policy's owner was stopped") if self._stop else ended)

    def _loaded(self) -> Policy:
        """The policy, warmed up. One that goes away meanwhile is loaded again: it may come back by itself."""
        while True:
            self._set(phase=Phase.LOADING, message="loading the policy", fraction=0.0, warm_up_s=())
            try:
                policy = self._factory(self._progress)
            except PolicyUnavailable as error:
                self._set(message=error.what)
            else:
                try:
                    self._warm_up(policy)
                    return policy
                except PolicyUnavailable as error:
                    _disconnect(policy)
                    self._set(message=error.what)
                except BaseException:
                    _disconnect(policy)
                    raise
            with self._cond:
                if self._cond.wait_for(lambda: self._stop, RELOAD_S):
                    raise Cancelled("stopped while loading")

    def _warm_up(self, policy: Policy) -> None:
        self._set(phase=Phase.WARMING_UP, message="warming up", fraction=0.0, spec=policy.spec)
        parts = list(policy.places) if isinstance(policy, Placed) else [policy]
        self._runner.places = [PlaceState(index, part) for index, part in enumerate(parts)]
        for part in parts if self._warms_up else []:
            took: tuple[float, ...] = ()
            for seconds in warm_up(part, self._progress, lambda: self._stop):
                took = (*took, seconds)
                self._set(warm_up_s=took)

    def _say_farewell(self, policy: Policy) -> None:
        for farewell in self._farewells:
            try:
                farewell(policy)
            except Exception:
                self._log("error", f"the policy was not left in good order\n{traceback.format_exc()}")
        _disconnect(policy)

    def _set(self, **changes: Any) -> None:
        with self._status_lock:
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

    def _serve_places(self) -> None:
        """This thread serves the first place. Returns when all of them have ended."""
        others = [
            threading.Thread(target=self._runner.serve, args=(p,), name=f"wam_policy_owner_{p.index}", daemon=True)
            for p in self._places[1:]
        ]
        for thread in others:
            thread.start()
        try:
            self._runner.serve(self._places[0])
        finally:
            for thread in others:
                thread.join()


def _disconnect(policy: Policy) -> None:
    """Of a policy on another machine, or in other processes."""
    leave = getattr(policy, "disconnect", None)
    if leave is not None:
        leave()
