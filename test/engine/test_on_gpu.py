"""What only a GPU can show: graphs, 8-bit products and attention, kernels against their twins, memory, cancellation.

    python3 -m pytest -q -rs --durations=12 test/engine/test_on_gpu.py

What is quickest to show that something is wrong comes first. Small networks with random weights, one of them with
widths like the published one's (128 numbers per head). Every test stands alone: what one of them cannot do here says
nothing about the others. ``WAM_TEST_DEVICE=cpu`` rehearses the script with the plain twins and without graphs; it
proves nothing about a GPU.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from test.engine.tiny_policy import TEXT_LEN, look, make_policy, same
from test.golden_files import GOLDEN_DIR, golden
from test.tiny_checkpoint import config_json
from wam_policy_ros.contract.embodiments import AGIBOT, DROID
from wam_policy_ros.contract.errors import Cancelled, ConfigError
from wam_policy_ros.contract.interface import ResetReason
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.device_resize import DeviceMosaic
from wam_policy_ros.engine.fast_attention import CudnnFp8Attention, Fp8Scales, PlainFp8Attention
from wam_policy_ros.engine.fp8 import fp8_for
from wam_policy_ros.engine.kernels.launch import collecting, compile_together
from wam_policy_ros.engine.noise import counted_normal
from wam_policy_ros.engine.policy import DreamZeroPolicy, with_config
from wam_policy_ros.engine.preprocess import stitch_views
from wam_policy_ros.engine.quantize import Fp8Linear
from wam_policy_ros.model.config import DreamZeroConfig
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.tools.bench_suite.kernel_cases import SIZES, cases
from wam_policy_ros.tools.golden_suite import closed_loop as suite
from wam_policy_ros.tools.golden_suite.folder import GoldenFolder

DEVICE = torch.device(os.environ.get("WAM_TEST_DEVICE", "cuda"))
GPU = DEVICE.type == "cuda"
pytestmark = pytest.mark.skipif(GPU and not torch.cuda.is_available(), reason="PyTorch sees no GPU")

WIDTHS = {"narrow": {}, "wide": {"dim": 256, "num_heads": 2, "ffn_dim": 512}}
MODES = {
    "bf16": {"attention": "cudnn"},
    "bf16, PyTorch's attention": {"attention": "torch"},
    "fp8 linears": {"linears": "fp8", "attention": "torch"},
    "fp8": {"linears": "fp8", "attention": "fp8", "text": "streamed"},
}
ALL = [("wide", mode) for mode in MODES] + [("narrow", "bf16"), ("narrow", "fp8 linears")]
PLAN = (1, 4, 4, 4, 4, 4)  # a first call, a full window, and a restart


def make_network(width: str = "wide") -> DreamZero:
    raw = config_json(text_len=TEXT_LEN, **WIDTHS[width])
    config = DreamZeroConfig.from_config_json(raw)
    return DreamZero.with_random_weights(config, device=DEVICE, dtype=torch.bfloat16 if GPU else torch.float32)


def engine(mode: str, **changes) -> EngineConfig:
    options = {"evaluations": 5, "step": "fused", "graphs": GPU, **MODES[mode], **changes}
    if not GPU and options["attention"] == "cudnn":
        options["attention"] = "torch"
    return EngineConfig(**options)


@functools.cache
def prepared(width: str, mode: str) -> DreamZeroPolicy:
    """A policy ready for its first call, as ``build_policy`` gives it; skips where this machine has no such mode."""
    if GPU and mode == "fp8" and importlib.util.find_spec("cudnn") is None:
        pytest.skip("nvidia-cudnn-frontend is not installed")
    try:
        policy = make_policy(engine(mode), network=make_network(width))
        policy.prepare()
    except ConfigError as error:
        if mode == "bf16, PyTorch's attention":  # this one has to work everywhere
            raise
        pytest.skip(f"{mode} cannot run here: {error}")
    return policy


@pytest.fixture(params=ALL, ids=[f"{width}, {mode}" for width, mode in ALL])
def policy(request) -> DreamZeroPolicy:
    return prepared(*request.param)


@pytest.fixture(params=MODES)
def wide(request) -> DreamZeroPolicy:
    """Of what does not depend on how wide the network is."""
    return prepared("wide", request.param)


def run(policy, plan=PLAN, seed=0, session_seed=None, **changes):
    session, chunks = policy.open(seed=session_seed), []
    try:
        for i, frames in enumerate(plan):
            seen = look(policy.spec, 100 * seed + i, frames=frames)
            chunks.append(policy.infer(session, replace(seen, **changes)))
    finally:
        policy.close(session)
    return chunks


def equal(a, b) -> bool:
    """``same``, also of calls without a video."""
    if (a.video is None) != (b.video is None):
        return False
    return same(a, b) if a.video is not None else bool(np.array_equal(a.actions, b.actions)) and a.info == b.info


def distance(a, b) -> float:
    return float(np.abs(a.actions - b.actions).max() / np.std(b.actions))


# -- graphs -----------------------------------------------------------------------------------------------------


def test_a_step_inside_another_one_at_every_question(policy):
    """Recorded work of several windows and of the encoders, in turns: both steps give what they give alone."""
    outer, inner, chunks = policy.open(seed=1), policy.open(seed=2), ([], [])
    asked = 0

    def robot() -> bool:
        nonlocal asked
        asked += 1
        if asked % 3 == 0:  # not always at the same questions: a step has another number of them
            seen = look(policy.spec, 200 + len(chunks[1]), frames=PLAN[len(chunks[1]) % len(PLAN)])
            chunks[1].append(policy.infer(inner, seen))
        return False

    for call, frames in enumerate(PLAN):
        chunks[0].append(policy.infer(outer, look(policy.spec, 100 + call, frames=frames), cancelled=robot))
    policy.close(outer), policy.close(inner)
    assert len(chunks[1]) >= 2 * len(PLAN) and any("interrupted" in chunk.timings_s for chunk in chunks[0])
    for number, found in enumerate(chunks):
        plan = [PLAN[i % len(PLAN)] for i in range(len(found))]
        alone = run(policy, plan, seed=number + 1, session_seed=number + 1)
        assert all(equal(a, b) for a, b in zip(found, alone, strict=True))
    for chunk in chunks[0]:
        stages = {k: v for k, v in chunk.timings_s.items() if k not in ("total", "interrupted")}
        assert all(seconds >= -1e-3 for seconds in stages.values()), stages


def compiled() -> int:
    """Kernels that Triton has compiled in this process."""
    if not GPU:
        return 0
    modules = [importlib.import_module(f"wam_policy_ros.engine.kernels.{name}") for name in
               ("activation", "conv3d_triton", "cross", "norms", "rope")]  # fmt: skip
    kernels = [k for m in modules for k in vars(m).values() if hasattr(k, "device_caches")]
    assert kernels
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())


def test_nothing_is_compiled_after_preparing(policy):
    before = compiled()
    for video in (True, False):
        run(policy, want_video=video)
    assert compiled() == before and (before > 10 or not GPU)


@pytest.mark.parametrize("video", [True, False], ids=["with video", "without"])
def test_graphs_on_equals_graphs_off(policy, video):
    off = with_config(policy, graphs=False)
    assert off.path.dit is policy.path.dit and not off.path.graphs.enabled
    assert policy.path.graphs.enabled is GPU and (len(policy.path.graphs) > 0) is GPU
    a, b = run(policy, want_video=video), run(off, want_video=video)
    assert all(equal(x, y) for x, y in zip(a, b, strict=True))
    assert a[4].reset is ResetReason.WINDOW_FULL and not np.array_equal(a[1].actions, a[2].actions)
    assert np.isfinite([c.actions for c in a]).all()


@pytest.mark.parametrize(
    "options",
    [
        {"guidance_scale": 1.0},
        {"guidance_steps": (0, 2)},
        {"guidance_steps": (1, 7), "guidance_between": "off"},
        {"schedule": "dynamic"},
        {"schedule": "full"},
    ],
    ids=str,
)
def test_schedules_and_guidance_under_graphs(options):
    """Prepared, too: each of them evaluates in forms of its own."""
    on = with_config(prepared("wide", "bf16, PyTorch's attention"), **options)
    on.prepare()
    recorded = len(on.path.graphs)
    a, b = run(on, (1, 4, 4)), run(with_config(on, graphs=False), (1, 4, 4))
    assert all(equal(x, y) for x, y in zip(a, b, strict=True))
    assert len(on.path.graphs) == recorded


def test_branches_beside_each_other_give_the_bits_of_one_after_the_other(wide):
    """On two streams of a graph, and without graphs; with windows that were recorded without being run among them."""
    beside = with_config(wide, branches="beside")
    beside.prepare()
    off = with_config(beside, graphs=False)
    sessions = [beside.open(), beside.open()]
    expected = run(off, (1, 4, 4, 4))
    for i, frames in enumerate((1, 4, 4, 4)):
        for session in sessions:
            assert same(beside.infer(session, look(beside.spec, i, frames=frames)), expected[i])
    for session in sessions:
        beside.close(session)
    assert beside.path.pool.made == 2


def test_nothing_is_recorded_after_preparing(wide):
    """First calls, a restart, another instruction beside the old window, a reset, with a video and without."""
    policy = with_config(wide)  # with windows of its own
    texts = []
    policy.path.prepare(lambda text, fraction: texts.append(text))
    if GPU:
        found = re.search(r"(\d+) of (\d+) kernels compiled", " ".join(texts))
        assert found and found[1] == found[2] != "0", texts
    caches = [policy.path.graphs, policy.path.encoders, policy.path.first_frames]
    before, made = [len(c) for c in caches], policy.path.pool.made
    session = policy.open()
    for i, (frames, prompt) in enumerate([(1, "a"), *[(4, "a")] * 5, (4, "b"), (4, "b")]):
        seen = look(policy.spec, i, frames=frames, prompt=prompt)
        policy.infer(session, replace(seen, want_video=i % 2 == 0))
    policy.reset(session)
    policy.infer(session, look(policy.spec, 9, frames=1))
    policy.close(session)
    assert [len(c) for c in caches] == before and policy.path.pool.made == made == policy.path.pool.idle


def test_nothing_is_recorded_for_several_sessions_either(wide):
    """Three of them with windows of their own, and one for another instruction."""
    policy = with_config(wide, prepared_windows=4)
    policy.prepare()
    before = [len(cache) for cache in policy.path.caches]
    assert (
        policy.path.pool.made == policy.path.pool.idle == policy.spec.details.get("prepared_windows", 4) == 4 or not GPU
    )
    sessions = [policy.open() for _ in range(3)]
    for i, (frames, prompt) in enumerate([(1, "a"), *[(4, "a")] * 5, (4, "b"), (4, "b")]):
        for session in sessions:
            seen = look(policy.spec, i, frames=frames, prompt=prompt)
            policy.infer(session, replace(seen, want_video=i % 2 == 0))
    for session in sessions:
        policy.close(session)
    assert [len(cache) for cache in policy.path.caches] == before and (policy.path.pool.made == 4 or not GPU)


def test_a_step_between_a_recording_and_its_evaluation_changes_nothing(wide):
    """In a window that was not prepared; the other step is replayed, or recorded itself."""
    policy, off = with_config(wide, prepared_windows=1), with_config(wide, graphs=False)
    policy.prepare()
    recorded, inner = len(policy.path.graphs), []
    robot, client = policy.open(seed=1), policy.open(seed=2)

    def asked():
        if len(inner) < len(PLAN):
            seen = look(policy.spec, 100 + len(inner), frames=PLAN[len(inner)])
            inner.append(policy.infer(robot, seen))
        return False

    outer = [policy.infer(client, look(policy.spec, 200 + i, frames=n), cancelled=asked) for i, n in enumerate(PLAN)]
    assert len(policy.path.graphs) > recorded or not GPU
    expected = run(off, seed=1, session_seed=1), run(off, seed=2, session_seed=2)
    assert all(same(a, b) for a, b in zip((*inner, *outer), (*expected[0], *expected[1]), strict=True))
    policy.close(robot)
    policy.close(client)


def test_interleaved_sessions_are_exact(wide):
    """Seeds of their own, a window that restarts, and an instruction that changes in one of them."""
    plans = {1: [(1, "a"), *[(4, "a")] * 5], 2: [(1, "b"), (4, "b"), (4, "c"), (4, "c"), (4, "b"), (4, "b")]}

    def call(session, s, i):
        frames, prompt = plans[s][i]
        return wide.infer(session, look(wide.spec, 100 * s + i, frames=frames, prompt=prompt))

    alone = {}
    for s in plans:
        session = wide.open(seed=s)
        alone[s] = [call(session, s, i) for i in range(6)]
        wide.close(session)
    sessions = {s: wide.open(seed=s) for s in plans}
    for i in range(6):
        for s, session in sessions.items():
            assert same(call(session, s, i), alone[s][i]), (s, i)
    for session in sessions.values():
        wide.close(session)
    assert alone[1][4].reset is ResetReason.WINDOW_FULL and alone[2][2].reset is ResetReason.PROMPT_CHANGED
    assert not np.array_equal(run(wide, (1,), session_seed=1)[0].actions, run(wide, (1,), session_seed=2)[0].actions)


# -- numbers ----------------------------------------------------------------------------------------------------


@functools.cache
def plainly(width: str) -> list:
    return run(make_policy(EngineConfig(evaluations=5), network=make_network(width)), (1, 4, 4))


def test_the_fused_step_is_close_to_the_plain_one(policy):
    """Two roundings of one algorithm, in units of the actions' spread; wrong weights or positions give more than 1."""
    plain = plainly("wide" if policy.network.config.dit.dim == 256 else "narrow")
    limit = 0.8 if "fp8" in (policy.config.linears, policy.config.attention) else 0.3
    errors = [distance(a, b) for a, b in zip(run(policy, (1, 4, 4)), plain, strict=True)]
    assert 0 < max(errors) < limit, errors


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 5120, 5120), (7, 5120, 32), (357, 250, 24), (1785, 1024, 3072), (16, 512, 8)]
)
def test_eight_bit_products_equal_their_twin(rows, inputs, outputs):
    fp8 = fp8_for(DEVICE)
    g = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, inputs, generator=g).bfloat16() for n in (outputs, rows))
    layers = [Fp8Linear.from_weight(weight.to(where), None, fp8) for where in ("cpu", DEVICE)]
    a, b = (layer.weight.cpu().view(torch.uint8) for layer in layers)
    assert a.shape == b.shape and float((a != b).float().mean()) < 1e-3  # a scale may be rounded otherwise
    with torch.inference_mode():
        twin, out = layers[0](x).raw.float(), layers[1](x.to(DEVICE)).raw.float().cpu()
    assert float((out - twin).norm() / twin.norm()) < 1e-2  # rounding to bf16 and the GPU's short accumulator
    exact = x.float() @ weight.float().T
    assert float((out - exact).norm() / exact.norm()) < 0.1
    bias = (exact.std() * torch.randn(outputs, generator=g)).bfloat16()
    with torch.inference_mode():
        whole = replace(layers[1], bias=bias.to(DEVICE), adds_bias=True)(x.to(DEVICE))
    assert whole.bias is None and whole.raw.is_contiguous()
    assert float((whole.raw.float().cpu() - out - bias.float()).norm() / out.norm()) < 1e-2


@pytest.mark.parametrize(("tokens", "keys"), [(357, 800), (128, 128), (25, 1000)])
def test_eight_bit_attention_equals_its_twin(tokens, keys):
    """On rows of a window, as the step has them."""
    if not GPU or importlib.util.find_spec("cudnn") is None:
        pytest.skip("needs a GPU and nvidia-cudnn-frontend")
    scales = Fp8Scales(fp8_for(DEVICE))
    scales.q, scales.k, scales.v = [40.0], [50.0], [60.0]
    try:
        kernel = CudnnFp8Attention(scales, DEVICE)
    except ConfigError as error:
        pytest.skip(str(error))
    g = torch.Generator(device=DEVICE).manual_seed(0)

    def draw(rows, scale):
        return (torch.randn(2, rows, 2, 128, generator=g, device=DEVICE) * scale).to(scales.fp8.dtype)

    q, window_k, window_v = draw(tokens, 40.0), draw(1024, 50.0), draw(1024, 60.0)
    k, v = window_k[:, :keys], window_v[:, :keys]
    with torch.inference_mode():
        out, twin = kernel(q, k, v, 0).float(), PlainFp8Attention(scales)(q, k, v, 0).float()
        again = kernel(q, k, v, 0).float()
    assert out.isfinite().all() and torch.equal(out, again)
    error = float((out - twin).norm() / twin.norm())
    assert error < 0.1, error  # weights of the softmax and results are rounded to 3 bits of mantissa


KERNELS = {"narrow": SIZES["tiny"], "wide": SIZES["tiny"]._replace(heads=2, head_dim=128, ffn=512)}


@pytest.mark.parametrize("sizes", KERNELS.values(), ids=KERNELS)
def test_kernels_equal_their_twins(sizes):
    torch.manual_seed(0)
    chosen = list(cases(sizes, DEVICE))
    with collecting() as noted:
        for case in chosen:
            case.work(0)
    if GPU:
        assert compile_together(noted, DEVICE) == len(noted) > 0
    found = {case.name: (case.error(), case.bound) for case in chosen}
    assert len(found) > 10
    assert {name: pair for name, pair in found.items() if not pair[0] <= pair[1]} == {}


def test_nothing_is_wrong_with_this_machine(policy):
    """The convolutions were compared with float32 when the policy was made; small 8-bit products may be slow."""
    assert all("slower than native" in line for line in policy.warnings), policy.warnings
    assert policy.spec.details["tier"] == "numeric" and policy.spec.details["graphs"] is GPU


# -- the same bits in other ways --------------------------------------------------------------------------------


def test_frames_encoded_ahead_give_the_same_bits(wide):
    def go(ahead):
        session, chunks = wide.open(), []
        for i in range(5):
            seen = look(wide.spec, 300 + i, frames=1 if i == 0 else 4)
            if ahead and i:
                for slot in range(3):
                    assert wide.observe(session, slot, {n: f[slot] for n, f in seen.frames.items()})
            chunks.append(wide.infer(session, seen))
        told = session.ahead
        wide.close(session)
        return chunks, told

    expected, _ = go(False)
    chunks, told = go(True)
    assert all(same(a, b) for a, b in zip(chunks, expected, strict=True))
    assert (told.hits, told.misses) == (3, 0)


def test_the_text_encoder_may_wait_on_the_host():
    resident = prepared("wide", "bf16, PyTorch's attention")
    streamed = make_policy(replace(resident.config, text="streamed"), network=make_network())
    a, b = (p.path.prompts(*p._tokenize("open the drawer")) for p in (resident, streamed))
    assert torch.equal(a.embedding, b.embedding) and float(a.embedding.abs().max()) > 0
    for x, y in zip(run(resident, (1, 4), prompt="open it"), run(streamed, (1, 4), prompt="open it"), strict=True):
        assert same(x, y)


@pytest.mark.parametrize("robot", [DROID, AGIBOT], ids=["growing", "shrinking"])
def test_the_mosaic_is_the_hosts(robot):
    """The device does what the same operations do on a CPU, bit for bit, and that is the host's resize to a level."""
    rng = np.random.default_rng(0)
    views = {c.name: rng.integers(0, 256, (2, c.height, c.width, 3), dtype=np.uint8) for c in robot.cameras}
    there = DeviceMosaic(robot, DEVICE)(views).cpu()
    assert torch.equal(there, DeviceMosaic(robot, "cpu")(views))
    difference = (there.int() - stitch_views(views, robot).int()).abs()
    assert int(difference.max()) <= 1 and float((difference > 0).float().mean()) < 1e-3


def test_the_deterministic_tier_repeats_itself_whoever_watches():
    """Recorded anew by a second policy, with a video and without, beside another session; noise as on a CPU."""
    policy = prepared("wide", "bf16, PyTorch's attention")
    first, second = (with_config(policy, deterministic=True) for _ in range(2))
    for one in (first, second):
        one.prepare()  # every operation of the step is looked at
    expected = run(first, (1, 4, 4), want_video=True)
    other = second.open(seed=5)
    second.infer(other, look(second.spec, 1, frames=1))
    for video in (True, False):
        got = run(second, (1, 4, 4), want_video=video)
        assert all(np.array_equal(a.actions, b.actions) for a, b in zip(got, expected, strict=True)), video
    second.close(other)
    noise = first.path.draw_noise(1140, torch.zeros(1, 16, 2, 2, 4, device=DEVICE))
    there = counted_normal(1140, 0, (1, 16, 2, 2, 4), torch.device("cpu"), torch.bfloat16)
    assert torch.equal(noise.video.cpu().bfloat16(), there)


# -- sessions --------------------------------------------------------------------------------------------------------


@functools.cache
def uninterrupted(mode: str, calls: int) -> list:
    return script(prepared("wide", mode), calls, None, None)


def script(policy, calls, prompt, after):
    """So many calls and two more; with ``after``, a call in between that is cancelled after so many evaluations."""
    session, out = policy.open(), []
    for i in range(calls):
        out.append(policy.infer(session, look(policy.spec, i, frames=PLAN[i])))
    if after is not None:
        asked = iter(range(100))
        other = look(policy.spec, 77, frames=4, **({"prompt": prompt} if prompt else {}))
        with pytest.raises(Cancelled):
            policy.infer(session, other, cancelled=lambda: next(asked) >= after)
    out += [policy.infer(session, look(policy.spec, 50 + i, frames=4)) for i in range(2)]
    policy.close(session)
    return out


CANCELLED = [(calls, prompt, after) for calls, prompt in ((1, None), (2, "fold the towel"), (4, None), (5, None))
             for after in (0, 2)]  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "calls", "prompt", "after"),
    [(mode, *case) for mode in ("bf16, PyTorch's attention", "fp8") for case in CANCELLED]
    + [(mode, *CANCELLED[i]) for mode in ("bf16", "fp8 linears") for i in (3, 4)],
)
def test_a_cancelled_step_leaves_the_session_as_it_was(mode, calls, prompt, after):
    policy = prepared("wide", mode)
    found = script(policy, calls, prompt, after)
    assert all(same(a, b) for a, b in zip(uninterrupted(mode, calls), found, strict=True))
    assert policy.path.pool.made == policy.path.pool.idle


def test_memory_is_where_it_was_after_thirty_sessions(wide):
    def used():
        gc.collect()
        if not GPU:
            return 0
        torch.cuda.synchronize(DEVICE)
        return torch.cuda.memory_allocated(DEVICE)

    def session(i):
        opened = wide.open()
        for frames in (1, 4):
            wide.infer(opened, look(wide.spec, i, frames=frames, prompt="the same"))
        wide.close(opened)

    for i in range(3):
        session(i)
    before, made = used(), wide.path.pool.made
    for i in range(30):
        session(i)
    assert used() - before <= 1 << 16
    assert (wide.path.pool.made, wide.path.pool.idle) == (made, made)


def test_recorded_calls():
    """The golden closed loop in float32, bounds as on a CPU but for the order of a GPU's sums."""
    golden("e2e_weights.safetensors")
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.inference_mode():
            rows = suite.check(GoldenFolder(GOLDEN_DIR, str(DEVICE)), {"step": "fused", "graphs": GPU})
        calls = [r for r in rows if "action and video" in r.what]
        wide = [r for r in calls if "bf16" not in r.file]
        assert len(wide) == 4 and all(r.tensors >= 4 and r.worst < 1e-4 for r in wide), rows
        assert all(r.worst <= r.limit for r in calls if r not in wide), rows
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = flags
