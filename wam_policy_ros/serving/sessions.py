"""Which episodes exist and which connection may use them. Lives in the server's event loop; frees nothing itself.

A session belongs to one connection at a time. It outlives a broken connection for a while, so that its client can come
back; what a full table does not do is throw somebody's running episode away.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from wam_policy_ros.contract.errors import Overloaded, SessionError

MAX_LOST = 1024
"""Ids a table remembers of sessions that ended without their client's wish."""


@dataclass(eq=False)
class ServedSession:
    """One episode of a client.

    Attributes:
        key: its name among all sessions; ``session_id`` or, for clients that give none, one of the connection's own.
        private: nobody can name it, so nobody can come back to it.
        holder: the connection that has it, None while that is gone.
        handle: the policy's session; only jobs of the policy's thread touch it. None: no memory is held.
        steps: answered requests.
        cameras: wire keys of its pictures, fixed by the first request.
        seed: of its noise.
        lost: why it ended without its client's wish; a step of it that still waits must not begin.
        used_s: ``time.monotonic`` of the last request, left_s: of the loss of its connection.
        busy: requests in the policy's queue or running.
    """

    key: str
    private: bool
    holder: Any
    handle: Any = None
    steps: int = 0
    cameras: tuple[str, ...] | None = None
    seed: int | None = None
    lost: str | None = None
    used_s: float = field(default_factory=time.monotonic)
    left_s: float | None = None
    busy: int = 0


class SessionTable:
    """All sessions of a server.

    Args:
        max_sessions: bound; a request for one more is refused with the reason.
        idle_s: a connected client's session that was not used for this long ends; 0: never.
        resume_s: how long a session waits for its client after the connection broke.
        clock: for tests.

    Attributes:
        room: sessions that the policy has memory for, in words and number; None: any number.
    """

    def __init__(
        self, *, max_sessions: int, idle_s: float, resume_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_sessions, self.idle_s, self.resume_s = max_sessions, idle_s, resume_s
        self._clock = clock
        self._sessions: dict[str, ServedSession] = {}
        self._lost: OrderedDict[str, str] = OrderedDict()
        self._numbers = itertools.count()
        self.room: tuple[int, str] | None = None
        self.freeing = 0  # no longer in the table, but their memory is still held

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, session_id: str) -> ServedSession | None:
        return self._sessions.get(session_id)

    def of(self, holder: Any) -> list[ServedSession]:
        """The sessions of a connection, oldest use first."""
        return sorted((s for s in self._sessions.values() if s.holder is holder), key=lambda s: s.used_s)

    def private_key(self) -> str:
        """A name no client can guess or collide with: ids of clients are shorter than their limit and hold no NUL."""
        return f"\0connection-{next(self._numbers)}"

    def take(self, session_id: str, holder: Any, *, private: bool = False) -> ServedSession:
        """The session of that name for ``holder``: its own, one whose connection is gone, or a new one.

        Raises:
            SessionError: another connection has it, or its history was lost since its last request. The latter is said
                once: the next request starts afresh.
            Overloaded: the table is full; ``reclaimable`` may help.
        """
        session = self._sessions.get(session_id)
        if session is None:
            if (reason := self._lost.pop(session_id, None)) is not None:
                raise SessionError(
                    f"the history of session {session_id!r} is lost: {reason}",
                    remedy="send the request again to start afresh, knowing that the policy remembers nothing",
                )
            self._check_room()
            session = self._sessions[session_id] = ServedSession(session_id, private, holder)
        elif session.holder is None:
            session.holder, session.left_s = holder, None
        elif session.holder is not holder:
            raise SessionError(
                f"session {session_id!r} is in use by another connection",
                expected="an id of its own for every client",
                remedy="choose another session_id (a UUID), or close the other connection",
            )
        session.used_s = self._clock()
        return session

    @property
    def limit(self) -> int:
        return self.max_sessions if self.room is None else min(self.max_sessions, self.room[0])

    def _check_room(self) -> None:
        if len(self._sessions) + self.freeing < self.limit:
            return
        memory = self.room is not None and self.limit < self.max_sessions
        now = self._clock()
        left = [self.resume_s - (now - s.left_s) for s in self._sessions.values() if s.left_s is not None]
        wait_s = max(min(left, default=0.0), 0.0)
        freeing = f", the memory of {self.freeing} more is being freed" if self.freeing else ""
        waiting = f", {len(left)} of them wait for a lost client, the first for {wait_s:.0f} s more"
        raise Overloaded(
            "there is no room for another session",
            got=f"{len(self._sessions)} of {self.limit} in use{freeing}{waiting if left else ''}"
            + (f"; {self.room[1]}" if self.room is not None and memory else ""),
            remedy="reset or disconnect what is no longer needed, try again later, or "
            + ("serve a preset whose windows take less memory" if memory else "raise max_sessions"),
        )

    def made_room(self, count: int) -> None:
        """The memory of that many removed sessions is free."""
        self.freeing -= count

    def reclaimable(self) -> ServedSession | None:
        """A session that its client has evidently left behind: on a connection that goes from one id to the next
        without a reset (one episode after the other), not the newest, and of more than one step."""
        for holder in {s.holder for s in self._sessions.values() if s.holder is not None}:
            mine = self.of(holder)
            if len(mine) > 1 and not getattr(holder, "interleaves", False):
                old = mine[0]
                if old.steps > 1 and not old.busy:
                    return old
        return None

    def least_missed(self, helps: Callable[[Any], bool] = lambda handle: True) -> ServedSession | None:
        """The session to end when the robot needs its memory: one that waits for a lost client rather than one in use,
        the one not used for the longest time. None: none holds memory.

        Args:
            helps: whether the memory of this policy's session is what the robot needs.
        """
        held = [s for s in self._sessions.values() if s.handle is not None and helps(s.handle)]
        return min(held, key=lambda s: (s.left_s is None, s.busy > 0, s.used_s), default=None)

    def remove(self, session: ServedSession, lost: str | None = None) -> None:
        """Forget a session. ``lost``: why, for its client, who did not ask for it."""
        if self._sessions.get(session.key) is session:
            del self._sessions[session.key]
        session.lost = lost or session.lost
        if lost is not None and (session.steps or session.handle is not None):
            self._lost[session.key] = lost
            while len(self._lost) > MAX_LOST:
                self._lost.popitem(last=False)

    def leave(self, sessions: Iterable[ServedSession]) -> None:
        """Their connection broke; they wait for their client."""
        now = self._clock()
        for session in sessions:
            session.holder, session.left_s = None, now

    def forget_loss(self, session_id: str) -> None:
        """A reset: the client knows that nothing is remembered."""
        self._lost.pop(session_id, None)

    def expired(self) -> list[tuple[ServedSession, str | None]]:
        """Sessions whose time is over, and the ``lost`` to remove them with."""
        now = self._clock()
        out: list[tuple[ServedSession, str | None]] = []
        for session in self._sessions.values():
            if session.left_s is not None and now - session.left_s >= self.resume_s:
                out.append((session, None))  # a client that comes back that late starts afresh
            elif (
                session.holder is not None and self.idle_s and now - session.used_s >= self.idle_s and not session.busy
            ):
                out.append((session, f"it was not used for {self.idle_s:g} s"))
        return out
