"""One client: its requests in order, its sessions, its errors. Reading goes on while a step runs, so that a lost client
or a newer observation is noticed at once."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed
from websockets.protocol import State

from wam_policy_ros.contract.errors import (
    Cancelled,
    EngineError,
    ObservationError,
    Overloaded,
    SessionError,
    Superseded,
    WamError,
)
from wam_policy_ros.contract.interface import ActionChunk, Policy
from wam_policy_ros.contract.policy_thread import AskCancelled, Phase, Ticket

from .codec import Codec, pack
from .dialects import RESET_ACK, Dialect, check_fit, metadata, reply
from .sessions import ServedSession
from .wire import InferRequest, ResetRequest

if TYPE_CHECKING:
    from .server import OpenPIServer

MAX_ERROR_CHARS = 4000
FATAL = 1011


@dataclass(eq=False)
class Item:
    """A request that has arrived and is not answered. ``content`` is an error when it could not be read."""

    content: InferRequest | ResetRequest | WamError
    received_s: float
    ticket: Ticket[Any] | None = None
    superseded: bool = False


@dataclass
class Answered:
    """What a step gives: the message to send and how long the policy took."""

    chunk: ActionChunk
    message: Any
    infer_s: float = field(default=0.0)


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
        self._seen: set[str] = set()
        self._codec: Codec = "openpi"
        self._items: deque[Item] = deque()
        self._arrived, self._space = asyncio.Event(), asyncio.Event()
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
                item = Item(ObservationError("unread", field="message"), time.monotonic())
                try:
                    item.content = reader.read(frame, self._codec)
                except WamError as error:
                    item.content = error.with_traceback(None)
                except Exception as error:  # a bug in the checks must not end the server
                    self._server.log("error", f"{self._peer}: reading a request raised {type(error).__name__}: {error}")
                    item.content = ObservationError("the request cannot be read", field="message")
                del frame
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
            if isinstance(content, WamError):
                raise content
            if isinstance(content, ResetRequest):
                await self._reset(content)
            else:
                await self._infer(item, content)
        except (ConnectionClosed, OSError):
            raise
        except Exception as error:
            if not isinstance(error, WamError):  # a bug here is an error for its client, and for nobody else
                self._server.log("error", f"{self._peer}: answering raised\n{traceback.format_exc()}")
                error = EngineError("the server failed to answer", got=type(error).__name__)
            outcome = type(error).__name__
            alive = not self._ended and await self._refuse(error)
        self._server.metrics.requests.labels(self._dialect.name, endpoint, outcome).inc()
        self._previous_total_ms = (time.monotonic() - item.received_s) * 1e3
        return alive

    async def _refuse(self, error: WamError) -> bool:
        """One text frame, which no client takes for actions, then the end of the connection."""
        reference = secrets.token_hex(4)
        level = "error" if isinstance(error, EngineError) and not isinstance(error, Cancelled) else "warning"
        self._server.log(level, f"[{reference}] {self._peer} ({self._dialect.name}): refused: {error}")
        text = " ".join(str(error).split())[:MAX_ERROR_CHARS]
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
        await self._server.free(list(dict.fromkeys(sessions)), "reset")
        await self._socket.send(RESET_ACK)

    async def _infer(self, item: Item, request: InferRequest) -> None:
        if item.superseded:
            raise Superseded("a newer observation took this one's place")
        self._codec = request.codec
        session = await self._session(request)
        self._check_continuity(session, request)
        session.busy += 1
        try:
            try:
                answered = await self._step(item, session, request)
            except Overloaded:
                # The policy's own memory may be full before the table is.
                if session.handle is not None or not await self._server.reclaim():
                    raise
                answered = await self._step(item, session, request)
        finally:
            session.busy -= 1
            if session.handle is None:  # its first step failed: as if it had never been
                self._server.table.remove(session)
        session.steps += 1
        session.cameras = request.cameras
        session.used_s = time.monotonic()
        self._report(item, session, answered)
        await self._socket.send(pack(self._finished(item, session, answered), request.codec))
        self._answered += 1
        self._server.metrics.answer_s.observe(time.monotonic() - item.received_s)

    async def _step(self, item: Item, session: ServedSession, request: InferRequest) -> Answered:
        item.ticket = self._submit(item, session, request)
        if self._ended:  # while the session was sought
            self.give_up()
        return await asyncio.wrap_future(item.ticket.future)

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
            self.interleaves = self.interleaves or key in self._seen
            self._seen.add(key)
            if session.steps:
                server.log("info", f"{self._peer} goes on with session {key!r} after {session.steps} steps")
            self._current = session
        return session

    @staticmethod
    def _check_continuity(session: ServedSession, request: InferRequest) -> None:
        if session.cameras is not None and session.cameras != request.cameras:
            raise ObservationError(
                "the cameras are not those of the session's first request",
                field=next(iter(set(session.cameras) - set(request.cameras) - {""}), "observation"),
                got=[c for c in request.cameras if c],
                expected=[c for c in session.cameras if c],
                remedy="an episode keeps its cameras; send reset before changing them",
            )
        if session.steps and request.seed is not None and request.seed != session.seed:
            raise ObservationError(
                "the seed is not that of the session", field="seed", got=request.seed, expected=session.seed,
                remedy="give the seed with the first request, or reset",
            )  # fmt: skip

    def _submit(self, item: Item, session: ServedSession, request: InferRequest) -> Ticket[Answered]:
        dialect, server = self._dialect, self._server
        limits = [s for s in (request.deadline_s, server.config.deadline_s) if s]

        def work(policy: Policy, cancelled: AskCancelled) -> Answered:
            start = time.monotonic()
            handle = session.handle
            if handle is None:
                name = None if session.private else session.key
                handle = policy.open(name, seed=request.seed)
            try:
                chunk = policy.infer(handle, request.observation, cancelled=cancelled)
                # Here, so that rows that may not be sent count as a failure of the policy.
                message = reply(dialect, chunk.actions, policy.spec, policy_timing={}, server_timing={})
            except BaseException:
                if session.handle is None:
                    policy.close(handle)
                raise
            if session.handle is None:
                session.handle, session.seed = handle, request.seed
            return Answered(chunk, message, time.monotonic() - start)

        return server.owner.submit(
            work, lane=self, deadline_s=item.received_s + min(limits) if limits else None, newest_wins=False
        )

    def _report(self, item: Item, session: ServedSession, answered: Answered) -> None:
        metrics, ticket, chunk = self._server.metrics, item.ticket, answered.chunk
        assert ticket is not None and ticket.started_s is not None
        metrics.infer_s.observe(answered.infer_s)
        metrics.queue_s.observe(ticket.started_s - ticket.submitted_s)
        if chunk.reset is not None and chunk.step:
            self._server.log(
                "info", f"session {session.key!r}: history reset at step {chunk.step}: {chunk.reset.value}"
            )

    def _finished(self, item: Item, session: ServedSession, answered: Answered) -> Any:
        """The message with its timings: numbers only, in the order that clients read them."""
        if not self._dialect.timings:
            return answered.message
        ticket, chunk = item.ticket, answered.chunk
        assert ticket is not None and ticket.started_s is not None
        server_timing = {"infer_ms": answered.infer_s * 1e3}
        if self._previous_total_ms is not None:
            server_timing["prev_total_ms"] = self._previous_total_ms
        server_timing |= {
            "queue_ms": (ticket.started_s - ticket.submitted_s) * 1e3,
            "seq": float(self._answered),
            "session_step": float(session.steps - 1),
            "history_reset": float(chunk.reset is not None),
        }
        stages = {f"{name}_ms": seconds * 1e3 for name, seconds in chunk.timings_s.items() if name != "total"}
        total = chunk.timings_s.get("total", answered.infer_s)
        return answered.message | {
            "policy_timing": {"infer_ms": total * 1e3} | stages,
            "server_timing": server_timing,
        }
