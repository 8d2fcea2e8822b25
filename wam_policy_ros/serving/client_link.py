"""One WebSocket connection to a policy server, with a deadline for everything. One request at a time.

The protocol has no request ids: a reply that was not waited for would be taken for the answer to the next request, and
every later one would be late by one. So a link that was left in the middle of an exchange is closed, never reused.
"""

from __future__ import annotations

import http.client
import json
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI, WebSocketException
from websockets.protocol import State
from websockets.sync.client import ClientConnection, connect

from wam_policy_ros.contract.errors import Cancelled, ConfigError, PolicyUnavailable

SLICE_S = 0.02
"""How often a wait asks whether it was cancelled."""

_FINAL = (400, 401, 403, 404, 405, 410, 426)
_REMEDIES = {
    401: "set server.api_key to the server's key",
    403: "set server.api_key to the server's key",
    404: "check the path of server.uri, e.g. /v1/realtime/robot/openpi",
}

INFO_TIMEOUT_S = 1.0
MAX_INFO_BYTES = 2**20

Cancel = Callable[[], bool]


def never() -> bool:
    """For callers that cannot be cancelled."""
    return False


@dataclass(frozen=True)
class LinkConfig:
    """How to reach a server.

    Attributes:
        uri: ``ws://`` or ``wss://``, with or without a path.
        api_key: sent as ``Authorization: Api-Key``; empty: none is sent.
        open_timeout_s: one attempt to connect, the greeting not included.
        max_reply_bytes: a longer message closes the connection.
    """

    uri: str
    api_key: str = field(default="", repr=False)
    open_timeout_s: float = 3.0
    max_reply_bytes: int = 16 * 2**20

    def __post_init__(self) -> None:
        parts = urlsplit(self.uri)
        try:
            valid = parts.scheme in ("ws", "wss") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid or parts.fragment:
            raise ConfigError("the address of the policy server is not valid", got=self.uri, expected="ws://HOST:PORT")


class Link:
    """An open connection. Raises ``PolicyUnavailable`` for everything that a later attempt may cure.

    Args:
        config: see there.
        deadline_s: ``time.monotonic`` at which the attempt ends.

    Raises:
        PolicyUnavailable: nobody listens, no route, no answer, a temporary refusal.
        ConfigError: the server refuses this client for good: wrong key, wrong path.
    """

    def __init__(self, config: LinkConfig, deadline_s: float) -> None:
        self.uri, self._answers = config.uri, 0
        timeout_s = max(0.05, min(config.open_timeout_s, deadline_s - time.monotonic()))
        headers = {"Authorization": f"Api-Key {config.api_key}"} if config.api_key else None
        try:
            # No proxy: variables for the Web would reroute even loopback (PRO-23). No pings: the published servers do
            # not answer them while they compute; the deadline of each call finds a dead peer.
            opened = connect(
                config.uri,
                additional_headers=headers,
                compression=None,
                proxy=None,
                open_timeout=timeout_s,
                ping_interval=None,
                close_timeout=0.2,
                max_size=config.max_reply_bytes,
            )
            self._end = ExitStack()
            self._ws: ClientConnection = self._end.enter_context(opened)
        except InvalidStatus as error:
            status = error.response.status_code
            what = f"the policy server {self.uri} refuses the connection"
            if status in _FINAL:
                raise ConfigError(what, got=f"HTTP {status}", remedy=_REMEDIES.get(status)) from error
            raise self._unavailable(f"refuses the connection for now (HTTP {status})") from error
        except InvalidURI as error:
            raise ConfigError("the address of the policy server is not valid", got=self.uri) from error
        except (InvalidHandshake, EOFError) as error:
            raise self._unavailable(f"does not answer as a WebSocket server ({error})") from error
        except TimeoutError as error:
            raise self._unavailable(f"does not answer within {timeout_s:.1f} s") from error
        except (OSError, WebSocketException) as error:
            raise self._unavailable(f"cannot be reached ({error})") from error

    def answered(self, number: float | None) -> None:
        """Some servers number their answers on a connection, from 0.

        Raises:
            PolicyUnavailable: the answer is not the next one, so it answers another request. The link is closed.
        """
        expected, self._answers = self._answers, self._answers + 1
        if number is not None and number != expected:
            self.close()
            raise self._unavailable("answers another request", got=f"answer {number:g}, expected {expected}")

    @property
    def open(self) -> bool:
        """False once the connection is known to be gone."""
        return self._ws.protocol.state is State.OPEN

    def send(self, message: bytes, deadline_s: float) -> None:
        """Raises PolicyUnavailable, also when the peer does not read until the deadline."""
        left_s = max(0.01, deadline_s - time.monotonic())
        # The library has no timeout for sending. The kernel's own ends a send that a peer does not read.
        limit = struct.pack("ll", int(left_s), int(left_s % 1 * 1e6))
        self._ws.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            self._ws.send(message)
        except ConnectionClosed as error:
            stuck = isinstance(error.__cause__, BlockingIOError) or time.monotonic() >= deadline_s
            self.close()
            raise self._unavailable("does not read what is sent to it" if stuck else _gone(error)) from error

    def receive(self, deadline_s: float, cancelled: Cancel = never) -> bytes | str:
        """The next message: bytes of a BINARY frame, or the text of a TEXT frame.

        Raises:
            PolicyUnavailable: the connection is gone, or there is no message until the deadline.
            Cancelled: ``cancelled()`` returned True. Whatever is raised, the link is closed.
        """
        start_s = time.monotonic()
        try:
            while True:
                if cancelled():
                    raise Cancelled("the call to the policy server was cancelled")
                left_s = deadline_s - time.monotonic()
                try:
                    return self._ws.recv(timeout=max(0.0, min(left_s, SLICE_S)))
                except TimeoutError:
                    if left_s <= 0:
                        waited = time.monotonic() - start_s
                        raise self._unavailable("does not answer in time", got=f"nothing for {waited:.1f} s") from None
                except ConnectionClosed as error:
                    raise self._unavailable(_gone(error)) from error
        except BaseException:
            self.close()
            raise

    def close(self, *, politely: bool = False) -> None:
        """Idempotent. ``politely``: between two exchanges, with the closing handshake; else without a word."""
        if not politely:
            self._ws.close_socket()
        self._end.close()

    def _unavailable(self, what: str, got: object = None) -> PolicyUnavailable:
        return PolicyUnavailable(
            f"the policy server {self.uri} {what}",
            got=got,
            remedy="check that it runs and that the address is right (server.uri of the node, which tries again)",
        )


def fetch_contract(config: LinkConfig) -> dict[str, Any]:
    """What a server of this package says at ``/info``, for dialects whose greeting has no room for it.

    Returns:
        Its contract; empty for every other server, and when there is no answer at once.
    """
    parts = urlsplit(config.uri)
    kind = http.client.HTTPSConnection if parts.scheme == "wss" else http.client.HTTPConnection
    connection = kind(str(parts.hostname), parts.port, timeout=INFO_TIMEOUT_S)
    headers = {"Authorization": f"Api-Key {config.api_key}"} if config.api_key else {}
    try:
        connection.request("GET", "/info", headers=headers)
        response = connection.getresponse()
        body = response.read(MAX_INFO_BYTES + 1)
        info = json.loads(body) if response.status == 200 and len(body) <= MAX_INFO_BYTES else None
    except (OSError, http.client.HTTPException, ValueError):
        return {}
    finally:
        connection.close()
    contract = info.get("contract") if isinstance(info, dict) else None
    return contract if isinstance(contract, dict) else {}


def _gone(error: ConnectionClosed) -> str:
    if error.rcvd is None:
        return "went away without a word"
    reason = f": {error.rcvd.reason}" if error.rcvd.reason else ""
    return f"closed the connection ({error.rcvd.code}{reason})"
