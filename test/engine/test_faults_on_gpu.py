"""Faults on a real device: what kernels leave behind, and what tells a lost device from a call that failed.

``WAM_TEST_DEVICE=cpu`` rehearses what can be rehearsed; see ``test_on_gpu.py``.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from test.engine.faulty_path import Device, Fault, FaultyPath
from test.engine.test_on_gpu import DEVICE, GPU, MODES, equal, prepared, run
from test.engine.tiny_policy import look
from wam_policy_ros.contract.errors import EngineError

pytestmark = pytest.mark.skipif(GPU and not torch.cuda.is_available(), reason="PyTorch sees no GPU")

PLAN = (1, 4, 4, 4)


@pytest.mark.parametrize("mode", MODES)
def test_no_kernel_reads_rows_behind_the_window(mode):
    """Attention works in blocks, and a block may reach beyond the rows that count: those are made NaN."""
    policy = prepared("wide", mode)
    wanted, session = run(policy, PLAN), policy.open()
    for i, frames in enumerate(PLAN):
        slot = session.window.slot
        with torch.inference_mode():
            for rows in (*slot.k, *slot.v) if slot is not None else ():
                rows[:, session.window.cached :].fill_(float("nan"))
        assert equal(policy.infer(session, look(policy.spec, i, frames=frames)), wanted[i]), i
    policy.close(session)


@pytest.mark.parametrize("mode", ["bf16, PyTorch's attention", "fp8"])
def test_a_step_with_nan_leaves_the_bits_of_the_next(mode):
    """Through recorded graphs and their memory."""
    policy = prepared("wide", mode)
    wanted, inner = run(policy, PLAN), policy.path
    session = policy.open()
    policy.path = path = FaultyPath(inner, Device())
    try:
        for i, frames in enumerate(PLAN):
            seen = look(policy.spec, i, frames=frames)
            for fault in (Fault("prefill", "nan"), Fault("evaluate", "nan", 2), Fault("text", "nan")):
                path.arm(fault)
                with pytest.raises(EngineError, match="not finite"):
                    policy.infer(session, seen)
            assert equal(policy.infer(session, replace(seen, want_video=True)), wanted[i]), i
        policy.close(session)
    finally:
        policy.path = inner


LOST = """
import torch
from wam_policy_ros.contract.errors import PolicyLost
from wam_policy_ros.engine.device import DeviceWatch
device = torch.device("cuda")
watch = DeviceWatch(device)
for wrong in (lambda: torch.empty(1 << 50, device=device), lambda: torch.ones(2, 3, device=device) @ torch.ones(2, 3,
              device=device)):
    try:
        with watch.around():
            wrong()
        raise SystemExit("nothing was raised")
    except RuntimeError:
        assert watch.lost is None
try:
    with watch.around():
        torch.zeros(2, device=device)[torch.tensor([99], device=device)].cpu()
except PolicyLost as error:
    print("LOST", error)
try:
    with watch.around():
        raise SystemExit("a lost device was used")
except PolicyLost:
    print("AND LEFT ALONE")
"""


@pytest.mark.skipif(not GPU, reason="a CPU cannot be lost without its process")
def test_a_context_that_ended_is_lost_and_a_call_that_failed_is_not():
    """In a process of its own: an index out of bounds ends every later call."""
    done = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=180)
    assert "LOST" in done.stdout and "restart the process" in done.stdout, done.stdout + done.stderr[-2000:]
    assert "AND LEFT ALONE" in done.stdout and done.returncode == 0, done.stderr[-2000:]


def test_after_an_error_the_device_is_asked_and_answers():
    from wam_policy_ros.engine.device import DeviceWatch

    watch = DeviceWatch(DEVICE)
    with pytest.raises(ZeroDivisionError), watch.around():
        raise ZeroDivisionError
    assert watch.lost is None
