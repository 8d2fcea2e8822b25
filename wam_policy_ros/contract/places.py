"""Several policies behind one: each in a *place* of its own, where its sessions stay, all of them at work at once.

Whoever owns such a policy gives every place a thread (``PolicyThread`` does). A policy without places is one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from .interface import Policy


@dataclass(frozen=True)
class PlaceStatus:
    """What a place is doing.

    Attributes:
        index: from 0.
        trouble: why a call there would probably not succeed; empty when it would.
        sessions: open there.
        running_s: how long the present call has been running; 0 when there is none.
        calls, call_s: calls that ended well, and seconds spent in them.
        details: e.g. device, process, restarts; JSON-serialisable.
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
