"""Processes of a policy on several GPUs: what they hold, what is asked of them again, and that they go."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from test.engine.several import alive, make_several, nothing_is_left, ranks_of, run, several, wait_for
from test.engine.tiny_policy import TEXT_LEN, look, same
from test.tiny_checkpoint import config_json, write_checkpoint
from wam_policy_ros.contract.errors import Cancelled, ConfigError, PolicyLost
from wam_policy_ros.engine.build import build_policy
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.parallel.grid import Grid
from wam_policy_ros.engine.parallel.ranks import RankReport
from wam_policy_ros.engine.policy import with_config, with_schedule

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="PyTorch was built without torch.distributed")

DEADLINE_S = 2.0
TWO = EngineConfig(evaluations=5, gpus=2, rank_deadline_s=DEADLINE_S)
FUSED = replace(TWO, step="fused")


no_leftovers = pytest.fixture(autouse=True)(nothing_is_left)


def test_windows_are_given_back_on_both_sides_and_the_processes_of_a_policy_nobody_has_any_more_end():
    """Closed, reset, cancelled and failed sessions leave no window behind, here or there; nobody disconnects it."""
    two = make_several(FUSED)
    pids = ranks_of(two).pids
    for i in range(3):
        session = two.open()
        for frames, prompt in ((1, "a"), (4, "a"), (4, "b"), (4, "b")):
            two.infer(session, look(two.spec, i, frames=frames, prompt=prompt))
        with pytest.raises(Cancelled):
            two.infer(session, look(two.spec, i, frames=4, prompt="c"), cancelled=lambda: True)
        if i % 2:
            two.reset(session)
        two.close(session)
    pool = two.path.local.pool
    assert (pool.made, pool.idle) == (2, 2)
    assert two.path.reports() == [RankReport(rank, 0, 2, 2, 0) for rank in range(2)]
    assert pids and all(map(alive, pids))
    del two, session, pool
    gc.collect()
    wait_for(lambda: not any(map(alive, pids)), 5.0)
    assert not dist.is_initialized()


def test_a_checkpoint_in_two_processes_gives_what_it_gives_in_one(tmp_path):
    """As people start it; the deterministic tier, whose switches and audit are on both sides."""
    folder = write_checkpoint(tmp_path / "checkpoint")
    said, options = [], {"evaluations": 5, "step": "fused", "deterministic": True}
    two = build_policy(
        embodiment="oxe_droid",
        checkpoint=str(folder),
        config=EngineConfig(**options, gpus=2),
        progress=lambda text, fraction: said.append(text),
    )
    try:
        one = build_policy(
            embodiment="oxe_droid", checkpoint=str(folder), config=EngineConfig(**options, branches="apart")
        )
        assert all(same(a, b) for a, b in zip(run(two, (1, 4)), run(one, (1, 4)), strict=True))
        assert two.spec.details["gpus"] == 2 and two.spec.fingerprint != one.spec.fingerprint
        assert any(text.startswith("rank 1: ") for text in said)
    finally:
        two.disconnect()


def test_paths_on_the_same_ranks_come_and_go():
    """8-bit layers take the weights of the other rank over, too; another schedule takes everything as it is."""
    with several(FUSED, raw=config_json(text_len=TEXT_LEN)) as two:
        eight = with_config(two, linears="fp8", attention="fp8")
        apart = with_config(eight, gpus=1, branches="apart")
        quick = with_schedule(eight, evaluations=8)
        assert quick.path.far is eight.path.far
        for a, b in ((eight, apart), (quick, with_config(apart, evaluations=8))):
            assert all(same(x, y) for x, y in zip(run(a, (1, 4)), run(b, (1, 4)), strict=True))
        with pytest.raises(ConfigError, match="8-bit"):
            with_config(eight, linears="native")
        ranks = ranks_of(two)
        del quick, apart, a, b
        eight.disconnect()
        gc.collect()
        assert list(ranks.forgotten) and ranks.lost is None  # told to the other rank with the next command
        with pytest.raises(PolicyLost, match=r"rank 1.*failed: KeyError"):
            ranks.send("report", eight.path.far._path)
            ranks.answers()
        assert ranks.lost is not None


def test_four_processes_share_the_only_branch():
    """*Numeric*: matrix products over fewer rows. Two for each branch are in test_parallel_grid."""
    raw = config_json(text_len=TEXT_LEN, num_heads=4)
    with several(replace(FUSED, gpus=4, guidance_scale=1.0), raw=raw) as four:
        assert ranks_of(four).grid == Grid(1, 4)
        one = with_config(four, gpus=1)
        for a, b in zip(run(four, (1, 4, 4)), run(one, (1, 4, 4)), strict=True):
            assert np.abs(a.actions - b.actions).max() < 2e-5 * np.std(b.actions)
            assert a.info == b.info and a.reset == b.reset


def test_loading_can_be_given_up():
    before = children()  # others' processes, such as the one that holds the ROS domain
    pids = []

    def progress(text, fraction):
        pids.extend(p for p in children() if p not in [*before, *pids])
        if text.startswith("rank 1"):
            raise Cancelled("stopped while loading")

    with pytest.raises(Cancelled):
        build_policy(embodiment="oxe_droid", random_weights="tiny", config=TWO, progress=progress)
    assert pids and not any(map(alive, pids))


def test_more_gpus_than_there_are_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError, match="1 GPUs that PyTorch sees"):
        make_several(TWO, device="cuda:0")


def children():
    """Processes this one has started that run, by whichever of its threads."""
    found = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    return [int(pid) for pids in found for pid in pids if alive(int(pid))]
