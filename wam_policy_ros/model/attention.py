"""Attention of the causal DiT: self-attention over cache and current tokens, cross-attention to image and text."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .exchange import ALONE, Exchange
from .rope import Rotary, rotate


class KV(NamedTuple):
    """Keys (after RoPE) and values of one layer: ``[B, tokens, heads, head_dim]`` each."""

    k: Tensor
    v: Tensor


class CrossKV(NamedTuple):
    """Keys and values of one layer's cross-attention, for text and for image tokens."""

    text: KV
    image: KV


class RMSNorm(nn.Module):
    """RMS norm with float32 statistics; the product with the weight is in the activation dtype (DreamZero spec 2.3)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Unmasked softmax attention, scale 1/sqrt(head_dim). All ``[B, tokens, heads, head_dim]``."""
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return out.transpose(1, 2)


class SelfAttention(nn.Module):
    """q, k are normalised over the full width before the head split, then rotated; the cache holds rotated keys."""

    def __init__(self, dim: int, num_heads: int, eps: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = RMSNorm(dim, eps), RMSNorm(dim, eps)

    def forward(
        self, x: Tensor, table: Rotary, past: KV | None, video_tokens: int, window: int, exchange: Exchange = ALONE
    ) -> tuple[Tensor, KV]:
        """Attend over ``[past | current video][-window:]`` and the current action and state tokens.

        Args:
            x: ``[B, L, dim]``, video tokens first; of several ranks this one's tokens.
            past: cached K/V of earlier frames or None; of several ranks this one's heads.
            video_tokens: how many tokens of the call are video, over all ranks.
            window: most video tokens a query may see.
            exchange: brings the tokens of all ranks together, for some of the heads.

        Returns:
            ``[B, L, dim]`` and the K/V of the current video tokens, of this rank's heads.
        """
        heads = (self.num_heads, -1)
        q = rotate(self.norm_q(self.q(x)).unflatten(-1, heads), table)
        k = rotate(self.norm_k(self.k(x)).unflatten(-1, heads), table)
        v = self.v(x).unflatten(-1, heads)
        q, k, v = exchange.to_heads(q, k, v, video_tokens)
        new = KV(k[:, :video_tokens], v[:, :video_tokens])
        if past is not None:
            first = max(0, past.k.shape[1] + video_tokens - window)
            k = torch.cat([past.k[:, first:], k], 1)
            v = torch.cat([past.v[:, first:], v], 1)
        return self.o(exchange.to_tokens(attend(q, k, v), video_tokens).flatten(-2)), new


class CrossAttention(nn.Module):
    """Two independent attentions, to text and to image tokens, with the same queries; results are added."""

    def __init__(self, dim: int, num_heads: int, eps: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.o, self.k_img, self.v_img = (nn.Linear(dim, dim) for _ in range(6))
        self.norm_q, self.norm_k, self.norm_k_img = (RMSNorm(dim, eps) for _ in range(3))

    def text_kv(self, context: Tensor) -> KV:
        """K/V of embedded text ``[B, text_len, dim]``; valid while the prompt is."""
        heads = (self.num_heads, -1)
        return KV(self.norm_k(self.k(context)).unflatten(-1, heads), self.v(context).unflatten(-1, heads))

    def image_kv(self, context: Tensor) -> KV:
        """K/V of embedded image features ``[B, 257, dim]``; valid while the window is."""
        heads = (self.num_heads, -1)
        return KV(self.norm_k_img(self.k_img(context)).unflatten(-1, heads), self.v_img(context).unflatten(-1, heads))

    def forward(self, x: Tensor, kv: CrossKV) -> Tensor:
        q = self.norm_q(self.q(x)).unflatten(-1, (self.num_heads, -1))
        return self.o(attend(q, *kv.text).flatten(-2) + attend(q, *kv.image).flatten(-2))
