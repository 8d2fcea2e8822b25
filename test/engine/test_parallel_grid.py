"""Grids of processes whose rows share a guidance branch: 1 x 2 and 2 x 2 over gloo, against one process."""

from __future__ import annotations

import gc
import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from test.engine.several import alive, ranks_of, run, several, wait_for
from test.engine.tiny_policy import TEXT_LEN, look, make_policy, same
from wam_policy_ros.contract.errors import Cancelled, ConfigError, Overloaded, PolicyLost
from wam_policy_ros.contract.interface import ResetReason
from wam_policy_ros.engine.build import build_policy
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.parallel.grid import Grid
from wam_policy_ros.engine.session import WindowState

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="PyTorch was built without torch.distributed")

DEADLINE_S = 3.0
LIMIT = 1e-5  # relative, of a call: float32, matrix products over fewer rows, sixteen solver steps
PLAN = (1, 4, 4)
BASE = EngineConfig(evaluations=5, rank_deadline_s=DEADLINE_S)
GRIDS = {
    "1x2 plain": replace(BASE, gpus=2, guidance_scale=1.0),
    "2x2 fused": replace(BASE, gpus=4, step="fused"),
    "1x2 fused": replace(BASE, gpus=2, guidance_scale=1.0, step="fused"),
}
FUSED = [name for name, config in GRIDS.items() if config.step == "fused"]


@pytest.mark.parametrize("here", [False, True])
def test_a_window_that_not_every_rank_has_room_for_is_let_go_by_those_that_have(here, monkeypatch):
    path = make_policy(replace(BASE, step="fused", branches="apart")).path
    let_go = []

    def full(*args):
        raise Overloaded("no memory")

    monkeypatch.setattr(path.far, "restarted", lambda *args: "a window")
    monkeypatch.setattr(path.far, "confirm", full)
    monkeypatch.setattr(path.far, "let_go", lambda *windows: let_go.append(windows))
    if here:
        monkeypatch.setattr(path.local, "restarted", full)
    first = path.encode_first(torch.zeros(1, 3, 1, 16, 32))
    prompt = path.prompts(*(torch.ones(1, TEXT_LEN, dtype=torch.int64) for _ in range(2)))
    with pytest.raises(Overloaded):
        path.restarted(WindowState(), first, prompt, prompt, ResetReason.FIRST_CALL)
    pool = path.local.pool
    assert let_go == [("a window", None)] and pool.made == pool.idle


def test_ranks_that_cannot_share_the_heads_are_refused_before_anything_starts():
    for config in (replace(BASE, gpus=3, guidance_scale=1.0), replace(BASE, gpus=6)):
        with pytest.raises(ConfigError, match=r"heads.*3 ranks.*one of \[1, 2"):
            build_policy(embodiment="oxe_droid", random_weights="tiny", config=config, device="cpu")
    assert not dist.is_initialized()


def is_a_typed_fault_in_time(policy, number):
    (pid,) = ranks_of(policy).pids
    run(policy, (1, 4))  # what is done for the first time may take long
    session = policy.open()
    policy.infer(session, look(policy.spec, 0, frames=1))
    asked = iter(range(100))

    def strike():
        if next(asked) == 2:
            os.kill(pid, number)
        return False

    start_s = time.monotonic()
    with pytest.raises(PolicyLost, match=r"rank 1|another GPU"):
        policy.infer(session, look(policy.spec, 1, frames=4), cancelled=strike)
    assert time.monotonic() - start_s < 2.5 * DEADLINE_S
    wait_for(lambda: not alive(pid), 2.0)


def test_a_rank_that_hangs_in_mid_exchange_is_a_typed_fault_in_time():
    with several(GRIDS["1x2 fused"]) as policy:
        is_a_typed_fault_in_time(policy, signal.SIGSTOP)


@pytest.fixture(scope="module", params=GRIDS)
def grid(request):
    config = GRIDS[request.param]
    with several(config) as policy:
        yield make_policy(replace(config, gpus=1)), policy
    gc.collect()
    assert not dist.is_initialized()


def test_equals_one_process_and_itself(grid):
    one, many = grid
    guided = many.config.guidance_scale != 1.0
    assert ranks_of(many).grid == (Grid(2, 2) if guided else Grid(1, 2))
    chunks = run(many, PLAN)
    assert all(same(a, b) for a, b in zip(run(many, PLAN), chunks, strict=True))
    for got, expected in zip(chunks, run(one, PLAN), strict=True):
        for a, b in ((got.actions, expected.actions), (got.video.latents.numpy(), expected.video.latents.numpy())):
            assert np.linalg.norm(a - b) < LIMIT * np.linalg.norm(b)
        assert (got.reset, got.info) == (expected.reset, expected.info)
    for a, b in zip(run(many, (1, 4), want_video=False), chunks, strict=False):
        assert np.linalg.norm(a.actions - b.actions) < LIMIT * np.linalg.norm(b.actions) and a.video is None


@pytest.mark.parametrize("grid", FUSED, indirect=True)
def test_calls_that_are_given_up_leave_all_ranks_in_step(grid):
    """Sessions side by side, other instructions, cancelled calls; at the end nothing is left on any rank."""
    _, many = grid

    def script(interrupt):
        sessions, out = [many.open(), many.open()], []
        for i, frames in enumerate((1, 4)):
            for s, session in enumerate(sessions):
                out.append(many.infer(session, look(many.spec, 10 * s + i, frames=frames, prompt=f"do {s}")))
                if interrupt and i:
                    asked = iter(range(100))
                    for prompt in (f"do {s}", "something else"):
                        with pytest.raises(Cancelled):
                            other = look(many.spec, 99, frames=4, prompt=prompt)
                            many.infer(session, other, cancelled=lambda asked=asked: next(asked) in (3, 4))
        for session in sessions:
            many.close(session)
        return out

    assert all(same(a, b) for a, b in zip(script(True), script(False), strict=True))
    reports = many.path.reports()
    assert len(reports) == many.config.gpus
    assert all(r.windows == 0 and r.slots == r.idle == reports[0].slots for r in reports)


@pytest.mark.parametrize("grid", FUSED, indirect=True)
def test_windows_are_divided(grid):
    _, many = grid
    layout = many.path.local.pool.layout
    alone = make_policy(replace(many.config, gpus=1, guidance_scale=1.0)).path.pool.layout
    assert (layout.ranks, layout.branches) == (2, 1)
    size = 2 * 2 * layout.rows * layout.dit.dim * layout.kv_dtype.itemsize
    assert alone.nbytes - layout.nbytes == size // 2


@pytest.mark.parametrize("grid", ["1x2 fused"], indirect=True)
def test_a_rank_that_dies_in_mid_exchange_is_a_typed_fault_in_time(grid):
    """The last test of these processes."""
    is_a_typed_fault_in_time(grid[1], signal.SIGKILL)
