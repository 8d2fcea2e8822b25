"""A step inside another one's, at every place where the engine asks: both give what they give alone."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from test.engine.tiny_policy import look, make_network, make_policy, same
from wam_policy_ros.contract.errors import Cancelled, EngineError, ObservationError, Overloaded, SessionError
from wam_policy_ros.contract.interface import CommittedRows, Interleaves, interleaves
from wam_policy_ros.contract.policy_thread import Phase, PolicyThread, Priority
from wam_policy_ros.engine import timing
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.policy import DreamZeroPolicy

CONFIGS = {
    "plain": EngineConfig(evaluations=5),
    "fused": EngineConfig(evaluations=5, step="fused"),
    "deterministic": EngineConfig(evaluations=5, step="fused", deterministic=True),
    "plain, deterministic": EngineConfig(evaluations=5, deterministic=True),
    "text encoder on the host": EngineConfig(evaluations=5, step="fused", text="streamed"),
    "dynamic, guidance reused": EngineConfig(
        step="fused", schedule="dynamic", guidance_steps=(0, 6), guidance_between="reuse"
    ),
}
OUTER, INNER = "put the cup on the plate", "open the drawer"
FRAMES = (1, 4, 4, 4, 4, 4)  # a first call, a full window, and a restart


@dataclass
class Episode:
    """A session, its next observation, and what it gave. Seeds, states, instructions and committed rows differ."""

    policy: DreamZeroPolicy
    number: int
    prompt: str
    chunks: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.session = self.policy.open("s", seed=self.number)

    def step(self, cancelled: Callable[[], bool] | None = None) -> None:
        self.chunks.append(self.policy.infer(self.session, self.seen(), cancelled=cancelled))

    def seen(self) -> Any:
        call, spec = len(self.chunks), self.policy.spec
        seen = look(spec, 100 * self.number + call, frames=FRAMES[call % len(FRAMES)], prompt=self.prompt)
        if self.number % 2 and call == 2:
            rows = np.full((3, spec.action_dim), 0.1)
            seen = replace(seen, committed=CommittedRows(rows, np.array([1.0, 0.7, 0.2])))
        return replace(seen, want_video=True)


_ALONE: dict[tuple[DreamZeroPolicy, int, str], Episode] = {}


def alone(policy: DreamZeroPolicy, number: int, prompt: str, calls: int) -> list[Any]:
    """What a session gives that has the policy for itself."""
    one = _ALONE.setdefault((policy, number, prompt), Episode(policy, number, prompt))
    while len(one.chunks) < calls:
        one.step()
    return one.chunks[:calls]


def all_alone(*episodes: Episode) -> bool:
    """Whether they gave what they would have given alone, bit for bit."""
    return all(
        same(a, b)
        for e in episodes
        for a, b in zip(e.chunks, alone(e.policy, e.number, e.prompt, len(e.chunks)), strict=True)
    )


def at_questions(which: Callable[[int], bool], todo: Callable[[], object]) -> tuple[Callable[[], bool], list[int]]:
    """A ``cancelled`` that does something at some of its questions, and the numbers of those."""
    count, done = itertools.count(), []

    def asked() -> bool:
        if not which(number := next(count)):
            return False
        done.append(number)
        return bool(todo())

    return asked, done


@pytest.fixture(scope="module", params=list(CONFIGS))
def policy(request) -> DreamZeroPolicy:
    config = CONFIGS[request.param]
    # A text encoder that has gone to the host is nobody else's.
    return make_policy(config, network=make_network() if config.text == "streamed" else None)


@pytest.fixture(scope="module", params=["plain", "fused"])
def either(request) -> DreamZeroPolicy:
    return make_policy(CONFIGS[request.param])


@pytest.fixture(scope="module")
def fused() -> DreamZeroPolicy:
    return make_policy(CONFIGS["fused"])


def test_a_step_inside_another_one_at_every_question(policy) -> None:
    """Before the prefill and before each evaluation, in windows that begin, go on and restart."""
    assert isinstance(policy, Interleaves) and interleaves(policy)
    outer, inner = Episode(policy, 1, OUTER), Episode(policy, 2, INNER)
    plain = policy.config.step == "plain"  # asks at every solver step
    questions: set[int] = set()
    whole = policy.config in (CONFIGS["plain"], CONFIGS["fused"])  # the others are no different in a restart
    for call in range(len(FRAMES) if whole else 3):
        shift = [0, None, 2, None, None, 4][call]

        def which(n: int, shift: int | None = shift) -> bool:
            return shift is not None and (not plain or n % 5 == shift)

        asked, done = at_questions(which, inner.step)
        outer.step(asked)
        questions |= set(done)
        assert not done or outer.chunks[-1].timings_s["interrupted"] > 0
    if not plain:
        assert questions == set(range(max(questions) + 1)) and len(questions) >= 6
    assert len(inner.chunks) > 6 and all_alone(outer, inner)
    assert all("interrupted" not in chunk.timings_s for chunk in inner.chunks)


def test_another_step_runs_between_a_new_instruction_and_the_pictures(either, monkeypatch) -> None:
    """Each of the two takes about as long as an evaluation, so nobody waits for both."""
    outer, inner = Episode(either, 1, OUTER), Episode(either, 2, INNER)
    either.path.prompts.forget()
    encoded: list[str] = []
    first = either.path.encode_first
    monkeypatch.setattr(either.path, "encode_first", lambda frame: encoded.append("pictures") or first(frame))

    def robot() -> None:
        encoded.append("robot")
        inner.step()

    asked, done = at_questions(lambda n: n == 0, robot)
    outer.step(asked)
    assert encoded == ["robot", "pictures", "pictures"] and done == [0]
    assert all_alone(outer, inner)


def test_three_deep(fused) -> None:
    one, two, three = (Episode(fused, n, p) for n, p in enumerate((OUTER, INNER, OUTER), 1))
    for at in (1, 3):
        inmost, done = at_questions(lambda n, at=at: n == at, three.step)
        middle, _ = at_questions(lambda n, at=at: n == at, lambda inmost=inmost: two.step(inmost))
        one.step(middle)
        assert done == [at]
    assert len(three.chunks) == 2 and all_alone(one, two, three)


# -- what goes wrong ----------------------------------------------------------------------------------------------


def _not_finite(inner: Episode) -> None:
    """The inner step's action becomes NaN."""
    bad = lambda name, x: x.fill_(math.nan) if name == "after_step15.action" else None  # noqa: E731
    inner.policy.infer(inner.session, inner.seen(), probe=bad)


def _no_memory(inner: Episode) -> None:
    def full() -> bool:
        raise torch.OutOfMemoryError("no memory")

    inner.policy.infer(inner.session, inner.seen(), cancelled=full)


def _bad_look(inner: Episode) -> None:
    inner.policy.infer(inner.session, replace(inner.seen(), frames={}))


@pytest.mark.parametrize(
    ("fault", "error"), [(_not_finite, EngineError), (_no_memory, Overloaded), (_bad_look, ObservationError)]
)
def test_an_inner_step_that_fails_is_no_matter_of_the_outer_one(either, fault, error) -> None:
    outer, inner = Episode(either, 1, OUTER), Episode(either, 2, INNER)
    inner.step()

    def robot() -> bool:
        with pytest.raises(error):
            fault(inner)
        return False

    for _ in range(3):
        asked, done = at_questions(lambda n: n in (0, 1, 5), robot)
        outer.step(asked)
        assert len(done) == 3
    inner.step()
    assert all_alone(outer, inner)


@pytest.mark.parametrize(
    ("call", "questions"), [(0, (0, 1)), (2, (0, 1, 5)), (5, (1,))], ids=["first", "inside", "restart"]
)
def test_an_outer_step_that_is_cancelled_after_an_inner_one(either, call, questions) -> None:
    """The robot's step, then the end, as for a client that went away or whose deadline passed."""
    outer, inner = Episode(either, 1, OUTER), Episode(either, 2, INNER)
    for _ in range(call):
        outer.step()
    for at in questions:
        asked, _ = at_questions(lambda n, at=at: n == at, lambda: inner.step() is None)
        with pytest.raises(Cancelled):
            outer.step(asked)
        inner.step()
    outer.step()
    assert len(inner.chunks) == 2 * len(questions) and all_alone(outer, inner)


def test_nothing_is_done_with_the_session_of_a_step_that_has_not_ended(either) -> None:
    outer, policy = Episode(either, 1, OUTER), either
    frames = {c.name: np.zeros((c.height, c.width, 3), np.uint8) for c in policy.spec.cameras}

    def touch() -> None:
        for what in (policy.close, policy.reset, lambda s: policy.infer(s, outer.seen()),
                     lambda s: policy.observe(s, 0, frames)):  # fmt: skip
            with pytest.raises(SessionError, match="has not ended"):
                what(outer.session)

    outer.step()
    asked, done = at_questions(lambda n: True, touch)
    outer.step(asked)
    assert len(done) >= 6 and all_alone(outer)
    policy.close(outer.session)
    assert outer.session.closed


def test_other_work_of_the_policy_inside_a_step(fused) -> None:
    """Opening, closing, a video, frames ahead of their call."""
    outer, inner = Episode(fused, 1, OUTER), Episode(fused, 2, INNER)
    inner.step()
    seen = inner.seen()

    def robot() -> None:
        fused.close(fused.open())
        fused.render_video(inner.chunks[0])
        for slot in range(4):
            assert fused.observe(inner.session, slot, {name: v[slot] for name, v in seen.frames.items()})

    for _ in range(2):
        asked, done = at_questions(lambda n: n in (0, 3), robot)
        outer.step(asked)
        assert len(done) == 2
    inner.step()
    assert inner.session.ahead.hits == 1 and all_alone(outer, inner)


def test_what_runs_inside_finds_no_step_around_it(either) -> None:
    seen: list[bool] = []
    one = Episode(either, 1, OUTER)
    one.step(lambda: bool(seen.append(torch.is_inference_mode_enabled())))  # type: ignore[func-returns-value]
    assert seen and not any(seen) and not torch.is_inference_mode_enabled()


def test_time_of_others_is_no_time_of_the_step(monkeypatch) -> None:
    now = [10.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    timer = timing.StageTimer(torch.device("cpu"))
    with timer.stage("denoise"):
        now[0] += 1.0
        now[0] += 5.0
        timer.away(5.0)
        now[0] += 0.25
        timer.away(1e-5)  # a question
    assert timer.finish() == {"denoise": 1.25, "total": 1.25, "interrupted": 5.0}


def test_a_step_shared_by_ranks_is_not_interleaved() -> None:
    assert not interleaves(make_policy(EngineConfig(evaluations=5, step="fused", branches="apart")))


def test_a_step_inside_the_encoding_of_an_instruction() -> None:
    """Which takes several evaluations when the encoder's weights come from the host: both encode the same one."""
    config = CONFIGS["text encoder on the host"]
    policy, twin = (make_policy(config, network=make_network()) for _ in range(2))
    outer, inner = Episode(policy, 1, OUTER), Episode(policy, 2, OUTER)
    asked, done = at_questions(lambda n: n == 0, inner.step)
    outer.step(asked)
    assert done == [0] and outer.chunks[0].timings_s["interrupted"] > 0
    for episode in (outer, inner):
        separate = Episode(twin, episode.number, OUTER)
        separate.step()
        assert same(separate.chunks[0], episode.chunks[0])
    given_up = Episode(policy, 3, INNER)
    with pytest.raises(Cancelled, match="instruction"):
        given_up.step(lambda: True)
    given_up.step()
    assert given_up.session.step == 1


def test_a_robot_and_clients_in_threads_get_what_each_gets_alone(fused) -> None:
    """Through the owner: the robot's steps wherever they happen to come."""
    owner = PolicyThread(lambda progress: fused, log=lambda *_: None, warm_up=False)
    owner.start()
    robot, *clients = (Episode(fused, n, p) for n, p in ((2, INNER), (1, OUTER), (3, OUTER)))
    over = threading.Event()

    def ask(who: Episode, priority: Priority) -> None:
        owner.submit(
            lambda policy, cancelled: who.step(cancelled), lane=who.number, priority=priority,
            preempt=priority is Priority.ROBOT, about=lambda: who.session,
        ).result(60)  # fmt: skip

    def busy(client: Episode) -> None:
        while not over.is_set():
            ask(client, Priority.CLIENT)

    while owner.status.phase is not Phase.READY:
        time.sleep(0.01)
    threads = [threading.Thread(target=busy, args=(client,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    while owner.traffic.interleaved < 6:
        ask(robot, Priority.ROBOT)
        time.sleep(0.02)
    over.set()
    for thread in threads:
        thread.join(60)
    assert owner.traffic.restarted == 0 and owner.stop(10)
    assert all(client.chunks for client in clients) and all_alone(robot, *clients)
