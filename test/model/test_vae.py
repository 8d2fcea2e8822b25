"""Video VAE: recorded clips, streaming in chunks, tiles, and the names and sizes of the published network."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from test.golden_files import Golden, golden, rel
from wam_policy_ros.model.config_encoders import WAN_LATENT_MEAN, WAN_LATENT_STD, VAEConfig
from wam_policy_ros.model.errors import ModelConfigError, ShapeError
from wam_policy_ros.model.vae import VideoVAE
from wam_policy_ros.model.vae_blocks import VAEStream
from wam_policy_ros.model.vae_tiling import Tiling, edge_weight, tile_spans

LIMIT = 5e-5


@pytest.fixture(scope="module")
def recorded() -> Golden:
    return golden("vae_io.safetensors")


@pytest.fixture(scope="module")
def vae(recorded: Golden) -> VideoVAE:
    # As the checkpoint loader does: no memory until the weights arrive.
    with torch.device("meta"):
        out = VideoVAE(VAEConfig.from_dict(recorded.metadata["config"]))
    weights = golden("vae_weights_enc.safetensors") | golden("vae_weights_dec.safetensors")
    out.load_state_dict(weights, assign=True)
    return out.requires_grad_(False)


@pytest.fixture(scope="module")
def tiny() -> VideoVAE:
    torch.manual_seed(0)
    return VideoVAE(VAEConfig(dim=4)).requires_grad_(False)


def chunks_of(video: Tensor) -> list[Tensor]:
    return [video[:, :, :1], *video[:, :, 1:].split(4, dim=2)]


# --- whole clips


@pytest.mark.parametrize("clip", ["1f", "9f", "long"])
def test_encode(recorded: Golden, vae: VideoVAE, clip: str) -> None:
    assert rel(vae.encode(recorded[f"in.video_{clip}"]), recorded[f"out.encode_{clip}"]) < LIMIT


def test_encode_conditioning_clip(recorded: Golden, vae: VideoVAE) -> None:
    video = torch.cat([recorded["in.video_1f"], torch.zeros_like(recorded["in.video_9f"][:, :, :8])], dim=2)
    assert rel(vae.encode(video), recorded["out.encode_1f_plus_8_zero_frames"]) < LIMIT


def test_frames_that_do_not_fill_a_chunk_are_dropped(recorded: Golden, vae: VideoVAE) -> None:
    video = recorded["in.video_9f"][:, :, :8]
    assert rel(vae.encode(video), recorded["out.encode_first8_of_9f"]) < LIMIT
    assert torch.equal(vae.encode(video), vae.encode(video[:, :, :5]))


def test_decode(recorded: Golden, vae: VideoVAE) -> None:
    latents = recorded["in.latent_3"]
    assert rel(vae.decode(latents), recorded["out.decode_3"]) < LIMIT
    assert rel(vae.decode(latents, clamp=False), recorded["out.decode_3_unclamped"]) < LIMIT
    assert rel(vae.decode(latents[:, :, :1], clamp=False), recorded["out.decode_1_unclamped"]) < LIMIT


def test_latent_statistics(recorded: Golden) -> None:
    assert torch.equal(torch.tensor(WAN_LATENT_MEAN), recorded["const.mean"])
    assert torch.equal(torch.tensor(WAN_LATENT_STD), recorded["const.std"])


@pytest.mark.parametrize(("frames", "latents"), [(1, 1), (4, 1), (5, 2), (9, 3), (11, 3), (33, 9)])
def test_number_of_latents(tiny: VideoVAE, frames: int, latents: int) -> None:
    assert tiny.encode(torch.zeros(1, 3, frames, 8, 16)).shape == (1, 16, latents, 1, 2)


def test_batch_is_independent(tiny: VideoVAE) -> None:
    torch.manual_seed(1)
    video, latents = torch.randn(2, 3, 5, 16, 16), torch.randn(2, 16, 2, 2, 2)
    assert rel(tiny.encode(video)[1:], tiny.encode(video[1:])) < LIMIT
    assert rel(tiny.decode(latents)[1:], tiny.decode(latents[1:])) < LIMIT


def test_float64(recorded: Golden, vae: VideoVAE) -> None:
    double = VideoVAE(vae.config).double().requires_grad_(False)
    double.load_state_dict(vae.state_dict())
    latents = double.encode(recorded["in.video_9f"].double())
    assert latents.dtype == torch.float64
    assert 0 < rel(latents, recorded["out.encode_9f"]) < LIMIT
    assert 0 < rel(double.decode(recorded["in.latent_3"].double()), recorded["out.decode_3"]) < LIMIT


def test_bf16_follows_the_recorded_bf16_run() -> None:
    weights, inputs, outputs = (golden(f"e2e_{n}.safetensors") for n in ("weights", "inputs", "bf16_mask8"))
    vae = VideoVAE(VAEConfig.from_dict(weights.metadata["config"]["vae"])).requires_grad_(False)
    vae.load_state_dict(weights.sub("vae."))
    vae.bfloat16()
    frame = (inputs["call0.images"].float() / 255).permute(0, 4, 1, 2, 3).bfloat16()
    latent = vae.encode((frame - 0.5) / 0.5)
    expected = outputs["call0.video_pred"][:, :, :1]
    assert latent.dtype == torch.bfloat16
    assert rel(latent, expected) < 0.08
    assert torch.corrcoef(torch.stack([latent.float().flatten(), expected.flatten()]))[0, 1] > 0.999


# --- streaming


def test_streamed_features_and_latents(recorded: Golden, vae: VideoVAE) -> None:
    features, latents = VAEStream(), VAEStream()
    for i, chunk in enumerate(chunks_of(recorded["in.video_long"])):
        with features.chunk():
            feature = vae.model.encoder(chunk, features)
        assert rel(feature, recorded[f"stream.encoder_out_chunk{i}"]) < LIMIT
        log_variance = vae.model.conv1(feature, features)[:, 16:]
        assert rel(log_variance, recorded[f"stream.logvar_unused_chunk{i}"]) < LIMIT
        assert rel(vae.encode_chunk(latents, chunk), recorded[f"stream.latent_chunk{i}"]) < LIMIT


def test_streaming_gives_the_bits_of_the_whole_clip(recorded: Golden, vae: VideoVAE) -> None:
    stream, video = VAEStream(), recorded["in.video_long"]
    latents = torch.cat([vae.encode_chunk(stream, chunk) for chunk in chunks_of(video)], dim=2)
    assert torch.equal(latents, vae.encode(video))
    stream = VAEStream()
    frames = torch.cat([vae.decode_chunk(stream, latent) for latent in latents.split(1, dim=2)], dim=2)
    assert torch.equal(frames, vae.decode(latents, clamp=False))


def test_longer_chunks_give_the_same_latents(recorded: Golden, vae: VideoVAE) -> None:
    stream, video = VAEStream(), recorded["in.video_long"]
    latents = torch.cat([vae.encode_chunk(stream, part) for part in video.split([1, 8, 8], dim=2)], dim=2)
    assert rel(latents, recorded["out.encode_long"]) < LIMIT
    stream, latents = VAEStream(), recorded["in.latent_3"]
    frames = torch.cat([vae.decode_chunk(stream, part) for part in latents.split([1, 2], dim=2)], dim=2)
    assert rel(frames, recorded["out.decode_3_unclamped"]) < LIMIT


def test_what_the_encoder_remembers(recorded: Golden, vae: VideoVAE) -> None:
    """One entry per convolution over time, in order of use; the temporal downsamplings keep one frame, the rest two."""
    stream, video = VAEStream(), recorded["in.video_9f"]
    vae.encode_chunk(stream, video[:, :, :1])
    remembered = [f for f in stream.frames if f is not None]
    assert [f.shape[2] for f in remembered] == [1] * 24
    assert torch.equal(remembered[0], video[:, :, :1])
    vae.encode_chunk(stream, video[:, :, 1:5])
    remembered = [f for f in stream.frames if f is not None]
    assert [f.shape[2] for f in remembered] == [1 if i in (9, 14) else 2 for i in range(24)]
    assert torch.equal(remembered[0], video[:, :, 3:5])
    channels = [3, *[8] * 5, *[16] * 4, 16, *[32] * 13]
    assert [f.shape[1] for f in remembered] == channels
    widths = [*[48] * 5, *[24] * 4, *[12] * 5, *[6] * 10]
    assert [f.shape[4] for f in remembered] == widths
    assert all(f.untyped_storage().nbytes() == f.nbytes for f in remembered), "an entry keeps a whole activation alive"


def test_a_chunk_of_one_frame_carries_the_older_frame_along(tiny: VideoVAE) -> None:
    torch.manual_seed(2)
    stream, latents = VAEStream(), torch.randn(1, 16, 2, 2, 2)
    tiny.decode_chunk(stream, latents[:, :, :1])
    first = stream.frames[0]
    assert first is not None and first.shape[2] == 1
    tiny.decode_chunk(stream, latents[:, :, 1:])
    both = stream.frames[0]
    assert both is not None and both.shape[2] == 2
    assert torch.equal(both[:, :, :1], first)


def test_interleaved_streams_do_not_mix(recorded: Golden, vae: VideoVAE) -> None:
    a, b = recorded["in.video_9f"], recorded["in.video_long"][:, :, :9].flip(2)
    streams, latents = (VAEStream(), VAEStream()), ([], [])  # type: tuple[VAEStream, VAEStream], tuple[list, list]
    for pair in zip(chunks_of(a), chunks_of(b), strict=True):
        for stream, out, chunk in zip(streams, latents, pair, strict=True):
            out.append(vae.encode_chunk(stream, chunk))
    assert torch.equal(torch.cat(latents[0], dim=2), vae.encode(a))
    assert torch.equal(torch.cat(latents[1], dim=2), vae.encode(b))


def test_a_chunk_that_raised_can_be_sent_again(
    recorded: Golden, vae: VideoVAE, monkeypatch: pytest.MonkeyPatch
) -> None:
    video, stream = recorded["in.video_9f"], VAEStream()
    first, second, third = chunks_of(video)
    latents = [vae.encode_chunk(stream, first), vae.encode_chunk(stream, second)]
    with monkeypatch.context() as m:
        m.setattr(vae.model.encoder.head, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            vae.encode_chunk(stream, third)
    latents.append(vae.encode_chunk(stream, third))
    assert torch.equal(torch.cat(latents, dim=2), vae.encode(video))


def test_chunks_that_do_not_continue_the_clip_are_refused(tiny: VideoVAE) -> None:
    stream = VAEStream()
    with pytest.raises(ShapeError, match="first chunk of a stream has 4 frames"):
        tiny.encode_chunk(stream, torch.zeros(1, 3, 4, 16, 16))
    with pytest.raises(ShapeError, match="first chunk of a stream has 2 latents"):
        tiny.decode_chunk(stream, torch.zeros(1, 16, 2, 2, 2))
    tiny.encode_chunk(stream, torch.zeros(1, 3, 1, 16, 16))
    with pytest.raises(ShapeError, match="has 3 frames, expected a multiple of 4"):
        tiny.encode_chunk(stream, torch.zeros(1, 3, 3, 16, 16))
    with pytest.raises(ShapeError, match="one clip"):
        tiny.encode_chunk(stream, torch.zeros(1, 3, 4, 16, 24))
    with pytest.raises(ShapeError, match="one direction"):
        tiny.decode_chunk(stream, torch.zeros(1, 16, 1, 2, 2))


def test_modules_hold_no_state(recorded: Golden, vae: VideoVAE) -> None:
    before = {name: dict(m.__dict__) for name, m in vae.named_modules()}
    vae.decode(vae.encode(recorded["in.video_9f"]))
    after = {name: dict(m.__dict__) for name, m in vae.named_modules()}
    assert before == after
    assert not list(vae.buffers())


# --- tiles


def test_tiled(recorded: Golden, vae: VideoVAE) -> None:
    latents = vae.encode(recorded["in.video_tiled"], tiling=Tiling((3, 3), (2, 2)))
    assert rel(latents, recorded["out.encode_tiled_3x3_stride_2x2"]) < LIMIT
    video = vae.decode(recorded["in.latent_tiled"], tiling=Tiling((6, 6), (4, 4)))
    assert rel(video, recorded["out.decode_tiled_6x6_stride_4x4"]) < LIMIT


def test_tiles_of_the_configuration(recorded: Golden, vae: VideoVAE) -> None:
    sizes = {f"tile_{what}_{axis}": n for what, n in (("size", 3), ("stride", 2)) for axis in ("height", "width")}
    tiled = VideoVAE(VAEConfig.from_dict({"dim": 8, "tiled": True, **sizes})).requires_grad_(False)
    tiled.load_state_dict(vae.state_dict())
    assert rel(tiled.encode(recorded["in.video_tiled"]), recorded["out.encode_tiled_3x3_stride_2x2"]) < LIMIT


def test_one_tile_is_the_whole(recorded: Golden, vae: VideoVAE) -> None:
    latents = recorded["in.latent_3"]
    assert torch.equal(vae.decode(latents, tiling=Tiling((34, 34), (18, 16))), vae.decode(latents))


def test_tile_spans() -> None:
    assert list(tile_spans(4, 3, 2)) == [(0, 3), (2, 4)]
    assert list(tile_spans(12, 6, 4)) == [(0, 6), (4, 10), (8, 12)]
    assert list(tile_spans(80, 34, 16)) == [(0, 34), (16, 50), (32, 66), (48, 80)]
    assert list(tile_spans(6, 6, 4)) == [(0, 6)]


def test_edge_weight() -> None:
    assert edge_weight((0, 6), 12, 2).tolist() == [1, 1, 1, 1, 1, 0.5]
    assert edge_weight((4, 10), 12, 2).tolist() == [0.5, 1, 1, 1, 1, 0.5]
    assert edge_weight((8, 12), 12, 2).tolist() == [0.5, 1, 1, 1]
    assert edge_weight((2, 4), 6, 0).tolist() == [1, 1], "tiles side by side"


# --- the published network, and refusals


def test_published_size_and_names() -> None:
    with torch.device("meta"):
        state = VideoVAE().state_dict()
    assert len(state) == 194
    assert sum(t.numel() for t in state.values()) == 126_892_531
    shapes = {n: tuple(t.shape) for n, t in state.items()}
    for name, shape in {
        "model.encoder.conv1.weight": (96, 3, 3, 3, 3),
        "model.encoder.downsamples.2.resample.1.weight": (96, 96, 3, 3),
        "model.encoder.downsamples.3.shortcut.weight": (192, 96, 1, 1, 1),
        "model.encoder.downsamples.5.time_conv.weight": (192, 192, 3, 1, 1),
        "model.encoder.downsamples.8.resample.1.bias": (384,),
        "model.encoder.downsamples.10.residual.6.weight": (384, 384, 3, 3, 3),
        "model.encoder.middle.1.to_qkv.weight": (1152, 384, 1, 1),
        "model.encoder.middle.1.norm.gamma": (384, 1, 1),
        "model.encoder.head.2.weight": (32, 384, 3, 3, 3),
        "model.conv1.weight": (32, 32, 1, 1, 1),
        "model.conv2.weight": (16, 16, 1, 1, 1),
        "model.decoder.conv1.weight": (384, 16, 3, 3, 3),
        "model.decoder.upsamples.3.time_conv.weight": (768, 384, 3, 1, 1),
        "model.decoder.upsamples.3.resample.1.weight": (192, 384, 3, 3),
        "model.decoder.upsamples.4.shortcut.weight": (384, 192, 1, 1, 1),
        "model.decoder.upsamples.7.time_conv.bias": (768,),
        "model.decoder.upsamples.8.residual.0.gamma": (192, 1, 1, 1),
        "model.decoder.upsamples.11.resample.1.weight": (96, 192, 3, 3),
        "model.decoder.upsamples.14.residual.3.gamma": (96, 1, 1, 1),
        "model.decoder.head.2.weight": (3, 96, 3, 3, 3),
    }.items():
        assert shapes[name] == shape, name


def test_wrong_shapes_are_refused(tiny: VideoVAE) -> None:
    for shape in ((1, 3, 16, 16), (1, 4, 1, 16, 16), (1, 3, 1, 16, 20), (1, 3, 0, 16, 16)):
        with pytest.raises(ShapeError, match="video for the VAE"):
            tiny.encode(torch.zeros(shape))
    for shape in ((16, 1, 2, 2), (1, 8, 1, 2, 2), (1, 16, 0, 2, 2)):
        with pytest.raises(ShapeError, match="latents for the VAE"):
            tiny.decode(torch.zeros(shape))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attn_scales": [1.0]}, "attn_scales is"),
        ({"temperal_downsample": [True]}, "temporal_downsample has 1 entries"),
        ({"temperal_downsample": [0, 1, 1]}, "expected a bool"),
        ({"temporal_downsample": [False, True, True], "temperal_downsample": [False, True, True]}, "given twice"),
        ({"dim_mult": 4}, "dim_mult is 4, expected a list"),
        ({"dim": 3, "dim_mult": [1, 1, 2, 2]}, "odd"),
        ({"z_dim": 48}, "latent_mean has 16 entries"),
        ({"tile_stride_height": 40}, "tile_stride_height is 40, expected at most"),
        ({"tiled": 1}, "tiled is 1, expected a bool"),
        ({"width": 4}, "unknown key 'width'"),
    ],
)
def test_wrong_configuration_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        VAEConfig.from_dict(values)


def test_tiles_must_overlap_or_touch() -> None:
    with pytest.raises(ModelConfigError, match="stride"):
        Tiling((3, 3), (2, 4))
