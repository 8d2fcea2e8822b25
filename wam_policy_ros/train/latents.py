"""Latents of all frames, computed once: the VAE does not change while the rest is trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wam_policy_ros.model.vae import VideoVAE, latent_statistics

from .fit_vae import compute_dtype
from .footage import Footage
from .preset import BLOCK
from .whole_clip import WholeClip


@dataclass(frozen=True)
class Latents:
    """By frame number of the footage.

    Attributes:
        block: ``[frames, z, 2, h, w]``: the latents of a call whose newest frame it is. Garbage for the first frames of
            an episode, before which there is no call.
        first: ``[A, z, 3, h, w]``: the frame followed by grey, for anchors only; slot: int64 ``[frames]``, where in
            ``first`` a frame's is, -1 for frames that are no anchors.
    """

    block: Tensor
    first: Tensor
    slot: Tensor

    def conditioning(self, anchor: Tensor) -> Tensor:
        """``ys`` of windows that start at ``anchor`` ``[B]``: mask and latents ``[B, 4 + z, 3, h, w]``."""
        latents = self.first[self.slot[anchor]]
        mask = latents.new_zeros(len(latents), 4, *latents.shape[2:])
        mask[:, :, 0] = 1
        return torch.cat([mask, latents], dim=1)


@torch.no_grad()
def normalised_latents(vae: VideoVAE, clip: Tensor) -> Tensor:
    """``vae.encode(clip)``, on a GPU in bfloat16; float32 ``[B, z, 1 + n, h, w]``."""
    moments = WholeClip(vae.model).encode(clip.to(compute_dtype(clip.device))).float()
    mean, inverse_std = latent_statistics(vae.config, moments)
    return (moments[:, : vae.config.z_dim] - mean) * inverse_std


@torch.no_grad()
def encode_all(
    vae: VideoVAE, footage: Footage, anchors: Tensor, *, batch: int, dtype: torch.dtype, known: Latents | None = None
) -> Latents:  # fmt: skip
    """
    Args:
        anchors: frames at which a window may start.
        dtype: of the result.
        known: of the footage before it grew; only what is missing there is encoded.
    """
    device = footage.device
    factor = vae.config.spatial_factor
    size = (2 * footage.preset.view_height // factor, 2 * footage.preset.view_width // factor)
    z = vae.config.z_dim
    block = torch.zeros(footage.frames, z, BLOCK, *size, dtype=dtype, device=device)
    first = torch.zeros(len(anchors), z, 1 + BLOCK, *size, dtype=dtype, device=device)
    slot = torch.full((footage.frames,), -1, dtype=torch.int64, device=device)
    slot[anchors] = torch.arange(len(anchors), device=device)
    old = 0
    if known is not None:
        old = len(known.slot)
        block[:old] = known.block
        again = anchors[anchors < old]
        if (known.slot[again] < 0).any():
            raise ValueError("an anchor of the footage before it grew has no latents")
        first[slot[again]] = known.first[known.slot[again]]

    def encode(clip: Tensor) -> Tensor:
        return normalised_latents(vae, clip).to(dtype)

    for part in footage.observable(old).to(device).split(batch):
        block[part] = encode(footage.observed_clip(part))[:, :, -BLOCK:]
    for part in anchors[anchors >= old].split(batch):
        first[slot[part]] = encode(footage.first_clip(part))
    return Latents(block, first, slot)
