"""Sequence parallelism over a real process group: two and four gloo processes against one."""

from __future__ import annotations

import sys
import time

import pytest
import torch

from test.engine import sequence_worker as worker

RANKS = 4
LIMIT_S = 200
# Relative, float32, matrix products over fewer rows: of one evaluation, and of a call of sixteen solver steps.
LIMIT = 1e-6
LIMIT_OF_A_CALL = 1e-5  # 1.4e-6 seen

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="gloo is told the name of the loopback interface"),
    pytest.mark.timeout(LIMIT_S + 60),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank found: ``[rank][ranks, mode]`` is a list of runs."""
    folder = tmp_path_factory.mktemp("ranks")
    context = torch.multiprocessing.start_processes(
        worker.work, (RANKS, str(folder)), nprocs=RANKS, join=False, daemon=True, start_method="spawn"
    )
    try:
        until = time.monotonic() + LIMIT_S
        while not context.join(timeout=1.0):
            assert time.monotonic() < until, f"ranks not done after {LIMIT_S} s"
    finally:
        for process in context.processes:
            process.kill()
            process.join(10)
    assert not any(process.is_alive() for process in context.processes)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.fixture(scope="module")
def alone():
    return {mode: worker.chunks(mode) for mode in worker.MODES}


@pytest.mark.parametrize("mode", worker.MODES)
@pytest.mark.parametrize("ranks", [2, RANKS])
def test_processes_equal_one(found, alone, ranks, mode):
    results = [runs for rank in found for runs in rank[ranks, mode]]
    for other in results[1:]:  # every rank, every run
        assert all(torch.equal(other[name], value) for name, value in results[0].items())
    errors = {}
    for name, got in results[0].items():
        expected = alone[mode][name].double()
        errors[name] = float((got.double() - expected).norm() / expected.norm())
    assert max(e for name, e in errors.items() if name.startswith("flow")) < LIMIT, errors
    assert max(errors.values()) < LIMIT_OF_A_CALL, errors
