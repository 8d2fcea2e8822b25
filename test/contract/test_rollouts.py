"""Rollouts: many episodes of one owner. Waits for effects, never for time."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from wam_policy_ros.contract import rollouts as rollouts_module
from wam_policy_ros.contract.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    EngineError,
    InvalidState,
    NotReady,
    Overloaded,
    SessionBusy,
    SessionError,
)
from wam_policy_ros.contract.fakes import ScriptedPolicy, example_observation
from wam_policy_ros.contract.interface import ActionChunk, Forks, Observation
from wam_policy_ros.contract.policy_thread import OwnerLimits, Phase, PolicyThread, Priority
from wam_policy_ros.contract.rollouts import Blocking, Rollouts

SPEC = ScriptedPolicy(lambda o, s: np.zeros((24, 8))).spec


def seen(value: float = 0.0, prompt: str = "go") -> Observation:
    base = example_observation(SPEC, prompt=prompt)
    return Observation(base.frames, {**base.state, "gripper_position": np.array([value])}, prompt)


@dataclass
class _Session:
    session_id: str
    seed: int | None
    sum: float = 0.0


@dataclass
class Adder:
    """Row 0 of a chunk: the sum of all grippers of the episode, its seed, its step. A prompt says what goes wrong."""

    windows: int = 100
    spec: Any = SPEC
    open_sessions: list[_Session] = field(default_factory=list)
    entered: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    order: list[str] = field(default_factory=list)
    most: int = 0

    def open(self, session_id: str | None = None, *, seed: int | None = None) -> _Session:
        return self._held(_Session(str(session_id), seed))

    def fork(self, session: _Session, session_id: str | None = None, *, seed: int | None = None) -> _Session:
        return self._held(_Session(str(session_id), session.seed if seed is None else seed, session.sum))

    def _held(self, session: _Session) -> _Session:
        if len(self.open_sessions) >= self.windows:
            raise Overloaded("no memory for another session's window")
        self.open_sessions.append(session)
        return session

    def infer(self, session: _Session, observation: Observation, *, cancelled: Any = None) -> ActionChunk:
        assert session in self.open_sessions
        self.order.append(session.session_id)
        wish = observation.prompt
        if wish in ("wait", "deaf"):
            self.entered.set()
            while not self.go.wait(0.001):
                if wish == "wait" and cancelled():
                    raise Cancelled("between two evaluations")
        if wish == "bad":
            raise InvalidState("no such state", field="state")
        if wish == "bug":
            raise ValueError("a bug")
        session.sum += float(observation.state["gripper_position"][0])
        rows = np.zeros((24, 8))
        rows[0, :2] = session.sum, session.seed or -1
        return ActionChunk(rows, SPEC.dt_s, None, session.session_id, 0)

    def reset(self, session: _Session) -> None:
        session.sum = 0.0

    def close(self, session: _Session) -> None:
        if session in self.open_sessions:
            self.open_sessions.remove(session)

    def render_video(self, chunk: ActionChunk) -> Any:
        return np.full((1, 2, 2, 3), 7, np.uint8)


def value(chunk: Any) -> float:
    assert isinstance(chunk, ActionChunk), chunk
    return float(chunk.actions[0, 0])


async def until(true: Any) -> None:
    for _ in range(5000):
        if true():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("did not happen")


def test_episodes_step_together_and_never_mix() -> None:
    policy = Adder()

    async def main() -> None:
        async with Rollouts(lambda progress: policy) as rollouts:
            episodes = [await rollouts.open(seed=k + 1) for k in range(5)]
            for turn in range(1, 4):
                chunks = await rollouts.step({e: seen(e.seed or 0) for e in episodes})
                for e, chunk in chunks.items():
                    assert value(chunk) == turn * e.seed and chunk.actions[0, 1] == e.seed  # type: ignore[union-attr]
                    assert chunk.session_id == e.session_id and e.steps == turn and e.last is chunk  # type: ignore[union-attr]
            assert policy.order == [e.session_id for e in episodes] * 3, "they take turns"
            assert rollouts.sessions == 5 and rollouts.spec is SPEC
            assert (await rollouts.render_video(chunk)).max() == 7  # type: ignore[union-attr, arg-type]
            await episodes[0].close()
            await episodes[0].close()
            assert len(policy.open_sessions) == 4, "freed when close returns"
        assert policy.open_sessions == []

    asyncio.run(main())


def test_an_error_stands_beside_its_own_episode() -> None:
    async def main() -> None:
        async with Rollouts(lambda progress: Adder()) as rollouts, Rollouts(lambda progress: Adder()) as others:
            good, bad, bug, closed = [await rollouts.open() for _ in range(4)]
            foreign = await others.open()
            await closed.close()
            wishes = {bad: "bad", bug: "bug", good: "go", closed: "go", foreign: "go"}
            found = await rollouts.step({e: seen(0.5, wish) for e, wish in wishes.items()})
            assert list(found) == list(wishes) and value(found[good]) == 0.5
            assert isinstance(found[bad], InvalidState) and isinstance(found[bug], EngineError)
            assert isinstance(found[closed], SessionError) and isinstance(found[foreign], SessionError)
            # Neither has moved.
            again = await rollouts.step({bad: seen(0.25), bug: seen(0.25)})
            assert [value(c) for c in again.values()] == [0.25, 0.25] and bad.steps == 1

    asyncio.run(main())


def test_forks_and_snapshots_go_on_by_themselves() -> None:
    policy = Adder()

    async def main() -> None:
        async with Rollouts(lambda progress: policy) as rollouts:
            episode = await rollouts.open(seed=3)
            await episode.step(seen(1.0))
            child, snapshot = await episode.fork(seed=9), await episode.snapshot()
            both = await rollouts.step({episode: seen(1.0), child: seen(0.5)})
            assert value(both[episode]) == 2.0 and value(both[child]) == 1.5
            assert (episode.seed, child.seed, child.steps) == (3, 9, 1)
            again = await asyncio.gather(*(snapshot.fork() for _ in range(3)))
            found = await rollouts.step({e: seen(k) for k, e in enumerate(again)})
            assert [value(c) for c in found.values()] == [1.0, 2.0, 3.0] and {e.seed for e in again} == {3}
            await snapshot.close()
            with pytest.raises(SessionError, match="closed"):
                await snapshot.fork()
            await episode.reset()
            assert value(await episode.step(seen(0.125))) == 0.125 and episode.steps == 1
            await episode.reset(seed=11)
            chunk = await episode.step(seen())
            assert (chunk.actions[0, 1], episode.seed) == (11, 11) and len(policy.open_sessions) == 5
        assert policy.open_sessions == []

    asyncio.run(main())


def test_what_cannot_be_had_changes_nothing() -> None:
    policy = Adder(windows=2)
    assert isinstance(policy, Forks)

    without: Any = SimpleNamespace(spec=SPEC, open=policy.open, infer=policy.infer, close=policy.close)
    assert not isinstance(without, Forks)

    async def main() -> None:
        async with Rollouts(lambda progress: policy) as rollouts:
            episode = await rollouts.open()
            await episode.step(seen(1.0))
            child = await episode.fork()
            for make in (episode.fork, episode.snapshot, rollouts.open):
                with pytest.raises(Overloaded):
                    await make()
            assert rollouts.sessions == 2 and value(await episode.step(seen(1.0))) == 2.0
            await child.close()
            assert value(await (await episode.fork()).step(seen())) == 2.0
        async with Rollouts(lambda progress: without) as rollouts:
            episode = await rollouts.open()
            with pytest.raises(SessionError, match="cannot be forked"):
                await episode.fork()
            assert rollouts.sessions == 1
        with pytest.raises(SessionError, match="not open"):
            await rollouts.open()

    asyncio.run(main())
    with pytest.raises(ConfigError):
        Rollouts(lambda progress: policy, priority=Priority.ROBOT)


def test_one_thing_at_a_time_in_an_episode() -> None:
    policy = Adder()

    async def main() -> None:
        async with Rollouts(lambda progress: policy) as rollouts:
            episode, other = await rollouts.open(), await rollouts.open()
            running = asyncio.create_task(episode.step(seen(1.0, "wait")))
            await until(policy.entered.is_set)
            for call in (lambda: episode.step(seen()), episode.fork, episode.snapshot, episode.reset):
                with pytest.raises(SessionBusy, match="a step is under way"):
                    await call()
            waiting = asyncio.create_task(other.step(seen(0.5)))
            policy.go.set()
            assert value(await running) == 1.0 and value(await waiting) == 0.5
            assert value(await episode.step(seen(1.0))) == 2.0

    asyncio.run(main())


def test_a_cancelled_step_leaves_the_episode_as_it_was() -> None:
    policy = Adder()

    async def main() -> None:
        async with Rollouts(lambda progress: policy) as rollouts:
            episode, other = await rollouts.open(), await rollouts.open()
            await episode.step(seen(1.0))
            running = asyncio.create_task(rollouts.step({episode: seen(9.0, "wait"), other: seen(9.0)}))
            await until(policy.entered.is_set)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert (episode.steps, other.steps) == (1, 0), "neither the one that ran nor the one that waited"
            found = await rollouts.step({episode: seen(1.0), other: seen(1.0)})
            assert [value(c) for c in found.values()] == [2.0, 1.0]
            with pytest.raises(DeadlineExceeded):
                await episode.step(seen(9.0, "wait"), timeout_s=0.01)
            assert value(await episode.step(seen(1.0))) == 3.0

    asyncio.run(main())


def test_a_step_that_could_not_be_stopped_any_more_is_told() -> None:
    policy = Adder()

    async def main() -> None:
        async with Rollouts(lambda progress: policy) as rollouts:
            episode = await rollouts.open()
            running = asyncio.create_task(episode.step(seen(1.0, "deaf")))
            await until(policy.entered.is_set)
            running.cancel()
            await asyncio.sleep(0)
            assert not running.done() and episode.steps == 0, "it waits for the end"
            policy.go.set()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert episode.steps == 1 and value(episode.last) == 1.0
            # Cancelled twice, a task waits no longer; the episode does.
            policy.entered.clear(), policy.go.clear()
            running = asyncio.create_task(episode.step(seen(1.0, "deaf")))
            await until(policy.entered.is_set)
            for _ in range(2):
                running.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await running
            with pytest.raises(SessionBusy):
                await episode.step(seen())
            policy.go.set()
            await until(lambda: episode.steps == 2)
            await asyncio.sleep(0.01)
            assert value(await episode.step(seen(1.0))) == 3.0

    asyncio.run(main())


def test_closing_gives_up_what_is_under_way() -> None:
    policy = Adder()

    async def main() -> None:
        async with Rollouts(lambda progress: policy) as rollouts:
            episode = await rollouts.open()
            running = asyncio.create_task(episode.step(seen(1.0, "wait")))
            await until(policy.entered.is_set)
            await episode.close()
            assert policy.open_sessions == [] and rollouts.sessions == 0
            with pytest.raises(Cancelled, match="closed"):
                await running
        policy.entered.clear()
        async with Rollouts(lambda progress: policy) as rollouts:
            for _ in range(3):
                episode = await rollouts.open()
            running = asyncio.create_task(episode.step(seen(1.0, "wait")))
            await until(policy.entered.is_set)
        assert policy.open_sessions == []
        with pytest.raises(Cancelled):
            await running

    asyncio.run(main())


@pytest.mark.parametrize("what", ["open", "fork"])
def test_what_nobody_waits_for_any_more_is_not_kept(what: str) -> None:
    policy = Adder()

    async def main() -> None:
        async with Rollouts(lambda progress: policy) as rollouts:
            first, blocker = await rollouts.open(), await rollouts.open()
            blocking = asyncio.create_task(blocker.step(seen(0.0, "deaf")))
            await until(policy.entered.is_set)
            making = asyncio.create_task(rollouts.open() if what == "open" else first.fork())
            await asyncio.sleep(0)
            making.cancel()
            with pytest.raises(asyncio.CancelledError):
                await making
            policy.go.set()
            await blocking
            await until(lambda: rollouts.sessions == 2)
            assert len(policy.open_sessions) == 2 and value(await first.step(seen(1.0))) == 1.0

    asyncio.run(main())


def test_only_so_many_are_in_flight() -> None:
    policy = Adder()
    owner = PolicyThread(lambda progress: policy, log=print, limits=OwnerLimits(max_queued=3), warm_up=False)
    owner.start()

    async def main() -> None:
        async with Rollouts(owner, max_in_flight=3) as rollouts:
            episodes = [await rollouts.open() for _ in range(20)]
            wishes = ["wait"] + ["go"] * 19
            together = rollouts.step({e: seen(1.0, w) for e, w in zip(episodes, wishes, strict=True)})
            running = asyncio.create_task(together)
            await until(lambda: policy.entered.is_set() and owner.waiting == 2)
            await asyncio.sleep(0.01)
            assert owner.waiting == 2, "one runs, two wait at the owner, the others here"
            policy.go.set()
            assert [value(c) for c in (await running).values()] == [1.0] * 20
        policy.go.clear(), policy.entered.clear()
        async with Rollouts(owner) as rollouts:
            episodes = [await rollouts.open() for _ in range(3)]
            blocking = asyncio.create_task(episodes[0].step(seen(0.0, "wait")))
            await until(policy.entered.is_set)
            opening = [asyncio.create_task(rollouts.open()) for _ in range(5)]
            await until(lambda: sum(task.done() for task in opening) == 2)
            policy.go.set()
            results = await asyncio.gather(*opening, return_exceptions=True)
            assert sum(isinstance(r, Overloaded) for r in results) == 2, "the owner's own bound"
            await blocking
            assert rollouts.sessions == 6

    asyncio.run(main())
    assert policy.open_sessions == [] and owner.stop(5)


def test_the_owner_is_shared_with_others_and_stays(shared: PolicyThread, adder: Adder) -> None:
    async def main() -> None:
        async with Rollouts(shared, priority=Priority.IDLE) as rollouts:
            episode = await rollouts.open("rollout")
            blocking = asyncio.create_task(episode.step(seen(0.0, "wait")))
            await until(adder.entered.is_set)
            robot = adder.open("robot")

            def step(policy: Any, cancelled: Any) -> ActionChunk:
                return policy.infer(robot, seen(4.0), cancelled=cancelled)

            ticket = shared.submit(step, lane="robot", priority=Priority.ROBOT, preempt=True)
            assert value(await asyncio.wrap_future(ticket.future)) == 4.0, "the robot does not wait for a rollout"
            adder.go.set()
            assert value(await blocking) == 0.0 and adder.order == ["rollout", "robot", "rollout"]
        assert shared.status.phase is Phase.READY and adder.open_sessions == [robot]

    asyncio.run(main())


def test_an_owner_that_ends_takes_its_episodes_along(shared: PolicyThread, adder: Adder) -> None:
    async def main() -> None:
        async with Rollouts(shared) as rollouts:
            episode = await rollouts.open()
            running = asyncio.create_task(episode.step(seen(1.0, "wait")))
            await until(adder.entered.is_set)
            await asyncio.to_thread(shared.stop, 5)
            with pytest.raises(Cancelled):
                await running
            assert episode._handle is None
            with pytest.raises(SessionError, match="owner has ended"):
                await episode.step(seen())
            with pytest.raises(NotReady):
                await rollouts.open()
            await episode.close()
        with pytest.raises(NotReady, match="stopped"):
            await Rollouts(shared).__aenter__()

    asyncio.run(main())


@pytest.fixture
def adder() -> Adder:
    return Adder()


@pytest.fixture
def shared(adder: Adder) -> Iterator[PolicyThread]:
    owner = PolicyThread(lambda progress: adder, log=print, warm_up=False)
    owner.start()
    yield owner
    assert owner.stop(5)


def test_a_policy_that_cannot_be_made_is_said_and_leaves_no_thread() -> None:
    def factory(progress: Any) -> Any:
        raise ConfigError("no such checkpoint", got="/nowhere")

    async def main() -> None:
        with pytest.raises(ConfigError, match="no such checkpoint"):
            async with Rollouts(factory):
                pytest.fail("entered")
        going, stop = threading.Event(), threading.Event()

        def slow(progress: Any) -> Any:
            going.set()
            while not stop.wait(0.001):
                progress("loading", 0.5)

        loading = asyncio.create_task(Rollouts(slow).__aenter__())
        await until(going.is_set)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading

    asyncio.run(main())
    assert not [t for t in threading.enumerate() if t.name.startswith("wam_policy_owner")]


def test_a_call_that_does_not_end_does_not_keep_who_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts_module, "STOP_S", 0.1)
    policy = Adder()

    async def main() -> None:
        async with Rollouts(lambda progress: policy) as rollouts:
            episode = await rollouts.open()
            step = asyncio.ensure_future(episode.step(seen(prompt="deaf")))
            await until(policy.entered.is_set)
        assert rollouts._owner.hung and not step.done()
        policy.go.set()
        await until(lambda: not rollouts._owner.alive)
        assert value(await step) == 0.0

    asyncio.run(asyncio.wait_for(main(), 30))


def test_nothing_is_left_of_many_episodes() -> None:
    policy = Adder()
    owner = PolicyThread(lambda progress: policy, log=print, warm_up=False)
    owner.start()
    gone: list[weakref.ref[Any]] = []

    async def main() -> None:
        for _ in range(3):
            async with Rollouts(owner) as rollouts:
                for k in range(30):
                    episode = await rollouts.open(seed=k)
                    snapshot = await episode.snapshot()
                    child = await snapshot.fork()
                    await rollouts.step({episode: seen(1.0), child: seen(1.0, "bad")})
                    gone.extend(weakref.ref(x) for x in (episode, snapshot, child))
                    await asyncio.gather(episode.close(), snapshot.close(), child.close())
                    assert rollouts.sessions == 0 and policy.open_sessions == []
                del episode, snapshot, child
            gone.append(weakref.ref(rollouts))
            del rollouts

    asyncio.run(main())
    end_s = time.monotonic() + 20  # the owner's thread lets go of the last job after its answer
    while (left := [ref for ref in gone if ref() is not None]) and time.monotonic() < end_s:
        time.sleep(0.01)
        gc.collect()
    assert not left and owner.waiting == 0
    assert owner.stop(5)


def test_without_an_event_loop() -> None:
    policy = Adder()
    with Blocking(Rollouts(lambda progress: policy)) as wait:
        episode = wait(wait.rollouts.open(seed=1))
        other = wait(wait.rollouts.open(seed=2))
        found: list[float] = []
        threads = [
            threading.Thread(target=lambda e=e: found.append(value(wait(e.step(seen(0.5)))))) for e in (episode, other)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [0.5, 0.5]
        with pytest.raises(InvalidState):
            wait(episode.step(seen(0.0, "bad")))
    assert policy.open_sessions == [] and not [t for t in threading.enumerate() if t.name == "wam_rollouts"]
