"""The fast encoder against the plain one: same latents, pieces with the bits of the whole, frames ahead of time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from test.golden_files import golden, rel
from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.engine.conv_plan import FORMS, ConvPlan, Form
from wam_policy_ros.engine.encode import encode_first_frame, expand_observation
from wam_policy_ros.engine.fast_encode import FastFirstFrame
from wam_policy_ros.engine.fast_vae import FastVAE, conv_keys
from wam_policy_ros.engine.kernels import conv3d_ops
from wam_policy_ros.engine.observe_ahead import ObserveAhead
from wam_policy_ros.model.config import DreamZeroConfig
from wam_policy_ros.model.config_encoders import VAEConfig
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.model.errors import ShapeError
from wam_policy_ros.model.vae import VideoVAE


@pytest.fixture(scope="module")
def vae() -> VideoVAE:
    """Float64, so that a difference in rounding cannot hide a difference in arithmetic."""
    torch.manual_seed(0)
    out = VideoVAE(VAEConfig(dim=4)).double().requires_grad_(False)
    state = {
        name: torch.randn_like(p) * (0.1 if p.ndim == 1 else p[0].numel() ** -0.5) + ("gamma" in name)
        for name, p in out.state_dict().items()
    }
    out.load_state_dict(state)
    return out


@pytest.fixture(scope="module")
def clip() -> Tensor:
    torch.manual_seed(1)
    return torch.rand(1, 3, 9, 16, 24).double() * 2 - 1


def as_dtype(vae: VideoVAE, dtype: torch.dtype) -> VideoVAE:
    out = VideoVAE(vae.config).requires_grad_(False)
    out.load_state_dict(vae.state_dict())
    return out.to(dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pieces", [2, 4, 6, None])
@pytest.mark.parametrize("stepwise", [True, False])
def test_latents_are_those_of_the_plain_encoder(
    vae: VideoVAE, clip: Tensor, form: Form, pieces: int | None, stepwise: bool
) -> None:
    fast = FastVAE(vae, plan=ConvPlan(default=form), pieces=pieces)
    for frames in (1, 5, 9):
        assert rel(fast.encode(clip[:, :, :frames], stepwise=stepwise), vae.encode(clip[:, :, :frames])) < 1e-12


def test_batches_and_dropped_frames(vae: VideoVAE, clip: Tensor) -> None:
    fast = FastVAE(vae)
    two = torch.cat([clip, clip.flip(2)])
    assert rel(fast.encode(two), vae.encode(two)) < 1e-12
    assert rel(fast.encode(clip[:, :, :8]), vae.encode(clip[:, :, :8])) < 1e-12


def test_recorded_latents() -> None:
    recorded = golden("vae_io.safetensors")
    plain = VideoVAE(VAEConfig.from_dict(recorded.metadata["config"])).requires_grad_(False)
    plain.load_state_dict(golden("vae_weights_enc.safetensors") | golden("vae_weights_dec.safetensors"))
    fast = FastVAE(plain)
    for name in ("1f", "9f", "long"):
        assert rel(fast.encode(recorded[f"in.video_{name}"]), recorded[f"out.encode_{name}"]) < 5e-5
    conditioning = fast.encode_conditioning(recorded["in.video_1f"], 9)
    assert rel(conditioning, recorded["out.encode_1f_plus_8_zero_frames"]) < 5e-5


@pytest.mark.parametrize("stepwise", [True, False])
def test_bf16_rounds_where_the_plain_encoder_rounds(vae: VideoVAE, clip: Tensor, stepwise: bool) -> None:
    """Against float64, the fast encoder in bf16 is no worse than the plain one in bf16."""
    half = as_dtype(vae, torch.bfloat16)
    exact = vae.encode(clip.bfloat16().double())
    with torch.autocast("cpu", torch.bfloat16, enabled=not stepwise):
        plain = half.encode(clip.bfloat16())

    def error(latents: Tensor) -> float:
        return float((latents.double() - exact).norm() / exact.norm())

    fast = FastVAE(half).encode(clip.bfloat16(), stepwise=stepwise)
    assert fast.dtype == torch.bfloat16
    assert 1e-3 < error(fast) < 1.25 * error(plain)


def test_norm_in_steps_has_the_bits_of_the_plain_norm(vae: VideoVAE) -> None:
    half = as_dtype(vae, torch.bfloat16)
    norm = half.model.encoder.downsamples[0].residual[0]
    x = torch.randn(1, 2, 5, 7, norm.gamma.numel()).bfloat16()
    plain = norm(x.permute(0, 4, 1, 2, 3)).permute(0, 2, 3, 4, 1)
    gamma = norm.gamma.flatten()
    assert torch.equal(conv3d_ops.rms_norm(x, gamma, stepwise=True), plain)
    assert not torch.equal(conv3d_ops.rms_norm(x, gamma, stepwise=False), plain)


# --- repeated frames


@pytest.mark.parametrize("num_frames", [5, 9, 33, 41])
def test_grey_frames_are_computed_once(vae: VideoVAE, clip: Tensor, num_frames: int) -> None:
    frame = clip[:, :, :1]
    whole = torch.cat([frame, frame.new_zeros(1, 3, num_frames - 1, *frame.shape[3:])], dim=2)
    assert rel(FastVAE(vae).encode_conditioning(frame, num_frames), vae.encode(whole)) < 1e-12


def test_how_much_repetition_saves(vae: VideoVAE, clip: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames per convolution of the 33-frame clip behind its first frame, at the full rate, half and a quarter."""
    seen: list[int] = []
    original = conv3d_ops.norm_silu_window

    def counting(*args, **kwargs):
        seen.append(kwargs["frames"])
        return original(*args, **kwargs)

    monkeypatch.setattr("wam_policy_ros.engine.fast_vae.norm_silu_window", counting)
    FastVAE(vae).encode_conditioning(clip[:, :, :1], 33)
    assert seen == [1] * 21 + [5, 7, 9, 11, 13, 15, 17, 19, 13, 15, 16, 16] + [8] * 9


def test_conditioning_clips_that_fill_no_latent_are_refused(vae: VideoVAE, clip: Tensor) -> None:
    for frames in (1, 4, 8):
        with pytest.raises(ShapeError, match="conditioning clip"):
            FastVAE(vae).encode_conditioning(clip[:, :, :1], frames)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_frame_of_a_window(dtype: torch.dtype) -> None:
    network = DreamZero.with_random_weights(DreamZeroConfig.tiny(), dtype=dtype)
    frame = (torch.rand(1, 3, 1, 32, 32) * 2 - 1).to(dtype)
    plain, fast = encode_first_frame(network, frame), FastFirstFrame(network, FastVAE(network.vae))(frame)
    limit = 1e-4 if dtype == torch.float32 else 0.1
    assert torch.equal(fast.clip_features, plain.clip_features)
    assert torch.equal(fast.ys[:, :4], plain.ys[:, :4])
    assert rel(fast.ys, plain.ys) < limit
    assert rel(fast.latent, plain.latent) < limit
    assert fast.ys.dtype == plain.ys.dtype


# --- pieces


def test_pieces_give_the_bits_of_the_whole(vae: VideoVAE, clip: Tensor) -> None:
    fast = FastVAE(as_dtype(vae, torch.float32), pieces=2)
    clip = clip.float()
    state, latent = fast.begin(clip[:, :, :1])
    latents = [latent]
    for t in range(1, 9, 2):
        state, more = fast.push(state.compact(), clip[:, :, t : t + 2])
        assert (more is None) == (t % 4 == 1), "two frames are half a latent"
        latents += [] if more is None else [more]
    assert state.frames == 9
    assert torch.equal(torch.cat(latents, dim=2), fast.encode(clip))


def test_a_state_can_be_continued_twice(vae: VideoVAE, clip: Tensor) -> None:
    fast = FastVAE(vae)
    state, _ = fast.begin(clip[:, :, :1])
    before = [t.clone() for t in state.memory]
    first = fast.push(state, clip[:, :, 1:5])[1]
    fast.push(state, clip[:, :, 5:9])
    assert first is not None
    assert torch.equal(fast.push(state, clip[:, :, 1:5])[1], first)
    assert all(torch.equal(a, b) for a, b in zip(before, state.memory, strict=True))


def test_a_compact_state_holds_nothing_else(vae: VideoVAE, clip: Tensor) -> None:
    fast = FastVAE(vae, plan=ConvPlan(default="stacked"))
    state = fast.push(fast.begin(clip[:, :, :1])[0], clip[:, :, 1:3])[0]
    compact = state.compact()
    assert compact.nbytes == sum(t.nbytes for t in state.memory) < state.nbytes / 2


def test_wrong_shapes_are_refused(vae: VideoVAE, clip: Tensor) -> None:
    fast = FastVAE(vae)
    for shape in ((1, 3, 2, 16, 16), (1, 4, 1, 16, 16), (1, 3, 1, 16, 20), (3, 1, 16, 16)):
        with pytest.raises(ShapeError, match="frames for the VAE"):
            fast.begin(torch.zeros(shape).double())
    state, _ = fast.begin(clip[:, :, :1])
    with pytest.raises(ShapeError, match="an even number"):
        fast.push(state, clip[:, :, 1:4])
    with pytest.raises(ShapeError, match="frames before this chunk"):
        fast.push(state, clip[:, :, 1:3, :8].repeat(1, 1, 1, 3, 1))


def test_shapes_of_the_published_encoder() -> None:
    with torch.device("meta"):
        keys = conv_keys(VideoVAE())
    assert [str(k) for k in keys] == [
        *("96->96 at 1/1", "96->192 at 1/2", "192->192 at 1/2", "192->384 at 1/4", "384->384 at 1/4"),
        *("384->384 at 1/8", "384->32 at 1/8"),
    ]


# --- frames ahead of the call


def views(seed: int, count: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 256, (count, 16, 24, 3), dtype=np.uint8) for name in ("left", "right")}


def to_video(frames: dict[str, np.ndarray]) -> Tensor:
    """Both cameras side by side."""
    both = np.concatenate([frames["left"], frames["right"]], axis=2)
    return (torch.from_numpy(both).float() / 127.5 - 1).permute(3, 0, 1, 2)[None].contiguous()


class CountingVAE(FastVAE):
    pushed = 0

    def push(self, state, frames, **kwargs):
        self.pushed += frames.shape[2]
        return super().push(state, frames, **kwargs)


@pytest.mark.parametrize("pieces", [2, 4, None])
@pytest.mark.parametrize("known", [0, 1, 2, 3, 4])
def test_frames_encoded_ahead_give_the_bits_of_the_whole_clip(vae: VideoVAE, pieces: int | None, known: int) -> None:
    fast = CountingVAE(as_dtype(vae, torch.float32), pieces=pieces)
    ahead = ObserveAhead(fast, to_video)
    drawn = views(5, 4)
    expected = fast.encode(expand_observation(to_video(drawn), 2))[:, :, -2:]
    for slot in range(known):
        assert ahead.offer(slot, {name: v[slot] for name, v in drawn.items()})
    before = fast.pushed
    assert torch.equal(ahead.latents(drawn), expected)
    unit = pieces or 8
    assert fast.pushed - before == 8 - known * 2 // unit * unit
    assert (ahead.hits, ahead.misses, ahead.offered, ahead.nbytes) == (int(known > 0), 0, 0, 0)


def test_other_frames_than_those_offered_are_encoded_anew(vae: VideoVAE) -> None:
    fast = FastVAE(as_dtype(vae, torch.float32))
    ahead = ObserveAhead(fast, to_video)
    drawn = views(6, 4)
    expected = fast.encode(expand_observation(to_video(drawn), 2))[:, :, -2:]
    for slot in range(3):
        offered = {name: v[slot : slot + 1].copy() for name, v in drawn.items()}
        if slot == 1:
            offered["right"][0, 15, 23, 2] ^= 1
        ahead.offer(slot, offered)
    assert torch.equal(ahead.latents(drawn), expected)
    assert (ahead.hits, ahead.misses) == (0, 1)


def test_offers_out_of_turn_do_nothing(vae: VideoVAE) -> None:
    ahead = ObserveAhead(FastVAE(as_dtype(vae, torch.float32)), to_video)
    assert not ahead.offer(1, views(0))
    assert ahead.offer(0, views(0)) and ahead.offer(1, views(1))
    assert not ahead.offer(3, views(3))
    assert ahead.offered == 2
    assert ahead.offer(0, views(4)) and ahead.offered == 1, "slot 0 starts anew"


def test_offered_arrays_may_be_used_again(vae: VideoVAE) -> None:
    fast = FastVAE(as_dtype(vae, torch.float32))
    ahead = ObserveAhead(fast, to_video)
    drawn = views(7, 4)
    buffer = {name: v[:1].copy() for name, v in drawn.items()}
    ahead.offer(0, buffer)
    for v in buffer.values():
        v[:] = 0
    ahead.latents(drawn)
    assert ahead.hits == 1


def test_other_numbers_of_frames_take_the_plain_way(vae: VideoVAE) -> None:
    fast = FastVAE(as_dtype(vae, torch.float32))
    drawn = views(8, 9)
    expected = fast.encode(to_video(drawn))[:, :, -2:]
    assert torch.equal(ObserveAhead(fast, to_video).latents(drawn), expected)
    with pytest.raises(ConfigError, match="no clip to encode ahead"):
        ObserveAhead(fast, to_video, num_frames=8)
