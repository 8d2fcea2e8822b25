"""Every Triton kernel against its twin, over shapes that are no multiple of any block, with every argument absent once.

On a CPU the kernels are interpreted. Sums are taken in another order than the twin's: a value next to a rounding
boundary may fall on either side, which is one step of the format, for few values.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from wam_policy_ros.engine.fp8 import E4M3FN, E4M3FNUZ, fp8_for
from wam_policy_ros.engine.kernels import ops, reference

from .triton_runtime import DEVICE, INTERPRETED, sound_interpreter

fused = pytest.importorskip("wam_policy_ros.engine.kernels.fused")
EPS = 1e-6
FORMATS = (E4M3FN, E4M3FNUZ) if DEVICE == "cpu" else (fp8_for(DEVICE),)
FP8 = FORMATS[0]
FLOATS = (torch.bfloat16, torch.float32)
# Hypothesis calls a test many times within one set-up of its fixtures: nothing here keeps state between calls.
drawn = settings(
    max_examples=12 if INTERPRETED else 60, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate)
)
_ = sound_interpreter


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def _product(rows: int, columns: int, dtype: torch.dtype, form: str) -> ops.Product:
    """``form``: b with a bias, w without, f with a bias in another dtype."""
    raw = _random(rows, columns, dtype=dtype)
    return ops.Product(raw, None if form == "w" else _random(columns, dtype=torch.float32 if form == "f" else dtype))


def _steps(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Distance of each value in steps of a float format: 0 is the same value, 1 its neighbour."""
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    assert got.float().isfinite().all() and wanted.float().isfinite().all()
    number = {1: torch.int8, 2: torch.int16, 4: torch.int32}[got.dtype.itemsize]

    def position(x: torch.Tensor) -> torch.Tensor:
        bits = x.contiguous().view(number).long()
        return torch.where(bits < 0, -(bits & (2 ** (8 * x.dtype.itemsize - 1) - 1)), bits)

    return (position(got) - position(wanted)).abs()


def _close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """float32 to 1e-5 of the largest value; narrower formats to one step, and that for few values."""
    if got.dtype == torch.float32:
        assert got.isfinite().all() and got.shape == wanted.shape
        assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    else:
        steps = _steps(got, wanted)
        assert steps.max() <= 1
        assert (steps > 0).sum() <= 2 + 0.01 * steps.numel()


def _same(got: torch.Tensor | ops.Quantized, wanted: torch.Tensor | ops.Quantized, tolerance: float = 0) -> None:
    """``tolerance``: relative error of the whole where an intermediate rounding may have fallen either way."""
    assert type(got) is type(wanted)
    if tolerance:
        a, b = (q.values.float() * q.row_scale.unsqueeze(-1) if isinstance(q, ops.Quantized) else q.float()
                for q in (got, wanted))  # fmt: skip
        assert (a - b).norm() <= tolerance * b.norm()
    elif isinstance(wanted, ops.Quantized):
        torch.testing.assert_close(got.row_scale, wanted.row_scale, rtol=1e-5, atol=0)
        _close(got.values, wanted.values)
    else:
        assert got.dtype == wanted.dtype
        _close(got, wanted)


shapes = st.tuples(st.integers(1, 2), st.integers(1, 5))
# Below, at and past a power of two; several chunks with and without a rest.
widths = st.sampled_from([16, 40, 64, 96, 1024, 1100, 2560, 5120])
forms = st.sampled_from("bwf")


@drawn
@example(
    shape=(1, 2), width=40, form="w", dtype=torch.float32, raw=torch.float32, gate=False, modulated=False,
    affine=False, video=1, fp8=FP8, mean=20.0, seed=0,
)  # fmt: skip
@given(
    shape=shapes, width=widths, form=st.sampled_from("bwf-"), dtype=st.sampled_from(FLOATS),
    raw=st.sampled_from(FLOATS), gate=st.booleans(), modulated=st.booleans(), affine=st.booleans(),
    video=st.integers(0, 5), fp8=st.sampled_from([None, *FORMATS]), mean=st.sampled_from([0.0, 20.0]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_residual_norm(shape, width, form, dtype, raw, gate, modulated, affine, video, fp8, mean, seed):
    torch.manual_seed(seed)
    branches, tokens = shape
    rows = branches * tokens
    # A mean far from zero would show in the scale if anything past the end of a row were counted.
    x = _random(rows, width, dtype=dtype) + mean
    y = None if form == "-" else _product(rows, width, raw, form)
    arguments = {
        # Cut out of a table of all modulations: groups are further apart than a row.
        "gate": _random(2, 6, width)[:, 5] if gate else None,
        "shift": _random(2, 3, width, dtype=raw)[:, 1] if modulated else None,
        "scale": _random(2, width) if modulated else None,
        "weight": _random(width, dtype=dtype) if affine else None,
        "bias": _random(width) if affine else None,
    } | {"eps": EPS, "tokens": tokens, "video_tokens": video, "fp8": fp8}
    twin = x.clone()
    got = fused.residual_norm(x, y, **arguments)
    # Where a sum in x fell to the other side, so does what is made of it.
    _same(got, reference.residual_norm(twin, y, **arguments), 0 if torch.equal(x, twin) else 0.05)
    _close(x, twin)


@drawn
@given(rows=st.integers(1, 4), width=widths, dtype=st.sampled_from(FLOATS), seed=st.integers(0, 99))
def test_rms_rstd(rows, width, dtype, seed):
    torch.manual_seed(seed)
    q = _random(rows, width, dtype=dtype)
    torch.testing.assert_close(fused.rms_rstd(q, EPS), reference.rms_rstd(q, EPS), rtol=1e-5, atol=0)


@drawn
@given(
    rows=st.integers(1, 4), width=st.sampled_from([16, 96, 1024, 1100, 13824]), dtype=st.sampled_from(FLOATS),
    form=forms, fp8=st.sampled_from([None, *FORMATS]), seed=st.integers(0, 99),
)  # fmt: skip
def test_gelu_quant(rows, width, dtype, form, fp8, seed):
    torch.manual_seed(seed)
    u = _product(rows, width, dtype, form)
    u.raw.mul_(3)
    got, wanted = (m.gelu_quant(u, fp8) for m in (fused, reference))
    if fp8:
        # Far out on the negative side the result is a difference of nearly equal numbers, a step next to zero is tiny.
        torch.testing.assert_close(got.row_scale, wanted.row_scale, rtol=1e-5, atol=0)
        a, b = got.values.float(), wanted.values.float()
        assert a.isfinite().all() and ((a - b).abs() <= b.abs() / 7 + 2.0**-8).all()
        assert (a != b).sum() <= 2 + 0.01 * a.numel()
    else:
        torch.testing.assert_close(got, wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


@drawn
@given(
    rows=st.integers(1, 4), width=widths, dtype=st.sampled_from(FLOATS), fp8=st.sampled_from(FORMATS),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_quantize_rows(rows, width, dtype, fp8, seed):
    torch.manual_seed(seed)
    x = _random(rows, width, dtype=dtype) * 10.0 ** _random(rows, 1, dtype=dtype)
    _same(fused.quantize_rows(x, fp8), reference.quantize_rows(x, fp8))


def test_a_row_of_zeros_is_quantised_to_zeros():
    got = fused.quantize_rows(torch.zeros(2, 64, device=DEVICE), FP8)
    assert not got.values.float().any() and got.row_scale.isfinite().all()


def test_not_a_number_stays_not_a_number():
    """A fault must reach the check of the chunk; a saturated number would hide it."""
    x = _random(2, 64)
    x[1, 3] = float("nan")
    values = fused.quantize_rows(x, FP8).values.float()
    assert values[0].isfinite().all() and values[1, 3].isnan()
    q_out, k, v = (torch.zeros(1, 2, 4, 16, device=DEVICE).to(FP8.dtype) for _ in range(3))
    qkv = _random(2, 192)
    qkv[1, 130] = float("nan")
    one, table = torch.ones(64, device=DEVICE), torch.ones(2, 8, device=DEVICE)
    fused.qk_norm_rope_store(ops.Product(qkv), one, one, table, table, q_out, k, v, 0, EPS, (1.0, 1.0, 1.0))
    assert v.float().isnan().sum() == 1 and q_out.float().isfinite().all()


@drawn
@given(
    shape=shapes, heads=st.sampled_from([(4, 16), (3, 16), (6, 8), (40, 128), (5, 12)]), start=st.integers(0, 4),
    dtype=st.sampled_from(FLOATS), form=forms, output=st.sampled_from([*FLOATS, *(f.dtype for f in FORMATS)]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_qk_norm_rope_store(shape, heads, start, dtype, form, output, seed):
    torch.manual_seed(seed)
    (branches, tokens), (count, head_dim) = shape, heads
    width = count * head_dim
    qkv = _product(branches * tokens, 3 * width, dtype, form)
    weights, tables = _random(2, width, dtype=dtype), _random(2, tokens, head_dim // 2)
    results = []
    for module in (fused, reference):
        q_out = torch.full((branches, tokens, count, head_dim), 7.0, device=DEVICE).to(output)
        k, v = (torch.full((branches, 10, count, head_dim), 7.0, device=DEVICE).to(output) for _ in range(2))
        scales = (100.0, 30.0, 200.0) if output.itemsize == 1 else None
        module.qk_norm_rope_store(ops.Product(*qkv), *weights, *tables, q_out, k, v, start, EPS, scales)
        results.append((q_out, k, v))
    for got, wanted in zip(*results, strict=True):
        if output.itemsize == 1:
            # Next to zero a difference of two products may round to either side.
            a, b = got.float(), wanted.float()
            assert a.isfinite().all() and ((a - b).abs() <= b.abs() / 7 + 2.0**-8).all()
            assert (a != b).sum() <= 2 + 0.01 * a.numel()
        else:
            torch.testing.assert_close(got, wanted, rtol=1e-2 if output.itemsize == 2 else 1e-5, atol=1e-5)


def _at_scale(scale: float, fp8) -> tuple:
    return (torch.tensor([scale], device=DEVICE), fp8) if fp8 else (None, None)


@drawn
@example(
    shape=(2, 5), dtype=torch.float32, heads=(4, 16), image=9, shared=True, words=(3, 70), padded=True,
    fp8=None, seed=0,
)  # fmt: skip
@given(
    shape=st.tuples(st.integers(1, 2), st.sampled_from([1, 5, 33])), dtype=st.sampled_from(FLOATS),
    heads=st.sampled_from([(4, 16), (2, 12), (1, 128)]), image=st.sampled_from([1, 9, 64, 65, 257]),
    shared=st.booleans(), words=st.tuples(st.integers(1, 70), st.integers(1, 70)), padded=st.booleans(),
    fp8=st.sampled_from([None, *FORMATS]), seed=st.integers(0, 99),
)  # fmt: skip
def test_cross_attention(shape, dtype, heads, image, shared, words, padded, fp8, seed):
    torch.manual_seed(seed)
    (branches, tokens), (count, head_dim) = shape, heads
    rows, width = branches * tokens, count * head_dim
    q = _random(rows, width, dtype=dtype)
    # Keys as they are folded: with a softmax that is neither flat nor a maximum.
    text = [_random(branches, count, 70, head_dim) * (head_dim**-0.5, 1)[i] for i in range(2)]
    text = [t.to(dtype) for t in text]
    length = torch.tensor(words[:branches], dtype=torch.int32, device=DEVICE)
    for b in range(branches):
        for part in text:
            part[b, :, words[b] :] = float("nan")
    pads = torch.tensor([512.0 - n if padded else 0.0 for n in words[:branches]], device=DEVICE)
    pictures = [_random(1 if shared else branches, count, image, head_dim) for _ in range(2)]
    pictures = [(pictures[0] * head_dim**-0.5).to(dtype), pictures[1].to(dtype)]
    rstd = reference.rms_rstd(q, EPS)
    arguments = (q, rstd, *text, length, pads, *pictures, tokens, *_at_scale(50.0, fp8))
    got, wanted = (m.cross_attention(*arguments) for m in (fused, reference))
    assert got.dtype == wanted.dtype
    tolerance = {1: 0.15, 2: 1e-2, 4: 1e-5}[got.dtype.itemsize]
    if dtype != torch.float32:
        tolerance = max(tolerance, 2e-2)
    a, b = got.float(), wanted.float()
    assert a.isfinite().all() and ((a - b).abs() <= tolerance * (b.abs() + 0.1 * b.abs().max())).all()


def test_dispatch_takes_the_twin_on_a_cpu_and_when_asked(monkeypatch):
    calls = []
    monkeypatch.setattr(ops, "_fused", lambda: calls.append("fused") or reference)
    ops.quantize_rows(torch.randn(2, 16), FP8)
    assert calls == []
    meta = torch.empty(2, 16, device="meta")
    ops.quantize_rows(meta, FP8, plain=True)
    assert calls == []
    ops.quantize_rows(meta, FP8)
    assert calls == ["fused"]


@drawn
@given(
    branches=st.integers(1, 2), ranks=st.integers(1, 4), video=st.integers(1, 9), rest=st.integers(0, 3),
    heads=st.sampled_from([(1, 16), (3, 12), (2, 128), (5, 104)]), start=st.integers(0, 2),
    dtype=st.sampled_from([*FLOATS, *(f.dtype for f in FORMATS)]), seed=st.integers(0, 99),
)  # fmt: skip
def test_heads_and_tokens_are_moved(branches, ranks, video, rest, heads, start, dtype, seed):
    """Bit for bit, into rows of a window that are apart, and nothing beside them is touched."""
    torch.manual_seed(seed)
    own, head_dim = heads
    run = -(-video // ranks)

    def bits(*shape):
        return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).to(DEVICE).view(dtype).squeeze(-1)

    received = bits(ranks, 3, branches, run, own, head_dim)
    qkv = bits(3, branches, run + rest, ranks * own, head_dim)
    x = bits(branches, video + rest, own, head_dim)
    before = bits(3, branches, start + video + rest + 1, own, head_dim)
    found = []
    for plain in (False, True):
        windows, sent = before.clone(), bits(ranks, branches, run + rest, own, head_dim)
        into = windows[:, :, start : start + video + rest]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "_implementation", lambda like, plain: reference if plain else fused)
            ops.unpack_heads(received, qkv, ranks - 1, *into, video, plain=plain)
            ops.pack_tokens(x, sent, video, plain=plain)
        found.append((windows.view(torch.uint8), sent.view(torch.uint8)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
