"""Encoders and decoder of action and state tokens (DreamZero spec 2.3 (2) and (6)).

The weights are stored per embodiment category, ``[category, in, out]``; the published network has one category.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class CategoryLinear(nn.Module):
    """``x @ W[0] + b[0]``: the transpose of ``nn.Linear``'s storage, with a leading category axis of size one."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.empty(1, in_features, out_features))
        self.b = nn.Parameter(torch.empty(1, out_features))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.W[0] + self.b[0]


class ReluMLP(nn.Module):
    """Two category layers with a ReLU between: the state encoder and the action decoder."""

    def __init__(self, in_features: int, hidden: int, out_features: int) -> None:
        super().__init__()
        self.layer1 = CategoryLinear(in_features, hidden)
        self.layer2 = CategoryLinear(hidden, out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer2(torch.relu(self.layer1(x)))


def action_time_embedding(timestep: Tensor, dim: int) -> Tensor:
    """sin (first half) and cos (second half) of the integer timestep, float32 ``[B, N, dim]``.

    The order and the exponent differ from the DiT's own time sinusoid (DreamZero spec 10, item 15).
    """
    half = dim // 2
    exponent = -torch.arange(half, dtype=torch.float32, device=timestep.device) * (math.log(10000.0) / half)
    phase = timestep.float().unsqueeze(-1) * exponent.exp()
    return torch.cat([phase.sin(), phase.cos()], dim=-1)


class ActionEncoder(nn.Module):
    """Noisy action rows ``[B, N, action_dim]`` and their timesteps ``[B, N]`` to tokens ``[B, N, dim]``."""

    def __init__(self, action_dim: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.W1 = CategoryLinear(action_dim, dim)
        self.W2 = CategoryLinear(2 * dim, dim)
        self.W3 = CategoryLinear(dim, dim)

    def forward(self, action: Tensor, timestep: Tensor) -> Tensor:
        tau = action_time_embedding(timestep, self.dim).to(action.dtype)
        hidden = self.W2(torch.cat([self.W1(action), tau], dim=-1))
        # Two operations on purpose: the reference rounds between sigmoid and product.
        return self.W3(hidden * torch.sigmoid(hidden))
