"""Norm over the channels, SiLU and the frames a causal convolution looks back at, in one pass, for training.

In PyTorch's own operations these are a dozen passes in float32, and the VAE's training spends its time there: its
stages are wide in pixels and narrow in channels. On a CPU plain operations compute the same.

Pixels are rows of channels (channels last): ``x [B * T, C, H, W]``. Two forms of the result:

    padded   ``[B, C, T + 2, H, W]``, two frames of zeros in front: for a convolution over time and plane
    stacked  ``[B * T, 3 * C, H, W]``, the frames t - 2, t - 1, t in the channels: for one over the plane
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

PADDED, STACKED = "padded", "stacked"
EPS = 1e-12  # of the length of a pixel's channels, as ``F.normalize``

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU-only installs
    triton = None


def norm_silu_look_back(x: Tensor, gamma: Tensor, batch: int, form: str) -> Tensor:
    """``SiLU(x / |x| * sqrt(C) * gamma)`` with the frames before it, in the dtype of ``x``.

    Args:
        x: ``[B * T, C, H, W]``; gamma: ``[C]``, float32; batch: B.
    """
    if x.device.type == "cuda" and triton is not None:
        return _Fused.apply(x.contiguous(memory_format=torch.channels_last), gamma, batch, form)  # type: ignore
    return look_back(plain_norm_silu(x, gamma), batch, form)


def why_not_fused(device: torch.device) -> str:
    """Tries the kernels on a few numbers; from then on plain operations are used if they fail. Empty if they work."""
    global triton
    if device.type != "cuda" or triton is None:
        return "" if device.type != "cuda" else "Triton is not installed"
    x = torch.randn(2, 8, 4, 4, device=device, dtype=torch.bfloat16, requires_grad=True)
    gamma = torch.ones(8, device=device, requires_grad=True)
    try:
        for form in (PADDED, STACKED):
            y = norm_silu_look_back(x, gamma, 1, form)
            torch.testing.assert_close(y, look_back(plain_norm_silu(x, gamma), 1, form), atol=0.02, rtol=0.02)
            y.sum().backward()
    except Exception as error:  # whatever a compiler may say
        triton = None
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return ""


def plain_norm_silu(x: Tensor, gamma: Tensor) -> Tensor:
    wide = F.normalize(x.float(), dim=1, eps=EPS) * (x.shape[1] ** 0.5 * gamma[:, None, None])
    return F.silu(wide).to(x.dtype)


def look_back(x: Tensor, batch: int, form: str) -> Tensor:
    """The two forms of ``x [B * T, C, H, W]`` in plain operations."""
    frames = x.unflatten(0, (batch, -1))
    before = frames.new_zeros(batch, 2, *frames.shape[2:])
    padded = torch.cat([before, frames], dim=1)
    if form == PADDED:
        return padded.transpose(1, 2)
    count = frames.shape[1]
    side = torch.cat([padded[:, k : k + count] for k in range(3)], dim=2)
    return side.flatten(0, 1).contiguous(memory_format=torch.channels_last)


if triton is not None:

    @triton.jit
    def _forward(x, gamma, y, rows, plane, clip, scale, C: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
                 STACK: tl.constexpr):  # fmt: skip
        """``plane``: pixels of a frame; ``clip``: pixels of a clip."""
        row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
        col = tl.arange(0, P)
        inside = (row < rows)[:, None] & (col < C)[None, :]
        value = tl.load(x + row[:, None] * C + col[None, :], inside, other=0.0).to(tl.float32)
        length = tl.sqrt(tl.sum(value * value, axis=1))
        inverse = 1.0 / tl.maximum(length, 1e-12)
        g = tl.load(gamma + col, col < C, other=0.0)
        z = value * inverse[:, None] * (g * scale)[None, :]
        out = (z / (1.0 + tl.exp(-z))).to(y.dtype.element_ty)
        if STACK:
            at = row % clip
            for k in tl.static_range(3):  # row t is tap k of frame t + 2 - k
                to = row + (2 - k) * plane
                fits = inside & (at + (2 - k) * plane < clip)[:, None]
                tl.store(y + to[:, None] * (3 * C) + k * C + col[None, :], out, fits)
                # Taps that would look before the clip.
                early = inside & (at < (2 - k) * plane)[:, None]
                tl.store(y + row[:, None] * (3 * C) + k * C + col[None, :], tl.zeros_like(out), early)
        else:
            to = row + (row // clip + 1) * (2 * plane)
            tl.store(y + to[:, None] * C + col[None, :], out, inside)

    @triton.jit
    def _backward(x, gamma, dy, dx, partial, rows, plane, clip, scale, C: tl.constexpr, P: tl.constexpr,
                  R: tl.constexpr, LOOPS: tl.constexpr, STACK: tl.constexpr):  # fmt: skip
        col = tl.arange(0, P)
        g = tl.load(gamma + col, col < C, other=0.0)
        total = tl.zeros([P], tl.float32)
        for loop in range(LOOPS):
            row = ((tl.program_id(0) * LOOPS + loop) * R + tl.arange(0, R)).to(tl.int64)
            inside = (row < rows)[:, None] & (col < C)[None, :]
            value = tl.load(x + row[:, None] * C + col[None, :], inside, other=0.0).to(tl.float32)
            if STACK:
                at = row % clip
                grad = tl.zeros([R, P], tl.float32)
                for k in tl.static_range(3):
                    of = row + (2 - k) * plane
                    fits = inside & (at + (2 - k) * plane < clip)[:, None]
                    grad += tl.load(dy + of[:, None] * (3 * C) + k * C + col[None, :], fits, other=0.0).to(tl.float32)
            else:
                of = row + (row // clip + 1) * (2 * plane)
                grad = tl.load(dy + of[:, None] * C + col[None, :], inside, other=0.0).to(tl.float32)
            length = tl.sqrt(tl.sum(value * value, axis=1))
            inverse = (1.0 / tl.maximum(length, 1e-12))[:, None]
            unit = value * inverse
            z = unit * (g * scale)[None, :]
            s = 1.0 / (1.0 + tl.exp(-z))
            dz = grad * s * (1.0 + z * (1.0 - s))
            total += tl.sum(dz * unit, axis=0) * scale
            du = dz * (g * scale)[None, :]
            change = inverse * (du - unit * tl.sum(du * unit, axis=1)[:, None])
            tl.store(dx + row[:, None] * C + col[None, :], change.to(dx.dtype.element_ty), inside)
        tl.store(partial + tl.program_id(0) * C + col, total, col < C)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, batch: int, form: str) -> Tensor:  # type: ignore[override]
        images, channels, height, width = x.shape
        count = images // batch
        if form == STACKED:
            memory = x.new_empty(images, height, width, 3 * channels)
            y = memory.permute(0, 3, 1, 2)
        else:
            memory = x.new_empty(batch, count + 2, height, width, channels)
            memory[:, :2].zero_()
            y = memory.permute(0, 4, 1, 2, 3)
        rows, plane = images * height * width, height * width
        wide, block = _blocks(channels)
        _forward[(triton.cdiv(rows, block),)](x, gamma, memory, rows, plane, count * plane, channels**0.5,
            C=channels, P=wide, R=block, STACK=form == STACKED, num_warps=4)  # fmt: skip
        ctx.save_for_backward(x, gamma)
        ctx.batch, ctx.form = batch, form
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x, gamma = ctx.saved_tensors
        images, channels, height, width = x.shape
        count, rows, plane = images // ctx.batch, images * height * width, height * width
        layout = torch.channels_last if ctx.form == STACKED else torch.channels_last_3d
        dy = dy.contiguous(memory_format=layout)
        dx = torch.empty_like(x)
        wide, block = _blocks(channels)
        loops = 32
        programs = triton.cdiv(rows, block * loops)
        partial = torch.empty(programs, channels, device=x.device, dtype=torch.float32)
        _backward[(programs,)](x, gamma, dy, dx, partial, rows, plane, count * plane, channels**0.5,
            C=channels, P=wide, R=block, LOOPS=loops, STACK=ctx.form == STACKED, num_warps=4)  # fmt: skip
        return dx, partial.sum(dim=0).to(gamma.dtype), None, None


def _blocks(channels: int) -> tuple[int, int]:
    wide = triton.next_power_of_2(channels)
    return wide, max(1, 1024 // wide)  # eight numbers a thread: more only makes it long to compile
