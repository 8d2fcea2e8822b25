"""Peers that mean harm: raw sockets, floods, and text that would like to be a line of the log."""

from __future__ import annotations

import base64
import gc
import os
import socket
import struct
import time

import pytest

from wam_policy_ros.contract.errors import WamError
from wam_policy_ros.serving import guard
from wam_policy_ros.serving.codec import pack
from wam_policy_ros.serving.log import LINES, WINDOW_S, ServerLog
from wam_policy_ros.serving.wire import InferRequest

from .harness import Client, Served, request, served, wait_for

PING, TEXT, BINARY, CONTINUATION = 9, 1, 2, 0


def raw(one: Served, path: bytes = b"/", extra: bytes = b"") -> socket.socket:
    """A handshake by hand."""
    peer = socket.create_connection(("127.0.0.1", one.server.port), 5)
    key = base64.b64encode(os.urandom(16))
    peer.sendall(
        b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: " + key + b"\r\nSec-WebSocket-Version: 13\r\n" + extra + b"\r\n"
    )  # fmt: skip
    return peer


def greeted(one: Served) -> socket.socket:
    """The same, its answer and the metadata read."""
    peer, got = raw(one), b""
    while b"joint_position" not in got:
        chunk = peer.recv(1 << 16)
        assert chunk
        got += chunk
    return peer


def frame(opcode: int, payload: bytes, *, fin: bool = True, length: int | None = None) -> bytes:
    n = len(payload) if length is None else length
    size = (
        bytes([0x80 | n])
        if n < 126
        else b"\xfe" + struct.pack(">H", n)
        if n < 2**16
        else b"\xff" + struct.pack(">Q", n)
    )
    return bytes([0x80 * fin | opcode]) + size + b"\0\0\0\0" + payload


def end_of(peer: socket.socket, flood: bytes = b"", seconds: float = 5.0) -> bytes:
    """What the peer reads until the server hangs up."""
    peer.settimeout(0.05)
    end, got = time.monotonic() + seconds, b""
    while time.monotonic() < end:
        try:
            if flood:
                peer.sendall(flood)
            if not (chunk := peer.recv(1 << 16)):
                return got
            got += chunk
        except TimeoutError:
            pass
        except OSError:
            return got
    raise AssertionError("the server did not hang up")


@pytest.mark.parametrize(
    ("first", "flood"),
    [
        (b"", frame(PING, b"") * 400),
        (b"", frame(PING, b"p" * 125) * 400),
        (frame(BINARY, b"", fin=False), frame(CONTINUATION, b"", fin=False) * 400),
    ],
    ids=["pings", "long pings", "fragments"],
)
def test_a_flood_of_tiny_frames_ends_its_own_connection_only(first: bytes, flood: bytes) -> None:
    with served() as one, Client(one) as client:
        peer = greeted(one)
        peer.sendall(first)
        end_of(peer, flood)
        assert any("flood" in line for line in one.lines)
        assert len(client.ask(request(0))) == 24
        wait_for(lambda: len(one.server.connections) == 1)
        peer.close()


def test_keepalives_and_messages_in_fragments_are_no_flood() -> None:
    with served(pipelined=1) as one, Client(one) as client:
        for _ in range(100):
            client.socket.ping()
        big = request(0, frames=16)
        data = pack(big)
        for _ in range(3):
            client.socket.send(data[i : i + 1500] for i in range(0, len(data), 1500))
            assert not isinstance(client.receive(), str)


def test_answers_that_nobody_reads_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MAX_UNREAD_BYTES", 2**16)
    monkeypatch.setattr(guard, "BURST", 1e9)
    with served() as one, Client(one) as client:
        peer = greeted(one)
        peer.settimeout(5)
        with pytest.raises(OSError):
            while True:
                peer.sendall(frame(PING, b"p" * 125) * 100)
        wait_for(lambda: any("does not read" in line for line in one.lines))
        assert len(client.ask(request(0))) == 24
        peer.close()


def test_sockets_without_a_handshake_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wam_policy_ros.serving.server.SPARE_SOCKETS", 3)
    with served(max_connections=2) as one, Client(one) as client:
        slow = [socket.create_connection(("127.0.0.1", one.server.port), 5) for _ in range(8)]
        for peer in slow:
            peer.sendall(b"GET / HTTP/1.1\r\n")
        wait_for(lambda: sum("5 sockets are open" in line for line in one.lines) >= 4)
        assert len(client.ask(request(0))) == 24
        with Client(one) as late:  # slow handshakes keep nobody out
            assert len(late.ask(request(0, "late"))) == 24
        for peer in slow:
            peer.close()
        wait_for(lambda: len(one.server._sockets.open) == 1)
        assert one.http("/healthz")[0] == 200


def test_stopping_does_not_wait_for_peers_that_do_not_answer() -> None:
    with served(grace_s=0.3) as one, Client(one):
        peers = [greeted(one), greeted(one), socket.create_connection(("127.0.0.1", one.server.port), 5)]
        peers[1].sendall(frame(3, b""))  # the server has said goodbye already and waits for an answer
        assert struct.pack(">H", 1002) in peers[1].recv(1 << 16)
        start_s = time.monotonic()
        assert one.server.stop(5) and time.monotonic() - start_s < 1.5
        for peer in peers:
            peer.close()


@pytest.mark.parametrize("path", [b"/\xff", b"/?dialect=\xff%0a", b"//[", b"/%00%0d%0aX: 1", b"*"])
def test_odd_paths_and_keys_are_turned_away(path: bytes) -> None:
    with served(api_key="k\u00e9y") as one:
        got = end_of(raw(one, path, b"Authorization: Api-Key \xff\xfe\r\n"))
        assert got == b"" or got.startswith(b"HTTP/1.1 4"), got
        right = "k\u00e9y".encode()
        peer = raw(one, b"/", b"Authorization: Api-Key " + right + b"\r\n")
        assert peer.recv(12) == b"HTTP/1.1 101"
        peer.close()
        assert not [line for line in one.lines if line.startswith("error")]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(3, b"x"), 1002),
        (frame(PING, b"x" * 126), 1002),
        (frame(PING, b"x", fin=False), 1002),
        (frame(CONTINUATION, b"x"), 1002),
        (b"\xf2\x81\0\0\0\0x", 1002),
        (b"\x82\x01x", 1002),
        (frame(BINARY, b"", length=2**62), 1009),
        (frame(BINARY, b"", length=2**63), 1009),
        (frame(TEXT, b"\xff\xfe"), 1007),
        (frame(TEXT, b"hello"), 1011),
        (frame(BINARY, b""), 1011),
    ],
)
def test_frames_that_are_none_close_the_connection(data: bytes, code: int) -> None:
    with served() as one, Client(one) as client:
        peer = greeted(one)
        peer.sendall(data)
        got = b""
        while struct.pack(">H", code) not in got:
            chunk = peer.recv(1 << 16)
            assert chunk, got
            got += chunk
        peer.sendall(frame(8, struct.pack(">H", code)))
        end_of(peer)
        assert len(client.ask(request(0))) == 24
        peer.close()


def test_what_was_refused_is_gone_at_once() -> None:
    """Not when the collector comes by: a refused message has tens of megabytes."""
    with served(errors="keep_open") as one, Client(one) as client:
        client.ask(request(0))
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for bad in (pack(request(1)) + b"\0" * 1000, pack(request(1, prompt=[])), pack(request(1))[:-5], b"\xc1"):
                assert "Error" in client.ask(bad)
            one.policy.error = RuntimeError("broken")
            assert "EngineError" in client.ask(request(2))
            one.policy.error = None
            client.ask(request(3))
            gc.collect()
            kept = [o for o in gc.garbage if isinstance(o, WamError | InferRequest)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert not kept


def test_a_clients_text_writes_no_lines_of_its_own_and_not_too_many() -> None:
    now, lines = 0.0, []
    log = ServerLog(lambda level, text: lines.append((level, text)), clock=lambda: now)
    log("warning", "a\nerror b\x1b[2J\udcff c\u00e9")
    log("error", "broken\n  at x\x1b")
    assert lines == [("warning", "a\\nerror b\\x1b[2J\\udcff c\u00e9"), ("error", "broken\n  at x\\x1b")]
    for _ in range(3 * LINES):
        log("info", "connected")
    log("error", "still told")
    assert len(lines) == 2 + LINES - 1 + 1 and lines[-1] == ("error", "still told")
    now = WINDOW_S
    log("info", "connected")
    assert lines[-2:] == [("warning", f"{2 * LINES + 1} lines about clients were left out"), ("info", "connected")]


def test_keys_of_a_request_reach_the_log_as_one_line() -> None:
    with served(errors="keep_open") as one, Client(one) as client:
        client.ask({"observation/exterior_image_0_left\n12:00 error: made up\x1b[31m": {"__ndarray__": True}})
        assert not any("\n" in line or "\x1b" in line for line in one.lines)
