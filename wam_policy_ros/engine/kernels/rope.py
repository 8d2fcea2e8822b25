"""RMS norm of q and k over the whole width, rotation of adjacent pairs, and the write to the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import saturate
from .launch import VECTOR, Launch, Machine, machine_for
from .tensors import Product, product_arguments

# Elements that one program works on at a time.
_CHUNK = 1024


@triton.jit
def _once(pointer, offsets, mask, EVEN: tl.constexpr):
    """Some heads of a row that is read once, in their own dtype; zero outside ``mask``."""
    if EVEN:
        part = tl.load(pointer + offsets, cache_modifier=".cg")
    else:
        part = tl.load(pointer + offsets, mask=mask, other=0.0, cache_modifier=".cg")
    return part


@triton.jit
def _shared(pointer, offsets, mask, EVEN: tl.constexpr):
    """The same of a row that every token needs, float32."""
    if EVEN:
        part = tl.load(pointer + offsets, eviction_policy="evict_last")
    else:
        part = tl.load(pointer + offsets, mask=mask, other=0.0, eviction_policy="evict_last")
    return part.to(tl.float32)


@triton.jit
def _put(pointer, offsets, mask, x, limit, EVEN: tl.constexpr):
    x = saturate(x, limit).to(pointer.dtype.element_ty)
    if EVEN:
        tl.store(pointer + offsets, x)
    else:
        tl.store(pointer + offsets, x, mask=mask)


@triton.jit
def _parts(
    source, bias_ptr, part, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """q (``part`` 0), k or v of a row: finished products of ``BLOCK_H`` heads each, zero past the end of a head."""
    head = tl.arange(0, BLOCK_H)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    mask = column < HEAD_DIM
    EVEN: tl.constexpr = BLOCK_D == HEAD_DIM
    raws = ()
    for first in tl.static_range(0, HEADS, BLOCK_H):
        offsets = (part * HEADS + first + head) * HEAD_DIM + column
        raws = raws + (_once(source, offsets, mask, EVEN),)
    parts = ()
    for i in tl.static_range(HEADS // BLOCK_H):
        x = raws[i].to(tl.float32)
        if bias_ptr is not None:
            x = x + _shared(bias_ptr, (part * HEADS + i * BLOCK_H + head) * HEAD_DIM + column, mask, EVEN)
        parts = parts + (x,)
    return parts


@triton.jit
def _normed_rotated(
    source, bias_ptr, weight_ptr, cos_ptr, sin_ptr, target, scale, limit, eps, part, token,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, BLOCK_H)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    mask = column < HEAD_DIM
    EVEN: tl.constexpr = BLOCK_D == HEAD_DIM
    parts = _parts(source, bias_ptr, part, HEADS, HEAD_DIM, BLOCK_H, BLOCK_D)
    squares = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for i in tl.static_range(HEADS // BLOCK_H):
        squares += parts[i] * parts[i]
    factor = tl.rsqrt(tl.sum(squares) / (HEADS * HEAD_DIM) + eps)
    if scale is not None:
        factor = factor * scale
    # What multiplies the whole row does so in the angles of one head.
    pair = tl.arange(0, BLOCK_D // 2)
    angle = token * (HEAD_DIM // 2) + pair
    cos = tl.load(cos_ptr + angle, mask=pair < HEAD_DIM // 2, other=0.0)[None, :] * factor
    sin = tl.load(sin_ptr + angle, mask=pair < HEAD_DIM // 2, other=0.0)[None, :] * factor
    for i in tl.static_range(HEADS // BLOCK_H):
        offsets = (i * BLOCK_H + head) * HEAD_DIM + column
        weighed = parts[i] * _shared(weight_ptr, offsets, mask, EVEN)
        even, odd = tl.split(tl.reshape(weighed, (BLOCK_H, BLOCK_D // 2, 2)))
        turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
        _put(target, offsets, mask, tl.reshape(turned, (BLOCK_H, BLOCK_D)), limit, EVEN)


@triton.jit(do_not_specialize=["start"])
def qk_norm_rope_store_kernel(
    raw_ptr, product_bias_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr,
    q_branch, q_token, k_branch, k_token, v_branch, v_token, tokens, start, eps, q_scale, k_scale, v_scale, limit,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # The three parts of a row, and of its cache lines, by programs that run at the same time.
    index = tl.program_id(0) // 3
    which = tl.program_id(0) % 3
    row = index.to(tl.int64)
    branch = row // tokens
    token = index % tokens
    source = raw_ptr + row * (3 * HEADS * HEAD_DIM)
    if which == 0:
        _normed_rotated(
            source, product_bias_ptr, wq_ptr, cos_ptr, sin_ptr, q_ptr + branch * q_branch + token * q_token,
            q_scale, limit, eps, 0, token, HEADS, HEAD_DIM, BLOCK_H, BLOCK_D,
        )  # fmt: skip
    elif which == 1:
        _normed_rotated(
            source, product_bias_ptr, wk_ptr, cos_ptr, sin_ptr, k_ptr + branch * k_branch + (start + token) * k_token,
            k_scale, limit, eps, 1, token, HEADS, HEAD_DIM, BLOCK_H, BLOCK_D,
        )  # fmt: skip
    else:
        target = v_ptr + branch * v_branch + (start + token) * v_token
        head = tl.arange(0, BLOCK_H)[:, None]
        column = tl.arange(0, BLOCK_D)[None, :]
        parts = _parts(source, product_bias_ptr, 2, HEADS, HEAD_DIM, BLOCK_H, BLOCK_D)
        for i in tl.static_range(HEADS // BLOCK_H):
            offsets = (i * BLOCK_H + head) * HEAD_DIM + column
            x = parts[i]
            if v_scale is not None:
                x = x * v_scale
            _put(target, offsets, column < HEAD_DIM, x, limit, BLOCK_D == HEAD_DIM)


def plan_qk_norm_rope_store(
    machine: Machine,
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
) -> Launch:
    branches, tokens, heads, head_dim = q_out.shape
    block_d = max(2, 1 << (head_dim - 1).bit_length())
    block_h = min(heads & -heads, max(1, _CHUNK // block_d))  # divides the heads
    arguments = product_arguments(qkv) | {
        "wq_ptr": wq, "wk_ptr": wk, "cos_ptr": cos, "sin_ptr": sin, "q_ptr": q_out, "k_ptr": k_cache, "v_ptr": v_cache,
        "q_branch": q_out.stride(0), "q_token": q_out.stride(1), "k_branch": k_cache.stride(0),
        "k_token": k_cache.stride(1), "v_branch": v_cache.stride(0), "v_token": v_cache.stride(1),
        "tokens": tokens, "start": start, "eps": eps,
        **dict(zip(("q_scale", "k_scale", "v_scale"), scales or (None, None, None), strict=True)),
        "limit": None if scales is None or machine.saturates else torch.finfo(q_out.dtype).max,
        "HEADS": heads, "HEAD_DIM": head_dim, "BLOCK_H": block_h, "BLOCK_D": block_d,
    }  # fmt: skip
    warps = machine.warps(block_h * block_d // VECTOR)
    return Launch(qk_norm_rope_store_kernel, (3 * branches * tokens,), arguments, warps)


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
    plan_qk_norm_rope_store(
        machine_for(q_out.device), qkv, wq, wk, cos, sin, q_out, k_cache, v_cache, start, eps, scales
    ).run()
