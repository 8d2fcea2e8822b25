"""Small networks of DreamZero's architecture: every number that training fixes, in a published checkpoint's layout.

``MUG`` is what is shipped; ``SMALL`` can be trained on a CPU; ``TOY`` is for tests, a training of it takes seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wam_policy_ros.contract.embodiment import Embodiment
from wam_policy_ros.contract.embodiments import DROID
from wam_policy_ros.model.config import DreamZeroConfig

from .vocabulary import pieces

BLOCK = 2
"""Latent frames of a block, as published."""
OBSERVED = 4
"""Camera frames of every call but the first, as published."""

PARTS = {
    "dit": "wan_video_dit_action_casual_chunk.CausalWanModel",
    "text": "wan_video_text_encoder.WanTextEncoder",
    "image": "wan_video_image_encoder.WanImageEncoder",
    "vae": "wan_video_vae.WanVideoVAE",
}


@dataclass(frozen=True)
class Preset:
    """Sizes and timing.

    Attributes:
        view_height, view_width: of one camera inside the mosaic, in pixels; the mosaic is twice that each way.
        stride: control steps between observed frames; a block covers ``4 * stride`` steps.
        horizon: rows of a chunk.
        blocks: blocks of a window, after which it begins anew.
        dim, heads, layers, ffn: of the DiT.
        vae_dim, vae_mult, vae_blocks: channels of the VAE's first stage, multiples of it per stage, residual blocks.
        text_dim, text_layers, clip_dim, clip_layers, clip_size, clip_patch: of the encoders.
        evaluations, guidance_scale: how the network is best run.
    """

    name: str
    view_height: int = 48
    view_width: int = 64
    stride: int = 2
    horizon: int = 16
    blocks: int = 4
    dim: int = 256
    heads: int = 4
    layers: int = 8
    ffn: int = 768
    vae_dim: int = 8
    vae_mult: tuple[int, ...] = (1, 2, 4, 8)
    vae_blocks: int = 1
    text_dim: int = 64
    text_layers: int = 2
    text_len: int = 128
    clip_dim: int = 64
    clip_layers: int = 3
    clip_size: int = 112
    clip_patch: int = 7
    evaluations: int = 5
    guidance_scale: float = 1.0

    @property
    def steps(self) -> int:
        """Control steps of a block: so many rows of a chunk are executed before the next call."""
        return OBSERVED * self.stride

    @property
    def offsets(self) -> tuple[int, ...]:
        """When the observed frames of a call were taken, in control steps from its newest: (-6, -4, -2, 0)."""
        return tuple(-self.stride * k for k in reversed(range(OBSERVED)))

    @property
    def embodiment(self) -> Embodiment:
        """DROID's page with this network's sizes."""
        return dataclasses.replace(
            DROID,
            horizon=self.horizon,
            frame_offsets=self.offsets,
            view_height=self.view_height,
            view_width=self.view_width,
        )

    @property
    def tokens(self) -> int:
        """Tokens of a latent frame."""
        return (2 * self.view_height // 16) * (2 * self.view_width // 16)

    def network(self) -> DreamZeroConfig:
        """The network as the loader will build it."""
        return DreamZeroConfig.from_config_json(self.config_json())

    def config_json(
        self, latent_mean: list[float] | None = None, latent_std: list[float] | None = None
    ) -> dict[str, Any]:
        """``config.json`` (DreamZero spec 6.3); without latent statistics, those of Wan."""
        shapes = {"num_frame_per_block": BLOCK, "action_dim": 8, "max_state_dim": 8}
        dit = {
            **shapes, "model_type": "i2v", "dim": self.dim, "in_dim": 36, "ffn_dim": self.ffn, "out_dim": 16,
            "freq_dim": 64, "eps": 1e-6, "num_heads": self.heads, "num_layers": self.layers, "hidden_size": 128,
            "frame_seqlen": self.tokens, "max_chunk_size": self.blocks, "num_action_per_block": self.horizon,
            "num_state_per_block": 1, "text_len": self.text_len,
        }  # fmt: skip
        text = {"vocab": len(pieces()), "dim": self.text_dim, "dim_attn": self.text_dim, "dim_ffn": 2 * self.text_dim,
                "num_heads": 4, "num_layers": self.text_layers}  # fmt: skip
        image = {"vision_dim": self.clip_dim, "vision_heads": 4, "vision_layers": self.clip_layers, "embed_dim": 32,
                 "image_size": self.clip_size, "patch_size": self.clip_patch}  # fmt: skip
        vae: dict[str, Any] = {"dim": self.vae_dim, "dim_mult": list(self.vae_mult), "num_res_blocks": self.vae_blocks}
        if latent_mean is not None and latent_std is not None:
            vae |= {"latent_mean": latent_mean, "latent_std": latent_std}
        # Three latents of conditioning are enough: all later blocks use the last two (``conditioning_slice``).
        head = {
            **shapes, "num_frames": 1 + 4 * BLOCK, "action_horizon": self.horizon, "tiled": False,
            "decouple_inference_noise": False, "train_architecture": "full",
            "diffusion_model_cfg": {"_target_": PARTS["dit"]} | dit,
            "text_encoder_cfg": {"_target_": PARTS["text"]} | text,
            "image_encoder_cfg": {"_target_": PARTS["image"]} | image,
            "vae_cfg": {"_target_": PARTS["vae"]} | vae,
        }  # fmt: skip
        return {
            "architectures": ["VLA"],
            "model_type": "vla",
            "model_dtype": "float32",
            "action_horizon": self.horizon,
            "action_dim": 8,
            "action_head_cfg": {"_target_": "WANPolicyHead", "config": head},
        }

    def conf_yaml(self) -> dict[str, Any]:
        """``experiment_cfg/conf.yaml``: crop, sizes, orders, and that each row of a chunk has its own statistics."""
        page = self.embodiment
        order = {
            "video_concat_order": [f"video.{c.name}" for c in page.cameras],
            "state_concat_order": [f"state.{f.name}" for f in page.state],
            "action_concat_order": [f"action.{f.name}" for f in page.action],
        }
        transforms = [
            {"_target_": "VideoCrop", "scale": page.crop_scale},
            {"_target_": "VideoResize", "height": self.view_height, "width": self.view_width},
            {"_target_": "ConcatTransform", **order},
        ]
        return {
            "transforms": {page.tag: {"transforms": transforms}},
            "relative_action": True,
            "relative_action_keys": [f.name for f in page.action if f.relative],
            "relative_action_per_horizon": True,
        }

    def metadata(self, statistics: Mapping[str, Any]) -> dict[str, Any]:
        """``experiment_cfg/metadata.json``, with how to run the network.

        Args:
            statistics: ``{"state": {field: {"q01": .., "q99": ..}}, "action": ..}``.
        """
        page = self.embodiment
        video = {c.name: {"resolution": [c.width, c.height], "channels": 3, "fps": 15.0} for c in page.cameras}
        modalities = {
            "video": video,
            "state": {f.name: {"absolute": True, "shape": [f.dim]} for f in page.state},
            "action": {f.name: {"absolute": not f.relative, "shape": [f.dim]} for f in page.action},
        }
        inference = {
            "frame_offsets": list(self.offsets),
            "execute_steps": self.steps,
            "evaluations": self.evaluations,
            "guidance_scale": self.guidance_scale,
        }
        entry = {"embodiment_tag": page.tag, "statistics": statistics, "modalities": modalities, "inference": inference}
        return {page.tag: entry}


MUG = Preset("mug")
SMALL = Preset(
    "small", view_height=32, view_width=48, dim=128, heads=4, layers=5, ffn=384, vae_dim=8, vae_mult=(1, 2, 4, 4),
    text_dim=32, text_layers=1, clip_dim=32, clip_layers=2, clip_size=56, clip_patch=14,
)  # fmt: skip
TOY = Preset(
    "toy", view_height=16, view_width=32, dim=32, heads=2, layers=2, ffn=48, vae_dim=4, vae_mult=(1, 2, 2, 3),
    text_dim=16, text_layers=1, clip_dim=16, clip_layers=2, clip_size=28, clip_patch=14,
)  # fmt: skip
PRESETS = {p.name: p for p in (MUG, SMALL, TOY)}
