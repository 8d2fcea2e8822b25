"""Cross-attention to a few hundred keys: queries normalised on the way in, two softmaxes, one write."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from wam_policy_ros.engine.fp8 import Fp8

from .common import saturate
from .launch import Launch, Machine, machine_for
from .tensors import Product, product_arguments


@triton.jit
def _attend(
    q, k_ptr, v_ptr, keys, extra, token_stride, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Softmax attention of ``q [BLOCK_M, BLOCK_D]`` over ``keys`` rows; ``extra`` is added to the last key's logit.

    Logits are in powers of two: ``q`` carries ``log2(e) / sqrt(head_dim)``.
    """
    column = tl.arange(0, BLOCK_D)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in range(0, keys, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        inside = key < keys
        rows = key * token_stride
        k = tl.load(
            k_ptr + rows[None, :] + column[:, None], mask=inside[None, :] & (column < HEAD_DIM)[:, None], other=0.0
        )
        logits = tl.dot(q, k, input_precision="ieee")
        logits += tl.where(key == keys - 1, extra, 0.0)[None, :]
        logits = tl.where(inside[None, :], logits, float("-inf"))
        new = tl.maximum(highest, tl.max(logits, 1))
        weights = tl.exp2(logits - new[:, None])
        shrink = tl.exp2(highest - new)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(
            v_ptr + rows[:, None] + column[None, :], mask=inside[:, None] & (column < HEAD_DIM)[None, :], other=0.0
        )
        out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
        highest = new
    return out / total[:, None]


@triton.jit
def cross_attention_kernel(
    raw_ptr, row_ptr, col_ptr, product_bias_ptr, rstd_ptr, wq_ptr, text_k_ptr, text_v_ptr, text_len_ptr,
    pad_count_ptr, image_k_ptr, image_v_ptr, out_ptr, text_branch, image_branch, tokens, softmax_scale, out_scale,
    limit,
    IMAGE_KEYS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, ROW_STRIDE: tl.constexpr, COL_STRIDE: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = HEADS * HEAD_DIM
    head = tl.program_id(1) * HEAD_DIM
    branch = tl.program_id(2)
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    live = token < tokens
    used = column < HEAD_DIM
    row = branch.to(tl.int64) * tokens + token
    place = row[:, None] * WIDTH + head + column[None, :]
    mask = live[:, None] & used[None, :]
    q = tl.load(raw_ptr + place, mask=mask, other=0.0).to(tl.float32)
    if row_ptr is not None:
        q = q * tl.load(row_ptr + row * ROW_STRIDE, mask=live, other=0.0)[:, None]
    if col_ptr is not None:
        if COL_STRIDE == 0:
            q = q * tl.load(col_ptr)
        else:
            q = q * tl.load(col_ptr + head + column, mask=used, other=0.0)[None, :]
    if product_bias_ptr is not None:
        q = q + tl.load(product_bias_ptr + head + column, mask=used, other=0.0).to(tl.float32)[None, :]
    q = q * (tl.load(rstd_ptr + row, mask=live, other=0.0) * softmax_scale)[:, None]
    q = q * tl.load(wq_ptr + head + column, mask=used, other=0.0).to(tl.float32)[None, :]
    q = q.to(text_k_ptr.dtype.element_ty)
    text = branch.to(tl.int64) * text_branch + head
    extra = tl.log2(tl.maximum(tl.load(pad_count_ptr + branch), 1.0))
    out = _attend(
        q, text_k_ptr + text, text_v_ptr + text, tl.load(text_len_ptr + branch), extra, WIDTH,
        HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    image = branch.to(tl.int64) * image_branch + head
    out += _attend(
        q, image_k_ptr + image, image_v_ptr + image, IMAGE_KEYS, 0.0, WIDTH,
        HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    if out_scale is not None:
        out = saturate(out * out_scale, limit)
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=mask)


def plan_cross_attention(
    machine: Machine,
    q: Product,
    rstd: Tensor,
    wq: Tensor,
    text_k: Tensor,
    text_v: Tensor,
    text_len: Tensor,
    pad_count: Tensor,
    image_k: Tensor,
    image_v: Tensor,
    out: Tensor,
    tokens: int,
    out_scale: float | None,
    limit: float,
) -> Launch:
    branches, _, heads, head_dim = text_k.shape
    block_d = max(16, 1 << (head_dim - 1).bit_length())
    block_m, block_n = (128, 64) if text_k.dtype.itemsize == 2 else (64, 32)
    block_m = min(block_m, max(16, 1 << (tokens - 1).bit_length()))
    # Queries once, and keys and values of two blocks where the next is fetched while one is worked on.
    once, block = (n * block_d * text_k.dtype.itemsize for n in (block_m, 2 * block_n))
    stages = 2 if once + 2 * block <= machine.shared_bytes else 1
    arguments = product_arguments(q) | {
        "rstd_ptr": rstd, "wq_ptr": wq, "text_k_ptr": text_k, "text_v_ptr": text_v, "text_len_ptr": text_len,
        "pad_count_ptr": pad_count, "image_k_ptr": image_k, "image_v_ptr": image_v, "out_ptr": out,
        "text_branch": text_k.stride(0), "image_branch": 0 if image_k.shape[0] == 1 else image_k.stride(0),
        "tokens": tokens, "softmax_scale": math.log2(math.e) / math.sqrt(head_dim), "out_scale": out_scale,
        "limit": limit, "IMAGE_KEYS": image_k.shape[1], "HEADS": heads, "HEAD_DIM": head_dim, "BLOCK_M": block_m,
        "BLOCK_N": block_n, "BLOCK_D": block_d,
    }  # fmt: skip
    grid = (-(-tokens // block_m), heads, branches)
    return Launch(cross_attention_kernel, grid, arguments, machine.warps(2 * block_m), num_stages=stages)


def cross_attention(
    q: Product,
    rstd: Tensor,
    wq: Tensor,
    text_k: Tensor,
    text_v: Tensor,
    text_len: Tensor,
    pad_count: Tensor,
    image_k: Tensor,
    image_v: Tensor,
    tokens: int,
    out_scale: float | None,
    fp8: Fp8 | None,
) -> Tensor:
    out = torch.empty(q.raw.shape, dtype=q.raw.dtype if fp8 is None else fp8.dtype, device=q.raw.device)
    plan_cross_attention(
        machine_for(q.raw.device),
        q,
        rstd,
        wq,
        text_k,
        text_v,
        text_len,
        pad_count,
        image_k,
        image_v,
        out,
        tokens,
        out_scale,
        1.0 if fp8 is None else fp8.max,
    ).run()
    return out
