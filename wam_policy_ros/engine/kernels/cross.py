"""Cross-attention to a few hundred keys: queries as a product left them, two softmaxes, one write.

The norm of the queries is in the keys but for its factor per row, which multiplies logits instead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wam_policy_ros.engine.fp8 import Fp8

from .common import saturate
from .launch import Launch, Machine, machine_for


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
    pointer, first, keys, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CUT: tl.constexpr
):  # fmt: skip
    """Rows ``first ..`` of keys or values ``[BLOCK_N, BLOCK_D]``; with ``CUT`` zeros from row ``keys`` on."""
    key = first + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_D)
    place = pointer + key[:, None] * HEAD_DIM + column[None, :]
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
def _begin(
    q, rstd, k_ptr, v_ptr, first, keys, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """The running softmax of one block that is not full: highest logit and sum of weights of each row, and output."""
    k = _rows(k_ptr, first, keys, HEAD_DIM, BLOCK_N, BLOCK_D, True)
    v = _rows(v_ptr, first, keys, HEAD_DIM, BLOCK_N, BLOCK_D, True)
    products = tl.dot(q, tl.trans(k), input_precision="ieee")
    products = tl.where((first + tl.arange(0, BLOCK_N) < keys)[None, :], products, float("-inf"))
    highest = tl.max(products, 1) * rstd
    weights = tl.exp2(products * rstd[:, None] - highest[:, None])
    return highest, tl.sum(weights, 1), tl.dot(weights.to(v.dtype), v, input_precision="ieee")


@triton.jit
def _fold(products, rstd, added, v, highest, total, out):
    """One block of keys into the running softmax. ``rstd [BLOCK_M] * products [BLOCK_M, keys] + added [keys]`` are the
    logits in powers of two. ``rstd`` is positive, so that it may follow the maximum."""
    if added is None:
        new = tl.maximum(highest, tl.max(products, 1) * rstd)
        weights = tl.exp2(products * rstd[:, None] - new[:, None])
    else:
        logits = products * rstd[:, None] + added[None, :]
        new = tl.maximum(highest, tl.max(logits, 1))
        weights = tl.exp2(logits - new[:, None])
    shrink = tl.exp2(highest - new)
    total = total * shrink + tl.sum(weights, 1)
    out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
    return new, total, out


@triton.jit(do_not_specialize_on_alignment=["out_scale_ptr"])
def cross_attention_kernel(
    q_ptr, rstd_ptr, text_k_ptr, text_v_ptr, text_len_ptr, pad_count_ptr, image_k_ptr, image_v_ptr, out_ptr,
    out_scale_ptr, text_branch, image_branch, tokens, limit,
    IMAGE_KEYS: tl.constexpr, TEXT_ROWS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, REST_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Image keys in blocks of ``BLOCK_N`` without a mask, before them the rest in one of ``REST_N``; then text."""
    WIDTH: tl.constexpr = HEADS * HEAD_DIM
    REST: tl.constexpr = IMAGE_KEYS % BLOCK_N
    WHOLE: tl.constexpr = IMAGE_KEYS - REST
    head = tl.program_id(1)
    branch = tl.program_id(2).to(tl.int64)
    start = tl.program_id(0) * BLOCK_M
    column = tl.arange(0, BLOCK_D)
    # One wide address for the program and narrow ones within it: 64 bits for every element would fill the registers.
    base = branch * tokens + start
    row = tl.arange(0, BLOCK_M)
    live = row < tokens - start
    place = row[:, None] * WIDTH + column[None, :]
    if BLOCK_D == HEAD_DIM:
        mask = live[:, None]
    else:
        mask = live[:, None] & (column < HEAD_DIM)[None, :]
    # Not touched: queries go from memory to shared memory to the matrix units.
    q = tl.load(q_ptr + base * WIDTH + head * HEAD_DIM + place, mask=mask, other=0.0)
    rstd = tl.load(rstd_ptr + base + row, mask=live, other=1.0)
    # One key at least, whatever the buffer says: a softmax over none is not a number.
    keys = tl.maximum(tl.load(text_len_ptr + branch), 1)
    extra = tl.log2(tl.maximum(tl.load(pad_count_ptr + branch), 1.0))
    image_k = image_k_ptr + branch * image_branch + head * (IMAGE_KEYS * HEAD_DIM)
    image_v = image_v_ptr + branch * image_branch + head * (IMAGE_KEYS * HEAD_DIM)
    if REST > 0:
        highest, total, out = _begin(q, rstd, image_k, image_v, WHOLE, IMAGE_KEYS, HEAD_DIM, REST_N, BLOCK_D)
    else:
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in tl.range(0, WHOLE, BLOCK_N, num_stages=STAGES):
        k = _rows(image_k, first, IMAGE_KEYS, HEAD_DIM, BLOCK_N, BLOCK_D, False)
        v = _rows(image_v, first, IMAGE_KEYS, HEAD_DIM, BLOCK_N, BLOCK_D, False)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        highest, total, out = _fold(products, rstd, None, v, highest, total, out)
    out = out * (1.0 / total)[:, None]
    # Rounded as the weights of a softmax are: half of the registers while the text is worked on.
    kept = _packed(out) if q.dtype == tl.bfloat16 else out
    text_k = text_k_ptr + branch * text_branch + head * (TEXT_ROWS * HEAD_DIM)
    text_v = text_v_ptr + branch * text_branch + head * (TEXT_ROWS * HEAD_DIM)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in tl.range(0, keys, BLOCK_N, num_stages=STAGES):
        key = first + tl.arange(0, BLOCK_N)
        k = _rows(text_k, first, keys, HEAD_DIM, BLOCK_N, BLOCK_D, True)
        v = _rows(text_v, first, keys, HEAD_DIM, BLOCK_N, BLOCK_D, True)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        added = tl.where(key < keys - 1, 0.0, tl.where(key == keys - 1, extra, float("-inf")))
        highest, total, out = _fold(products, rstd, added, v, highest, total, out)
    out = out * (1.0 / total)[:, None] + (_unpacked(kept) if q.dtype == tl.bfloat16 else kept)
    if out_scale_ptr is not None:
        out = saturate(out * tl.load(out_scale_ptr), limit)
    tl.store(out_ptr + base * WIDTH + head * HEAD_DIM + place, out.to(out_ptr.dtype.element_ty), mask=mask)


def rest_block(keys: int, block_n: int) -> int:
    """Size of the block for the keys that blocks of ``block_n`` leave over; matrix units take no less than 16."""
    return max(16, 1 << (keys % block_n - 1).bit_length())


def plan_cross_attention(
    machine: Machine,
    q: Tensor,
    rstd: Tensor,
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
    branches, heads, text_rows, head_dim = text_k.shape
    image_keys = image_k.shape[2]
    block_d = max(16, 1 << (head_dim - 1).bit_length())
    block_m, block_n = (128, 64) if text_k.dtype.itemsize == 2 else (64, 32)
    block_m = min(block_m, max(16, 1 << (tokens - 1).bit_length()))
    rest_n = rest_block(image_keys, block_n)
    # Queries and the rest of the image keys once, and keys and values of each block that is fetched ahead.
    once, block = (n * block_d * text_k.dtype.itemsize for n in (block_m + 2 * rest_n, 2 * block_n))
    most = 3 if machine.backend == "cuda" else 2
    stages = max(1, min(most, (machine.shared_bytes - once) // block))
    arguments = {
        "q_ptr": q, "rstd_ptr": rstd, "text_k_ptr": text_k, "text_v_ptr": text_v, "text_len_ptr": text_len,
        "pad_count_ptr": pad_count, "image_k_ptr": image_k, "image_v_ptr": image_v, "out_ptr": out,
        "out_scale_ptr": out_scale, "text_branch": text_k.stride(0),
        "image_branch": 0 if image_k.shape[0] == 1 else image_k.stride(0), "tokens": tokens,
        "limit": None if out_scale is None or machine.saturates else limit,
        "IMAGE_KEYS": image_keys, "TEXT_ROWS": text_rows, "HEADS": heads, "HEAD_DIM": head_dim,
        "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": block_d, "REST_N": rest_n, "STAGES": stages,
    }  # fmt: skip
    grid = (-(-tokens // block_m), heads, branches)
    return Launch(cross_attention_kernel, grid, arguments, machine.warps(2 * block_m))


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
    out = torch.empty(q.shape, dtype=q.dtype if fp8 is None else fp8.dtype, device=q.device)
    plan_cross_attention(
        machine_for(q.device), q, rstd, text_k, text_v, text_len, pad_count, image_k, image_v, out, tokens, out_scale,
        1.0 if fp8 is None else fp8.max,
    ).run()  # fmt: skip
    return out
