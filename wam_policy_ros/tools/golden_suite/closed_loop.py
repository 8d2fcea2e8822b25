"""The complete head, call after call, for every ``e2e_*`` recording in the folder."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import Tensor

from wam_policy_ros.engine.closed_loop import StepInputs, closed_loop_step
from wam_policy_ros.engine.config import NUM_STEPS, EngineConfig
from wam_policy_ros.engine.encode import PromptEncoder
from wam_policy_ros.engine.sampler import Noise
from wam_policy_ros.engine.session import WindowState
from wam_policy_ros.model.config import DreamZeroConfig
from wam_policy_ros.model.dreamzero import DreamZero

from .folder import (
    BF16_CLOSED_LOOP_LIMIT,
    BF16_CORRELATION,
    CLOSED_LOOP_LIMIT,
    GoldenFolder,
    Group,
    Recording,
    Row,
)

WEIGHTS, INPUTS = "e2e_weights.safetensors", "e2e_inputs.safetensors"


def check(folder: GoldenFolder) -> list[Row]:
    if not folder.has(WEIGHTS, INPUTS):
        return []
    weights, inputs = folder.read(WEIGHTS), folder.read(INPUTS)
    names = sorted(p.name for p in folder.path.glob("e2e_*.safetensors"))
    variants = [n for n in names if n not in (WEIGHTS, INPUTS) and not n.endswith("_trace.safetensors")]
    rows: list[Row] = []
    for name in variants:
        trace_name = name.replace(".safetensors", "_trace.safetensors")
        trace = folder.read(trace_name) if folder.has(trace_name) else None
        rows += _variant(name, folder.read(name), weights, inputs, trace, trace_name)
    return rows


def engine_config(name: str, recording: Recording) -> EngineConfig:
    """Schedule from the metadata's ``variant``, or from the file name where it does not say."""
    variant = str(recording.metadata.get("variant") or name.removeprefix("e2e_").removesuffix(".safetensors"))
    if "dynamic" in variant:
        return EngineConfig(schedule="dynamic")
    match = re.search(r"(?:mask|full)(\d+)", variant)
    count = int(match[1]) if match else (NUM_STEPS if "full" in variant else 8)
    return EngineConfig(evaluations=count) if count in (5, 6, 7, 8) else EngineConfig(schedule="full")


def _variant(
    name: str, recording: Recording, weights: Recording, inputs: Recording, trace: Recording | None, trace_name: str
) -> list[Row]:
    narrow = "bf16" in str(recording.metadata.get("dtype", "")) or "bf16" in name
    dtype = torch.bfloat16 if narrow else torch.float32
    config = DreamZeroConfig.from_head_config(recording.metadata["head_cfg"])
    decoupled = recording.metadata.get("decoupled")
    if isinstance(decoupled, dict):
        config = replace(config, **decoupled)
    network = DreamZero.on_meta(config)
    network.load_state_dict({k: v.to(dtype) for k, v in weights.items()}, strict=True, assign=True)
    limit = BF16_CLOSED_LOOP_LIMIT if narrow else CLOSED_LOOP_LIMIT
    floor = BF16_CORRELATION if narrow else None
    outputs = Group(name, "action and video of every call", limit, min_correlation=floor)
    inner = Group(name, "stages (latents, ys, CLIP, K/V, prompt)", limit, min_correlation=floor)
    exact = Group(name, "evaluated steps, cursor, timesteps", 0.0)
    steps = Group(trace_name, "every solver step", limit)

    state, prompts = WindowState(), PromptEncoder(network)
    calls = sorted({int(m[1]) for k in recording if (m := re.match(r"call(\d+)\.action_pred", k))})
    for call in calls:
        key = f"call{call}."
        seen: dict[str, Tensor] = {}
        step_inputs = StepInputs(
            images=inputs[key + "images"],
            ids=inputs[key + "text"],
            mask=inputs[key + "text_attention_mask"],
            negative_ids=inputs[key + "text_negative"],
            negative_mask=inputs[key + "text_attention_mask_negative"],
            proprio=inputs[key + "state"].to(dtype),
        )
        before = state.current_start_frame
        result = closed_loop_step(
            network,
            engine_config(name, recording),
            state,
            step_inputs,
            prompts,
            noise=_noise(recording, key, dtype, config),
            probe=seen.__setitem__,
        )
        state = result.state
        outputs.compare(key + "action_pred", result.action.float(), recording[key + "action_pred"])
        outputs.compare(key + "video_pred", result.video.float(), recording[key + "video_pred"])
        cursor = torch.tensor([before, state.current_start_frame])
        seen |= {"dit_steps_run": torch.tensor(result.evaluated), "csf_before_after": cursor}
        seen |= _caches(state)
        _compare_stages(key, seen, recording, inner, exact)
        if trace is not None:
            for probed, value in seen.items():
                if key + probed in trace:
                    steps.compare(key + probed, value.float(), trace[key + probed])
    rows = [outputs.row()]
    rows += [g.row() for g in (inner, exact) if g.count]
    return [*rows, steps.row()] if trace is not None else rows


def _noise(recording: Recording, key: str, dtype: torch.dtype, config: DreamZeroConfig) -> Noise:
    """The recorded noise; recordings without it used the same CPU bf16 generator for every call."""
    if key + "noise_obs" in recording:
        return Noise(recording[key + "noise_obs"].to(dtype), recording[key + "noise_action"].to(dtype))
    target = recording[key + "video_pred"]
    block = config.dit.num_frame_per_block
    shapes = ((*target.shape[:2], block, *target.shape[3:]), tuple(recording[key + "action_pred"].shape))
    draws = [
        torch.randn(shape, generator=torch.Generator().manual_seed(1140), dtype=torch.bfloat16).to(target.device, dtype)
        for shape in shapes
    ]
    return Noise(*draws)


def _caches(state: WindowState) -> dict[str, Tensor]:
    out = {}
    for branch, window in (("cond", state.cond), ("neg", state.uncond)):
        past = window.past() if window is not None else None
        if past:
            out[f"kv_first_layer_{branch}"] = torch.stack(past[0])
            out[f"kv_last_layer_{branch}"] = torch.stack(past[-1])
    return out


def _compare_stages(key: str, seen: dict[str, Tensor], recording: Recording, inner: Group, exact: Group) -> None:
    for name, value in seen.items():
        if key + name not in recording:
            continue
        expected = recording[key + name]
        if not expected.is_floating_point():
            exact.exact(key + name, value.tolist(), expected.tolist())
            continue
        if name == "clip_feas":  # some calls record only the first tokens
            value = value[:, : expected.shape[1]]
        inner.compare(key + name, value.float(), expected)
