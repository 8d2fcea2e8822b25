"""RMS norm of q and k over the whole width, rotation of adjacent pairs, and the write to the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import row_factor, saturate
from .launch import VECTOR, Launch, Machine, machine_for
from .tensors import Product, product_arguments

# Elements that one program works on at a time.
_CHUNK = 1024


@triton.jit
def _part(pointer, offsets, mask, EVEN: tl.constexpr, SHARED: tl.constexpr):
    """Some heads of a row that is read once, or (``SHARED``) that every token needs; zero outside ``mask``."""
    if SHARED:
        if EVEN:
            part = tl.load(pointer + offsets, eviction_policy="evict_last")
        else:
            part = tl.load(pointer + offsets, mask=mask, other=0.0, eviction_policy="evict_last")
    elif EVEN:
        part = tl.load(pointer + offsets, cache_modifier=".cg")
    else:
        part = tl.load(pointer + offsets, mask=mask, other=0.0, cache_modifier=".cg")
    return part.to(tl.float32)


@triton.jit
def _heads(
    pointer, factor, col_ptr, bias_ptr, offsets, mask, COL_STRIDE: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Finished product of some heads, float32 ``[BLOCK_H, BLOCK_D]``; zero outside ``mask``."""
    out = _part(pointer, offsets, mask, EVEN, False) * factor
    if col_ptr is not None:
        if COL_STRIDE == 0:
            out = out * tl.load(col_ptr)
        else:
            out = out * _part(col_ptr, offsets, mask, EVEN, True)
    if bias_ptr is not None:
        out = out + _part(bias_ptr, offsets, mask, EVEN, True)
    return out


@triton.jit
def _put(pointer, offsets, mask, x, scale, limit, EVEN: tl.constexpr):
    if scale is not None:
        x = saturate(x * scale, limit)
    x = x.to(pointer.dtype.element_ty)
    if EVEN:
        tl.store(pointer + offsets, x)
    else:
        tl.store(pointer + offsets, x, mask=mask)


@triton.jit
def _normed_rotated(
    source, factor, col_ptr, bias_ptr, weight_ptr, cos_ptr, sin_ptr, target, scale, limit, eps, part, token,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    COL_STRIDE: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = HEADS * HEAD_DIM
    head = tl.arange(0, BLOCK_H)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = column < HEAD_DIM
    EVEN: tl.constexpr = BLOCK_D == HEAD_DIM and HEADS % BLOCK_H == 0
    squares = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    parts = ()
    weights = ()
    for first in tl.static_range(0, HEADS, BLOCK_H):
        offsets = (first + head) * HEAD_DIM + column
        mask = inside & (first + head < HEADS)
        x = _heads(source, factor, col_ptr, bias_ptr, part * WIDTH + offsets, mask, COL_STRIDE, EVEN)
        squares += x * x
        parts = parts + (x,)
    # Here, not where they are used: a load would wait there for the stores before it.
    for first in tl.static_range(0, HEADS, BLOCK_H):
        offsets = (first + head) * HEAD_DIM + column
        weights = weights + (_part(weight_ptr, offsets, inside & (first + head < HEADS), EVEN, True),)
    rstd = tl.rsqrt(tl.sum(squares) / WIDTH + eps)
    pair = tl.arange(0, BLOCK_D // 2)
    angle = token * (HEAD_DIM // 2) + pair
    cos = tl.load(cos_ptr + angle, mask=pair < HEAD_DIM // 2, other=0.0)[None, :]
    sin = tl.load(sin_ptr + angle, mask=pair < HEAD_DIM // 2, other=0.0)[None, :]
    for i in tl.static_range(0, (HEADS + BLOCK_H - 1) // BLOCK_H):
        offsets = (i * BLOCK_H + head) * HEAD_DIM + column
        mask = inside & (i * BLOCK_H + head < HEADS)
        even, odd = tl.split(tl.reshape(parts[i] * rstd * weights[i], (BLOCK_H, BLOCK_D // 2, 2)))
        turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
        _put(target, offsets, mask, tl.reshape(turned, (BLOCK_H, BLOCK_D)), scale, limit, EVEN)


@triton.jit(do_not_specialize=["start"])
def qk_norm_rope_store_kernel(
    raw_ptr, row_ptr, col_ptr, product_bias_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr,
    q_branch, q_token, k_branch, k_token, v_branch, v_token, tokens, start, eps, q_scale, k_scale, v_scale, limit,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    ROW_STRIDE: tl.constexpr, COL_STRIDE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    row = index.to(tl.int64)
    branch = row // tokens
    token = index % tokens
    source = raw_ptr + row * (3 * HEADS * HEAD_DIM)
    factor = row_factor(row_ptr, row, ROW_STRIDE)
    which = tl.program_id(1)
    if which == 0:
        _normed_rotated(
            source, factor, col_ptr, product_bias_ptr, wq_ptr, cos_ptr, sin_ptr,
            q_ptr + branch * q_branch + token * q_token, q_scale, limit, eps, 0, token,
            HEADS, HEAD_DIM, BLOCK_H, BLOCK_D, COL_STRIDE,
        )  # fmt: skip
    elif which == 1:
        _normed_rotated(
            source, factor, col_ptr, product_bias_ptr, wk_ptr, cos_ptr, sin_ptr,
            k_ptr + branch * k_branch + (start + token) * k_token, k_scale, limit, eps, 1, token,
            HEADS, HEAD_DIM, BLOCK_H, BLOCK_D, COL_STRIDE,
        )  # fmt: skip
    else:
        target = v_ptr + branch * v_branch + (start + token) * v_token
        head = tl.arange(0, BLOCK_H)[:, None]
        column = tl.arange(0, BLOCK_D)[None, :]
        EVEN: tl.constexpr = BLOCK_D == HEAD_DIM and HEADS % BLOCK_H == 0
        parts = ()
        for first in tl.static_range(0, HEADS, BLOCK_H):
            offsets = (first + head) * HEAD_DIM + column
            mask = (column < HEAD_DIM) & (first + head < HEADS)
            shifted = 2 * HEADS * HEAD_DIM + offsets
            parts = parts + (_heads(source, factor, col_ptr, product_bias_ptr, shifted, mask, COL_STRIDE, EVEN),)
        for i in tl.static_range(0, (HEADS + BLOCK_H - 1) // BLOCK_H):
            offsets = (i * BLOCK_H + head) * HEAD_DIM + column
            mask = (column < HEAD_DIM) & (i * BLOCK_H + head < HEADS)
            _put(target, offsets, mask, parts[i], v_scale, limit, EVEN)


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
    block_h = min(heads & -heads, max(1, _CHUNK // block_d))
    arguments = product_arguments(qkv) | {
        "wq_ptr": wq, "wk_ptr": wk, "cos_ptr": cos, "sin_ptr": sin, "q_ptr": q_out, "k_ptr": k_cache, "v_ptr": v_cache,
        "q_branch": q_out.stride(0), "q_token": q_out.stride(1), "k_branch": k_cache.stride(0),
        "k_token": k_cache.stride(1), "v_branch": v_cache.stride(0), "v_token": v_cache.stride(1),
        "tokens": tokens, "start": start, "eps": eps,
        **dict(zip(("q_scale", "k_scale", "v_scale"), scales or (None, None, None), strict=True)),
        "limit": torch.finfo(q_out.dtype).max, "HEADS": heads, "HEAD_DIM": head_dim, "BLOCK_H": block_h,
        "BLOCK_D": block_d,
    }  # fmt: skip
    warps = machine.warps(block_h * block_d // VECTOR)
    return Launch(qk_norm_rope_store_kernel, (branches * tokens, 3), arguments, warps)


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
