"""One client: its requests in order, its sessions, its errors. Reading goes on while a step runs, so that a lost client
or a newer observation is noticed at once."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import traceback
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed
from websockets.protocol import State

from wam_policy_ros.contract.errors import (
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
from wam_policy_ros.contract.policy_thread import Phase, Ticket

from .codec import Codec, pack
from .dialects import RESET_ACK, Dialect, check_fit, metadata
from .sessions import ServedSession
from .steps import Answered, check_continuity, check_meaning, job, with_timings
from .wire import InferRequest, RequestReader, ResetRequest

if TYPE_CHECKING:
    from .server import OpenPIServer

MAX_ERROR_CHARS = 4000
FATAL = 1011
LARGE_BYTES = 64 * 2**10
"""Messages from here on are read beside the event loop where their pictures have to be resized, too."""


@dataclass(eq=False)
class Item:
    """A request that has arrived and is not answered. ``content`` is an error when it could not be read.

    ``warned``: it was its turn when the policy was found to hang; ``hung``: it is answered without the policy;
    ``answered``: nothing more is wanted of the policy.
    """

    content: InferRequest | ResetRequest | WamError
    received_s: float
    ticket: Ticket[Any] | None = None
    superseded: bool = False
    warned: bool = False
    hung: bool = False
    answered: bool = False


class Connection:
    """A client's connection.

    Attributes:
        interleaves: it has gone back to an earlier session, so it runs several at a time.
        cleaned: its sessions have been freed or left waiting.
    """

    def __init__(self, server: OpenPIServer, socket: ServerConnection, dialect: Dialect, *, keep_open: bool) -> None:
        self._server, self._socket, self._dialect, self._keep_open = server, socket, dialect, keep_open
        self._own_key = server.table.private_key()
        self._current: ServedSession | None = None
        self._codec: Codec = "openpi"
        self._items: deque[Item] = deque()
        self._arrived, self._space = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[Any] | None = None
        self._ended = False
        self._answered = 0
        self._previous_total_ms: float | None = None
        self.interleaves = False
        self.cleaned = asyncio.Event()
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """The owner's phase has changed."""
        self._woken.set()

    def give_up(self) -> None:
        """Cancel what runs or waits."""
        for item in self._items:
            if item.ticket is not None:
                item.ticket.cancel(Cancelled("the connection ended"))

    def policy_hangs(self, why: str) -> None:
        """Said again and again while it does. What waits is told at once, what waits on after that at the next time."""
        if not self._items or self._task is None:
            return
        item = self._items[0]
        if item.ticket is not None:
            item.ticket.cancel(_hangs(why))  # too late for what runs, unless it still asks
        if item.warned and not item.hung and not item.answered:
            item.hung = True
            self._task.cancel()
        item.warned = True

    async def end(self, code: int, reason: str) -> None:
        with contextlib.suppress(ConnectionClosed, OSError):
            await self._socket.close(code, reason)

    async def yields(self, within_s: float) -> bool:
        """Whether the client is gone: somebody else wants one of its sessions. Waits until they are free."""
        if self._socket.state is State.OPEN:
            try:
                await asyncio.wait_for(await self._socket.ping(), within_s)
                return False
            except TimeoutError:
                self._server.log("warning", f"{self._peer} does not answer; its sessions go to another connection")
                self._socket.transport.abort()
            except ConnectionClosed:
                pass
        await self.cleaned.wait()
        return True

    @property
    def _peer(self) -> str:
        address = self._socket.remote_address
        return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address)

    # -- life ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """From the metadata to the end of the connection."""
        self._task = asyncio.current_task()
        closed = asyncio.ensure_future(self._socket.wait_closed())
        closed.add_done_callback(lambda _: self._lost())
        reading: asyncio.Task[None] | None = None
        try:
            if not await self._greet():
                return
            self._server.log("info", f"{self._peer} connected, dialect {self._dialect.name}")
            reading = asyncio.create_task(self._read())
            while (item := await self._next()) is not None:
                try:
                    if not await self._answer(item):
                        break
                finally:
                    self._items.popleft()
                    self._space.set()
        except (ConnectionClosed, OSError):
            pass
        finally:
            self._ended = True
            if reading is not None:
                reading.cancel()
            closed.cancel()
            try:
                await self._clean_up()
            finally:
                self.cleaned.set()

    async def _greet(self) -> bool:
        """Send the metadata once the policy is ready."""
        owner = self._server.owner
        while not self._server.ready.is_set():
            if owner.status.phase in (Phase.FAILED, Phase.STOPPED):
                await self.end(FATAL, "the policy could not be started; the server's log says why")
                return False
            if self._ended:
                return False
            self._woken.clear()
            await self._woken.wait()
        spec = owner.status.spec
        assert spec is not None
        try:
            check_fit(self._dialect, spec)  # not known at the upgrade, while the policy was loading
        except WamError as error:
            self._server.log("error", f"{self._peer}: {error}")
            await self.end(FATAL, "this policy cannot speak this dialect; the server's log says why")
            return False
        await self._socket.send(pack(metadata(self._dialect, spec, self._server.config.announced_limits())))
        return True

    def _lost(self) -> None:
        self._ended = True
        self.give_up()
        for event in (self._arrived, self._woken, self._space):
            event.set()

    async def _read(self) -> None:
        reader = self._server.reader
        assert reader is not None
        try:
            async for frame in self._socket:
                received_s = time.monotonic()
                if len(frame) >= LARGE_BYTES and self._server.config.wire.resize != "refuse":
                    content = await asyncio.to_thread(self._content, reader, frame)
                else:
                    content = self._content(reader, frame)
                item = Item(content, received_s)
                del frame, content
                self._supersede(item)
                self._items.append(item)
                self._arrived.set()
                while len(self._items) >= self._server.config.pipelined and not self._ended:
                    self._space.clear()
                    await self._space.wait()
        except (ConnectionClosed, OSError):
            pass
        finally:
            self._lost()

    def _content(self, reader: RequestReader, frame: bytes | str) -> InferRequest | ResetRequest | WamError:
        try:
            return reader.read(frame, self._codec)
        except WamError as error:
            return bare(error)
        except Exception as error:  # a bug in the checks must not end the server
            self._server.log("error", f"{self._peer}: reading a request raised {type(error).__name__}: {error}")
            return ObservationError("the request cannot be read", field="message")

    def _supersede(self, new: Item) -> None:
        if not isinstance(new.content, InferRequest) or not new.content.newest_wins:
            return
        for old in self._items:
            if isinstance(old.content, InferRequest) and old.content.session_id == new.content.session_id:
                old.superseded = True
                if old.ticket is not None:
                    old.ticket.cancel(Superseded("a newer observation took this one's place"))

    async def _next(self) -> Item | None:
        while not self._items:
            if self._ended:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        return None if self._ended else self._items[0]

    async def _clean_up(self) -> None:
        """Free what nobody can come back to; leave the rest to wait for its client."""
        mine = self._server.table.of(self)
        protocol = self._socket.protocol
        bye = (
            protocol.close_rcvd is not None
            and protocol.close_rcvd_then_sent
            and protocol.close_rcvd.code in (1000, 1001)
        )
        self._server.table.forget_loss(self._own_key)
        over = [s for s in mine if bye or s.private or not s.steps or not self._server.config.resume_s]
        self._server.table.leave(s for s in mine if s not in over)
        await self._server.free(over, "client left" if bye else "connection lost")

    # -- requests -----------------------------------------------------------------------------------------------------

    async def _answer(self, item: Item) -> bool:
        """Answer one request. False when the connection is over."""
        content = item.content
        endpoint = "reset" if isinstance(content, ResetRequest) else "infer"
        outcome, alive = "ok", True
        try:
            try:
                if isinstance(content, InferRequest):
                    await self._infer(item, content)
                elif isinstance(content, ResetRequest):
                    await self._reset(content)
                else:
                    raise content
            except asyncio.CancelledError:
                if not item.hung or self._task is None:
                    raise
                self._task.uncancel()
                raise self._left_in_hang(item) from None
        except (ConnectionClosed, OSError):
            raise
        except Exception as error:
            if not isinstance(error, WamError):  # a bug here is an error for its client, and for nobody else
                self._server.log("error", f"{self._peer}: answering raised\n{traceback.format_exc()}")
                error = EngineError("the server failed to answer", got=type(error).__name__)
            outcome, item.answered = type(error).__name__, True
            alive = not self._ended and await self._refuse(error)
            # Its frames hold the request, and through the request's ticket the error itself: megabytes in a cycle.
            error.with_traceback(None)
        self._server.metrics.requests.labels(self._dialect.name, endpoint, outcome).inc()
        self._previous_total_ms = (time.monotonic() - item.received_s) * 1e3
        return alive

    def _left_in_hang(self, item: Item) -> WamError:
        """What to say of a request that the policy may be working on for ever. Nobody knows what becomes of its
        session, so that ends; its memory is given up when the policy goes on."""
        why = self._server.owner.hang or "a call has been running for too long"
        session, ticket = self._current, item.ticket
        if session is None or ticket is None or ticket.started_s is None or ticket.ended_s is not None:
            return _hangs(why)
        self._server.free_later([session], "hung", lost="its call did not end")
        self._server.table.forget_loss(session.key)  # its client is told now
        return EngineError(
            "the policy does not answer; this session is lost",
            got=why,
            remedy="begin a new session; if the server does not become ready again, restart it",
        )

    async def _refuse(self, error: WamError) -> bool:
        """One text frame, which no client takes for actions, then the end of the connection."""
        reference = secrets.token_hex(4)
        level = "error" if isinstance(error, EngineError) and not isinstance(error, Cancelled) else "warning"
        text = " ".join(str(error).split())[:MAX_ERROR_CHARS]
        self._server.log(level, f"[{reference}] {self._peer} ({self._dialect.name}): refused: {text}")
        await self._socket.send(f"{type(error).__name__}: {text} [log reference {reference}]")
        # A client that has asked for newest_wins knows what this reply means.
        if self._keep_open or isinstance(error, Superseded):
            return True
        await self._socket.close(FATAL, "the text frame before says why")
        return False

    async def _reset(self, request: ResetRequest) -> None:
        table = self._server.table
        if request.every:
            sessions = table.of(self)
        elif request.session_ids is None:
            sessions = [s for s in table.of(self) if s is self._current]
        else:
            found = [table.get(name) for name in request.session_ids]
            sessions = [s for s in found if s is not None]
            for session in sessions:
                if session.holder not in (None, self) and not await session.holder.yields(
                    self._server.config.takeover_ping_s
                ):
                    raise SessionError(
                        f"session {session.key!r} is in use by another connection",
                        remedy="reset only your own sessions",
                    )
            for name in request.session_ids:
                table.forget_loss(name)
        if request.session_ids is None and self._current is not None:
            table.forget_loss(self._current.key)
        await self._server.free(list(dict.fromkeys(sessions)), "reset")
        await self._socket.send(RESET_ACK)

    async def _infer(self, item: Item, request: InferRequest) -> None:
        if item.superseded:
            raise Superseded("a newer observation took this one's place")
        self._codec = request.codec
        spec = self._server.owner.status.spec
        assert spec is not None
        check_meaning(self._dialect, spec, request, self._server.config)
        session = await self._session(request)
        check_continuity(session, request)
        session.busy += 1
        try:
            try:
                answered = await self._step(item, session, request)
            except Overloaded:
                # The policy's own memory may be full before the table is.
                if session.handle is not None or not await self._server.reclaim():
                    raise
                answered = await self._step(item, session, request)
        except SessionError:
            self._server.table.forget_loss(session.key)  # its client is told now
            raise
        except PolicyUnavailable:  # no session outlives it; its client is told now, and may begin anew
            await self._server.free([session], "policy lost")
            raise
        finally:
            session.busy -= 1
            if session.handle is None:  # its first step failed: as if it had never been
                self._server.table.remove(session)
        session.steps += 1
        session.cameras = request.cameras
        session.used_s = time.monotonic()
        self._report(item, session, answered)
        message = answered.message
        if self._dialect.timings:
            assert item.ticket is not None
            message = with_timings(
                answered,
                item.ticket,
                seq=self._answered,
                session_step=session.steps - 1,
                previous_total_ms=self._previous_total_ms,
                extras=self._dialect.extras,
            )
        item.answered = True
        await self._socket.send(pack(message, request.codec))
        self._answered += 1
        self._server.metrics.answer_s.observe(time.monotonic() - item.received_s)

    async def _step(self, item: Item, session: ServedSession, request: InferRequest) -> Answered:
        owner, loop = self._server.owner, asyncio.get_running_loop()
        limits = [s for s in (request.deadline_s, self._server.config.deadline_s) if s]
        deadline_s = item.received_s + min(limits) if limits else None
        ticket = item.ticket = owner.submit(
            job(self._dialect, session, request), lane=self, deadline_s=deadline_s, about=lambda: session.handle
        )
        if self._ended:  # while the session was sought
            self.give_up()
        # The policy's thread sees to its own deadlines between evaluations; this one is for a step that still waits.
        timer = None
        if deadline_s is not None:
            late = DeadlineExceeded("the deadline of this call has passed", got=f"{min(limits) * 1e3:.0f} ms")
            timer = loop.call_later(max(0.0, deadline_s - time.monotonic()), ticket.cancel, late)
        try:
            return await asyncio.wrap_future(ticket.future)
        finally:
            if timer is not None:
                timer.cancel()

    async def _session(self, request: InferRequest) -> ServedSession:
        """The session of a request, taken over from a dead connection or given room if need be."""
        server, table = self._server, self._server.table
        private = request.session_id is None
        key = self._own_key if request.session_id is None else request.session_id
        while True:
            try:
                session = table.take(key, self, private=private)
                break
            except SessionError:
                other = table.get(key)
                if other is None or not await other.holder.yields(server.config.takeover_ping_s):
                    raise
            except Overloaded:
                if not await server.reclaim():
                    raise
        if session is not self._current:
            if session.steps:
                self.interleaves = self.interleaves or self._current is not None
                server.log("info", f"{self._peer} goes on with session {key!r} after {session.steps} steps")
            self._current = session
        return session

    def _report(self, item: Item, session: ServedSession, answered: Answered) -> None:
        metrics, ticket, chunk = self._server.metrics, item.ticket, answered.chunk
        assert ticket is not None and ticket.started_s is not None
        metrics.infer_s.observe(answered.infer_s - ticket.interrupted_s)
        metrics.queue_s.observe(ticket.started_s - ticket.submitted_s)
        if chunk.reset is not None and chunk.step:
            self._server.log(
                "info", f"session {session.key!r}: history reset at step {chunk.step}: {chunk.reset.value}"
            )


def _hangs(why: str) -> WamError:
    return NotReady(
        "the policy does not answer; nothing was changed",
        got=why,
        remedy="try again when the server is ready; if it does not become ready again, restart it",
    )
