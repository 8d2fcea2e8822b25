"""Fused operations: the plain twins against the network's own modules, and what dispatch refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.engine.fp8 import E4M3FN, E4M3FNUZ, fp8_for, fp8_for_architecture
from wam_policy_ros.engine.kernels import ops
from wam_policy_ros.engine.kernels.reference import saturated, value
from wam_policy_ros.engine.kernels.tensors import folded_keys
from wam_policy_ros.model.attention import KV, CrossAttention, CrossKV, RMSNorm
from wam_policy_ros.model.errors import ShapeError
from wam_policy_ros.model.rope import Rotary, rotate

B, L, VIDEO, H, DH = 2, 7, 5, 4, 16
D, M, EPS = H * DH, B * L, 1e-6


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def _error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(((got.float() - wanted.float()).norm() / wanted.float().norm()).detach())


def _dequantized(q: ops.Quantized) -> torch.Tensor:
    return q.values.float() * q.row_scale.unsqueeze(-1)


def test_a_product_is_what_the_multiplication_left_and_a_bias():
    raw, bias = torch.randn(3, 4), torch.randn(4)
    assert torch.equal(value(ops.Product(raw, bias)), raw + bias)
    assert torch.equal(value(ops.Product(raw)), raw)


def test_residual_norm_is_the_blocks_gate_sum_and_modulated_norm():
    x, y = torch.randn(M, D), torch.randn(M, D)
    gate, shift, scale = torch.randn(3, 2, D)
    per_token = [t[[0] * VIDEO + [1] * (L - VIDEO)].repeat(B, 1) for t in (gate, shift, scale)]
    stream = x + per_token[0] * y
    expected = F.layer_norm(stream, (D,), eps=EPS) * (1 + per_token[2]) + per_token[1]
    mine = x.clone()
    h = ops.residual_norm(mine, ops.Product(y), gate, shift=shift, scale=scale, eps=EPS, tokens=L, video_tokens=VIDEO)
    assert torch.allclose(mine, stream, atol=1e-6)
    assert torch.allclose(h, expected, atol=1e-5)


def test_residual_norm_without_product_leaves_the_stream_alone_and_takes_an_affine_norm():
    x, norm = torch.randn(M, D), nn.LayerNorm(D, eps=EPS)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    mine = x.clone()
    h = ops.residual_norm(
        mine, None, None, weight=norm.weight.data, bias=norm.bias.data, eps=EPS, tokens=L, video_tokens=L
    )
    assert torch.equal(mine, x)
    assert torch.allclose(h, norm(x), atol=1e-5)


def test_residual_norm_normalises_the_stream_as_stored():
    """What the next operation reads back and what was normalised are the same numbers."""
    x, y = torch.randn(M, D).bfloat16(), torch.randn(M, D).bfloat16() * 1e-2
    ops.residual_norm(x, ops.Product(y), None, eps=EPS, tokens=L, video_tokens=L)
    again = x.clone()
    a = ops.residual_norm(x, None, None, eps=EPS, tokens=L, video_tokens=L)
    assert torch.equal(a, ops.residual_norm(again, None, None, eps=EPS, tokens=L, video_tokens=L))
    assert torch.equal(x, again)


def test_qk_norm_rope_store_is_the_norm_and_rotation_of_self_attention():
    qkv, angles = torch.randn(M, 3 * D), torch.randn(L, DH // 2, dtype=torch.float64)
    norm_q, norm_k = RMSNorm(D, EPS), RMSNorm(D, EPS)
    for norm in (norm_q, norm_k):
        nn.init.normal_(norm.weight)
    table = Rotary(angles.cos().unsqueeze(1), angles.sin().unsqueeze(1))
    q, k, v = (t.reshape(B, L, D) for t in qkv.chunk(3, dim=-1))
    q_out, k_cache, v_cache = torch.zeros(B, L, H, DH), torch.zeros(B, 12, H, DH), torch.zeros(B, 12, H, DH)
    cos, sin = angles.cos().float(), angles.sin().float()
    ops.qk_norm_rope_store(
        ops.Product(qkv), norm_q.weight.data, norm_k.weight.data, cos, sin, q_out, k_cache, v_cache, 3, EPS
    )
    assert torch.allclose(q_out, rotate(norm_q(q).unflatten(-1, (H, DH)), table), atol=1e-5)
    assert torch.allclose(k_cache[:, 3 : 3 + L], rotate(norm_k(k).unflatten(-1, (H, DH)), table), atol=1e-5)
    assert torch.equal(v_cache[:, 3 : 3 + L], v.unflatten(-1, (H, DH)))
    outside = [t[:, rows] for t in (k_cache, v_cache) for rows in (slice(0, 3), slice(3 + L, None))]
    assert not any(t.any() for t in outside)


def _as_taken(network: CrossAttention, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[B, keys, H, Dh]`` of the network in the form of the fused operation."""
    k = folded_keys(k.flatten(2), network.norm_q.weight.data, DH).view_as(k)
    return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()


def test_cross_attention_is_the_networks_with_one_row_for_all_padding():
    network = CrossAttention(D, H, EPS)
    for norm in (network.norm_q, network.norm_k, network.norm_k_img):
        nn.init.normal_(norm.weight)
    text_len, capacity, words = 24, 10, (6, 3)
    context = torch.zeros(B, text_len, D)
    for b, n in enumerate(words):
        context[b, :n] = torch.randn(n, D)
    x, kv = torch.randn(B, L, D), network.image_kv(torch.randn(B, 9, D))
    text = network.text_kv(context)
    expected = network(x, CrossKV(text, kv))
    short = [torch.full((B, H, capacity, DH), float("nan")) for _ in range(2)]
    for b, n in enumerate(words):
        for mine, whole in zip(short, _as_taken(network, *text), strict=True):
            mine[b, :, : n + 1] = whole[b, :, : n + 1]
    q = network.q(x).reshape(M, D)
    attended = ops.cross_attention(
        q, ops.rms_rstd(q, EPS), *short, torch.tensor(words, dtype=torch.int32) + 1,
        torch.tensor([float(text_len - n) for n in words]), *_as_taken(network, *kv), tokens=L,
    )  # fmt: skip
    assert torch.allclose(network.o(attended).reshape(B, L, D), expected, atol=1e-4)


def test_cross_attention_without_padding_counts_every_row_once_and_shares_the_image():
    network = CrossAttention(D, H, EPS)
    nn.init.normal_(network.norm_q.weight)
    x = torch.randn(B, L, D)
    text, image = network.text_kv(torch.randn(B, 4, D)), network.image_kv(torch.randn(1, 9, D))
    expected = network(x, CrossKV(text, KV(*(t.expand(B, -1, -1, -1) for t in image))))
    q = network.q(x).reshape(M, D)
    four, none = torch.tensor([4, 4], dtype=torch.int32), torch.zeros(B)
    text, image = _as_taken(network, *text), _as_taken(network, *image)
    args = (q, ops.rms_rstd(q, EPS), *text, four, none, *image, L)
    assert torch.allclose(network.o(ops.cross_attention(*args)).reshape(B, L, D), expected, atol=1e-4)
    eight = ops.cross_attention(*args, out_scale=torch.tensor(50.0), fp8=E4M3FN)
    assert eight.dtype == E4M3FN.dtype
    assert _error(eight.float() / 50, ops.cross_attention(*args)) < 0.04


@pytest.mark.parametrize("fp8", [E4M3FN, E4M3FNUZ], ids=lambda f: f.name)
def test_rows_are_quantised_to_the_whole_range_of_the_format(fp8):
    x = torch.randn(6, 40) * torch.tensor([1e-6, 1.0, 1e3, 1e4, 0.0, 1.0]).unsqueeze(1)
    q = ops.quantize_rows(x, fp8)
    assert q.values.dtype == fp8.dtype and q.row_scale.dtype == torch.float32
    assert torch.equal(q.values.float().abs().amax(-1)[[0, 1, 2, 3, 5]], torch.full((5,), fp8.max))
    assert _dequantized(q).isfinite().all() and not _dequantized(q)[4].any()
    # Three mantissa bits: half a step is 1/16 of the value where the format is normal.
    large = x.abs() > x.abs().amax(-1, keepdim=True) / 64
    assert ((_dequantized(q) - x).abs()[large] <= x.abs()[large] / 16 * 1.001).all()
    gelu = ops.gelu_quant(ops.Product(x), fp8)
    assert _error(_dequantized(gelu), F.gelu(x, approximate="tanh")) < 0.04


@pytest.mark.parametrize("fp8", [E4M3FN, E4M3FNUZ], ids=lambda f: f.name)
def test_fixed_scales_saturate_and_never_overflow_to_nan(fp8):
    x = torch.tensor([1.0, -3.0, 1e6, -1e6])
    assert saturated(x, fp8.dtype).float().tolist() == [1.0, -3.0, fp8.max, -fp8.max]
    q_out, k, v = (torch.zeros(1, 2, 1, 4).to(fp8.dtype) for _ in range(3))
    qkv, one = ops.Product(torch.randn(2, 12) * 100), torch.ones(4)
    angles = torch.zeros(2, 2)
    ops.qk_norm_rope_store(qkv, one, one, angles.cos(), angles.sin(), q_out, k, v, 0, EPS, (100.0, 1.0, 1000.0))
    assert v.float().isfinite().all() and v.float().abs().max() == fp8.max
    assert k.float().abs().max() <= 2.0


def test_the_same_byte_means_half_in_fnuz():
    byte = torch.tensor([0x40], dtype=torch.uint8)
    assert byte.view(E4M3FN.dtype).float() == 2 * byte.view(E4M3FNUZ.dtype).float() == 2.0


def test_the_format_follows_the_architecture():
    assert fp8_for_architecture("hip", "gfx942:sramecc+:xnack-") is E4M3FNUZ
    assert fp8_for_architecture("hip", "gfx950") is E4M3FN
    assert fp8_for_architecture("cuda", (9, 0)) is fp8_for_architecture("cuda", (8, 9)) is E4M3FN
    assert fp8_for("cpu") is E4M3FN
    for backend, architecture in (("cuda", (8, 0)), ("hip", "gfx90a"), ("mps", "mps")):
        with pytest.raises(ConfigError, match="8-bit"):
            fp8_for_architecture(backend, architecture)
    for fp8 in (E4M3FN, E4M3FNUZ):
        assert torch.finfo(fp8.dtype).max == fp8.max


def test_shapes_that_do_not_fit_are_refused_by_name():
    x, y = torch.randn(M, D), ops.Product(torch.randn(M, D))
    with pytest.raises(ShapeError, match="gate"):
        ops.residual_norm(x, y, torch.ones(1, D), eps=EPS, tokens=L, video_tokens=VIDEO)
    with pytest.raises(ShapeError, match="multiple of tokens"):
        ops.residual_norm(x, y, None, eps=EPS, tokens=L + 1, video_tokens=VIDEO)
    with pytest.raises(ShapeError, match=r"y\.bias"):
        ops.residual_norm(x, y._replace(bias=torch.ones(3)), None, eps=EPS, tokens=L, video_tokens=VIDEO)
    wide = ops.Product(torch.randn(M, 2 * D)[:, :D])
    with pytest.raises(ShapeError, match=f"rows {2 * D} apart"):
        ops.residual_norm(x, wide, None, eps=EPS, tokens=L, video_tokens=VIDEO)
    with pytest.raises(ShapeError, match="shift: got strides"):
        ops.residual_norm(x, y, None, shift=torch.ones(D, 2).T, eps=EPS, tokens=L, video_tokens=VIDEO)
    q, cache = torch.zeros(B, L, H, DH), torch.zeros(B, L, H, DH)
    qkv, table, one = ops.Product(torch.randn(M, 3 * D)), torch.ones(L, DH // 2), torch.ones(D)
    with pytest.raises(ShapeError, match="start 1"):
        ops.qk_norm_rope_store(qkv, one, one, table, table, q, cache, cache, 1, EPS)
    with pytest.raises(ShapeError, match="scales"):
        ops.qk_norm_rope_store(qkv, one, one, table, table, q, cache, cache, 0, EPS, (1.0, 1.0, 1.0))
