"""``wam bench priority``: a robot's step latency alone and beside busy clients, with and without its priority.

Robot and clients are jobs of one owner, as the node and the server submit them; what sockets and ROS add is measured by
``wam bench openpi`` and ``wam bench node``. Every client asks again as soon as it is answered; the robot waits for a
random time between answer and request, so that it comes at any point of a client's step. All runs are made with the
same sessions of the same policy, one after the other:

- *first calls*: each client opens its session and makes the first calls of it, a whole window and the next one's first,
  while the robot, which has done so, goes on with its priority. Whatever is done once happens here: new instructions
  are encoded, and what was not prepared is recorded. The other runs hold nothing of that;
- *alone*: the robot, and nobody else;
- *priority*: its jobs run inside the clients' steps, between two evaluations;
- *restarts*: the same for a policy that cannot do that: clients' steps are interrupted and start again;
- *no priority*: the robot is a client like the others.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from wam_policy_ros.contract.errors import ConfigError, WamError
from wam_policy_ros.contract.fakes import example_observation
from wam_policy_ros.contract.interface import ActionChunk, Observation, Policy
from wam_policy_ros.contract.policy_thread import OwnerLimits, Phase, PolicyThread, Priority, Ticket
from wam_policy_ros.engine.fused_path import FusedPath
from wam_policy_ros.engine.memory import windows_of
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
REFUSALS = 5
"""A run whose robot was refused so often and never served is over when its time is."""
FIRST_PAUSE = 2.0
"""The robot's in the run of first calls: clients have most of the device, so that it does not take long."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_network_arguments(parser)
    parser.add_argument("--config", choices=list(CONFIGURATIONS), help="default: fp8 on a GPU, plain on a CPU")
    parser.add_argument("--evaluations", type=int, default=8, help="of 16 solver steps: 16,8,7,6,5 or 4")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="engine option on top")
    parser.add_argument("--clients", type=int, default=4, help="that are always busy")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run; default: 30")
    parser.add_argument("--steps", type=int, metavar="N", help="a run ends after so many steps of the robot, too")
    parser.add_argument("--runs", default=",".join(RUNS), metavar="RUN,...",
                        help="some of alone (always made), priority, restarts, no priority; default: all")  # fmt: skip
    parser.add_argument("--pause", type=float, default=0.5, metavar="SHARE", help="of the robot between two requests, "
                        "on average, in units of its step")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")


def run(args: argparse.Namespace) -> int:
    runs = _runs(args.runs)
    if args.clients < 1 or args.seconds <= 0 or args.pause <= 0 or (args.steps is not None and args.steps < 1):
        raise ConfigError("nothing to measure", got=f"--clients {args.clients} --seconds {args.seconds} --pause "
                          f"{args.pause} --steps {args.steps}",
                          expected="at least one client and one step, positive times")  # fmt: skip
    gpu = on_a_gpu(args.device)
    name = args.config or ("fp8" if gpu else "plain")
    # As a node for so many sessions does.
    changes = {"prepared_windows": windows_of(1 + args.clients)} | parse_changes(args.set)
    begin_s = time.perf_counter()
    policy = build(args, engine_config(name, args.evaluations, gpu=gpu, changes=changes))
    report: dict[str, Any] = {
        "complete": False,
        "network": args.checkpoint or f"random {args.network}",
        "configuration": name,
        "evaluations": args.evaluations,
        "clients": args.clients,
        "seconds": args.seconds,
        "ready_s": time.perf_counter() - begin_s,
        "spec": dict(policy.spec.details) | {"weights": policy.spec.weights},
        "provenance": provenance(policy.network.device),
        "runs": {},
    }

    def done(text: str) -> None:
        """What was measured so far is kept, whatever becomes of the rest."""
        print(f"\r  {text}, {time.perf_counter() - begin_s:.0f} s after the start", file=sys.stderr, flush=True)
        if args.json:
            write_json(report, args.json)

    done("ready")
    bench = Bench(policy, clients=args.clients)
    with _terminated_is_interrupted():
        try:
            report["first_calls"] = bench.first_calls(2 * args.seconds)
            done("first calls")
            for kind in runs:
                report["runs"][kind] = bench.measure(kind, args.seconds, args.pause, args.steps)
                judge(report)
                done(kind)
            report["complete"] = True
        except KeyboardInterrupt:
            print("\n  interrupted: what follows is what was measured until then", file=sys.stderr)
        finally:
            bench.stop()
    if report["runs"]:
        print(table(report))
    if args.json:
        write_json(report, args.json)
        print(f"written: {args.json}")
    served = all(found["robot_s"]["n"] for found in report["runs"].values())
    return 0 if report["complete"] and served else 1


def _runs(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in RUNS]:
        raise ConfigError("unknown run", got=", ".join(unknown), expected=f"some of {', '.join(RUNS)}")
    return [name for name in RUNS if name in names or name == "alone"]


@contextmanager
def _terminated_is_interrupted() -> Iterator[None]:
    """A time limit from outside (``timeout``) ends the process as Ctrl-C does, with a report."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Interruptible:
    """The policy, which may be made to say that its steps cannot be interleaved."""

    def __init__(self, policy: DreamZeroPolicy) -> None:
        self._policy, self.interleaves = policy, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


@dataclass
class Caller:
    """A session and what became of its steps.

    Attributes:
        number: seed of its noise, and whose pictures and instruction.
        latencies: of steps that succeeded: the call of the window, seconds.
    """

    number: int
    lane: str
    looks: list[Observation]
    session: Any = None
    calls: int = 0
    latencies: list[tuple[int, float]] = field(default_factory=list)
    chunks: list[ActionChunk] = field(default_factory=list)
    restarted: int = 0
    refused: int = 0

    def open(self, owner: PolicyThread, priority: Priority) -> float:
        """Seconds it took."""
        begin = time.perf_counter()
        job = owner.submit(lambda p, c: p.open(seed=self.number), lane=self.lane, priority=priority)
        self.session = job.result(ANSWER_S)
        return time.perf_counter() - begin

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
    """Owner, robot and clients; ``first_calls`` first, ``stop`` at the end."""

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
            looks = [example_observation(spec, frames=1 if i == 0 else later, seed=10 * number + i,
                                         prompt=f"put block {number} into the box") for i in range(CALLS)]  # fmt: skip
            return Caller(number, lane, [replace(look, want_video=False) for look in looks])

        self.robot = caller(0, "robot")
        self.clients = [caller(i + 1, f"client {i + 1}") for i in range(clients)]

    @property
    def recordings(self) -> int:
        """CUDA graphs so far; 0 where there are none."""
        path = self._policy.path
        return sum(len(cache) for cache in path.caches) if isinstance(path, FusedPath) else 0

    def first_calls(self, seconds: float) -> dict[str, Any]:
        """The robot's first window, alone; then those of the clients, with the robot going on. JSON-serialisable.

        Args:
            seconds: no client begins another call after this, so that what is slow does not last.

        Raises:
            Overloaded: there is no memory for so many sessions.
        """
        recorded = self.recordings
        opened = self.robot.open(self.owner, Priority.ROBOT)
        for _ in range(CALLS + 1):
            self.robot.step(self.owner, Priority.ROBOT)
        own = [s for _, s in self.robot.latencies]
        found: dict[str, Any] = {
            "prepared_recordings": recorded,
            "robot_open_s": opened,
            "robot_alone_s": own,
            "robot_alone_recordings": self.recordings - recorded,
        }
        if self.robot.chunks:
            self._step_s = self.robot.chunks[-1].timings_s["total"]
        self.robot.forget()
        recorded, end, failures = self.recordings, time.monotonic() + seconds, list[BaseException]()
        opens: list[float] = []

        def arrive(client: Caller) -> None:
            try:
                opens.append(client.open(self.owner, Priority.CLIENT))
                for call in range(CALLS + 1):
                    if call == 0 or time.monotonic() < end:
                        client.step(self.owner, Priority.CLIENT)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=arrive, args=(c,), daemon=True) for c in self.clients]
        for thread in threads:
            thread.start()
        self._robot(Priority.ROBOT, lambda: any(thread.is_alive() for thread in threads), FIRST_PAUSE)
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        beside = [s for _, s in self.robot.latencies]
        found |= {
            "robot_beside_s": _spread(beside),
            "client_open_s": opens,
            "client_first_s": [c.latencies[0][1] for c in self.clients if c.latencies],
            "client_calls": [c.calls for c in self.clients],
            "beside_recordings": self.recordings - recorded,
            "refused": self.robot.refused + sum(c.refused for c in self.clients),
            "robot_max_s": max([*own, *beside], default=None),
        }
        for caller in (self.robot, *self.clients):
            caller.forget()
        return found

    def measure(self, kind: str, seconds: float, pause: float, steps: int | None = None) -> dict[str, Any]:
        """One run; JSON-serialisable. It ends after so many seconds or steps of the robot."""
        recorded = self.recordings
        self._policy.interleaves = kind != "restarts"
        before, stop = self.owner.traffic, threading.Event()
        begin = time.monotonic()
        threads = [
            threading.Thread(target=self._client, args=(c, stop), daemon=True)
            for c in (self.clients if kind != "alone" else [])
        ]
        for thread in threads:
            thread.start()

        def more() -> bool:
            robot = self.robot
            if robot.latencies or robot.refused >= REFUSALS:
                return time.monotonic() < begin + seconds and (steps is None or len(robot.latencies) < steps)
            return True

        try:
            self._robot(Priority.CLIENT if kind == "no priority" else Priority.ROBOT, more, pause)
        finally:
            stop.set()
        for thread in threads:
            thread.join()
        took = time.monotonic() - begin
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
            "robot_refused": self.robot.refused,
            "recordings": self.recordings - recorded,
            "evaluation_s": max(
                (c.timings_s["denoise"] / len(c.info["evaluated"]) for c in self.robot.chunks), default=0.0
            ),
            "wall_s": took,
        }
        for caller in (self.robot, *self.clients):
            caller.forget()
        return found

    def _robot(self, priority: Priority, more: Callable[[], bool], pause: float) -> None:
        chance = random.Random(1)
        while more():
            time.sleep(chance.uniform(0.0, 2.0 * pause * self._step_s))
            self.robot.step(self.owner, priority)

    def _client(self, caller: Caller, stop: threading.Event) -> None:
        while not stop.is_set():
            caller.step(self.owner, Priority.CLIENT)

    def stop(self) -> None:
        self.owner.stop(60.0)


def judge(report: dict[str, Any]) -> None:
    """Adds how long an evaluation takes, and to every run how far its p99 is above that of the robot alone, in seconds
    and evaluations; None where the robot was never served."""
    runs = report["runs"]
    alone, evaluation_s = runs["alone"]["robot_s"], runs["alone"]["evaluation_s"]
    report["evaluation_s"] = evaluation_s
    for found in runs.values():
        above = found["robot_s"]["p99"] - alone["p99"] if found["robot_s"]["n"] and alone["n"] else None
        found["p99_above_alone_s"] = above
        found["p99_above_alone_evaluations"] = above / evaluation_s if above is not None and evaluation_s else None
    every = [found["robot_s"]["max"] for kind, found in runs.items() if kind in ("alone", "priority")]
    first = report.get("first_calls", {}).get("robot_max_s")
    report["robot_max_s_first_calls_included"] = max([*every, *([] if first is None else [first])])


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
        more = "never served" if above is None else (
            f"{above * 1e3:8.1f} = {found['p99_above_alone_evaluations']:5.2f} eval."
        )  # fmt: skip
        lines.append(f"{kind:14}{numbers}{more:>24}   {found['client_steps_per_s']:16.2f}{found['restarted']:11}"
                     f"{found['refused']:9}")  # fmt: skip
    first = report["first_calls"]
    beside = first["robot_beside_s"]
    lines += [
        f"before, while clients made their first calls: robot p50 {beside['p50'] * 1e3:.1f} ms, max "
        f"{beside['max'] * 1e3:.1f} ms of {beside['n']}, {first['beside_recordings']} recordings; its own first calls, "
        f"alone: {', '.join(f'{s * 1e3:.1f}' for s in first['robot_alone_s'])} ms, "
        f"{first['robot_alone_recordings']} recordings",
        f"largest latency of the robot with priority, first calls included: "
        f"{report['robot_max_s_first_calls_included'] * 1e3:.1f} ms; recordings in the runs: "
        f"{', '.join(str(found['recordings']) for found in report['runs'].values())}",
    ]
    return "\n".join(lines)


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {"n": 0, "p50": 0.0, "p99": 0.0, "max": 0.0}
    p50, p99 = np.percentile(values, (50, 99))
    return {"n": len(values), "p50": float(p50), "p99": float(p99), "max": max(values)}
