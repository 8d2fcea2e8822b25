"""Plain PyTorch twins of every operation: float32 arithmetic, one rounding at the end. They define what is meant.

Signatures and shapes are those of ``ops``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from wam_policy_ros.engine.fp8 import Fp8

from .tensors import Product, Quantized

# A row of zeros still needs a scale that can be divided by.
SMALLEST_ROW = 1e-12


def value(product: Product) -> Tensor:
    """The finished product, float32 ``[M, N]``."""
    out = product.raw.float()
    return out if product.bias is None else out + product.bias.float()


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to ``dtype``; what an 8-bit format cannot hold becomes its largest value."""
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)


def _quantized(x: Tensor, fp8: Fp8) -> Quantized:
    largest = x.abs().amax(-1).clamp_min(SMALLEST_ROW)
    return Quantized(saturated(x * (fp8.max / largest).unsqueeze(-1), fp8.dtype), largest / fp8.max)


def quantize_rows(x: Tensor, fp8: Fp8) -> Quantized:
    return _quantized(x.float(), fp8)


def residual_norm(
    x: Tensor,
    y: Product | None,
    gate: Tensor | None,
    *,
    shift: Tensor | None,
    scale: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    tokens: int,
    video_tokens: int,
    fp8: Fp8 | None,
) -> Tensor | Quantized:
    group = (torch.arange(x.shape[0], device=x.device) % tokens >= video_tokens).long()
    if y is not None:
        added = value(y) if gate is None else value(y) * gate.float()[group]
        x.copy_(x.float() + added)
    h = F.layer_norm(x.float(), x.shape[-1:], eps=eps)
    if weight is not None:
        h = h * weight.float()
    if scale is not None:
        h = h * (1 + scale.float()[group])
    if bias is not None:
        h = h + bias.float()
    if shift is not None:
        h = h + shift.float()[group]
    return h.to(x.dtype) if fp8 is None else _quantized(h, fp8)


def rms_rstd(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.float().square().mean(-1) + eps)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x [B, L, H, Dh]`` with its adjacent pairs rotated by the angles of tables ``[L, Dh / 2]``."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    return torch.stack((even * c - odd * s, even * s + odd * c), dim=-1).flatten(-2)


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
    scales: tuple[float, float, float] | None,
) -> None:
    tokens = q_out.shape[1]
    rows = slice(start, start + tokens)
    heads = (-1, tokens, *q_out.shape[2:])
    targets = (q_out, k_cache[:, rows], v_cache[:, rows])
    for i, (part, weight, target) in enumerate(zip(value(qkv).chunk(3, dim=-1), (wq, wk, None), targets, strict=True)):
        if weight is None:
            out = part.reshape(heads)
        else:
            normed = part * torch.rsqrt(part.square().mean(-1, keepdim=True) + eps) * weight.float()
            out = _rotated(normed.reshape(heads), cos, sin)
        target.copy_(saturated(out if scales is None else out * scales[i], target.dtype))


def _attend(q: Tensor, rstd: Tensor, k: Tensor, v: Tensor, added: Tensor | None) -> Tensor:
    """Softmax attention of ``q [B, tokens, H, Dh]`` to ``[B, H, keys, Dh]``; ``rstd [B, tokens]`` times the product of
    queries and keys, and ``added [B, keys]``, are logits in powers of two."""
    logits = torch.einsum("blhd,bhtd->bhlt", q, k) * rstd[:, None, :, None]
    if added is not None:
        logits = logits + added[:, None, None, :]
    weights = torch.softmax(logits * math.log(2.0), dim=-1)
    return torch.einsum("bhlt,bhtd->blhd", weights, v)


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
    out_scale: Tensor | None,
    fp8: Fp8 | None,
) -> Tensor:
    branches, heads, capacity, _ = text_k.shape
    query, rstd = q.float().reshape(branches, tokens, heads, -1), rstd.reshape(branches, tokens)
    key = torch.arange(capacity, device=text_k.device)
    used = key < text_len.unsqueeze(-1)
    last = key == text_len.unsqueeze(-1) - 1
    added = torch.where(last, pad_count.clamp_min(1.0).log2().unsqueeze(-1), 0.0).masked_fill(~used, float("-inf"))
    # Rows past the text hold anything, NaN too; a weight of zero would not hide it.
    rows = used[:, None, :, None]
    text = _attend(query, rstd, text_k.float().where(rows, 0), text_v.float().where(rows, 0), added)
    image_k, image_v = (t.float().expand(branches, -1, -1, -1) for t in (image_k, image_v))
    image = _attend(query, rstd, image_k, image_v, None)
    out = (text + image).reshape(branches * tokens, -1)
    if out_scale is None or fp8 is None:
        return out.to(q.dtype)
    return saturated(out * out_scale, fp8.dtype)


def gelu_quant(u: Product, fp8: Fp8 | None) -> Tensor | Quantized:
    out = F.gelu(value(u), approximate="tanh")
    return out.to(u.raw.dtype) if fp8 is None else _quantized(out, fp8)


def _runs(x: Tensor, video_tokens: int, run: int) -> list[tuple[Tensor, slice]]:
    """The video of ``x [B, T, ...]`` as ``[B, ranks, run, ...]`` views with the ranks they belong to: one of the full
    runs, and one of what is left over."""
    full, more = divmod(video_tokens, run) if run else (0, 0)
    out = []
    if full:
        out.append((x[:, : full * run].unflatten(1, (full, run)), slice(0, full)))
    if more:
        out.append((x[:, full * run : video_tokens].unsqueeze(1), slice(full, full + 1)))
    return out


def unpack_heads(received: Tensor, local: Tensor, q: Tensor, k: Tensor, v: Tensor, video_tokens: int) -> None:
    run = received.shape[3]
    for part, target in enumerate((q, k, v)):
        for rows, ranks in _runs(target, video_tokens, run):
            rows.copy_(received[ranks, part, :, : rows.shape[2]].transpose(0, 1))
        target[:, video_tokens:] = local[part, :, run:]


def pack_tokens(x: Tensor, sent: Tensor, video_tokens: int) -> None:
    run = sent.shape[2] - (x.shape[1] - video_tokens)
    sent.zero_()
    for rows, ranks in _runs(x, video_tokens, run):
        sent[ranks, :, : rows.shape[2]].copy_(rows.transpose(0, 1))
    sent[:, :, run:] = x[:, video_tokens:]
