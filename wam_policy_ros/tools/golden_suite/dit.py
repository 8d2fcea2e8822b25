"""The DiT alone: prefills and denoising calls of both branches, its cache, its intermediates, and bf16."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from wam_policy_ros.engine.kv_cache import KVWindow
from wam_policy_ros.model.attention import CrossKV
from wam_policy_ros.model.config import DiTConfig
from wam_policy_ros.model.dit import CausalDiT

from .folder import BF16_COMPONENT_LIMIT, BF16_CORRELATION, COMPONENT_LIMIT, GoldenFolder, Group, Recording, Row

WEIGHTS, IO, KV, BF16 = (
    "dit_weights.safetensors",
    "dit_io.safetensors",
    "dit_kv.safetensors",
    "dit_bf16_out.safetensors",
)


def check(folder: GoldenFolder) -> list[Row]:
    if not folder.has(WEIGHTS, IO):
        return []
    weights, io = folder.read(WEIGHTS), folder.read(IO)
    caches = folder.read(KV) if folder.has(KV) else None
    flows = Group(IO, "video and action flows", COMPONENT_LIMIT)
    inner = Group(IO, "intermediates", COMPONENT_LIMIT)
    kv = Group(KV, "K/V after prefill", COMPONENT_LIMIT)
    run = _Run(weights, io, torch.float32)
    branches = [b for b in ("cond", "neg") if f"in.context_{b}" in io]
    for branch in branches:
        run.replay(branch, flows, kv if caches is not None else None, caches, inner)
    rows = [flows.row()]
    if inner.count:
        rows.append(inner.row())
    if caches is not None:
        rows.append(kv.row())
    if folder.has(BF16):
        recorded = folder.read(BF16)
        narrow = Group(BF16, "flows in bf16", BF16_COMPONENT_LIMIT, min_correlation=BF16_CORRELATION)
        run = _Run(weights, io, torch.bfloat16)
        for branch in branches:
            run.replay(branch, narrow, None, None, None, expected=recorded)
        rows.append(narrow.row())
    return rows


class _Run:
    """The recorded sequence of calls for one branch, in one dtype."""

    def __init__(self, weights: Recording, io: Recording, dtype: torch.dtype) -> None:
        meta: dict[str, Any] = io.metadata
        height, width = meta.get("latent_hw", (0, 0))
        raw = {"frame_seqlen": (height // 2) * (width // 2)} | meta["config"]
        clip_dim = meta.get("clip_dim", weights["img_emb.proj.0.weight"].shape[0])
        config = DiTConfig.from_dict(raw, clip_dim=int(clip_dim))
        with torch.device("meta"):
            dit = CausalDiT(config)
        dit.load_state_dict({k: v.to(dtype) for k, v in weights.weights().items()}, strict=True, assign=True)
        self.dit, self.io, self.dtype = dit.requires_grad_(False).eval(), io, dtype

    @torch.inference_mode()
    def replay(
        self,
        branch: str,
        flows: Group,
        kv: Group | None,
        caches: Recording | None,
        inner: Group | None,
        expected: Recording | None = None,
    ) -> None:
        io, dit = self.io, self.dit
        expected = expected if expected is not None else io
        context = self._get(f"in.context_{branch}")
        features = self._get("in.clip_feature")
        cross = [CrossKV(t, i) for t, i in zip(dit.text_kv(context), dit.image_kv(features), strict=True)]
        if inner is not None:
            embedded = dit.text_embedding(context)
            self._intermediate(inner, rf"chunk\d+\.denoise\.{branch}\.text_embedding_out", embedded)
            self._intermediate(inner, r"chunk\d+\.denoise\.img_emb_out", dit.img_emb(features))
        window = KVWindow(dit.cfg.max_attention_size)
        self._prefill(
            "prefill0", 0, self._get("prefill0.x"), self._get("in.ys")[:, :, :1], branch, window, cross, flows, expected
        )
        self._cache(kv, caches, f"prefill0.{branch}.kv", window)
        chunks = sorted(int(m[1]) for k in io if (m := re.fullmatch(r"chunk(\d+)\.start_frame", k)))
        for c in chunks:
            start = int(io[f"chunk{c}.start_frame"])
            name = f"chunk{c}.prefill"
            if f"{name}.x" in io:
                x, y = self._get(f"{name}.x"), self._get(f"{name}.y")
                self._prefill(name, start - x.shape[2], x, y, branch, window, cross, flows, expected)
                self._cache(kv, caches, f"{name}.{branch}.kv", window)
            self._denoise(f"chunk{c}.denoise", start, branch, window, cross, flows, inner, expected)

    def _get(self, name: str) -> Tensor:
        value = self.io[name]
        return value.to(self.dtype) if value.is_floating_point() else value

    def _prefill(self, name: str, start: int, x: Tensor, y: Tensor, branch: str, window: KVWindow, cross: list[CrossKV], flows: Group, expected: Recording) -> None:  # noqa: E501  # fmt: skip
        batch, _, frames, h, w = x.shape
        time = self.dit.time_conditioning(torch.zeros(batch, frames, dtype=torch.int64, device=x.device))
        table = self.dit.rotary_table(start, frames, h, w, registers=False)
        out = self.dit(x, y, time, table, cross, past=window.past())
        window.append(out.kv)
        flows.check(out.video.float(), expected, f"{name}.{branch}.video_out")

    def _denoise(self, name: str, start: int, branch: str, window: KVWindow, cross: list[CrossKV], flows: Group, inner: Group | None, expected: Recording) -> None:  # noqa: E501  # fmt: skip
        x, action, state = self._get(f"{name}.x"), self._get(f"{name}.action"), self._get(f"{name}.state")
        t, t_action = self.io[f"{name}.timestep"], self.io[f"{name}.timestep_action"]
        _, _, frames, h, w = x.shape
        time = self.dit.time_conditioning(t, t_action)
        table = self.dit.rotary_table(start, frames, h, w, registers=True)
        hidden: dict[int, Tensor] = {}
        hooks = [
            block.register_forward_hook(lambda _m, _a, out, i=i: hidden.__setitem__(i, out[0]))
            for i, block in enumerate(self.dit.blocks)
        ]
        out = self.dit(
            x, self._get(f"{name}.y"), time, table, cross,
            past=window.past(), action=action, timestep_action=t_action, state=state,
        )  # fmt: skip
        for hook in hooks:
            hook.remove()
        assert out.action is not None
        flows.check(out.video.float(), expected, f"{name}.{branch}.video_out")
        flows.check(out.action.float(), expected, f"{name}.{branch}.action_out")
        if inner is None:
            return
        prefix = re.escape(f"{name}.{branch}.")
        for i, value in hidden.items():
            self._intermediate(inner, rf"{prefix}hidden_after_block{i}", value)
        self._intermediate(inner, rf"{prefix}time_projection_last_token", time.e6[:, -1].flatten(1))
        plain = re.escape(f"{name}.")
        self._intermediate(inner, rf"{plain}action_encoder_out", self.dit.action_encoder(action, t_action))
        self._intermediate(inner, rf"{plain}state_encoder_out", self.dit.state_encoder(state))

    def _intermediate(self, group: Group, pattern: str, got: Tensor) -> None:
        for key in self.io:
            if re.fullmatch(pattern, key):
                group.compare(key, got, self.io[key])

    def _cache(self, group: Group | None, caches: Recording | None, name: str, window: KVWindow) -> None:
        if group is None or caches is None or name not in caches:
            return
        past = window.past() or []
        group.compare(name, torch.stack([torch.stack([layer.k, layer.v]) for layer in past]), caches[name])
