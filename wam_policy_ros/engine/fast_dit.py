"""The DiT as the fused step runs it: both guidance branches as one batch, fused element-wise kernels, K/V in place.

The slow twin is ``model.dit.CausalDiT`` with ``engine.sampler``. *Numeric*: the same algorithm; sums are rounded at
fewer places, and in FP8 the inputs of the large linear layers are rounded to 8 bits (bounds: test/engine/test_fast_*).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wam_policy_ros.model.dit import Block, CausalDiT
from wam_policy_ros.model.exchange import ALONE, Exchange

from .fast_attention import Attention, Fp8Scales
from .fp8 import Fp8
from .kernels import ops
from .kernels.ops import Product, Quantized
from .kernels.tensors import folded_keys
from .quantize import Fp8Linear, Linear, NativeLinear, finished, fused, native_weight
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
class FastBlock:
    """Weights of one block."""

    qkv: Linear
    o: Linear
    cross_q: Linear
    cross_o: Linear
    up: Linear
    down: Linear
    cross_k: Linear
    cross_v: Linear
    image_k: Linear
    image_v: Linear
    norm_q: Tensor
    norm_k: Tensor
    cross_norm_q: Tensor
    cross_norm_k: Tensor
    image_norm_k: Tensor
    norm3_weight: Tensor
    norm3_bias: Tensor

    @classmethod
    def of(cls, block: Block, fp8: Fp8 | None) -> FastBlock:
        """Take over a block's weights. With ``fp8`` the native ones are given up, layer by layer."""
        own, cross = block.self_attn, block.cross_attn
        up, down = block.ffn[0], block.ffn[2]
        assert isinstance(up, nn.Linear) and isinstance(down, nn.Linear)
        groups: dict[str, tuple[nn.Linear, ...]] = {
            "qkv": (own.q, own.k, own.v),
            "o": (own.o,),
            "cross_q": (cross.q,),
            "cross_o": (cross.o,),
            "up": (up,),
            "down": (down,),
            "cross_k": (cross.k,),
            "cross_v": (cross.v,),
            "image_k": (cross.k_img,),
            "image_v": (cross.v_img,),
        }
        layers: dict[str, Linear] = {}
        for name, parts in groups.items():
            adds_bias = name == "cross_q"
            if fp8 is None:
                weight, bias = fused(*parts) if len(parts) > 1 else (parts[0].weight, parts[0].bias)
                layers[name] = NativeLinear(weight, bias, adds_bias)
            else:
                layers[name] = Fp8Linear.from_layers(parts, fp8, adds_bias=adds_bias)
                for part in parts:
                    part.to("meta")  # whoever still calls the plain layer gets an error, not stale weights
        return cls(
            **layers,
            norm_q=own.norm_q.weight,
            norm_k=own.norm_k.weight,
            cross_norm_q=cross.norm_q.weight,
            cross_norm_k=cross.norm_k.weight,
            image_norm_k=cross.norm_k_img.weight,
            norm3_weight=block.norm3.weight,
            norm3_bias=block.norm3.bias,
        )


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
        self.dit, self.cfg, self.times, self.attention, self.fp8 = dit, dit.cfg, times, attention, fp8
        blocks: list[Block] = list(dit.blocks)  # type: ignore[arg-type]
        self.modulation = torch.cat([b.modulation for b in blocks])  # [layers, 6, D]
        self.scales = scales
        self._static_scales: dict[tuple[float, int], Tensor] = {}
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

    def prefill(self, slot: WindowSlot, x: Tensor, y: Tensor, position: int, start_frame: int, branches: int) -> None:
        """Write the K/V of observed latents behind ``position`` cached tokens; nothing else of the call is computed.

        Args:
            x: ``[1, z, F, h, w]``; y: ``[1, C, F, h, w]``.
            position: cached video tokens.
            start_frame: absolute latent frame of ``x``.
            branches: 1 or 2.
        """
        video = self._embed(x, y)
        count = video.shape[1]
        table = self._rotary(start_frame, x, registers=False)
        self._blocks(
            self.exchange.own(video, count)[0], slot, position, table, self.times.e6[-1], count, count, branches,
            only_keys=True,
        )  # fmt: skip

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
        watch: Callable[[int, Tensor], None] | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """Flows of one evaluation.

        Args:
            x, y, position, start_frame, branches: see ``prefill``.
            e ``[2, D]``, e6 ``[2, 6, D]``: rows of the ``TimeTable``; action_steps ``[1, rows]``.
            action: ``[1, rows, action_dim]``; state: ``[1, 1, max_state_dim]``.
            want_video: compute the video flow.
            watch: called with each block's number and its input ``[branches * tokens, D]``, for comparisons; the first
                block's is that of one branch when they share it.

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
        hidden, last = self._blocks(
            self.exchange.own(tokens, count)[0], slot, position, table, e6, total, count, branches,
            only_rows=only_rows, watch=watch,
        )  # fmt: skip
        if only_rows:
            length, run, branches = only_rows, 0, 1
        mods = dit.head.modulation + e[:, None]  # [groups, 2, D]
        gate = self.modulation[-1, 5] + e6[:, 5]
        out = ops.residual_norm(
            hidden, last, gate, shift=mods[:, 0], scale=mods[:, 1], eps=cfg.eps, tokens=length, video_tokens=run
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

    def _blocks(
        self,
        x: Tensor,
        slot: WindowSlot,
        position: int,
        table: tuple[Tensor, Tensor],
        e6: Tensor,
        tokens: int,
        video_tokens: int,
        branches: int,
        *,
        only_keys: bool = False,
        only_rows: int = 0,
        watch: Callable[[int, Tensor], None] | None = None,
    ) -> tuple[Tensor, Product | None]:
        """All blocks.

        Args:
            x: this rank's rows of one branch, ``[own tokens, D]``.
            tokens, video_tokens: of one branch, over all ranks.
            only_keys: the call ends with the last block's keys and values.
            only_rows: so many tokens behind the video, of the first branch, are all that is wanted; 0: everything.

        Returns:
            The residual stream, ``[branches * own tokens, D]`` or ``[only_rows, D]``, and the last block's feed-forward
            output, not yet added; None with ``only_keys``.
        """
        cfg, scales, layers = self.cfg, self.scales, len(self.blocks)
        mods = self.modulation[:, None] + e6  # [layers, groups, 6, D]
        run = self.exchange.run_length(video_tokens)
        own = tokens - video_tokens + run
        # Branches whose rows are in ``hidden``: all texts have to say is said behind the first layer's self-attention.
        count = 1 if self.share_first else branches
        hidden = x.repeat(count, 1)

        def empty(*rows: int, ranks: int = 1) -> Tensor:
            shape = (*rows, cfg.num_heads // ranks, cfg.head_dim)
            return torch.empty(shape, dtype=self.attention.kv_dtype or hidden.dtype, device=hidden.device)

        all_queries = empty(branches, tokens, ranks=self.exchange.ranks)
        sent = empty(3, branches, own) if self.exchange.ranks > 1 else None

        def norm(y: Product | None, gate: Tensor | None, **how: Any) -> Tensor | Quantized:
            return ops.residual_norm(hidden, y, gate, **how, eps=cfg.eps, tokens=own, video_tokens=run, fp8=self.fp8)

        pending: Product | None = None
        for i, block in enumerate(self.blocks):
            gate = mods[i - 1, :, 5] if i else None
            h = norm(pending, gate, shift=mods[i, :, 0], scale=mods[i, :, 1])
            if watch is not None:
                watch(i, hidden)
            queries = all_queries[:count]
            keys, values = slot.k[i][:count, : position + tokens], slot.v[i][:count, : position + tokens]
            parts = None if sent is None else sent[:, :count]
            self._store(i, block.qkv(h), table, queries, keys, values, position, video_tokens, parts)
            if i + 1 == layers and only_keys:
                return hidden, None
            if i + 1 == layers and only_rows:
                queries, keys, values = queries[:1, video_tokens : video_tokens + only_rows], keys[:1], values[:1]
                hidden = hidden.view(count, own, cfg.dim)[0, run : run + only_rows].contiguous()
                own, run, video_tokens, count, branches = only_rows, 0, 0, 1, 1
            attended = self.exchange.to_tokens(self.attention(queries, keys, values, i), video_tokens)
            h = norm(
                block.o(self._input(attended.reshape(-1, cfg.dim), None if scales is None else scales.v[i])),
                mods[i, :, 2],
                weight=block.norm3_weight,
                bias=block.norm3_bias,
            )
            query = finished(block.cross_q(h))
            rstd = ops.rms_rstd(query, cfg.eps)
            if i == 0 and count < branches:
                query, rstd, hidden = query.repeat(branches, 1), rstd.repeat(branches), hidden.repeat(branches, 1)
                count = branches
            crossed = self._cross(i, slot, query, rstd, own, count)
            h = norm(block.cross_o(crossed), None, shift=mods[i, :, 3], scale=mods[i, :, 4])
            pending = block.down(ops.gelu_quant(block.up(h), self.fp8))
        return hidden, pending

    def _cross(
        self, layer: int, slot: WindowSlot, query: Tensor, rstd: Tensor, tokens: int, branches: int
    ) -> Tensor | Quantized:
        """Cross-attention of ``branches`` times ``tokens`` rows, as the output layer takes it."""
        crossed = ops.cross_attention(
            query,
            rstd,
            slot.text_k[layer][:branches],
            slot.text_v[layer][:branches],
            slot.text_rows[:branches],
            slot.text_padding[:branches],
            slot.image_k[layer],
            slot.image_v[layer],
            tokens=tokens,
            out_scale=None if self.fp8 is None else slot.cross_scale[layer],
            fp8=self.fp8,
        )
        return crossed if self.fp8 is None else Quantized(crossed, slot.cross_unscale[layer, : len(crossed)])

    def _store(
        self,
        layer: int,
        qkv: Product,
        table: tuple[Tensor, Tensor],
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        position: int,
        video_tokens: int,
        sent: Tensor | None,
    ) -> None:
        """Normalised, rotated q into ``queries``, k and v into the rows of the window from ``position`` on: by the
        kernel itself, or from where it wrote ``sent [3, branches, own tokens, heads, head_dim]``, via other ranks."""
        block, scales = self.blocks[layer], self.scales
        q, k, v, start = (queries, keys, values, position) if sent is None else (*sent, 0)
        ops.qk_norm_rope_store(
            qkv,
            block.norm_q,
            block.norm_k,
            *table,
            q,
            k,
            v,
            start=start,
            eps=self.cfg.eps,
            scales=None if scales is None else (scales.q[layer], scales.k[layer], scales.v[layer]),
        )
        if sent is not None:
            self.exchange.scatter(sent, video_tokens, (queries, keys[:, position:], values[:, position:]))

    def _input(self, x: Tensor, scale: float | None) -> Tensor | Quantized:
        """Input of a linear layer from ``[M, D]``: as it is, already fp8 with one static scale, or quantised here."""
        if scale is not None:
            if self.fp8 is None:
                return (x.float() / scale).to(self.modulation.dtype)
            key = (scale, len(x))
            if key not in self._static_scales:
                self._static_scales[key] = torch.full((len(x),), 1 / scale, dtype=torch.float32, device=x.device)
            return Quantized(x, self._static_scales[key])
        return x if self.fp8 is None else ops.quantize_rows(x, self.fp8)


def _peaks(values: Tensor) -> Tensor:
    """Largest magnitude of each layer, float32 ``[layers]``."""
    return values.abs().flatten(1).amax(1).float()
