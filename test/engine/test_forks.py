"""A forked session and the one it was forked from both go on as if alone, bit for bit, on every path."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from test.engine.test_memory import bounded
from test.engine.tiny_policy import look, make_network, make_policy, same
from wam_policy_ros.contract.errors import Cancelled, Overloaded, SessionError
from wam_policy_ros.contract.interface import Forks
from wam_policy_ros.engine.config import EngineConfig

PLAIN, FUSED = EngineConfig(evaluations=5), EngineConfig(evaluations=5, step="fused")
CASES = {
    "plain": (PLAIN, 3),
    "plain, full": (replace(PLAIN, guidance_scale=1.0), 4),
    "fused": (FUSED, 1),
    "fused, full, deterministic": (replace(FUSED, deterministic=True), 4),
    "8 bits": (replace(FUSED, linears="fp8", attention="fp8"), 2),
    "branches apart": (replace(FUSED, branches="apart"), 3),
}
"""How it runs, and after how many calls it is forked."""
PLAN = (1, 4, 4, 4, 4, 4)
"""Frames per call; the window is full before the fifth."""


def script(spec, seed, prompts=("pick up the cup",) * 6):
    return [look(spec, 100 * seed + i, frames=n, prompt=p) for i, (n, p) in enumerate(zip(PLAN, prompts, strict=True))]


def play(policy, observations, seed=None):
    session = policy.open("s", seed=seed)
    chunks = [policy.infer(session, o) for o in observations]
    policy.close(session)
    return chunks


def of(config):
    return make_policy(config, network=make_network() if config.step == "fused" else None)


@pytest.fixture(scope="module", params=[PLAIN, FUSED], ids=["plain", "fused"])
def policy(request):
    return of(request.param)


@pytest.mark.parametrize(("config", "at"), CASES.values(), ids=list(CASES))
def test_both_go_on_as_if_alone(config, at):
    policy = of(config)
    assert isinstance(policy, Forks)
    mine, other = script(policy.spec, 1), script(policy.spec, 2, ("pick up the cup",) * 5 + ("open the box",))
    expected = {"parent": play(policy, mine), "child": play(policy, mine[:at] + other[at:])}
    parent = policy.open("parent")
    for o in mine[:at]:
        policy.infer(parent, o)
    child = policy.fork(parent, "child")
    grandchild = policy.fork(child)
    found = {"parent": [], "child": []}
    for i in range(at, 6):  # in turns, changing order
        for who, o in [(parent, mine[i]), (child, other[i])][:: 1 if i % 2 else -1]:
            found[who.session_id].append(policy.infer(who, o))
    for name, chunks in found.items():
        assert all(same(a, b) for a, b in zip(chunks, expected[name][at:], strict=True)), name
    policy.close(parent)
    policy.close(child)
    # What lives longest stands where it was forked, whatever became of the others.
    assert same(policy.infer(grandchild, mine[at]), expected["parent"][at])
    policy.close(grandchild)


def test_a_fork_after_a_restart_of_a_full_window_was_given_up(policy):
    """The restart has written over what nobody reads again; session and fork begin the window anew all the same."""
    observations = script(policy.spec, 5)
    expected = play(policy, observations)
    parent = policy.open("parent")
    for o in observations[:4]:
        policy.infer(parent, o)
    asked = iter([False, True])
    with pytest.raises(Cancelled):
        policy.infer(parent, observations[4], cancelled=lambda: next(asked))
    child = policy.fork(parent)
    for o, chunk in zip(observations[4:], expected[4:], strict=True):
        assert all(same(policy.infer(session, o), chunk) for session in (child, parent))
    policy.close(parent)
    policy.close(child)


def test_a_seed_of_its_own(policy):
    observations = script(policy.spec, 3)
    parent = policy.open("parent", seed=5)
    policy.infer(parent, observations[0])
    kept, other = policy.fork(parent), policy.fork(parent, seed=6)
    a, b, c = (policy.infer(s, observations[1]) for s in (parent, kept, other))
    assert same(a, b) and not np.array_equal(a.actions, c.actions)
    assert (kept.seed, other.seed, kept.session_id != other.session_id) == (5, 6, True)
    for session in (parent, kept, other):
        policy.close(session)


def test_memory_is_taken_and_given_back():
    policy = of(FUSED)
    pool = policy.path.pool
    empty = pool.made - pool.idle
    parent = policy.open()
    untouched = policy.fork(parent)
    assert pool.made - pool.idle == empty, "a session without a window has none to copy"
    policy.infer(parent, look(policy.spec, 0))
    forks = [policy.fork(parent) for _ in range(3)]
    assert pool.made - pool.idle == empty + 4
    made = pool.made
    for session in (parent, untouched, *forks):
        policy.close(session)
    assert (pool.made, pool.made - pool.idle) == (made, empty)


def test_no_memory_changes_nothing(policy, monkeypatch):
    observations = script(policy.spec, 4)
    expected = play(policy, observations)
    parent = policy.open("s")
    policy.infer(parent, observations[0])

    def full(state):
        raise Overloaded("no memory for another session's window")

    with monkeypatch.context() as patch:
        patch.setattr(policy.path, "cloned", full)
        with pytest.raises(Overloaded):
            policy.fork(parent)
    assert same(policy.infer(parent, observations[1]), expected[1])
    policy.close(parent)
    with pytest.raises(SessionError, match="closed"):
        policy.fork(parent)


def test_frames_ahead_stay_behind():
    """The fork encodes its own frames; the guess of the session is not disturbed."""
    policy = make_policy(FUSED, network=make_network())
    observations = script(policy.spec, 5)
    expected = play(policy, observations)
    parent = policy.open("s")
    policy.infer(parent, observations[0])
    for slot in range(4):
        told = {name: images[slot] for name, images in observations[1].frames.items()}
        assert policy.observe(parent, slot, told)
    child = policy.fork(parent, "s")
    assert child.ahead is None and parent.ahead.offered == 4
    assert all(same(policy.infer(s, observations[1]), expected[1]) for s in (child, parent))
    assert parent.ahead.hits == 1


@pytest.mark.parametrize("config", [PLAIN, FUSED], ids=["plain", "fused"])
def test_a_fork_has_a_place_like_every_session(config):
    policy = bounded(config, 2)
    parent = policy.open("s")
    chunk = policy.infer(parent, look(policy.spec, 0))
    child = policy.fork(parent)
    for one_more in (policy.open, lambda: policy.fork(parent)):
        with pytest.raises(Overloaded, match="2 of 2 open"):
            one_more()
    assert policy.details["sessions_open"] == 2
    policy.close(child)
    assert policy.details["sessions_open"] == 1
    again = policy.open("s")
    assert same(policy.infer(again, look(policy.spec, 0)), chunk)


def test_a_fork_that_fails_gives_its_place_back(monkeypatch):
    policy = bounded(FUSED, 2)
    parent = policy.open()
    policy.infer(parent, look(policy.spec, 0))

    def none(state):
        raise torch.OutOfMemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(policy.path, "cloned", none)
        with pytest.raises(Overloaded, match="fork"):
            policy.fork(parent)
    assert policy.details["sessions_open"] == 1 and policy.fork(parent).step == 1
