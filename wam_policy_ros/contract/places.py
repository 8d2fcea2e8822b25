"""Several policies behind one: each in a *place* of its own, where its sessions stay, all of them at work at once.

Whoever owns such a policy gives every place a thread (``PolicyThread`` does). A policy without places is one place.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

from .errors import WamError
from .interface import Policy, interleaves
from .jobs import Ticket
from .schedule import Priority

SAMPLES, REMEMBERED_S = 32, 30.0
"""Of how many jobs a place knows how long they took, and for how long."""


@dataclass(frozen=True)
class PlaceStatus:
    """What a place is doing.

    Attributes:
        index: from 0.
        trouble: why a call there would probably not succeed; empty when it would.
        sessions: open there.
        running_s: how long the present call has been running, without what ran inside it; of several the longest; 0
            when there is none.
        calls, call_s: calls that ended well, and seconds spent in them.
        details: e.g. device, process, restarts, memory; JSON-serialisable.
    """

    index: int
    trouble: str = ""
    sessions: int = 0
    running_s: float = 0.0
    calls: int = 0
    call_s: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)


class Place(Policy, Protocol):
    """One of several policies. Its sessions have an attribute ``place``, its number; other places refuse them."""

    @property
    def place(self) -> int: ...

    @property
    def trouble(self) -> str:
        """Why it takes no sessions now; empty when it does. Any thread."""
        ...

    @property
    def sessions(self) -> int:
        """Open ones. Any thread."""
        ...

    @property
    def details(self) -> dict[str, Any]:
        """See ``PlaceStatus``. Any thread."""
        ...


@runtime_checkable
class Placed(Protocol):
    """A policy that consists of several."""

    @property
    def places(self) -> Sequence[Place]: ...


def place_of(session_or_policy: object) -> int | None:
    """Of a policy's session, or of a policy; None where there is but one place."""
    found = getattr(session_or_policy, "place", None)
    return found if isinstance(found, int) else None


class PlaceState:
    """For the owner: one policy, the job that runs there, and how the last ones went.

    Attributes:
        stack: jobs that have begun and not ended, each inside the one before; the last one has the policy.
    """

    def __init__(self, index: int, policy: Policy) -> None:
        self.index, self.policy = index, policy
        self._one_of_several = cast(Place, policy) if place_of(policy) is not None else None
        self.stack: list[Ticket[Any]] = []
        self._took: deque[tuple[float, Priority, float]] = deque(maxlen=SAMPLES)
        self.failures = self.calls = 0
        self.call_s = 0.0
        self.last_error = ""

    @property
    def interleaves(self) -> bool:
        return interleaves(self.policy)

    @property
    def running(self) -> Ticket[Any] | None:
        """The job that has the policy."""
        stack = self.stack
        return stack[-1] if stack else None

    @property
    def running_s(self) -> float:
        return max((ticket.own_s for ticket in tuple(self.stack)), default=0.0)

    def took(self, ticket: Ticket[Any]) -> None:
        """A job has ended well."""
        self.calls, self.call_s = self.calls + 1, self.call_s + ticket.own_s
        self._took.append((time.monotonic(), ticket.priority, ticket.own_s))

    def least_s(self, priority: Priority, now_s: float) -> float:
        """The shortest of the last jobs of a priority; 0: there was none in the last ``REMEMBERED_S``."""
        recent = [own for at, of, own in self._took if of is priority and now_s - at < REMEMBERED_S]
        return min(recent, default=0.0)

    @property
    def lost(self) -> WamError | None:
        """Why no job can succeed here again."""
        found: WamError | None = getattr(self.policy, "lost", None)
        return found

    @property
    def away(self) -> str:
        """Why it takes no sessions now."""
        return "" if self._one_of_several is None else self._one_of_several.trouble

    @property
    def sessions(self) -> int:
        return 0 if self._one_of_several is None else self._one_of_several.sessions

    @property
    def load(self) -> int:
        """Sessions, and whoever is about to open one."""
        return self.sessions + sum(ticket.about() is None for ticket in self.stack)

    def status(self, stuck_after_s: float) -> PlaceStatus:
        details: dict[str, Any] = getattr(self.policy, "details", {})
        trouble = self.trouble(stuck_after_s)
        return PlaceStatus(self.index, trouble, self.sessions, self.running_s, self.calls, self.call_s, details)

    def trouble(self, stuck_after_s: float) -> str:
        if away := self.away:
            return away
        if self.failures:
            return f"the last {self.failures} call(s) failed: {self.last_error}"
        return self.hang(stuck_after_s)

    def hang(self, stuck_after_s: float) -> str:
        """That the present call has been running for longer than any should."""
        running_s = self.running_s
        return f"a call has been running for {running_s:.0f} s" if 0 < stuck_after_s < running_s else ""
