"""The account of memory against what PyTorch and the driver say. Only on a GPU; ``WAM_TEST_DEVICE=cpu`` rehearses it.

python3 -m pytest -q -rs test/engine/test_memory_on_gpu.py
"""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from test.engine.test_on_gpu import DEVICE, GPU, make_network
from test.engine.test_on_gpu import engine as options
from test.engine.tiny_policy import look, make_policy
from wam_policy_ros.contract.errors import ConfigError, Overloaded
from wam_policy_ros.engine import memory
from wam_policy_ros.engine.account import window_bytes

pytestmark = pytest.mark.skipif(GPU and not torch.cuda.is_available(), reason="PyTorch sees no GPU")
SLACK = 0.05
"""Of blocks that PyTorch rounds up to 512 bytes; small networks have many small tensors."""


@pytest.fixture(scope="module", params=["bf16, PyTorch's attention", "fp8"])
def policy(request):
    try:
        made = make_policy(options(request.param), network=make_network("wide"))
        made.prepare()
    except ConfigError as error:
        pytest.skip(str(error))
    return made


def allocated():
    gc.collect()
    if not GPU:
        return 0
    torch.cuda.synchronize(DEVICE)
    return torch.cuda.memory_allocated(DEVICE)


def test_a_window_takes_what_was_computed(policy):
    slots = [policy.path.pool.acquire() for _ in range(3)]  # two were prepared
    before, made = allocated(), policy.account
    slots.append(policy.path.pool.acquire())
    grown = policy.account.windows - made.windows
    assert grown == policy.path.pool.layout.nbytes
    assert not GPU or 0 <= allocated() - before - grown <= 512 * len(slots[0].tensors())
    for slot in slots:
        policy.path.pool.release(slot)


def test_the_nouns_are_all_that_this_policy_took(policy):
    """Beside what recordings keep, whose segments are counted whole."""
    session = policy.open()
    for i, frames in enumerate((1, 4)):
        policy.infer(session, look(policy.spec, i, frames=frames))
    account = policy.account
    assert account.windows >= window_bytes(policy.path) and account.own <= account.taken
    if GPU:
        live = account.own - account.recordings
        assert account.recordings > 0 and live <= allocated() * (1 + SLACK)
        free, total = torch.cuda.mem_get_info(DEVICE)
        assert abs(account.taken - (total - memory.free_on(DEVICE))) <= SLACK * total and free <= total
        assert policy.config.text != "streamed" or account.host > 0
    policy.close(session)


def test_a_budget_is_kept(policy):
    """Of the same network, whose weights are shared: what it holds and no more."""
    has = policy.capacity
    if policy.config.linears == "fp8":
        pytest.skip("the layers are taken over: one policy per network")
    budget = has.taken.own - has.taken.idle + has.reserve_bytes + 40 * has.session_bytes
    few = make_policy(replace(policy.config, memory_budget_gib=budget / 2**30), network=policy.network, like=policy)
    few.prepare()
    assert few.capacity.where == "this budget" and 2 <= few.capacity.sessions <= 38
    sessions = [few.open() for _ in range(few.capacity.sessions)]
    with pytest.raises(Overloaded):
        few.open()
    assert len(few.path.pool.free) >= len(sessions)
    for session in sessions:
        few.close(session)
