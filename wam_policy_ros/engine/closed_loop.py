"""One closed-loop call on tensors: window decision, encoding, prefill, denoising (DreamZero spec 3.3).

This is the published algorithm without a robot around it: the policy wraps it, ``wam golden`` compares it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wam_policy_ros.contract.interface import ResetReason
from wam_policy_ros.model.dreamzero import DreamZero

from .config import EngineConfig
from .encode import Prompt, PromptEncoder, encode_first_frame, expand_observation
from .kv_cache import KVWindow
from .preprocess import to_model_video
from .sampler import Noise, Probe, denoise, draw_noise, prefill
from .session import WindowState, reset_reason
from .timing import StageTimer


@dataclass(frozen=True)
class StepInputs:
    """Tensors of one call.

    Attributes:
        images: mosaic, uint8 ``[B, T, H, W, 3]``.
        ids, mask, negative_ids, negative_mask: int64 ``[B, text_len]``.
        proprio: normalised, zero-padded state ``[B, 1, max_state_dim]``.
    """

    images: Tensor
    ids: Tensor
    mask: Tensor
    negative_ids: Tensor
    negative_mask: Tensor
    proprio: Tensor


@dataclass(frozen=True)
class StepResult:
    """What a call gives.

    Attributes:
        state: the memory to keep if the caller accepts the result.
        action: normalised rows ``[B, N, action_dim]``.
        video: predicted latents ``[B, z, F, h, w]``; on a restarted window the clean first-frame latent comes first.
        context: latent of the newest observed frame ``[B, z, 1, h, w]``, the context for decoding ``video``.
        reset: why the window was restarted, or None.
        evaluated: solver steps that evaluated the network.
    """

    state: WindowState
    action: Tensor
    video: Tensor
    context: Tensor
    reset: ResetReason | None
    evaluated: list[int]


@torch.inference_mode()
def closed_loop_step(
    network: DreamZero,
    config: EngineConfig,
    state: WindowState,
    inputs: StepInputs,
    prompts: PromptEncoder,
    *,
    noise: Noise | None = None,
    cancelled: Callable[[], bool] | None = None,
    probe: Probe | None = None,
    timer: StageTimer | None = None,
) -> StepResult:
    """Run one call. ``state`` is not changed; the new memory is in the result.

    Args:
        noise: injected starting noise; drawn from ``config.seed`` on the device when None.
        probe: called with a name and a tensor at every recorded point (for comparisons).

    Raises:
        Cancelled: between two evaluations.
        ValueError: a number of frames the algorithm does not define.
    """
    cfg = network.config
    block = cfg.dit.num_frame_per_block
    timer = timer or StageTimer(network.device)
    frames = inputs.images.shape[1]
    with timer.stage("text"):
        prompt = prompts(inputs.ids, inputs.mask)
        negative = prompts(inputs.negative_ids, inputs.negative_mask)
    _report(probe, prompt_emb0=prompt.embedding, prompt_emb1=negative.embedding)

    guided = config.guidance_scale != 1.0
    reason = reset_reason(state, inputs.ids, frames, cfg.dit.local_attn_size)
    if reason is None and (state.uncond is not None) != guided:
        reason = ResetReason.FIRST_CALL
    video = to_model_video(inputs.images.to(network.device), network.dtype, cfg.target_video_hw)
    if reason is None:
        # The ids are those of the last call; the mask need not be.
        draft = replace(state.forked(), prompt=prompt, negative=negative if guided else None)
        with timer.stage("vae_encode"):
            latents = _observe(network, video, probe)
        start = state.current_start_frame - block
    else:
        with timer.stage("first_frame"):
            draft, latents = _restart(network, state, video, prompt, negative if guided else None, reason, probe)
        start = 0

    with timer.stage("prefill"):
        prefill(network, draft, latents, start, probe)
    if reason is not None:
        draft = replace(draft, current_start_frame=1)
    if noise is None:
        batch, z, _, height, width = latents.shape
        action_shape = (batch, cfg.action_horizon, cfg.dit.action_dim)
        noise = draw_noise(config.seed, (batch, z, block, height, width), action_shape, network)
    with timer.stage("denoise"):
        predicted, action, evaluated = denoise(
            network, config, draft, noise, inputs.proprio, cancelled=cancelled, probe=probe
        )
    result = torch.cat([latents, predicted], dim=2) if reason is not None else predicted
    new_state = replace(draft, current_start_frame=draft.current_start_frame + block)
    return StepResult(new_state, action, result, latents[:, :, -1:], reason, evaluated)


def _observe(network: DreamZero, video: Tensor, probe: Probe | None) -> Tensor:
    """Latents of the observed block ``[B, z, block, h, w]``; the VAE starts afresh in every call (spec 3.3 d)."""
    block = network.config.dit.num_frame_per_block
    clip = expand_observation(video, block)
    encoded = network.vae.encode(clip)
    _report(probe, **{"vae_encode0.in_frames": torch.tensor(clip.shape[2]), "vae_encode0.out": encoded})
    return encoded[:, :, -block:]


def _restart(
    network: DreamZero,
    state: WindowState,
    video: Tensor,
    prompt: Prompt,
    negative: Prompt | None,
    reason: ResetReason,
    probe: Probe | None,
) -> tuple[WindowState, Tensor]:
    """An empty window conditioned on one frame, and the latent of that frame ``[B, z, 1, h, w]``."""
    # With 4 (or 9) frames the window restarts from the newest, otherwise from the first (spec 3.3 b).
    frames = video.shape[2]
    pick = frames - 1 if frames in (4, 9) else 0
    first = encode_first_frame(network, video[:, :, pick : pick + 1])
    _report(
        probe,
        **{
            "vae_encode0.in_frames": torch.tensor(network.config.num_frames),
            "vae_encode0.out": first.ys[:, 4:],
            "ys": first.ys,
            "clip_feas": first.clip_features,
        },
    )
    draft = WindowState(
        current_start_frame=0,
        prompt=prompt,
        negative=negative,
        clip_features=first.clip_features,
        ys=first.ys,
        image_kv=network.model.image_kv(first.clip_features),
        cond=_fresh_window(network, state.cond, reason),
        uncond=_fresh_window(network, state.uncond, reason) if negative is not None else None,
    )
    return draft, first.latent


def _report(probe: Probe | None, **values: Tensor) -> None:
    if probe is not None:
        for name, value in values.items():
            probe(name, value)


def _fresh_window(network: DreamZero, old: KVWindow | None, reason: ResetReason) -> KVWindow:
    """An empty window. Buffers are reused only where the old contents can never be needed again: a full window restarts
    whatever happens to this call, the others must survive a cancelled step."""
    if old is not None and reason is ResetReason.WINDOW_FULL:
        return old.emptied()
    dit = network.config.dit
    # The block being denoised is never stored, so the cache holds one block less than the attention window.
    return KVWindow((dit.local_attn_size - dit.num_frame_per_block) * dit.frame_seqlen)
