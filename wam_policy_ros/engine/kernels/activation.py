"""GELU and quantisation of whole rows: one program per row, the row held in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wam_policy_ros.engine.fp8 import Fp8

from .common import finished, load_chunk, store_chunk
from .launch import VECTOR, Launch, Machine, chunking, machine_for
from .tensors import Product, Quantized, product_arguments, quantized_like


@triton.jit
def gelu_tanh(x):
    """``x / 2 * (1 + tanh(z)) = x / (1 + exp(-2 z))`` with ``z = sqrt(2 / pi) * (x + 0.044715 x^3)``.

    The root twice instead of a division, which checks for values that do not occur here: 1 and above, up to infinity.
    """
    exponent = x * (-2.302208198 - 0.10294323957 * (x * x))  # 2 sqrt(2 / pi) log2(e), and 0.044715 times that
    root = tl.rsqrt(1.0 + tl.exp2(exponent))
    return x * root * root


@triton.jit
def rows_kernel(
    raw_ptr, product_bias_ptr, out_ptr, out_scale_ptr, limit,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, COUNT: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    row = index.to(tl.int64) * WIDTH
    raws = ()
    for i in tl.static_range(COUNT):
        raws = raws + (load_chunk(raw_ptr + row, i, CHUNK, WIDTH),)
    largest = tl.zeros([CHUNK], tl.float32)
    kept = ()
    for i in tl.static_range(COUNT):
        value = finished(raws[i], product_bias_ptr, i, CHUNK, WIDTH)
        if GELU:
            value = gelu_tanh(value)
        if out_scale_ptr is None:
            value = value.to(out_ptr.dtype.element_ty)
        else:
            # Past the row everything is zero: raw and bias are loaded as zero, and GELU of zero is zero.
            largest = tl.maximum(largest, tl.abs(value))
        kept = kept + (value,)
    # Stores last: no load of a bias waits behind one.
    if out_scale_ptr is None:
        for i in tl.static_range(COUNT):
            store_chunk(out_ptr + row, kept[i], i, CHUNK, WIDTH)
    else:
        peak = tl.maximum(tl.max(largest), 1e-12)
        tl.store(out_scale_ptr + index, peak / limit)
        inverse = limit / peak
        for i in tl.static_range(COUNT):
            store_chunk(out_ptr + row, kept[i] * inverse, i, CHUNK, WIDTH)


def plan_rows(machine: Machine, u: Product, out: Tensor | Quantized, *, limit: float, gelu: bool) -> Launch:
    rows, width = u.raw.shape
    chunk, count = chunking(width)
    values, out_scale = out if isinstance(out, Quantized) else (out, None)
    arguments = product_arguments(u) | {
        "out_ptr": values, "out_scale_ptr": out_scale, "limit": limit,
        "WIDTH": width, "CHUNK": chunk, "COUNT": count, "GELU": gelu,
    }  # fmt: skip
    return Launch(rows_kernel, (rows,), arguments, machine.warps(chunk // VECTOR))


def gelu_quant(u: Product, fp8: Fp8 | None) -> Tensor | Quantized:
    out = torch.empty_like(u.raw) if fp8 is None else quantized_like(u.raw, fp8)
    plan_rows(machine_for(u.raw.device), u, out, limit=1.0 if fp8 is None else fp8.max, gelu=True).run()
    return out


def quantize_rows(x: Tensor, fp8: Fp8) -> Quantized:
    out = quantized_like(x, fp8)
    plan_rows(machine_for(x.device), Product(x), out, limit=fp8.max, gelu=False).run()
    return out
