"""Residual sum with LayerNorm, and RMS statistics: one program per row, the row held in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wam_policy_ros.engine.fp8 import Fp8

from .common import clear_past_end, finished, load_chunk, load_shared_chunk, store_chunk
from .launch import VECTOR, Launch, Machine, chunking, machine_for
from .tensors import Product, Quantized, product_arguments, quantized_like


@triton.jit
def residual_norm_kernel(
    x_ptr, raw_ptr, product_bias_ptr, gate_ptr, shift_ptr, scale_ptr, weight_ptr, bias_ptr, out_ptr, out_scale_ptr,
    gate_stride, shift_stride, scale_stride, tokens, video_tokens, eps, limit,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    row = index.to(tl.int64) * WIDTH
    group = (index % tokens >= video_tokens).to(tl.int32)
    # Loads in a row, then stores in a row: the compiler may not move a load over a store that might touch its address,
    # so that between stores each would be waited for on its own.
    xs = ()
    raws = ()
    for i in tl.static_range(COUNT):
        xs = xs + (load_chunk(x_ptr + row, i, CHUNK, WIDTH),)
    if raw_ptr is not None:
        for i in tl.static_range(COUNT):
            raws = raws + (load_chunk(raw_ptr + row, i, CHUNK, WIDTH),)
    stream = ()
    total = tl.zeros([CHUNK], tl.float32)
    for i in tl.static_range(COUNT):
        x = xs[i].to(tl.float32)
        if raw_ptr is not None:
            y = finished(raws[i], product_bias_ptr, i, CHUNK, WIDTH)
            if gate_ptr is not None:
                y = y * load_shared_chunk(gate_ptr + group * gate_stride, i, CHUNK, WIDTH).to(tl.float32)
            x = (x + y).to(x_ptr.dtype.element_ty).to(tl.float32)
        total += x
        stream = stream + (x,)
    if raw_ptr is not None:
        for i in tl.static_range(COUNT):
            store_chunk(x_ptr + row, stream[i], i, CHUNK, WIDTH)
    mean = tl.sum(total) / WIDTH
    squares = tl.zeros([CHUNK], tl.float32)
    for i in tl.static_range(COUNT):
        centred = clear_past_end(stream[i] - mean, i, CHUNK, WIDTH)
        squares += centred * centred
    rstd = tl.rsqrt(tl.sum(squares) / WIDTH + eps)
    largest = tl.zeros([CHUNK], tl.float32)
    hs = ()
    for i in tl.static_range(COUNT):
        h = (stream[i] - mean) * rstd
        if weight_ptr is not None:
            h = h * load_shared_chunk(weight_ptr, i, CHUNK, WIDTH).to(tl.float32)
        if scale_ptr is not None:
            h = h * (1.0 + load_shared_chunk(scale_ptr + group * scale_stride, i, CHUNK, WIDTH).to(tl.float32))
        if bias_ptr is not None:
            h = h + load_shared_chunk(bias_ptr, i, CHUNK, WIDTH).to(tl.float32)
        if shift_ptr is not None:
            h = h + load_shared_chunk(shift_ptr + group * shift_stride, i, CHUNK, WIDTH).to(tl.float32)
        if out_scale_ptr is None:
            h = h.to(out_ptr.dtype.element_ty)
        else:
            h = clear_past_end(h, i, CHUNK, WIDTH)
            largest = tl.maximum(largest, tl.abs(h))
        hs = hs + (h,)
    if out_scale_ptr is None:
        for i in tl.static_range(COUNT):
            store_chunk(out_ptr + row, hs[i], i, CHUNK, WIDTH)
    else:
        peak = tl.maximum(tl.max(largest), 1e-12)
        tl.store(out_scale_ptr + index, peak / limit)
        inverse = limit / peak
        for i in tl.static_range(COUNT):
            store_chunk(out_ptr + row, hs[i] * inverse, i, CHUNK, WIDTH)


@triton.jit
def rms_rstd_kernel(x_ptr, out_ptr, eps, WIDTH: tl.constexpr, CHUNK: tl.constexpr, COUNT: tl.constexpr):
    index = tl.program_id(0)
    row = index.to(tl.int64) * WIDTH
    squares = tl.zeros([CHUNK], tl.float32)
    for i in tl.static_range(COUNT):
        value = load_chunk(x_ptr + row, i, CHUNK, WIDTH).to(tl.float32)
        squares += value * value
    tl.store(out_ptr + index, tl.rsqrt(tl.sum(squares) / WIDTH + eps))


def plan_residual_norm(
    machine: Machine,
    x: Tensor,
    y: Product | None,
    gate: Tensor | None,
    out: Tensor | Quantized,
    *,
    shift: Tensor | None,
    scale: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    tokens: int,
    video_tokens: int,
    limit: float,
) -> Launch:
    rows, width = x.shape
    chunk, count = chunking(width)
    values, out_scale = out if isinstance(out, Quantized) else (out, None)
    arguments = product_arguments(y) | {
        "gate_stride": 0 if gate is None else gate.stride(0), "shift_stride": 0 if shift is None else shift.stride(0),
        "scale_stride": 0 if scale is None else scale.stride(0),
        "x_ptr": x, "gate_ptr": gate, "shift_ptr": shift, "scale_ptr": scale, "weight_ptr": weight, "bias_ptr": bias,
        "out_ptr": values, "out_scale_ptr": out_scale, "tokens": tokens, "video_tokens": video_tokens, "eps": eps,
        "limit": limit, "WIDTH": width, "CHUNK": chunk, "COUNT": count,
    }  # fmt: skip
    return Launch(residual_norm_kernel, (rows,), arguments, machine.warps(chunk // VECTOR))


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
    out = torch.empty_like(x) if fp8 is None else quantized_like(x, fp8)
    plan_residual_norm(
        machine_for(x.device),
        x,
        y,
        gate,
        out,
        shift=shift,
        scale=scale,
        weight=weight,
        bias=bias,
        eps=eps,
        tokens=tokens,
        video_tokens=video_tokens,
        limit=1.0 if fp8 is None else fp8.max,
    ).run()
    return out


def plan_rms_rstd(machine: Machine, x: Tensor, out: Tensor, eps: float) -> Launch:
    rows, width = x.shape
    chunk, count = chunking(width)
    arguments = {"x_ptr": x, "out_ptr": out, "eps": eps, "WIDTH": width, "CHUNK": chunk, "COUNT": count}
    return Launch(rms_rstd_kernel, (rows,), arguments, machine.warps(chunk // VECTOR))


def rms_rstd(x: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    plan_rms_rstd(machine_for(x.device), x, out, eps).run()
    return out
