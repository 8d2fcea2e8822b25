"""A network's files, made up at full size, and everything between them and the first chunk, stage by stage.

What a start from a published checkpoint costs when its files are in the page cache, with random numbers in the place of
weights. The robot's statistics and the tokenizer are the stand-ins of random networks.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from wam_policy_ros import __version__
from wam_policy_ros.contract.embodiment import get_embodiment
from wam_policy_ros.contract.normalization import Statistics
from wam_policy_ros.engine.build import resolve_dtype, synthetic_metadata
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.fp8 import E4M3FN
from wam_policy_ros.engine.fp8_checkpoint import online
from wam_policy_ros.engine.policy import DreamZeroPolicy
from wam_policy_ros.engine.weights import WeightSource
from wam_policy_ros.model.config import DreamZeroConfig
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.model.errors import ModelConfigError
from wam_policy_ros.model.fp8_layout import MANIFEST, Fp8Manifest, is_scale
from wam_policy_ros.model.key_maps import checkpoint_name
from wam_policy_ros.model.shard_writer import FolderWriter
from wam_policy_ros.model.tokenizer import ByteTokenizer

from .network import Progress, free_memory
from .stages import Stages
from .windows import observation_at


def config_json(config: DreamZeroConfig) -> dict[str, Any]:
    """A ``config.json`` that means ``config``.

    Raises:
        ModelConfigError: it would not be read as what it was made from.
    """
    parts = {name: dataclasses.asdict(getattr(config, name)) for name in ("dit", "text", "image", "vae")}
    parts["dit"].pop("clip_dim")  # follows from the image encoder
    height, width = config.target_video_hw or (None, None)
    head = {
        "num_frames": config.num_frames, "action_horizon": config.action_horizon,
        "decouple_inference_noise": config.decouple_inference_noise,
        "video_inference_final_noise": config.video_inference_final_noise,
        "target_video_height": height, "target_video_width": width,
        "diffusion_model_cfg": parts["dit"], "text_encoder_cfg": parts["text"], "image_encoder_cfg": parts["image"],
        "vae_cfg": parts["vae"],
    }  # fmt: skip
    raw: dict[str, Any] = json.loads(json.dumps({"action_head_cfg": {"config": head}}))
    if (read := DreamZeroConfig.from_config_json(raw)) != config:
        raise ModelConfigError(f"config.json would mean another network: {read}, not {config}")
    return raw


def write_random_network(config: DreamZeroConfig, folder: Path, device: torch.device, *, eight_bit: bool) -> None:
    """Weight files and ``config.json`` of a network that was never trained, in bf16 as published.

    Args:
        eight_bit: the layers of the blocks as ``wam quantize`` writes them.
    """
    convert = online(E4M3FN) if eight_bit else None
    network = DreamZero.with_random_weights(config, device=device, dtype=torch.bfloat16, convert=convert)
    state = network.state_dict()
    with FolderWriter(folder) as writer:
        for name, tensor in state.items():
            writer.add(checkpoint_name(name), tensor)
        (writer.partial / "config.json").write_text(json.dumps(config_json(config)), encoding="utf-8")
        if eight_bit:
            manifest = Fp8Manifest("random numbers", {}, __version__)
            layers = [name for name in state if is_scale(name)]
            (writer.partial / MANIFEST).write_text(json.dumps(manifest.to_json(layers)), encoding="utf-8")


def start(folder: Path, config: EngineConfig, device: torch.device, stages: Stages) -> None:
    """From the files to the second chunk."""
    progress = Progress(stages)
    stages.next("names and shapes in the files compared with config.json")
    source = WeightSource(checkpoint=str(folder))
    network = source.load(config, device, resolve_dtype(config.dtype, device), progress)
    robot = dataclasses.replace(get_embodiment("oxe_droid"), horizon=network.config.action_horizon)
    statistics = Statistics.from_metadata(synthetic_metadata(robot), robot.tag, state=robot.state, action=robot.action)
    long = network.config.dit.text_len == 512  # the published one; the tiny network's texts are longer
    tokens = ByteTokenizer(network.config.dit.text_len, bytes_per_token=4 if long else 1)
    policy = DreamZeroPolicy(
        network, robot, statistics, tokens, config, weights="RANDOM WEIGHTS (files of random numbers): not a policy",
        random_weights=True, progress=progress,
    )  # fmt: skip
    policy.prepare(progress)
    with stages.stage("first call"):
        session = policy.open()
        policy.infer(session, observation_at(policy, 0))
    with stages.stage("second call"):
        policy.infer(session, observation_at(policy, 1))
    policy.close(session)
    del policy, network, session
    free_memory(device)
