"""umT5 encoder: token ids to text embeddings (DreamZero spec 5.1).

Pre-norm transformer without biases and without attention scaling; every layer has its own relative position bias.
Module names are those of the published checkpoint under ``action_head.text_encoder.``.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn

from .config_encoders import TextEncoderConfig
from .constants import constant
from .errors import ShapeError

MAX_DISTANCE = 128  # distances from about here on share the last bucket
RMS_EPS = 1e-6


@functools.cache
def bucket_edges(num_buckets: int, max_distance: int = MAX_DISTANCE) -> tuple[int, ...]:
    """Distances at which the next bucket of one direction begins: 1, 2, .. 8, then in equal ratios (12, 16, 23, ..).

    The ratio rule is ``trunc(ln(a / exact) / ln(max_distance / exact) * n) >= j``. Compared in integers, so that no
    device rounds a power of two to the wrong side.
    """
    exact = num_buckets // 4
    n = num_buckets // 2 - exact
    edges = list(range(1, exact))
    for j in range(n):
        bound = exact ** (n - j) * max_distance**j
        edges.append(next(a for a in range(exact, max_distance) if a**n >= bound))
    return tuple(edges)


def relative_position_bucket(relative: Tensor, num_buckets: int) -> Tensor:
    """Bucket of ``key position - query position``; keys to the right use the upper half. int64, same shape."""
    edges = constant(bucket_edges(num_buckets), relative.device, torch.int64)
    return torch.bucketize(relative.abs(), edges, right=True) + (relative > 0) * (num_buckets // 2)


def position_buckets(length: int, num_buckets: int, device: torch.device) -> Tensor:
    """Bucket of every pair of positions, int64 ``[length, length]``."""
    positions = torch.arange(length, device=device)
    return relative_position_bucket(positions[None, :] - positions[:, None], num_buckets)


def zero_padding(hidden: Tensor, mask: Tensor) -> Tensor:
    """Zero the rows past the prompt.

    With several rows in the batch the shortest prompt counts for all of them, as upstream does (DreamZero spec 10,
    item 14): encode prompts one at a time to keep each whole.

    Args:
        hidden: ``[B, L, dim]``.
        mask: ``[B, L]``, 1 for tokens and 0 for padding.
    """
    shortest = (mask > 0).sum(dim=1).min()
    padding = torch.arange(hidden.shape[1], device=hidden.device) >= shortest
    return hidden.masked_fill(padding[None, :, None], 0)


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        mean_square = x.to(_at_least_fp32(x.dtype)).pow(2).mean(dim=-1, keepdim=True)
        # The product rounds to the weight's dtype before the weight is applied.
        return (x * torch.rsqrt(mean_square + RMS_EPS)).to(self.weight.dtype) * self.weight


class TanhGELU(nn.Module):
    """GELU, tanh form, one rounding per operation (a fused kernel rounds once and differs in bf16)."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class RelativePositionBias(nn.Module):
    def __init__(self, num_buckets: int, num_heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_buckets, num_heads)

    def forward(self, buckets: Tensor) -> Tensor:
        """``buckets`` ``[query, key]`` -> additive bias ``[1, heads, query, key]``."""
        return self.embedding(buckets).permute(2, 0, 1)[None]


class SelfAttention(nn.Module):
    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.q = nn.Linear(config.dim, config.dim_attn, bias=False)
        self.k = nn.Linear(config.dim, config.dim_attn, bias=False)
        self.v = nn.Linear(config.dim, config.dim_attn, bias=False)
        self.o = nn.Linear(config.dim_attn, config.dim, bias=False)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """``x`` ``[B, L, dim]``; ``bias`` broadcasts to ``[B, heads, L, L]`` and holds the padding mask."""
        q, k, v = (proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for proj in (self.q, self.k, self.v))
        logits = q @ k.transpose(-1, -2) + bias
        weights = logits.softmax(dim=-1, dtype=_at_least_fp32(logits.dtype)).to(logits.dtype)
        return self.o((weights @ v).transpose(1, 2).flatten(-2))


class GatedFFN(nn.Module):
    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(config.dim, config.dim_ffn, bias=False), TanhGELU())
        self.fc1 = nn.Linear(config.dim, config.dim_ffn, bias=False)
        self.fc2 = nn.Linear(config.dim_ffn, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x) * self.gate(x))


class EncoderBlock(nn.Module):
    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.dim)
        self.attn = SelfAttention(config)
        self.norm2 = RMSNorm(config.dim)
        self.ffn = GatedFFN(config)
        self.pos_embedding = RelativePositionBias(config.num_buckets, config.num_heads)

    def forward(self, x: Tensor, buckets: Tensor, padding: Tensor) -> Tensor:
        bias = self.pos_embedding(buckets)
        bias = bias.masked_fill(padding, torch.finfo(bias.dtype).min)
        x = x + self.attn(self.norm1(x), bias)
        return x + self.ffn(self.norm2(x))


class TextEncoder(nn.Module):
    """umT5 encoder; computes in the dtype of its weights, softmax and RMS statistics in at least float32."""

    def __init__(self, config: TextEncoderConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or TextEncoderConfig()
        self.token_embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(EncoderBlock(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Hidden states after the final norm; rows of padding hold values nobody should read (see zero_padding).

        Args:
            ids: ``[B, L]`` int64, each below ``config.vocab``.
            mask: ``[B, L]``, 1 for tokens and 0 for padding. Padded keys are not attended.

        Returns:
            ``[B, L, dim]`` in the dtype of the weights.

        Raises:
            ShapeError: ``ids`` is not two-dimensional, or ``mask`` differs from it in shape.
        """
        if ids.ndim != 2 or mask.shape != ids.shape:
            raise ShapeError(
                f"text ids and mask have shapes {list(ids.shape)} and {list(mask.shape)}, expected [B, L] twice"
            )
        buckets = position_buckets(ids.shape[1], self.config.num_buckets, ids.device)
        padding = (mask == 0)[:, None, None, :]
        x = self.token_embedding(ids)
        for block in self.blocks:
            x = block(x, buckets, padding)
        return self.norm(x)
