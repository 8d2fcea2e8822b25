"""The network over a whole window at once, for training: every block sees what it would see at inference.

At inference a window is built call by call: observed frames are written into the cache at timestep 0, then the next
block is denoised, looking at the cache and at itself (DreamZero spec 2.5 and 3.3). Here all blocks of a window are
computed together from the same observed frames (teacher forcing). The pattern is the one of inference, also for the
state token, which looks at everything its block looks at. Only modules of the network are used; a test compares both.

Shapes: B windows, K blocks, F = 2 frames of a block, S tokens of a frame, N rows, h x w latent pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from wam_policy_ros.engine.sampler import conditioning_slice
from wam_policy_ros.model.attention import KV, CrossKV, SelfAttention
from wam_policy_ros.model.dit import Block, CausalDiT
from wam_policy_ros.model.rope import Rotary


class WindowFlows(NamedTuple):
    """Predicted flows: video ``[B, K, z, F, h, w]``, action ``[B, K, N, action_dim]``."""

    video: Tensor
    action: Tensor


class Segment(NamedTuple):
    """Tokens that share one timestep per row: ``x [B, G, L, dim]``, e6 ``[., G, 6, dim]``, positions of the tokens."""

    x: Tensor
    e6: Tensor
    table: Rotary


def window_forward(
    dit: CausalDiT,
    observed: Tensor,
    ys: Tensor,
    cross: Sequence[CrossKV],
    video: Tensor,
    action: Tensor,
    state: Tensor,
    timestep: Tensor,
    *,
    layer: Callable[..., tuple[Segment, Segment]] | None = None,
) -> WindowFlows:
    """
    Args:
        observed: latents the blocks look back at ``[B, z, 1 + F * (K - 1), h, w]``: the window's first frame, then the
            observed frames of every block but the last.
        ys: conditioning of the window ``[B, 4 + z, latent_frames, h, w]``.
        cross: keys and values of text and image per layer, batch B.
        video: noisy latents ``[B, K, z, F, h, w]``; action: noisy rows ``[B, K, N, action_dim]``.
        state: ``[B, K, 1, max_state_dim]``.
        timestep: int64 ``[B, K]``, of video and rows alike.
        layer: ``run_layer``, or that compiled.
    """
    cfg = dit.cfg
    batch, blocks, _, frames, height, width = video.shape
    size = (height, width)
    tokens = cfg.frame_seqlen
    starts = [1 + frames * k for k in range(blocks)]

    # Observed frames: timestep 0. All of them at once, as every token is computed on its own outside attention.
    conditioning = [conditioning_slice(ys, 0, 1), *(conditioning_slice(ys, s, frames) for s in starts[:-1])]
    clean = _patches(dit, observed, torch.cat(conditioning, dim=2))[:, None]
    zero = torch.zeros(1, 1, dtype=torch.int64, device=video.device)
    e6_clean = dit.time_vectors(zero)[1]
    past = Segment(clean, e6_clean, _table([dit.rotary_table(0, starts[-1], *size, registers=False)]))

    # Noisy blocks: rows and state follow the video of their block.
    noisy = _patches(
        dit,
        video.flatten(0, 1),
        torch.cat([conditioning_slice(ys, s, frames)[:, None] for s in starts], 1).flatten(0, 1),
    )
    times = timestep.flatten()[:, None].expand(-1, cfg.num_action_per_block)
    rows = dit.action_encoder(action.flatten(0, 1), times)
    registers = dit.state_encoder(state.flatten(0, 1))
    noisy = torch.cat([noisy, rows, registers], dim=1).unflatten(0, (batch, blocks))
    e, e6 = dit.time_vectors(timestep)
    tables = [dit.rotary_table(s, frames, *size, registers=True) for s in starts]
    now = Segment(noisy, e6, _table(tables))

    layers: list[Block] = list(dit.blocks)  # type: ignore[arg-type]
    run = layer or run_layer
    for k, block in enumerate(layers):
        past, now = run(block, past, now, cross[k], starts, frames, tokens, last=k == len(layers) - 1)

    hidden = now.x
    count = frames * tokens
    patches = dit.head(hidden[:, :, :count].flatten(0, 1), e.flatten(0, 1)[:, None].expand(-1, count, -1))
    flow = dit.unpatchify(patches, frames, height // 2, width // 2)
    flow_action = dit.action_decoder(hidden[:, :, count : count + cfg.num_action_per_block])
    return WindowFlows(flow.unflatten(0, (batch, blocks)), flow_action)


def _patches(dit: CausalDiT, x: Tensor, y: Tensor) -> Tensor:
    return dit.patch_embedding(torch.cat([x, y.to(x.dtype)], dim=1)).flatten(2).transpose(1, 2)


def _table(tables: list[Rotary]) -> Rotary:
    """Tables of the groups, one after the other: float32 ``[1, G, L, 1, head_dim / 2]``."""
    return Rotary(*(torch.stack([t[i] for t in tables])[None].float() for i in range(2)))


def rotate(x: Tensor, table: Rotary) -> Tensor:
    """As ``model.rope.rotate``, in float32: ``x [B, G, L, heads, head_dim]``."""
    pairs = x.float().unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    out = torch.stack((even * table.cos - odd * table.sin, even * table.sin + odd * table.cos), dim=-1)
    return out.flatten(-2).to(x.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def _modulated(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=eps) * (1 + scale) + shift


def _project(attention: SelfAttention, x: Tensor, table: Rotary) -> tuple[Tensor, Tensor, Tensor]:
    heads = (attention.num_heads, -1)
    q = rotate(attention.norm_q(attention.q(x)).unflatten(-1, heads), table)
    k = rotate(attention.norm_k(attention.k(x)).unflatten(-1, heads), table)
    v = attention.v(x).unflatten(-1, heads)
    return q.to(v.dtype), k.to(v.dtype), v


def run_layer(
    block: Block,
    past: Segment,
    now: Segment,
    cross: CrossKV,
    starts: list[int],
    frames: int,
    tokens: int,
    *,
    last: bool,
) -> tuple[Segment, Segment]:
    """One block of the network over both segments; of the last one only the noisy blocks are wanted."""
    # [., G, 1, dim] each: one timestep per group.
    mods = [(block.modulation[:, None] + s.e6).unsqueeze(3).unbind(2) for s in (past, now)]
    parts = [
        _project(block.self_attn, _modulated(s.x, m[0], m[1], block.eps), s.table)
        for s, m in zip((past, now), mods, strict=True)
    ]
    kept, fresh = parts
    keys, values = kept[1][:, 0], kept[2][:, 0]  # [B, all observed tokens, heads, head_dim]
    seen = [s * tokens for s in starts]
    out = [
        _attend(
            fresh[0][:, k], torch.cat([keys[:, :n], fresh[1][:, k]], 1), torch.cat([values[:, :n], fresh[2][:, k]], 1)
        )
        for k, n in enumerate(seen)
    ]
    attended = [torch.stack(out, dim=1).flatten(-2)]
    if not last:
        # The first frame sees itself; every later block of observed frames sees what is before it and itself.
        pieces = [
            _attend(kept[0][:, 0, a:b], keys[:, :b], values[:, :b]) for a, b in zip([0, *seen[:-1]], seen, strict=True)
        ]
        attended.insert(0, torch.cat(pieces, dim=1)[:, None].flatten(-2))
    wanted = [(now, mods[1])] if last else [(past, mods[0]), (now, mods[1])]
    new = []
    for (segment, mod), attention in zip(wanted, attended, strict=True):
        _, _, gate1, shift2, scale2, gate2 = mod
        x = segment.x + gate1 * block.self_attn.o(attention)
        flat = x.flatten(1, 2)
        x = x + _cross(block, flat, cross).view_as(x)
        x = x + gate2 * block.ffn(_modulated(x, shift2, scale2, block.eps))
        new.append(Segment(x, segment.e6, segment.table))
    return (past, new[0]) if last else (new[0], new[1])


def _cross(block: Block, x: Tensor, kv: CrossKV) -> Tensor:
    module = block.cross_attn
    q = module.norm_q(module.q(block.norm3(x))).unflatten(-1, (module.num_heads, -1))
    text, image = (KV(p.k.to(p.v.dtype), p.v) for p in kv)
    q = q.to(text.v.dtype)
    return module.o(_attend(q, *text).flatten(-2) + _attend(q, *image).flatten(-2))
