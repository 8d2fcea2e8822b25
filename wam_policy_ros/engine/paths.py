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
from .conv_plan import fixed_plan
from .fast_attention import Attention, CudnnFp8Attention, Fp8Scales, PlainFp8Attention, TorchAttention
from .fast_dit import FastDiT, TimeTable
from .fast_vae import FastVAE, conv_keys
from .fp8 import fp8_for
from .fused_path import FusedPath
from .kernels.launch import collecting, compile_together
from .parallel.far import BranchPath, LocalFar
from .parallel.grid import Grid
from .parallel.groups import Groups
from .parallel.ranks import Ranks
from .parallel.remote import RemoteFar
from .parallel.split_path import SplitPath
from .plain_path import PlainPath
from .preflight import Platform, refuse_impossible, slow_products
from .quantize import Fp8Linear, is_quantised
from .sampler import noise_levels
from .sequence_parallel import sequence_exchange
from .step_path import StepPath
from .streamed_text import StreamedTextEncoder
from .unipc import timesteps_of

Progress = Callable[[str, float], None]


def make_path(
    network: DreamZero,
    config: EngineConfig,
    picture_hw: tuple[int, int],
    like: StepPath | None = None,
    *,
    exchange: Exchange = ALONE,
    ranks: Ranks | None = None,
    warn: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda text, fraction: None,
) -> StepPath:
    """
    Args:
        picture_hw: size of the pictures the network sees.
        like: a path of the same network and exchange whose prepared weights, and whose ranks, may be used again.
        exchange: shares every evaluation with other ranks that make the same calls, for a path on one GPU of
            ``config``; see ``sequence_parallel``.
        ranks: the other processes of ``config.gpus``, if ``like`` has none.
        warn: told what works, but not as it should. progress: what is going on.

    Raises:
        ConfigError: the device cannot do what the configuration asks for.
        EngineError: the device's convolutions are wrong.
        PolicyLost: another process ended.
    """
    near = like.local if isinstance(like, SplitPath) else like
    if config.gpus > 1:
        if ranks is None and isinstance(like, SplitPath) and isinstance(like.far, RemoteFar):
            ranks = like.far.ranks
        wanted = Grid.of(config.gpus, guided=config.guidance_scale != 1.0)
        if ranks is None or ranks.grid != wanted:
            raise ConfigError(
                "the processes of a policy on several GPUs are started with it",
                got=f"gpus: {config.gpus}, guidance_scale: {config.guidance_scale}",
                remedy="build a policy of its own for it: build_policy(config=EngineConfig(gpus=...))",
            )
        groups = ranks.join(progress)
        far = RemoteFar(ranks, config, network.device, network.dtype)
        try:
            try:
                # While they do.
                local = branch_path(network, config, picture_hw, near, groups=groups, warn=warn, progress=progress)
            finally:
                far.ready()
        except BaseException:
            far.close()
            raise
        return SplitPath(network, config, local, far)
    if config.branches == "apart":
        local = branch_path(network, config, picture_hw, near, warn=warn, progress=progress)
        other = branch_path(network, config, picture_hw, local, warn=warn, progress=progress)
        return SplitPath(network, config, local, LocalFar(other))
    return _whole_path(network, config, picture_hw, near, exchange, encoders=True, warn=warn, progress=progress)


def branch_path(
    network: DreamZero,
    config: EngineConfig,
    picture_hw: tuple[int, int],
    like: StepPath | None,
    *,
    encoders: bool = True,
    groups: Groups | None = None,
    warn: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda text, fraction: None,
) -> BranchPath:
    """What one rank runs of a call: one guidance branch, or its part of one.

    Args:
        config: of the whole call.
        encoders: the network has more than its DiT.
        groups: this rank's; None: this process runs the branch alone.

    Raises:
        ConfigError: see ``make_path``.
    """
    row = None if groups is None or groups.grid.sequence == 1 else groups
    exchange = sequence_exchange(row.sequence if row else None, network.config.dit.num_heads, network.device)
    path = _whole_path(
        network, config.one_branch(), picture_hw, like, exchange, encoders=encoders, warn=warn, progress=progress
    )
    if row is not None and isinstance(path, FusedPath):
        path.agree = row.agree
    return path


def _whole_path(
    network: DreamZero,
    config: EngineConfig,
    picture_hw: tuple[int, int],
    like: StepPath | None,
    exchange: Exchange,
    *,
    encoders: bool,
    warn: Callable[[str], None],
    progress: Progress,
) -> PlainPath | FusedPath:
    """All branches of ``config`` in this process."""
    if isinstance(like, FusedPath) and like.dit.exchange.ranks != exchange.ranks:
        like = None  # its tables are of its part of the tokens
    _check_weights(network, config, like)
    device = network.device
    refuse_impossible(config, Platform.of(device), network.config.dit, network.dtype)
    if config.step == "plain":
        return PlainPath(network, config, exchange=exchange)
    if isinstance(like, FusedPath) and like.serves(config):
        return like.reconfigured(config)
    progress("taking the weights over", 0.0)
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
    # Its weights go while the rest is prepared.
    text = StreamedTextEncoder(network.text_encoder, device) if encoders and config.text == "streamed" else None
    factor = network.config.vae.spatial_factor
    return FusedPath(
        network,
        config,
        dit,
        _fast_vae(network, picture_hw, warn, progress) if encoders else None,
        text=text,
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


def _fast_vae(
    network: DreamZero, picture_hw: tuple[int, int], warn: Callable[[str], None], progress: Progress
) -> FastVAE:
    """On a GPU with its kernels compiled, and convolutions whose results were compared with float32."""
    plan = fixed_plan()
    vae = FastVAE(network.vae, plan=plan)
    device, dtype = network.device, network.dtype
    if device.type != "cuda":
        return vae
    progress("compiling the encoder", 0.0)
    with collecting() as launches:
        clip = torch.zeros(
            1, 3, 4 * network.config.dit.num_frame_per_block + 1, *picture_hw, dtype=dtype, device=device
        )
        vae.encode(clip)
        vae.encode_conditioning(clip[:, :, :1], network.config.num_frames)
    compile_together(launches, device)
    progress("comparing convolutions with float32", 0.0)
    keys = conv_keys(network.vae)
    checked, lines = checked_plan(plan, keys, *picture_hw, frames=2, device=device, dtype=dtype)
    for line in lines:
        warn(line)
    return vae if checked == plan else FastVAE(network.vae, plan=checked)


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
