"""The training forward is the inference path, computed at once."""

from __future__ import annotations

import pytest
import torch

from wam_policy_ros.contract.interface import ResetReason
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.encode import FirstFrame, Prompt
from wam_policy_ros.engine.plain_path import PlainPath
from wam_policy_ros.engine.sampler import conditioning_slice, evaluate
from wam_policy_ros.engine.session import WindowState
from wam_policy_ros.model.attention import CrossKV
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.train.forward import window_forward
from wam_policy_ros.train.preset import TOY

BATCH = 2


def _inputs(network: DreamZero, seed: int = 0) -> dict[str, torch.Tensor]:
    cfg, generator = network.config.dit, torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    h, w, k = 2 * TOY.view_height // 8, 2 * TOY.view_width // 8, cfg.max_chunk_size
    return {
        "observed": draw(BATCH, 16, 1 + 2 * (k - 1), h, w),
        "ys": draw(BATCH, 20, network.config.latent_frames, h, w),
        "text": draw(BATCH, cfg.text_len, cfg.text_dim),
        "clip": draw(BATCH, network.config.image.num_tokens, cfg.clip_dim),
        "video": draw(BATCH, k, 16, 2, h, w),
        "action": draw(BATCH, k, cfg.num_action_per_block, cfg.action_dim),
        "state": draw(BATCH, k, 1, cfg.max_state_dim),
        "timestep": torch.randint(0, 1000, (BATCH, k), generator=generator),
    }


def _trained(network: DreamZero, x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    dit = network.model
    cross = [CrossKV(t, i) for t, i in zip(dit.text_kv(x["text"]), dit.image_kv(x["clip"]), strict=True)]
    args = (x[n] for n in ("video", "action", "state", "timestep"))
    flows = window_forward(dit, x["observed"], x["ys"], cross, *args)
    return flows.video, flows.action


def _inferred(
    network: DreamZero, x: dict[str, torch.Tensor], row: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Call by call through the engine's plain path: prefill what was observed, then one evaluation per block."""
    path, dit, frames = PlainPath(network, EngineConfig(guidance_scale=1.0)), network.model, 2
    one = {n: t[row : row + 1] for n, t in x.items()}
    observed, ys = one["observed"], one["ys"]
    ids = torch.zeros(1, dit.cfg.text_len, dtype=torch.int64)
    prompt = Prompt(ids, one["text"], dit.text_kv(one["text"]))
    first = FirstFrame(one["clip"], ys, observed[:, :, :1])
    state = path.restarted(WindowState(), first, prompt, None, ResetReason.FIRST_CALL)
    videos, actions = [], []
    for k in range(dit.cfg.max_chunk_size):
        at = max(0, 1 + frames * (k - 1))
        start = 1 + frames * k
        state = path.prefill(state.forked(), observed[:, :, at:start], at, None)
        prompt_kv, window = state.branches()[0]
        t = int(one["timestep"][0, k])
        table = dit.rotary_table(start, frames, *observed.shape[-2:], registers=True)
        (out,) = evaluate(
            network, [(state.cross(prompt_kv), window.past())], one["video"][:, k].transpose(1, 2), one["action"][:, k],
            conditioning_slice(ys, start, frames), table, one["state"][:, k], t, t,
        )  # fmt: skip
        assert out.action is not None
        videos.append(out.video[0])
        actions.append(out.action[0])
    return videos, actions


@torch.no_grad()
def test_every_block_of_a_window_is_what_inference_computes():
    network = DreamZero.with_random_weights(TOY.network())
    x = _inputs(network)
    video, action = _trained(network, x)
    assert video.abs().mean() > 0.05 and action.abs().mean() > 0.05
    for row in range(BATCH):
        videos, actions = _inferred(network, x, row)
        for k in range(len(videos)):
            torch.testing.assert_close(video[row, k], videos[k], atol=2e-5, rtol=2e-4)
            torch.testing.assert_close(action[row, k], actions[k], atol=2e-5, rtol=2e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "where", "unmoved", "moved"),
    [
        # an observed frame moves the blocks after it, none before
        ("observed", (slice(None), slice(None), slice(3, 5)), [0, 1], [2, 3]),
        ("video", (slice(None), 1), [0, 2, 3], [1]),
        ("action", (slice(None), 2), [0, 1, 3], [2]),
        ("state", (slice(None), 0), [1, 2, 3], [0]),
        ("timestep", (slice(None), 3), [0, 1, 2], [3]),
    ],
)
def test_a_block_sees_the_past_and_itself_only(name, where, unmoved, moved):
    network = DreamZero.with_random_weights(TOY.network())
    x = _inputs(network)
    before = _trained(network, x)
    changed = x[name].clone()
    changed[where] = changed[where] + 1 if name != "timestep" else (changed[where] + 400) % 1000
    after = _trained(network, {**x, name: changed})
    for a, b in zip(before, after, strict=True):
        assert all(torch.equal(a[:, k], b[:, k]) for k in unmoved)
        assert all((a[:, k] - b[:, k]).abs().max() > 1e-4 for k in moved)
