"""The deterministic tier: the same bits in other processes and orders, operations that have none, switches put back."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from test.engine.tiny_policy import look, make_network, make_policy, shared_network
from wam_policy_ros.contract.errors import ConfigError, EngineError, NotDeterministic
from wam_policy_ros.engine import determinism, kernels
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.determinism import UNORDERED_ON_GPU, Audit, Determinism, switches
from wam_policy_ros.engine.policy import with_config
from wam_policy_ros.engine.sampler import draw_noise

CALLS = 6  # a first call, a full window, and a restart
ALONE = [["a", i] for i in range(CALLS)]
# Another order and two more clients, one of which came before; the same calls of "a".
AMONG_OTHERS = [["c", 0], ["b", 0], ["a", 0], ["a", 1], ["b", 1], *(["a", i] for i in range(2, CALLS))]


def test_two_processes_with_other_clients_and_orders_give_the_same_bits():
    command = [sys.executable, "-m", "test.engine.determinism_process"]
    words = [[json.dumps(ALONE)], [json.dumps(AMONG_OTHERS), "busy"]]
    running = [subprocess.Popen([*command, *w], stdout=subprocess.PIPE, text=True) for w in words]
    texts = [p.communicate(timeout=110)[0] for p in running]
    assert [p.returncode for p in running] == [0, 0]
    alone, among = (json.loads(text) for text in texts)
    for step in ("plain", "fused"):
        a, b = alone[step], among[step]
        assert b["a"] == a["a"] and len(set(a["a"])) == CALLS, step
        assert set(b) == {"a", "b", "c"} and len({b["a"][0], b["b"][0], b["c"][0]}) == 3
    assert alone["plain"]["a"][0] != alone["fused"]["a"][0]


def chunks(policy, plan=(1, 4), **changes):
    session = policy.open()
    try:
        return [policy.infer(session, replace(look(policy.spec, i, frames=f), **changes)) for i, f in enumerate(plan)]
    finally:
        policy.close(session)


@pytest.fixture(scope="module")
def fused():
    return make_policy(EngineConfig(evaluations=5, step="fused", deterministic=True))


def test_who_watches_changes_nothing_of_what_is_computed(fused):
    """Without a video the last evaluation needs one branch and no video flow; products of other sizes may round
    otherwise on a GPU."""

    def forms(policy, watched):
        seen, evaluate = [], policy.path.dit.evaluate

        def spy(slot, x, y, position, start, branches, **how):
            seen.append((branches, how["want_video"]))
            return evaluate(slot, x, y, position, start, branches, **how)

        policy.path.dit.evaluate = spy
        try:
            return seen, chunks(policy, want_video=watched)
        finally:
            policy.path.dit.evaluate = evaluate

    (watched, a), (alone, b) = forms(fused, True), forms(fused, False)
    assert watched == alone and set(watched) == {(2, True)}
    assert all(np.array_equal(x.actions, y.actions) for x, y in zip(a, b, strict=True))
    assert a[0].video is not None and b[0].video is None
    ordinary = with_config(fused, deterministic=False)
    assert forms(ordinary, False)[0] != forms(ordinary, True)[0]


def test_the_tier_says_so_and_takes_its_own_noise(fused):
    assert fused.spec.details["deterministic"] is True and "philox" in fused.spec.details["noise"]
    plain = make_policy()
    assert plain.spec.details["deterministic"] is False and "device" in plain.spec.details["noise"]
    a, b = chunks(plain, (1,))[0], chunks(with_config(plain, deterministic=True), (1,))[0]
    assert not np.array_equal(a.actions, b.actions)
    with pytest.raises(ConfigError, match="deterministic must be true or false"):
        EngineConfig(deterministic=1)  # type: ignore[arg-type]


def test_sessions_with_seeds_of_their_own_keep_their_noise(fused, monkeypatch):
    """More of them than are remembered."""
    from wam_policy_ros.engine import fused_path

    monkeypatch.setattr(fused_path, "NOISES", 2)
    policy = with_config(fused)
    expected = {seed: draw_noise(seed, torch.zeros(1, 16, 2, 2, 4), policy.network, counted=True) for seed in range(4)}
    for seed in (0, 1, 0, 2, 3, 0, 1):
        found = policy.path.draw_noise(seed, torch.zeros(1, 16, 2, 2, 4))
        assert torch.equal(found.video, expected[seed].video) and torch.equal(found.action, expected[seed].action)
        assert len(policy.path._noise) <= 2


# -- operations -------------------------------------------------------------------------------------------------


def test_an_operation_that_draws_is_an_error_that_names_it(monkeypatch):
    policy = make_policy(EngineConfig(evaluations=5, deterministic=True), network=make_network())
    session = policy.open()
    policy.infer(session, look(policy.spec, 0))
    decoder, reached = policy.network.model.action_decoder, []

    def drop(module, inputs, output):
        reached.append(True)
        return F.dropout(output, 0.5, training=True)

    handle = decoder.register_forward_hook(drop)
    with pytest.raises(NotDeterministic, match="aten::dropout is not deterministic: it draws") as error:
        policy.infer(session, look(policy.spec, 1, frames=4))
    assert error.value.op == "aten::dropout" and isinstance(error.value, EngineError) and reached
    handle.remove()
    assert session.step == 1 and policy.infer(session, look(policy.spec, 1, frames=4)).step == 1
    # Without the tier nobody looks.
    decoder.register_forward_hook(drop)
    assert len(chunks(with_config(policy, deterministic=False), (1,))) == 1


@pytest.mark.parametrize(
    ("op", "run"),
    [
        ("aten::index_add_", lambda x: x.index_add_(0, torch.tensor([0, 0]), torch.ones(2, 3))),
        ("aten::scatter_add", lambda x: x.scatter_add(0, torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3))),
        ("aten::index_put_", lambda x: x.index_put_((torch.tensor([0, 0]),), torch.ones(2, 3), accumulate=True)),
        ("aten::cumsum", lambda x: x.cumsum(0)),
        ("aten::randn", lambda x: torch.randn(3)),
        ("aten::normal_", lambda x: x.normal_()),
        ("aten::multinomial", lambda x: torch.multinomial(torch.ones(3), 2)),
    ],
)
def test_operations_without_a_fixed_order_are_named(op, run):
    with torch.inference_mode(), pytest.raises(NotDeterministic) as error, Audit("cuda"):
        run(torch.zeros(4, 3))
    assert error.value.op == op and op in str(error.value) and "remedy" in str(error.value)


def test_what_the_step_runs_is_not_named():
    q, generator = torch.ones(1, 2, 4, 8), torch.Generator().manual_seed(0)
    with torch.inference_mode(), Audit("cuda"):
        F.scaled_dot_product_attention(q, q, q)
        F.dropout(q, 0.5, training=False)
        torch.randn(3, generator=generator)
        q[:, :1] = 0
    with torch.inference_mode(), Audit("cpu"):
        q.cumsum(0)  # one thread after the other adds on a CPU
    with torch.inference_mode(), pytest.raises(NotDeterministic), Audit("cuda"):
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)


def test_every_operation_of_both_paths_has_a_fixed_order_on_a_gpu(fused, monkeypatch):
    """The same calls with the GPU's list: what the CPU's twins call is mostly what is called there."""
    monkeypatch.setattr(determinism, "Audit", lambda device_type: Audit("cuda"))
    for policy in (with_config(fused, seed=1), make_policy(EngineConfig(evaluations=5, deterministic=True))):
        for chunk in chunks(policy, (1, 4)):
            assert policy.render_video(chunk) is not None


def test_the_list_names_operations_of_pytorch():
    known = {n.split("::")[1].split(".")[0].rstrip("_") for n in torch._C._dispatch_get_all_op_names()}
    assert {"cumsum", "index_add", "scatter_add", "bincount"} <= UNORDERED_ON_GPU <= known


def test_each_kind_of_work_is_looked_at_once(monkeypatch):
    made = []

    class Counted(Audit):
        def __init__(self, device_type):
            super().__init__(device_type)
            made.append(device_type)

    monkeypatch.setattr(determinism, "Audit", Counted)
    scope = Determinism(torch.device("cpu"), enabled=True)
    for kind in ("a", "b", "a"):
        with scope.around(kind):
            torch.zeros(2).sum()
    with pytest.raises(NotDeterministic), scope.around("c"):
        torch.randn(2)
    with scope.around("c"):  # failed before, so it is looked at again
        pass
    assert len(made) == 4
    with Determinism(torch.device("cpu"), enabled=False).around("x"):
        torch.randn(2)
    assert len(made) == 4


# -- switches ---------------------------------------------------------------------------------------------------


def state():
    b = torch.backends
    return (
        b.cudnn.benchmark, b.cudnn.deterministic, b.cudnn.allow_tf32, b.cuda.matmul.allow_tf32,
        b.cuda.matmul.allow_bf16_reduced_precision_reduction, b.cuda.flash_sdp_enabled(), b.cuda.cudnn_sdp_enabled(),
        b.cuda.math_sdp_enabled(), torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


@pytest.fixture
def somebodys_settings():
    before = state()
    torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32 = True, True
    torch.backends.cuda.enable_flash_sdp(False)
    yield state()
    torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32 = before[0], before[3]
    torch.backends.cuda.enable_flash_sdp(before[5])
    assert state() == before


def test_the_process_keeps_its_switches(somebodys_settings):
    seen = []

    class Watched(type(shared_network().vae)):
        def encode(self, *args):
            seen.append(state())
            return super().encode(*args)

    policy = make_policy(EngineConfig(evaluations=5, deterministic=True), network=make_network())
    policy.network.vae.__class__ = Watched
    chunks(policy, (1, 4))
    assert seen and set(seen) == {(False, True, True, False, True, True, False, True, False)}
    assert state() == somebodys_settings
    with pytest.raises(ZeroDivisionError), switches():
        1 / 0  # noqa: B018
    assert state() == somebodys_settings


def test_two_engines_at_a_time_leave_no_switch_behind(somebodys_settings):
    inside, leave = threading.Event(), threading.Event()

    def other():
        with switches():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with switches():
        thread.start()
        inside.wait(10)
    assert not torch.backends.cudnn.benchmark  # the other one still runs
    leave.set()
    thread.join()
    assert state() == somebodys_settings


# -- kernels ----------------------------------------------------------------------------------------------------


def test_no_kernel_is_chosen_by_timing_or_adds_in_any_order():
    """Triton's autotuner picks another configuration in another process, and with it another order of sums."""
    for path in Path(kernels.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            assert not name.startswith(("autotune", "atomic_", "do_bench", "Autotuner")), f"{path.name}: {name}"


def test_the_convolutions_do_not_follow_the_clock(fused):
    from wam_policy_ros.engine.conv_plan import fixed_plan

    plan = fused.path.vae.plan
    assert plan == fixed_plan() and not plan.benchmark and plan.deterministic
