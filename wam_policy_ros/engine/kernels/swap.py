"""What comes before and after an exchange between ranks: rows of some heads from one layout to another, in one launch
where PyTorch's copies would take one for each tensor and kind of token. Bits are copied (see ``words``)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .common import load_chunk, store_chunk
from .launch import Launch, Machine, chunking, machine_for

# Words of one thread: 16 bytes where heads are whole words.
_WORDS = 2


@triton.jit
def _copy(source, target, WIDTH: tl.constexpr, CHUNK: tl.constexpr, COUNT: tl.constexpr):
    for i in tl.static_range(COUNT):
        store_chunk(target, load_chunk(source, i, CHUNK, WIDTH), i, CHUNK, WIDTH)


@triton.jit
def unpack_heads_kernel(
    received_ptr, local_ptr, q_ptr, k_ptr, v_ptr, local_part, local_branch, local_token, q_branch, q_token,
    k_branch, k_token, v_branch, v_token, branches, tokens, video_tokens, run,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    part = tl.program_id(1)
    branch = index // tokens
    token = index % tokens
    wide = token.to(tl.int64)
    if part == 0:
        target = q_ptr + branch * q_branch + wide * q_token
    elif part == 1:
        target = k_ptr + branch * k_branch + wide * k_token
    else:
        target = v_ptr + branch * v_branch + wide * v_token
    if token < video_tokens:
        row = ((token // run * 3 + part) * branches + branch) * run + token % run
        _copy(received_ptr + row.to(tl.int64) * WIDTH, target, WIDTH, CHUNK, COUNT)
    else:
        own = (run + token - video_tokens).to(tl.int64)
        _copy(local_ptr + part * local_part + branch * local_branch + own * local_token, target, WIDTH, CHUNK, COUNT)


@triton.jit
def pack_tokens_kernel(
    x_ptr, sent_ptr, branches, tokens, video_tokens, run, length,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    own = index % length
    branch = index // length % branches
    token = index // length // branches * run + own
    filler = (own < run) & (token >= video_tokens)
    token = tl.where(own < run, token, video_tokens + own - run)
    target = sent_ptr + index.to(tl.int64) * WIDTH
    if filler:
        for i in tl.static_range(COUNT):
            store_chunk(target, tl.zeros([CHUNK], sent_ptr.dtype.element_ty), i, CHUNK, WIDTH)
    else:
        _copy(x_ptr + (branch * tokens + token).to(tl.int64) * WIDTH, target, WIDTH, CHUNK, COUNT)


def _rows(machine: Machine, width: int) -> tuple[dict[str, int], int]:
    chunk, count = chunking(width)
    return {"WIDTH": width, "CHUNK": chunk, "COUNT": count}, machine.warps(chunk // _WORDS)


def plan_unpack_heads(
    machine: Machine, received: Tensor, local: Tensor, q: Tensor, k: Tensor, v: Tensor, video_tokens: int
) -> Launch:
    """All tensors as words; ``local`` begins at this rank's first head."""
    _, parts, branches, run, own, width = received.shape
    tokens = q.shape[1]
    sizes, warps = _rows(machine, own * width)
    arguments = {
        "received_ptr": received, "local_ptr": local, "q_ptr": q, "k_ptr": k, "v_ptr": v,
        "local_part": local.stride(0), "local_branch": local.stride(1), "local_token": local.stride(2),
        "q_branch": q.stride(0), "q_token": q.stride(1), "k_branch": k.stride(0), "k_token": k.stride(1),
        "v_branch": v.stride(0), "v_token": v.stride(1), "branches": branches, "tokens": tokens,
        "video_tokens": video_tokens, "run": run, **sizes,
    }  # fmt: skip
    return Launch(unpack_heads_kernel, (branches * tokens, parts), arguments, warps)


def plan_pack_tokens(machine: Machine, x: Tensor, sent: Tensor, video_tokens: int) -> Launch:
    branches, tokens, own, width = x.shape
    ranks, _, length = sent.shape[:3]
    sizes, warps = _rows(machine, own * width)
    arguments = {
        "x_ptr": x, "sent_ptr": sent, "branches": branches, "tokens": tokens, "video_tokens": video_tokens,
        "run": length - (tokens - video_tokens), "length": length, **sizes,
    }  # fmt: skip
    return Launch(pack_tokens_kernel, (ranks * branches * length,), arguments, warps)


def unpack_heads(received: Tensor, local: Tensor, q: Tensor, k: Tensor, v: Tensor, video_tokens: int) -> None:
    plan_unpack_heads(machine_for(q.device), received, local, q, k, v, video_tokens).run()


def pack_tokens(x: Tensor, sent: Tensor, video_tokens: int) -> None:
    plan_pack_tokens(machine_for(x.device), x, sent, video_tokens).run()
