"""Who has memory at a policy that has it for two sessions: the robot always, clients what is left."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from test.engine.replica_fakes import Bounded, bounded
from test.serving.harness import Client, RememberingPolicy, request, served, small_spec, wait_for
from wam_policy_ros.contract.errors import Overloaded
from wam_policy_ros.contract.fakes import example_observation
from wam_policy_ros.contract.policy_thread import Phase
from wam_policy_ros.engine.replicas.policy import Replicas
from wam_policy_ros.ros.worker import InferenceWorker, Request
from wam_policy_ros.serving.sessions import SessionTable


class Pending:
    """Stands for a PendingObservation."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    def materialise(self, cameras: Any, *, first_call: bool) -> Any:
        return example_observation(self.spec, frames=1 if first_call else 4)


class Robot:
    """A worker whose policy others may use as well."""

    def __init__(self, make: Any) -> None:
        self.policy: Any = None
        self.lines: list[str] = []

        def made(progress: Any) -> Any:
            self.policy = make()
            return self.policy

        self.worker = InferenceWorker(
            made, notify=lambda: None, log=lambda level, line: self.lines.append(f"{level}: {line}"),
            after_step=lambda *_: None,
        )  # fmt: skip
        self.worker.start()
        wait_for(lambda: self.worker.status.phase is Phase.READY, 30.0)
        self.do(lambda policy, cancelled: None)  # behind the robot's first job

    def do(self, work: Any, **options: Any) -> Any:
        return self.worker.owner.submit(work, lane="client", **options).result(10.0)

    def opens(self) -> Any:
        return self.do(lambda policy, cancelled: policy.open())

    def closes(self, session: Any) -> None:
        self.do(lambda policy, cancelled: policy.close(session), about=lambda: session)

    def step(self, generation: int) -> Any:
        self.worker.new_generation(generation)
        now_s = time.monotonic()
        self.worker.submit(Request(generation, f"robot {generation}", Pending(self.policy.spec), now_s))  # type: ignore[arg-type]
        found: list[Any] = []
        wait_for(lambda: found.append(self.worker.take_result()) or found[-1], 10.0)
        return found[-1]


@pytest.fixture
def robot() -> Iterator[Robot]:
    robot = Robot(Bounded)
    yield robot
    assert robot.worker.stop(5.0)
    assert robot.policy.details["sessions_open"] <= 1, "the robot has left"


def test_the_robots_place_is_kept_from_the_beginning_and_between_its_episodes(robot: Robot) -> None:
    assert "info: this GPU holds 2 sessions" in robot.lines
    client = robot.opens()
    for generation in range(1, 4):
        with pytest.raises(Overloaded, match="2 open"):
            robot.opens()
        assert robot.step(generation).error is None
    robot.worker.new_generation(9)  # its session is closed, its place is not
    with pytest.raises(Overloaded):
        robot.opens()
    robot.closes(client)
    client = robot.opens()
    assert robot.policy.most == 2 and not [line for line in robot.lines if line.startswith(("warn", "error"))]


def test_a_robot_alone_has_a_policy_for_one_session() -> None:
    robot = Robot(lambda: Bounded(places=1))
    assert [robot.step(g).error for g in range(1, 4)] == [None] * 3
    assert robot.worker.stop(5.0) and robot.policy.details["sessions_open"] == 0


def test_a_policy_without_bounds_is_asked_for_nothing() -> None:
    robot = Robot(RememberingPolicy)
    assert robot.step(1).error is None and robot.policy.opened == 2, "the warm-up and the episode"
    assert robot.worker.stop(5.0)


def test_the_robots_place_on_one_of_several_replicas() -> None:
    robot = Robot(lambda: Replicas(bounded, 2))
    try:
        spec = robot.worker.status.spec
        assert spec is not None and spec.details["sessions_capacity"] == 4
        assert spec.details["memory"] == "each of 2 replicas: this GPU holds 2 sessions"
        held = [robot.opens() for _ in range(3)]
        assert sorted(session.place for session in held).count(0) in (1, 2)
        with pytest.raises(Overloaded):
            robot.opens()
        assert robot.step(1).error is None and robot.step(2).error is None
        places = robot.worker.owner.places
        assert [place.details["sessions_open"] for place in places] == [2, 2]
        assert [place.details["memory_bytes"] for place in places] == [{"windows": 200}] * 2
    finally:
        assert robot.worker.stop(10.0)


def test_a_server_refuses_what_there_is_no_memory_for_and_says_how_much_there_is() -> None:
    spec = small_spec(details={"sessions_capacity": 2, "session_bytes": 7, "memory": "this GPU holds 2 sessions"})
    policy = RememberingPolicy(spec)
    policy.details = {"sessions_capacity": 2, "sessions_open": 1, "memory_bytes": {"weights": 5, "host": 3}}  # type: ignore[attr-defined]
    with served(policy, errors="keep_open") as one, Client(one) as client:
        told = json.loads(one.http("/info")[1])["contract"]["details"]
        assert (told["memory"], told["session_bytes"]) == ("this GPU holds 2 sessions", 7)
        for name in ("a", "b"):
            assert not isinstance(client.ask(request(0, session_id=name)), str)
        refused = client.ask(request(0, session_id="c"))
        assert "Overloaded" in refused and "2 of 2 in use; there is memory for 2 session(s)" in refused
        text = one.http("/metrics")[1]
        for line in (
            'wam_openpi_sessions_capacity{replica="0"} 2.0',
            'wam_openpi_sessions_open{replica="0"} 1.0',
            'wam_openpi_memory_bytes{of="weights",replica="0"} 5.0',
            'wam_openpi_memory_bytes{of="host",replica="0"} 3.0',
        ):
            assert line in text, line


@pytest.mark.parametrize(("capacity", "room"), [(5, 3), (1, 0)])
def test_a_robots_server_leaves_the_robots_place_alone(capacity: int, room: int) -> None:
    policy = RememberingPolicy(small_spec(details={"sessions_capacity": capacity}))
    with served(policy, errors="keep_open", max_sessions=3) as one:
        one.server._reserved = 1
        one.server._bound_sessions(policy.spec)
        with Client(one) as client:
            answers = [client.ask(request(0, session_id=f"s{i}")) for i in range(4)]
        assert [not isinstance(a, str) for a in answers] == [i < room for i in range(4)]
        assert ("session(s), 1 of them the robot's" in answers[3]) == (room < 3)


def test_who_is_refused_is_told_that_memory_is_being_freed() -> None:
    table = SessionTable(max_sessions=2, idle_s=0.0, resume_s=0.0)
    holder = object()
    table.take("a", holder)
    table.freeing = 1
    with pytest.raises(Overloaded, match="1 of 2 in use, the memory of 1 more is being freed"):
        table.take("b", holder)
    table.made_room(1)
    table.take("b", holder)
