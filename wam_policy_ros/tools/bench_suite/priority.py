"""``wam bench priority``: a robot's step latency alone and beside busy clients, with and without its priority.

Robot and clients are jobs of one owner, as the node and the server submit them; what sockets and ROS add is measured by
``wam bench openpi`` and ``wam bench node``. Every client asks again as soon as it is answered; the robot waits for a
random time between answer and request, so that it comes at any point of a client's step. All runs are made with the
same sessions of the same policy, one after the other:

- *alone*: the robot, and nobody else;
- *priority*: its jobs run inside the clients' steps, between two evaluations;
- *restarts*: the same for a policy that cannot do that: clients' steps are interrupted and start again;
- *no priority*: the robot is a client like the others.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from wam_policy_ros.contract.errors import ConfigError, WamError
from wam_policy_ros.contract.fakes import example_observation
from wam_policy_ros.contract.interface import ActionChunk, Observation, Policy
from wam_policy_ros.contract.policy_thread import OwnerLimits, Phase, PolicyThread, Priority, Ticket
from wam_policy_ros.engine.policy import DreamZeroPolicy
from wam_policy_ros.tools.provenance import provenance

from .configurations import CONFIGURATIONS, engine_config, parse_changes
from .network import add_network_arguments, build, on_a_gpu
from .records import write_json

CALLS = 4
"""Of a window: the fifth begins anew."""

RUNS = ("alone", "priority", "restarts", "no priority")
ANSWER_S = 600.0
"""No step waits longer for its turn."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_network_arguments(parser)
    parser.add_argument("--config", choices=list(CONFIGURATIONS), help="default: fp8 on a GPU, plain on a CPU")
    parser.add_argument("--evaluations", type=int, default=8, help="of 16 solver steps: 16,8,7,6,5 or 4")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="engine option on top")
    parser.add_argument("--clients", type=int, default=4, help="that are always busy")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each of the four runs")
    parser.add_argument("--pause", type=float, default=0.5, metavar="SHARE", help="of the robot between two requests, "
                        "on average, in units of its step")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")


def run(args: argparse.Namespace) -> int:
    if args.clients < 1 or args.seconds <= 0 or args.pause <= 0:
        raise ConfigError("nothing to measure", got=f"--clients {args.clients} --seconds {args.seconds} --pause "
                          f"{args.pause}", expected="at least one client, positive times")  # fmt: skip
    gpu = on_a_gpu(args.device)
    name = args.config or ("fp8" if gpu else "plain")
    policy = build(args, engine_config(name, args.evaluations, gpu=gpu, changes=parse_changes(args.set)))
    report: dict[str, Any] = {
        "network": args.checkpoint or f"random {args.network}",
        "configuration": name,
        "evaluations": args.evaluations,
        "clients": args.clients,
        "seconds": args.seconds,
        "spec": dict(policy.spec.details) | {"weights": policy.spec.weights},
        "provenance": provenance(policy.network.device),
    }
    bench = Bench(policy, clients=args.clients)
    try:
        bench.warm_up()
        report["runs"] = {}
        for kind in RUNS:
            print(f"\r  {kind} ...          ", end="", file=sys.stderr, flush=True)
            report["runs"][kind] = bench.measure(kind, args.seconds, args.pause)
    finally:
        bench.stop()
    report["evaluation_s"] = report["runs"]["alone"]["evaluation_s"]
    judge(report)
    print(table(report))
    if args.json:
        write_json(report, args.json)
        print(f"written: {args.json}")
    return 0


class Interruptible:
    """The policy, which may be made to say that its steps cannot be interleaved."""

    def __init__(self, policy: DreamZeroPolicy) -> None:
        self._policy, self.interleaves = policy, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


@dataclass
class Caller:
    """A session and what became of its steps."""

    lane: str
    session: Any
    looks: list[Observation]
    calls: int = 0
    latencies: list[tuple[int, float]] = field(default_factory=list)  # call of the window, seconds
    chunks: list[ActionChunk] = field(default_factory=list)
    restarted: int = 0
    refused: int = 0

    def submit(self, owner: PolicyThread, priority: Priority) -> Ticket[ActionChunk]:
        seen = self.looks[self.calls % CALLS if self.calls < CALLS else 1 + self.calls % (CALLS - 1)]

        def work(policy: Policy, cancelled: Callable[[], bool]) -> ActionChunk:
            return policy.infer(self.session, seen, cancelled=cancelled)

        return owner.submit(
            work, lane=self.lane, priority=priority, preempt=priority is Priority.ROBOT, about=lambda: self.session
        )

    def step(self, owner: PolicyThread, priority: Priority) -> float | None:
        """Seconds from the request to the answer; None: it was refused."""
        begin = time.perf_counter()
        ticket = self.submit(owner, priority)
        try:
            chunk = ticket.result(ANSWER_S)
        except WamError:
            self.refused += 1
            return None
        finally:
            self.restarted += ticket.preemptions
        took = time.perf_counter() - begin
        self.latencies.append((self.calls % CALLS, took))
        self.chunks.append(replace(chunk, video=None))
        self.calls += 1
        return took

    def forget(self) -> None:
        """What was measured; the session goes on."""
        self.latencies, self.chunks, self.restarted, self.refused = [], [], 0, 0


class Bench:
    """Owner, robot and clients; ``warm_up`` first, ``stop`` at the end."""

    def __init__(self, policy: DreamZeroPolicy, *, clients: int) -> None:
        self._policy = Interruptible(policy)
        self.owner = PolicyThread(
            lambda progress: self._policy,  # type: ignore[arg-type,return-value]
            log=lambda level, line: print(line, file=sys.stderr),
            limits=OwnerLimits(max_preemptions=8),
            warm_up=False,
        )
        self._step_s = 0.0  # of the robot, without waiting
        self.owner.start()
        while self.owner.status.phase is not Phase.READY:
            time.sleep(0.01)
        spec = policy.spec
        later = len(spec.frame_offsets)

        def caller(number: int, lane: str) -> Caller:
            session = self.owner.submit(lambda p, c: p.open(seed=number), lane=lane).result()
            looks = [example_observation(spec, frames=1 if i == 0 else later, seed=10 * number + i,
                                         prompt=f"put block {number} into the box") for i in range(CALLS)]  # fmt: skip
            return Caller(lane, session, [replace(look, want_video=False) for look in looks])

        self.robot = caller(0, "robot")
        self.clients = [caller(i + 1, f"client {i + 1}") for i in range(clients)]

    def warm_up(self) -> None:
        """Every session through a whole window and its restart, so that whatever is recorded at first use is there."""
        for caller in (self.robot, *self.clients):
            for _ in range(CALLS + 1):
                caller.step(self.owner, Priority.CLIENT)
        self._step_s = self.robot.chunks[-1].timings_s["total"]
        for caller in (self.robot, *self.clients):
            caller.forget()

    def measure(self, kind: str, seconds: float, pause: float) -> dict[str, Any]:
        """One run; JSON-serialisable."""
        self._policy.interleaves = kind != "restarts"
        before, stop = self.owner.traffic, threading.Event()
        end = time.monotonic() + seconds
        threads = [
            threading.Thread(target=self._client, args=(c, stop), daemon=True)
            for c in (self.clients if kind != "alone" else [])
        ]
        for thread in threads:
            thread.start()
        self._robot(Priority.CLIENT if kind == "no priority" else Priority.ROBOT, end, pause)
        stop.set()
        for thread in threads:
            thread.join()
        took = time.monotonic() - end + seconds
        after = self.owner.traffic
        chunks = [chunk for c in self.clients for chunk in c.chunks]
        found = {
            "robot_s": _spread([s for _, s in self.robot.latencies]),
            "robot_s_by_call": {
                str(call): _spread([s for at, s in self.robot.latencies if at == call])
                for call in sorted({at for at, _ in self.robot.latencies})
            },
            "client_s": _spread([s for c in self.clients for _, s in c.latencies]),
            "client_steps_per_s": len(chunks) / took,
            "client_steps": [len(c.chunks) for c in self.clients],
            "client_own_s": _spread([chunk.timings_s["total"] for chunk in chunks]),
            "client_interrupted_s": _spread([chunk.timings_s.get("interrupted", 0.0) for chunk in chunks]),
            "interleaved": after.interleaved - before.interleaved,
            "restarted": sum(c.restarted for c in self.clients),
            "refused": sum(c.refused for c in self.clients),
            "evaluation_s": max(
                (c.timings_s["denoise"] / len(c.info["evaluated"]) for c in self.robot.chunks), default=0.0
            ),
            "wall_s": took,
        }
        for caller in (self.robot, *self.clients):
            caller.forget()
        return found

    def _robot(self, priority: Priority, end: float, pause: float) -> None:
        chance = random.Random(1)
        while time.monotonic() < end or not self.robot.latencies:
            time.sleep(chance.uniform(0.0, 2.0 * pause * self._step_s))
            self.robot.step(self.owner, priority)

    def _client(self, caller: Caller, stop: threading.Event) -> None:
        while not stop.is_set():
            caller.step(self.owner, Priority.CLIENT)

    def stop(self) -> None:
        self.owner.stop(60.0)


def judge(report: dict[str, Any]) -> None:
    """Adds to every run how far its p99 is above that of the robot alone, in seconds and evaluations."""
    alone = report["runs"]["alone"]["robot_s"]
    for found in report["runs"].values():
        above = found["robot_s"]["p99"] - alone["p99"] if found["robot_s"]["n"] else None
        found["p99_above_alone_s"] = above
        found["p99_above_alone_evaluations"] = None if above is None else above / report["evaluation_s"]


def table(report: dict[str, Any]) -> str:
    """For people."""
    lines = [
        f"{report['network']}, {report['configuration']}, {report['spec']['evaluations']} evaluations, "
        f"{report['clients']} busy clients; an evaluation takes {report['evaluation_s'] * 1e3:.1f} ms",
        f"{'robot, ms':14}{'p50':>9}{'p99':>9}{'max':>9}{'n':>6}{'p99 above alone':>24}   "
        f"{'clients: steps/s':>16}{'restarted':>11}{'refused':>9}",
    ]
    for kind, found in report["runs"].items():
        robot, above = found["robot_s"], found["p99_above_alone_s"]
        numbers = "".join(f"{robot[k] * 1e3:9.1f}" for k in ("p50", "p99", "max")) + f"{robot['n']:6}"
        more = f"{above * 1e3:8.1f} = {found['p99_above_alone_evaluations']:5.2f} eval."
        lines.append(f"{kind:14}{numbers}{more:>24}   {found['client_steps_per_s']:16.2f}{found['restarted']:11}"
                     f"{found['refused']:9}")  # fmt: skip
    return "\n".join(lines)


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {"n": 0, "p50": 0.0, "p99": 0.0, "max": 0.0}
    p50, p99 = np.percentile(values, (50, 99))
    return {"n": len(values), "p50": float(p50), "p99": float(p99), "max": max(values)}
