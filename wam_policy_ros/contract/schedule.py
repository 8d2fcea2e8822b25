"""Who has the policy next: a pure function of what waits and of what runs. No thread, no clock, no network.

The rules, the first that applies:

1. A job that cannot meet its deadline any more is refused.
2. A smaller ``Priority`` goes first; upkeep that has waited for ``UPKEEP_S`` goes before everything but a robot's step
   that has begun, so that memory is freed however busy the robot is.
3. Within a priority the lanes take turns.
4. While a step runs, only a job of a smaller priority, or such upkeep, may come in between: inside the step, between
   two evaluations, where the policy can do that (*nest*), else in its place (*interrupt*: the step starts again later).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum

UPKEEP_S = 1.0
"""Upkeep that has waited for so long waits no more. It takes milliseconds."""


class Priority(IntEnum):
    """Who goes first. Within a priority the lanes take turns."""

    ROBOT = 0
    CLIENT = 1
    IDLE = 2


class Refusal(str, Enum):
    """Why a job is not run; the values are labels of metrics."""

    LANE_FULL = "lane_full"
    QUEUE_FULL = "queue_full"
    LATE = "deadline_passed"
    NO_TIME = "deadline_too_near"
    INTERRUPTED = "interrupted_too_often"


class Do(Enum):
    """What happens at a place."""

    WAIT = "wait"
    START = "start"
    NEST = "nest"
    INTERRUPT = "interrupt"
    REFUSE = "refuse"


@dataclass(frozen=True)
class Waiting:
    """The first waiting job of a lane.

    Attributes:
        priority, upkeep: see ``PolicyThread.submit``.
        submitted_s, deadline_s: on one monotonic clock.
        preempts: a step that cannot be interleaved may be interrupted for it.
        busy: its lane, or the session that it is about, is at work or suspended.
        least_s: such a job takes at least so long; 0: not known.
    """

    priority: Priority
    submitted_s: float
    deadline_s: float | None = None
    upkeep: bool = False
    preempts: bool = False
    busy: bool = False
    least_s: float = 0.0


@dataclass(frozen=True)
class Running:
    """The job that runs at a place, the innermost of several, and that asks whether it may go on.

    Attributes:
        priority, upkeep: see ``PolicyThread.submit``.
        interleaves: another session's job can run inside it.
        asked_s: when it asked. Jobs that came later wait for its next question, so that it goes on in between.
    """

    priority: Priority
    interleaves: bool
    asked_s: float
    upkeep: bool = False


@dataclass(frozen=True)
class Decision:
    """What to do with the job ``waiting[job]``; ``refusal`` says why with ``Do.REFUSE``."""

    do: Do
    job: int = -1
    refusal: Refusal | None = None


WAIT = Decision(Do.WAIT)


def decide(waiting: Sequence[Waiting], running: Running | None, now_s: float) -> Decision:
    """The next thing to do at one place.

    Args:
        waiting: what could run at this place, in the order of turns within each priority.
        running: what runs there and asks; None: nothing does.
    """
    for i, job in enumerate(waiting):
        if (refusal := hopeless(job, now_s)) is not None:
            return Decision(Do.REFUSE, i, refusal)
    free = [i for i, job in enumerate(waiting) if not job.busy]
    fit = [i for i in free if running is None or _may_come_between(waiting[i], running, now_s)]
    if not fit:
        return WAIT
    best = min(fit, key=lambda i: (_rank(waiting[i], now_s), i))
    if running is None:
        return Decision(Do.START, best)
    return Decision(Do.NEST if running.interleaves else Do.INTERRUPT, best)


def hopeless(job: Waiting, now_s: float) -> Refusal | None:
    """Why a job cannot end in time."""
    if job.deadline_s is None or job.upkeep:
        return None
    if now_s > job.deadline_s:
        return Refusal.LATE
    return Refusal.NO_TIME if now_s + job.least_s > job.deadline_s else None


def _may_come_between(job: Waiting, running: Running, now_s: float) -> bool:
    urgent = job.priority < running.priority
    if running.upkeep or not running.interleaves:
        return urgent and job.preempts and not running.upkeep
    waited = running.priority > Priority.ROBOT and _is_old_upkeep(job, now_s)
    return (urgent or waited) and job.submitted_s <= running.asked_s


def _rank(job: Waiting, now_s: float) -> int:
    return -1 if _is_old_upkeep(job, now_s) else job.priority


def _is_old_upkeep(job: Waiting, now_s: float) -> bool:
    return job.upkeep and now_s - job.submitted_s >= UPKEEP_S
