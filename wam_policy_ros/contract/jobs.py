"""Jobs that wait for a policy: who goes first, who takes turns, how many may wait. No thread and no lock of its own."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .errors import Cancelled, Overloaded, WamError
from .interface import Policy
from .schedule import Priority, Refusal

T = TypeVar("T")
AskCancelled = Callable[[], bool]
Work = Callable[[Policy, AskCancelled], T]


@dataclass(frozen=True)
class OwnerLimits:
    """Bounds of the queue.

    Attributes:
        max_queued: jobs of all lanes together that may wait; upkeep is not counted.
        max_per_lane: jobs of one lane that may wait.
        max_preemptions: a step that the robot interrupted this many times is refused instead of started again. Steps of
            a policy that interleaves are not interrupted, unless the robot needs their memory.
        stuck_after_s: a job that runs longer makes the owner not healthy; 0 switches that off.
    """

    max_queued: int = 256
    max_per_lane: int = 16
    max_preemptions: int = 8
    stuck_after_s: float = 120.0


class Ticket(Generic[T]):
    """A submitted job.

    Attributes:
        future: its result, or a ``WamError`` without traceback. ``asyncio.wrap_future`` makes it awaitable; callbacks
            added to it run in the owner's thread.
        about: gives the policy's session that the job is about, None for a new one or none.
        submitted_s, started_s, ended_s: ``time.monotonic``; None while it has not happened.
        preemptions: how often the robot interrupted it, so that it had to start again.
        interrupted_s: what of the time since ``started_s`` others had the policy, in between.
    """

    def __init__(
        self,
        work: Work[T],
        lane: Hashable,
        priority: Priority,
        deadline_s: float | None,
        *,
        upkeep: bool,
        preempts: bool = False,
        about: Callable[[], Any] = lambda: None,
    ) -> None:
        self.lane, self.priority, self.deadline_s, self.upkeep = lane, priority, deadline_s, upkeep
        self.preempts, self.about = preempts, about
        self.future: Future[T] = Future()
        self.submitted_s = time.monotonic()
        self.started_s: float | None = None
        self.ended_s: float | None = None
        self.preemptions = 0
        self.interrupted_s = 0.0
        self.paused_s: float | None = None  # since when another job runs inside this one
        self.work: Work[T] | None = work
        self.error: WamError | None = None
        self.preempt = False  # it has to end, and starts again later
        self.made_way = False  # another one was told so, for its sake
        self.canceller: Callable[[Ticket[T], WamError], None] | None = None

    def cancel(self, error: WamError | None = None) -> None:
        """Give up: a waiting job never starts, a running one ends at its next ``cancelled``. ``future`` then holds
        ``error``, by default ``Cancelled``. Too late for a job that has ended. Any thread."""
        if self.canceller is not None:
            self.canceller(self, error or Cancelled("the job was cancelled"))

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the result. Raises the job's error, or TimeoutError."""
        return self.future.result(timeout_s)

    @property
    def own_s(self) -> float:
        """How long it has had the policy since it was started, 0 before."""
        if self.started_s is None:
            return 0.0
        until_s = self.paused_s or self.ended_s or time.monotonic()
        return until_s - self.started_s - self.interrupted_s

    def begin(self) -> None:
        """It is started, perhaps again."""
        self.started_s, self.interrupted_s = time.monotonic(), 0.0

    def pause(self) -> None:
        """Another job begins inside it; ``resume`` when that has ended."""
        self.paused_s = time.monotonic()

    def resume(self) -> None:
        assert self.paused_s is not None
        self.interrupted_s, self.paused_s = self.interrupted_s + time.monotonic() - self.paused_s, None

    def fail(self, error: WamError) -> None:
        """It ends here, without a result."""
        self.ended_s, self.work = time.monotonic(), None
        if self.started_s is not None or self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class JobQueue:
    """Jobs by priority and lane. Its owner holds a lock around every call. A lane's jobs run in order, one at a time:
    from ``take`` to ``done`` the lane is busy."""

    def __init__(self, limits: OwnerLimits) -> None:
        self.limits = limits
        self._queues: dict[Priority, OrderedDict[Hashable, deque[Ticket[Any]]]] = {p: OrderedDict() for p in Priority}
        self._busy: set[Hashable] = set()

    def __len__(self) -> int:
        return sum(len(waiting) for waiting in self._lanes())

    def _lanes(self) -> list[deque[Ticket[Any]]]:
        return [waiting for queue in self._queues.values() for waiting in queue.values()]

    def waiting(self, priority: Priority) -> int:
        """Jobs of one priority, upkeep included."""
        return sum(len(waiting) for waiting in self._queues[priority].values())

    def refusal(self, ticket: Ticket[Any], *, newest_wins: bool) -> tuple[Refusal, Overloaded] | None:
        """Why there is no room for it."""
        if ticket.upkeep:
            return None
        lane = self._queues[ticket.priority].get(ticket.lane, ())
        mine = 0 if newest_wins else sum(not t.upkeep for t in lane)
        if mine >= self.limits.max_per_lane:
            return Refusal.LANE_FULL, Overloaded(
                "too many calls of one client wait", got=mine, expected=f"below {self.limits.max_per_lane}"
            )
        if ticket.priority is Priority.ROBOT:
            return None
        total = sum(not t.upkeep for waiting in self._lanes() for t in waiting)
        if total >= self.limits.max_queued:
            return Refusal.QUEUE_FULL, Overloaded(
                "too many calls wait", got=total, expected=f"below {self.limits.max_queued}"
            )
        return None

    def add(self, ticket: Ticket[Any], *, newest_wins: bool) -> list[Ticket[Any]]:
        """Returns what has to give way: with ``newest_wins`` the lane's steps that wait."""
        waiting = self._queues[ticket.priority].setdefault(ticket.lane, deque())
        dropped = [t for t in waiting if not t.upkeep] if newest_wins else []
        for old in dropped:
            waiting.remove(old)
        waiting.append(ticket)
        return dropped

    def heads(self) -> list[Ticket[Any]]:
        """The first job of every lane, by priority and in the order of the lanes' turns."""
        return [waiting[0] for waiting in self._lanes()]

    def is_busy(self, lane: Hashable) -> bool:
        """One of the lane's jobs has begun."""
        return lane in self._busy

    def take(self, ticket: Ticket[Any]) -> None:
        """It begins. The other lanes come before its own lane's next."""
        assert ticket.lane not in self._busy, "a lane's jobs run one at a time"
        queue = self._queues[ticket.priority]
        waiting = queue.pop(ticket.lane)
        waiting.popleft()
        if waiting:
            queue[ticket.lane] = waiting
        self._busy.add(ticket.lane)

    def done(self, ticket: Ticket[Any]) -> None:
        """It has ended, or was put back."""
        self._busy.discard(ticket.lane)

    def put_back(self, ticket: Ticket[Any]) -> None:
        """It was interrupted and is the first of all to go on."""
        queue = self._queues[ticket.priority]
        queue.setdefault(ticket.lane, deque()).appendleft(ticket)
        queue.move_to_end(ticket.lane, last=False)

    def remove(self, ticket: Ticket[Any]) -> bool:
        """Take out a job that waits. False when it does not."""
        queue = self._queues[ticket.priority]
        waiting = queue.get(ticket.lane, deque())
        if ticket not in waiting:
            return False
        waiting.remove(ticket)
        if not waiting:
            del queue[ticket.lane]
        return True

    def clear(self) -> list[Ticket[Any]]:
        """Returns all that waited."""
        left = [t for waiting in self._lanes() for t in waiting]
        for queue in self._queues.values():
            queue.clear()
        return left
