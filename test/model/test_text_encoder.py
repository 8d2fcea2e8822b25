"""umT5 encoder against recorded tensors, its rounding points, and the names and sizes of the published network."""

from __future__ import annotations

import math

import pytest
import torch

from test.golden_files import Golden, golden, rel
from wam_policy_ros.model.config_encoders import TextEncoderConfig
from wam_policy_ros.model.errors import ModelConfigError, ShapeError
from wam_policy_ros.model.text_encoder import RMSNorm, TanhGELU, TextEncoder, relative_position_bucket, zero_padding

LIMIT = 1.5e-5  # tight enough to tell an RMS eps of 1e-5 from 1e-6


@pytest.fixture(scope="module")
def recorded() -> Golden:
    return golden("t5.safetensors")


@pytest.fixture(scope="module")
def encoder(recorded: Golden) -> TextEncoder:
    out = TextEncoder(TextEncoderConfig.from_dict(recorded.metadata["config"]))
    out.load_state_dict(recorded.sub("w."))
    return out.requires_grad_(False)


@pytest.mark.parametrize("case", range(4))
def test_hidden_states(recorded: Golden, encoder: TextEncoder, case: int) -> None:
    mask = recorded[f"in.mask{case}"]
    hidden = encoder(recorded[f"in.ids{case}"], mask)
    assert rel(hidden, recorded[f"out.hidden{case}"]) < LIMIT
    assert rel(zero_padding(hidden, mask), recorded[f"out.encode_prompt{case}"]) < LIMIT


def test_hidden_state_after_each_block(recorded: Golden, encoder: TextEncoder) -> None:
    seen: list[torch.Tensor] = []
    hooks = [b.register_forward_hook(lambda _m, _a, out: seen.append(out)) for b in encoder.blocks]
    encoder(recorded["in.ids0"], recorded["in.mask0"])
    for hook in hooks:
        hook.remove()
    assert len(seen) == 2
    for i, hidden in enumerate(seen):
        assert rel(hidden, recorded[f"out.block{i}_hidden0"]) < LIMIT


def test_relative_position_bias(recorded: Golden, encoder: TextEncoder) -> None:
    positions = torch.arange(32)
    buckets = relative_position_bucket(positions[None] - positions[:, None], 32)
    assert torch.equal(encoder.blocks[0].get_submodule("pos_embedding")(buckets), recorded["out.pos_bias_block0"])


def test_float64(recorded: Golden, encoder: TextEncoder) -> None:
    double = TextEncoder(encoder.config).double().requires_grad_(False)
    double.load_state_dict(encoder.state_dict())
    hidden = double(recorded["in.ids0"], recorded["in.mask0"])
    assert hidden.dtype == torch.float64
    assert 0 < rel(hidden, recorded["out.hidden0"]) < LIMIT


def test_bf16_follows_the_recorded_bf16_run() -> None:
    weights, inputs, outputs = (golden(f"e2e_{n}.safetensors") for n in ("weights", "inputs", "bf16_mask8"))
    encoder = TextEncoder(TextEncoderConfig.from_dict(weights.metadata["config"]["text"])).requires_grad_(False)
    encoder.load_state_dict(weights.sub("text_encoder."))
    encoder.bfloat16()
    for branch, suffix in enumerate(("", "_negative")):
        mask = inputs[f"call0.text_attention_mask{suffix}"]
        hidden = zero_padding(encoder(inputs[f"call0.text{suffix}"], mask), mask)
        expected = outputs[f"call0.prompt_emb{branch}"]
        assert hidden.dtype == torch.bfloat16
        assert rel(hidden, expected) < 0.08
        assert torch.corrcoef(torch.stack([hidden.float().flatten(), expected.flatten()]))[0, 1] > 0.999


def test_padding_does_not_reach_the_prompt(recorded: Golden, encoder: TextEncoder) -> None:
    ids, mask = recorded["in.ids0"], recorded["in.mask0"]
    length = int(mask.sum())
    other = torch.where(mask == 1, ids, 7)
    assert torch.equal(encoder(ids, mask)[:, :length], encoder(other, mask)[:, :length])
    assert not torch.equal(encoder(ids, mask)[:, :length], encoder(ids, torch.ones_like(mask))[:, :length])


def test_buckets_of_all_recorded_distances(recorded: Golden) -> None:
    assert torch.equal(relative_position_bucket(recorded["const.rel_pos"], 32), recorded["const.rel_pos_bucket"])


# DreamZero spec, appendix D.
RELATIVE = (0, 1, -1, 7, 8, -8, 12, 16, -16, 23, 32, 46, 64, 91, 511, -511)
BUCKET = (0, 17, 1, 23, 24, 8, 25, 26, 10, 27, 28, 29, 30, 31, 31, 15)


@pytest.mark.parametrize(("relative", "bucket"), list(zip(RELATIVE, BUCKET, strict=True)))
def test_bucket(relative: int, bucket: int) -> None:
    assert relative_position_bucket(torch.tensor(relative), 32).item() == bucket


def test_zero_padding_takes_the_shortest_prompt_of_the_batch() -> None:
    hidden = torch.full((2, 4, 3), 5.0)
    hidden[0, 3] = math.nan  # what is in a padded row must not matter
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    out = zero_padding(hidden, mask)
    assert torch.equal(out[:, :2], hidden[:, :2])
    assert (out[:, 2:] == 0).all()


def test_rms_norm_rounds_before_the_weight() -> None:
    torch.manual_seed(0)
    norm = RMSNorm(64).bfloat16().requires_grad_(False)
    norm.weight.copy_(1 + 0.1 * torch.randn(64))
    x = torch.randn(32, 64).bfloat16()
    unweighted = x.float() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt().float()
    assert (norm(x) == unweighted.bfloat16() * norm.weight).float().mean() > 0.999
    assert (norm(x) == (unweighted * norm.weight.float()).bfloat16()).float().mean() < 0.9


def test_gelu_rounds_after_every_operation() -> None:
    x = torch.linspace(-4, 4, 1000).bfloat16()
    fused = torch.nn.functional.gelu(x, approximate="tanh")
    assert rel(TanhGELU()(x.float()), torch.nn.functional.gelu(x.float(), approximate="tanh")) < 1e-6
    assert TanhGELU()(x).dtype == torch.bfloat16
    assert not torch.equal(TanhGELU()(x), fused)


def test_published_size_and_names() -> None:
    with torch.device("meta"):
        state = TextEncoder().state_dict()
    assert len(state) == 242
    assert sum(t.numel() for t in state.values()) == 5_680_910_336
    block = {
        "norm1.weight": (4096,),
        **{f"attn.{n}.weight": (4096, 4096) for n in "qkvo"},
        "norm2.weight": (4096,),
        "ffn.gate.0.weight": (10240, 4096),
        "ffn.fc1.weight": (10240, 4096),
        "ffn.fc2.weight": (4096, 10240),
        "pos_embedding.embedding.weight": (32, 64),
    }
    expected = {f"blocks.{i}.{n}": s for i in range(24) for n, s in block.items()}
    expected |= {"token_embedding.weight": (256384, 4096), "norm.weight": (4096,)}
    assert {n: tuple(t.shape) for n, t in state.items()} == expected


@pytest.mark.parametrize(("ids", "mask"), [((4,), (4,)), ((1, 4), (1, 5)), ((1, 4), (4,))])
def test_wrong_shapes_are_refused(encoder: TextEncoder, ids: tuple[int, ...], mask: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="ids and mask"):
        encoder(torch.zeros(ids, dtype=torch.int64), torch.ones(mask, dtype=torch.int64))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shared_pos": True}, "shared_pos is True, expected False"),
        ({"layers": 2}, "unknown key 'layers'"),
        ({"num_heads": 3}, "multiple of num_heads"),
        ({"dim": 0}, "dim is 0, expected a positive integer"),
        ({"dim": 64.0}, "dim is 64.0, expected a positive integer"),
        ({"num_buckets": 30}, "num_buckets"),
    ],
)
def test_wrong_configuration_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        TextEncoderConfig.from_dict(values)


def test_configuration_ignores_where_files_came_from() -> None:
    values = {"_target_": "some.Class", "text_encoder_pretrained_path": None, "shared_pos": False, "dim": 4096}
    assert TextEncoderConfig.from_dict(values) == TextEncoderConfig()
