from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import numpy as np
import pytest

from wam_policy_ros.contract.errors import (
    Cancelled,
    ChunkError,
    ConfigError,
    ContractMismatch,
    InvalidState,
    MissingInput,
    PolicyUnavailable,
    PromptError,
    RemoteError,
    SessionError,
)
from wam_policy_ros.contract.fakes import example_observation, spec_of
from wam_policy_ros.contract.interface import Observation, Policy, ResetReason
from wam_policy_ros.serving.client import ClientConfig, RemotePolicy, connect_policy
from wam_policy_ros.serving.client_link import LinkConfig
from wam_policy_ros.serving.client_wire import timed_as
from wam_policy_ros.serving.codec import pack

from .script_server import GREETING, ScriptServer, rows

SPEC = spec_of("oxe_droid", weights="")
STEP_NS = round(1e9 / 15)


def config(uri: str, **changes: Any) -> ClientConfig:
    link = LinkConfig(uri, api_key=changes.pop("api_key", ""), open_timeout_s=1.0)
    return ClientConfig(**{"link": link, "timeout_s": 2.0, "greeting_s": 2.0, "retry_s": 0.02, **changes})


def connect(uri: str, **changes: Any) -> RemotePolicy:
    return connect_policy(config(uri, **changes), wait_s=2.0)


def look(step: int = 0, frames: int = 1) -> Observation:
    return example_observation(SPEC, frames=frames, seed=step, stamp_ns=10**12 + step * 8 * STEP_NS)


def test_a_session_goes_over_the_wire_as_the_published_client_sends_it() -> None:
    with ScriptServer() as server:
        policy = connect(server.uri)
        assert isinstance(policy, Policy) and policy.spec.cameras == SPEC.cameras
        session = policy.open("episode 1")
        observations = [look(0), look(1, frames=4)]
        chunks = [policy.infer(session, o) for o in observations]
        policy.close(session)
        policy.disconnect()
    first, later = server.infers()
    assert list(first) == [
        "observation/exterior_image_0_left",
        "observation/exterior_image_1_left",
        "observation/wrist_image_left",
        "observation/joint_position",
        "observation/gripper_position",
        "prompt",
        "session_id",
        "endpoint",
    ]
    assert first["session_id"] == later["session_id"] == "episode 1" and server.resets() == ["episode 1"]
    np.testing.assert_array_equal(
        first["observation/exterior_image_0_left"], observations[0].frames["exterior_image_1_left"][0]
    )
    np.testing.assert_array_equal(
        later["observation/exterior_image_1_left"], observations[1].frames["exterior_image_2_left"]
    )
    assert later["observation/joint_position"].dtype == np.float64
    np.testing.assert_array_equal(later["observation/joint_position"], observations[1].state["joint_position"])
    assert [c.step for c in chunks] == [0, 1] and [c.reset for c in chunks] == [ResetReason.FIRST_CALL, None]
    assert chunks[1].actions.dtype == np.float64 and (chunks[1].actions == 2).all()
    assert chunks[1].stamp_ns == observations[1].stamp_ns and chunks[1].dt_s == 1 / 15


def test_frames_are_picked_by_time_so_that_a_server_without_stamps_sees_the_schedule() -> None:
    with ScriptServer() as server:
        policy = connect(server.uri)
        session = policy.open()
        policy.infer(session, look(0))
        policy.infer(session, look(1))  # one frame again: the schedule reaches back before the first one
        policy.infer(session, look(2))
    key = "observation/wrist_image_left"
    sent = server.infers()
    assert sent[0][key].ndim == 3 and sent[1][key].shape == sent[2][key].shape == (4, 180, 320, 3)
    name = "wrist_image_left"
    want = [look(i).frames[name][0] for i in (0, 0, 1, 2)]  # 23, 16, 8 and 0 steps back; nothing is older than 16
    np.testing.assert_array_equal(sent[2][key], want)


@pytest.mark.parametrize("reply", [rows(3.0), {"actions": rows(3.0), "server_timing": {"infer_ms": 12.5}}])
def test_bare_arrays_and_maps_are_answers(reply: Any) -> None:
    with ScriptServer(lambda *_: reply) as server:
        policy = connect(server.uri)
        chunk = policy.infer(policy.open(), look())
    assert (chunk.actions == 3).all()
    assert chunk.timings_s.get("server") == (0.0125 if isinstance(reply, dict) else None)


@pytest.mark.parametrize(
    ("reply", "error", "text"),
    [
        ("wrist camera is missing", RemoteError, "wrist camera is missing"),
        ("Traceback (most recent call last):\n  File\nKeyError: 'x'\n", RemoteError, "KeyError: 'x'"),
        ({"type": "error", "message": "Internal inference error"}, RemoteError, "Internal inference error"),
        ({"action": rows(1)}, ChunkError, "'action'.*'actions'"),
        ({}, ChunkError, "no actions"),
        ({"actions": rows(1).tolist()}, ChunkError, "list"),
        (np.zeros((1, 8), np.float32), ChunkError, r"\[1, 8\].*\[24, 8\]"),
        (np.zeros((24, 7), np.float32), ChunkError, r"\[24, 7\].*\[24, 8\]"),
        (np.zeros((24, 8), np.int32), ChunkError, "int32"),
        (np.full((24, 8), np.nan, np.float32), ChunkError, "not finite"),
        (b"\x93", RemoteError, "cannot be read"),
        (b"", RemoteError, "cannot be read"),
    ],
)
def test_nothing_but_a_whole_finite_chunk_is_an_answer(reply: Any, error: type, text: str) -> None:
    with ScriptServer(lambda *_: reply) as server:
        policy = connect(server.uri)
        with pytest.raises(error, match=text):
            policy.infer(policy.open(), look())


def test_answers_that_are_numbered_must_be_the_next_ones() -> None:
    with ScriptServer(lambda r, n: {"actions": rows(n), "server_timing": {"seq": n - 1 if n < 3 else n - 2}}) as server:
        policy = connect(server.uri)
        session = policy.open()
        policy.infer(session, look(0)), policy.infer(session, look(1))
        with pytest.raises(PolicyUnavailable, match=r"answers another request.*answer 1, expected 2"):
            policy.infer(session, look(2))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("Overloaded: there is no room for another session; got: 4 of 4", PolicyUnavailable),
        ("NotReady: the policy takes no calls", PolicyUnavailable),
        ("ReplicaDied: the process of replica 1 was ended by SIGKILL", PolicyUnavailable),
        ("PromptError: prompt: too long; it is refused, not cut", PromptError),
        ("InvalidImage: wrist: not an array", RemoteError),
        ("EngineError: out of memory", RemoteError),
    ],
)
def test_what_kind_of_error_it_is_decides_what_happens_next(text: str, error: type) -> None:
    with ScriptServer(lambda *_: text) as server:
        policy = connect(server.uri)
        with pytest.raises(error, match=text.split(": ")[1].split(";")[0]):
            policy.infer(policy.open(), look())


def test_a_history_that_the_server_began_afresh_is_told() -> None:
    told = iter([1.0, 0.0, 1.0, 1.0])
    with ScriptServer(lambda *_: {"actions": rows(1), "server_timing": {"history_reset": next(told)}}) as server:
        policy = connect(server.uri)
        session = policy.open()
        seen = [policy.infer(session, replace(look(i), prompt="b" if i > 2 else "a")).reset for i in range(4)]
    assert seen == [ResetReason.FIRST_CALL, None, ResetReason.WINDOW_FULL, ResetReason.PROMPT_CHANGED]


def test_the_other_codec() -> None:
    with ScriptServer() as server:
        policy = connect(server.uri, codec="msgpack_numpy")
        chunk = policy.infer(policy.open("é"), look())
        assert (chunk.actions == 1).all() and b"\xc4\x02nd" in server.raw[0] and b"__ndarray__" not in server.raw[0]
    with pytest.raises(ConfigError, match="codec"):
        config("ws://h:1", codec="json")


def test_roboarena_replies_are_maps() -> None:
    with ScriptServer() as server:
        policy = connect(server.uri, dialect="roboarena")
        with pytest.raises(ChunkError, match=r"not a map.*server\.dialect"):
            policy.infer(policy.open(), look())


def test_a_late_reply_is_never_taken_for_the_next_one() -> None:
    late = threading.Event()

    def answer(request: dict[str, Any], number: int) -> Any:
        if number == 1:
            late.wait(5)
        return rows(number)

    with ScriptServer(answer) as server:
        policy = connect(server.uri, timeout_s=0.5)
        session = policy.open()
        start = time.monotonic()
        with pytest.raises(PolicyUnavailable, match="in time"):
            policy.infer(session, look(0))
        assert time.monotonic() - start < 1.5
        late.set()
        with pytest.raises(PolicyUnavailable, match="is gone"):
            policy.infer(session, look(1))
        policy.close(session)
        fresh = policy.open()
        for step in range(3):
            chunk = policy.infer(fresh, look(step))
            assert (chunk.actions == len(server.requests)).all(), "the answer to this very request"
    connections = [c for c, _ in server.requests]
    assert connections == sorted(connections) and connections[1:] == [1] * (len(connections) - 1)
    assert server.resets() == [session.session_id], "the lost one is forgotten first"


def test_a_cancelled_call_ends_at_once_and_leaves_no_reply_behind() -> None:
    with ScriptServer(lambda request, number: (time.sleep(0.3 if number == 1 else 0), rows(number))[1]) as server:
        policy = connect(server.uri)
        cancel = threading.Event()
        threading.Timer(0.05, cancel.set).start()
        start = time.monotonic()
        with pytest.raises(Cancelled):
            policy.infer(policy.open(), look(), cancelled=cancel.is_set)
        assert time.monotonic() - start < 0.25
        chunk = policy.infer(policy.open(), look())
        assert (chunk.actions == len(server.requests)).all()


def test_a_lost_connection_ends_its_sessions_and_the_next_one_works() -> None:
    with ScriptServer() as server:
        policy = connect(server.uri)
        session, idle = policy.open(), policy.open()
        policy.infer(session, look(0))
        server.drop()
        with pytest.raises(PolicyUnavailable):
            policy.infer(session, look(1))
        policy.close(session)
        assert policy.infer(idle, look()).step == 0, "a session that had not begun"
        assert server.resets() == [session.session_id]
        policy.reset(idle)
        assert policy.infer(idle, look(1)).step == 0


def test_a_connection_that_ends_while_a_call_is_prepared_ends_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other connection may carry the session on: the server knows nothing of it."""
    with ScriptServer() as server:
        policy = connect(server.uri)
        session = policy.open()
        policy.infer(session, look(0))
        check = policy._check

        def drops_afterwards(given: Any) -> None:
            check(given)
            link = policy._link
            server.drop()
            end_s = time.monotonic() + 10
            while link.open and time.monotonic() < end_s:
                time.sleep(0.001)

        monkeypatch.setattr(policy, "_check", drops_afterwards)
        with pytest.raises(PolicyUnavailable, match="carried the session"):
            policy.infer(session, look(1))
        assert len(server.infers()) == 1 and session.lost


def test_a_server_that_is_gone_says_so_and_comes_back() -> None:
    with ScriptServer() as server:
        policy = connect(server.uri)
        policy.infer(policy.open(), look())
    with pytest.raises(PolicyUnavailable, match="cannot be reached"):
        policy.infer(policy.open(), look())
    with ScriptServer(port=server.port):
        policy.infer(policy.open(), look())


def test_another_server_behind_the_same_address_is_refused() -> None:
    with ScriptServer(greeting={**GREETING, "weights": "a"}) as server:
        policy = connect(server.uri)
        assert policy.spec.weights == "a"
    with ScriptServer(greeting={**GREETING, "weights": "b"}, port=server.port) as server:
        with pytest.raises(ContractMismatch, match=r"other weights.*got: b.*expected: a"):
            policy.infer(policy.open(), look())
        assert not server.infers()


def test_a_peer_that_does_not_read_is_given_up() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

    def greet() -> None:
        # The real handshake by hand: the library's server would read on in the background.
        peer, _ = listener.accept()
        peers.append(peer)
        from base64 import b64encode
        from hashlib import sha1

        head = peer.recv(4096).decode()
        key = next(line.split(": ")[1] for line in head.split("\r\n") if line.lower().startswith("sec-websocket-key"))
        accept = b64encode(sha1((key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()).decode()
        upgrade = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        hello = pack(GREETING)
        frame = bytes([0x82, 126]) + len(hello).to_bytes(2, "big") + hello
        peer.sendall(f"{upgrade}Sec-WebSocket-Accept: {accept}\r\n\r\n".encode() + frame)

    peers: list[socket.socket] = []
    thread = threading.Thread(target=greet, daemon=True)
    thread.start()
    policy = connect(f"ws://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.5)
    big = spec_of("oxe_droid", weights="")
    policy.spec = replace(big, cameras=tuple(replace(c, height=1080, width=1920) for c in big.cameras))
    observation = example_observation(policy.spec)
    start = time.monotonic()
    with pytest.raises(PolicyUnavailable, match="does not read"):
        policy.infer(policy.open(), observation)
    assert time.monotonic() - start < 2.0
    for s in (listener, *peers):
        s.close()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"action_space": "joint_velocity"}, "action_space.*joint_velocity.*joint_position"),
        ({"action_space": None}, r"does not say what its actions are.*server\.action_space"),
        ({"embodiment": "agibot"}, "embodiment.*agibot.*oxe_droid"),
        ({"n_external_cameras": 1}, "n_external_cameras.*1.*2"),
        ({"needs_wrist_camera": False}, "needs_wrist_camera.*False.*True"),
        ({"needs_stereo_camera": True}, "needs_stereo_camera"),
        ({"action_horizon": 10}, "action_horizon.*10.*24"),
        ({"control_rate_hz": 30.0}, "control_rate_hz.*30.*15"),
        ({"contract": {"embodiment": "yam"}}, "embodiment.*yam.*oxe_droid"),
        ({"contract": {"horizon": 16}}, "action_horizon.*16.*24"),
        ({"contract": {"cameras": [{"name": "top"}]}}, "cameras.*top.*exterior_image_1_left"),
        ({"contract": {"actions": [{"name": "joint_position", "dim": 6}]}}, "actions.*6.*gripper_position"),
        ({"contract": {"frames_per_call": {"offsets_steps": [0]}}}, "frames.*-23"),
        ({"image_resolution": [0, 320]}, r"image_resolution.*\[0, 320\]"),
    ],
)
def test_a_server_for_something_else_is_refused_with_both_values(change: dict[str, Any], text: str) -> None:
    greeting = {k: v for k, v in {**GREETING, **change}.items() if v is not None}
    with ScriptServer(greeting=greeting) as server, pytest.raises(ContractMismatch, match=text):
        connect(server.uri)


def test_what_a_server_does_not_say_can_be_said_by_the_operator() -> None:
    with ScriptServer(greeting={}) as server:
        assert connect(server.uri, action_space="joint_position").spec.action_space == "joint_position"
        with pytest.raises(ContractMismatch, match="joint_velocity"):
            connect(server.uri, action_space="joint_velocity")


def test_what_a_server_says_about_its_weights_is_kept() -> None:
    contract = {"weights": "RANDOM WEIGHTS (tiny)", "random_weights": True, "weights_hash": "ab12", "tier": "numeric"}
    with ScriptServer(greeting={**GREETING, "contract": contract}) as server:
        spec = connect(server.uri).spec
    assert spec.random_weights and spec.weights == "RANDOM WEIGHTS (tiny)"
    assert spec.details["server"]["weights_hash"] == "ab12" and spec.details["uri"] == server.uri


def test_weights_are_known_where_the_greeting_has_no_room_for_them() -> None:
    asked: list[str] = []
    contract = {"weights": "RANDOM WEIGHTS (tiny)", "random_weights": True, "embodiment": "oxe_droid"}

    def info(ws: Any, request: Any) -> Any:
        if request.path != "/info":
            return None
        asked.append(request.headers["Authorization"])
        return ws.respond(HTTPStatus.OK, json.dumps({"contract": contract}))

    with ScriptServer(process_request=info) as server:
        spec = connect(server.uri, api_key="k").spec
        assert spec.random_weights and spec.weights == "RANDOM WEIGHTS (tiny)" and asked == ["Api-Key k"]
        contract["embodiment"] = "yam"
        with pytest.raises(ContractMismatch, match=r"yam.*oxe_droid"):
            connect(server.uri, api_key="k")


def test_a_server_that_came_back_and_does_not_say_yet_what_it_serves_is_asked_again() -> None:
    silent: list[bool] = []

    def info(ws: Any, request: Any) -> Any:
        if request.path != "/info":
            return None
        return ws.respond(HTTPStatus.SERVICE_UNAVAILABLE if silent else HTTPStatus.OK, '{"contract": {"weights": "a"}}')

    with ScriptServer(process_request=info) as server:
        policy = connect(server.uri)
        policy.infer(policy.open(), look())
        server.drop()
        silent.append(True)
        for _ in range(2):
            with pytest.raises(PolicyUnavailable):
                policy.infer(policy.open(), look())
        silent.clear()
        policy.infer(policy.open(), look())


@pytest.mark.parametrize("body", ["[]", "no json", '{"contract": 1}', "{}"])
def test_what_other_servers_say_there_is_no_contract(body: str) -> None:
    def info(ws: Any, request: Any) -> Any:
        return ws.respond(HTTPStatus.OK, body) if request.path == "/info" else None

    with ScriptServer(process_request=info) as server:
        assert connect(server.uri).spec.weights == "of a policy server that does not name them"


def test_pictures_are_as_large_as_the_server_wants_them() -> None:
    with ScriptServer(greeting={**GREETING, "image_resolution": [90, 160]}) as server:
        policy = connect(server.uri)
        assert {(c.height, c.width) for c in policy.spec.cameras} == {(90, 160)}
        policy.infer(policy.open(), example_observation(policy.spec))
        assert server.infers()[0]["observation/wrist_image_left"].shape == (90, 160, 3)


@pytest.mark.parametrize("greeting", ["loading", b"\x91\x01", b"\xc1"])
def test_a_greeting_that_is_none_is_an_error(greeting: Any) -> None:
    with ScriptServer(greeting=greeting) as server, pytest.raises((RemoteError, ContractMismatch)):
        connect(server.uri)


def test_observations_that_do_not_fit_stay_here() -> None:
    with ScriptServer() as server:
        policy = connect(server.uri)
        session = policy.open()
        with pytest.raises(MissingInput, match="wrist"):
            policy.infer(session, replace(look(), frames={k: v for k, v in look().frames.items() if "wrist" not in k}))
        bad = {**look().state, "joint_position": np.array([0, 0, 0, np.nan, 0, 0, 0.0])}
        with pytest.raises(InvalidState, match="joint_position"):
            policy.infer(session, replace(look(), state=bad))
        assert not server.requests
        assert policy.infer(session, look()).step == 0, "the session is as it was"


def test_no_proxy_no_compression_and_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ws_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:9")
    with ScriptServer() as server:
        policy = connect(server.uri, api_key="secret")
        policy.infer(policy.open(), look())
    assert "Sec-WebSocket-Extensions" not in server.headers[0]
    assert server.headers[0]["Authorization"] == "Api-Key secret"
    assert "secret" not in repr(config("ws://h:1", api_key="secret"))


@pytest.mark.parametrize(("status", "text"), [(401, r"401.*server\.api_key"), (404, r"404.*server\.uri")])
def test_a_final_refusal_is_not_tried_again(status: int, text: str) -> None:
    tries = []

    def refuse(ws: Any, request: Any) -> Any:
        tries.append(request.path)
        return ws.respond(HTTPStatus(status), "no\n")

    with ScriptServer(process_request=refuse) as server, pytest.raises(ConfigError, match=text):
        connect(server.uri + "/somewhere")
    assert tries == ["/somewhere"]


def test_it_waits_for_a_server_that_starts_later_and_says_so() -> None:
    with ScriptServer() as once:
        port = once.port
    lines: list[str] = []
    servers: list[ScriptServer] = []

    def progress(line: str, fraction: float) -> None:
        lines.append(line)
        if "attempt 3" in line and not servers:
            servers.append(ScriptServer(port=port))

    policy = connect_policy(config(f"ws://127.0.0.1:{port}"), progress)
    with servers[0]:
        policy.infer(policy.open(), look())
    assert any("waiting for the policy server" in line and str(port) in line for line in lines)


def test_waiting_can_be_cancelled_and_bounded() -> None:
    with ScriptServer() as once:
        uri = once.uri

    def stop(line: str, fraction: float) -> None:
        if "waiting" in line:
            raise Cancelled("stopped while loading")

    with pytest.raises(Cancelled):
        connect_policy(config(uri), stop)
    with pytest.raises(PolicyUnavailable):
        connect_policy(config(uri), wait_s=0.1)


def test_a_greeting_may_be_withheld_while_the_server_loads() -> None:
    ready = threading.Event()

    def greeting() -> Any:
        ready.wait(5)
        return GREETING

    with ScriptServer(greeting=greeting) as server:
        threading.Timer(0.2, ready.set).start()
        connect(server.uri)
        ready.clear()
        begun = time.monotonic()
        stop = threading.Timer(0.1, lambda: None)
        stop.start()

        def give_up(line: str, fraction: float) -> None:
            if not stop.is_alive():
                raise Cancelled("stopped while loading")

        with pytest.raises(Cancelled):
            connect_policy(config(server.uri, greeting_s=5.0), give_up)
        assert time.monotonic() - begun < 1.5, "also while it waits for the greeting"
        ready.set()


def test_a_reset_that_is_not_acknowledged_is_an_error() -> None:
    with ScriptServer() as server:
        policy = connect(server.uri)
        session = policy.open()
        policy.infer(session, look())
        server.on_reset = lambda request: {"status": "reset successful"}  # type: ignore[method-assign]
        with pytest.raises(RemoteError, match="acknowledge"):
            policy.reset(session)
        other = connect(server.uri, dialect="vllm_omni")
        session = other.open()
        other.infer(session, look())
        other.reset(session)


def test_closed_and_foreign_sessions_are_refused() -> None:
    with ScriptServer() as server:
        policy = connect(server.uri)
        session = policy.open()
        policy.close(session), policy.close(session)
        for wrong in (session, object()):
            with pytest.raises(SessionError):
                policy.infer(wrong, look())
        assert not server.requests, "what never began is not told"


@pytest.mark.parametrize("uri", ["127.0.0.1:8000", "tcp://h:1", "ws://", "ws://h:0", "ws://h:99999", "ws://h:1/#f"])
def test_addresses_are_checked(uri: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        LinkConfig(uri)


def test_unknown_dialects_are_refused() -> None:
    with pytest.raises(ConfigError, match="dreamzero"):
        config("ws://h:1", dialect="droid")


def test_no_torch_and_no_ros() -> None:
    code = (
        "import sys, wam_policy_ros.serving.client; "
        "print([m for m in ('torch', 'rclpy', 'cv2', 'triton') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# -- timing of the server -----------------------------------------------------------------------------------------


def _timed(horizon: Any, offsets: Any) -> dict[str, Any]:
    return {**GREETING, "contract": {"horizon": horizon, "frames_per_call": {"offsets_steps": offsets}}}


def test_timing_of_another_network_is_refused_unless_it_is_to_be_followed() -> None:
    with ScriptServer(greeting=_timed(16, [-6, -4, -2, 0])) as server:
        with pytest.raises(ContractMismatch, match="horizon"):
            connect(server.uri)
        policy = connect(server.uri, follow_timing=True)
        assert (policy.spec.horizon, policy.spec.frame_offsets) == (16, (-6, -4, -2, 0))
        policy.disconnect()


@pytest.mark.parametrize(("horizon", "offsets"), [(0, [0]), ("16", [0]), (16, [-2, -4, 0]), (16, [-2]), (16, [])])
def test_impossible_timing_is_not_followed(horizon: Any, offsets: Any) -> None:
    with pytest.raises(ContractMismatch, match="impossible"):
        timed_as(_timed(horizon, offsets), SPEC)
    assert timed_as(GREETING, SPEC) == SPEC
