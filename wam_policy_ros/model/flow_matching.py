"""The training side of flow matching: noise levels, noising, targets and loss weights (DreamZero spec 4.8).

Inference integrates with UniPC on other tables; nothing here is used there. Levels run from noise (sigma 1) to clean
(sigma 0); ``timestep = 1000 * sigma``, not truncated.
"""

from __future__ import annotations

import torch
from torch import Tensor

NUM_TRAIN_TIMESTEPS = 1000
TRAIN_SHIFT = 5.0


def sigmas(num_levels: int, shift: float = TRAIN_SHIFT) -> Tensor:
    """Noise levels ``[num_levels]`` float32, falling; the closing 0 is left out."""
    s = torch.linspace(1.0, 0.0, num_levels + 1)[:-1]
    return shift * s / (1 + (shift - 1) * s)


def timesteps(num_levels: int, shift: float = TRAIN_SHIFT) -> Tensor:
    """``1000 * sigmas``, float32 ``[num_levels]``."""
    return sigmas(num_levels, shift) * NUM_TRAIN_TIMESTEPS


def euler_step(x: Tensor, flow: Tensor, sigma: Tensor | float, sigma_next: Tensor | float) -> Tensor:
    """One Euler step along the predicted flow; ``sigma_next`` is 0 in the last one."""
    return x + flow * (sigma_next - sigma)


def add_noise(clean: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
    """``(1 - sigma) * clean + sigma * noise`` with ``sigma = timestep / 1000``.

    Args:
        clean, noise: ``[B, ...]``, same shape.
        timestep: ``[B]``, one per sample, or any shape that matches the leading axes of ``clean``.
    """
    sigma = timestep / NUM_TRAIN_TIMESTEPS
    sigma = sigma.reshape(*sigma.shape, *[1] * (clean.ndim - sigma.ndim)).to(clean)
    return (1 - sigma) * clean + sigma * noise


def training_target(clean: Tensor, noise: Tensor) -> Tensor:
    """The flow the network learns: from the clean sample towards the noise."""
    return noise - clean


def training_weights(table: Tensor) -> Tensor:
    """Loss weight of every entry of a timestep table ``[n]``: a bell around 500, lowest entry 0, mean 1 at n = 1000."""
    y = torch.exp(-2 * ((table - NUM_TRAIN_TIMESTEPS / 2) / NUM_TRAIN_TIMESTEPS) ** 2)
    y = y - y.min()
    return y * (NUM_TRAIN_TIMESTEPS / y.sum())


def training_weight(timestep: Tensor, table: Tensor) -> Tensor:
    """Loss weight of ``timestep`` (any shape), read at the nearest entry of ``table`` ``[n]``."""
    nearest = (timestep[..., None] - table).abs().argmin(dim=-1)
    return training_weights(table)[nearest]
