"""When graphs are recorded: at the start, and otherwise between questions. On the CPU, with a cache that takes the same
decisions, and whose recordings are functions that are called again: with what they found in place when recorded."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from test.engine.tiny_policy import look, make_policy
from wam_policy_ros.contract.errors import Cancelled, ConfigError, Overloaded
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.graphs import GraphCache
from wam_policy_ros.engine.memory import PROMPTS_KEPT, prompt_bytes, sessions_of, windows_of

FUSED = EngineConfig(evaluations=5, step="fused")
PLAN = [(1, "a"), *[(4, "a")] * 5, (4, "b"), (4, "b")]
"""A first call, a full window, its restart; another instruction."""


class Recorded(GraphCache[Any]):
    """Attributes:
    happened: what was recorded and run, in order."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), enabled=True)
        self.enabled, self.happened = True, []

    def _record(self, function, kind):
        self.happened.append(f"{kind[0] if kind else 'encoder'} recorded")

        def replay():
            self.happened.append("run")
            return function()

        return replay, function()


def policy_of(prepared: int, **options: Any):
    policy = make_policy(replace(FUSED, prepared_windows=prepared, **options))
    path = policy.path
    path.graphs, path.encoders, path.first_frames = (Recorded() for _ in range(3))
    policy.path.prepare(fitting=policy.admission.fitting)
    policy.admission.measure()
    return policy


def same(a, b) -> bool:
    """Bit for bit."""
    videos = [chunk.video for chunk in (a, b) if chunk.video is not None]
    return (
        np.array_equal(a.actions, b.actions)
        and (a.reset, a.step, a.info) == (b.reset, b.step, b.info)
        and (not videos or videos[0].latents.equal(videos[1].latents))
    )


def counts(policy) -> list[int]:
    return [len(cache) for cache in policy.path.caches]


def play(policy, session, number: int, cancelled=None) -> list[Any]:
    return [
        policy.infer(
            session,
            replace(look(policy.spec, 10 * number + i, frames=frames, prompt=prompt), want_video=i % 2 == 0),
            cancelled=cancelled,
        )
        for i, (frames, prompt) in enumerate(PLAN)
    ]


@pytest.mark.parametrize("options", [{}, {"guidance_steps": (0, 2)}, {"schedule": "dynamic"}], ids=str)
def test_nothing_is_recorded_in_calls_once_all_windows_are_prepared(options) -> None:
    """A robot and two clients with two windows for restarts: every kind of call, sessions and windows changing."""
    policy = policy_of(windows_of(3), **options)
    before = counts(policy)
    assert policy.path.pool.made == policy.path.pool.idle == 5 and before[0] == 5 * (before[0] // 5) > 0
    alone = make_policy(policy.config)
    expected = play(alone, alone.open(seed=7), 7)
    for turn in range(2):
        sessions = [policy.open(seed=7) for _ in range(3)]
        for session in sessions:
            if turn:
                assert all(same(a, b) for a, b in zip(play(policy, session, 7), expected, strict=True))
            else:
                policy.infer(session, look(policy.spec, 0))
        for session in sessions[turn + 1 :] + sessions[: turn + 1]:
            policy.close(session)
    assert counts(policy) == before and policy.path.pool.made == 5


def test_a_recording_in_a_call_and_its_evaluation_have_a_question_between_them() -> None:
    """So that whoever is urgent waits for one of them; with a step of another session at each question."""
    policy, alone = policy_of(1), make_policy(FUSED)
    robot, client = policy.open(seed=1), policy.open(seed=2)
    inner, told = [], policy.path.graphs.happened
    told.clear()

    def asked() -> bool:
        told.append("asked")
        if len(inner) < len(PLAN):
            frames, prompt = PLAN[len(inner)]
            seen = replace(look(policy.spec, 10 + len(inner), frames=frames, prompt=prompt), want_video=True)
            begin = len(told)
            inner.append(policy.infer(robot, seen))
            del told[begin:]
        return False

    chunks = play(policy, client, 2, asked)
    pairs = list(pairwise(told))
    assert told.count("evaluate recorded") >= 4 and told.count("prefill recorded") >= 2
    assert {after for before, after in pairs if before == "evaluate recorded"} == {"asked"}
    # A prefill is shorter than an evaluation, and runs right after its recording.
    assert {after for before, after in pairs if before == "prefill recorded"} == {"run"}
    for number, (given, session) in enumerate(((inner, alone.open(seed=1)), (chunks, alone.open(seed=2))), start=1):
        for i, (frames, prompt) in enumerate(PLAN):
            seen = look(alone.spec, 10 * number + i, frames=frames, prompt=prompt)
            wanted = replace(seen, want_video=number == 1 or i % 2 == 0)
            assert same(given[i], alone.infer(session, wanted))


def test_a_step_that_is_given_up_after_a_recording_begins_anew() -> None:
    policy = policy_of(1)
    held, session = policy.open(), policy.open()
    policy.infer(held, look(policy.spec, 0))  # has the prepared window
    told, seen = policy.path.graphs.happened, look(policy.spec, 1)
    told.clear()
    with pytest.raises(Cancelled):
        policy.infer(session, seen, cancelled=lambda: "evaluate recorded" in told)
    assert told == ["prefill recorded", "run", "evaluate recorded"] and session.step == 0
    other = make_policy(FUSED)
    assert same(policy.infer(session, seen), other.infer(other.open(), seen))


def budget_for(windows: int) -> float:
    free = make_policy(FUSED)
    free.prepare()
    has, network = free.capacity, free.network
    fixed = has.taken.own - has.taken.idle - has.taken.instructions
    kept = PROMPTS_KEPT * prompt_bytes(network.config.dit, network.dtype)
    return (fixed + kept + has.reserve_bytes + (windows + 0.5) * has.session_bytes) / 2**30


@pytest.mark.parametrize(("windows", "wanted", "made"), [(1, 2, 1), (3, 2, 2), (3, 8, 3)])
def test_no_more_windows_are_prepared_than_a_budget_has_room_for(windows, wanted, made) -> None:
    policy = policy_of(wanted, memory_budget_gib=budget_for(windows))
    assert policy.path.pool.made == policy.path.pool.idle == made and policy.capacity.windows == windows


def test_a_budget_of_one_window_is_kept() -> None:
    policy = policy_of(2, memory_budget_gib=budget_for(1))
    session = policy.open()
    first = policy.infer(session, look(policy.spec, 0, prompt="a"))
    with pytest.raises(Overloaded, match=r"budget.*got: 1 of 1 windows.*remedy: reset the session"):
        policy.infer(session, look(policy.spec, 1, frames=4, prompt="b"))
    assert session.step == 1 and policy.path.pool.made == 1
    policy.infer(session, look(policy.spec, 1, frames=4, prompt="a"))
    policy.reset(session)
    policy.infer(session, look(policy.spec, 2, prompt="b"))
    policy.reset(session)
    assert same(policy.infer(session, look(policy.spec, 0, prompt="a")), replace(first, step=0))


def test_progress_and_details_say_what_was_prepared() -> None:
    policy, texts = make_policy(replace(FUSED, graphs=False, prepared_windows=3)), []
    policy.path.prepare(lambda text, fraction: texts.append((text, fraction)))
    told = list(dict.fromkeys(text for text, _ in texts))
    assert told == ["recording the step", "recording window 2 of 3", "recording window 3 of 3",
                    "moving the text encoder to the host"]  # fmt: skip
    fractions = [fraction for _, fraction in texts]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0


def test_as_many_windows_as_sessions_need() -> None:
    assert [sessions_of(windows_of(n))[0] for n in (0, 1, 2, 5)] == [0, 1, 2, 5]
    with pytest.raises(ConfigError, match="prepared_windows"):
        replace(FUSED, prepared_windows=0)
