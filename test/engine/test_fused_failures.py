"""What a fused step leaves behind when something in it fails: the session as it was, and every window given back."""

from __future__ import annotations

import fnmatch
from dataclasses import replace

import numpy as np
import pytest
import torch

from test.engine.tiny_policy import look, make_network, make_policy, same
from wam_policy_ros.contract.errors import EngineError, Overloaded
from wam_policy_ros.engine import policy as policy_module
from wam_policy_ros.engine import window_slots
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.fp8 import E4M3FN, E4M3FNUZ
from wam_policy_ros.engine.kernels.ops import quantize_rows
from wam_policy_ros.engine.quantize import KEPT_NATIVE, Fp8Linear
from wam_policy_ros.model.errors import ShapeError
from wam_policy_ros.model.fp8_layout import is_fp8_weight

FUSED = EngineConfig(evaluations=5, step="fused")


class Broken(Exception):
    pass


def breaks(*args, **kwargs):
    raise Broken


def no_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 6 GiB\nmore")


def begun(policy):
    """A session after its second call, and what its third gives."""
    session = policy.open()
    for i, frames in enumerate((1, 4)):
        policy.infer(session, look(policy.spec, i, frames=frames))
    return session


@pytest.fixture(scope="module")
def third():
    policy = make_policy(FUSED)
    return policy.infer(begun(policy), look(policy.spec, 9, frames=4))


@pytest.mark.parametrize("where", ["load_image", "load_text", "prefill", "evaluate"])
def test_a_failure_anywhere_gives_the_new_window_back(monkeypatch, third, where):
    policy = make_policy(FUSED)
    session = begun(policy)
    monkeypatch.setattr(policy.path.dit, where, breaks)
    with pytest.raises(Broken):
        policy.infer(session, look(policy.spec, 5, frames=4, prompt="another"))
    monkeypatch.undo()
    assert (policy.path.pool.made, policy.path.pool.idle) == (2, 1)
    assert same(policy.infer(session, look(policy.spec, 9, frames=4)), third)
    policy.close(session)
    assert policy.path.pool.idle == 2


@pytest.mark.parametrize("prompt", ["another", None])
def test_a_failure_after_the_step_leaves_the_session(monkeypatch, third, prompt):
    """In decoding, and where the predicted video is put together."""
    policy = make_policy(FUSED)
    session, change = begun(policy), {"prompt": prompt} if prompt else {}
    for target, name in ((policy_module, "decode_actions"), (policy, "_predicted")):
        monkeypatch.setattr(target, name, breaks)
        with pytest.raises(Broken):
            policy.infer(session, look(policy.spec, 5, frames=4, **change))
        monkeypatch.undo()
    monkeypatch.setattr(policy_module, "decode_actions", lambda rows, *rest: np.full((24, 8), np.nan))
    with pytest.raises(EngineError, match="not finite"):
        policy.infer(session, look(policy.spec, 5, frames=4, **change))
    monkeypatch.undo()
    assert session.step == 2 and policy.path.pool.made - policy.path.pool.idle == 1
    assert same(policy.infer(session, look(policy.spec, 9, frames=4)), third)


def test_a_text_that_was_half_loaded_is_loaded_again(monkeypatch, third):
    policy = make_policy(FUSED)
    session = begun(policy)
    slot, keys = session.window.slot, session.window.slot.loaded[0]
    monkeypatch.setattr("wam_policy_ros.engine.fast_dit._peaks", breaks)
    with pytest.raises(Broken), torch.inference_mode():
        policy.path.dit.load_text(slot, 0, replace(keys, k=0 * keys.k, v=0 * keys.v))
    monkeypatch.undo()
    assert same(policy.infer(session, look(policy.spec, 9, frames=4)), third)


def test_no_memory_is_overload_and_changes_nothing(monkeypatch, third):
    policy = make_policy(FUSED)
    session = begun(policy)
    monkeypatch.setattr(window_slots, "WindowSlot", no_memory)
    with pytest.raises(Overloaded, match=r"window.*1 windows of 0.00 GiB") as caught:
        policy.infer(session, look(policy.spec, 5, frames=4, prompt="another"))
    assert caught.value.__cause__ is None and caught.value.__context__ is None, "its frames would hold buffers"
    monkeypatch.undo()
    monkeypatch.setattr(policy.path.dit, "evaluate", no_memory)
    with pytest.raises(Overloaded, match=r"this step.*got: HIP out of memory. Tried to allocate 6 GiB; remedy"):
        policy.infer(session, look(policy.spec, 5, frames=4))
    monkeypatch.undo()
    assert same(policy.infer(session, look(policy.spec, 9, frames=4)), third)


def test_a_frame_that_fails_ahead_of_its_call_is_forgotten(monkeypatch, third):
    policy = make_policy(FUSED)
    session = begun(policy)
    seen = look(policy.spec, 9, frames=4)
    views = [{name: f[t] for name, f in seen.frames.items()} for t in range(4)]
    assert policy.observe(session, 0, views[0])
    push = policy.path.vae.push
    monkeypatch.setattr(policy.path.vae, "push", lambda *a, **k: (push(*a, **k), breaks()))
    with pytest.raises(Broken):
        policy.observe(session, 1, views[1])
    monkeypatch.undo()
    assert session.ahead.offered == 0 and not policy.observe(session, 1, views[1])
    assert same(policy.infer(session, seen), third)


@pytest.mark.parametrize("options", [{"guidance_scale": 1.0}, {"guidance_steps": (0, 2)}, {"schedule": "dynamic"}])
def test_every_form_of_an_evaluation_is_prepared(monkeypatch, options):
    """The graphs are recorded per form: one that is missing would be recorded while a robot waits."""
    policy = make_policy(replace(FUSED, **options))
    path, seen = policy.path, []
    evaluate = path.evaluate

    def watch(draft, step, video, action, proprio, with_video, branches):
        seen.append((draft.slot.index, draft.current_start_frame, draft.cached, with_video, branches))
        return evaluate(draft, step, video, action, proprio, with_video, branches)

    monkeypatch.setattr(path, "evaluate", watch)
    path.prepare()
    prepared = set(seen)
    assert path.pool.made == path.pool.idle == FUSED.prepared_windows and len(seen) == len(prepared)
    seen.clear()
    session = policy.open()
    # A first call, a full window, its restart; another instruction; with a video and without.
    for i, (frames, prompt, video) in enumerate(
        [(1, "a", True), *[(4, "a", i % 2 == 0) for i in range(5)], (4, "b", True), (4, "b", False)]
    ):
        policy.infer(session, replace(look(policy.spec, i, frames=frames, prompt=prompt), want_video=video))
    assert set(seen) <= prepared and len({s[0] for s in seen}) == 2


def test_prepared_windows_are_used_first():
    pool = make_policy(FUSED).path.pool
    slots = [pool.acquire() for _ in range(3)]
    for slot in (slots[1], slots[0], slots[2]):
        pool.release(slot)
    assert [pool.acquire().index for _ in range(4)] == [0, 1, 2, 3]


def test_preparing_makes_do_with_one_window(monkeypatch):
    policy = make_policy(FUSED)
    slot = window_slots.WindowSlot
    made = iter([slot, no_memory, no_memory])
    monkeypatch.setattr(window_slots, "WindowSlot", lambda *a: next(made)(*a))
    policy.path.prepare()
    assert policy.path.pool.made == policy.path.pool.idle == 1
    with pytest.raises(Overloaded):
        make_policy(FUSED).path.prepare()


def test_more_than_one_session_at_a_time_is_refused():
    path = make_policy(FUSED).path
    latent = path.pool.layout.latent
    with torch.inference_mode(), pytest.raises(ShapeError, match="batch of 2"):
        first = path.encode_first(torch.zeros(2, 3, 1, 8 * latent[2], 8 * latent[3]))
        path.restarted(None, first, None, None, None)
    assert path.pool.made == 0


# -- eight bits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", [E4M3FN, E4M3FNUZ])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 64), (7, 64, 8), (3, 50, 33)])
def test_a_layer_of_any_width(fp8, rows, inputs, outputs):
    g = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, inputs, generator=g) for n in (outputs, rows))
    bias = torch.randn(outputs, generator=g)
    layer = Fp8Linear.from_weight(weight, bias, fp8)
    assert not layer.weight.shape[0] % 16 and not layer.weight.shape[1] % 16
    out = layer(x)
    assert out.raw.shape == (rows, outputs) and out.raw.is_contiguous() and out.bias is bias
    quantised = quantize_rows(x, fp8), quantize_rows(weight, fp8)
    a, b = (q.values.double() * q.row_scale.unsqueeze(1) for q in quantised)
    torch.testing.assert_close(out.raw.double(), a @ b.T, rtol=1e-5, atol=1e-5)
    error = float((out.raw - x @ weight.T).norm() / (x @ weight.T).norm())
    assert 0.005 < error < 0.1, error
    whole = replace(layer, adds_bias=True)(x)
    assert whole.bias is None and whole.raw.is_contiguous()
    torch.testing.assert_close(whole.raw, out.raw + bias, rtol=1e-5, atol=1e-5)


def test_every_parameter_is_eight_bit_or_has_a_reason_not_to_be():
    network = make_network()
    names = [n for n, _ in network.named_parameters() if not is_fp8_weight(n)]
    reasons = {p: [n for n in names if fnmatch.fnmatchcase(n, f"{p}*")] for p in KEPT_NATIVE}
    covered = {n for found in reasons.values() for n in found}
    assert covered == set(names)
    assert all(reasons.values()), "reasons for what does not exist"
