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

from .asking import ask
from .config import EngineConfig
from .encode import FirstFrame, expand_observation
from .inpaint import Committed
from .preprocess import to_model_video
from .sampler import Noise, Probe
from .session import WindowState, reset_reason
from .step_path import StepPath
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
        video: predicted latents ``[B, z, F, h, w]``, None unless wanted; on a restarted window the clean first-frame
            latent comes first.
        context: latent of the newest observed frame ``[B, z, 1, h, w]``, the context for decoding ``video``.
        reset: why the window was restarted, or None.
        evaluated: solver steps that evaluated the network.
    """

    state: WindowState
    action: Tensor
    video: Tensor | None
    context: Tensor
    reset: ResetReason | None
    evaluated: list[int]


@torch.inference_mode()
def closed_loop_step(
    network: DreamZero,
    config: EngineConfig,
    state: WindowState,
    inputs: StepInputs,
    path: StepPath,
    *,
    noise: Noise | None = None,
    want_video: bool = True,
    committed: Committed | None = None,
    observed: Callable[[], Tensor] | None = None,
    cancelled: Callable[[], bool] | None = None,
    probe: Probe | None = None,
    timer: StageTimer | None = None,
) -> StepResult:
    """Run one call. What ``state`` sees is not changed; the new memory is in the result.

    The caller keeps one of the two, and gives the other one to ``path.let_go``; after an exception that has been done.

    Args:
        path: how to run the network.
        noise: injected starting noise; drawn from ``config.seed`` on the device when None.
        want_video: the predicted video is wanted; without, the result's ``video`` is None.
        committed: rows the action has to agree with.
        observed: gives the latents of the observed block ``[1, z, block, h, w]`` when the window goes on, for callers
            that encode frames as they arrive; None: the clip is encoded here.
        probe: called with a name and a tensor at every recorded point (for comparisons).

    Raises:
        Cancelled: while an instruction is encoded, before the prefill, or before an evaluation.
        ValueError: a number of frames the algorithm does not define.
    """
    cfg = network.config
    block = cfg.dit.num_frame_per_block
    timer = timer or StageTimer(network.device)
    frames = inputs.images.shape[1]

    def between() -> None:
        ask(cancelled, network.device, "step cancelled while its instruction was encoded")

    with timer.stage("text"):
        prompt = path.prompts(inputs.ids, inputs.mask, between if cancelled else None)
        negative = path.prompts(inputs.negative_ids, inputs.negative_mask, between if cancelled else None)
    _report(probe, prompt_emb0=prompt.embedding, prompt_emb1=negative.embedding)

    guided = config.guidance_scale != 1.0
    reason = reset_reason(state, inputs.ids, frames, cfg.dit.local_attn_size)
    if reason is None and state.guided != guided:
        reason = ResetReason.FIRST_CALL
    if reason is None and observed is not None:
        with timer.stage("vae_encode"):
            latents = observed()
    else:
        video = to_model_video(inputs.images.to(network.device), network.dtype, cfg.target_video_hw)
    if reason is None:
        if observed is None:
            with timer.stage("vae_encode"):
                latents = _observe(path, video, block, probe)
        draft, start = path.continued(state, prompt, negative if guided else None), state.current_start_frame - block
    else:
        with timer.stage("first_frame"):
            first = _first_frame(network, path, video, probe)
            draft, latents = path.restarted(state, first, prompt, negative if guided else None, reason), first.latent
        start = 0
    try:
        # What was launched since the encoders keeps the device busy while the host waits for them.
        ask(cancelled, network.device, "step cancelled after encoding")
        with timer.stage("prefill"):
            draft = path.prefill(draft, latents, start, probe)
        if reason is not None:
            draft = replace(draft, current_start_frame=1)
        if noise is None:
            noise = path.draw_noise(config.seed, latents)
        _report(probe, **{"noise.video": noise.video, "noise.action": noise.action})
        with timer.stage("denoise"):
            out = path.denoise(
                draft,
                noise,
                inputs.proprio,
                want_video=want_video,
                committed=committed,
                cancelled=cancelled,
                probe=probe,
            )
    except BaseException:
        path.let_go(draft, state)
        raise
    predicted = out.video
    if predicted is not None and reason is not None:
        predicted = torch.cat([latents, predicted], dim=2)
    new_state = replace(draft, current_start_frame=draft.current_start_frame + block)
    return StepResult(new_state, out.action, predicted, latents[:, :, -1:], reason, out.evaluated)


def _observe(path: StepPath, video: Tensor, block: int, probe: Probe | None) -> Tensor:
    """Latents of the observed block ``[B, z, block, h, w]``; the VAE starts afresh in every call (spec 3.3 d)."""
    clip = expand_observation(video, block)
    encoded = path.encode_clip(clip)
    _report(probe, **{"vae_encode0.in_frames": torch.tensor(clip.shape[2]), "vae_encode0.out": encoded})
    return encoded[:, :, -block:]


def _first_frame(network: DreamZero, path: StepPath, video: Tensor, probe: Probe | None) -> FirstFrame:
    """Conditioning of a window that starts with this call."""
    # With 4 (or 9) frames the window restarts from the newest, otherwise from the first (spec 3.3 b).
    frames = video.shape[2]
    pick = frames - 1 if frames in (4, 9) else 0
    first = path.encode_first(video[:, :, pick : pick + 1])
    _report(
        probe,
        **{
            "clip_feas": first.clip_features,
            "vae_encode0.in_frames": torch.tensor(network.config.num_frames),
            "vae_encode0.out": first.ys[:, 4:],
            "ys": first.ys,
        },
    )
    return first


def _report(probe: Probe | None, **values: Tensor) -> None:
    if probe is not None:
        for name, value in values.items():
            probe(name, value)
