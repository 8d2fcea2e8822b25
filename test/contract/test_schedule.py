"""Who has the policy next: rules, and what follows from them in simulations. No thread, no clock, no torch."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

from wam_policy_ros.contract.jobs import JobQueue, OwnerLimits, Ticket
from wam_policy_ros.contract.schedule import UPKEEP_S, Do, Priority, Refusal, Running, Waiting, decide

ROBOT, CLIENT, IDLE = Priority
EVALUATION_S = 0.1


def running(priority: Priority = CLIENT, *, interleaves: bool = True, upkeep: bool = False, asked: float = 10.0):
    return Running(priority, interleaves, asked, upkeep)


def test_it_needs_neither_torch_nor_threads() -> None:
    code = "import sys, wam_policy_ros.contract.schedule; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "wam_policy_ros.contract.schedule" in found and not {"torch", "numpy"} & set(found)


@pytest.mark.parametrize("priority", list(Priority))
@pytest.mark.parametrize("busy", [False, True])
def test_an_idle_place_starts_whatever_may_run(priority, busy) -> None:
    decision = decide([Waiting(priority, 0.0, busy=busy)], None, 10.0)
    assert (decision.do, decision.job) == ((Do.WAIT, -1) if busy else (Do.START, 0))


def test_only_what_is_more_urgent_comes_between_and_only_what_may_interrupts() -> None:
    for (job, now), preempts, interleaves in itertools.product(
        itertools.product(Priority, Priority), (False, True), (False, True)
    ):
        waiting = [Waiting(job, 0.0, preempts=preempts)]
        do = decide(waiting, running(now, interleaves=interleaves), 10.0).do
        wanted = Do.WAIT if job >= now else Do.NEST if interleaves else Do.INTERRUPT if preempts else Do.WAIT
        assert do is wanted, (job, now, preempts, interleaves)
        assert decide(waiting, running(now, interleaves=interleaves, upkeep=True), 10.0).do is Do.WAIT


def test_what_came_after_the_question_waits_for_the_next_one() -> None:
    later = [Waiting(ROBOT, 10.5, preempts=True)]
    assert decide(later, running(asked=10.0), 11.0).do is Do.WAIT
    assert decide(later, running(asked=11.0), 11.0).do is Do.NEST
    assert decide(later, running(interleaves=False, asked=10.0), 11.0).do is Do.INTERRUPT


def test_old_upkeep_goes_first_but_not_into_a_step_of_the_robot() -> None:
    young, old = (Waiting(CLIENT, 10.0 - age, upkeep=True) for age in (UPKEEP_S / 2, 2 * UPKEEP_S))
    robot = Waiting(ROBOT, 9.9)
    assert decide([robot, young], None, 10.0).job == 0
    assert decide([robot, old], None, 10.0).job == 1
    assert decide([robot, old], running(), 10.0).job == 1
    assert decide([robot, young], running(), 10.0).job == 0
    assert decide([young], running(), 10.0).do is Do.WAIT
    assert decide([old], running(ROBOT), 10.0).do is decide([old], running(interleaves=False), 10.0).do is Do.WAIT


def test_deadlines() -> None:
    def found(deadline: float | None, least: float = 0.0, upkeep: bool = False) -> Refusal | None:
        jobs = [Waiting(ROBOT, 0.0), Waiting(CLIENT, 0.0, deadline, upkeep=upkeep, least_s=least)]
        decision = decide(jobs, None, 10.0)
        assert decision.do is Do.START or (decision.do, decision.job) == (Do.REFUSE, 1)
        return decision.refusal

    assert found(None) is found(10.0) is found(11.0, 1.0) is None
    assert found(9.9) is Refusal.LATE and found(10.5, 1.0) is Refusal.NO_TIME
    assert found(9.9, upkeep=True) is None, "memory is freed however late it is"


# -- simulations --------------------------------------------------------------------------------------------------


@dataclass
class Simulation:
    """One place, closed-loop clients, a robot that asks every ``period_s``; every decision is made by ``decide``."""

    interleaves: bool
    clients: int = 4
    client_steps: int = 8  # evaluations of a step
    robot_steps: int = 4
    period_s: float = 1.5
    deadline_s: float | None = None
    seed: int = 0
    now: float = 0.0
    busy_s: float = 0.0
    lost: int = 0
    latencies: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    done: dict[Any, int] = field(default_factory=dict)
    refused: dict[Refusal, int] = field(default_factory=dict)
    upkeep_waits: list[float] = field(default_factory=list)
    idle_starts: int = 0
    starts: list[tuple[float, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.queue = JobQueue(OwnerLimits(max_queued=16, max_per_lane=4))
        self.stack: list[Ticket[Any]] = []
        self.cost: dict[Ticket[Any], int] = {}
        self.next_robot = self.random.uniform(0, self.period_s)
        self.next_upkeep = 0.5
        self.until = 60.0
        for client in range(self.clients):
            self.submit(client, CLIENT, self.client_steps)
        self.submit("idle", IDLE, 1)

    def submit(self, lane: Any, priority: Priority, cost: int, **options: Any) -> None:
        deadline = None
        if self.deadline_s is not None and priority is CLIENT and not options.get("upkeep"):
            deadline = self.now + self.random.uniform(0.5, 1.5) * self.deadline_s
        ticket: Ticket[Any] = Ticket(lambda p, c: None, lane, priority, deadline, **({"upkeep": False} | options))
        ticket.submitted_s = self.now
        if self.queue.refusal(ticket, newest_wins=False) is None:
            self.queue.add(ticket, newest_wins=False)
            self.cost[ticket] = cost
        else:
            assert not ticket.upkeep
        assert len(self.queue) < 64, "bounded"

    def arrivals(self) -> None:
        while self.now >= self.next_robot and self.now < self.until:
            self.submit("robot", ROBOT, self.robot_steps, preempts=True)
            self.next_robot += self.period_s
        while self.now >= self.next_upkeep and self.now < self.until:
            self.submit(("free", self.next_upkeep), CLIENT, 0, upkeep=True)
            self.next_upkeep += self.random.uniform(1.0, 4.0)

    def decided(self, asked: float | None) -> tuple[Do, Ticket[Any] | None]:
        heads = self.queue.heads()
        top = self.stack[-1] if self.stack else None
        waiting = [
            Waiting(t.priority, t.submitted_s, t.deadline_s, upkeep=t.upkeep, preempts=t.preempts,
                    busy=self.queue.is_busy(t.lane), least_s=self.cost[t] * EVALUATION_S) for t in heads
        ]  # fmt: skip
        view = None if top is None or asked is None else Running(top.priority, self.interleaves, asked, top.upkeep)
        decision = decide(waiting, view, self.now)
        ticket = heads[decision.job] if decision.do is not Do.WAIT else None
        if decision.do is Do.REFUSE:
            assert ticket is not None and decision.refusal is not None and ticket.deadline_s is not None
            assert self.now + self.cost[ticket] * EVALUATION_S > ticket.deadline_s
            self.queue.remove(ticket)
            self.refused[decision.refusal] = self.refused.get(decision.refusal, 0) + 1
            self.ended(ticket)
        if decision.do in (Do.START, Do.NEST):
            assert ticket is not None
            self.begins(ticket, heads)
        return decision.do, ticket

    def begins(self, ticket: Ticket[Any], heads: list[Ticket[Any]]) -> None:
        others = [t for t in heads if t is not ticket and not self.queue.is_busy(t.lane)]
        if not ticket.upkeep:
            assert all(t.priority >= ticket.priority for t in others), "something more urgent waits"
            before = [at for at, lane in self.starts if lane == ticket.lane]
            for t in others:
                if before and t.priority is ticket.priority and not t.upkeep:
                    assert t.submitted_s >= before[-1] - 1e-9, f"{ticket.lane} has two turns while {t.lane} waits"
            self.starts.append((self.now, ticket.lane))
        assert ticket.deadline_s is None or self.now <= ticket.deadline_s
        self.waits += [self.now - ticket.submitted_s] if ticket.priority is ROBOT else []
        self.upkeep_waits += [self.now - ticket.submitted_s] if ticket.upkeep else []
        self.idle_starts += ticket.priority is IDLE
        self.queue.take(ticket)

    def ended(self, ticket: Ticket[Any]) -> None:
        if ticket.lane in range(self.clients) and self.now < self.until:
            self.submit(ticket.lane, CLIENT, self.client_steps)

    def run(self, ticket: Ticket[Any]) -> None:
        self.stack.append(ticket)
        given_up = False
        for at in range(self.cost[ticket]):
            self.arrivals()
            asked = self.now
            while (found := self.decided(asked))[0] in (Do.NEST, Do.REFUSE):
                if found[0] is Do.NEST:
                    self.run(found[1])  # type: ignore[arg-type]
            if found[0] is Do.INTERRUPT:
                self.lost += at
                given_up = True
                break
            self.now += EVALUATION_S
            self.busy_s += EVALUATION_S
        assert self.stack.pop() is ticket
        self.queue.done(ticket)
        if given_up:
            self.queue.put_back(ticket)
            self.starts = [(at, lane) for at, lane in self.starts if lane != ticket.lane]  # it is its old turn
            return
        if ticket.priority is ROBOT:
            self.latencies.append(self.now - ticket.submitted_s)
        self.done[ticket.lane] = self.done.get(ticket.lane, 0) + 1
        self.ended(ticket)

    def played(self) -> Simulation:
        while self.now < self.until or len(self.queue):
            self.arrivals()
            do, ticket = self.decided(None)
            if do is Do.START:
                self.run(ticket)  # type: ignore[arg-type]
            elif do is Do.WAIT:
                assert not len(self.queue)
                self.now = min(self.next_robot, self.next_upkeep, self.until + 1)
            assert self.now < 10 * self.until, "does not end"
        return self


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("robot_steps", [1, 4, 12])
def test_the_robot_waits_for_one_evaluation_at_most_and_clients_share_the_rest(seed, robot_steps) -> None:
    one = Simulation(interleaves=True, seed=seed, robot_steps=robot_steps).played()
    assert max(one.waits) <= EVALUATION_S + 1e-9 and len(one.waits) > 30
    assert max(one.latencies) <= (1 + robot_steps) * EVALUATION_S + 1e-9
    shares = [one.done[client] for client in range(one.clients)]
    assert min(shares) >= 1 and max(shares) - min(shares) <= 1
    # No evaluation is made twice: all that was computed ended in a chunk.
    steps = sum(shares) * one.client_steps + one.done["robot"] * robot_steps + one.done.get("idle", 0)
    assert one.lost == 0 and steps == pytest.approx(one.busy_s / EVALUATION_S)
    assert not one.refused and one.idle_starts <= 1
    assert max(one.upkeep_waits) <= UPKEEP_S + (robot_steps + 1) * EVALUATION_S + 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_without_interleaving_the_robot_is_as_fast_and_clients_lose_their_work(seed) -> None:
    restarted = Simulation(interleaves=False, seed=seed, period_s=1.0).played()
    nested = Simulation(interleaves=True, seed=seed, period_s=1.0).played()
    assert max(restarted.waits) <= EVALUATION_S + 1e-9
    assert restarted.lost > 50
    count = [sum(s.done.get(client, 0) for client in range(4)) for s in (restarted, nested)]
    assert count[1] > 40 and count[0] < count[1] / 2


def test_clients_go_on_while_the_robot_leaves_any_time() -> None:
    """The robot has the policy for 19 of 20 evaluations."""
    one = Simulation(interleaves=True, robot_steps=19, period_s=2.0).played()
    assert all(one.done[client] >= 1 for client in range(4)) and one.lost == 0


def test_a_robot_that_leaves_no_time_blocks_neither_a_begun_step_nor_upkeep() -> None:
    one = Simulation(interleaves=True, robot_steps=20, period_s=1.9)
    one.until = 40.0
    one.played()
    during = [lane for at, lane in one.starts if at < one.until]
    assert during.count("robot") > 15
    assert len(one.upkeep_waits) > 5 and max(one.upkeep_waits) <= UPKEEP_S + 21 * EVALUATION_S + 1e-9
    assert sum(one.done[client] for client in range(4)) >= 4, "all of them end once it stops"


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("interleaves", [False, True])
def test_nothing_begins_that_cannot_end_in_time(seed, interleaves) -> None:
    one = Simulation(interleaves=interleaves, seed=seed, deadline_s=3.0, period_s=2.0).played()
    assert sum(one.refused.values()) > 3 and sum(one.done[client] for client in range(4)) > 10
