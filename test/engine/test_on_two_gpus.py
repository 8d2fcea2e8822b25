"""A policy on two GPUs: NCCL, graphs and FP8 against one GPU, bit for bit; what happens when one of them dies or hangs.

    python3 -m pytest -q -rs test/engine/test_on_two_gpus.py

A small network with random weights and widths like the published one's. A start takes several seconds, so there are
five: one of each mode for all of its tests, one after the last of them was killed, and one, of GPUs that share a
branch, after that was stopped. Two rehearsals, of the script and of nothing else:
``WAM_TEST_DEVICE=cpu`` (gloo, the plain twins of the kernels, no graphs) and, on one GPU, ``WAM_TEST_BACKEND=gloo``
(both ranks on it, exchanging through the host).
"""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch

from test.engine.several import PLAN, alive, make_several, ranks_of, run, wait_for
from test.engine.tiny_policy import TEXT_LEN, look, same
from test.tiny_checkpoint import config_json
from wam_policy_ros.contract.errors import Cancelled, ConfigError, PolicyLost
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.policy import with_config

DEVICE = os.environ.get("WAM_TEST_DEVICE", "cuda:0")
BACKEND = os.environ.get("WAM_TEST_BACKEND", "auto")
GPU = DEVICE.startswith("cuda")
GPUS = torch.cuda.device_count() if GPU else 2
pytestmark = pytest.mark.skipif(
    GPU and (1 if BACKEND == "gloo" else 2) > GPUS, reason=f"two GPUs are needed, PyTorch sees {GPUS}"
)

RAW = config_json(text_len=TEXT_LEN, dim=256, num_heads=2, ffn_dim=512)
MODES = {
    "plain": {},
    "bf16": {"step": "fused", "attention": "cudnn" if GPU else "torch", "graphs": GPU},
    "fp8": {"step": "fused", "linears": "fp8", "attention": "fp8", "text": "streamed", "graphs": GPU},
}
ONE_BRANCH = "bf16, one branch"
"""Without guidance both share the sequence."""
OTHERS = {
    ONE_BRANCH: MODES["bf16"] | {"guidance_scale": 1.0, "capture_exchange": GPU and BACKEND != "gloo"},
    "bf16, four": MODES["bf16"] | {"gpus": 4},
}
DEADLINE_S = 3.0


def start(mode: str):
    if GPU and mode == "fp8" and importlib.util.find_spec("cudnn") is None:
        pytest.skip("nvidia-cudnn-frontend is not installed")
    config = EngineConfig(**{"evaluations": 5, "gpus": 2, "rank_deadline_s": DEADLINE_S, **(MODES | OTHERS)[mode]})
    here = {"devices": [DEVICE] * config.gpus, "backend": "gloo"} if BACKEND == "gloo" else {}
    dtype = torch.bfloat16 if GPU else torch.float32
    return make_several(config, raw=RAW, device=DEVICE, dtype=dtype, **here)


def one_gpu(policy):
    """The same weights on rank 0's GPU alone, with the same sizes of matrix products where that can be."""
    guided = policy.config.guidance_scale != 1.0
    apart = guided and policy.config.step == "fused"
    return with_config(policy, gpus=1, branches="apart" if apart else "together")


SHARED: dict[str, Any] = {}
"""One GPU and two, of the mode that is being tested. A process has one policy on several GPUs at a time."""


def nothing_shared():
    for _, two in SHARED.values():
        pids = ranks_of(two).pids
        two.disconnect()
        wait_for(lambda pids=pids: not any(map(alive, pids)), 15.0)
    SHARED.clear()


def shared(mode: str):
    """One GPU and two, started unless they run."""
    if mode not in SHARED:
        nothing_shared()
        try:
            two = start(mode)
        except ConfigError as error:
            pytest.skip(f"{mode} cannot run here: {error}")
        SHARED[mode] = one_gpu(two), two
    return SHARED[mode]


@pytest.fixture(scope="module", autouse=True)
def nothing_stays():
    yield
    nothing_shared()


@pytest.fixture(scope="module", params=list(MODES))
def pair(request):
    """One GPU and two; of the module, so that all tests of a mode follow one another."""
    return shared(request.param)


def close(got, expected, limit):
    """Two roundings of one algorithm, in units of the actions' spread; wrong weights or positions give more than 1."""
    errors = [np.abs(a.actions - b.actions).max() / np.std(b.actions) for a, b in zip(got, expected, strict=True)]
    assert max(errors) < limit, errors


@pytest.mark.parametrize("video", [True, False], ids=["with video", "without"])
def test_equals_one_gpu_bit_for_bit(pair, video):
    one, two = pair
    for a, b in zip(run(two, want_video=video), run(one, want_video=video), strict=True):
        assert np.array_equal(a.actions, b.actions) and np.isfinite(a.actions).all() and a.info == b.info
        assert not video or a.video.latents.equal(b.video.latents)
    if two.config.graphs:
        assert len(two.path.local.graphs) > 0


def test_close_to_both_branches_as_one_batch(pair):
    one, two = pair
    together = run(with_config(one, branches="together", graphs=False), (1, 4))
    close(run(two, (1, 4)), together, 0.8 if two.config.linears == "fp8" else 0.5)


def test_interleaved_sessions_and_prompts(pair):
    def script(policy):
        sessions, out = [policy.open(), policy.open(seed=3)], []
        for i, frames in enumerate(PLAN):
            for s, session in enumerate(sessions):
                prompt = f"instruction {i // 2} {s}"
                out.append(policy.infer(session, look(policy.spec, 10 * s + i, frames=frames, prompt=prompt)))
        for session in sessions:
            policy.close(session)
        return out

    assert all(same(a, b) for a, b in zip(script(pair[1]), script(pair[0]), strict=True))


@pytest.mark.parametrize("after", [0, 3])
def test_a_cancelled_call_leaves_the_session_as_it_was(pair, after):
    one, two = pair
    session = two.open()
    chunks = [two.infer(session, look(two.spec, i, frames=PLAN[i])) for i in range(2)]
    asked = iter(range(100))
    with pytest.raises(Cancelled):
        two.infer(session, look(two.spec, 77, frames=4), cancelled=lambda: next(asked) >= after)
    chunks.append(two.infer(session, look(two.spec, 2, frames=4), cancelled=lambda: False))
    two.close(session)
    assert all(same(a, b) for a, b in zip(chunks, run(one, PLAN[:3]), strict=True))


def test_memory_of_every_rank_is_told(pair):
    reports = pair[1].path.reports()
    assert [r.rank for r in reports] == [0, 1] and reports[1].windows == 0
    if GPU:
        # The follower has no encoders.
        assert 0 < reports[1].memory_bytes < reports[0].memory_bytes
    print([f"rank {r.rank}: {r.memory_bytes / 2**20:.0f} MiB, {r.slots} windows" for r in reports])


@pytest.mark.parametrize(("number", "then"), [(signal.SIGKILL, "the same"), (signal.SIGSTOP, ONE_BRANCH)])
def test_a_rank_that_dies_or_hangs_is_a_fault_in_time_and_the_next_start_works(number, then):
    """It strikes the last mode that was tested, and then what was started after the first strike."""
    if not set(SHARED) & set(MODES):
        shared("bf16")
    ((mode, (_, policy)),) = SHARED.items()
    SHARED.clear()
    (pid,) = ranks_of(policy).pids
    session = policy.open()
    for i in range(3):  # nothing is done for the first time after that
        policy.infer(session, look(policy.spec, i, frames=PLAN[i]))
    policy.reset(session)
    for i in range(2):
        policy.infer(session, look(policy.spec, i, frames=PLAN[i]))
    asked = iter(range(100))

    def strike():
        if next(asked) == 2:
            os.kill(pid, number)
        return False

    begin = time.monotonic()
    with pytest.raises(PolicyLost) as caught:
        policy.infer(session, look(policy.spec, 5, frames=4), cancelled=strike)
    fault_s = time.monotonic() - begin
    assert fault_s < DEADLINE_S + 2.0 and policy.lost is not None
    wait_for(lambda: not alive(pid), 15.0)
    policy.close(session)
    begin = time.monotonic()
    policy.disconnect()
    del policy, session
    left_s = time.monotonic() - begin
    one, again = shared(mode if then == "the same" else then)
    got, expected = run(again, (1, 4)), run(one, (1, 4))
    restart_s = time.monotonic() - begin
    print(f"fault after {fault_s:.2f} s, left in {left_s:.2f} s, works again after {restart_s:.1f} s: {caught.value}")
    if then == ONE_BRANCH:
        close(got, expected, 0.5)
    else:
        assert all(same(a, b) for a, b in zip(got, expected, strict=True))
    assert restart_s < 60.0


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "between"])
def test_gpus_that_share_a_branch_are_close_to_one(captured):
    """Exchanges in graphs or outside."""
    if BACKEND == "gloo" and captured and GPU:
        pytest.skip("gloo cannot be captured")
    one, two = shared(ONE_BRANCH)
    other = two if two.config.capture_exchange == captured else with_config(two, capture_exchange=captured)
    try:
        close(run(other, (1, 4, 4)), run(one, (1, 4, 4)), 0.5)
    finally:
        if other is not two:
            other.disconnect()
    assert ranks_of(two).lost is None


def test_four_gpus_are_a_grid():
    """Two for each branch."""
    if GPU and GPUS < 4 and BACKEND != "gloo":
        pytest.skip(f"four GPUs are needed, PyTorch sees {GPUS}")
    if GPU and BACKEND == "gloo":
        pytest.skip("gloo cannot be captured")
    one, four = shared("bf16, four")
    close(run(four, (1, 4, 4)), run(one, (1, 4, 4)), 0.5)
