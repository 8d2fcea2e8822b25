"""Clients and a robot that use one policy for a while, in which things fail: what each of them got, and what is left.

Everything is drawn from one seed, but for how the threads take turns.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from websockets.exceptions import ConnectionClosed

from test.engine.faulty_path import Fault, make_faulty
from test.engine.tiny_policy import look, make_policy
from test.serving.harness import KEYS, Client, Served, request, served, wait_for
from wam_policy_ros.contract.errors import Cancelled, EngineError, Overloaded, WamError
from wam_policy_ros.contract.policy_thread import OwnerLimits, Priority
from wam_policy_ros.engine.config import EngineConfig

CONFIG = EngineConfig(evaluations=5, step="fused", deterministic=True)
FAULTS = (
    Fault("evaluate", "kernel", 2), Fault("prefill", "kernel"), Fault("first frame", "memory"),
    Fault("evaluate", "memory", 3), Fault("encode", "library memory"), Fault("evaluate", "nan", 4),
    Fault("prefill", "nan"), Fault("text", "nan", 2), Fault("decode", "kernel"), Fault("text", "undetermined"),
)  # fmt: skip
HANG, STUCK_S = Fault("evaluate", "hang", 2), 1.5
STEPS = 5
"""Of the longest episode."""

PATIENCE_S = 60.0
"""A loaded machine is no fault."""


def seen(client: int, script: int, step: int, session: str) -> dict[str, Any]:
    """A request of an episode; the same for every session that plays it."""
    number = 10_000 * client + 100 * script + step
    pictures = np.random.default_rng(number).integers(0, 256, (3, 180, 320, 3), dtype=np.uint8)
    told = {"seed": 7 * client + script} if step == 0 else {}
    words = f"task {client} {script % 2}"
    return request(number, session, prompt=words, **told) | dict(zip(KEYS, pictures, strict=True))


@dataclass
class Process:
    """What a process holds, once nobody wants anything."""

    threads: int
    files: int
    rss_mib: float

    @classmethod
    def now(cls) -> Process:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            threading.active_count(), len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGESIZE") / 2**20
        )


@dataclass
class Tally:
    """What happened. ``sent`` and ``answered``: requests whose client stayed; ``left``: those whose client did not."""

    sent: int = 0
    answered: int = 0
    left: int = 0
    chunks: int = 0
    robot_chunks: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Soak:
    """One server, ``clients`` clients of ``scripts`` episodes each, and one robot.

    Args:
        fault_share: of the policy's calls that fail.
        hang_share: of those, how many do not end for a while instead.
    """

    def __init__(
        self, *, seed: int, clients: int = 3, scripts: int = 1, fault_share: float = 0.15, hang_share: float = 0.0
    ) -> None:
        self.hang_share = hang_share
        self.seed, self.clients, self.scripts, self.fault_share = seed, clients, scripts, fault_share
        self.policy, self.path = make_faulty(CONFIG)
        self.path.hang_s = 4 * STUCK_S
        self.tally, self._lock, self._until_s = Tally(), threading.Lock(), 0.0
        with served(make_policy(CONFIG)) as one, Client(one) as asks:
            self.alone = {(c, s): self._episode_alone(asks, c, s) for c in range(clients) for s in range(scripts)}
        self._robot_alone = self._robot_steps()

    def _episode_alone(self, asks: Client, client: int, script: int) -> list[Any]:
        """Answers of a server that has nothing else to do, and in which nothing fails."""
        answers = []
        for message in (*(seen(client, script, step, "alone") for step in range(STEPS)), {"endpoint": "reset"}):
            asks.send(message)
            answers.append(asks.receive(PATIENCE_S))
        assert answers.pop() == "reset successful"
        return answers

    def _robot_steps(self) -> list[Any]:
        policy = make_policy(CONFIG)
        session = policy.open()
        return [policy.infer(session, look(policy.spec, 900 + i)).actions for i in range(STEPS)]

    def run(self, seconds: float) -> None:
        """Until then everybody begins new episodes, and ends the last one. ``tally`` begins anew."""
        self.tally = Tally()
        rng = np.random.default_rng(self.seed)

        def choose() -> Fault | None:
            if rng.random() >= self.fault_share:
                return None
            return HANG if rng.random() < self.hang_share else FAULTS[rng.integers(len(FAULTS))]

        self.path.choose = choose
        self._until_s = time.monotonic() + seconds
        limits = OwnerLimits(stuck_after_s=STUCK_S if self.hang_share else 120.0)
        options = {"errors": "keep_open", "resume_s": 60.0, "max_sessions": 2 * self.clients}
        with served(self.policy, limits, **options) as one:
            work = [threading.Thread(target=self._guarded, args=(self._client, one, c)) for c in range(self.clients)]
            work.append(threading.Thread(target=self._guarded, args=(self._robot, one)))
            for thread in work:
                thread.start()
            for thread in work:
                thread.join(seconds + 2 * PATIENCE_S)
            assert not any(thread.is_alive() for thread in work), "somebody waits for ever"
            self.path.choose = lambda: None
            pool = self.path.inner.pool  # type: ignore[attr-defined]
            wait_for(
                lambda: not len(one.server.table) and not one.owner.waiting and pool.made == pool.idle,
                PATIENCE_S,
                what="the end of every session",
            )
            wait_for(lambda: not one.server.connections, PATIENCE_S)
            said = one.http("/metrics")[1].splitlines()
        counted = sum(float(x.rpartition(" ")[2]) for x in said if x.startswith("wam_openpi_requests_total"))
        told = self.tally
        if not told.answered <= counted <= told.sent + told.left:
            told.wrong.append(f"the server counted {counted:.0f} requests")

    def _guarded(self, work: Any, *args: Any) -> None:
        try:
            work(*args)
        except BaseException as error:
            self.tally.wrong.append(f"{work.__name__} {args[1:]}: {type(error).__name__}: {error}")
            raise

    # -- a client -----------------------------------------------------------------------------------------------------

    def _client(self, one: Served, number: int) -> None:
        rng, episode = np.random.default_rng((self.seed, number)), 0
        client = Client(one)
        while time.monotonic() < self._until_s:
            script, name = int(rng.integers(self.scripts)), f"{self.seed}-{number}-{episode}"
            episode += 1
            step, steps = 0, int(rng.integers(1, STEPS + 1))
            while step < steps:
                wish = rng.random()
                if wish < 0.06 or (wish < 0.12 and step):
                    if half := wish < 0.06:  # gone while it waits: nobody knows whether the step counted
                        client.send(seen(number, script, step, name))
                        self._count(left=1)
                    client.drop()
                    client = Client(one)
                    if half:
                        self._reset(client, name)
                        step = 0
                    continue
                asked = seen(number, script, step, name)
                if wish < 0.2:
                    asked["deadline_ms"] = float(rng.uniform(1, 60))
                answer = self._ask(client, asked)
                if not isinstance(answer, str):
                    self._compare(answer, self.alone[number, script][step], f"client {number}, {script}, step {step}")
                    step += 1
                elif "lost" in answer or "has ended" in answer:  # the robot needed its memory
                    step = 0
            if rng.random() < 0.5:
                self._reset(client, name)
            else:
                self._nothing_more(client)
                client.socket.close()  # a goodbye
                client = Client(one)
        self._nothing_more(client)
        client.socket.close()

    def _ask(self, client: Client, message: Any) -> Any:
        """The one answer. A text is an error, and begins with its type."""
        self._count(sent=1)
        client.send(message)
        answer = client.receive(PATIENCE_S)
        self._count(answered=1)
        if isinstance(answer, str) and answer != "reset successful":
            with self._lock:
                self.tally.errors[answer.partition(":")[0]] += 1
        return answer

    def _reset(self, client: Client, name: str) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while self._ask(client, {"endpoint": "reset", "session_ids": [name]}) != "reset successful":
            assert time.monotonic() < end_s, "a session is not given back"

    def _nothing_more(self, client: Client) -> None:
        try:
            more = client.receive(0.01)
        except (TimeoutError, ConnectionClosed):
            return
        self.tally.wrong.append(f"an answer that nobody asked for: {more!r:.80}")

    # -- the robot ----------------------------------------------------------------------------------------------------

    def _robot(self, one: Served) -> None:
        """As ``InferenceWorker`` does: before all others, given room when there is none; a failure ends its episode."""
        held: dict[str, Any] = {"session": None, "step": 0}

        def step(policy: Any, cancelled: Any) -> Any:
            if held["session"] is None:
                held["session"], held["step"] = policy.open(), 0
            seen = look(policy.spec, 900 + held["step"])
            try:
                return policy.infer(held["session"], seen, cancelled=cancelled)
            except Overloaded:
                if not one.owner.make_room(policy):
                    raise
            return policy.infer(held["session"], seen, cancelled=cancelled)

        def end(policy: Any, cancelled: Any) -> None:
            session, held["session"] = held["session"], None
            if session is not None:
                policy.close(session)

        rng = np.random.default_rng((self.seed, 99))
        while time.monotonic() < self._until_s:
            ticket = one.owner.submit(step, lane="robot", priority=Priority.ROBOT, preempt=True, newest_wins=True)
            over = False
            try:
                chunk = ticket.result(PATIENCE_S)
                self._compare(chunk.actions, self._robot_alone[held["step"]], f"the robot's step {held['step']}")
                self._count(robot_chunks=1)
                held["step"] += 1
                over = held["step"] == STEPS
            except WamError as error:
                assert isinstance(error, EngineError | Overloaded) and not isinstance(error, Cancelled)
                with self._lock:
                    self.tally.errors[f"robot {type(error).__name__}"] += 1
                over = True
            if over or rng.random() < 0.1:
                one.owner.submit(end, lane="robot", priority=Priority.ROBOT, upkeep=True).result(PATIENCE_S)
            time.sleep(float(rng.uniform(0.1, 0.8)))
        one.owner.submit(end, lane="robot", priority=Priority.ROBOT, upkeep=True).result(PATIENCE_S)

    # -- what is counted ----------------------------------------------------------------------------------------------

    def _compare(self, got: Any, wanted: Any, what: str) -> None:
        if np.array_equal(got, wanted):
            self._count(chunks=1)
        else:
            self.tally.wrong.append(f"{what} is not what it is alone")

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, number in more.items():
                setattr(self.tally, name, getattr(self.tally, name) + number)
