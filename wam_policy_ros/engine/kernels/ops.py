"""Fused operations around the matrix products of a network evaluation: Triton on a GPU, the plain twin on a CPU.

Shapes: B guidance branches of L tokens (video first, then action rows, then state) are M = B * L rows, row r being
token ``r % L`` of branch ``r // L``. D is the width, H heads of Dh. U modulation groups: 0 is video (the first
``video_tokens`` tokens), 1 the rest; U = 1 where all tokens are video.

Arithmetic is float32 with one rounding at the end, whatever the dtypes of the inputs. Nothing reads device memory on
the host and nothing but ``torch.empty`` allocates, so that everything here can be captured in a CUDA graph.
``plain=True`` takes the twin on a GPU as well.
"""

from __future__ import annotations

import functools
from types import ModuleType

from torch import Tensor

from wam_policy_ros.contract.errors import MissingDependency
from wam_policy_ros.engine.fp8 import Fp8
from wam_policy_ros.model.errors import ShapeError

from . import reference
from .tensors import Product, Quantized, words

__all__ = [
    "Product",
    "Quantized",
    "cross_attention",
    "gelu_quant",
    "pack_tokens",
    "qk_norm_rope_store",
    "quantize_rows",
    "residual_norm",
    "rms_rstd",
    "unpack_heads",
]


@functools.cache
def _fused() -> ModuleType:
    try:
        from . import fused
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "triton":
            raise
        raise MissingDependency("triton", "kernels", "the optimised step on a GPU") from error
    return fused


def _implementation(tensor: Tensor, plain: bool) -> ModuleType:
    return reference if plain or tensor.device.type == "cpu" else _fused()


def _check(what: str, tensor: Tensor | None, *shapes: tuple[int, ...]) -> None:
    """One of the shapes, without gaps from its second dimension on: the kernels address rows, not strides."""
    if tensor is None:
        return
    if tuple(tensor.shape) not in shapes:
        raise ShapeError(f"{what}: got {tuple(tensor.shape)}, expected {' or '.join(map(str, shapes))}")
    if not (tensor[0] if tensor.dim() > 1 else tensor).is_contiguous():
        raise ShapeError(f"{what}: got strides {tensor.stride()} for shape {tuple(tensor.shape)}, expected no gaps")


def _check_product(what: str, product: Product, rows: int, columns: int) -> None:
    _check(what, product.raw, (rows, columns))
    if not product.raw.is_contiguous():
        raise ShapeError(f"{what}: got rows {product.raw.stride(0)} apart, expected {columns}")
    _check(f"{what}.bias", product.bias, (columns,))


def residual_norm(
    x: Tensor,
    y: Product | None,
    gate: Tensor | None,
    *,
    eps: float,
    tokens: int,
    video_tokens: int,
    shift: Tensor | None = None,
    scale: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    fp8: Fp8 | None = None,
    plain: bool = False,
) -> Tensor | Quantized:
    """Add a gated product to the residual stream, then normalise: one read and one write of ``x``.

    ``x += gate * y`` in place (``x += y`` without a gate, nothing without ``y``), rounded to the dtype of ``x``; then
    ``LayerNorm(x) * weight * (1 + scale) + bias + shift``, of which each factor and summand may be absent.

    Args:
        x: ``[M, D]``, overwritten. y: ``[M, D]`` product. gate, shift, scale: ``[U, D]``, each with a stride of its own
            between groups. weight, bias: ``[D]``.
        fp8: quantise the result per row into this format.

    Returns:
        ``[M, D]`` of the dtype of ``x``, or 8-bit rows.

    Raises:
        ShapeError: shapes do not fit each other.
    """
    rows, width = x.shape
    if rows % tokens or not x.is_contiguous():
        raise ShapeError(f"x has {rows} rows, strides {x.stride()}; expected a multiple of tokens={tokens}, no gaps")
    groups = 1 if video_tokens >= tokens else 2
    if y is not None:
        _check_product("y", y, rows, width)
    for name, tensor in (("gate", gate), ("shift", shift), ("scale", scale)):
        _check(name, tensor, *((n, width) for n in (1, 2)[groups - 1 :]))
    _check("weight", weight, (width,))
    _check("bias", bias, (width,))
    return _implementation(x, plain).residual_norm(
        x,
        y,
        gate,
        shift=shift,
        scale=scale,
        weight=weight,
        bias=bias,
        eps=eps,
        tokens=tokens,
        video_tokens=video_tokens,
        fp8=fp8,
    )


def qk_norm_rope_store(
    qkv: Product,
    wq: Tensor,
    wk: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    start: int,
    eps: float,
    scales: tuple[float, float, float] | None = None,
    *,
    plain: bool = False,
) -> None:
    """RMS norm of q and k over the whole width, weight, rotation of adjacent pairs; write q, and k and v in the cache.

    Args:
        qkv: ``[M, 3 D]``: q, k, v side by side. wq, wk: ``[D]``. cos, sin: float32 ``[L, Dh / 2]``.
        q_out: ``[B, L, H, Dh]``. k_cache, v_cache: ``[B, capacity, H, Dh]``; rows ``start .. start + L`` are written.
        scales: of q, k and v: the outputs are 8-bit, multiplied by it before rounding, saturating.

    Raises:
        ShapeError: shapes do not fit each other, or the cache is too short.
    """
    branches, tokens, heads, head_dim = q_out.shape
    width = heads * head_dim
    _check_product("qkv", qkv, branches * tokens, 3 * width)
    for name, tensor in (("wq", wq), ("wk", wk)):
        _check(name, tensor, (width,))
    for name, tensor in (("cos", cos), ("sin", sin)):
        _check(name, tensor, (tokens, head_dim // 2))
    _check("q_out", q_out, (branches, tokens, heads, head_dim))
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check(name, tensor, (branches, k_cache.shape[1], heads, head_dim))
    if not 0 <= start <= k_cache.shape[1] - tokens:
        raise ShapeError(f"cache of {k_cache.shape[1]} rows: got start {start} for {tokens} tokens")
    targets = (q_out, k_cache, v_cache)
    if any(t.dtype != q_out.dtype for t in targets) or (q_out.dtype.itemsize == 1) != (scales is not None):
        raise ShapeError(
            f"q_out, k_cache, v_cache are {[str(t.dtype) for t in targets]}, scales {scales}; "
            "expected one dtype, and scales for 8-bit outputs only"
        )
    _implementation(q_out, plain).qk_norm_rope_store(qkv, wq, wk, cos, sin, q_out, k_cache, v_cache, start, eps, scales)


def rms_rstd(x: Tensor, eps: float, *, plain: bool = False) -> Tensor:
    """``1 / sqrt(mean(x ** 2) + eps)`` of the rows of ``x [M, D]``, float32 ``[M]``."""
    _check_product("x", Product(x), *x.shape)
    return _implementation(x, plain).rms_rstd(x, eps)


def cross_attention(
    q: Tensor,
    rstd: Tensor,
    text_k: Tensor,
    text_v: Tensor,
    text_len: Tensor,
    pad_count: Tensor,
    image_k: Tensor,
    image_v: Tensor,
    tokens: int,
    out_scale: Tensor | None = None,
    fp8: Fp8 | None = None,
    *,
    plain: bool = False,
) -> Tensor:
    """Two independent attentions, to text and to image keys, with the same normalised queries; results are added.

    The network attends to the padding of the text as well. Its rows are all equal, so one of them, the last of the
    ``text_len`` rows, stands for ``pad_count`` rows: its weight is multiplied by that. ``pad_count`` 0: no padding row.

    Args:
        q: ``[M, D]``, with its bias, not normalised. rstd: float32 ``[M]`` from :func:`rms_rstd`.
        text_k, text_v: ``[B, H, capacity, Dh]``, keys from ``tensors.folded_keys``. text_len: int32 ``[B]``, at least
            1; pad_count: float32 ``[B]``. Both stay on the device.
        image_k, image_v: ``[B, H, keys, Dh]``, or ``[1, ...]`` when the branches share them.
        out_scale: with ``fp8``: multiply by this before rounding to 8 bits, saturating. Float32 ``[1]`` or ``[]``, read
            on the device: a captured call follows the scale of the prompt.

    Returns:
        ``[M, D]`` of the dtype of ``q``, or of ``fp8.dtype``.

    Raises:
        ShapeError: shapes do not fit each other, or one of ``out_scale`` and ``fp8`` is missing.
    """
    branches, heads, capacity, head_dim = text_k.shape
    rows, width = branches * tokens, heads * head_dim
    _check_product("q", Product(q), rows, width)
    _check("rstd", rstd, (rows,))
    for name, tensor in (("text_k", text_k), ("text_v", text_v)):
        _check(name, tensor, (branches, heads, capacity, head_dim))
    _check("text_len", text_len, (branches,))
    _check("pad_count", pad_count, (branches,))
    keys = image_k.shape[2]
    for name, tensor in (("image_k", image_k), ("image_v", image_v)):
        _check(name, tensor, (branches, heads, keys, head_dim), (1, heads, keys, head_dim))
    if (out_scale is None) != (fp8 is None):
        raise ShapeError(f"out_scale and fp8 go together; got {out_scale} and {fp8}")
    _check("out_scale", out_scale, (1,), ())
    return _implementation(q, plain).cross_attention(
        q, rstd, text_k, text_v, text_len, pad_count, image_k, image_v, tokens, out_scale, fp8
    )


def gelu_quant(u: Product, fp8: Fp8 | None = None, *, plain: bool = False) -> Tensor | Quantized:
    """GELU (tanh form) of the finished product ``[M, F]``: dtype of ``u.raw``, or 8-bit rows."""
    _check_product("u", u, *u.raw.shape)
    return _implementation(u.raw, plain).gelu_quant(u, fp8)


def quantize_rows(x: Tensor, fp8: Fp8, *, plain: bool = False) -> Quantized:
    """Each row of ``x [M, K]`` scaled so that its largest magnitude becomes the largest value of the format."""
    return _implementation(x, plain).quantize_rows(x, fp8)


def unpack_heads(
    received: Tensor,
    qkv: Tensor,
    rank: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    video_tokens: int,
    *,
    plain: bool = False,
) -> None:
    """All tokens of a rank's heads, from what the ranks sent of their runs of the video and from the rank's own copy of
    the tokens behind it. Bits are copied.

    Args:
        received: ``[ranks, 3, B, run, H / ranks, Dh]``: from each rank q, k and v of its run. The last runs end with
            rows that belong to no token.
        qkv: ``[3, B, run + rest, H, Dh]``, of this rank, whose number is ``rank``.
        q, k, v: ``[B, video_tokens + rest, H / ranks, Dh]``, written; rows may be apart.

    Raises:
        ShapeError: shapes do not fit each other.
    """
    ranks, _, branches, run, own, head_dim = received.shape
    rest = qkv.shape[2] - run
    _check("received", received, (ranks, 3, branches, run, own, head_dim))
    _check("qkv", qkv, (3, branches, run + rest, ranks * own, head_dim))
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check(name, tensor, (branches, video_tokens + rest, own, head_dim))
    local = qkv[:, :, :, rank * own : (rank + 1) * own]
    moved = (words(t) for t in (received, local, q, k, v))
    _implementation(q, plain).unpack_heads(*moved, video_tokens)


def pack_tokens(x: Tensor, sent: Tensor, video_tokens: int, *, plain: bool = False) -> None:
    """What every rank gets of a rank's heads: its run of the video, and all tokens behind the video. Bits are copied;
    rows that belong to no token become zero.

    Args:
        x: ``[B, video_tokens + rest, heads, Dh]``. sent: ``[ranks, B, run + rest, heads, Dh]``, written.

    Raises:
        ShapeError: shapes do not fit each other.
    """
    branches, tokens, own, head_dim = x.shape
    _check("x", x, (branches, tokens, own, head_dim))
    _check("sent", sent, (sent.shape[0], branches, sent.shape[2], own, head_dim))
    if not x.is_contiguous() or not sent.is_contiguous():
        raise ShapeError(f"x and sent: got strides {x.stride()} and {sent.stride()}, expected no gaps")
    _implementation(x, plain).pack_tokens(words(x), words(sent), video_tokens)
