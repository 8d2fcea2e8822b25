"""The owner of a policy: order, fairness, cancellation, refusals, health. Waits for effects, never for time."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from wam_policy_ros.contract.errors import (
    Cancelled,
    CheckpointError,
    DeadlineExceeded,
    EngineError,
    InvalidState,
    NotReady,
    Overloaded,
    Superseded,
)
from wam_policy_ros.contract.fakes import HoldPolicy, ScriptedPolicy, example_observation
from wam_policy_ros.contract.policy_thread import OwnerLimits, Phase, PolicyThread, Priority, Ticket


def wait_for(true: Callable[[], bool], timeout_s: float = 5.0) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.001)


class Gate:
    """A job that waits, and says when it began."""

    def __init__(self, value: Any = None) -> None:
        self.entered, self.go, self.value, self.runs = threading.Event(), threading.Event(), value, 0

    def __call__(self, policy: Any, cancelled: Callable[[], bool]) -> Any:
        self.runs += 1
        self.entered.set()
        while not self.go.wait(0.001):
            if cancelled():
                raise Cancelled("between two evaluations")
        return self.value


class Owner:
    def __init__(self, **limits: Any) -> None:
        self.lines: list[str] = []
        self.thread = PolicyThread(
            lambda progress: HoldPolicy(), log=lambda level, text: self.lines.append(text), limits=OwnerLimits(**limits)
        )
        self.thread.start()
        wait_for(lambda: self.thread.status.phase is Phase.READY)

    def blocked(self, lane: str = "blocker") -> tuple[Gate, Ticket[Any]]:
        """Keep the thread busy until the gate opens."""
        gate = Gate()
        ticket = self.thread.submit(gate, lane=lane)
        assert gate.entered.wait(5)
        return gate, ticket


@pytest.fixture
def owner() -> Iterator[Owner]:
    one = Owner(max_queued=6, max_per_lane=3, max_preemptions=2)
    yield one
    assert one.thread.stop(5)


def order(owner: Owner, jobs: list[tuple[str, Priority]]) -> list[str]:
    gate, _ = owner.blocked()
    done: list[str] = []
    tickets = [owner.thread.submit(lambda p, c, n=n: done.append(n), lane=n[0], priority=p) for n, p in jobs]
    gate.go.set()
    for ticket in tickets:
        ticket.result(5)
    return done


def test_the_robot_comes_first_and_the_idle_last(owner: Owner) -> None:
    idle, client, robot = Priority.IDLE, Priority.CLIENT, Priority.ROBOT
    assert order(owner, [("i", idle), ("c1", client), ("c2", client), ("r1", robot), ("r2", robot)]) == [
        "r1", "r2", "c1", "c2", "i",
    ]  # fmt: skip


def test_lanes_take_turns_and_keep_their_own_order(owner: Owner) -> None:
    names = ["a1", "a2", "a3", "b1", "b2", "c1"]
    assert order(owner, [(n, Priority.CLIENT) for n in names]) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_full_lane_and_a_full_queue_refuse_but_upkeep_and_the_robot_get_in(owner: Owner) -> None:
    gate, _ = owner.blocked()
    for lane in "aaabbb":
        if lane == "b":
            continue
        owner.thread.submit(lambda p, c: None, lane=lane)
    with pytest.raises(Overloaded, match="one client"):
        owner.thread.submit(lambda p, c: None, lane="a")
    for lane in "bcd":
        owner.thread.submit(lambda p, c: None, lane=lane)
    with pytest.raises(Overloaded, match="too many calls wait"):
        owner.thread.submit(lambda p, c: None, lane="e")
    tickets = [
        owner.thread.submit(lambda p, c: 1, lane="a", upkeep=True),
        owner.thread.submit(lambda p, c: 1, lane="r", priority=Priority.ROBOT),
    ]
    gate.go.set()
    assert [t.result(5) for t in tickets] == [1, 1]
    assert owner.thread.submit(lambda p, c: 2, lane="e").result(5) == 2


def test_cancelling_a_waiting_job_and_a_running_one(owner: Owner) -> None:
    _gate, running = owner.blocked()
    ran: list[int] = []
    waiting = owner.thread.submit(lambda p, c: ran.append(1), lane="w")
    waiting.cancel()
    with pytest.raises(Cancelled):
        waiting.result(5)
    running.cancel(Cancelled("the client went away"))
    with pytest.raises(Cancelled, match="went away"):
        running.result(5)
    owner.thread.submit(lambda p, c: None, lane="x").result(5)
    assert ran == [] and owner.thread.waiting == 0 and owner.lines == []


def test_a_deadline_ends_a_running_job_and_stops_a_late_one_from_starting(owner: Owner) -> None:
    gate = Gate()
    soon = time.monotonic() + 0.02
    running = owner.thread.submit(gate, lane="a", deadline_s=soon)
    late = owner.thread.submit(lambda p, c: pytest.fail("started"), lane="b", deadline_s=soon)
    for ticket in (running, late):
        with pytest.raises(DeadlineExceeded):
            ticket.result(5)


def test_the_newest_observation_wins_in_its_own_lane_only(owner: Owner) -> None:
    gate, _ = owner.blocked()
    old = owner.thread.submit(lambda p, c: "old", lane="a")
    keep = owner.thread.submit(lambda p, c: "kept", lane="a", upkeep=True)
    other = owner.thread.submit(lambda p, c: "other", lane="b")
    new = owner.thread.submit(lambda p, c: "new", lane="a", newest_wins=True)
    with pytest.raises(Superseded):
        old.result(5)
    gate.go.set()
    assert [t.result(5) for t in (keep, other, new)] == ["kept", "other", "new"]


def test_the_robot_interrupts_a_clients_step_which_starts_again(owner: Owner) -> None:
    gate, step = owner.blocked()
    robot = owner.thread.submit(lambda p, c: "moved", lane="r", priority=Priority.ROBOT, preempt=True)
    assert robot.result(5) == "moved"
    wait_for(lambda: gate.runs == 2)
    gate.value = "done"
    gate.go.set()
    assert step.result(5) == "done" and step.preemptions == 1


def test_a_step_that_is_interrupted_again_and_again_is_refused(owner: Owner) -> None:
    gate, step = owner.blocked()
    for run in range(1, 4):
        wait_for(lambda run=run: gate.runs == run)
        owner.thread.submit(lambda p, c: None, lane="r", priority=Priority.ROBOT, preempt=True).result(5)
    with pytest.raises(Overloaded, match="robot"):
        step.result(5)


def test_upkeep_is_not_interrupted(owner: Owner) -> None:
    asked: list[bool] = []
    entered, go = threading.Event(), threading.Event()

    def free(policy: Any, cancelled: Callable[[], bool]) -> None:
        entered.set()
        go.wait(5)
        asked.append(cancelled())

    ticket = owner.thread.submit(free, lane="a", upkeep=True)
    entered.wait(5)
    robot = owner.thread.submit(lambda p, c: None, lane="r", priority=Priority.ROBOT, preempt=True)
    ticket.cancel()
    go.set()
    ticket.result(5), robot.result(5)
    assert asked == [False]


def test_health_follows_the_policy_not_the_clients(owner: Owner) -> None:
    def fail(error: Exception) -> None:
        def job(policy: Any, cancelled: Any) -> None:
            raise error

        with pytest.raises(Exception, match="x"):
            owner.thread.submit(job, lane="a").result(5)

    fail(InvalidState("x", field="x"))
    assert owner.thread.trouble() is None
    fail(RuntimeError("x cuda"))
    fail(EngineError("x"))
    assert "2 call(s) failed" in (owner.thread.trouble() or "") and "Traceback" in owner.lines[0]
    owner.thread.submit(lambda p, c: None, lane="a", upkeep=True).result(5)
    assert owner.thread.trouble(), "freeing memory proves nothing"
    owner.thread.submit(lambda p, c: None, lane="a").result(5)
    assert owner.thread.trouble() is None


def test_a_stuck_call_is_trouble() -> None:
    owner = Owner(stuck_after_s=0.02)
    gate, _ = owner.blocked()
    wait_for(lambda: "has been running" in (owner.thread.trouble() or ""))
    gate.go.set()
    wait_for(lambda: owner.thread.trouble() is None)
    assert owner.thread.stop(5)


def test_idle_for_ends_when_somebody_comes(owner: Owner) -> None:
    entered = threading.Event()

    def render(policy: Any, cancelled: Any) -> bool:
        entered.set()
        return owner.thread.idle_for(5.0)

    ticket = owner.thread.submit(render, lane="video", priority=Priority.IDLE)
    entered.wait(5)
    owner.thread.submit(lambda p, c: None, lane="r", priority=Priority.ROBOT)
    assert ticket.result(5) is False
    assert owner.thread.submit(lambda p, c: owner.thread.idle_for(0.001), lane="v").result(5) is True


def test_loading_and_failures_are_told_and_nothing_is_accepted_meanwhile() -> None:
    go, seen = threading.Event(), []

    def load(progress: Any) -> Any:
        progress("reading weights", 0.25)
        go.wait(5)
        raise CheckpointError("a shard is missing")

    owner = PolicyThread(load, log=lambda level, text: seen.append(text))
    owner.subscribe(lambda: seen.append((owner.status.phase, owner.status.fraction)))
    owner.start()
    wait_for(lambda: owner.status.message == "reading weights")
    with pytest.raises(NotReady, match="reading weights"):
        owner.submit(lambda p, c: None, lane="a")
    go.set()
    wait_for(lambda: owner.status.phase is Phase.FAILED)
    assert (Phase.LOADING, 0.25) in seen and "a shard is missing" in owner.status.message
    assert "failed: " in (owner.trouble() or "")
    assert owner.stop(5)


def test_stopping_ends_the_running_step_and_what_waits() -> None:
    owner = Owner()
    _, running = owner.blocked()
    waiting = owner.thread.submit(lambda p, c: None, lane="w")
    assert owner.thread.stop(5) and owner.thread.status.phase is Phase.STOPPED
    for ticket in (running, waiting):
        with pytest.raises(Cancelled):
            ticket.result(0)
    with pytest.raises(NotReady):
        owner.thread.submit(lambda p, c: None, lane="w")


def test_a_deaf_step_is_reported_as_hung() -> None:
    owner = Owner()
    go = threading.Event()
    owner.thread.submit(lambda p, c: go.wait(5), lane="deaf")
    wait_for(lambda: owner.thread.running_s > 0)
    assert not owner.thread.stop(0.02) and owner.thread.hung
    go.set()
    assert owner.thread.stop(5)


def test_nothing_of_a_finished_job_is_kept(owner: Owner) -> None:
    class Activations:
        pass

    def work(policy: Any, cancelled: Any, fail: bool) -> str:
        held = Activations()
        alive.append(weakref.ref(held))
        if fail:
            raise EngineError("x")
        return "done"

    alive: list[Any] = []
    gc.collect()
    gc.disable()
    try:
        good = owner.thread.submit(lambda p, c: work(p, c, False), lane="a")
        bad = owner.thread.submit(lambda p, c: work(p, c, True), lane="a")
        assert good.result(5) == "done" and isinstance(bad.future.exception(5), EngineError)
        owner.thread.submit(lambda p, c: None, lane="a").result(5)
        assert [one() for one in alive] == [None, None]
    finally:
        gc.enable()


def test_warm_up_makes_a_first_and_a_later_call() -> None:
    policy = ScriptedPolicy(lambda o, step: [[0.0] * 8] * 24, record=True)
    owner = PolicyThread(lambda progress: policy, log=lambda *_: None)
    owner.start()
    wait_for(lambda: owner.status.phase is Phase.READY)
    (session,) = policy.sessions
    assert session.closed and session.step == 2 and len(owner.status.warm_up_s) == 2
    observation = example_observation(policy.spec)
    chunk = owner.submit(lambda p, c: p.infer(p.open("s"), observation, cancelled=c), lane="a").result(5)
    assert chunk.session_id == "s" and owner.stop(5)
