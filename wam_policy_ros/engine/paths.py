"""From a configuration to the way of running the network it asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.model.dit import Block
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.model.exchange import ALONE, Exchange

from .config import EngineConfig
from .conv_check import checked_plan
from .conv_plan import ConvPlan, fixed_plan
from .fast_attention import Attention, CudnnFp8Attention, Fp8Scales, PlainFp8Attention, TorchAttention
from .fast_dit import FastDiT, TimeTable
from .fast_vae import FastVAE, conv_keys
from .fp8 import fp8_for
from .fused_path import FusedPath
from .plain_path import PlainPath
from .preflight import Platform, refuse_impossible, slow_products
from .quantize import Fp8Linear, is_quantised
from .sampler import noise_levels
from .step_path import StepPath
from .streamed_text import StreamedTextEncoder
from .unipc import timesteps_of


def make_path(
    network: DreamZero,
    config: EngineConfig,
    picture_hw: tuple[int, int],
    like: StepPath | None = None,
    *,
    exchange: Exchange = ALONE,
    warn: Callable[[str], None] = lambda line: None,
) -> StepPath:
    """
    Args:
        picture_hw: size of the pictures the network sees.
        like: a path of the same network and exchange whose prepared weights may be used again.
        exchange: shares every evaluation with other ranks; see ``sequence_parallel``.
        warn: told what works, but not as it should.

    Raises:
        ConfigError: the device cannot do what the configuration asks for.
        EngineError: the device's convolutions are wrong.
    """
    _check_weights(network, config, like)
    device = network.device
    refuse_impossible(config, Platform.of(device), network.config.dit, network.dtype)
    if config.step == "plain":
        return PlainPath(network, config, exchange=exchange)
    if isinstance(like, FusedPath) and like.serves(config):
        return like.reconfigured(config)
    fp8 = fp8_for(device) if "fp8" in (config.linears, config.attention) else None
    video, action = (timesteps_of(s).tolist() for s in noise_levels(network, config))
    with torch.inference_mode():
        attention, scales = _attention(config, network)
        dit = FastDiT(
            network.model,
            TimeTable.build(network.model, video, action),
            attention,
            fp8=fp8 if config.linears == "fp8" else None,
            scales=scales,
            exchange=exchange,
        )
    up = dit.blocks[0].up
    if isinstance(up, Fp8Linear) and device.type == "cuda":
        for line in slow_products(up, 2 * network.config.dit.num_frame_per_block * network.config.dit.frame_seqlen):
            warn(line)
    factor = network.config.vae.spatial_factor
    return FusedPath(
        network,
        config,
        dit,
        FastVAE(network.vae, plan=_plan(network, picture_hw, warn)),
        text=StreamedTextEncoder(network.text_encoder, device) if config.text == "streamed" else None,
        latent_hw=(picture_hw[0] // factor, picture_hw[1] // factor),
        kv_dtype=attention.kv_dtype or network.dtype,
    )


def _check_weights(network: DreamZero, config: EngineConfig, like: StepPath | None) -> None:
    """
    Raises:
        ConfigError: the network's layers are 8-bit, or a fused step has taken them over, and this one needs them.
    """
    layer = cast(Block, network.model.blocks[0]).self_attn.q
    if isinstance(like, FusedPath) and like.serves(config):
        return
    if layer.weight.is_meta or (is_quantised(layer) and config.linears != "fp8"):
        raise ConfigError(
            "the network's layers are 8-bit and cannot run this step",
            got=f"step: {config.step}, linears: {config.linears}, attention: {config.attention}",
            remedy="build a policy of its own for it",
        )


def _plan(network: DreamZero, picture_hw: tuple[int, int], warn: Callable[[str], None]) -> ConvPlan:
    """Forms of the VAE's convolutions. On a GPU their results are compared with float32 first."""
    plan = fixed_plan()
    if network.device.type != "cuda":
        return plan
    keys = conv_keys(network.vae)
    plan, lines = checked_plan(plan, keys, *picture_hw, frames=2, device=network.device, dtype=network.dtype)
    for line in lines:
        warn(line)
    return plan


def _attention(config: EngineConfig, network: DreamZero) -> tuple[Attention, Fp8Scales | None]:
    if config.attention == "fp8":
        scales = Fp8Scales(fp8_for(network.device))
        if network.device.type == "cpu":
            return PlainFp8Attention(scales), scales  # the twin; on a CPU everything here is one
        return CudnnFp8Attention(scales, network.device), scales
    attention = TorchAttention(cudnn=config.attention == "cudnn")
    if config.attention == "cudnn":
        dit = network.config.dit
        attention.check(torch.zeros(1, 64, dit.num_heads, dit.head_dim, dtype=network.dtype, device=network.device))
    return attention, None
