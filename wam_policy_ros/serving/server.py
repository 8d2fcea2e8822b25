"""The OpenPI server: sockets, HTTP probes, start and stop.

It runs an event loop in a thread of its own and never blocks it: inference happens in the thread that owns the policy,
which the node and the server may share.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from wam_policy_ros.contract.errors import ConfigError, MissingDependency, NotReady
from wam_policy_ros.contract.interface import Policy, PolicySpec
from wam_policy_ros.contract.policy_thread import Phase, PolicyThread

from .config import ServerConfig
from .connection import Connection
from .dialects import DIALECTS, Dialect, check_fit, contract, get_dialect
from .sessions import ServedSession, SessionTable
from .wire import RequestReader

try:
    from .metrics import CONTENT_TYPE, Metrics
except ModuleNotFoundError as error:
    raise MissingDependency(str(error.name), "serve", "the OpenPI server") from error

Log = Callable[[str, str], None]
SWEEP_S = 0.5
CLOSE_TIMEOUT_S = 5.0


class OpenPIServer:
    """Serves a policy that somebody else owns.

    Args:
        config: see ``ServerConfig``.
        owner: the policy's thread; started and stopped by the caller, before or after the server. Until its policy is
            ready, connected clients wait for their metadata.
        log: called from the server's thread with a level (``info``, ``warning``, ``error``) and text, one line
            unless a bug shows its traceback.
    """

    def __init__(self, config: ServerConfig, owner: PolicyThread, *, log: Log) -> None:
        self.config, self.owner, self.log = config, owner, log
        self.table = SessionTable(
            max_sessions=config.max_sessions, idle_s=config.session_idle_s, resume_s=config.resume_s
        )
        self.connections: set[Connection] = set()
        self.metrics = Metrics(
            ready=lambda: float(self.trouble() is None),
            connections=lambda: len(self.connections),
            sessions=lambda: len(self.table),
            waiting=lambda: owner.waiting,
        )
        self.reader: RequestReader | None = None
        self.addresses: list[tuple[str, int]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._bound = threading.Event()
        self._bind_error: BaseException | None = None
        self._misfit: str | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="wam_openpi_server", daemon=True)

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
        return "the server is stopping" if self._stopping else self._misfit or self.owner.trouble()

    def stop(self, timeout_s: float = 3.0) -> bool:
        """Cancel steps, close connections with 1001, free sessions. False when that took longer than ``timeout_s``."""
        self._stopping = True
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
        if self._stopping:
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
            sweeper = loop.create_task(self._sweep())
            await self._stop.wait()
            sweeper.cancel()
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
                    process_request=functools.partial(self._upgrade, default),
                    compression=None,
                    max_size=config.max_message_bytes,
                    max_queue=2,
                    ping_interval=config.ping_interval_s or None,
                    ping_timeout=config.dead_peer_s or None,
                    close_timeout=CLOSE_TIMEOUT_S,
                    logger=_library_logger(self.log),
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

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            for session, lost in self.table.expired():
                cause = "idle" if lost else "client did not come back"
                self.log("info", f"session {session.key!r} ends: {lost or cause}")
                await self.free([session], cause, lost=lost)

    # -- connections --------------------------------------------------------------------------------------------------

    async def _handle(self, default: Dialect, socket_: ServerConnection) -> None:
        _keep_tcp_alive(socket_)
        assert socket_.request is not None
        dialect, keep_open = self._route(default, socket_.request.path)
        connection = Connection(self, socket_, dialect, keep_open=keep_open or self.config.errors == "keep_open")
        self.connections.add(connection)
        try:
            await connection.run()
        finally:
            self.connections.discard(connection)

    def _route(self, default: Dialect, target: str) -> tuple[Dialect, bool]:
        """Dialect and ``errors=keep_open`` of a request target.

        Raises:
            ConfigError: no such path or dialect.
        """
        parts = _split(target)
        query = {k: v[-1] for k, v in parse_qs(parts.query).items()}
        path = parts.path.rstrip("/") or "/"
        if (asked := query.get("dialect")) is not None:
            dialect = get_dialect(asked)
        elif path in self.config.paths:
            dialect = get_dialect(self.config.paths[path])
        elif path == "/":
            dialect = default
        elif path[1:].replace("-", "_") in DIALECTS:
            dialect = get_dialect(path[1:])
        else:
            raise ConfigError(
                "no such path", got=path[:80], expected=["/", *self.config.paths, *(f"/{n}" for n in sorted(DIALECTS))]
            )
        return dialect, query.get("errors") == "keep_open"

    def _upgrade(self, default: Dialect, socket_: ServerConnection, request: Request) -> Response | None:
        path = request.path.partition("?")[0]
        if path == "/healthz":
            return _http(200, "OK\n")
        if path == "/readyz":
            trouble = self.trouble()
            return _http(200, "ready\n") if trouble is None else _http(503, f"not ready: {trouble}\n")
        if path == "/metrics":
            return _http(200, self.metrics.text(), CONTENT_TYPE)
        if not self._authorized(request.headers.get_all("Authorization")):
            return self._turn_away(socket_, 401, "unauthorized", "an API key is needed: Authorization: Api-Key <key>")
        if path == "/info":
            return _http(200, json.dumps(self.info(), indent=1) + "\n", "application/json")
        if not any(value.lower() == "websocket" for value in request.headers.get_all("Upgrade")):
            return None  # the library answers 426
        if self._stopping or self.owner.status.phase in (Phase.FAILED, Phase.STOPPED):
            return self._turn_away(socket_, 503, "not ready", str(self.trouble()))
        if len(self.connections) >= self.config.max_connections:
            return self._turn_away(socket_, 503, "full", f"{self.config.max_connections} connections are open")
        try:
            dialect, _ = self._route(default, request.path)
            if (spec := self.owner.status.spec) is not None:
                check_fit(dialect, spec)
        except ConfigError as error:
            return self._turn_away(socket_, 404, "dialect", str(error))
        return None

    def _authorized(self, given: list[str]) -> bool:
        if not self.config.api_key:
            return True
        scheme, _, key = (given[0] if len(given) == 1 else "").partition(" ")
        right = hmac.compare_digest(key.strip().encode(), self.config.api_key.encode())
        return right and scheme.lower() in ("api-key", "bearer")

    def _turn_away(self, socket_: ServerConnection, status: int, reason: str, text: str) -> Response:
        self.metrics.handshakes.labels(reason).inc()
        self.log("warning", f"refused the connection of {socket_.remote_address}: {status} {text}")
        return _http(status, f"{text}\n")

    def info(self) -> dict[str, Any]:
        """The contract and the state, for people and for dialects that have no room for it."""
        spec, status = self.owner.status.spec, self.owner.status
        return {
            "phase": status.phase.value,
            "message": status.message,
            "progress": status.fraction,
            "ready": self.trouble() is None,
            "dialects": {"/": self.config.dialect, **self.config.paths, **{f"/{n}": n for n in DIALECTS}},
            "sessions": len(self.table),
            "contract": None if spec is None else contract(spec, self.config.announced_limits()),
        }

    # -- sessions -----------------------------------------------------------------------------------------------------

    async def free(self, sessions: list[ServedSession], cause: str, *, lost: str | None = None) -> None:
        """End sessions and return when the policy has given up their memory."""
        for session in sessions:
            self.table.remove(session, lost)
            self.metrics.freed.labels(cause).inc()
        held = [session for session in sessions if session.handle is not None]
        if not held:
            return

        def close(policy: Policy, cancelled: object) -> None:
            for session in held:
                handle, session.handle = session.handle, None
                policy.close(handle)

        self.table.freeing += len(held)
        try:
            ticket = self.owner.submit(close, lane=("free", cause), upkeep=True)
            await asyncio.shield(asyncio.wrap_future(ticket.future))
        except NotReady:
            for session in held:  # the policy is gone, and its memory with it
                session.handle = None
        finally:
            self.table.freeing -= len(held)

    async def reclaim(self) -> bool:
        """Make room by ending what a client left behind. False when there is nothing of that kind."""
        session = self.table.reclaimable()
        if session is None:
            return False
        reason = "its client had gone on to other sessions, and room was needed"
        self.log("info", f"session {session.key!r} ends: {reason}")
        await self.free([session], "left behind", lost=reason)
        return True


def _split(target: str) -> SplitResult:
    try:
        return urlsplit(target)
    except ValueError as error:
        raise ConfigError("the path is malformed", got=repr(target)[:80]) from error


def _http(status: int, body: str | bytes, content_type: str = "text/plain; charset=utf-8") -> Response:
    raw = body.encode() if isinstance(body, str) else body
    reasons = {200: "OK", 401: "Unauthorized", 404: "Not Found", 503: "Service Unavailable"}
    headers = Headers([("Content-Type", content_type), ("Content-Length", str(len(raw))), ("Connection", "close")])
    return Response(status, reasons[status], headers, raw)


def _keep_tcp_alive(socket_: ServerConnection) -> None:
    """A peer whose host vanished is noticed by the kernel even where WebSocket pings have no deadline."""
    raw = socket_.transport.get_extra_info("socket")
    if raw is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(function)


async def _first_of(*coroutines: Any) -> None:
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


class _OneLine(logging.Handler):
    """The library's own messages: broken handshakes and the like. One line each; tracebacks help nobody there."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        cause = record.exc_info[1] if record.exc_info else None
        while cause is not None and cause.__cause__ is not None:
            cause = cause.__cause__
        text = record.getMessage() + (f": {type(cause).__name__}: {cause}" if cause is not None else "")
        self._log("warning", f"websocket: {text.splitlines()[0][:300]}")


def _library_logger(log: Log) -> logging.Logger:
    logger = logging.Logger("wam_policy_ros.websockets", logging.WARNING)
    logger.addHandler(_OneLine(log))
    return logger
