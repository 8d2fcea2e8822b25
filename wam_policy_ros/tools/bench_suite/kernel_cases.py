"""The fused operations at the network's shapes: inputs, the check against the twin, and the bytes that must move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wam_policy_ros.engine.fp8 import Fp8, fp8_for
from wam_policy_ros.engine.kernels import ops
from wam_policy_ros.engine.kernels.ops import Product, Quantized
from wam_policy_ros.engine.kernels.tensors import folded_keys

EPS = 1e-6
# Relative error of the whole against the twin. Both do float32 arithmetic and differ in the order of sums: a few values
# fall to the other side of a rounding boundary, more of them where an intermediate result is rounded first.
BF16_BOUND, FP8_BOUND, ATTENTION_BOUND, FLOAT32_BOUND = 2e-3, 1e-2, 6e-3, 1e-5
FP8_ATTENTION_BOUND = 3e-2
_SETS = 3


class Sizes(NamedTuple):
    """One call of the network. ``keys``: self-attention keys of the four calls of a window."""

    branches: int
    tokens: int
    video_tokens: int
    heads: int
    head_dim: int
    ffn: int
    words: int
    image_tokens: int
    prefill_tokens: int
    keys: tuple[int, ...]

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def rows(self) -> int:
        return self.branches * self.tokens


SIZES = {
    "14b": Sizes(2, 1785, 1760, 40, 128, 13824, 40, 257, 1760, (2665, 4425, 6185, 7945)),
    "tiny": Sizes(2, 57, 32, 4, 16, 160, 5, 9, 32, (73, 105)),
}


class Case(NamedTuple):
    """``work(i)`` runs once on input set i; ``error()`` compares with the twin; ``bytes`` read once, written once."""

    name: str
    work: Callable[[int], object]
    error: Callable[[], float]
    bound: float
    bytes: int
    flop: int = 0


class Inputs:
    """Random tensors on a device."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self.fp8: Fp8 = fp8_for(device)

    def draw(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=self.device) * scale).to(dtype)

    def product(self, columns: int) -> Product:
        return Product(self.draw(self.sizes.rows, columns), self.draw(columns, scale=0.1))


def values(out: Any) -> Tensor:
    """Float32 of whatever an operation returned."""
    if isinstance(out, Quantized):
        return out.values.float() * out.row_scale.unsqueeze(-1)
    return torch.cat([values(o).flatten() for o in out]) if isinstance(out, tuple) else out.float()


def _error(call: Callable[..., object], copied: Callable[[], tuple[Any, ...]]) -> float:
    """Relative error of ``call(*inputs)`` against the same with ``plain=True`` on equal inputs; NaN is infinite."""
    got, wanted = values(call(*copied())), values(call(*copied(), plain=True))
    error = float((got - wanted).norm() / wanted.norm())
    return error if error == error else float("inf")


def cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Every operation with bf16 and with 8-bit outputs."""
    make = Inputs(sizes, device)
    for eight in (False, True):
        yield from _rows(make, eight=eight)
        yield _qk(make, eight=eight)
        yield _cross(make, eight=eight)
        yield from _moves(make, eight=eight)
    q = [make.draw(sizes.rows, sizes.width) for _ in range(_SETS)]
    yield Case(
        "rms_rstd", lambda i: ops.rms_rstd(q[i % _SETS], EPS), partial(_error, ops.rms_rstd, lambda: (q[0], EPS)),
        FLOAT32_BOUND, 2 * sizes.rows * sizes.width,
    )  # fmt: skip
    x = [make.draw(sizes.rows, sizes.width) for _ in range(_SETS)]
    yield Case(
        "quantize_rows", lambda i: ops.quantize_rows(x[i % _SETS], make.fp8),
        partial(_error, ops.quantize_rows, lambda: (x[0], make.fp8)), FP8_BOUND, 3 * sizes.rows * sizes.width,
    )  # fmt: skip


def _rows(make: Inputs, *, eight: bool) -> Iterator[Case]:
    s, fp8 = make.sizes, make.fp8 if eight else None
    out, bound, kind = (1, FP8_BOUND, "fp8") if eight else (2, BF16_BOUND, "bf16")
    xs = [make.draw(s.rows, s.width) for _ in range(_SETS)]
    ys = [make.product(s.width) for _ in range(_SETS)]
    # As the network has them: cut out of a table of six modulations, bf16.
    mods = make.draw(2, 6, s.width, scale=0.01)
    how: dict[str, Any] = {"eps": EPS, "tokens": s.tokens, "video_tokens": s.video_tokens, "fp8": fp8}
    gated = partial(ops.residual_norm, gate=mods[:, 2], shift=mods[:, 3], scale=mods[:, 4], **how)
    affine = partial(ops.residual_norm, gate=None, weight=make.draw(s.width), bias=make.draw(s.width), **how)
    for name, call in (("gated", gated), ("affine", affine)):

        def both(x: Tensor, y: Product, call: Callable[..., Any] = call, **plain: bool) -> tuple[Any, Tensor]:
            return call(x, y, **plain), x

        yield Case(
            f"residual_norm {name} {kind}", lambda i, call=call: call(xs[i % _SETS], ys[i % _SETS]),  # type: ignore[misc]
            partial(_error, both, lambda: (xs[0].clone(), ys[0])), bound, (6 + out) * s.rows * s.width,
        )  # fmt: skip
    us = [make.product(s.ffn) for _ in range(_SETS)]
    yield Case(
        f"gelu_quant {kind}", lambda i: ops.gelu_quant(us[i % _SETS], fp8),
        partial(_error, ops.gelu_quant, lambda: (us[0], fp8)), bound, (2 + out) * s.rows * s.ffn,
    )  # fmt: skip


def _qk(make: Inputs, *, eight: bool) -> Case:
    s = make.sizes
    dtype, bytes_out = (make.fp8.dtype, 1) if eight else (torch.bfloat16, 2)
    qkv = [make.product(3 * s.width) for _ in range(_SETS)]
    wq, wk = make.draw(s.width), make.draw(s.width)
    angles = make.draw(s.tokens, s.head_dim // 2, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    start = s.keys[1] - s.tokens
    scales = (30.0, 30.0, 30.0) if eight else None

    def outputs() -> tuple[Tensor, Tensor, Tensor]:
        shape = (s.branches, s.tokens, s.heads, s.head_dim)
        cache = (s.branches, s.keys[1], s.heads, s.head_dim)
        return tuple(torch.zeros(n, dtype=dtype, device=make.device) for n in (shape, cache, cache))  # type: ignore

    targets = [outputs() for _ in range(_SETS)]

    def call(product: Product, out: tuple[Tensor, Tensor, Tensor], **plain: bool) -> tuple[Tensor, Tensor, Tensor]:
        q_out, k_cache, v_cache = out
        ops.qk_norm_rope_store(product, wq, wk, cos, sin, q_out, k_cache, v_cache, start, EPS, scales, **plain)
        return out

    return Case(
        f"qk_norm_rope_store {'fp8' if eight else 'bf16'}", lambda i: call(qkv[i % _SETS], targets[i % _SETS]),
        partial(_error, call, lambda: (qkv[0], outputs())), FP8_BOUND if eight else BF16_BOUND,
        (2 + bytes_out) * 3 * s.rows * s.width,
    )  # fmt: skip


def _moves(make: Inputs, *, eight: bool) -> Iterator[Case]:
    """What two ranks of sequence parallelism do around an exchange."""
    s, ranks = make.sizes, 2
    own, run, rest = s.heads // ranks, s.video_tokens // ranks, s.tokens - s.video_tokens
    dtype, kind = (make.fp8.dtype, "fp8") if eight else (torch.bfloat16, "bf16")

    def draw(*shape: int) -> Tensor:
        return make.draw(*shape, s.head_dim, dtype=dtype)

    received = [draw(ranks, 3, s.branches, run, own) for _ in range(_SETS)]
    qkv, x = draw(3, s.branches, run + rest, s.heads), draw(s.branches, s.tokens, own)
    into, sent = draw(3, s.branches, s.tokens, own), draw(ranks, s.branches, run + rest, own)

    def unpack(some: Tensor, **plain: bool) -> Tensor:
        q, k, v = into.zero_()
        ops.unpack_heads(some, qkv, 1, q, k, v, s.video_tokens, **plain)
        return into.clone()

    def pack(some: Tensor, **plain: bool) -> Tensor:
        ops.pack_tokens(some, sent.zero_(), s.video_tokens, **plain)
        return sent.clone()

    q, k, v = into
    yield Case(
        f"unpack_heads {kind}", lambda i: ops.unpack_heads(received[i % _SETS], qkv, 1, q, k, v, s.video_tokens),
        partial(_error, unpack, lambda: (received[0],)), 0.0, 2 * into.numel() * dtype.itemsize,
    )  # fmt: skip
    yield Case(
        f"pack_tokens {kind}", lambda i: ops.pack_tokens(x, sent, s.video_tokens),
        partial(_error, pack, lambda: (x,)), 0.0, (x.numel() + sent.numel()) * dtype.itemsize,
    )  # fmt: skip


def cross_arguments(make: Inputs, *, words: int | None = None) -> tuple[Any, ...]:
    """Everything ``cross_attention`` takes but the output format; ``words`` text keys instead of the usual ones."""
    s = make.sizes if words is None else make.sizes._replace(words=words)
    q, weight = make.draw(s.rows, s.width), make.draw(s.width)

    def pair(branches: int, rows: int) -> tuple[Tensor, Tensor]:
        k, v = (make.draw(branches, rows, s.heads, s.head_dim) for _ in range(2))
        k = folded_keys(k.flatten(2), weight, s.head_dim).to(k.dtype).view_as(k)
        return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()

    text, image = pair(s.branches, 512), pair(1, s.image_tokens)
    length = torch.full((s.branches,), s.words, dtype=torch.int32, device=make.device)
    padding = torch.full((s.branches,), 512.0 - s.words, device=make.device)
    rstd = ops.rms_rstd(q, EPS, plain=True)
    return q, rstd, *text, length, padding, *image, s.tokens


def _cross(make: Inputs, *, eight: bool) -> Case:
    s = make.sizes
    sets = [cross_arguments(make) for _ in range(_SETS)]
    form = (torch.full((1,), 100.0, device=make.device), make.fp8) if eight else (None, None)
    keys = s.words + s.image_tokens
    moved = (3 if eight else 4) * s.rows * s.width + 4 * (s.branches * s.words + s.image_tokens) * s.width
    return Case(
        f"cross_attention {'fp8' if eight else 'bf16'}", lambda i: ops.cross_attention(*sets[i % _SETS], *form),
        partial(_error, ops.cross_attention, lambda: (*sets[0], *form)),
        FP8_ATTENTION_BOUND if eight else ATTENTION_BOUND, moved, 4 * s.rows * keys * s.width,
    )  # fmt: skip
