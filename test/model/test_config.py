"""``config.json`` to a frozen configuration: published names in, typed errors for everything that does not fit."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest

from test.tiny_checkpoint import TEXT_LEN, config_json
from wam_policy_ros.model.config import DiTConfig, DreamZeroConfig
from wam_policy_ros.model.errors import ModelConfigError


def _head(raw):
    return raw["action_head_cfg"]["config"]


def _changed(**head):
    raw = config_json()
    _head(raw).update(head)
    return raw


def _dit(**dit):
    return config_json(**dit)


def _published():
    """DreamZero spec 6.3 with the published numbers: encoders are not described there."""
    raw = config_json()
    head = _head(raw)
    for key in ("target_video_height", "target_video_width"):
        del head[key]
    dit = head["diffusion_model_cfg"]
    dit |= {"frame_seqlen": 880, "dim": 5120, "ffn_dim": 13824, "freq_dim": 256, "num_heads": 40, "num_layers": 40}
    for key in ("hidden_size", "text_len"):
        del dit[key]
    for key in ("text_encoder_cfg", "image_encoder_cfg", "vae_cfg"):
        head[key] = {k: v for k, v in head[key].items() if k == "_target_" or k.endswith("_pretrained_path")}
    return raw


def test_published_file_is_the_preset():
    config = DreamZeroConfig.from_config_json(_published())
    assert dataclasses.replace(config, ignored=()) == DreamZeroConfig.dreamzero_14b()
    # The head's hidden_size 64 and num_inference_timesteps 4 are dead; they must not reach the network.
    assert config.dit.hidden_size == 1024
    assert {"num_inference_timesteps", "hidden_size", "noise_beta_alpha"} <= set(config.ignored)
    assert config.dit.head_dim == 128 and config.dit.local_attn_size == 9 and config.dit.max_attention_size == 7920
    assert config.latent_frames == 9


def test_nested_and_flat_give_the_same():
    nested = config_json()
    flat = copy.deepcopy(nested)
    inner = flat["action_head_cfg"].pop("config")
    flat["action_head_cfg"] |= inner
    assert DreamZeroConfig.from_config_json(nested) == DreamZeroConfig.from_config_json(flat)


def test_values_reach_their_place():
    raw = _changed(num_frames=17, decouple_inference_noise=True, video_inference_final_noise=0.7, tiled=True)
    _head(raw)["diffusion_model_cfg"] |= {"max_chunk_size": 3, "num_action_per_block": 12, "num_state_per_block": 2}
    _head(raw)["action_horizon"] = 12
    config = DreamZeroConfig.from_config_json(raw)
    assert config.num_frames == 17 and config.latent_frames == 5 and config.action_horizon == 12
    assert config.decouple_inference_noise and config.video_inference_final_noise == 0.7
    assert config.vae.tiled and config.vae.tile_size_height == 34 and config.vae.tile_stride_width == 16
    assert config.dit.local_attn_size == 7 and config.dit.num_state_per_block == 2
    assert config.dit.text_len == config.text.text_len == TEXT_LEN
    assert config.dit.text_dim == 16 and config.dit.clip_dim == 20
    assert config.target_video_hw == (16, 32)


def test_absent_target_size_means_no_resize():
    assert DreamZeroConfig.from_config_json(_published()).target_video_hw is None
    nulls = _changed(target_video_height=None, target_video_width=None)
    assert DreamZeroConfig.from_config_json(nulls).target_video_hw is None


def test_top_level_numbers_count_where_the_head_is_silent():
    raw = config_json(num_action_per_block=48)
    del _head(raw)["action_horizon"]
    raw["action_horizon"] = 48
    assert DreamZeroConfig.from_config_json(raw).action_horizon == 48


@pytest.mark.parametrize("typo", ["num_layer", "max_chunksize", "num_inference_step"])
def test_unknown_key_of_the_network_is_named(typo):
    with pytest.raises(ModelConfigError, match=typo) as error:
        DreamZeroConfig.from_config_json(_dit(**{typo: 4}))
    assert "num_layers" in str(error.value)  # the known ones are listed


@pytest.mark.parametrize("section", ["text_encoder_cfg", "image_encoder_cfg", "vae_cfg"])
def test_unknown_key_of_an_encoder_is_named(section):
    raw = config_json()
    _head(raw)[section]["dimm"] = 4
    with pytest.raises(ModelConfigError, match="dimm"):
        DreamZeroConfig.from_config_json(raw)


def test_training_keys_have_no_effect_and_are_reported():
    plain = DreamZeroConfig.from_config_json(config_json())
    raw = _changed(use_gradient_checkpointing=True, a_future_training_key=7)
    _head(raw)["diffusion_model_cfg"] |= {"sink_size": 0, "use_gradient_checkpointing": True, "qk_norm": True,
                                          "patch_size": [1, 2, 2], "num_registers": 8}  # fmt: skip
    _head(raw)["vl_self_attention_cfg"] = {"_target_": "a.class.that.does.not.exist"}
    config = DreamZeroConfig.from_config_json(raw)
    assert dataclasses.replace(config, ignored=plain.ignored) == plain
    assert set(config.ignored) - set(plain.ignored) == {"use_gradient_checkpointing", "a_future_training_key"}


def test_the_5b_variant_is_refused():
    with pytest.raises(ModelConfigError, match="ti2v"):
        DreamZeroConfig.from_config_json(
            _dit(model_type="ti2v", in_dim=48, out_dim=48, concat_first_frame_latent=False)
        )
    with pytest.raises(ModelConfigError, match="concat_first_frame_latent=False"):
        DreamZeroConfig.from_config_json(_dit(concat_first_frame_latent=False))


@pytest.mark.parametrize(
    ("dit", "words"),
    [
        ({"num_heads": 3}, "num_heads 3"),
        ({"dim": 30, "num_heads": 2}, "even multiple"),
        ({"freq_dim": 15}, "freq_dim"),
        ({"in_dim": 32}, "in_dim"),
        ({"out_dim": 8}, "out_dim"),
        ({"text_dim": 17}, "text width"),
        ({"num_action_per_block": 48}, "action_horizon 24"),
        ({"num_state_per_block": 5}, "num_state_per_block"),
        ({"num_layers": 0}, "num_layers"),
        ({"num_layers": 2.5}, "num_layers"),
        ({"num_layers": "2"}, "num_layers"),
        ({"max_chunk_size": 0}, "max_chunk_size"),
        ({"frame_seqlen": -8}, "frame_seqlen"),
        ({"eps": "small"}, "eps"),
        ({"patch_size": [2, 2, 2]}, "patch_size"),
        ({"qk_norm": False}, "qk_norm"),
        ({"cross_attn_norm": False}, "cross_attn_norm"),
        ({"num_frame_per_block": 3}, "num_frame_per_block is 2 in the head and 3"),
        ({"max_state_dim": 44}, "max_state_dim is 64 in the head and 44"),
        ({"action_dim": 16}, "action_dim is 32 in the head and 16"),
    ],
)
def test_inconsistent_networks_are_refused(dit, words):
    with pytest.raises(ModelConfigError, match=words):
        DreamZeroConfig.from_config_json(_dit(**dit))


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ({"num_frames": 32}, "num_frames"),
        ({"num_frames": 33.0}, "num_frames"),
        ({"num_frames": 1}, "fewer latent frames"),
        ({"action_horizon": 48}, "action_horizon 48"),
        ({"decouple_inference_noise": "false"}, "decouple_inference_noise"),
        ({"video_inference_final_noise": 1.0}, "video_inference_final_noise"),
        ({"diffusion_model_cfg": None}, "diffusion_model_cfg"),
        ({"tiled": "no"}, "tiled"),
    ],
)
def test_inconsistent_heads_are_refused(head, words):
    with pytest.raises(ModelConfigError, match=words):
        DreamZeroConfig.from_config_json(_changed(**head))


@pytest.mark.parametrize("raw", [{}, {"action_head_cfg": None}, {"action_head_cfg": {"config": 3}}])
def test_other_files_are_refused(raw):
    with pytest.raises(ModelConfigError, match="action_head_cfg"):
        DreamZeroConfig.from_config_json(raw)


def test_presets():
    published, tiny = DreamZeroConfig.dreamzero_14b(), DreamZeroConfig.tiny()
    assert (published.dit.dim, published.dit.num_layers, published.dit.num_heads) == (5120, 40, 40)
    assert published.target_video_hw is None and published.num_frames == 33
    # Same algorithm: what shapes the closed loop is as published, only widths and pictures shrink.
    same = ("num_frame_per_block", "num_action_per_block", "max_chunk_size", "action_dim", "max_state_dim", "in_dim")
    for name in same:
        assert getattr(tiny.dit, name) == getattr(published.dit, name)
    assert tiny.num_frames == published.num_frames and tiny.action_horizon == published.action_horizon
    assert tiny.target_video_hw is not None
    h, w = tiny.target_video_hw
    assert tiny.dit.frame_seqlen == (h // 16) * (w // 16) and h % 16 == w % 16 == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny.num_frames = 9  # type: ignore[misc]


def test_a_config_survives_json():
    assert DreamZeroConfig.from_config_json(json.loads(json.dumps(config_json()))) == DreamZeroConfig.from_config_json(
        config_json()
    )


def test_dit_defaults_are_the_published_numbers():
    d = DiTConfig()
    assert (d.ffn_dim, d.freq_dim, d.hidden_size, d.text_dim, d.text_len, d.clip_dim) == (
        13824, 256, 1024, 4096, 512, 1280,
    )  # fmt: skip


@pytest.mark.parametrize("key", ["num_layers", "frame_seqlen", "max_chunk_size", "num_action_per_block"])
def test_numbers_beyond_belief_are_refused(key):
    with pytest.raises(ModelConfigError, match=key):
        DiTConfig(**{key: 10**9})
