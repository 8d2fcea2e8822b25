"""The complete head, call after call, for every ``e2e_*`` recording in the folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wam_policy_ros.engine.closed_loop import StepInputs, closed_loop_step
from wam_policy_ros.engine.config import NUM_STEPS, EngineConfig
from wam_policy_ros.engine.paths import make_path
from wam_policy_ros.engine.sampler import Noise
from wam_policy_ros.engine.session import WindowState
from wam_policy_ros.engine.step_path import StepPath
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
_TRACE = "_trace.safetensors"


def check(folder: GoldenFolder, changes: Mapping[str, Any] | None = None) -> list[Row]:
    """
    Args:
        changes: engine options on top of each recording's schedule, e.g. ``{"step": "fused"}``; then only what the
            calls give is compared, as other paths keep their memory in other forms.
    """
    if not folder.has(WEIGHTS, INPUTS):
        return []
    weights, inputs = folder.read(WEIGHTS), folder.read(INPUTS)
    names = sorted(p.name for p in folder.path.glob("e2e_*.safetensors"))
    variants = [n for n in names if n not in (WEIGHTS, INPUTS) and not n.endswith(_TRACE)]
    recordings = {name: folder.read(name) for name in variants}
    noise = next((n for r in recordings.values() if (n := _recorded_noise(r)) is not None), None)
    rows: list[Row] = []
    for name, recording in recordings.items():
        trace_name = name.removesuffix(".safetensors") + _TRACE
        trace = folder.read(trace_name) if folder.has(trace_name) else None
        try:
            rows += _Variant(name, recording, weights, inputs, noise, trace, trace_name, changes or {}).replay()
        except Exception as error:  # one broken recording must not hide the others
            rows.append(Row(name, f"{type(error).__name__}: {error}", 0, float("inf"), 0.0))
    return rows


def engine_config(name: str, recording: Recording) -> EngineConfig:
    """Schedule from the metadata's ``variant`` or the file name; failing both, from the number of recorded steps."""
    variant = str(recording.metadata.get("variant") or name.removeprefix("e2e_").removesuffix(".safetensors"))
    if "dynamic" in variant:
        return EngineConfig(schedule="dynamic")
    match = re.search(r"(?:mask|full)(\d+)", variant)
    count = int(match[1]) if match else (NUM_STEPS if "full" in variant else 8)
    steps = next((k for k in recording if k.endswith(".dit_steps_run")), None)
    if match is None and "full" not in variant and steps is not None:
        count = len(recording[steps])
    return EngineConfig(evaluations=count) if count in (5, 6, 7, 8) else EngineConfig(schedule="full")


class _Variant:
    """One recording of consecutive calls on one object."""

    def __init__(
        self,
        name: str,
        recording: Recording,
        weights: Recording,
        inputs: Recording,
        noise: tuple[Tensor, Tensor] | None,
        trace: Recording | None,
        trace_name: str,
        changes: Mapping[str, Any],
    ) -> None:
        self.name, self.recording, self.inputs, self.noise, self.trace = name, recording, inputs, noise, trace
        narrow = any("bf16" in t or "bfloat16" in t for t in (name, str(recording.metadata.get("dtype", ""))))
        self.dtype = torch.bfloat16 if narrow else torch.float32
        head = recording.metadata["head_cfg"]
        config = DreamZeroConfig.from_config_json(head if "action_head_cfg" in head else {"action_head_cfg": head})
        decoupled = recording.metadata.get("decoupled")
        if isinstance(decoupled, dict):
            config = replace(config, **decoupled)
        self.network = DreamZero.on_meta(config)
        state = {k: v.to(self.dtype) for k, v in weights.weights().items()}
        self.network.load_state_dict(state, strict=True, assign=True)
        self.config, self.changed = replace(engine_config(name, recording), **changes), bool(changes)
        limit, floor = (BF16_CLOSED_LOOP_LIMIT, BF16_CORRELATION) if narrow else (CLOSED_LOOP_LIMIT, None)
        self.outputs = Group(name, "action and video of every call", limit, min_correlation=floor)
        self.inner = Group(name, "stages (latents, ys, CLIP, K/V, prompt)", limit, min_correlation=floor)
        self.exact = Group(name, "evaluated steps, cursor, timesteps", 0.0)
        self.steps = Group(trace_name, "every solver step", limit)

    def replay(self) -> list[Row]:
        images = next(v for k, v in self.inputs.items() if k.endswith("images"))
        picture = self.network.config.target_video_hw or (images.shape[2], images.shape[3])
        state, path = WindowState(), make_path(self.network, self.config, picture)
        last = max((int(m[1]) for k in self.recording if (m := re.match(r"call(\d+)\.", k))), default=-1)
        for call in range(last + 1):  # a call of which nothing is recorded still moves the window on
            state = self._call(f"call{call}.", state, path)
        rows = [self.outputs.row()]
        rows += [g.row() for g in (self.inner, self.exact) if g.count]
        return [*rows, self.steps.row()] if self.trace is not None else rows

    def _call(self, key: str, state: WindowState, path: StepPath) -> WindowState:
        inputs, recording = self.inputs, self.recording
        step_inputs = StepInputs(
            images=inputs[key + "images"],
            ids=inputs[key + "text"],
            mask=inputs[key + "text_attention_mask"],
            negative_ids=inputs[key + "text_negative"],
            negative_mask=inputs[key + "text_attention_mask_negative"],
            proprio=inputs[key + "state"].to(self.dtype),
        )
        seen: dict[str, Tensor] = {}
        noise = self._noise(key, step_inputs.images)
        result = closed_loop_step(
            self.network, self.config, state, step_inputs, path, noise=noise, probe=seen.__setitem__
        )
        assert result.video is not None
        self.outputs.check(result.action.float(), recording, key + "action_pred")
        self.outputs.check(result.video.float(), recording, key + "video_pred")
        path.let_go(state, result.state)
        if self.changed:
            return result.state
        cursor = torch.tensor([state.current_start_frame, result.state.current_start_frame])
        seen |= {"dit_steps_run": torch.tensor(result.evaluated), "csf_before_after": cursor}
        seen |= _caches(result.state)
        _compare_stages(key, seen, recording, self.inner, self.exact)
        if self.trace is not None:
            for probed, value in seen.items():
                self.steps.check(value.float(), self.trace, key + probed)
        return result.state

    def _noise(self, key: str, images: Tensor) -> Noise:
        """The recorded noise of this call, of another call, of another recording; drawn as recorded failing all three.

        The reference uses the same noise in every call. A CPU draw is the last resort: its bits depend on the
        PyTorch build.
        """
        if key + "noise_obs" in self.recording:
            video, action = self.recording[key + "noise_obs"], self.recording[key + "noise_action"]
        elif (found := _recorded_noise(self.recording) or self.noise) is not None:
            video, action = found
        else:
            cfg = self.network.config
            batch, factor = images.shape[0], cfg.vae.spatial_factor
            height, width = cfg.target_video_hw or (images.shape[2], images.shape[3])
            block = (cfg.dit.num_frame_per_block, height // factor, width // factor)
            shapes = ((batch, cfg.vae.z_dim, *block), (batch, cfg.action_horizon, cfg.dit.action_dim))
            video, action = (
                torch.randn(s, generator=torch.Generator().manual_seed(1140), dtype=torch.bfloat16) for s in shapes
            )
        return Noise(video.to(images.device, self.dtype), action.to(images.device, self.dtype))


def _recorded_noise(recording: Recording) -> tuple[Tensor, Tensor] | None:
    key = next((k for k in sorted(recording) if k.endswith(".noise_obs")), None)
    return None if key is None else (recording[key], recording[key.replace(".noise_obs", ".noise_action")])


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
