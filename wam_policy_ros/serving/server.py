"""The OpenPI server: sockets, HTTP probes, start and stop.

It runs an event loop in a thread of its own and never blocks it: inference happens in the thread that owns the policy,
which the node and the server may share.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve

from wam_policy_ros.contract.errors import ConfigError, MissingDependency, NotReady, WamError
from wam_policy_ros.contract.interface import Policy, PolicySpec
from wam_policy_ros.contract.places import place_of
from wam_policy_ros.contract.policy_thread import Phase, PolicyThread

from .config import ServerConfig
from .connection import Connection
from .dialects import Dialect, check_fit, get_dialect
from .guard import SPARE_SOCKETS, GuardedConnection, Sockets
from .log import Log, ServerLog, library_logger
from .reception import Reception
from .sessions import ServedSession, SessionTable
from .wire import RequestReader

try:
    from .metrics import Metrics
except ModuleNotFoundError as error:
    raise MissingDependency(str(error.name), "serve", "the OpenPI server") from error

SWEEP_S = 0.5
YIELD_S = 0.5
"""What the robot's step waits for the event loop to give a session up."""
CLOSE_TIMEOUT_S = 5.0


class OpenPIServer:
    """Serves a policy that somebody else owns.

    Args:
        config: see ``ServerConfig``.
        owner: the policy's thread; started and stopped by the caller, before or after the server. Until its policy is
            ready, connected clients wait for their metadata.
        log: called from the server's thread with a level (``info``, ``warning``, ``error``) and text, one line
            unless a bug shows its traceback.
        gauges: for ``/metrics``, see ``Metrics``.
        reserved: sessions that the policy has memory for and that are not for clients: the robot's.
    """

    def __init__(
        self,
        config: ServerConfig,
        owner: PolicyThread,
        *,
        log: Log,
        gauges: Mapping[str, tuple[str, Callable[[], float]]] = {},
        reserved: int = 0,
    ) -> None:
        self._reserved = reserved
        self.config, self.owner, self.log = config, owner, ServerLog(log)
        self.table = SessionTable(
            max_sessions=config.max_sessions, idle_s=config.session_idle_s, resume_s=config.resume_s
        )
        self.connections: set[Connection] = set()
        self.reception = Reception(self)
        self._sockets = Sockets(
            config.max_connections + SPARE_SOCKETS,
            lambda what: self.log("warning", f"a connection was cut: {what}"),
        )
        self.metrics = Metrics(
            ready=lambda: float(self.trouble() is None),
            connections=lambda: len(self.connections),
            sessions=lambda: len(self.table),
            waiting=lambda: owner.waiting,
            places=lambda: owner.places,
            traffic=lambda: owner.traffic,
            more=gauges,
        )
        self.reader: RequestReader | None = None
        self.addresses: list[tuple[str, int]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._bound = threading.Event()
        self._bind_error: BaseException | None = None
        self._misfit: str | None = None
        self.stopping = False
        self._thread = threading.Thread(target=self._run, name="wam_openpi_server", daemon=True)
        owner.at_need(self._yield_to_robot)

    # -- any thread -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen. Returns once the ports are bound, or at once with ``bind: when_ready``.

        Raises:
            ConfigError: a port cannot be bound, or the policy, already loaded, does not fit the configured dialects.
        """
        self._thread.start()
        if self.config.bind == "early":
            self._bound.wait()
            if self._bind_error is not None:
                self._thread.join()
                raise self._bind_error

    @property
    def port(self) -> int:
        """The main port, once bound."""
        return self.addresses[0][1]

    def trouble(self) -> str | None:
        """Why ``/readyz`` says no; None when it says yes."""
        return "the server is stopping" if self.stopping else self._misfit or self.owner.trouble()

    def stop(self, timeout_s: float = 3.0) -> bool:
        """Cancel steps, close connections with 1001, free sessions. False when that took longer than ``timeout_s``."""
        self.stopping = True
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- the server's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._bind_error = error
            if self._bound.is_set() or self.config.bind != "early":
                self.log("error", f"the OpenPI server ended: {type(error).__name__}: {error}")
        finally:
            self._bound.set()

    async def _main(self) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self._stop, self.ready = asyncio.Event(), asyncio.Event()
        unsubscribe = self.owner.subscribe(lambda: _call(loop, self._phase_changed))
        servers: list[Server] = []
        if self.stopping:
            self._stop.set()
        try:
            self._phase_changed()
            if self.config.bind == "when_ready":
                await _first_of(self.ready.wait(), self._stop.wait())
            if self._stop.is_set():
                return
            if (status := self.owner.status).spec is not None:
                self._check(status.spec)
            servers = await self._listen()
            self._bound.set()
            self._announce()
            watching = [loop.create_task(self._sweep()), loop.create_task(self._look_for_hang())]
            await self._stop.wait()
            for task in watching:
                task.cancel()
        finally:
            unsubscribe()
            await self._close(servers)

    async def _listen(self) -> list[Server]:
        servers: list[Server] = []
        config = self.config
        for port, name in {config.port: config.dialect, **config.ports}.items():
            default = get_dialect(name)
            try:
                server = await serve(
                    functools.partial(self._handle, default),
                    config.host,
                    port,
                    process_request=functools.partial(self.reception.answer, default),
                    create_connection=functools.partial(GuardedConnection, sockets=self._sockets),  # type: ignore[arg-type]
                    compression=None,
                    max_size=config.max_message_bytes,
                    max_queue=2,
                    ping_interval=config.ping_interval_s or None,
                    ping_timeout=config.dead_peer_s or None,
                    close_timeout=CLOSE_TIMEOUT_S,
                    logger=library_logger(self.log),
                )
            except OSError as error:
                await self._close(servers)
                raise ConfigError(
                    "the OpenPI server cannot listen",
                    got=f"{config.host}:{port}: {error.strerror or error}",
                    remedy="choose another port, or stop what uses this one",
                ) from error
            servers.append(server)
            self.addresses += [s.getsockname()[:2] for s in server.sockets]
        return servers

    def _announce(self) -> None:
        where = ", ".join(f"ws://{host}:{port}" for host, port in self.addresses)
        self.log("info", f"server listening on {where}, dialect {self.config.dialect}")
        if self.trouble() is None:
            self.log("info", "Application startup complete")

    def _phase_changed(self) -> None:
        status = self.owner.status
        if status.phase is Phase.READY and not self.ready.is_set() and status.spec is not None:
            self.reader = RequestReader(status.spec, self.config.wire)
            self.metrics.tell(status.spec)
            self._bound_sessions(status.spec)
            self.ready.set()
            try:
                self._check(status.spec)
            except ConfigError as error:
                self._misfit = str(error)
                self.log("error", self._misfit)
            if self.addresses and self.trouble() is None:
                self.log("info", "Application startup complete")
        for connection in list(self.connections):
            connection.wake()

    def _bound_sessions(self, spec: PolicySpec) -> None:
        capacity = spec.details.get("sessions_capacity")
        if isinstance(capacity, int):
            whose = f", {self._reserved} of them the robot's" if self._reserved else ""
            self.table.room = max(0, capacity - self._reserved), f"there is memory for {capacity} session(s){whose}"

    def _check(self, spec: PolicySpec) -> None:
        for name in (self.config.dialect, *self.config.ports.values()):
            check_fit(get_dialect(name), spec)

    async def _close(self, servers: Iterable[Server]) -> None:
        for server in servers:
            server.close(close_connections=False)
        connections = list(self.connections)
        for connection in connections:
            connection.give_up()
        closing = [asyncio.ensure_future(c.end(1001, "the server is stopping")) for c in connections]
        cleaning = [asyncio.ensure_future(c.cleaned.wait()) for c in connections]
        if closing:
            await asyncio.wait([*closing, *cleaning], timeout=self.config.grace_s)
        rest = list(self.table.of(None)) + [s for c in connections for s in self.table.of(c)]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.free(rest, "server stopped"), self.config.grace_s)
        for task in (*closing, *cleaning):
            task.cancel()
        self._sockets.abort()  # of peers that do not answer the goodbye; the loop would wait for them

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            freed = []
            for session, lost in self.table.expired():
                cause = "idle" if lost else "client did not come back"
                self.log("info", f"session {session.key!r} ends: {lost or cause}")
                freed.append(self.free([session], cause, lost=lost))
            for one in freed:  # only now: while one waits, the client of another may come back
                try:
                    await one
                except WamError as error:
                    self._not_freed(error)

    async def _look_for_hang(self) -> None:
        """Beside the sweeper, which waits for the policy."""
        said = False
        while True:
            await asyncio.sleep(SWEEP_S)
            why = self.owner.hang
            if why and not said:
                self.log("error", f"the policy does not answer: {why}; clients are told, and nothing more is begun")
            said = bool(why)
            for connection in list(self.connections) if why else ():
                connection.policy_hangs(why)

    # -- connections --------------------------------------------------------------------------------------------------

    async def _handle(self, default: Dialect, socket_: ServerConnection) -> None:
        _keep_tcp_alive(socket_)
        assert socket_.request is not None
        dialect, keep_open = self.reception.route(default, socket_.request.path)
        connection = Connection(self, socket_, dialect, keep_open=keep_open or self.config.errors == "keep_open")
        self.connections.add(connection)
        try:
            await connection.run()
        finally:
            self.connections.discard(connection)

    # -- sessions -----------------------------------------------------------------------------------------------------

    def free(self, sessions: list[ServedSession], cause: str, *, lost: str | None = None) -> Awaitable[None]:
        """End sessions, at once. Awaiting what is returned lasts until the policy has given up their memory."""
        for session in sessions:
            self.table.remove(session, lost)
            self.metrics.freed.labels(cause).inc()
        held = [session for session in sessions if session.handle is not None]
        closing: list[asyncio.Future[None]] = []
        for session in held:
            with contextlib.suppress(NotReady):  # the policy is gone, and its memory with it
                closing.append(self._close_handle(session, cause))
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not closing:
            for session in held:
                session.handle = None
            done.set_result(None)
            return done
        self.table.freeing += len(closing)
        done = asyncio.ensure_future(_all_of(closing))
        done.add_done_callback(lambda _: self.table.made_room(len(closing)))
        return asyncio.shield(done)

    def free_later(self, sessions: list[ServedSession], cause: str, *, lost: str) -> None:
        """As ``free``, for nobody who waits."""

        def told(done: asyncio.Future[None]) -> None:
            if not done.cancelled():
                self._not_freed(done.exception())

        asyncio.ensure_future(self.free(sessions, cause, lost=lost)).add_done_callback(told)

    def _not_freed(self, error: BaseException | None) -> None:
        if error is not None:
            self.log("error", f"a session that ended was not freed: {error}")

    def _close_handle(self, session: ServedSession, cause: str) -> asyncio.Future[None]:
        """Where the policy has it. Raises NotReady."""

        def close(policy: Policy, cancelled: object) -> None:
            try:
                policy.close(session.handle)
            finally:
                session.handle = None

        lane = ("free", cause, session.key)
        ticket = self.owner.submit(close, lane=lane, upkeep=True, about=lambda: session.handle)
        return asyncio.wrap_future(ticket.future)

    def _yield_to_robot(self, policy: Policy) -> bool:
        """In the policy's thread, in the robot's step, which found no memory: end one session of a client."""
        if self._loop is None:
            return False
        picked: concurrent.futures.Future[ServedSession | None] = concurrent.futures.Future()
        _call(self._loop, lambda: self._pick_for_robot(picked, place_of(policy)))
        try:
            session = picked.result(YIELD_S)
        except TimeoutError:
            if picked.cancel():
                return False
            session = picked.result()
        if session is None or session.handle is None:
            return False
        handle, session.handle = session.handle, None
        policy.close(handle)
        return True

    def _pick_for_robot(self, picked: concurrent.futures.Future[ServedSession | None], place: int | None) -> None:
        if not picked.set_running_or_notify_cancel():
            return
        session = self.table.least_missed(lambda handle: place_of(handle) == place)
        if session is not None:
            reason = "the robot needed its memory"
            self.log("warning", f"session {session.key!r} ends: {reason}")
            self.table.remove(session, reason)
            self.metrics.freed.labels("robot").inc()
        picked.set_result(session)

    async def reclaim(self) -> bool:
        """Make room by ending what a client left behind. False when there is nothing of that kind."""
        session = self.table.reclaimable()
        if session is None:
            return False
        reason = "its client had gone on to other sessions, and room was needed"
        self.log("info", f"session {session.key!r} ends: {reason}")
        await self.free([session], "left behind", lost=reason)
        return True


def _keep_tcp_alive(socket_: ServerConnection) -> None:
    """A peer whose host vanished is noticed by the kernel even where WebSocket pings have no deadline."""
    raw = socket_.transport.get_extra_info("socket")
    if raw is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(function)


async def _all_of(futures: list[asyncio.Future[None]]) -> None:
    """All of them, whatever becomes of each; then the first error."""
    for outcome in await asyncio.gather(*futures, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


async def _first_of(*coroutines: Any) -> None:
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
