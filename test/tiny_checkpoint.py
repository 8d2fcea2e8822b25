"""A checkpoint folder as published, at tiny widths: shards with an index, config, statistics, conf.yaml, tokenizer."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import yaml
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from wam_policy_ros.contract.embodiments import DROID
from wam_policy_ros.engine.build import synthetic_metadata
from wam_policy_ros.model.checkpoint import save_folder
from wam_policy_ros.model.config import DreamZeroConfig
from wam_policy_ros.model.dreamzero import DreamZero

TEXT_LEN = 768


def config_json(**dit: Any) -> dict[str, Any]:
    """The published ``config.json`` (DreamZero spec 6.3) with tiny numbers; ``dit`` changes ``diffusion_model_cfg``.

    The mosaic is resized to 16x32: latents of 2x4, 2 tokens per frame.
    """
    modules = "groot.vla.model.dreamzero.modules"
    return {
        "architectures": ["VLA"], "model_type": "vla", "model_dtype": "float32", "hidden_size": 0,
        "action_horizon": 24, "action_dim": 32,
        "backbone_cfg": {"_target_": "groot.vla.model.dreamzero.backbone.identity.IdentityBackbone"},
        "action_head_cfg": {
            "_target_": "groot.vla.model.dreamzero.action_head.wan_flow_matching_action_tf.WANPolicyHead",
            "_convert_": "object",
            "config": {
                "_target_": "WANPolicyHeadConfig", "_recursive_": False,
                "tiled": False, "tile_size_height": 34, "tile_size_width": 34,
                "tile_stride_height": 18, "tile_stride_width": 16,
                "num_frames": 33, "num_frame_per_block": 2, "action_horizon": 24, "action_dim": 32,
                "max_state_dim": 64, "max_action_dim": 32, "hidden_size": 64, "input_embedding_dim": 1536,
                "backbone_embedding_dim": 0, "train_architecture": "full", "lora_rank": 4, "lora_alpha": 4,
                "lora_target_modules": "q,k,v,o,ffn.0,ffn.2", "init_lora_weights": "kaiming",
                "num_inference_timesteps": 4, "noise_beta_alpha": 1.5, "noise_beta_beta": 1.0, "noise_s": 0.999,
                "num_timestep_buckets": 1000, "decouple_video_action_noise": False,
                "decouple_inference_noise": False, "video_inference_final_noise": 0.8,
                "action_loss_embodiment_ids": [26, 17], "tune_projector": True, "tune_diffusion_model": True,
                "target_video_height": 16, "target_video_width": 32,
                "diffusion_model_cfg": {
                    "_target_": f"{modules}.wan_video_dit_action_casual_chunk.CausalWanModel",
                    "diffusion_model_pretrained_path": "/nowhere", "model_type": "i2v", "frame_seqlen": 2,
                    "dim": 32, "in_dim": 36, "ffn_dim": 48, "out_dim": 16, "freq_dim": 16, "eps": 1e-06,
                    "num_heads": 2, "num_layers": 2, "max_chunk_size": 4, "num_frame_per_block": 2,
                    "num_action_per_block": 24, "num_state_per_block": 1, "hidden_size": 16, "text_len": TEXT_LEN,
                } | dit,
                "text_encoder_cfg": {
                    "_target_": f"{modules}.wan_video_text_encoder.WanTextEncoder",
                    "text_encoder_pretrained_path": "/nowhere", "vocab": 64, "dim": 16, "dim_attn": 16,
                    "dim_ffn": 32, "num_heads": 2, "num_layers": 2,
                },
                "image_encoder_cfg": {
                    "_target_": f"{modules}.wan_video_image_encoder.WanImageEncoder",
                    "image_encoder_pretrained_path": "/nowhere", "vision_dim": 20, "vision_heads": 2,
                    "vision_layers": 2, "embed_dim": 16,
                },
                "vae_cfg": {"_target_": f"{modules}.wan_video_vae.WanVideoVAE", "vae_pretrained_path": None, "dim": 4,
                            "num_res_blocks": 1},
            },
        },
    }  # fmt: skip


def tiny_network(seed: int = 0, **dit: Any) -> DreamZero:
    """Random float32 weights for :func:`config_json`."""
    return DreamZero.with_random_weights(DreamZeroConfig.from_config_json(config_json(**dit)), seed=seed)


def conf_yaml() -> dict[str, Any]:
    """The part of ``experiment_cfg/conf.yaml`` that inference reads (DreamZero spec 6.4)."""
    order = {
        "video_concat_order": [f"video.{c.name}" for c in DROID.cameras],
        "state_concat_order": [f"state.{f.name}" for f in DROID.state],
        "action_concat_order": [f"action.{f.name}" for f in DROID.action],
    }
    transforms = [
        {"_target_": "groot.vla.data.transform.VideoToTensor", "apply_to": ["video.x"]},
        {"_target_": "groot.vla.data.transform.concat.ConcatTransform", **order},
    ]
    return {
        "transforms": {"oxe_droid": {"_target_": "ComposedModalityTransform", "transforms": transforms}},
        "relative_action": True,
        "relative_action_keys": ["joint_position"],
        "relative_action_per_horizon": False,
        "eval_bf16": True,
        "save_lora_only": False,
        "tokenizer_path": "/nowhere/umt5-xxl",
    }


def write_tokenizer(folder: Path, *, extra: int = 0) -> Path:
    """A Unigram ``tokenizer.json`` with umT5's special ids: one piece per character; ids below 64 without ``extra``."""
    specials = ["<pad>", "</s>", "<s>", "<unk>"]
    pieces = [(s, 0.0) for s in specials] + [(f"<extra{i}>", -9.0) for i in range(extra)] + [("▁", -5.0)]
    pieces += [(c, -6.0) for c in string.ascii_lowercase + string.ascii_uppercase + "'-.:,()"]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=3))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in specials])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_checkpoint(folder: Path, network: DreamZero | None = None, *, shards: int = 3) -> Path:
    """A complete folder that loads."""
    save_folder(network or tiny_network(), config_json(), folder, shards=shards)
    experiment = folder / "experiment_cfg"
    experiment.mkdir()
    (experiment / "metadata.json").write_text(json.dumps(synthetic_metadata(DROID)))
    (experiment / "conf.yaml").write_text(yaml.safe_dump(conf_yaml()))
    write_tokenizer(folder / "umt5-xxl")
    return folder


def edit_json(path: Path, change: Any) -> None:
    """Apply ``change(parsed)`` to a JSON file in place."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
