"""The owner of a policy that interleaves: the robot's jobs run inside a client's. Waits for effects, never for time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from test.contract.test_policy_thread import wait_for
from wam_policy_ros.contract.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineError,
    InvalidState,
    Overloaded,
    SessionError,
)
from wam_policy_ros.contract.fakes import ScriptedPolicy, example_observation
from wam_policy_ros.contract.interface import interleaves
from wam_policy_ros.contract.policy_thread import OwnerLimits, Phase, PolicyThread, Priority, Ticket
from wam_policy_ros.contract.schedule import UPKEEP_S, Refusal

ROBOT = Priority.ROBOT


def still(latency_s: float = 0.0) -> ScriptedPolicy:
    return ScriptedPolicy(lambda o, step: [[0.0] * 8] * 24, interleaves=True, latency_s=latency_s)


class Step:
    """A client's step that asks until it is let go; ``value`` when it has ended."""

    def __init__(self, value: Any = "done") -> None:
        self.entered, self.go, self.value = threading.Event(), threading.Event(), value
        self.runs = self.questions = 0

    def __call__(self, policy: Any, cancelled: Callable[[], bool]) -> Any:
        self.runs += 1
        self.entered.set()
        while not self.go.wait(0.001):
            self.questions += 1
            if cancelled():
                raise Cancelled("between two evaluations")
        return self.value


class Owner:
    def __init__(self, **limits: Any) -> None:
        self.lines: list[str] = []
        self.thread = PolicyThread(
            lambda progress: still(), log=lambda level, text: self.lines.append(text), limits=OwnerLimits(**limits),
            warm_up=False,
        )  # fmt: skip
        self.thread.start()
        wait_for(lambda: self.thread.status.phase is Phase.READY)

    def client(self, lane: str = "client", session: Any = None, **options: Any) -> tuple[Step, Ticket[Any]]:
        step = Step()
        ticket = self.thread.submit(step, lane=lane, about=lambda: session, **options)
        assert step.entered.wait(5)
        return step, ticket

    def robot(self, work: Any = lambda p, c: "moved", lane: str = "robot", **options: Any) -> Ticket[Any]:
        return self.thread.submit(work, lane=lane, priority=ROBOT, **({"preempt": True} | options))


@pytest.fixture
def owner() -> Iterator[Owner]:
    one = Owner()
    yield one
    assert one.thread.stop(5)


def test_the_robots_step_runs_inside_the_clients_which_then_goes_on(owner: Owner) -> None:
    step, ticket = owner.client()
    for count in range(1, 13):  # more often than a step may be started again
        assert owner.robot().result(5) == "moved"
        assert owner.thread.traffic.interleaved == count
    step.go.set()
    assert ticket.result(5) == "done"
    assert (step.runs, ticket.preemptions, owner.thread.traffic.restarted) == (1, 0, 0)
    assert ticket.interrupted_s > 0


def test_the_time_of_what_ran_inside_is_not_the_steps(owner: Owner) -> None:
    step, ticket = owner.client()
    owner.robot(lambda p, c: time.sleep(0.05)).result(5)
    step.go.set()
    ticket.result(5)
    assert ticket.started_s is not None and ticket.ended_s is not None
    assert ticket.interrupted_s >= 0.05
    assert ticket.own_s == pytest.approx(ticket.ended_s - ticket.started_s - ticket.interrupted_s)
    (place,) = owner.thread.places
    assert place.calls == 2 and place.call_s < ticket.ended_s - ticket.started_s + 1e-3


def test_a_chunk_says_what_was_not_its_own_time() -> None:
    policy, own_s = still(0.03), 0.03
    seen, asked = example_observation(policy.spec), iter(range(10**6))
    chunk = policy.infer(policy.open(), seen, cancelled=lambda: bool(next(asked) == 0 and time.sleep(0.05)))
    assert chunk.timings_s["interrupted"] >= 0.05 and chunk.timings_s["total"] >= own_s
    assert "interrupted" not in policy.infer(policy.open(), seen).timings_s
    assert interleaves(policy) and not interleaves(object())


def test_only_what_is_more_urgent_runs_inside(owner: Owner) -> None:
    step, ticket = owner.client()
    other = owner.thread.submit(lambda p, c: "other", lane="other")
    idle = owner.thread.submit(lambda p, c: "idle", lane="idle", priority=Priority.IDLE)
    owner.robot().result(5)
    foreseen = owner.robot(lambda p, c: "frames", preempt=False)
    assert foreseen.result(5) == "frames", "whatever the robot wants, not its steps alone"
    assert not other.future.done() and not idle.future.done()
    assert owner.thread.traffic.waiting == {ROBOT: 0, Priority.CLIENT: 1, Priority.IDLE: 1}
    step.go.set()
    assert [t.result(5) for t in (ticket, other, idle)] == ["done", "other", "idle"]


def test_three_priorities_lie_inside_each_other(owner: Owner) -> None:
    idle, idle_ticket = owner.client("idle", priority=Priority.IDLE)
    client, client_ticket = owner.client("client")
    assert owner.robot().result(5) == "moved"
    assert len([p for p in owner.thread.places if p.running_s > 0]) == 1
    client.go.set()
    assert client_ticket.result(5) == "done"
    idle.go.set()
    assert idle_ticket.result(5) == "done" and owner.thread.traffic.interleaved == 2


def test_a_step_goes_on_between_two_jobs_of_a_robot_that_leaves_no_time(owner: Owner) -> None:
    step, ticket = owner.client()
    stop = threading.Event()

    def again(policy: Any, cancelled: Any) -> None:
        if not stop.is_set():
            owner.robot(again, lane="robot")

    owner.robot(again)
    wait_for(lambda: owner.thread.traffic.interleaved > 20)
    before = step.questions
    wait_for(lambda: step.questions > before + 20)
    step.go.set()
    assert ticket.result(5) == "done"
    stop.set()


@pytest.mark.parametrize("error", [InvalidState("x", field="x"), EngineError("x"), RuntimeError("x")])
def test_a_failure_inside_is_not_the_clients(owner: Owner, error: Exception) -> None:
    def fail(policy: Any, cancelled: Any) -> None:
        raise error

    step, ticket = owner.client()
    with pytest.raises(Exception, match="x"):
        owner.robot(fail).result(5)
    step.go.set()
    assert ticket.result(5) == "done" and step.runs == 1


def test_a_client_that_leaves_or_is_late_meanwhile_ends_after_the_robots_step(owner: Owner) -> None:
    for end in ("leaves", "late"):
        deadline_s = time.monotonic() + 0.5 if end == "late" else None
        step, ticket = owner.client(deadline_s=deadline_s)
        go = threading.Event()
        robot = owner.robot(lambda p, c, go=go: go.wait(5) and "moved")
        wait_for(lambda robot=robot: robot.started_s is not None or robot.future.done())
        if end == "leaves":
            ticket.cancel(Cancelled("the client went away"))
        else:
            wait_for(lambda deadline_s=deadline_s: time.monotonic() > deadline_s)
        go.set()
        with pytest.raises(DeadlineExceeded if end == "late" else Cancelled):
            ticket.result(5)
        assert robot.result(5) == "moved" and step.runs == 1


def test_stopping_ends_both() -> None:
    owner = Owner()
    _, ticket = owner.client()
    inner = Step()
    robot = owner.robot(inner)
    assert inner.entered.wait(5)
    assert owner.thread.stop(5)
    for one in (ticket, robot):
        with pytest.raises(Cancelled):
            one.result(0)


def test_nothing_about_the_session_of_a_suspended_step_runs_inside(owner: Owner) -> None:
    session, other = object(), object()
    step, ticket = owner.client(session=session)
    close = owner.robot(lambda p, c: "closed", lane="free", upkeep=True, about=lambda: session)
    assert owner.robot(about=lambda: other).result(5) == "moved"
    assert not close.future.done()
    step.go.set()
    assert (ticket.result(5), close.result(5)) == ("done", "closed")


def test_upkeep_that_has_waited_runs_inside_a_clients_step(owner: Owner) -> None:
    step, ticket = owner.client()
    free = owner.thread.submit(lambda p, c: "freed", lane="free", upkeep=True)
    owner.robot().result(5)
    free.submitted_s -= UPKEEP_S
    assert free.result(5) == "freed"
    step.go.set()
    assert ticket.result(5) == "done"


def test_without_memory_inside_the_robots_step_takes_the_place_of_the_clients(owner: Owner) -> None:
    """What a suspended step holds is not given up, so the step is."""
    step, ticket = owner.client()
    given: list[int] = []
    owner.thread.at_need(lambda policy: not given.append(1))  # type: ignore[func-returns-value]
    runs: list[tuple[bool, bool]] = []

    def hungry(policy: Any, cancelled: Any) -> str:
        runs.append((owner.thread.traffic.restarted > 0, owner.thread.make_room(policy)))
        if not all(runs[-1]):
            raise Overloaded("no memory")
        return "moved"

    assert owner.robot(hungry).result(5) == "moved"
    assert runs == [(False, False), (True, True)] and given == [1], "no session ends before the step is given up"
    wait_for(lambda: step.runs == 2)
    step.go.set()
    assert ticket.result(5) == "done" and ticket.preemptions == 1

    def always(policy: Any, cancelled: Any) -> None:
        raise Overloaded("no memory at all")

    step, ticket = owner.client()
    with pytest.raises(Overloaded, match="at all"):
        owner.robot(always).result(5)
    step.go.set()
    assert ticket.result(5) == "done"


def test_a_suspended_step_is_not_stuck_and_what_runs_inside_it_can_be() -> None:
    owner = Owner(stuck_after_s=0.2)
    step, ticket = owner.client()
    inner = Step()
    robot = owner.robot(inner)
    assert inner.entered.wait(5)
    wait_for(lambda: "has been running" in (owner.thread.trouble() or ""))
    inner.go.set()
    robot.result(5)
    step.go.set()
    assert ticket.result(5) == "done" and owner.thread.stop(5)
    assert ticket.started_s is not None and ticket.ended_s is not None
    assert ticket.interrupted_s >= robot.own_s > 0.2
    assert ticket.own_s <= ticket.ended_s - ticket.started_s - robot.own_s


def test_a_step_that_cannot_meet_its_deadline_is_not_started(owner: Owner) -> None:
    for _ in range(3):
        owner.thread.submit(lambda p, c: time.sleep(0.2), lane="a").result(5)
    hasty = owner.thread.submit(lambda p, c: pytest.fail("started"), lane="b", deadline_s=time.monotonic() + 0.1)
    with pytest.raises(DeadlineExceeded, match=r"cannot be met|has passed"):
        hasty.result(5)
    assert owner.thread.submit(lambda p, c: "made", lane="b", deadline_s=time.monotonic() + 60).result(5) == "made"
    refused = owner.thread.traffic.refused
    assert refused.get(Refusal.NO_TIME, 0) + refused.get(Refusal.LATE, 0) == 1


def test_refusals_are_counted_by_reason() -> None:
    owner = Owner(max_queued=3, max_per_lane=1)
    step, ticket = owner.client()
    waits = [owner.thread.submit(lambda p, c: None, lane=lane) for lane in "abc"]
    for lane in "ad":
        with pytest.raises(Overloaded):
            owner.thread.submit(lambda p, c: None, lane=lane)
    waits[0].cancel(DeadlineExceeded("whoever asked has looked at a clock"))
    step.go.set()
    ticket.result(5)
    assert owner.thread.traffic.refused == {Refusal.LANE_FULL: 1, Refusal.QUEUE_FULL: 1, Refusal.LATE: 1}
    assert owner.thread.stop(5)


def test_a_session_error_inside_says_nothing_of_the_policy(owner: Owner) -> None:
    def closed(policy: Any, cancelled: Any) -> None:
        raise SessionError("closed")

    step, ticket = owner.client()
    with pytest.raises(SessionError):
        owner.robot(closed).result(5)
    assert owner.thread.trouble() is None
    step.go.set()
    assert ticket.result(5) == "done"
