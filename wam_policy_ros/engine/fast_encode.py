"""A window's first frame with CLIP and the VAE side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from wam_policy_ros.model.dreamzero import DreamZero

from .encode import FirstFrame
from .fast_vae import FastVAE


class FastFirstFrame:
    """Twin of ``encode.encode_first_frame``, tier *numeric*: the fast VAE, and CLIP on a stream of its own.

    Can be captured in a CUDA graph: the second stream forks from the capturing one and joins it.
    """

    def __init__(self, network: DreamZero, vae: FastVAE) -> None:
        self._network, self._vae = network, vae
        self._side = torch.cuda.Stream(network.device) if network.device.type == "cuda" else None

    @torch.inference_mode()
    def __call__(self, frame: Tensor) -> FirstFrame:
        """``[B, 3, 1, H, W]`` in [-1, 1] -> conditioning of the window."""
        network = self._network
        config = network.config.image
        # Upstream's first call runs under autocast when it runs in bf16 (DreamZero spec 10, item 21).
        autocast = network.dtype == torch.bfloat16
        features = frame.new_empty(len(frame), config.num_tokens, config.vision_dim, dtype=network.dtype)

        def clip() -> None:
            with torch.autocast(network.device.type, torch.bfloat16, enabled=autocast):
                # Into memory of the main stream: what the side stream allocates, only the side stream uses.
                features.copy_(network.image_encoder(frame.transpose(1, 2)))

        if self._side is None:
            clip()
            latents = self._latents(frame, autocast)
        else:
            main = torch.cuda.current_stream(network.device)
            self._side.wait_stream(main)
            # The VAE first: its launches are few and long, CLIP's many and short ones follow while it works.
            latents = self._latents(frame, autocast)
            with torch.cuda.stream(self._side):
                clip()
            main.wait_stream(self._side)
        mask = latents.new_zeros(len(latents), 4, *latents.shape[2:])
        mask[:, :, 0] = 1
        return FirstFrame(features, torch.cat([mask, latents], dim=1), latents[:, :, :1])

    def _latents(self, frame: Tensor, autocast: bool) -> Tensor:
        num_frames = self._network.config.num_frames
        return self._vae.encode_conditioning(frame, num_frames, stepwise=not autocast).to(self._network.dtype)
