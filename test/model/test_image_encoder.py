"""CLIP visual tower against recorded tensors, and the names and sizes of the published network."""

from __future__ import annotations

import pytest
import torch

from test.golden_files import Golden, golden, rel
from wam_policy_ros.model.config_encoders import ImageEncoderConfig
from wam_policy_ros.model.errors import ModelConfigError, ShapeError
from wam_policy_ros.model.image_encoder import ImageEncoder

LIMIT = 1.5e-5  # tight enough to tell a LayerNorm eps of 1e-6 from 1e-5


@pytest.fixture(scope="module")
def recorded() -> Golden:
    return golden("clip.safetensors")


@pytest.fixture(scope="module")
def encoder(recorded: Golden) -> ImageEncoder:
    # As the checkpoint loader does: no memory until the weights arrive.
    with torch.device("meta"):
        out = ImageEncoder(ImageEncoderConfig.from_dict(recorded.metadata["config"]))
    out.load_state_dict(recorded.sub("w."), assign=True)
    return out.requires_grad_(False)


@pytest.mark.parametrize("case", range(3))
def test_features(recorded: Golden, encoder: ImageEncoder, case: int) -> None:
    assert rel(encoder(recorded[f"in.image{case}"]), recorded[f"out.clip_feature{case}"]) < LIMIT


def test_all_blocks(recorded: Golden, encoder: ImageEncoder) -> None:
    assert rel(encoder(recorded["in.image0"], all_blocks=True), recorded["out.full_transformer0"]) < LIMIT


def test_preprocessing(recorded: Golden, encoder: ImageEncoder) -> None:
    pixels = encoder.preprocess(recorded["in.image0"])
    assert pixels.shape == (1, 3, 224, 224)
    assert rel(pixels[:, :, :8], recorded["out.preprocessed0_rows0_8"]) < LIMIT
    statistics = torch.stack([pixels.mean(dim=(0, 2, 3)), pixels.std(dim=(0, 2, 3))])
    assert rel(statistics, recorded["out.preprocessed0_mean_std"]) < LIMIT


def test_one_frame_axis_or_none(recorded: Golden, encoder: ImageEncoder) -> None:
    image = recorded["in.image1"]
    assert torch.equal(encoder(image), encoder(image[:, 0]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(recorded: Golden, encoder: ImageEncoder, dtype: torch.dtype) -> None:
    other = ImageEncoder(encoder.config).to(dtype).requires_grad_(False)
    other.load_state_dict(encoder.state_dict())
    features = other(recorded["in.image0"].to(dtype))
    assert features.dtype == dtype
    assert 0 < rel(features, recorded["out.clip_feature0"]) < (LIMIT if dtype == torch.float64 else 0.08)


def test_preprocessing_in_bf16_rounds_at_every_step(encoder: ImageEncoder) -> None:
    torch.manual_seed(0)
    image = (torch.rand(1, 3, 20, 30) * 2 - 1).bfloat16()
    assert encoder.preprocess(image).dtype == torch.bfloat16
    assert not torch.equal(encoder.preprocess(image), encoder.preprocess(image.float()).bfloat16())


@pytest.mark.parametrize("shape", [(1, 2, 3, 8, 8), (1, 1, 8, 8), (3, 8, 8)])
def test_wrong_shapes_are_refused(encoder: ImageEncoder, shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="image for CLIP"):
        encoder(torch.zeros(shape))


def test_published_size_and_names() -> None:
    with torch.device("meta"):
        state = ImageEncoder().state_dict()
    assert len(state) == 393
    assert sum(t.numel() for t in state.values()) == 632_076_801
    block = {
        **{f"{norm}.{n}": (1280,) for norm in ("norm1", "norm2") for n in ("weight", "bias")},
        "attn.to_qkv.weight": (3840, 1280),
        "attn.to_qkv.bias": (3840,),
        "attn.proj.weight": (1280, 1280),
        "attn.proj.bias": (1280,),
        "mlp.0.weight": (5120, 1280),
        "mlp.0.bias": (5120,),
        "mlp.2.weight": (1280, 5120),
        "mlp.2.bias": (1280,),
    }
    expected: dict[str, tuple[int, ...]] = {
        f"model.visual.transformer.{i}.{n}": s for i in range(32) for n, s in block.items()
    }
    expected |= {f"model.visual.{norm}.{n}": (1280,) for norm in ("pre_norm", "post_norm") for n in ("weight", "bias")}
    expected |= {
        "model.log_scale": (),
        "model.visual.cls_embedding": (1, 1, 1280),
        "model.visual.pos_embedding": (1, 257, 1280),
        "model.visual.head": (1280, 1024),
        "model.visual.patch_embedding.weight": (1280, 3, 14, 14),
    }
    assert {n: tuple(t.shape) for n, t in state.items()} == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"activation": "quick_gelu"}, "activation is 'quick_gelu', expected 'gelu'"),
        ({"pre_norm": False}, "pre_norm is False"),
        ({"vision_heads": 7}, "multiple of vision_heads"),
        ({"patch_size": 15}, "multiple of patch_size"),
        ({"width": 4}, "unknown key 'width'"),
    ],
)
def test_wrong_configuration_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        ImageEncoderConfig.from_dict(values)
