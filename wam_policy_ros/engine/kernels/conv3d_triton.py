"""Triton forms of ``conv3d_ops``; shapes and meaning are described there. One batch entry.

Nothing here reads device memory on the host, and nothing but ``torch.empty`` allocates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch

# Values in flight per program: enough rows that loads are wide, few enough that nothing spills.
_ELEMENTS = 4096


# Numbers of frames and pixels decide no access's width, so no kernel of its own.
@triton.jit(do_not_specialize=["x_frames", "count", "frames", "pixels"])
def norm_silu_window_kernel(
    x_ptr,
    residual_ptr,
    sum_ptr,
    gamma_ptr,
    past_ptr,
    out_ptr,
    x_frames,
    count,
    frames,
    pixels,
    past_frame_stride,
    past_row_stride,
    scale,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_PAST: tl.constexpr,
    STACKED: tl.constexpr,
    STEPWISE: tl.constexpr,
):
    """Program (p, r): rows r of frame p of the window; frames 0 and 1 are the past."""
    p = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK_C)
    inside = (rows < pixels)[:, None] & (c < C)[None, :]
    dtype = out_ptr.dtype.element_ty
    if p < 2:
        if HAS_PAST:
            source = p.to(tl.int64) * past_frame_stride + rows.to(tl.int64)[:, None] * past_row_stride + c[None, :]
            value = tl.load(past_ptr + source, mask=inside, other=0.0)
        else:
            value = tl.zeros((ROWS, BLOCK_C), dtype=dtype)
    else:
        frame = tl.minimum(p - 2, count - 1)
        x_frame = tl.minimum(frame, x_frames - 1)
        local = rows.to(tl.int64)[:, None] * C + c[None, :]
        x = tl.load(x_ptr + x_frame.to(tl.int64) * pixels * C + local, mask=inside, other=0.0)
        if HAS_RESIDUAL:
            at = frame.to(tl.int64) * pixels * C + local
            residual = tl.load(residual_ptr + at, mask=inside, other=0.0)
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
            kept = tl.where(p - 2 < count, pixels, 0)  # a repeated frame is normalised again, not summed again
            tl.store(sum_ptr + at, x, mask=(rows < kept)[:, None] & (c < C)[None, :])
        gamma = tl.load(gamma_ptr + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        wide = x.to(tl.float32)
        norm = tl.sqrt_rn(tl.sum(wide * wide, axis=1))[:, None]
        if STEPWISE:
            norm = tl.maximum(norm.to(dtype).to(tl.float32), 1e-12)
            wide = tl.div_rn(wide, tl.broadcast_to(norm, (ROWS, BLOCK_C))).to(dtype).to(tl.float32)
            wide = (wide * scale).to(dtype).to(tl.float32)
            wide = (wide * gamma).to(dtype).to(tl.float32)
        else:
            wide = wide / tl.maximum(norm, 1e-12) * scale * gamma
        value = (wide / (1.0 + tl.exp(-wide))).to(dtype)
    if STACKED:
        for tap in tl.static_range(3):
            target = p - tap
            at = ((target.to(tl.int64) * pixels + rows)[:, None] * 3 + tap) * C + c[None, :]
            seen = tl.where((target >= 0) & (target < frames), pixels, 0)
            tl.store(out_ptr + at, value, mask=(rows < seen)[:, None] & (c < C)[None, :])
    else:
        at = (p.to(tl.int64) * pixels + rows)[:, None] * C + c[None, :]
        tl.store(out_ptr + at, value, mask=inside)


@triton.jit(do_not_specialize=["x_frames", "height", "width"])
def padded_sum_kernel(
    x_ptr,
    residual_ptr,
    out_ptr,
    x_frames,
    height,
    width,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (f, r): rows r, counted in the padded plane, of frame f."""
    frame = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    y, x = rows // (width + 1), rows % (width + 1)
    c = tl.arange(0, BLOCK_C)[None, :]
    written = (rows < (height + 1) * (width + 1))[:, None] & (c < C)
    inside = written & ((y < height) & (x < width))[:, None]
    local = (y * width + x).to(tl.int64)[:, None] * C + c
    pixels = height * width
    x_frame = tl.minimum(frame, x_frames - 1)
    a = tl.load(x_ptr + x_frame.to(tl.int64) * pixels * C + local, mask=inside, other=0.0)
    b = tl.load(residual_ptr + frame.to(tl.int64) * pixels * C + local, mask=inside, other=0.0)
    total = (a.to(tl.float32) + b.to(tl.float32)).to(out_ptr.dtype.element_ty)
    at = (frame.to(tl.int64) * (height + 1) * (width + 1) + rows)[:, None] * C + c
    tl.store(out_ptr + at, total, mask=written)


def norm_silu_window(
    x: Tensor,
    residual: Tensor | None,
    gamma: Tensor,
    past: Tensor | None,
    *,
    frames: int,
    stacked: bool,
    stepwise: bool,
) -> tuple[Tensor, Tensor]:
    _, n, height, width, channels = x.shape
    pixels = height * width
    count = n if residual is None else residual.shape[1]
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    if past is not None and (past.stride(4) != 1 or past.stride(2) != width * past.stride(3)):
        past = past.contiguous()
    shape = (1, frames, height, width, 3 * channels) if stacked else (1, 2 + frames, height, width, channels)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(residual)
    block = triton.next_power_of_2(channels)
    rows = max(1, _ELEMENTS // block)
    arguments = {
        "x_ptr": x, "residual_ptr": x if residual is None else residual, "sum_ptr": total, "gamma_ptr": gamma,
        "past_ptr": x if past is None else past, "out_ptr": out, "x_frames": n, "count": count, "frames": frames,
        "pixels": pixels, "past_frame_stride": 0 if past is None else past.stride(1),
        "past_row_stride": 0 if past is None else past.stride(3), "scale": channels**0.5, "C": channels,
        "BLOCK_C": block, "ROWS": rows, "HAS_RESIDUAL": residual is not None, "HAS_PAST": past is not None,
        "STACKED": stacked, "STEPWISE": stepwise,
    }  # fmt: skip
    Launch(norm_silu_window_kernel, (frames + 2, triton.cdiv(pixels, rows)), arguments, num_warps=4).run()
    return total, out


def padded_sum(x: Tensor, residual: Tensor) -> Tensor:
    _, frames, height, width, channels = residual.shape
    out = torch.empty((1, frames, height + 1, width + 1, channels), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(channels)
    rows = max(1, _ELEMENTS // block)
    arguments = {
        "x_ptr": x.contiguous(), "residual_ptr": residual.contiguous(), "out_ptr": out, "x_frames": x.shape[1],
        "height": height, "width": width, "C": channels, "BLOCK_C": block, "ROWS": rows,
    }  # fmt: skip
    Launch(padded_sum_kernel, (frames, triton.cdiv((height + 1) * (width + 1), rows)), arguments, num_warps=4).run()
    return out
