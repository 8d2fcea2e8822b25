"""Prefill of observed frames and joint denoising of video and action (DreamZero spec 3.3 e, f and 4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wam_policy_ros.model.attention import KV, CrossKV
from wam_policy_ros.model.dit import DiTOutput
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.model.exchange import ALONE, Exchange
from wam_policy_ros.model.rope import Rotary

from .asking import ask
from .config import NUM_STEPS, EngineConfig
from .inpaint import Committed, constrained_flow
from .noise import ACTION, VIDEO, counted_normal
from .session import WindowState
from .step_schedule import make_schedule
from .unipc import UniPC, decouple, flow_sigmas, timesteps_of

Probe = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class Noise:
    """Starting samples: video ``[B, z, F, h, w]`` and action ``[B, N, action_dim]``."""

    video: Tensor
    action: Tensor


def draw_noise(seed: int, latents: Tensor, network: DreamZero, *, counted: bool = False) -> Noise:
    """Noise as upstream draws it: bf16 on the device, a fresh generator for each, the same in every call (spec 4.2).

    Args:
        latents: ``[B, z, F, h, w]``, for batch, channels and size.
        counted: draw it with ``noise.counted_normal`` instead, which gives the same bits on every machine.
    """
    cfg = network.config
    batch, channels, _, height, width = latents.shape

    def draw(shape: tuple[int, ...], stream: int) -> Tensor:
        if counted:
            return counted_normal(seed, stream, shape, network.device, network.dtype)
        generator = torch.Generator(device=network.device).manual_seed(seed)
        noise = torch.randn(shape, generator=generator, device=network.device, dtype=torch.bfloat16)
        return noise.to(network.dtype)

    return Noise(
        draw((batch, channels, cfg.dit.num_frame_per_block, height, width), VIDEO),
        draw((batch, cfg.action_horizon, cfg.dit.action_dim), ACTION),
    )


def noise_levels(network: DreamZero, config: EngineConfig) -> tuple[Tensor, Tensor]:
    """Sigmas of video and action, float32 ``[17]`` each."""
    action = flow_sigmas(NUM_STEPS, config.sigma_shift)
    cfg = network.config
    return decouple(action, cfg.video_inference_final_noise) if cfg.decouple_inference_noise else action, action


def conditioning_slice(ys: Tensor, start: int, frames: int) -> Tensor:
    """``ys[:, :, start : start + frames]``, or its last frames where that runs past the end."""
    if start + frames > ys.shape[2]:
        return ys[:, :, -frames:]
    return ys[:, :, start : start + frames]


class Guidance:
    """Classifier-free guidance on the video flow over one call."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._difference: Tensor | None = None  # conditional minus unguided flow of the last guided evaluation

    def __call__(self, flows: list[Tensor]) -> Tensor:
        """The flow to follow, from the conditional one and, where it was evaluated, the unguided one."""
        if len(flows) == 2:
            self._difference = flows[0] - flows[1]
            return flows[1] + self._config.guidance_scale * self._difference
        if self._difference is not None and self._config.guidance_between == "reuse":
            return flows[0] + (self._config.guidance_scale - 1) * self._difference
        return flows[0]


def prefill(
    network: DreamZero,
    state: WindowState,
    latents: Tensor,
    start_frame: int,
    probe: Probe | None,
    exchange: Exchange = ALONE,
) -> None:
    """Run observed latents ``[B, z, F, h, w]`` through the DiT at timestep 0 and append their K/V to both windows."""
    assert state.ys is not None
    dit = network.model
    batch, _, frames, height, width = latents.shape
    y = conditioning_slice(state.ys, start_frame, frames)
    if probe is not None:
        probe("prefill0.x", latents)
        probe("prefill0.y", y)
        probe("prefill0.start_frame", torch.tensor(start_frame))
    time = dit.time_conditioning(torch.zeros(batch, frames, dtype=torch.int64, device=latents.device))
    table = dit.rotary_table(start_frame, frames, height, width, registers=False)
    for prompt, window in state.branches():
        out = dit(latents, y, time, table, state.cross(prompt), past=window.past(), exchange=exchange)
        window.append(out.kv)
        if probe is not None:
            for layer in out.kv:
                probe("prefill0.k", layer.k)
                probe("prefill0.v", layer.v)


def denoise(
    network: DreamZero,
    config: EngineConfig,
    state: WindowState,
    noise: Noise,
    proprio: Tensor,
    *,
    committed: Committed | None = None,
    cancelled: Callable[[], bool] | None,
    probe: Probe | None,
    exchange: Exchange = ALONE,
) -> tuple[Tensor, Tensor, list[int]]:
    """Denoise the next block jointly with the action rows; the caches are read, never written.

    Args:
        proprio: normalised state ``[B, 1, max_state_dim]``.
        committed: rows the action has to agree with.
        cancelled: asked before every solver step.
        exchange: shares every evaluation with other ranks.

    Returns:
        video latents ``[B, z, F, h, w]``, normalised action ``[B, N, action_dim]``, indices of the evaluated steps.

    Raises:
        Cancelled: ``cancelled()`` was true.
    """
    assert state.ys is not None
    dit = network.model
    start = state.current_start_frame
    frames, height, width = noise.video.shape[2:]
    sigmas_video, sigmas_action = noise_levels(network, config)
    if probe is not None:
        probe("video_sigmas", sigmas_video)
        probe("video_timesteps", timesteps_of(sigmas_video))
    times_video, times_action = timesteps_of(sigmas_video).tolist(), timesteps_of(sigmas_action).tolist()
    solver_video, solver_action = UniPC(sigmas_video), UniPC(sigmas_action)
    schedule = make_schedule(config.schedule, config.evaluations, NUM_STEPS)

    y = conditioning_slice(state.ys, start, frames)
    table = dit.rotary_table(start, frames, height, width, registers=True)
    branches = [(state.cross(prompt), window.past()) for prompt, window in state.branches()]
    video, action = noise.video.transpose(1, 2), noise.action  # the solver keeps frames before channels
    flow_video: Tensor | None = None
    flow_action: Tensor | None = None
    guidance = Guidance(config)
    evaluated: list[int] = []
    for i in range(NUM_STEPS):
        ask(cancelled, video.device, "step cancelled between two evaluations", f"solver step {i} of {NUM_STEPS}")
        if flow_video is None or schedule.should_run(i):
            run = branches if config.guides(i) else branches[:1]
            times = times_video[i], times_action[i]
            outputs = evaluate(network, run, video, action, y, table, proprio, *times, exchange)
            guided = guidance([out.video for out in outputs])
            # Action: conditional branch alone, no guidance (DreamZero spec 4.5).
            flow_video, flow_action = guided, outputs[0].action
            assert flow_action is not None  # action tokens went in
            schedule.evaluated(guided)
            evaluated.append(i)
            if probe is not None:
                for name, out in zip(("cond", "neg"), outputs, strict=False):
                    probe(f"step{i}.video_flow_{name}", out.video)
                probe(f"step{i}.action_flow_cond", flow_action)
        assert flow_video is not None and flow_action is not None  # the first step always evaluates
        video = solver_video.step(flow_video.transpose(1, 2), video)
        flow = constrained_flow(flow_action, action, float(sigmas_action[i]), committed)
        action = solver_action.step(flow, action)
        if probe is not None:
            probe(f"after_step{i}.video", video)
            probe(f"after_step{i}.action", action)
    return video.transpose(1, 2), action, evaluated


def evaluate(
    network: DreamZero,
    branches: list[tuple[list[CrossKV], list[KV] | None]],
    video: Tensor,
    action: Tensor,
    y: Tensor,
    table: Rotary,
    proprio: Tensor,
    time_video: int,
    time_action: int,
    exchange: Exchange = ALONE,
) -> list[DiTOutput]:
    """One network evaluation per guidance branch, the conditional one first.

    Args:
        video: ``[B, F, z, h, w]``, the solver's layout; action ``[B, N, action_dim]``.
        time_video, time_action: integer timesteps, the same for all frames and for all rows.
    """
    t_video = torch.full(video.shape[:2], time_video, device=video.device)
    t_action = torch.full(action.shape[:2], time_action, device=video.device)
    time = network.model.time_conditioning(t_video, t_action)
    x = video.transpose(1, 2)
    tokens = {"action": action, "timestep_action": t_action, "state": proprio}
    return [network.model(x, y, time, table, cross, past=past, **tokens, exchange=exchange) for cross, past in branches]
