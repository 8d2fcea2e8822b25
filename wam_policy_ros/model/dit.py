"""The causal Wan DiT with action and state tokens (DreamZero spec 2).

The module holds weights only. Everything that depends on what happened before (cached keys, cross-attention keys,
position tables, time conditioning) is computed by a method and handed back in, so that the engine decides what is
reused and for how long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .action_heads import ActionEncoder, ReluMLP
from .attention import KV, CrossAttention, CrossKV, SelfAttention
from .config import DiTConfig
from .errors import ShapeError
from .exchange import ALONE, Exchange
from .rope import Rotary, register_angles, rotary, video_angles


class TimeConditioning(NamedTuple):
    """Time embedding per token: ``e [B, L, dim]`` for the head and ``e6 [B, L, 6, dim]`` for the blocks."""

    e: Tensor
    e6: Tensor


class DiTOutput(NamedTuple):
    """Flow of the video ``[B, out_dim, F, h, w]``, of the action ``[B, N, action_dim]`` (None without action tokens),
    and the K/V of the current video tokens per layer."""

    video: Tensor
    action: Tensor | None
    kv: list[KV]


class ImageEmbedding(nn.Module):
    """CLIP features ``[B, 257, clip_dim]`` to ``[B, 257, dim]``. Exact GELU and LayerNorms with eps 1e-5."""

    def __init__(self, clip_dim: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Sequential(
            nn.LayerNorm(clip_dim),
            nn.Linear(clip_dim, clip_dim),
            nn.GELU(),
            nn.Linear(clip_dim, dim),
            nn.LayerNorm(dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


class Block(nn.Module):
    """Self-attention and feed-forward with per-token modulation, cross-attention without a gate between them."""

    def __init__(self, cfg: DiTConfig) -> None:
        super().__init__()
        self.dim, self.eps = cfg.dim, cfg.eps
        self.modulation = nn.Parameter(torch.empty(1, 6, cfg.dim))
        self.self_attn = SelfAttention(cfg.dim, cfg.num_heads, cfg.eps)
        self.norm3 = nn.LayerNorm(cfg.dim, eps=cfg.eps)
        self.cross_attn = CrossAttention(cfg.dim, cfg.num_heads, cfg.eps)
        self.ffn = nn.Sequential(
            nn.Linear(cfg.dim, cfg.ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(cfg.ffn_dim, cfg.dim)
        )

    def forward(
        self,
        x: Tensor,
        e6: Tensor,
        table: Rotary,
        cross: CrossKV,
        past: KV | None,
        video_tokens: int,
        window: int,
        exchange: Exchange = ALONE,
    ) -> tuple[Tensor, KV]:
        shift1, scale1, gate1, shift2, scale2, gate2 = (self.modulation + e6).unbind(2)
        h = F.layer_norm(x, (self.dim,), eps=self.eps) * (1 + scale1) + shift1
        attended, kv = self.self_attn(h, table, past, video_tokens, window, exchange)
        x = x + gate1 * attended
        x = x + self.cross_attn(self.norm3(x), cross)
        h = F.layer_norm(x, (self.dim,), eps=self.eps) * (1 + scale2) + shift2
        return x + gate2 * self.ffn(h), kv


class Head(nn.Module):
    """Modulated LayerNorm and projection to patches ``[B, N, 4 * out_dim]``."""

    def __init__(self, cfg: DiTConfig) -> None:
        super().__init__()
        self.dim, self.eps = cfg.dim, cfg.eps
        self.modulation = nn.Parameter(torch.empty(1, 2, cfg.dim))
        self.head = nn.Linear(cfg.dim, 4 * cfg.out_dim)

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        shift, scale = (self.modulation + e.unsqueeze(2)).unbind(2)
        return self.head(F.layer_norm(x, (self.dim,), eps=self.eps) * (1 + scale) + shift)


class CausalDiT(nn.Module):
    """See the module docstring. Shapes: B batch, F latent frames of the call, h x w latent pixels, N action rows."""

    def __init__(self, cfg: DiTConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.patch_embedding = nn.Conv3d(cfg.in_dim, cfg.dim, kernel_size=(1, 2, 2), stride=(1, 2, 2))
        self.text_embedding = nn.Sequential(
            nn.Linear(cfg.text_dim, cfg.dim), nn.GELU(approximate="tanh"), nn.Linear(cfg.dim, cfg.dim)
        )
        self.time_embedding = nn.Sequential(nn.Linear(cfg.freq_dim, cfg.dim), nn.SiLU(), nn.Linear(cfg.dim, cfg.dim))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(cfg.dim, 6 * cfg.dim))
        self.img_emb = ImageEmbedding(cfg.clip_dim, cfg.dim)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.num_layers))
        self.head = Head(cfg)
        self.state_encoder = ReluMLP(cfg.max_state_dim, cfg.hidden_size, cfg.dim)
        self.action_encoder = ActionEncoder(cfg.action_dim, cfg.dim)
        self.action_decoder = ReluMLP(cfg.dim, cfg.hidden_size, cfg.action_dim)

    # -- conditioning, each valid for as long as its inputs are ------------------------------------------------

    def text_kv(self, context: Tensor) -> list[KV]:
        """Cross-attention K/V of every layer from text states ``[B, text_len, text_dim]`` (padding rows zero)."""
        embedded = self.text_embedding(context)
        return [block.cross_attn.text_kv(embedded) for block in self._blocks()]

    def image_kv(self, features: Tensor) -> list[KV]:
        """Cross-attention K/V of every layer from CLIP features ``[B, 257, clip_dim]``."""
        embedded = self.img_emb(features)
        return [block.cross_attn.image_kv(embedded) for block in self._blocks()]

    def rotary_table(self, start_frame: int, frames: int, height: int, width: int, *, registers: bool) -> Rotary:
        """Position table of one call; ``height`` and ``width`` count latent pixels.

        With ``registers`` the action and state tokens of the block that starts at ``start_frame`` follow the video.
        """
        cfg, device = self.cfg, self.patch_embedding.weight.device
        angles = video_angles(start_frame, frames, height // 2, width // 2, cfg.head_dim, device)
        if registers:
            block = (start_frame - 1) // cfg.num_frame_per_block
            extra = register_angles(block, cfg.num_action_per_block, cfg.num_state_per_block, cfg.head_dim, device)
            angles = torch.cat([angles, extra])
        return rotary(angles)

    def time_conditioning(self, timestep: Tensor, timestep_action: Tensor | None = None) -> TimeConditioning:
        """Time embedding of all tokens from int64 timesteps per frame ``[B, F]`` and per action row ``[B, N]``.

        The MLP runs once per frame, row and state token instead of once per token: the same numbers, fewer of them.
        State tokens share the timestep of the first action row of their group.
        """
        cfg = self.cfg
        frames = timestep.shape[1]
        parts = [timestep]
        if timestep_action is not None:
            group = cfg.num_action_per_block // cfg.num_state_per_block
            parts += [timestep_action, timestep_action[:, ::group]]
        e, e6 = self.time_vectors(torch.cat(parts, dim=1))

        def per_token(x: Tensor) -> Tensor:
            return torch.cat([x[:, :frames].repeat_interleave(cfg.frame_seqlen, dim=1), x[:, frames:]], dim=1)

        return TimeConditioning(per_token(e), per_token(e6))

    def time_vectors(self, timestep: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings ``e [B, n, dim]`` and ``e6 [B, n, 6, dim]`` of int64 timesteps ``[B, n]``."""
        cfg = self.cfg
        half = cfg.freq_dim // 2
        omega = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=timestep.device) / half)
        phase = timestep.to(torch.float64).unsqueeze(-1) * omega
        sinusoid = torch.cat([phase.cos(), phase.sin()], dim=-1).to(self.patch_embedding.weight.dtype)
        e = self.time_embedding(sinusoid)
        return e, self.time_projection(e).unflatten(-1, (6, cfg.dim))

    # -- one forward -------------------------------------------------------------------------------------------

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        time: TimeConditioning,
        table: Rotary,
        cross: Sequence[CrossKV],
        *,
        past: Sequence[KV] | None = None,
        action: Tensor | None = None,
        timestep_action: Tensor | None = None,
        state: Tensor | None = None,
        exchange: Exchange = ALONE,
    ) -> DiTOutput:
        """Predict flows. With ``action`` this is a denoising call, without it a prefill.

        Args:
            x: latents ``[B, 16, F, h, w]``; y: conditioning ``[B, 20, F, h, w]`` (4 mask, 16 latent channels).
            time, table, cross: from the methods above, for the same call.
            past: cached K/V per layer, or None when the window is empty.
            action: ``[B, N, action_dim]``; timestep_action: int64 ``[B, N]``; state: ``[B, 1, max_state_dim]``.
            exchange: shares the call with other ranks, each of which is given the same inputs except ``past``, of which
                it holds its own heads, and gets the same flows.

        Raises:
            ShapeError: the latents do not give ``frame_seqlen`` tokens per frame.
        """
        frames, height, width = x.shape[2:]
        tokens = (height // 2) * (width // 2)
        if tokens != self.cfg.frame_seqlen or height % 2 or width % 2:
            raise ShapeError(
                f"latent frame of {height}x{width} gives {tokens} tokens; expected frame_seqlen={self.cfg.frame_seqlen}"
            )
        video = self.patch_embedding(torch.cat([x, y], dim=1)).flatten(2).transpose(1, 2)
        count = frames * tokens
        hidden = video
        if action is not None:
            if timestep_action is None or state is None:
                raise ShapeError("a denoising call needs action, timestep_action and state together")
            hidden = torch.cat([video, self.action_encoder(action, timestep_action), self.state_encoder(state)], dim=1)
        hidden, e, e6 = (exchange.own(t, count) for t in (hidden, *time))
        table = Rotary(*(exchange.own(t, count, dim=0) for t in table))
        run, window = exchange.run_length(count), self.cfg.max_attention_size
        kv: list[KV] = []
        for layer, block in enumerate(self._blocks()):
            cached = past[layer] if past else None
            hidden, new = block(hidden, e6, table, cross[layer], cached, count, window, exchange)
            kv.append(new)
        patches = exchange.whole(self.head(hidden[:, :run], e[:, :run]), count)
        flow = self.unpatchify(patches, frames, height // 2, width // 2)
        rows = None if action is None else self.action_decoder(hidden[:, run : run + action.shape[1]])
        return DiTOutput(flow, rows, kv)

    def _blocks(self) -> list[Block]:
        return list(self.blocks)  # type: ignore[arg-type]

    def unpatchify(self, patches: Tensor, frames: int, rows: int, cols: int) -> Tensor:
        """``[B, F*rows*cols, 4*c]`` with c fastest inside a 2x2 patch -> ``[B, c, F, 2*rows, 2*cols]``."""
        grid = patches.unflatten(1, (frames, rows, cols)).unflatten(-1, (2, 2, self.cfg.out_dim))
        return grid.permute(0, 6, 1, 2, 4, 3, 5).flatten(3, 4).flatten(4, 5)
