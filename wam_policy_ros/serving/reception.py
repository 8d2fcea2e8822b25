"""Before a connection: probes over HTTP, the key, and which dialect a path means."""

from __future__ import annotations

import dataclasses
import hmac
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, parse_qs, urlsplit

from websockets.asyncio.server import ServerConnection
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from wam_policy_ros.contract.errors import ConfigError, MissingDependency
from wam_policy_ros.contract.policy_thread import Phase

from .dialects import DIALECTS, Dialect, check_fit, contract, get_dialect

if TYPE_CHECKING:
    from .server import OpenPIServer

try:
    from .metrics import CONTENT_TYPE
except ModuleNotFoundError as error:
    raise MissingDependency(str(error.name), "serve", "the OpenPI server") from error


class Reception:
    """Answers what is no WebSocket handshake and decides about those that are. Runs in the server's event loop."""

    def __init__(self, server: OpenPIServer) -> None:
        self._server, self._config = server, server.config

    def route(self, default: Dialect, target: str) -> tuple[Dialect, bool]:
        """Dialect of a request target, and whether its client asks for ``errors=keep_open``.

        Raises:
            ConfigError: no such path or dialect.
        """
        parts = _split(target)
        query = {k: v[-1] for k, v in parse_qs(parts.query).items()}
        path, paths = parts.path.rstrip("/") or "/", self._config.paths
        if (asked := query.get("dialect")) is not None:
            dialect = get_dialect(asked)
        elif path in paths:
            dialect = get_dialect(paths[path])
        elif path == "/":
            dialect = default
        elif path[1:].replace("-", "_") in DIALECTS:
            dialect = get_dialect(path[1:])
        else:
            raise ConfigError(
                "no such path", got=path[:80], expected=["/", *paths, *(f"/{n}" for n in sorted(DIALECTS))]
            )
        return dialect, query.get("errors") == "keep_open"

    def answer(self, default: Dialect, socket: ServerConnection, request: Request) -> Response | None:
        """The HTTP response to a request; None: the WebSocket handshake goes on."""
        server, path = self._server, request.path.partition("?")[0]
        if path == "/healthz":
            return _http(200, "OK\n")
        if path == "/readyz":
            trouble = server.trouble()
            if trouble is not None:
                return _http(503, f"not ready: {trouble}\n")
            left = server.owner.capacity()
            return _http(200, f"ready: {left}\n" if left else "ready\n")
        if path == "/metrics":
            return _http(200, server.metrics.text(), CONTENT_TYPE)
        if not self._authorized(request.headers.get_all("Authorization")):
            return self._turn_away(socket, 401, "unauthorized", "an API key is needed: Authorization: Api-Key <key>")
        if path == "/info":
            return _http(200, json.dumps(self.info(), indent=1) + "\n", "application/json")
        if not any(value.lower() == "websocket" for value in request.headers.get_all("Upgrade")):
            return None  # the library answers 426
        if server.stopping or server.owner.status.phase in (Phase.FAILED, Phase.STOPPED):
            return self._turn_away(socket, 503, "not ready", str(server.trouble()))
        if len(server.connections) >= self._config.max_connections:
            return self._turn_away(socket, 503, "full", f"{self._config.max_connections} connections are open")
        try:
            dialect, _ = self.route(default, request.path)
            if (spec := server.owner.status.spec) is not None:
                check_fit(dialect, spec)
        except ConfigError as error:
            return self._turn_away(socket, 404, "dialect", str(error))
        return None

    def info(self) -> dict[str, Any]:
        """The contract and the state, for people and for dialects that have no room for it."""
        server = self._server
        spec, status = server.owner.status.spec, server.owner.status
        return {
            "phase": status.phase.value,
            "message": status.message,
            "progress": status.fraction,
            "ready": server.trouble() is None,
            "dialects": {"/": self._config.dialect, **self._config.paths, **{f"/{n}": n for n in DIALECTS}},
            "sessions": len(server.table),
            "replicas": [dataclasses.asdict(place) for place in server.owner.places],
            "contract": None if spec is None else contract(spec, self._config.announced_limits()),
        }

    def _authorized(self, given: list[str]) -> bool:
        if not self._config.api_key:
            return True
        scheme, _, key = (given[0] if len(given) == 1 else "").partition(" ")
        # As it was sent: the library reads bytes beyond ASCII as ISO 8859-1, older versions as surrogates.
        sent = key.strip().encode("iso-8859-1", "surrogateescape")
        right = hmac.compare_digest(sent, self._config.api_key.encode())
        return right and scheme.lower() in ("api-key", "bearer")

    def _turn_away(self, socket: ServerConnection, status: int, reason: str, text: str) -> Response:
        self._server.metrics.handshakes.labels(reason).inc()
        self._server.log("warning", f"refused the connection of {socket.remote_address}: {status} {text}")
        return _http(status, f"{text}\n")


def _split(target: str) -> SplitResult:
    try:
        return urlsplit(target)
    except ValueError as error:
        raise ConfigError("the path is malformed", got=repr(target)[:80]) from error


def _http(status: int, body: str | bytes, content_type: str = "text/plain; charset=utf-8") -> Response:
    raw = body.encode("utf-8", "backslashreplace") if isinstance(body, str) else body
    reasons = {200: "OK", 401: "Unauthorized", 404: "Not Found", 503: "Service Unavailable"}
    headers = Headers([("Content-Type", content_type), ("Content-Length", str(len(raw))), ("Connection", "close")])
    return Response(status, reasons[status], headers, raw)
