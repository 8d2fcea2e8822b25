"""Rotary position embedding of the causal DiT (DreamZero spec 2.4): three axes for video, one for action and state.

Angles are float64, as is the rotation; only its result is rounded to the activation dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BASE = 10000.0


class Rotary(NamedTuple):
    """cos and sin of the angles, float64 ``[tokens, 1, head_dim / 2]`` each (broadcast over heads)."""

    cos: Tensor
    sin: Tensor


def _frequencies(dim: int, device: torch.device) -> Tensor:
    """``BASE ** (-2 j / dim)`` for j = 0 .. dim/2 - 1, float64."""
    return BASE ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)


def video_angles(start_frame: int, frames: int, height: int, width: int, head_dim: int, device: torch.device) -> Tensor:
    """Angles of video tokens in row-major (frame, row, column) order, float64 ``[frames*height*width, head_dim/2]``.

    ``start_frame`` is the absolute latent frame in the window; ``height`` and ``width`` count patches. Rows and columns
    take ``2 * (head_dim // 6)`` dimensions each, frames the rest.
    """
    d_hw = 2 * (head_dim // 6)
    d_f = head_dim - 2 * d_hw
    axes = []
    for axis, (start, count, dim) in enumerate(((start_frame, frames, d_f), (0, height, d_hw), (0, width, d_hw))):
        position = torch.arange(start, start + count, dtype=torch.float64, device=device)
        angle = torch.outer(position, _frequencies(dim, device))
        shape = [1, 1, 1, dim // 2]
        shape[axis] = count
        axes.append(angle.view(shape).expand(frames, height, width, dim // 2))
    return torch.cat(axes, dim=-1).reshape(frames * height * width, head_dim // 2)


def register_angles(block: int, actions: int, states: int, head_dim: int, device: torch.device) -> Tensor:
    """Angles of the action tokens, then of the state tokens, of one block: ``[actions + states, head_dim/2]``."""
    position = torch.cat(
        [
            torch.arange(block * actions, (block + 1) * actions, dtype=torch.float64, device=device),
            torch.arange(block * states, (block + 1) * states, dtype=torch.float64, device=device),
        ]
    )
    return torch.outer(position, _frequencies(head_dim, device))


def rotary(angles: Tensor) -> Rotary:
    """Turn angles ``[tokens, head_dim/2]`` into a table for :func:`rotate`."""
    return Rotary(angles.cos().unsqueeze(1), angles.sin().unsqueeze(1))


def rotate(x: Tensor, table: Rotary) -> Tensor:
    """Rotate adjacent pairs of ``x [B, tokens, heads, head_dim]``; returns the dtype of ``x``."""
    pairs = x.to(torch.float64).unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    out = torch.stack((even * table.cos - odd * table.sin, even * table.sin + odd * table.cos), dim=-1)
    return out.flatten(-2).to(x.dtype)
