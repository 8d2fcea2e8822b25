"""The blocks of the DiT as the fused step runs them: see ``fast_dit``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wam_policy_ros.model.config import DiTConfig
from wam_policy_ros.model.dit import Block
from wam_policy_ros.model.exchange import Exchange

from .fast_attention import Attention, Fp8Scales
from .fp8 import Fp8
from .kernels import ops
from .kernels.ops import Product, Quantized
from .quantize import Fp8Linear, Linear, NativeLinear, finished, fused
from .window_slots import WindowSlot


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
class LayerCall:
    """One run through all blocks.

    Attributes:
        slot: whose window is read and written.
        position: cached video tokens.
        table: cosines and sines of the positions of this rank's tokens.
        mods: modulations ``[layers, groups, 6, D]``.
        tokens, video_tokens: of one branch, over all ranks.
        branches: 1 or 2.
        only_keys: the call ends with the last block's keys and values.
        only_rows: so many tokens behind the video, of the first branch, are all that is wanted; 0: everything.
        beside: the branches part where they differ and go on side by side, each on a stream of its own, so that one
            fills the processors that the other's kernels leave idle at their ends; False: as one batch. Outside a
            recording one follows the other. *Exact* against ``branches: apart``: the same products of the same size.
        watch: called with each block's number and its input ``[branches * tokens, D]``; the first block's is that of
            one branch when they share it, and ``beside`` only the first branch is watched.
    """

    slot: WindowSlot
    position: int
    table: tuple[Tensor, Tensor]
    mods: Tensor
    tokens: int
    video_tokens: int
    branches: int
    only_keys: bool = False
    only_rows: int = 0
    beside: bool = False
    watch: Callable[[int, Tensor], None] | None = None


class FastLayers:
    """All blocks.

    Args: see ``FastDiT``.
    """

    def __init__(
        self,
        cfg: DiTConfig,
        blocks: list[FastBlock],
        attention: Attention,
        fp8: Fp8 | None,
        scales: Fp8Scales | None,
        exchange: Exchange,
        *,
        share_first: bool,
    ) -> None:
        self.cfg, self.blocks, self.attention, self.fp8, self.scales = cfg, blocks, attention, fp8, scales
        self.exchange, self.share_first = exchange, share_first
        self._static_scales: dict[tuple[float, int], Tensor] = {}
        self._lane: torch.cuda.Stream | None = None

    def run(self, call: LayerCall, x: Tensor) -> tuple[Tensor, Product | None]:
        """
        Args:
            x: this rank's rows of one branch, ``[own tokens, D]``.

        Returns:
            The residual stream, ``[branches * own tokens, D]`` or ``[only_rows, D]``, and the last block's feed-forward
            output, not yet added; None with ``only_keys``.
        """
        own = len(x)
        both = slice(0, call.branches)
        heads = (self.cfg.num_heads // self.exchange.ranks, self.cfg.head_dim)
        queries = self._empty(x, call.branches, call.tokens, *heads)
        sent = None
        if self.exchange.ranks > 1:
            sent = self._empty(x, 3, call.branches, own, self.cfg.num_heads, self.cfg.head_dim)
        # All texts have to say is said behind the first layer's self-attention.
        which = slice(0, 1) if self.share_first else both
        hidden = x.repeat(which.stop, 1)
        found = self._to_self(call, 0, hidden, None, which, queries, sent)
        if found is None:
            return hidden, None
        hidden, query, rstd = found
        done = call.only_rows > 0 and len(self.blocks) == 1
        if which.stop == call.branches or done:
            return self._rest(call, hidden, query, rstd, which, queries, sent)
        if not call.beside or call.only_rows:
            times = call.branches
            hidden, query, rstd = hidden.repeat(times, 1), query.repeat(times, 1), rstd.repeat(times)
            return self._rest(call, hidden, query, rstd, both, queries, sent)
        ends = []
        with self._lanes(x.device) as lane:
            for branch in reversed(range(call.branches)):  # the first one on the stream that goes on
                with lane(branch):
                    one = slice(branch, branch + 1)
                    ends.append(self._rest(call, hidden.clone(), query, rstd, one, queries, sent))
        (second, second_end), (first, first_end) = ends
        hidden = torch.cat([first, second])
        if first_end is None or second_end is None:
            return hidden, None
        return hidden, first_end._replace(raw=torch.cat([first_end.raw, second_end.raw]))

    def _empty(self, like: Tensor, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.attention.kv_dtype or like.dtype, device=like.device)

    @contextmanager
    def _lanes(self, device: torch.device) -> Iterator[Callable[[int], Any]]:
        """Where the branches run: the first on the current stream, the second beside it while a graph is recorded. What
        was allocated before has to be held until the block ends."""
        main = torch.cuda.current_stream(device) if device.type == "cuda" else None
        if main is None or not torch.cuda.is_current_stream_capturing():
            yield lambda branch: nullcontext()
            return
        if self._lane is None:
            self._lane = torch.cuda.Stream(device)
        side = self._lane
        side.wait_stream(main)
        yield lambda branch: torch.cuda.stream(side if branch else main)
        main.wait_stream(side)

    def _rest(
        self,
        call: LayerCall,
        hidden: Tensor,
        query: Tensor,
        rstd: Tensor,
        which: slice,
        queries: Tensor,
        sent: Tensor | None,
    ) -> tuple[Tensor, Product | None]:
        """From the first block's cross-attention on, for some of the branches."""
        end = self._to_cross(call, 0, hidden, query, rstd, which)
        for i in range(1, len(self.blocks)):
            found = self._to_self(call, i, hidden, end, which, queries, sent)
            if found is None:
                return hidden, None
            hidden, query, rstd = found
            end = self._to_cross(call, i, hidden, query, rstd, which)
        return hidden, end

    def _to_self(
        self,
        call: LayerCall,
        i: int,
        hidden: Tensor,
        end: Product | None,
        which: slice,
        queries: Tensor,
        sent: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """A block's self-attention, and the queries of its cross-attention.

        Args:
            end: feed-forward output of the block before.

        Returns:
            The residual stream, the queries and ``rms_rstd`` of them; None where the call ends with keys and values.
        """
        block, mods, last = self.blocks[i], call.mods, i + 1 == len(self.blocks)
        count = which.stop - which.start
        own, video = len(hidden) // count, call.video_tokens
        run = self.exchange.run_length(video)
        gate = mods[i - 1, :, 5] if i else None
        h = ops.residual_norm(
            hidden, end, gate, shift=mods[i, :, 0], scale=mods[i, :, 1], eps=self.cfg.eps, tokens=own,
            video_tokens=run, fp8=self.fp8,
        )  # fmt: skip
        if call.watch is not None and which.start == 0:
            call.watch(i, hidden)
        asked, filled = queries[which], call.position + call.tokens
        keys, values = call.slot.k[i][which, :filled], call.slot.v[i][which, :filled]
        parts = None if sent is None else sent[:, which]
        self._store(i, block.qkv(h), call.table, asked, keys, values, call.position, video, parts)
        if last and call.only_keys:
            return None
        if last and call.only_rows:
            rows = call.only_rows
            asked, keys, values = asked[:1, video : video + rows], keys[:1], values[:1]
            hidden = hidden.view(count, own, -1)[0, run : run + rows].contiguous()
            own, run, video = rows, 0, 0
        attended = self.exchange.to_tokens(self.attention(asked, keys, values, i), video)
        h = ops.residual_norm(
            hidden, block.o(self._input(attended.reshape(-1, self.cfg.dim), self._value_scale(i))), mods[i, :, 2],
            weight=block.norm3_weight, bias=block.norm3_bias, eps=self.cfg.eps, tokens=own, video_tokens=run,
            fp8=self.fp8,
        )  # fmt: skip
        query = finished(block.cross_q(h))
        return hidden, query, ops.rms_rstd(query, self.cfg.eps)

    def _to_cross(self, call: LayerCall, i: int, hidden: Tensor, query: Tensor, rstd: Tensor, which: slice) -> Product:
        """A block's cross-attention and feed-forward; the latter's output is still to be added."""
        block, slot = self.blocks[i], call.slot
        trimmed = i + 1 == len(self.blocks) and call.only_rows > 0
        if trimmed:
            which = slice(0, 1)
        own = len(hidden) // (which.stop - which.start)
        run = 0 if trimmed else self.exchange.run_length(call.video_tokens)
        crossed = ops.cross_attention(
            query,
            rstd,
            slot.text_k[i][which],
            slot.text_v[i][which],
            slot.text_rows[which],
            slot.text_padding[which],
            slot.image_k[i],
            slot.image_v[i],
            tokens=own,
            out_scale=None if self.fp8 is None else slot.cross_scale[i],
            fp8=self.fp8,
        )
        heard = crossed if self.fp8 is None else Quantized(crossed, slot.cross_unscale[i, : len(crossed)])
        h = ops.residual_norm(
            hidden, block.cross_o(heard), None, shift=call.mods[i, :, 3], scale=call.mods[i, :, 4], eps=self.cfg.eps,
            tokens=own, video_tokens=run, fp8=self.fp8,
        )  # fmt: skip
        return block.down(ops.gelu_quant(block.up(h), self.fp8))

    def _value_scale(self, i: int) -> float | None:
        return None if self.scales is None else self.scales.v[i]

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
                return (x.float() / scale).to(self.blocks[0].norm_q.dtype)
            key = (scale, len(x))
            if key not in self._static_scales:
                self._static_scales[key] = torch.full((len(x),), 1 / scale, dtype=torch.float32, device=x.device)
            return Quantized(x, self._static_scales[key])
        return x if self.fp8 is None else ops.quantize_rows(x, self.fp8)
