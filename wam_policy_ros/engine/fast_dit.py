"""The DiT as the fused step runs it: both guidance branches as one batch, fused element-wise kernels, K/V in place.

The slow twin is ``model.dit.CausalDiT`` with ``engine.sampler``. *Numeric*: the same algorithm; sums are rounded at
fewer places, and in FP8 the inputs of the large linear layers are rounded to 8 bits (bounds: test/engine/test_fast_*).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wam_policy_ros.model.dit import Block, CausalDiT
from wam_policy_ros.model.exchange import ALONE, Exchange

from .fast_attention import Attention, Fp8Scales
from .fast_layers import FastBlock, FastLayers, LayerCall
from .fp8 import Fp8
from .kernels import ops
from .kernels.tensors import folded_keys
from .quantize import Linear, finished, native_weight
from .window_slots import WindowSlot


@dataclass(frozen=True)
class TimeTable:
    """Time embeddings of all timesteps that occur, computed once.

    Attributes:
        e: ``[n, groups, D]`` for the head; e6: ``[n, groups, 6, D]`` for the blocks. Group 0 is video, group 1 action
            and state tokens. Entry ``n - 1`` is the prefill's: timestep 0, its second group is not used.
        action_steps: int64 ``[n, rows]``, timestep of the action rows.
    """

    e: Tensor
    e6: Tensor
    action_steps: Tensor

    @classmethod
    def build(cls, dit: CausalDiT, video: list[int], action: list[int]) -> TimeTable:
        """``video`` and ``action``: integer timesteps of the solver's steps; entry i belongs to step i."""
        device = dit.patch_embedding.weight.device
        steps = torch.tensor([[*video, 0], [*action, 0]], device=device).T.contiguous()
        e, e6 = dit.time_vectors(steps)
        rows = steps[:, 1:].expand(-1, dit.cfg.num_action_per_block).contiguous()
        return cls(e, e6, rows)


@dataclass(frozen=True)
class TextKeys:
    """Cross-attention K/V of one prompt, ``[layers, heads, rows, head_dim]`` each; keys are folded (``_keys``).

    All padding rows of a prompt are equal (their text states are zero), so one of them is kept, as the last row, and
    counts ``padding`` times.
    """

    k: Tensor
    v: Tensor
    padding: int


class FastDiT:
    """Weights and methods; what depends on the past lies in a ``WindowSlot``.

    Args:
        dit: the plain network. Its large linear layers are shared (native precision) or taken over (FP8: the plain
            network cannot be called afterwards).
        times: see ``TimeTable``.
        attention: how self-attention runs.
        fp8: format of the linear layers, None for native precision.
        scales: of the attention's inputs when it runs in FP8; filled here, layer by layer.
        exchange: shares every call with other ranks.
        share_first: compute what the guidance branches have in common once: the first layer up to its cross-attention,
            which is the first place where their texts come in. Twin: False.
        trim_last: compute the last layer behind its keys and values for the action rows alone when no video flow is
            wanted. Twin: False.
    """

    def __init__(
        self,
        dit: CausalDiT,
        times: TimeTable,
        attention: Attention,
        *,
        fp8: Fp8 | None = None,
        scales: Fp8Scales | None = None,
        exchange: Exchange = ALONE,
        share_first: bool = True,
        trim_last: bool = True,
    ) -> None:
        self.exchange, self.share_first, self.trim_last = exchange, share_first, trim_last
        self.dit, self.cfg, self.times, self.fp8 = dit, dit.cfg, times, fp8
        blocks: list[Block] = list(dit.blocks)  # type: ignore[arg-type]
        self.modulation = torch.cat([b.modulation for b in blocks])  # [layers, 6, D]
        self._tables: dict[tuple[int | bool, ...], tuple[Tensor, Tensor]] = {}
        self.blocks: list[FastBlock] = []
        for i, block in enumerate(blocks):
            if scales is not None:
                v = block.self_attn.v
                mods = (self.modulation[i] + times.e6).flatten(0, 1)
                scales.add_layer(
                    block.self_attn.norm_q.weight,
                    block.self_attn.norm_k.weight,
                    native_weight(v),
                    v.bias,
                    mods[:, 1],
                    mods[:, 0],
                )
            self.blocks.append(FastBlock.of(block, fp8))
        self.layers = FastLayers(self.cfg, self.blocks, attention, fp8, scales, exchange, share_first=share_first)

    # -- conditioning -------------------------------------------------------------------------------------------

    def text_keys(self, states: Tensor, length: int) -> TextKeys:
        """K/V of one prompt: text states ``[1, text_len, text_dim]``, of which the rows from ``length`` on are zero."""
        rows = states.shape[1]
        embedded = self.dit.text_embedding(states[0, : min(length + 1, rows)])
        k, v = self._keys(embedded, [(b.cross_k, b.cross_v, b.cross_norm_k) for b in self.blocks])
        return TextKeys(k, v, rows - length)

    def load_text(self, slot: WindowSlot, branch: int, keys: TextKeys) -> None:
        """Copy a prompt's K/V into a slot, unless they are there already."""
        if slot.loaded[branch] is keys:
            return
        slot.loaded[branch] = None  # until all of it is there
        rows = keys.k.shape[2]
        slot.text_k[:, branch, :, :rows] = keys.k
        slot.text_v[:, branch, :, :rows] = keys.v
        slot.text_rows[branch] = rows
        slot.text_padding[branch] = keys.padding
        slot.text_peak[branch] = _peaks(keys.v)
        slot.loaded[branch] = keys
        if self.fp8 is not None:
            slot.set_cross_scale(self.fp8.max)

    def load_image(self, slot: WindowSlot, features: Tensor) -> None:
        """K/V of CLIP features ``[1, 257, clip_dim]`` into a slot."""
        layers = [(b.image_k, b.image_v, b.image_norm_k) for b in self.blocks]
        slot.image_k[:, 0], slot.image_v[:, 0] = self._keys(self.dit.img_emb(features)[0], layers)
        slot.image_peak.copy_(_peaks(slot.image_v))
        if self.fp8 is not None:
            slot.set_cross_scale(self.fp8.max)

    def _keys(self, embedded: Tensor, layers: list[tuple[Linear, Linear, Tensor]]) -> tuple[Tensor, Tensor]:
        """``[layers, heads, rows, head_dim]`` keys and values from ``[rows, D]``; ``layers``: what makes them, and the
        weight of the keys' norm. Keys are folded (``folded_keys``), then rounded once."""
        heads = (self.cfg.num_heads, self.cfg.head_dim)
        ks, vs = [], []
        for block, (to_k, to_v, norm) in zip(self.blocks, layers, strict=True):
            k = finished(to_k(embedded)).float()
            k = k * torch.rsqrt(k.pow(2).mean(-1, keepdim=True) + self.cfg.eps) * norm.float()
            k = folded_keys(k, block.cross_norm_q, self.cfg.head_dim).to(embedded.dtype)
            ks.append(k.unflatten(-1, heads).transpose(0, 1))
            vs.append(finished(to_v(embedded)).unflatten(-1, heads).transpose(0, 1))
        return torch.stack(ks), torch.stack(vs)

    # -- the two kinds of call ----------------------------------------------------------------------------------

    def prefill(
        self,
        slot: WindowSlot,
        x: Tensor,
        y: Tensor,
        position: int,
        start_frame: int,
        branches: int,
        *,
        beside: bool = False,
    ) -> None:
        """Write the K/V of observed latents behind ``position`` cached tokens; nothing else of the call is computed.

        Args:
            x: ``[1, z, F, h, w]``; y: ``[1, C, F, h, w]``.
            position: cached video tokens.
            start_frame: absolute latent frame of ``x``.
            branches: 1 or 2; beside: see ``LayerCall``.
        """
        video = self._embed(x, y)
        count = video.shape[1]
        table = self._rotary(start_frame, x, registers=False)
        mods = self.modulation[:, None] + self.times.e6[-1]
        call = LayerCall(slot, position, table, mods, count, count, branches, only_keys=True, beside=beside)
        self.layers.run(call, self.exchange.own(video, count)[0])

    def evaluate(
        self,
        slot: WindowSlot,
        x: Tensor,
        y: Tensor,
        position: int,
        start_frame: int,
        branches: int,
        *,
        e: Tensor,
        e6: Tensor,
        action: Tensor,
        action_steps: Tensor,
        state: Tensor,
        want_video: bool = True,
        beside: bool = False,
        watch: Callable[[int, Tensor], None] | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """Flows of one evaluation.

        Args:
            x, y, position, start_frame, branches: see ``prefill``.
            e ``[2, D]``, e6 ``[2, 6, D]``: rows of the ``TimeTable``; action_steps ``[1, rows]``.
            action: ``[1, rows, action_dim]``; state: ``[1, 1, max_state_dim]``.
            want_video: compute the video flow.
            beside, watch: see ``LayerCall``.

        Returns:
            ``[branches, z, F, h, w]`` (conditional branch first) or None, and the conditional action flow
            ``[1, rows, action_dim]``.
        """
        cfg, dit = self.cfg, self.dit
        video = self._embed(x, y)
        count, rows = video.shape[1], action.shape[1]
        tokens = torch.cat([video, dit.action_encoder(action, action_steps), dit.state_encoder(state)], dim=1)
        total, run = tokens.shape[1], self.exchange.run_length(count)
        length = total - count + run
        table = self._rotary(start_frame, x, registers=True)
        only_rows = rows if self.trim_last and not want_video else 0
        mods = self.modulation[:, None] + e6  # [layers, groups, 6, D]
        call = LayerCall(
            slot, position, table, mods, total, count, branches, only_rows=only_rows, beside=beside, watch=watch
        )
        hidden, last = self.layers.run(call, self.exchange.own(tokens, count)[0])
        if only_rows:
            length, run, branches = only_rows, 0, 1
        head = dit.head.modulation + e[:, None]  # [groups, 2, D]
        out = ops.residual_norm(
            hidden,
            last,
            mods[-1, :, 5],
            shift=head[:, 0],
            scale=head[:, 1],
            eps=cfg.eps,
            tokens=length,
            video_tokens=run,
        )
        assert isinstance(out, Tensor)
        flow = None
        if want_video:
            patches = dit.head.head(out.view(branches, length, cfg.dim)[:, :run])
            flow = dit.unpatchify(self.exchange.whole(patches, count), x.shape[2], x.shape[3] // 2, x.shape[4] // 2)
        action_flow = dit.action_decoder(hidden.view(branches, length, cfg.dim)[:1, run : run + rows])
        return flow, action_flow

    # -- details ------------------------------------------------------------------------------------------------

    def _embed(self, x: Tensor, y: Tensor) -> Tensor:
        return self.dit.patch_embedding(torch.cat([x, y], dim=1)).flatten(2).transpose(1, 2)

    def _rotary(self, start_frame: int, x: Tensor, *, registers: bool) -> tuple[Tensor, Tensor]:
        key = (start_frame, *x.shape[2:], registers)
        if key not in self._tables:
            table = self.dit.rotary_table(start_frame, x.shape[2], x.shape[3], x.shape[4], registers=registers)
            count = x.shape[2] * self.cfg.frame_seqlen
            cos, sin = (self.exchange.own(t.squeeze(1).float(), count, dim=0).contiguous() for t in table)
            self._tables[key] = cos, sin
        return self._tables[key]


def _peaks(values: Tensor) -> Tensor:
    """Largest magnitude of each layer, float32 ``[layers]``."""
    return values.abs().flatten(1).amax(1).float()
