"""A policy on two processes over gloo against one process, bit for bit: guidance branches apart, commands, prompts.

One process runs the plain step's branches one after the other anyway; the fused step's, which it batches otherwise,
with ``branches: apart``. So both sides multiply matrices of the same size.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from test.engine.several import PLAN, make_several, ranks_of, run, several
from test.engine.tiny_policy import look, make_policy, same
from test.tiny_checkpoint import write_checkpoint
from wam_policy_ros.contract.errors import Cancelled, ConfigError, Overloaded
from wam_policy_ros.contract.interface import CommittedRows, ResetReason
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.parallel.grid import Grid
from wam_policy_ros.engine.policy import with_config
from wam_policy_ros.engine.weights import DIT, WeightSource
from wam_policy_ros.model.config import DreamZeroConfig

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="PyTorch was built without torch.distributed")

ONE = {"plain": EngineConfig(evaluations=5), "fused": EngineConfig(evaluations=5, step="fused", branches="apart")}


LONGEST: list = []  # a policy, and what it gave


def alone(policy, plan=PLAN):
    """``run(policy, plan)`` of one process, computed once: a shorter plan's chunks are the first ones of ``PLAN``'s."""
    assert plan == PLAN[: len(plan)]
    if not LONGEST or LONGEST[0] is not policy:
        LONGEST[:] = policy, run(policy)
    return LONGEST[1][: len(plan)]


def two_of(config):
    return replace(config, gpus=2, branches="together")


@pytest.fixture(scope="module", params=["plain", "fused"])
def pair(request):
    """The same network in one process and in two."""
    config = ONE[request.param]
    with several(two_of(config)) as two:
        yield make_policy(config), two


def test_equals_one_process_bit_for_bit(pair):
    """A first call, a full window, its restart; with a video and without."""
    one, two = pair
    chunks = run(two)
    assert all(same(a, b) for a, b in zip(chunks, alone(one), strict=True))
    for a, b in zip(run(two, (1, 4), want_video=False), run(one, (1, 4), want_video=False), strict=True):
        assert np.array_equal(a.actions, b.actions) and a.info == b.info and a.video is None
    assert chunks[4].reset is ResetReason.WINDOW_FULL and not np.array_equal(chunks[1].actions, chunks[2].actions)
    assert two.spec.details["gpus"] == 2 and two.spec.details["tier"] == one.spec.details["tier"]


def test_a_copied_window_goes_on_by_itself_on_every_rank(pair):
    one, two = pair
    expected, session = alone(one), two.open()
    for i, frames in enumerate(PLAN[:2]):
        two.infer(session, look(two.spec, i, frames=frames))
    twin = two.open()
    twin.history, twin.step, twin.window = session.history.copy(), 2, two.path.cloned(session.window)
    chunks = [two.infer(who, look(two.spec, 2, frames=PLAN[2])) for who in (session, twin)]
    two.close(session)
    assert all(same(chunk, expected[2]) for chunk in chunks)
    assert same(two.infer(twin, look(two.spec, 3, frames=PLAN[3])), expected[3])
    two.close(twin)
    assert all(report.windows == 0 for report in two.path.reports())


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "full"},
        {"schedule": "dynamic"},
        {"guidance_steps": (0, 2)},
        {"guidance_steps": (1, 7), "guidance_between": "off"},
        {"seed": 7},
    ],
)
def test_schedules_and_guidance(pair, options):
    """The weights of the ranks are used again."""
    one, two = (with_config(policy, **options) for policy in pair)
    try:
        assert all(same(a, b) for a, b in zip(run(two, (1, 4)), run(one, (1, 4)), strict=True))
    finally:
        two.disconnect()
    assert ranks_of(pair[1]).lost is None  # they are the other policy's, too


def test_interleaved_sessions_seeds_and_prompts(pair):
    """Two sessions, one with a seed of its own, six instructions, more than are remembered."""

    def script(policy):
        sessions, out = [policy.open(), policy.open(seed=3)], []
        for i, frames in enumerate(PLAN[:5]):
            for s, session in enumerate(sessions):
                prompt = f"instruction {i // 2} {s}"
                out.append(policy.infer(session, look(policy.spec, 10 * s + i, frames=frames, prompt=prompt)))
        policy.reset(sessions[0])
        out.append(policy.infer(sessions[0], look(policy.spec, 70, frames=1)))
        for session in sessions:
            policy.close(session)
        return out

    got, expected = (script(policy) for policy in reversed(pair))
    assert all(same(a, b) for a, b in zip(got, expected, strict=True))
    assert ResetReason.PROMPT_CHANGED in {chunk.reset for chunk in got}


@pytest.mark.parametrize(
    ("calls", "then", "prompt", "after"), [(2, 4, None, 0), (2, 1, None, 2), (4, 4, None, 2), (2, 4, "fold it", 2)]
)
def test_a_cancelled_call_leaves_the_session_as_it_was(pair, calls, then, prompt, after):
    one, two = pair
    session, out = two.open(), []
    for i, frames in enumerate(PLAN[: calls + 1]):
        if i == calls:
            asked = iter(range(100))
            other = look(two.spec, 77, frames=then, **({"prompt": prompt} if prompt else {}))
            with pytest.raises(Cancelled):
                two.infer(session, other, cancelled=lambda asked=asked: next(asked) >= after)
        out.append(two.infer(session, look(two.spec, i, frames=frames)))
    two.close(session)
    assert all(same(a, b) for a, b in zip(out, alone(one, PLAN[: calls + 1]), strict=True))


def test_committed_rows_and_frames_ahead(pair):
    one, two = pair
    rows = CommittedRows(alone(one, (1,))[0].actions[:6] + 0.02, np.array([1.0, 1.0, 1.0, 0.6, 0.3, 0.0]))
    got, expected = (run(policy, (1, 4), committed=rows) for policy in (two, one))
    assert all(same(a, b) for a, b in zip(got, expected, strict=True))
    session = two.open()
    chunks = [two.infer(session, look(two.spec, 0, frames=1))]
    seen = look(two.spec, 1, frames=4)
    told = [two.observe(session, slot, {n: f[slot] for n, f in seen.frames.items()}) for slot in range(3)]
    chunks.append(two.infer(session, seen))
    two.close(session)
    assert told == [two.config.step == "fused"] * 3
    assert all(same(a, b) for a, b in zip(chunks, alone(one, (1, 4)), strict=True))


def test_a_failure_here_leaves_both_sides_in_step(pair, monkeypatch):
    """The other rank works on an evaluation that this one cannot finish: what it sends has to be taken."""
    one, two = pair
    session = two.open()
    first = two.infer(session, look(two.spec, 0, frames=1))
    calls, evaluate = iter(range(100)), two.path.local.evaluate_branch

    def broken(*args, **kwargs):
        if next(calls) == 2:
            raise Overloaded("no memory")
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(two.path.local, "evaluate_branch", broken)
    with pytest.raises(Overloaded):
        two.infer(session, look(two.spec, 5, frames=4, prompt="another"))
    monkeypatch.undo()
    second = two.infer(session, look(two.spec, 1, frames=4))
    two.close(session)
    assert all(same(a, b) for a, b in zip([first, second], alone(one, (1, 4)), strict=True))


def test_four_ranks_are_a_grid():
    assert [Grid.of(n, guided=True) for n in (1, 2, 4, 8)] == [Grid(1, 1), Grid(2, 1), Grid(2, 2), Grid(2, 4)]
    assert [Grid.of(n, guided=False) for n in (1, 2, 8)] == [Grid(1, 1), Grid(1, 2), Grid(1, 8)]
    grid = Grid.of(8, guided=True)
    assert [grid.branch(rank) for rank in range(8)] == [0] * 4 + [1] * 4 and grid.heads == [0, 4]
    assert grid.row(1) == [4, 5, 6, 7]
    with pytest.raises(ConfigError, match="even number"):
        Grid.of(3, guided=True)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"gpus": 0}, "gpus"),
        ({"gpus": True}, "gpus"),
        ({"gpus": 2, "step": "fused", "branches": "apart"}, "branches"),
        ({"step": "fused", "branches": "apart", "guidance_scale": 1.0}, "branches"),
        ({"step": "fused", "branches": "beside", "guidance_scale": 1.0}, "beside"),
        ({"branches": "apart"}, "plain"),
        ({"rank_deadline_s": 0.0}, "rank_deadline_s"),
        ({"gpus": 2, "rank_deadline_s": 0.2}, "rank_deadline_s is too short"),
    ],
)
def test_options_without_effect_are_refused(options, word):
    with pytest.raises(ConfigError, match=word):
        EngineConfig(**options)


def test_a_second_policy_on_several_processes_is_refused(pair):
    with pytest.raises(ConfigError, match="already"):
        make_several(two_of(ONE["plain"]))
    assert len(run(pair[1], (1,))) == 1


def test_processes_cannot_be_added_to_a_policy(pair):
    with pytest.raises(ConfigError, match="build a policy of its own"):
        with_config(pair[0], **({"branches": "together"} | {"gpus": 2}))


def test_apart_is_close_to_together():
    """The twin of two GPUs against the published batch of two: the same algorithm with other rounding."""
    together = run(make_policy(replace(ONE["fused"], branches="together")), (1, 4, 4))
    apart = run(make_policy(ONE["fused"]), (1, 4, 4))
    assert (
        max(np.abs(a.actions - b.actions).max() / np.std(b.actions) for a, b in zip(apart, together, strict=True))
        < 2e-5
    )


def test_the_dit_alone_has_the_bits_of_the_whole_network(tmp_path):
    folder = write_checkpoint(tmp_path / "checkpoint")
    sources = [WeightSource(random=DreamZeroConfig.tiny()), WeightSource(checkpoint=str(folder))]
    for source in sources:
        where = (EngineConfig(), torch.device("cpu"), torch.float32, lambda text, fraction: None)
        whole, part = source.load(*where).state_dict(), source.load(*where, only=DIT).state_dict()
        assert whole.keys() == part.keys()
        for name, tensor in part.items():
            assert tensor.is_meta != name.startswith(DIT), name
            assert tensor.is_meta or tensor.equal(whole[name])
