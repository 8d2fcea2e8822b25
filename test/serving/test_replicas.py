"""The endpoint in front of replicas: affinity, a replica that dies, readiness and metrics. Policies sleep and say where
they run."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wam_policy_ros.contract.interface import CameraSpec
from wam_policy_ros.contract.policy_thread import Phase
from wam_policy_ros.engine.replicas.policy import Replicas
from wam_policy_ros.engine.replicas.replica import Care

from .harness import HEIGHT, WIDTH, Client, Served, request, wait_for


def sleeper(latency_s: float, index: int, progress: Any) -> Any:
    """In a replica's process."""
    from dataclasses import replace

    from wam_policy_ros.contract.fakes import ScriptedPolicy

    def rows(observation: Any, step: int) -> np.ndarray:
        out = np.zeros((24, 8))
        out[0, :3] = os.getpid(), index, step
        return out

    policy = ScriptedPolicy(rows, latency_s=latency_s)
    small = tuple(CameraSpec(c.name, c.topic, HEIGHT, WIDTH) for c in policy.spec.cameras)
    policy.spec = replace(policy.spec, cameras=small)
    return policy


@pytest.fixture
def serve() -> Iterator[Any]:
    made: list[Served] = []

    def start(count: int, latency_s: float = 0.0, restart_s: float = 0.05, **config: Any) -> Served:
        make = functools.partial(sleeper, latency_s)

        def factory(progress: Any) -> Any:
            return Replicas(make, count, progress=progress, care=Care(restart_s=restart_s))

        one = Served(factory=factory, **config)
        made.append(one)
        wait_for(lambda: one.owner.status.phase is Phase.READY, 60)
        one.server.start()
        return one

    yield start
    for one in made:
        assert one.server.stop(5)
        assert one.owner.stop(10)


def where(answer: Any) -> tuple[int, int]:
    """Process and step."""
    return int(answer[0, 0]), int(answer[0, 2])


def test_clients_are_spread_and_stay_where_they_began(serve: Any) -> None:
    one = serve(2)
    clients = [Client(one) for _ in range(4)]
    seen = [[where(c.ask(request(n, f"s{i}"))) for i, c in enumerate(clients)] for n in range(3)]
    processes = [pid for pid, _ in seen[0]]
    assert sorted(processes.count(pid) for pid in set(processes)) == [2, 2]
    assert seen == [[(pid, step) for pid in processes] for step in range(3)]
    # A client that comes back on another connection finds its session where it was.
    clients[0].drop()
    again = Client(one)
    assert where(again.ask(request(9, "s0"))) == (processes[0], 3)
    for client in (again, *clients[1:]):
        client.socket.close()
    wait_for(lambda: sum(p.sessions for p in one.owner.places) == 0, what="sessions are closed in their processes")


def test_two_serve_nearly_twice_as_many_requests_as_one(serve: Any) -> None:
    def seconds(count: int) -> float:
        one = serve(count, latency_s=0.15)
        clients = [Client(one) for _ in range(4)]
        for i, client in enumerate(clients):
            client.ask(request(0, f"s{i}"))

        def ask(i: int) -> None:
            for n in range(3):
                clients[i].ask(request(n, f"s{i}"))

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
        begin = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for client in clients:
            client.socket.close()
        return time.monotonic() - begin

    assert 1.5 < seconds(1) / seconds(2) < 2.1


def test_a_replica_that_dies_is_told_to_its_clients_alone(serve: Any) -> None:
    one = serve(2, restart_s=30.0, errors="keep_open")
    a, b = Client(one), Client(one)
    (dead, _), (alive, _) = where(a.ask(request(0, "a"))), where(b.ask(request(0, "b")))
    assert dead != alive
    code, body, _ = one.http("/readyz")
    assert (code, body) == (200, "ready: 2 of 2 replicas\n")
    os.kill(dead, signal.SIGKILL)
    wait_for(lambda: one.http("/readyz")[1] != body)
    code, body, _ = one.http("/readyz")
    assert code == 200 and "1 of 2 replicas" in body and "SIGKILL" in body
    told = a.ask(request(1, "a"))
    assert isinstance(told, str) and told.startswith("ReplicaDied") and "new session" in told
    assert where(b.ask(request(1, "b"))) == (alive, 1)
    assert where(a.ask(request(2, "a"))) == (alive, 0)  # afresh, where there is one
    metrics = one.http("/metrics")[1].splitlines()
    up = {line for line in metrics if line.startswith("wam_openpi_replica_up")}
    assert {line.split()[-1] for line in up} == {"0.0", "1.0"} and len(up) == 2
    held = sum(float(line.split()[-1]) for line in metrics if line.startswith("wam_openpi_replica_sessions{"))
    calls = sum(float(line.split()[-1]) for line in metrics if line.startswith("wam_openpi_replica_calls_total"))
    assert (held, calls) == (2.0, 4.0) and "wam_openpi_ready 1.0" in metrics
    os.kill(alive, signal.SIGKILL)
    wait_for(lambda: one.http("/readyz")[0] == 503)
    assert "replica 0" in one.http("/readyz")[1] and "replica 1" in one.http("/readyz")[1]
    for client in (a, b):
        client.socket.close()


def test_it_comes_back_and_is_counted(serve: Any) -> None:
    one = serve(2)
    with Client(one) as a:
        pid, _ = where(a.ask(request(0, "a")))
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: any(p.details["restarts"] and not p.trouble for p in one.owner.places), 30)
        assert one.http("/readyz")[1] == "ready: 2 of 2 replicas\n"
        assert [line for line in one.http("/metrics")[1].splitlines()
                if line.startswith("wam_openpi_replica_restarts_total") and line.endswith(" 1.0")]  # fmt: skip
        assert any("is back" in line for line in one.lines)
    assert not Path(f"/proc/{pid}").exists()
