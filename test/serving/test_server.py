"""Sessions, errors, cancellation, probes, start and stop of the OpenPI server, over real sockets on loopback."""

from __future__ import annotations

import gc
import itertools
import json
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from test.serving.harness import KEYS, Client, RememberingPolicy, Served, alone, request, served, wait_for
from wam_policy_ros.contract.errors import CheckpointError, ConfigError, Overloaded
from wam_policy_ros.contract.policy_thread import Phase, Priority
from wam_policy_ros.serving.codec import pack
from wam_policy_ros.serving.wire import RequestReader, WireRules


def same(a: Any, b: Any) -> bool:
    return bool(np.array_equal(a, b))


def closed_with(client: Client) -> int:
    with pytest.raises(ConnectionClosed):
        client.socket.recv(timeout=5)
    assert client.socket.protocol.close_rcvd is not None
    return client.socket.protocol.close_rcvd.code


# -- sessions ---------------------------------------------------------------------------------------------------------


def test_two_clients_interleaved_get_what_each_would_get_alone():
    a, b = [request(i, "a") for i in range(3)], [request(10 + i, "b") for i in range(3)]
    with served() as one, Client(one) as x, Client(one) as y:
        got = [(x.ask(p), y.ask(q)) for p, q in zip(a, b, strict=True)]
    for mine, wanted in ((0, alone(*a)), (1, alone(*b))):
        assert all(same(pair[mine], w) for pair, w in zip(got, wanted, strict=True))


def test_several_sessions_on_one_connection():
    """RoboLab and IsaacLab-Arena: one id per simulated robot, a list of ids to reset."""
    envs = ["u1", "u2", "u3"]
    with served() as one, Client(one) as client:
        got = {e: [] for e in envs}
        for i, e in itertools.product(range(3), envs):
            got[e].append(client.ask(request(i, e)))
        assert len(one.policy.sessions) == 3
        assert client.ask({"endpoint": "reset", "session_ids": ["u1", "u3"]}) == "reset successful"
        assert len(one.policy.sessions) == 1, "memory is free when the acknowledgement arrives"
        assert same(client.ask(request(0, "u1")), got["u1"][0]), "fresh"
        assert not same(client.ask(request(0, "u2")), got["u2"][0]), "not reset"
        assert client.ask({"endpoint": "reset", "session_ids": None}) == "reset successful"
        assert one.policy.sessions == {}
    wanted = alone(*(request(i, "u1") for i in range(3)))
    assert all(same(g, w) for e in envs for g, w in zip(got[e], wanted, strict=True))


def test_a_reset_forgets_the_current_session_and_is_idempotent():
    with served() as one, Client(one) as client:
        first, second = client.ask(request(0)), client.ask(request(0))
        assert not same(first, second)
        for message in (
            {"endpoint": "reset"},
            {"endpoint": "reset", "session_id": "never seen"},
            {"endpoint": "reset"},
        ):
            assert client.ask(message) == "reset successful"
        assert one.policy.sessions == {} and one.policy.opened == 1
        assert same(client.ask(request(0)), first)


def test_clients_without_an_id_never_share_a_session():
    with served() as one, Client(one) as a, Client(one) as b:
        x, y = a.ask(request(0, None)), b.ask(request(0, None))
        assert same(x, y), "both are first calls"
        assert not same(a.ask(request(1, None)), x) and len(one.policy.sessions) == 2
        a.socket.close()
        wait_for(lambda: len(one.policy.sessions) == 1)


def test_a_session_in_use_is_not_shared_and_not_stolen():
    with served() as one, Client(one) as a, Client(one) as b:
        a.ask(request(0))
        said = b.ask(request(0))
        assert isinstance(said, str) and "in use by another connection" in said and closed_with(b) == 1011
        with Client(one) as c:
            assert "in use by another connection" in c.ask({"endpoint": "reset", "session_id": "s"})
        assert same(a.ask(request(1)), alone(request(0), request(1))[1])


def test_a_dropped_client_comes_back_and_goes_on():
    with served() as one:
        first = Client(one)
        first.ask(request(0))
        first.drop()
        with Client(one) as again:
            assert same(again.ask(request(1)), alone(request(0), request(1))[1])


def test_a_client_that_says_goodbye_leaves_nothing():
    with served() as one:
        with Client(one) as client:
            client.ask(request(0))
        wait_for(lambda: not one.policy.sessions)
        with Client(one) as client:
            assert same(client.ask(request(0)), alone(request(0))[0])


def test_a_half_open_connection_loses_its_session_to_its_client():
    """The old connection is dead, but nothing has told the server so."""
    with served(takeover_ping_s=0.05) as one:
        old = Client(one)
        old.ask(request(0))
        old.socket.recv_events = lambda: None  # type: ignore[method-assign]
        freeze = threading.Event()
        original = old.socket.protocol.receive_data
        old.socket.protocol.receive_data = lambda data: freeze.wait(5) or original(data)  # type: ignore[method-assign]
        with Client(one) as new:
            assert same(new.ask(request(1)), alone(request(0), request(1))[1])
        freeze.set()
        old.socket.close()


def test_a_session_that_nobody_comes_back_to_is_freed():
    with served(resume_s=0.1) as one:
        client = Client(one)
        client.ask(request(0))
        client.drop()
        wait_for(lambda: not one.policy.sessions)
        assert any("did not come back" in line for line in one.lines)


def test_a_client_that_comes_back_while_others_are_freed_keeps_its_session():
    with served(resume_s=0.6) as one, Client(one) as busy:
        lost = [Client(one) for _ in range(2)]
        for name, client in zip("ab", lost, strict=True):
            client.ask(request(0, name))
            client.drop()
        wait_for(lambda: all(s.left_s for s in one.server.table.of(None)) and len(one.server.table.of(None)) == 2)
        one.policy.entered.clear()
        one.policy.gate.clear()
        busy.send(request(5, "busy"))  # so that freeing takes time
        assert one.policy.entered.wait(5)
        wait_for(lambda: one.server.table.freeing, what="the end of the sessions")
        assert not one.server.table.of(None), "both have ended together; none may be taken up again and then freed"
        with Client(one) as back:
            back.send(request(1, "b"))
            wait_for(lambda: one.server.table.get("b"))
            one.policy.gate.set()
            assert same(back.receive(), alone(request(1, "b"))[0])
            assert same(back.ask(request(2, "b")), alone(request(1, "b"), request(2, "b"))[1])


def test_an_idle_session_ends_and_its_client_is_told_once():
    with served(session_idle_s=0.1, errors="keep_open") as one, Client(one) as client:
        client.ask(request(0))
        wait_for(lambda: not one.policy.sessions)
        assert "history of session 's' is lost" in client.ask(request(1))
        assert same(client.ask(request(1)), alone(request(1))[0])


def test_a_full_table_refuses_with_the_reason_and_evicts_nobody():
    with served(max_sessions=2, errors="keep_open") as one, Client(one) as a, Client(one) as b:
        a.ask(request(0, "a1")), a.ask(request(0, "a2"))
        said = b.ask(request(0, "b"))
        assert "no room for another session" in said and "2 of 2" in said
        assert len(one.policy.sessions) == 2
        assert a.ask({"endpoint": "reset", "session_id": "a1"}) == "reset successful"
        assert isinstance(b.ask(request(0, "b")), np.ndarray)


def test_a_client_that_only_changes_its_id_does_not_run_out_of_room():
    """DreamZero's simulator client: a new id per episode, never a reset."""
    with served(max_sessions=3) as one, Client(one) as client:
        for episode in range(10):
            for step in range(2):
                assert isinstance(client.ask(request(step, f"episode {episode}")), np.ndarray)
        assert len(one.policy.sessions) == 3
        said = client.ask(request(5, "episode 0"))
        assert "is lost" in said, "never silently started again"


def test_room_is_made_when_the_policy_itself_is_full():
    class Small(RememberingPolicy):
        def open(self, session_id: str | None = None, *, seed: int | None = None) -> Any:
            if len(self.sessions) == 2:
                raise Overloaded("no window is free")
            return super().open(session_id, seed=seed)

    with served(Small(), errors="keep_open") as one, Client(one) as client, Client(one) as other:
        for episode in range(5):
            for step in range(2):
                assert isinstance(client.ask(request(step, f"episode {episode}")), np.ndarray)
        client.ask({"endpoint": "reset", "session_ids": None})
        for name in "ab":
            assert isinstance(other.ask(request(0, name)), np.ndarray)
        assert "no window is free" in client.ask(request(0, "c")) and one.http("/readyz")[0] == 200


class Small(RememberingPolicy):
    """Has memory for two sessions, taken at their first step."""

    def infer(self, session: Any, observation: Any, *, cancelled: Any = None) -> Any:
        if session.step == 0 and sum(m.step > 0 for m in self.sessions.values()) >= 2:
            raise Overloaded("no window is free")
        return super().infer(session, observation, cancelled=cancelled)


def robots_step(one: Served) -> Any:
    """As the node's worker does it."""

    seen = RequestReader(one.policy.spec, WireRules()).read(pack(request(9))).observation

    def work(policy: Any, cancelled: Any) -> Any:
        session = policy.open("robot")
        try:
            while True:
                try:
                    return policy.infer(session, seen)
                except Overloaded:
                    if not one.owner.make_room(policy):
                        raise
        finally:
            policy.close(session)

    return one.owner.submit(work, lane="robot", priority=Priority.ROBOT).result(5)


def test_the_robot_gets_the_memory_and_the_client_is_told():
    with served(Small(), errors="keep_open", dialect="openpi") as one, Client(one) as client, Client(one) as other:
        gone = Client(one)
        gone.ask(request(0, "gone"))
        gone.drop()
        wait_for(lambda: one.server.table.get("gone").left_s is not None)
        client.ask(request(0, None))
        robots_step(one)
        assert one.server.table.get("gone") is None and len(one.server.table) == 1, "whom nobody uses goes first"
        other.ask(request(0, "other"))
        robots_step(one)
        said = client.ask(request(1, None))
        assert "the robot needed its memory" in said, "told once, whether or not its session has a name"
        assert client.ask(request(1, None))["server_timing"]["history_reset"] == 1.0
        robots_step(one)
        assert client.ask({"endpoint": "reset"}) == "reset successful" and len(one.server.table) <= 1
        other.ask({"endpoint": "reset"})
        with pytest.raises(Overloaded):
            one.owner.submit(lambda policy, cancelled: _full(one, policy), lane="x").result(5)
        assert one.http("/readyz")[0] == 200


def _full(one: Served, policy: Any) -> None:
    assert not one.owner.make_room(policy), "nobody has anything to give"
    raise Overloaded("no window is free")


def test_a_step_that_waits_for_a_session_that_had_to_go_does_not_begin():
    with served(errors="keep_open") as one, Client(one) as client:
        client.ask(request(0, "a"))
        go = threading.Event()
        one.owner.submit(lambda policy, cancelled: go.wait(5), lane="before")
        client.send(request(1, "a"))
        wait_for(lambda: one.owner.waiting == 1)
        room = one.owner.submit(
            lambda policy, cancelled: one.owner.make_room(policy), lane="robot", priority=Priority.ROBOT
        )
        go.set()
        assert room.result(5) and "the robot needed its memory" in client.receive()
        assert not one.policy.sessions and not len(one.server.table)
        assert same(client.ask(request(1, "a")), alone(request(1, "a"))[0]), "told once"


def test_many_robots_on_one_connection_are_refused_rather_than_swapped():
    with served(max_sessions=2, errors="keep_open") as one, Client(one) as client:
        for _ in range(3):
            for env in "xyz":
                reply = client.ask(request(0, env))
                assert isinstance(reply, str) == (env == "z"), env


def test_a_seed_belongs_to_its_session():
    with served(errors="keep_open") as one, Client(one) as client:
        plain, seeded = client.ask(request(0, "a")), client.ask(request(0, "b", seed=7))
        assert not same(plain, seeded)
        assert same(client.ask(request(0, "c", seed=7)), seeded)
        client.ask(request(1, "b"))
        assert {m.seed for m in one.policy.sessions.values()} == {None, 7}
        assert "seed is not that of the session" in client.ask(request(1, "b", seed=8))


def test_a_new_prompt_starts_afresh_and_is_reported():
    with served(dialect="openpi") as one, Client(one) as client:
        client.ask(request(0)), client.ask(request(0))
        third = client.ask(request(0, prompt="wave"))
        assert third["server_timing"]["history_reset"] == 1.0
        assert any("history reset" in line for line in one.lines)
    assert same(third["actions"], alone(request(0, prompt="wave"))[0])


def test_an_episode_keeps_its_cameras():
    with served(single_exterior="dropped_view", errors="keep_open") as one, Client(one) as client:
        client.ask(request(0))
        less = {k: v for k, v in request(1).items() if k != KEYS[1]}
        assert "cameras are not those of the session's first request" in client.ask(less)
        assert same(client.ask(request(1)), alone(request(0), request(1))[1])


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/dreamzero", "/roboarena", "/openpi", "/vllm_omni"])
def test_an_error_is_one_text_frame_and_then_1011(path):
    with served() as one:
        with Client(one, path) as client:
            client.ask(request(0))
            said = client.ask(request(1) | {"observation/joint_position": np.zeros(6)})
            assert isinstance(said, str) and "observation/joint_position" in said and "Traceback" not in said
            assert closed_with(client) == 1011
        reference = said.rpartition("log reference ")[2].rstrip("]")
        assert any(reference in line for line in one.lines)
        with Client(one, path) as client:  # the session is as it was before the refused request
            reply = client.ask(request(1))
            rows = reply["actions"] if isinstance(reply, dict) else reply
            assert same(rows, alone(request(0), request(1))[1])


@pytest.mark.parametrize("how", ["parameter", "query"])
def test_a_connection_stays_open_for_those_who_ask(how):
    config = {"errors": "keep_open"} if how == "parameter" else {}
    with served(**config) as one, Client(one, "/" if how == "parameter" else "/?errors=keep_open") as client:
        first = client.ask(request(0))
        for bad in ("text", b"", pack(request(0))[:700], pack([1]), pack(3), pack(request(0)) + b"\0"):
            assert isinstance(client.ask(bad), str)
        assert isinstance(client.ask({k: v for k, v in request(0).items() if k != KEYS[2]}), str)
        assert same(client.ask(request(1)), alone(request(0), request(1))[1]) and first is not None


@pytest.mark.parametrize("fault", ["raises", "nan"])
def test_a_failing_policy_is_an_error_and_turns_readiness_off(fault):
    with served(errors="keep_open") as one, Client(one) as client:
        assert one.http("/readyz")[0] == 200
        one.policy.error, one.policy.broken = (
            (RuntimeError("out of memory"), False) if fault == "raises" else (None, True)
        )
        said = client.ask(request(0))
        assert isinstance(said, str) and ("out of memory" in said or "not finite" in said)
        assert one.policy.sessions == {}, "a session whose first step failed was never there"
        code, text, _ = one.http("/readyz")
        assert code == 503 and "failed" in text and one.http("/healthz")[0] == 200
        one.policy.error, one.policy.broken = None, False
        assert isinstance(client.ask(request(0)), np.ndarray) and one.http("/readyz")[0] == 200


def test_a_busy_policy_is_a_reason_not_a_failure():
    with served(errors="keep_open") as one, Client(one) as client:
        one.policy.error = Overloaded("no memory for another session", got="3 GiB free")
        assert "no memory for another session" in client.ask(request(0))
        assert one.http("/readyz")[0] == 200


def test_a_frame_beyond_the_limit_closes_with_1009():
    with served(max_message_bytes=16 * 2**20) as one, Client(one) as client:
        client.send(b"\xc6" + (17 * 2**20).to_bytes(4, "big") + bytes(17 * 2**20))
        assert closed_with(client) == 1009


# -- time -------------------------------------------------------------------------------------------------------------


def test_nothing_waits_for_a_slow_step():
    with served() as one, Client(one) as slow:
        one.policy.gate.clear()
        slow.send(request(0))
        assert one.policy.entered.wait(5)
        start = time.monotonic()
        with Client(one) as other:
            assert other.metadata
            assert one.http("/healthz")[0] == 200
            assert slow.socket.ping().wait(2)
        assert time.monotonic() - start < 2
        one.policy.gate.set()
        assert isinstance(slow.receive(), np.ndarray)
        assert one.policy.threads == {"wam_policy_owner"}


def test_pipelined_requests_are_answered_in_order():
    with served() as one, Client(one) as client:
        for i in range(12):
            client.send(request(i))
        got = [client.receive() for _ in range(12)]
    assert all(same(g, w) for g, w in zip(got, alone(*(request(i) for i in range(12))), strict=True))


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_client_that_leaves_cancels_its_step(how):
    with served(resume_s=0 if how == "drop" else 60) as one:
        client = Client(one)
        client.ask(request(0))
        one.policy.gate.clear(), one.policy.entered.clear()
        client.send(request(1))
        assert one.policy.entered.wait(5)
        client.drop() if how == "drop" else client.socket.close()
        wait_for(lambda: one.policy.cancelled == 1)
        wait_for(lambda: not one.policy.sessions)
        one.policy.gate.set()
        with Client(one) as other:
            assert isinstance(other.ask(request(0)), np.ndarray)


def test_a_deadline_ends_the_step_and_leaves_the_session():
    with served(errors="keep_open") as one, Client(one) as client:
        client.ask(request(0))
        one.policy.gate.clear()
        assert "DeadlineExceeded" in client.ask(request(1, deadline_ms=30))
        one.policy.gate.set()
        assert same(client.ask(request(1)), alone(request(0), request(1))[1])
        assert one.http("/readyz")[0] == 200


def test_a_deadline_is_kept_while_others_have_the_policy():
    with served(errors="keep_open") as one, Client(one) as busy, Client(one) as client:
        one.policy.gate.clear()
        busy.send(request(0, "a"))
        assert one.policy.entered.wait(5)
        assert "DeadlineExceeded" in client.ask(request(1, "b", deadline_ms=30)), (
            "said at once, not when it is its turn"
        )
        assert not one.policy.gate.is_set()
        one.policy.gate.set()
        assert same(busy.receive(), alone(request(0, "a"))[0])
        assert same(client.ask(request(1, "b")), alone(request(1, "b"))[0])


def test_the_newest_observation_wins_for_those_who_ask():
    with served() as one, Client(one) as client:
        one.policy.gate.clear()
        client.send(request(0, newest_wins=True))
        assert one.policy.entered.wait(5)
        client.send(request(1, newest_wins=True)), client.send(request(2, newest_wins=True))
        replies = [client.receive() for _ in range(2)]  # while the gate is shut: the newest may come late
        assert one.policy.cancelled >= 1
        one.policy.gate.set()
        replies.append(client.receive())
        assert ["Superseded" in r if isinstance(r, str) else "rows" for r in replies] == [True, True, "rows"]
        assert same(replies[2], alone(request(2))[0])


def test_the_robot_goes_first_and_a_clients_step_is_started_again():
    with served() as one, Client(one) as client:
        one.policy.gate.clear()
        client.send(request(0))
        assert one.policy.entered.wait(5)
        robot = one.owner.submit(lambda p, c: "moved", lane="robot", priority=Priority.ROBOT, preempt=True)
        assert robot.result(5) == "moved"
        one.policy.gate.set()
        assert same(client.receive(), alone(request(0))[0])


# -- loading, probes, keys, stopping ----------------------------------------------------------------------------------


def test_metadata_are_withheld_while_the_policy_loads():
    go, policy = threading.Event(), RememberingPolicy()

    def load(progress: Any) -> Any:
        progress("reading shard 3 of 6", 0.5)
        go.wait(5)
        return policy

    one = Served(factory=load)
    one.server.start()
    wait_for(lambda: one.owner.status.fraction == 0.5)
    assert one.http("/healthz")[0] == 200
    code, text, _ = one.http("/readyz")
    assert code == 503 and "reading shard 3 of 6" in text and not any("startup complete" in x for x in one.lines)
    assert json.loads(one.http("/info")[1])["progress"] == 0.5
    with connect(one.url(), compression=None, proxy=None) as early:
        with pytest.raises(TimeoutError):
            early.recv(timeout=0.05)
        go.set()
        assert isinstance(early.recv(timeout=5), bytes)
        early.send(pack(request(0)))
        assert isinstance(early.recv(timeout=5), bytes)
    wait_for(lambda: one.http("/readyz")[0] == 200)
    assert any("Application startup complete" in x for x in one.lines)
    assert one.server.stop(5) and one.owner.stop(5)


def test_or_the_port_is_not_bound_until_then():
    go = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    one = Served(factory=lambda progress: go.wait(5) and RememberingPolicy(), bind="when_ready", port=port)
    one.server.start()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 1)
    go.set()
    wait_for(lambda: one.server.addresses)
    with Client(one) as client:
        assert client.metadata
    assert one.server.stop(5) and one.owner.stop(5)


def test_a_policy_that_cannot_be_loaded():
    def load(progress: Any) -> Any:
        go.wait(5)
        raise CheckpointError("a shard is missing")

    go = threading.Event()
    one = Served(factory=load)
    one.server.start()
    with connect(one.url(), compression=None, proxy=None) as early:
        go.set()
        with pytest.raises(ConnectionClosed, match="1011"):
            early.recv(timeout=5)
    assert one.owner.status.phase is Phase.FAILED and "a shard is missing" in one.http("/readyz")[1]
    with pytest.raises(Exception, match="503"):
        Client(one)
    assert one.server.stop(5) and one.owner.stop(5)


def test_probes_and_metrics():
    with served(errors="keep_open") as one, Client(one) as client:
        client.ask(request(0)), client.ask("text")
        code, body, headers = one.http("/healthz")
        assert (code, body, headers["Content-Type"]) == (200, "OK\n", "text/plain; charset=utf-8")
        _, text, headers = one.http("/metrics")
        assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
        for line in (
            'wam_openpi_requests_total{dialect="dreamzero",endpoint="infer",outcome="ok"} 1.0',
            'wam_openpi_requests_total{dialect="dreamzero",endpoint="infer",outcome="ObservationError"} 1.0',
            "wam_openpi_sessions 1.0",
            "wam_openpi_connections 1.0",
            "wam_openpi_ready 1.0",
            "wam_openpi_infer_seconds_count 1.0",
        ):
            assert line in text, line
        info = json.loads(one.http("/info")[1])
        assert info["ready"] and info["contract"]["embodiment"] == "oxe_droid" and info["sessions"] == 1
        assert one.http("/")[0] == 426


@pytest.mark.parametrize("scheme", ["Api-Key", "Bearer"])
def test_an_api_key(scheme):
    with served(api_key="secret") as one:
        for given in ({}, {"Authorization": f"{scheme} wrong"}, {"Authorization": "Basic secret"}):
            with pytest.raises(Exception, match="401"):
                Client(one, additional_headers=given)
        with Client(one, additional_headers={"Authorization": f"{scheme} secret"}) as client:
            assert client.metadata
        assert one.http("/healthz")[0] == 200 and one.http("/info")[0] == 401
        assert "secret" not in "".join(one.lines) + repr(one.server.config)


def test_loopback_by_default_and_a_taken_port_is_named():
    with served() as one:
        assert one.server.addresses[0][0] == "127.0.0.1"
        second = Served(port=one.server.port)
        with pytest.raises(ConfigError, match=f"127.0.0.1:{one.server.port}"):
            second.server.start()
        assert second.owner.stop(5)


def test_compression_is_not_negotiated_and_connections_are_bounded():
    with served(max_connections=1) as one, Client(one, compression="deflate") as client:
        assert client.socket.protocol.extensions == []
        with pytest.raises(Exception, match="503"):
            Client(one)


def test_stopping_with_a_step_in_flight():
    one = Served()
    one.server.start()
    client = Client(one)
    client.ask(request(0))
    one.policy.gate.clear(), one.policy.entered.clear()
    client.send(request(1))
    assert one.policy.entered.wait(5)
    start = time.monotonic()
    assert one.server.stop(2) and time.monotonic() - start < 2
    assert closed_with(client) == 1001
    assert one.policy.sessions == {}, "the owner lives on, so memory was given back"
    assert one.owner.trouble() is None and one.owner.stop(2)


def test_a_deaf_step_does_not_keep_the_server():
    one = Served()
    one.server.start()
    client = Client(one)
    deaf = threading.Event()
    one.owner.submit(lambda p, c: deaf.wait(10), lane="deaf")
    client.send(request(0))
    start = time.monotonic()
    one.server.stop(2)
    assert time.monotonic() - start < 2.5 and closed_with(client) in (1001, 1006)
    deaf.set()
    assert one.owner.stop(5)


# -- endurance --------------------------------------------------------------------------------------------------------


def test_episodes_end_where_they_began():
    """Open, infer, reset or leave, again and again: no session, task, connection or memory is left."""
    with served(resume_s=0) as one:

        def episode(i: int, client: Client) -> None:
            client.send(request(0, f"e{i}"))
            client.receive()
            if i % 3 == 0:
                client.send({"endpoint": "reset"})
                assert client.receive() == "reset successful"

        def objects() -> int:
            gc.collect()
            return len(gc.get_objects())

        def leave_nothing() -> None:
            wait_for(lambda: not one.policy.sessions and not one.server.connections and not len(one.server.table))

        counts = []
        for round_ in range(4):
            for i in range(20):
                with Client(one) as client:
                    for j in range(5):
                        episode(round_ * 100 + i * 5 + j, client)
                if i % 5 == 0:
                    (lost := Client(one)).send(request(0, f"lost {round_} {i}"))
                    lost.drop()
            leave_nothing()
            one.lines.clear()
            counts.append(objects())
        assert one.policy.opened == one.policy.closed
        assert counts[-1] - counts[1] < 200, counts


def test_many_clients_at_once_each_get_their_own():
    wanted = {n: alone(*(request(n * 100 + i, f"c{n}") for i in range(5))) for n in range(8)}
    with served() as one:
        wrong: list[str] = []

        def run(n: int) -> None:
            with Client(one) as client:
                for i in range(5):
                    if not same(client.ask(request(n * 100 + i, f"c{n}")), wanted[n][i]):
                        wrong.append(f"client {n} step {i}")

        threads = [threading.Thread(target=run, args=(n,)) for n in wanted]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert wrong == [] and not any(t.is_alive() for t in threads)
