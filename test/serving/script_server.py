"""A policy server that does what a test says, written from the wire format, not from our server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from wam_policy_ros.serving.codec import pack, unpack

GREETING = {
    "image_resolution": [180, 320],
    "needs_wrist_camera": True,
    "n_external_cameras": 2,
    "needs_stereo_camera": False,
    "needs_session_id": True,
    "action_space": "joint_position",
}


def rows(number: float) -> np.ndarray:
    """A chunk that says who answered."""
    return np.full((24, 8), number, np.float32)


class ScriptServer:
    """Greets, then answers each request with ``answer(request, number)``: bytes or text are sent as they are, anything
    else is packed, an exception closes the connection.

    Attributes:
        requests: (number of the connection, unpacked request).
        raw: the same as bytes.
        headers: of each handshake.
    """

    def __init__(
        self,
        answer: Callable[[dict[str, Any], int], Any] = lambda request, number: rows(number),
        *,
        greeting: Any = GREETING,
        port: int = 0,
        process_request: Any = None,
    ) -> None:
        self._answer, self.greeting, self._process = answer, greeting, process_request
        self.requests: list[tuple[int, dict[str, Any]]] = []
        self.raw: list[bytes] = []
        self.headers: list[Any] = []
        self.open: list[ServerConnection] = []
        self._server = serve(
            self._handle, "127.0.0.1", port, max_size=None, process_request=process_request, close_timeout=0.1
        )
        self.port = self._server.socket.getsockname()[1]
        self.uri = f"ws://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def _handle(self, ws: ServerConnection) -> None:
        assert ws.request is not None
        connection = len(self.headers)
        self.headers.append(ws.request.headers)
        self.open.append(ws)
        try:
            greeting = self.greeting() if callable(self.greeting) else self.greeting
            ws.send(greeting if isinstance(greeting, str | bytes) else pack(greeting))
            for message in ws:
                assert isinstance(message, bytes)
                self.raw.append(message)
                request = unpack(message)
                self.requests.append((connection, request))
                reset = request.get("endpoint") == "reset"
                reply = self._answer(request, len(self.requests)) if not reset else self.on_reset(request)
                ws.send(reply if isinstance(reply, str | bytes) else pack(reply))
        except ConnectionClosed:
            pass

    def on_reset(self, request: dict[str, Any]) -> Any:
        return "reset successful"

    def drop(self) -> None:
        """End every connection as a crash would."""
        for ws in self.open:
            ws.close_socket()
        self.open.clear()

    def infers(self) -> list[dict[str, Any]]:
        return [r for _, r in self.requests if r.get("endpoint") != "reset"]

    def resets(self) -> list[str]:
        return [r["session_id"] for _, r in self.requests if r.get("endpoint") == "reset"]

    def __enter__(self) -> ScriptServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.drop()
        self._server.shutdown()
        self._thread.join(5)
