"""What the WebSocket library leaves open to a hostile peer: how many sockets there are, how much is queued for a peer
that does not read, and floods of tiny frames."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.frames import Frame, Opcode
from websockets.protocol import State

SPARE_SOCKETS = 64
"""Beside the connections that are allowed: handshakes under way, probes, connections that are closing."""
MAX_UNREAD_BYTES = 8 * 2**20
"""Queued for a peer that does not read. A reply is below 1 MiB and waited for, so only answers to pings get here."""
BURST, PER_S, PER_BYTE = 500.0, 50.0, 1 / 1024
"""Control frames and fragments a peer may send: at once, per second, and with every byte. Clients ping once in 20 s or
so, and a message in fragments of 1 KiB is free."""
SMALL_READ, LARGE_READ = 16 * 2**10, 256 * 2**10
"""Taken from a socket at a time: until it has shown what it sends, and when that are large frames. Tiny frames cost the
event loop 10 us each, and nobody else has a turn meanwhile."""


class Sockets:
    """The sockets of a server, those without a finished handshake included.

    Args:
        limit: when there is one more, the one that has been in its handshake for longest is closed: a full table of
            file descriptors would stop the whole process, and slow handshakes would keep others out.
        abused: called with what a peer did when its connection is cut for it.
    """

    def __init__(self, limit: int, abused: Callable[[str], None]) -> None:
        self.limit, self.abused = limit, abused
        self.open: dict[GuardedConnection, None] = {}  # oldest first

    def add(self, one: GuardedConnection) -> None:
        self.open[one] = None
        if len(self.open) > self.limit:
            one = next((c for c in self.open if c.protocol.state is State.CONNECTING), one)
            one.cut(f"{self.limit} sockets are open")

    def abort(self) -> None:
        """Close all of them without a word."""
        for connection in list(self.open):
            connection.transport.abort()


class GuardedConnection(ServerConnection):
    """A connection that is cut when its peer abuses it. ``sockets`` is shared by all ports of a server."""

    def __init__(self, *args: Any, sockets: Sockets, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sockets, self._allowance, self._at_s, self._tiny, self._cut = sockets, BURST, 0.0, 0, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._at_s = self.loop.time()
        super().connection_made(transport)
        self.transport.max_size = SMALL_READ  # type: ignore[attr-defined]  # of asyncio's selector transports
        self._sockets.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._sockets.open.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._cut:
            return
        self._tiny = 0
        super().data_received(data)
        self.transport.max_size = SMALL_READ if self._tiny else LARGE_READ  # type: ignore[attr-defined]
        now_s = self.loop.time()
        earned = (now_s - self._at_s) * PER_S + len(data) * PER_BYTE
        self._allowance, self._at_s = min(BURST, self._allowance + earned) - self._tiny, now_s
        if self._allowance < 0:
            self.cut("a flood of control frames or fragments")
        elif self.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.cut("it does not read what it is sent")

    def process_event(self, event: Any) -> None:
        if isinstance(event, Frame) and (event.opcode not in (Opcode.TEXT, Opcode.BINARY) or not event.fin):
            self._tiny += 1
        super().process_event(event)

    def cut(self, what: str) -> None:
        """End it without a word."""
        self._cut = True
        self._sockets.open.pop(self, None)
        self._sockets.abused(what)
        self.transport.abort()
