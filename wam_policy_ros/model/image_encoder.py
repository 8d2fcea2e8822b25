"""CLIP ViT-H/14 visual tower: one image to patch features (DreamZero spec 5.2).

Module names are those of the published checkpoint under ``action_head.image_encoder.``. Some tensors there are never
used (``visual.head``, ``visual.post_norm``, ``log_scale``, the last block); they exist so that loading can be strict.
Upstream calls this tower under bf16 autocast on CUDA. Plain operations only, so that a caller can do the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config_encoders import ImageEncoderConfig
from .constants import constant
from .errors import ShapeError

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class SelfAttention(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.to_qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        # [B, N, 3 * dim] -> q, k, v, each [B, heads, N, head dim]
        q, k, v = self.to_qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int, mlp_ratio: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-5)
        self.attn = SelfAttention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-5)
        self.mlp = nn.Sequential(nn.Linear(dim, mlp_ratio * dim), nn.GELU(), nn.Linear(mlp_ratio * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, config: ImageEncoderConfig) -> None:
        super().__init__()
        dim = config.vision_dim
        self.patch_embedding = nn.Conv2d(3, dim, config.patch_size, stride=config.patch_size, bias=False)
        self.cls_embedding = nn.Parameter(torch.empty(1, 1, dim))
        self.pos_embedding = nn.Parameter(torch.empty(1, config.num_tokens, dim))
        self.pre_norm = nn.LayerNorm(dim, eps=1e-5)
        self.transformer = nn.ModuleList(
            Block(dim, config.vision_heads, config.vision_mlp_ratio) for _ in range(config.vision_layers)
        )
        self.post_norm = nn.LayerNorm(dim, eps=1e-5)
        self.head = nn.Parameter(torch.empty(dim, config.embed_dim))

    def forward(self, image: Tensor, num_blocks: int) -> Tensor:
        """Normalised ``[B, 3, size, size]`` -> hidden states after ``num_blocks`` blocks, ``[B, tokens, dim]``."""
        patches = self.patch_embedding(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_embedding.expand(len(patches), -1, -1), patches], dim=1)
        x = self.pre_norm(x + self.pos_embedding)
        for block in self.transformer[:num_blocks]:
            x = block(x)
        return x


class ClipVision(nn.Module):
    """The visual half of CLIP as the checkpoint stores it."""

    def __init__(self, config: ImageEncoderConfig) -> None:
        super().__init__()
        self.visual = VisionTransformer(config)
        self.log_scale = nn.Parameter(torch.zeros(()))


class ImageEncoder(nn.Module):
    """CLIP features of one image: every block but the last, no post-norm."""

    def __init__(self, config: ImageEncoderConfig | None = None) -> None:
        super().__init__()
        self.config = config or ImageEncoderConfig()
        self.model = ClipVision(self.config)

    def preprocess(self, image: Tensor) -> Tensor:
        """Squash to the square input (the aspect is not kept) and normalise with the statistics of CLIP.

        Args:
            image: ``[B, 3, H, W]`` or ``[B, 1, 3, H, W]``, floating, in [-1, 1].

        Returns:
            ``[B, 3, size, size]`` in the dtype of ``image`` (float32 under CUDA autocast, where bicubic runs in it).

        Raises:
            ShapeError: any other shape.
        """
        if image.ndim == 5 and image.shape[1] == 1:
            image = image[:, 0]
        if image.ndim != 4 or image.shape[1] != 3:
            raise ShapeError(
                f"image for CLIP has shape {list(image.shape)}, expected [B, 3, H, W] or [B, 1, 3, H, W] (one frame)"
            )
        size = (self.config.image_size, self.config.image_size)
        x = F.interpolate(image, size=size, mode="bicubic", align_corners=False)
        x = x * 0.5 + 0.5
        mean, std = (constant(values, x.device, x.dtype)[:, None, None] for values in (CLIP_MEAN, CLIP_STD))
        return (x - mean) / std

    def forward(self, image: Tensor, *, all_blocks: bool = False) -> Tensor:
        """Features of the image.

        Args:
            image: ``[B, 3, H, W]`` or ``[B, 1, 3, H, W]``, floating, in [-1, 1].
            all_blocks: also run the last block, which DreamZero skips.

        Returns:
            ``[B, 1 + patches, vision_dim]`` in the dtype of the weights.

        Raises:
            ShapeError: any other shape of ``image``.
        """
        pixels = self.preprocess(image).to(self.model.visual.patch_embedding.weight.dtype)
        return self.model.visual(pixels, self.config.vision_layers - (0 if all_blocks else 1))
