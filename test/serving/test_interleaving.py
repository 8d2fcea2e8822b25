"""A server whose policy interleaves, beside a robot: what clients get, what they are told, and whose memory goes."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from test.serving.harness import Client, RememberingPolicy, Served, alone, request, served, wait_for
from wam_policy_ros.contract.errors import Cancelled, Overloaded
from wam_policy_ros.contract.policy_thread import Priority, Ticket
from wam_policy_ros.serving.codec import pack
from wam_policy_ros.serving.wire import RequestReader, WireRules


def same(a: Any, b: Any) -> bool:
    return bool(np.array_equal(a, b))


class Interleaved(RememberingPolicy):
    """Clients' steps wait at the gate, the robot's does not. ``room``: sessions there is memory for, from their first
    step on."""

    interleaves = True

    def __init__(self, room: int = 99) -> None:
        super().__init__()
        self.room = room

    def infer(self, session: Any, observation: Any, *, cancelled: Any = None) -> Any:
        if session.step == 0 and sum(m.step > 0 for m in self.sessions.values()) >= self.room:
            raise Overloaded("no window is free")
        if session.session_id != "robot":
            return super().infer(session, observation, cancelled=cancelled)
        was, self.gate = self.gate, _open()
        try:
            return super().infer(session, observation)
        finally:
            self.gate = was


def _open() -> threading.Event:
    gate = threading.Event()
    gate.set()
    return gate


def robot(one: Served, takes_s: float = 0.0) -> Ticket[Any]:
    """As the node's worker does it."""
    seen = RequestReader(one.policy.spec, WireRules()).read(pack(request(9))).observation  # type: ignore[union-attr]

    def work(policy: Any, cancelled: Any) -> Any:
        session = policy.open("robot")
        time.sleep(takes_s)
        try:
            while True:
                try:
                    return policy.infer(session, seen)
                except Overloaded:
                    if not one.owner.make_room(policy):
                        raise
        finally:
            policy.close(session)

    return one.owner.submit(work, lane="robot", priority=Priority.ROBOT, preempt=True)


def begun(one: Served, client: Client, message: Any) -> None:
    """The client's step waits at the gate."""
    one.policy.gate.clear()
    one.policy.entered.clear()
    client.send(message)
    assert one.policy.entered.wait(5)


def test_the_robots_step_runs_inside_a_clients_whose_reply_and_times_are_its_own():
    with served(Interleaved(), dialect="openpi") as one, Client(one) as client:
        begun(one, client, request(0))
        for _ in range(10):
            assert np.isfinite(robot(one, takes_s=0.02).result(5).actions).all()
        one.policy.gate.set()
        reply = client.receive()
        assert same(reply["actions"], alone(request(0))[0]) and one.policy.cancelled == 0
        timing = reply["server_timing"]
        assert timing["interrupted_ms"] >= 200.0
        text = one.http("/metrics")[1]
        for line in (
            "wam_openpi_jobs_interleaved_total 10.0",
            "wam_openpi_jobs_restarted_total 0.0",
            'wam_openpi_jobs_refused_total{reason="queue_full"} 0.0',
            'wam_openpi_jobs_waiting{priority="client"} 0.0',
        ):
            assert line in text, line
        (spent,) = (line.split()[1] for line in text.splitlines() if line.startswith("wam_openpi_infer_seconds_sum"))
        assert abs(1e3 * float(spent) - timing["infer_ms"]) < 1.0
        assert "interrupted_ms" not in client.ask(request(1))["server_timing"]


def test_memory_for_the_robot_comes_from_a_session_whose_step_is_not_under_way():
    """The step under way is given up for a moment, its session is not."""
    with (
        served(Interleaved(2), errors="keep_open") as one,
        Client(one) as busy,
        Client(one) as other,
    ):
        first = busy.ask(request(0, "busy"))
        other.ask(request(0, "other"))
        begun(one, busy, request(1, "busy"))
        robot(one).result(5)
        assert one.server.table.get("other") is None and one.owner.traffic.restarted == 1
        one.policy.gate.set()
        expected = alone(request(0, "busy"), request(1, "busy"))
        assert same(first, expected[0]) and same(busy.receive(), expected[1])
        assert "the robot needed its memory" in other.ask(request(1, "other"))


def test_if_there_is_no_other_the_step_is_given_up_before_its_session_is():
    with served(Interleaved(1), errors="keep_open") as one, Client(one) as client:
        client.ask(request(0, "a"))
        begun(one, client, request(1, "a"))
        robot(one).result(5)
        assert one.policy.cancelled == 1 and one.owner.traffic.restarted == 1
        one.policy.gate.set()
        assert "the robot needed its memory" in client.receive()
        assert same(client.ask(request(1, "a")), alone(request(1, "a"))[0]), "told once"


def test_a_client_that_leaves_inside_is_gone_after_the_robots_step():
    with served(Interleaved()) as one:
        client = Client(one)
        begun(one, client, request(0))
        moving = robot(one, takes_s=0.1)
        wait_for(lambda: moving.started_s is not None)
        client.socket.close()
        assert moving.result(5) is not None
        wait_for(lambda: not one.policy.sessions and not len(one.server.table))
        assert one.policy.cancelled == 1


def test_a_deadline_that_passes_inside_is_told():
    with served(Interleaved(), errors="keep_open") as one, Client(one) as client:
        begun(one, client, request(0, deadline_ms=600))
        moving = robot(one, takes_s=0.8)
        assert "DeadlineExceeded" in client.receive()
        assert not isinstance(moving.future.exception(5), Cancelled)
        one.policy.gate.set()
        assert same(client.ask(request(0)), alone(request(0))[0])
