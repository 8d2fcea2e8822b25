"""A policy that fails, hangs or is lost, seen by the clients of a real server: all are told, nobody waits for ever."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from test.serving.harness import KEYS, Client, Served, alone, request, served, wait_for
from wam_policy_ros.contract.policy_thread import OwnerLimits, Phase
from wam_policy_ros.serving.codec import pack
from wam_policy_ros.tools import serve as serve_tool
from wam_policy_ros.tools.main import main

STUCK_S = 0.5


def metric(one: Served, name: str) -> float:
    (line,) = [x for x in one.http("/metrics")[1].splitlines() if x.startswith(f"{name} ")]
    return float(line.rpartition(" ")[2])


def test_a_call_that_does_not_end_is_said_to_everybody_and_loses_its_own_session_alone():
    """Even when it never asks whether it is still wanted."""
    with (
        served(limits=OwnerLimits(stuck_after_s=STUCK_S), errors="keep_open") as one,
        Client(one) as a,
        Client(one) as b,
        Client(one) as fresh,
        Client(one) as leaver,
    ):
        first = [c.ask(request(i, name)) for i, (c, name) in enumerate([(a, "a"), (b, "b"), (leaver, "c")])]
        infer, policy = one.policy.infer, one.policy

        def deaf(session: Any, observation: Any, cancelled: Any = None) -> Any:
            return infer(session, observation)

        policy.infer = deaf
        policy.gate.clear()
        policy.entered.clear()
        a.send(request(3, "a"))
        assert policy.entered.wait(5)
        b.send(request(4, "b"))
        fresh.send(request(5, "d"))
        leaver.send({"endpoint": "reset", "session_ids": ["c"]})
        said = [c.receive(10) for c in (a, b, fresh, leaver)]
        assert all(isinstance(text, str) and "does not answer" in text for text in said), said
        assert "this session is lost" in said[0] and "a call has been running for" in said[0]
        assert all("nothing was changed" in text for text in said[1:])
        assert one.http("/healthz")[0] == 200 and metric(one, "wam_openpi_ready") == 0
        code, text, _ = one.http("/readyz")
        assert code == 503 and "a call has been running for" in text
        assert any("error: the policy does not answer" in line for line in one.lines)
        policy.gate.set()  # it goes on after all
        wait_for(lambda: one.http("/readyz")[0] == 200, 20)
        again = [c.ask(request(i, n)) for c, i, n in ((a, 0, "a"), (b, 4, "b"))]
        np.testing.assert_array_equal(again[0], first[0], "from the beginning: nothing of the lost one is left")
        np.testing.assert_array_equal(again[1], alone(request(1, "b"), request(4, "b"))[1])
        wait_for(lambda: len(policy.sessions) == len(one.server.table) == 2, what="the others are freed")


def test_a_first_call_that_hangs_leaves_no_session_when_it_ends():
    with served(limits=OwnerLimits(stuck_after_s=STUCK_S), errors="keep_open") as one, Client(one) as a:
        infer = one.policy.infer
        one.policy.infer = lambda session, observation, cancelled=None: infer(session, observation)
        one.policy.gate.clear()
        assert "this session is lost" in a.ask(request(0, "a"))
        assert len(one.policy.sessions) == 1 and len(one.server.table) == 0
        one.policy.gate.set()
        wait_for(lambda: not one.policy.sessions)
        assert isinstance(a.ask(request(0, "a")), np.ndarray) and len(one.policy.sessions) == 1


def test_a_step_that_is_slow_and_asks_is_cancelled_and_keeps_its_session():
    with served(limits=OwnerLimits(stuck_after_s=STUCK_S), errors="keep_open") as one, Client(one) as a:
        a.ask(request(0, "a"))
        one.policy.gate.clear()
        assert "nothing was changed" in a.ask(request(1, "a"))
        one.policy.gate.set()
        np.testing.assert_array_equal(a.ask(request(1, "a")), alone(request(0, "a"), request(1, "a"))[1])


def test_who_has_an_answer_is_not_told_of_a_hang():
    with served(errors="keep_open") as one, Client(one) as a:
        a.ask(request(0, "a"))
        (connection,) = one.server.connections
        for _ in range(3):
            one.server._loop.call_soon_threadsafe(connection.policy_hangs, "test")
        assert isinstance(a.ask(request(1, "a")), np.ndarray)


# -- the engine ---------------------------------------------------------------------------------------------------


def seen(number: int, session: str) -> dict[str, Any]:
    """A request with pictures of the checkpoint's size."""
    pictures = np.random.default_rng(number).integers(0, 256, (3, 180, 320, 3), dtype=np.uint8)
    return request(number, session, prompt=f"task {session}") | dict(zip(KEYS, pictures, strict=True))


def ask(client: Client, message: Any) -> Any:
    """Of a network on a machine that others use, too."""
    client.send(message)
    return client.receive(60)


@pytest.fixture
def engine() -> tuple[Any, Any]:
    """A tiny policy of the fused step in the deterministic tier, and its path, in which things fail."""
    pytest.importorskip("torch")
    from test.engine.faulty_path import make_faulty
    from wam_policy_ros.engine.config import EngineConfig

    return make_faulty(EngineConfig(evaluations=5, step="fused", deterministic=True))


def test_a_fault_of_one_client_is_an_error_for_it_and_bits_for_the_others(engine):
    from test.engine.faulty_path import Fault

    policy, path = engine
    names, said = ("a", "b"), {}
    with served(policy, errors="keep_open") as one, Client(one) as a, Client(one) as b:
        clients = dict(zip(names, (a, b), strict=True))
        wanted = {n: [ask(clients[n], seen(i, n)) for i in range(3)] for n in names}
        for client in (a, b):
            assert ask(client, {"endpoint": "reset"}) == "reset successful"
        for i in range(3):
            for point, kind in (("decode", "memory"), ("evaluate", "kernel"), ("prefill", "nan")) if i == 1 else ():
                path.arm(Fault(point, kind, 1))
                said[kind] = ask(a, seen(i, "a"))
                ready = one.http("/readyz")
                assert (ready[0] == 200) == (kind == "memory"), "a full device is no fault of the policy's"
                assert kind == "memory" or said[kind].partition(": ")[2].partition(" [log")[0] in ready[1]
                assert metric(one, "wam_openpi_ready") == (kind == "memory")
            for name in names[::-1] if i == 1 else names:
                np.testing.assert_array_equal(ask(clients[name], seen(i, name)), wanted[name][i])
        assert one.http("/readyz")[0] == 200, "as soon as a call has succeeded"
    assert said["kernel"].startswith("EngineError: the policy raised RuntimeError: CUDA error: invalid")
    assert said["nan"].startswith("EngineError: the network's action is not finite; the session is unchanged")
    assert said["memory"].startswith("Overloaded: the device has no memory for this step; nothing was changed")
    assert path.inner.pool.made == path.inner.pool.idle


def test_a_lost_device_ends_the_owner_at_once_and_says_the_way_back(engine):
    from test.engine.faulty_path import Fault

    policy, path = engine
    with served(policy, errors="keep_open") as one, Client(one) as a, Client(one) as b:
        assert all(isinstance(ask(c, seen(0, n)), np.ndarray) for c, n in ((a, "a"), (b, "b")))
        asked = path.device.asked
        path.arm(Fault("evaluate", "sticky", 2))
        said = [ask(a, seen(1, "a")), ask(b, seen(1, "b")), ask(b, seen(2, "c"))]
        assert said[0].startswith(
            "PolicyLost: the device answers no call any more; the policy and all its sessions are"
        )
        assert all("remedy: restart the process" in text for text in said), said
        # Before the owner has said so and after.
        assert all(re.match("NotReady: the policy(?:'s owner has ended| takes no calls); got: ", x) for x in said[1:])
        assert all("the device answers no call any more" in text for text in said[1:])
        wait_for(lambda: not one.owner.alive, 60)
        assert one.owner.status.phase is Phase.FAILED and path.device.asked == asked + 1, "nobody tries again"
        code, text, _ = one.http("/readyz")
        assert code == 503 and "failed: the device answers no call" in text and metric(one, "wam_openpi_ready") == 0
        with pytest.raises(InvalidStatus):
            Client(one)
        assert ask(b, {"endpoint": "reset"}) == "reset successful", "there is nothing left to free"


def test_wam_serve_ends_with_a_code_for_its_supervisor_when_the_device_is_lost(engine, monkeypatch):
    from test.engine.faulty_path import Fault

    policy, path = engine
    said: list[str] = []
    monkeypatch.setattr(serve_tool, "policy_factory", lambda *args: lambda progress: policy)
    monkeypatch.setattr(serve_tool, "say", lambda level, line: said.append(line))
    path.choose = lambda: Fault("prefill", "sticky")

    def client() -> None:
        wait_for(lambda: any("Application startup complete" in line for line in said), 60)
        (line,) = [x for x in said if "server listening on" in x]
        port = int(line.partition("127.0.0.1:")[2].partition(",")[0])
        one = type("One", (), {"url": lambda self, path: f"ws://127.0.0.1:{port}{path}"})()
        with Client(one) as a:  # type: ignore[arg-type]
            answers.append(ask(a, seen(0, "a")))

    answers: list[Any] = []
    thread = threading.Thread(target=client)
    thread.start()
    assert main(["serve", "--random-weights", "tiny", "--port", "0", "--no-warm-up"]) == 1
    thread.join(60)
    assert answers and answers[0].startswith("PolicyLost: ") and "the policy was lost; ending" in said


def test_wam_serve_can_be_stopped_while_a_call_hangs():
    words = [sys.executable, "-m", "test.serving.hanging_server"]
    said: list[str] = []
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as running:
        assert running.stderr is not None
        reader = threading.Thread(target=lambda: said.extend(iter(running.stderr.readline, "")), daemon=True)
        reader.start()
        try:
            wait_for(lambda: any("startup complete" in line for line in said), 60)
            (line,) = [x for x in said if "server listening on" in x]
            port = int(line.partition("127.0.0.1:")[2].partition(",")[0])
            with connect(f"ws://127.0.0.1:{port}", compression=None, proxy=None) as client:
                client.recv(timeout=20)
                client.send(pack(seen(0, "a")))
                wait_for(lambda: any("hanging" in line for line in said), 20)
                running.send_signal(signal.SIGTERM)
                assert running.wait(20) == 0
        finally:
            running.kill()
        reader.join(5)
    assert any("a step does not end; leaving without it" in line for line in said), said
