"""What surrounds the causal convolutions of the VAE, in one pass over memory. Triton on a GPU, elsewhere the twin.

Activations are *frames*: ``[B, T, H, W, C]`` contiguous, so that one pixel's channels lie together. A convolution over
time reads a *window*: its frames with the two before them in front (``[B, 2 + T, H, W, C]``), or *stacked*, the three
frames that each output sees side by side in the channels (``[B, T, H, W, 3 C]``, oldest first), which turns it into a
convolution over the plane.

``stepwise`` rounds after every operation, as the plain network does in its dtype; otherwise the arithmetic is at least
float32 with one rounding at the end, as the plain network does under autocast.
"""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from wam_policy_ros.model.errors import ShapeError

LOOK_BACK = 2


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _fused(x: Tensor, plain: bool) -> ModuleType | None:
    """The Triton kernels, if they can serve ``x``."""
    if plain or x.device.type != "cuda" or x.shape[0] != 1 or x.dtype == torch.float64 or not has_triton():
        return None
    from . import conv3d_triton

    return conv3d_triton


def extend(x: Tensor, frames: int) -> Tensor:
    """Repeat the last frame until there are ``frames``."""
    missing = frames - x.shape[1]
    return torch.cat([x, x[:, -1:].expand(-1, missing, -1, -1, -1)], dim=1) if missing > 0 else x


def rms_norm(x: Tensor, gamma: Tensor, *, stepwise: bool) -> Tensor:
    """``x / |x| * sqrt(C) * gamma`` over the last axis, in the dtype of ``x``; gamma ``[C]``."""
    scale = x.shape[-1] ** 0.5
    if stepwise:
        return F.normalize(x, dim=-1) * scale * gamma
    wide = torch.promote_types(x.dtype, torch.float32)
    return (F.normalize(x.to(wide), dim=-1) * scale * gamma.to(wide)).to(x.dtype)


def _norm_silu(x: Tensor, gamma: Tensor, stepwise: bool) -> Tensor:
    if stepwise:
        return F.silu(rms_norm(x, gamma, stepwise=True))
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.silu(rms_norm(x.to(wide), gamma.to(wide), stepwise=False)).to(x.dtype)


def norm_silu_window(
    x: Tensor,
    residual: Tensor | None,
    gamma: Tensor,
    past: Tensor | None,
    *,
    frames: int,
    stacked: bool,
    stepwise: bool,
    plain: bool = False,
) -> tuple[Tensor, Tensor]:
    """Finish a residual sum, normalise it, apply SiLU and lay the result out for the next convolution.

    The sum has as many frames as ``residual`` (``x``'s last frame counts as repeated), the window ``frames`` (the
    result's last frame counts as repeated).

    Args:
        x: ``[B, n, H, W, C]``. residual: ``[B, m, H, W, C]``, m >= n, or None for a sum that is ``x``.
        gamma: ``[C]``. past: ``[B, 2, H, W, C]`` normalised frames before these, any strides over time and rows that
            ``past_of`` gives; None: zeros.
        frames: of the window, at least those of the sum.

    Returns:
        The sum, and the window: ``[B, 2 + frames, H, W, C]`` or stacked ``[B, frames, H, W, 3 C]``.

    Raises:
        ShapeError: the shapes do not fit each other.
    """
    count = x.shape[1] if residual is None else residual.shape[1]
    if not x.shape[1] <= count <= frames:
        raise ShapeError(f"window of {frames} frames from {x.shape[1]} and {count}; expected no fewer at each step")
    check_past(x, past)
    if fused := _fused(x, plain):
        return fused.norm_silu_window(x, residual, gamma, past, frames=frames, stacked=stacked, stepwise=stepwise)
    if residual is not None:
        x = extend(x, count) + residual
    new = extend(_norm_silu(x, gamma, stepwise), frames)
    return x, window(new, past, stacked=stacked)


def window(x: Tensor, past: Tensor | None, *, stacked: bool) -> Tensor:
    """Frames as a convolution reads them, see the top of this file."""
    check_past(x, past)
    before = x.new_zeros(x.shape[0], LOOK_BACK, *x.shape[2:]) if past is None else past
    whole = torch.cat([before, x], dim=1)
    if not stacked:
        return whole
    frames = x.shape[1]
    return torch.cat([whole[:, k : k + frames] for k in range(LOOK_BACK + 1)], dim=-1)


def check_past(x: Tensor, past: Tensor | None) -> None:
    """
    Raises:
        ShapeError: ``past`` does not precede ``x``.
    """
    batch, _, height, width, channels = x.shape
    expected = (batch, LOOK_BACK, height, width, channels)
    if past is not None and past.shape != expected:
        raise ShapeError(f"frames before this chunk have shape {list(past.shape)}, expected {list(expected)}")


def past_of(window: Tensor, *, stacked: bool) -> Tensor:
    """The last two frames of a window, ``[B, 2, H, W, C]``: what the next chunk's window begins with. A view."""
    if not stacked:
        return window[:, -LOOK_BACK:]
    return window[:, -1].unflatten(-1, (LOOK_BACK + 1, -1))[..., 1:, :].permute(0, 3, 1, 2, 4)


def padded_sum(x: Tensor, residual: Tensor, *, plain: bool = False) -> Tensor:
    """``x + residual`` with a row of zeros below and a column of zeros at the right: ``[B, m, H + 1, W + 1, C]``.

    Args:
        x: ``[B, n, H, W, C]``, its last frame counts as repeated. residual: ``[B, m, H, W, C]``, m >= n.
    """
    if fused := _fused(x, plain):
        return fused.padded_sum(x, residual)
    return F.pad(extend(x, residual.shape[1]) + residual, (0, 0, 0, 1, 0, 1))
