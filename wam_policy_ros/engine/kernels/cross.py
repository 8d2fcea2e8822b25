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

# How the blocks of keys of one attention are bounded.
EVEN = tl.constexpr(0)  # the blocks hold exactly the keys: no mask
MASKED = tl.constexpr(1)  # every block is masked: the last one is fetched ahead like the others
PEELED = tl.constexpr(2)  # full blocks without a mask, then a masked one that is not fetched ahead


@triton.jit
def _packed(x):
    """Pairs of float32 rounded to bf16, two in 32 bits: bf16 values by themselves take a register each."""
    bits = x.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
    low, high = tl.split(tl.reshape(bits, (x.shape[0], x.shape[1] // 2, 2)))
    return low | (high << 16)


@triton.jit
def _unpacked(pairs):
    low = (pairs << 16).to(tl.float32, bitcast=True)
    high = (pairs & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(low, high), (pairs.shape[0], pairs.shape[1] * 2))


@triton.jit
def _rows(
    pointer, first, keys, STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CUT: tl.constexpr,
):  # fmt: skip
    """Rows ``first ..`` of keys or values ``[BLOCK_N, BLOCK_D]``; with ``CUT`` zeros from row ``keys`` on."""
    key = first + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_D)
    place = pointer + key[:, None] * STRIDE + column[None, :]
    if CUT:
        if BLOCK_D == HEAD_DIM:
            rows = tl.load(place, mask=(key < keys)[:, None], other=0.0)
        else:
            rows = tl.load(place, mask=(key < keys)[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
    elif BLOCK_D == HEAD_DIM:
        rows = tl.load(place)
    else:
        rows = tl.load(place, mask=(column < HEAD_DIM)[None, :], other=0.0)
    return rows


@triton.jit
def _fold(
    q, k_ptr, v_ptr, first, keys, highest, total, out, STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """One block of keys into the running softmax."""
    k = _rows(k_ptr, first, keys, STRIDE, HEAD_DIM, BLOCK_N, BLOCK_D, CUT)
    v = _rows(v_ptr, first, keys, STRIDE, HEAD_DIM, BLOCK_N, BLOCK_D, CUT)
    logits = tl.dot(q, tl.trans(k), input_precision="ieee")
    if CUT:
        logits = tl.where((first + tl.arange(0, BLOCK_N) < keys)[None, :], logits, float("-inf"))
    new = tl.maximum(highest, tl.max(logits, 1))
    weights = tl.exp2(logits - new[:, None])
    shrink = tl.exp2(highest - new)
    total = total * shrink + tl.sum(weights, 1)
    out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
    return new, total, out


@triton.jit
def _last_logit(q, k_ptr, keys, STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Logits ``[BLOCK_M]`` of the last key."""
    column = tl.arange(0, BLOCK_D)
    k = tl.load(k_ptr + (keys - 1) * STRIDE + column, mask=column < HEAD_DIM, other=0.0)
    return tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1)


@triton.jit
def _attend(
    q, k_ptr, v_ptr, keys, highest, STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BOUNDS: tl.constexpr,
):  # fmt: skip
    """Softmax attention of ``q [BLOCK_M, BLOCK_D]`` over ``keys`` rows; ``highest [BLOCK_M]`` is the last one's logit.

    The last key is the state that the others are folded into: 257 keys are four blocks of 64 and no fifth, and what is
    added to the logit of one key costs the others nothing. Logits are in powers of two.
    """
    rest = keys - 1
    column = tl.arange(0, BLOCK_D)
    v = tl.load(v_ptr + rest * STRIDE + column, mask=column < HEAD_DIM, other=0.0).to(tl.float32)
    total = tl.full([BLOCK_M], 1.0, tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32) + v[None, :]
    stop = rest // BLOCK_N * BLOCK_N if BOUNDS == PEELED else rest
    for first in range(0, stop, BLOCK_N):
        highest, total, out = _fold(
            q, k_ptr, v_ptr, first, rest, highest, total, out, STRIDE, HEAD_DIM, BLOCK_N, BLOCK_D, BOUNDS == MASKED
        )
    if BOUNDS == PEELED:  # noqa: SIM102 (known when compiled, while the next is not)
        if stop < rest:
            highest, total, out = _fold(
                q, k_ptr, v_ptr, stop, rest, highest, total, out, STRIDE, HEAD_DIM, BLOCK_N, BLOCK_D, True
            )
    return out * (1.0 / total)[:, None]


@triton.jit(do_not_specialize=["turns"], do_not_specialize_on_alignment=["out_scale_ptr"])
def cross_attention_kernel(
    raw_ptr, row_ptr, col_ptr, product_bias_ptr, rstd_ptr, wq_ptr, text_k_ptr, text_v_ptr, text_len_ptr,
    pad_count_ptr, image_k_ptr, image_v_ptr, out_ptr, out_scale_ptr, text_branch, image_branch, tokens, softmax_scale,
    limit, turns,
    IMAGE_KEYS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, ROW_STRIDE: tl.constexpr, COL_STRIDE: tl.constexpr,
    TEXT_BOUNDS: tl.constexpr,
):  # fmt: skip
    """``turns`` is 1, which the compiler must not know: see the loop."""
    WIDTH: tl.constexpr = HEADS * HEAD_DIM
    head = tl.program_id(1) * HEAD_DIM
    branch = tl.program_id(2).to(tl.int64)
    start = tl.program_id(0) * BLOCK_M
    column = tl.arange(0, BLOCK_D)
    used = column < HEAD_DIM
    # One wide address for the program and narrow ones within it: 64 bits for every element would fill the registers.
    base = branch * tokens + start
    row = tl.arange(0, BLOCK_M)
    live = row < tokens - start
    place = row[:, None] * WIDTH + column[None, :]
    if BLOCK_D == HEAD_DIM:
        mask = live[:, None]
    else:
        mask = live[:, None] & used[None, :]
    # One key at least, whatever the buffer says: the last of none would lie before the others.
    keys = tl.maximum(tl.load(text_len_ptr + branch), 1)
    extra = tl.log2(tl.maximum(tl.load(pad_count_ptr + branch), 1.0))
    q = tl.load(raw_ptr + base * WIDTH + head + place, mask=mask, other=0.0).to(tl.float32)
    if row_ptr is not None:
        q = q * tl.load(row_ptr + base * ROW_STRIDE + row * ROW_STRIDE, mask=live, other=0.0)[:, None]
    if col_ptr is not None:
        if COL_STRIDE == 0:
            q = q * tl.load(col_ptr)
        else:
            q = q * tl.load(col_ptr + head + column, mask=used, other=0.0)[None, :]
    if product_bias_ptr is not None:
        q = q + tl.load(product_bias_ptr + head + column, mask=used, other=0.0).to(tl.float32)[None, :]
    q = q * (tl.load(rstd_ptr + base + row, mask=live, other=0.0) * softmax_scale)[:, None]
    q = q * tl.load(wq_ptr + head + column, mask=used, other=0.0).to(tl.float32)[None, :]
    q = q.to(text_k_ptr.dtype.element_ty)
    image = branch * image_branch + head
    text = branch * text_branch + head
    of_image = _last_logit(q, image_k_ptr + image, IMAGE_KEYS, WIDTH, HEAD_DIM, BLOCK_D)
    of_text = _last_logit(q, text_k_ptr + text, keys, WIDTH, HEAD_DIM, BLOCK_D) + extra
    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # What a loop carries stays in shared memory when the matrix units multiply it; computed values are brought to
    # registers for each block, 32 of a thread. So q is carried by a loop of one turn, and addresses depend on the turn
    # lest they are all computed before it and held.
    for turn in range(turns):
        image += turn * WIDTH
        text += turn * WIDTH
        out = _attend(
            q, image_k_ptr + image, image_v_ptr + image, IMAGE_KEYS, of_image, WIDTH, HEAD_DIM, BLOCK_M, BLOCK_N,
            BLOCK_D, EVEN if (IMAGE_KEYS - 1) % BLOCK_N == 0 else PEELED,
        )  # fmt: skip
        # Rounded as the weights of a softmax are: half of the registers while the text is worked on.
        kept = _packed(out) if q.dtype == tl.bfloat16 else out
        out = _attend(
            q, text_k_ptr + text, text_v_ptr + text, keys, of_text, WIDTH, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D,
            TEXT_BOUNDS,
        )  # fmt: skip
        out += _unpacked(kept) if q.dtype == tl.bfloat16 else kept
        q = tl.zeros([BLOCK_M, BLOCK_D], q.dtype)
    if out_scale_ptr is not None:
        out = saturate(out * tl.load(out_scale_ptr), limit)
    tl.store(out_ptr + base * WIDTH + head + place, out.to(out_ptr.dtype.element_ty), mask=mask)


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
    out_scale: Tensor | None,
    limit: float,
) -> Launch:
    branches, _, heads, head_dim = text_k.shape
    block_d = max(16, 1 << (head_dim - 1).bit_length())
    block_m, block_n = (128, 64) if text_k.dtype.itemsize == 2 else (64, 32)
    block_m = min(block_m, max(16, 1 << (tokens - 1).bit_length()))
    # Queries once, and keys and values of each block that is fetched while another is worked on.
    once, block = (n * block_d * text_k.dtype.itemsize for n in (block_m, 2 * block_n))
    most = 3 if machine.backend == "cuda" else 2
    stages = max(1, min(most, (machine.shared_bytes - once) // block))
    arguments = product_arguments(q) | {
        "rstd_ptr": rstd, "wq_ptr": wq, "text_k_ptr": text_k, "text_v_ptr": text_v, "text_len_ptr": text_len,
        "pad_count_ptr": pad_count, "image_k_ptr": image_k, "image_v_ptr": image_v, "out_ptr": out,
        "out_scale_ptr": out_scale, "text_branch": text_k.stride(0),
        "image_branch": 0 if image_k.shape[0] == 1 else image_k.stride(0),
        "tokens": tokens, "softmax_scale": math.log2(math.e) / math.sqrt(head_dim),
        "limit": limit, "turns": 1, "IMAGE_KEYS": image_k.shape[1], "HEADS": heads, "HEAD_DIM": head_dim,
        "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": block_d, "TEXT_BOUNDS": MASKED.value,
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
    out_scale: Tensor | None,
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
