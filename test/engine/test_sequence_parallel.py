"""Ranks that share the video tokens of an evaluation against one process that has them all."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from test.engine.ranks import in_threads
from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.engine.fast_attention import Fp8Scales, PlainFp8Attention, TorchAttention
from wam_policy_ros.engine.fast_dit import FastDiT, TimeTable
from wam_policy_ros.engine.fp8 import E4M3FN
from wam_policy_ros.engine.sequence_parallel import check_ranks, sequence_exchange
from wam_policy_ros.engine.sequence_traffic import evaluation_bytes, prefill_bytes
from wam_policy_ros.engine.window_slots import SlotLayout, WindowSlot
from wam_policy_ros.model.attention import CrossKV
from wam_policy_ros.model.config import DiTConfig
from wam_policy_ros.model.dit import CausalDiT
from wam_policy_ros.model.exchange import ALONE

LIMIT = 1e-6  # of the spread: float32, matrix products over fewer rows


# -- what is swapped --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(("video", "rest"), [(12, 5), (12, 0), (7, 3), (5, 0), (1, 2), (2, 25)])
def test_what_is_swapped_arrives_in_order(ranks, video, rest):
    """Bit for bit, twice over the same buffers, also where the last ranks have nothing but fillers."""
    heads, width, g = 12, 4, torch.Generator().manual_seed(0)
    qkv = torch.randn(3, 2, video + rest, heads, width, generator=g)

    def work(exchange):
        mine = slice(exchange.rank * heads // ranks, (exchange.rank + 1) * heads // ranks)
        for again in (1, 2):
            x = again * qkv
            local = torch.stack([exchange.own(t, video) for t in x])
            run = exchange.run_length(video)
            assert local.shape == (3, 2, run + rest, heads, width)
            got = exchange.to_heads(*local, video)
            assert all(torch.equal(a, b) for a, b in zip(got, x[..., mine, :], strict=True))
            into = torch.full((3, 2, video + rest + 1, heads // ranks, width), torch.nan)
            exchange.scatter(local, video, tuple(into[:, :, 1:]))
            assert torch.equal(into[:, :, 1:], x[..., mine, :]) and into[:, :, 0].isnan().all()
            back = exchange.to_tokens(got[0], video)
            filled = max(0, min(run, video - exchange.rank * run))
            assert torch.equal(back[:, :filled], local[0, :, :filled])
            assert torch.equal(back[:, run:], local[0, :, run:]) and back.isfinite().all()
            assert torch.equal(exchange.whole(local[0, :, :run], video), x[0, :, :video])
        return exchange.traffic

    for traffic in in_threads(ranks, work):
        assert traffic.swaps == 8 and (traffic.sent_bytes > 0) == (ranks > 1)


def test_ranks_that_do_not_divide_the_heads_are_refused():
    with pytest.raises(ConfigError, match=r"3 ranks.*\[1, 2, 4, 5, 8, 10, 20, 40\]"):
        check_ranks(3, 40)
    with pytest.raises(ConfigError):
        check_ranks(0, 40)
    check_ranks(20, 40)
    assert sequence_exchange(None, 40, torch.device("cpu")) is ALONE


# -- the network ------------------------------------------------------------------------------------------------

CFG = DiTConfig(
    dim=48, num_heads=4, num_layers=2, ffn_dim=64, freq_dim=16, text_dim=16, text_len=8, clip_dim=20, hidden_size=16,
    num_action_per_block=5,
)  # fmt: skip
# Tokens of a frame: 2 are not enough for 4 ranks, 3 are uneven for 2, and leave the last of 4 without any.
SEQLENS = (2, 3)


def make_dit(seqlen, dtype=torch.float32):
    torch.manual_seed(0)
    dit = CausalDiT(replace(CFG, frame_seqlen=seqlen)).requires_grad_(False).to(dtype)
    for p in dit.parameters():
        p.copy_(torch.randn_like(p) * (p.shape[-1] ** -0.5 if p.dim() > 1 else 0.3))
    return dit


def draw(dit, seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dit.patch_embedding.weight.dtype)


def inputs(dit, frames):
    hw = (2, 2 * dit.cfg.frame_seqlen)
    return draw(dit, frames, 1, 16, frames, *hw), draw(dit, 10 + frames, 1, 20, frames, *hw)


def conditions(dit):
    """Text, image, action, state."""
    shapes = (1, 8, 16), (1, 257, 20), (1, 5, 32), (1, 1, 64)
    return [draw(dit, 20 + i, *shape) for i, shape in enumerate(shapes)]


def sent_bytes(exchange):
    return 0 if exchange is ALONE else exchange.traffic.sent_bytes


def run_plain(dit, exchange):
    """A window that fills: per block a prefill, then an evaluation. All flows, then the keys of the window."""
    text, image, action, state = conditions(dit)
    cross = [CrossKV(t, i) for t, i in zip(dit.text_kv(text), dit.image_kv(image), strict=True)]
    past, start, flows = None, 0, []
    for frames in (1, 2, 2):
        x, y = inputs(dit, frames)
        table = dit.rotary_table(start, frames, *x.shape[3:], registers=False)
        sent = sent_bytes(exchange)
        out = dit(
            x, y, dit.time_conditioning(torch.zeros(1, frames, dtype=torch.int64)), table, cross, past=past,
            exchange=exchange,
        )  # fmt: skip
        width = x.dtype.itemsize
        expected = prefill_bytes(dit.cfg, exchange.ranks, frames, itemsize=width, kv_itemsize=width, plain=True)
        assert sent_bytes(exchange) - sent == expected
        old = past or [None] * len(out.kv)
        past = [
            new if cached is None else type(new)(*(torch.cat(p, 1) for p in zip(cached, new, strict=True)))
            for cached, new in zip(old, out.kv, strict=True)
        ]
        start += frames
        x, y = inputs(dit, 2)
        steps = torch.full((1, 5), 700)
        sent = sent_bytes(exchange)
        table = dit.rotary_table(start, 2, *x.shape[3:], registers=True)
        out = dit(
            x, y, dit.time_conditioning(torch.full((1, 2), 700), steps), table, cross, past=past, action=action,
            timestep_action=steps, state=state, exchange=exchange,
        )  # fmt: skip
        expected = evaluation_bytes(dit.cfg, exchange.ranks, itemsize=width, kv_itemsize=width)
        assert sent_bytes(exchange) - sent == expected
        flows += [out.video, out.action]
    return flows, [torch.cat([kv.k, kv.v]) for kv in past]


def run_fast(dit, exchange, branches=2, fp8=None, eight_bit_attention=False):
    """The same on the fused step."""
    text, image, action, state = conditions(dit)
    scales = Fp8Scales(E4M3FN) if eight_bit_attention else None
    attention = PlainFp8Attention(scales) if scales else TorchAttention(cudnn=False)
    times = TimeTable.build(dit, [700], [700])
    fast = FastDiT(dit, times, attention, fp8=fp8, scales=scales, exchange=exchange)
    layout = SlotLayout.of(
        dit.cfg, branches=branches, latent_frames=9, latent_hw=(2, 2 * dit.cfg.frame_seqlen), dtype=torch.float32,
        kv_dtype=attention.kv_dtype or torch.float32, device=torch.device("cpu"), ranks=exchange.ranks,
    )  # fmt: skip
    slot = WindowSlot(layout, 0)
    assert layout.nbytes > 0 and slot.k[1].shape[2] * exchange.ranks == dit.cfg.num_heads
    for branch in range(branches):
        text[:, 6:] = 0
        fast.load_text(slot, branch, fast.text_keys((1 + branch) * text, 6))
    fast.load_image(slot, image)
    position, start, flows = 0, 0, []
    for frames in (1, 2, 2):
        sent = sent_bytes(exchange)
        fast.prefill(slot, *inputs(dit, frames), position, start, branches)
        how = {"branches": branches, "itemsize": 4, "kv_itemsize": layout.kv_dtype.itemsize}
        assert sent_bytes(exchange) - sent == prefill_bytes(dit.cfg, exchange.ranks, frames, **how)
        position, start = position + frames * dit.cfg.frame_seqlen, start + frames
        call = (slot, *inputs(dit, 2), position, start)
        given = {"e": times.e[0], "e6": times.e6[0], "action_steps": times.action_steps[:1]}
        for count, with_video in ((branches, True), (1, False)):
            sent = sent_bytes(exchange)
            found = fast.evaluate(*call, count, **given, action=action, state=state, want_video=with_video)
            flows += [flow for flow in found if flow is not None]
            expected = evaluation_bytes(dit.cfg, exchange.ranks, **how | {"branches": count}, with_video=with_video)
            assert sent_bytes(exchange) - sent == expected
    return flows, [torch.cat([slot.k[i][:, :position], slot.v[i][:, :position]]) for i in range(dit.cfg.num_layers)]


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def worst(alone, ranks):
    """Flows of every rank, which are the same bits, and each rank's heads of the window against one process.

    None at all is as good as little: whether fewer rows in a matrix product change a bit is the processor's choice.
    That work was shared is what the shape of a rank's window and the bytes sent say.
    """
    for flows, _ in ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(flows, ranks[0][0], strict=True))
    found = [relative(a, b) for a, b in zip(ranks[0][0], alone[0], strict=True)]
    for layer, whole in enumerate(alone[1]):
        held = torch.cat([window[layer] for _, window in ranks], dim=2)
        assert held.shape == whole.shape
        found.append(relative(held, whole))
    return max(found)


def repeated(ranks, work):
    """The results of all ranks; a second run gives the same bits."""
    first, second = in_threads(ranks, work), in_threads(ranks, work)
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(x, y) for x, y in zip([*a[0], *a[1]], [*b[0], *b[1]], strict=True))
    return first


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("seqlen", SEQLENS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, LIMIT), (torch.float64, 1e-14)])
def test_the_plain_network(ranks, seqlen, dtype, limit):
    dit = make_dit(seqlen, dtype)
    with torch.inference_mode():
        alone = run_plain(dit, ALONE)
    assert worst(alone, repeated(ranks, lambda exchange: run_plain(dit, exchange))) < limit


EIGHT = {"fp8": E4M3FN, "eight_bit_attention": True}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("seqlen", SEQLENS)
@pytest.mark.parametrize("options", [{"branches": 1}, {}, {"fp8": E4M3FN}, EIGHT])
def test_the_fused_step(ranks, seqlen, options):
    """Also in eight bits: scales are fixed, or of one token, so that a token is rounded alike wherever it is."""
    dit = make_dit(seqlen)

    def run(exchange):
        return run_fast(copy.deepcopy(dit), exchange, **options)  # eight bits take the weights away

    with torch.inference_mode():
        alone = run(ALONE)
    assert worst(alone, repeated(ranks, run)) < LIMIT
