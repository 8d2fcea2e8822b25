"""Makes a folder laid out like the recordings from this package's own networks in float64, at other sizes.

It proves nothing about the published model. It shows that a comparison assumes nothing about widths, lengths, batch,
block and window sizes, step counts, robots or which optional tensors a recording holds.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from test.tiny_checkpoint import config_json
from wam_policy_ros.contract.embodiment import get_embodiment
from wam_policy_ros.contract.normalization import Statistics
from wam_policy_ros.contract.prompts import NEGATIVE_PROMPT, build_prompt
from wam_policy_ros.contract.transforms import decode_actions, encode_state
from wam_policy_ros.engine.build import synthetic_metadata
from wam_policy_ros.engine.closed_loop import StepInputs, closed_loop_step
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.plain_path import PlainPath
from wam_policy_ros.engine.preprocess import stitch_views
from wam_policy_ros.engine.sampler import Noise
from wam_policy_ros.engine.session import WindowState
from wam_policy_ros.engine.unipc import UniPC, decouple, flow_sigmas, timesteps_of
from wam_policy_ros.model.attention import KV, CrossKV
from wam_policy_ros.model.config import DreamZeroConfig
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.model.text_encoder import relative_position_bucket, zero_padding
from wam_policy_ros.model.tokenizer import ByteTokenizer, clean_text

HEIGHT, WIDTH = 32, 48  # latents 4x6, 6 tokens per frame

# head dimension 24 and 20; blocks of 2 and 3 frames; windows of 7 and 10 frames.
SIZES: dict[str, dict[str, Any]] = {
    "batch of two": {
        "batch": 2, "plan": [(1, 0), (4, 0), (4, 0), (4, 0), (9, 1), (9, 1)],
        "head": {"num_frames": 25, "num_frame_per_block": 2, "action_horizon": 6, "action_dim": 10,
                 "max_state_dim": 20},
        "dit": {"dim": 48, "num_heads": 2, "num_layers": 2, "ffn_dim": 80, "freq_dim": 24, "hidden_size": 12,
                "text_len": 11, "max_chunk_size": 3, "num_action_per_block": 6, "num_frame_per_block": 2},
        "text": {"vocab": 90, "dim": 20, "dim_attn": 24, "dim_ffn": 28, "num_heads": 3, "num_layers": 3},
        "image": {"vision_dim": 24, "vision_heads": 3, "vision_layers": 3, "embed_dim": 8},
    },
    "blocks of three": {
        "batch": 1, "plan": [(1, 0), (4, 0), (12, 0), (4, 0)],
        "head": {"num_frames": 41, "num_frame_per_block": 3, "action_horizon": 8, "action_dim": 7,
                 "max_state_dim": 9},
        "dit": {"dim": 40, "num_heads": 2, "num_layers": 3, "ffn_dim": 32, "freq_dim": 18, "hidden_size": 7,
                "text_len": 5, "max_chunk_size": 3, "num_action_per_block": 8, "num_frame_per_block": 3},
        "text": {"vocab": 50, "dim": 16, "dim_attn": 8, "dim_ffn": 12, "num_heads": 2, "num_layers": 1},
        "image": {"vision_dim": 16, "vision_heads": 1, "vision_layers": 2, "embed_dim": 8},
    },
}  # fmt: skip


class Maker:
    """Writes the files of one size into ``folder``."""

    def __init__(self, folder: Path, size: str, *, seed: int = 0) -> None:
        self.folder, self.size = folder, SIZES[size]
        folder.mkdir(parents=True, exist_ok=True)
        self.g = torch.Generator().manual_seed(seed)
        self.head = self._head_config()
        self.config = DreamZeroConfig.from_head_config(self.head)
        network = DreamZero.with_random_weights(self.config, seed=seed)
        self.weights = {k: v.clone() for k, v in network.state_dict().items()}
        self.network = network.double()
        self.batch = self.size["batch"]

    def everything(self) -> None:
        for part in (self.dit, self.closed_loop, self.encoders, self.schedulers, self.robot):
            with torch.inference_mode():
                part()

    def _head_config(self) -> dict[str, Any]:
        head = copy.deepcopy(config_json()["action_head_cfg"]["config"])
        head |= self.size["head"] | {"target_video_height": None, "target_video_width": None}
        head["diffusion_model_cfg"] |= self.size["dit"] | {
            "frame_seqlen": (HEIGHT // 16) * (WIDTH // 16),
            "text_dim": self.size["text"]["dim"],
            "action_dim": head["action_dim"],
            "max_state_dim": head["max_state_dim"],
        }
        for key, name in (("text_encoder_cfg", "text"), ("image_encoder_cfg", "image")):
            head[key] |= self.size[name]
        return head

    def _save(self, name: str, tensors: dict[str, Tensor], **metadata: Any) -> None:
        """Floating tensors as float32; metadata as JSON strings, as the recordings have it."""
        stored = {k: (v.float() if v.is_floating_point() else v).clone().contiguous() for k, v in tensors.items()}
        header = {k: v if isinstance(v, str) else json.dumps(v) for k, v in metadata.items()}
        save_file(stored, self.folder / name, header)

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.g).double()

    # -- the DiT alone ---------------------------------------------------------------------------------------

    def dit(self) -> None:
        dit, cfg, b = self.network.model, self.config.dit, self.batch
        shape = (HEIGHT // 8, WIDTH // 8)
        io = {
            "in.context_cond": self._randn(b, cfg.text_len, cfg.text_dim),
            "in.context_neg": self._randn(b, cfg.text_len, cfg.text_dim),
            "in.clip_feature": self._randn(b, 257, cfg.clip_dim),
            "in.ys": self._randn(b, 20, self.config.latent_frames, *shape),
            "prefill0.x": self._randn(b, 16, 1, *shape),
        }
        block, rows = cfg.num_frame_per_block, cfg.num_action_per_block
        for c in range(3):
            name = f"chunk{c}"
            io[f"{name}.start_frame"] = torch.tensor(1 + c * block)
            if c:
                io[f"{name}.prefill.x"] = self._randn(b, 16, block, *shape)
                io[f"{name}.prefill.y"] = self._randn(b, 20, block, *shape)
            name += ".denoise"
            io[f"{name}.x"], io[f"{name}.y"] = self._randn(b, 16, block, *shape), self._randn(b, 20, block, *shape)
            io[f"{name}.action"] = self._randn(b, rows, cfg.action_dim)
            io[f"{name}.state"] = self._randn(b, 1, cfg.max_state_dim)
            # Different in every frame and row: the published recordings never have that.
            io[f"{name}.timestep"] = torch.randint(0, 1000, (b, block), generator=self.g)
            io[f"{name}.timestep_action"] = torch.randint(0, 1000, (b, rows), generator=self.g)
        out, caches = dict(io), {}
        for branch in ("cond", "neg"):
            cross = [CrossKV(t, i) for t, i in zip(dit.text_kv(io[f"in.context_{branch}"]),
                                                   dit.image_kv(io["in.clip_feature"]), strict=True)]  # fmt: skip
            past: list[KV] | None = None
            for c in range(-1, 3):
                name = f"chunk{c}.prefill" if c >= 0 else "prefill0"
                if f"{name}.x" in io:
                    x = io[f"{name}.x"]
                    y = io[f"{name}.y"] if c >= 0 else io["in.ys"][:, :, :1]
                    start = 1 + c * block - block if c >= 0 else 0
                    time = dit.time_conditioning(torch.zeros(b, x.shape[2], dtype=torch.int64))
                    result = dit(x, y, time, dit.rotary_table(start, x.shape[2], *shape, registers=False), cross,
                                 past=past)  # fmt: skip
                    past = result.kv if past is None else [KV(torch.cat([p.k, n.k], 1), torch.cat([p.v, n.v], 1))
                                                           for p, n in zip(past, result.kv, strict=True)]  # fmt: skip
                    out[f"{name}.{branch}.video_out"] = result.video
                    caches[f"{name}.{branch}.kv"] = torch.stack([torch.stack([p.k, p.v]) for p in past])
                if c < 0:
                    continue
                name = f"chunk{c}.denoise"
                time = dit.time_conditioning(io[f"{name}.timestep"], io[f"{name}.timestep_action"])
                table = dit.rotary_table(1 + c * block, block, *shape, registers=True)
                result = dit(io[f"{name}.x"], io[f"{name}.y"], time, table, cross, past=past,
                             action=io[f"{name}.action"], timestep_action=io[f"{name}.timestep_action"],
                             state=io[f"{name}.state"])  # fmt: skip
                out[f"{name}.{branch}.video_out"], out[f"{name}.{branch}.action_out"] = result.video, result.action
        meta = {"config": self.head["diffusion_model_cfg"], "clip_dim": str(cfg.clip_dim), "dtype": "float32"}
        self._save("dit_weights.safetensors", {k.removeprefix("model."): v for k, v in self.weights.items()
                                               if k.startswith("model.")}, **meta)  # fmt: skip
        self._save("dit_io.safetensors", out, **meta)
        self._save("dit_kv.safetensors", caches, **meta)

    # -- the complete head -----------------------------------------------------------------------------------

    def closed_loop(self) -> None:
        cfg, b = self.config, self.batch
        inputs: dict[str, Tensor] = {}
        for i, (frames, prompt) in enumerate(self.size["plan"]):
            key = f"call{i}."
            shape = (b, frames, HEIGHT, WIDTH, 3)
            inputs[key + "images"] = torch.randint(0, 256, shape, generator=self.g, dtype=torch.uint8)
            inputs[key + "state"] = self._randn(b, 1, cfg.dit.max_state_dim).clamp(-1, 1).float()
            for suffix, which in (("", prompt), ("_negative", 7)):
                ids, mask = self._prompt(which)
                inputs[f"{key}text{suffix}"], inputs[f"{key}text_attention_mask{suffix}"] = ids, mask
        meta = {"head_cfg": self.head, "dtype": "float32", "plan": self.size["plan"]}
        self._save("e2e_weights.safetensors", self.weights, **meta)
        self._save("e2e_inputs.safetensors", inputs, **meta)
        decoupled = {"decouple_inference_noise": True, "video_inference_final_noise": 0.65}
        for variant, config, calls in (
            ("mask8", EngineConfig(), None),
            ("full16", EngineConfig(schedule="full"), 2),
            ("mask6", EngineConfig(evaluations=6), 2),
            ("mask5_decoupled", EngineConfig(evaluations=5), 2),
        ):
            extra = decoupled if "decoupled" in variant else None
            recorded, trace = self._calls(config, inputs, calls, replace(cfg, **extra) if extra else cfg)
            if variant != "mask8":
                recorded = {k: v for k, v in recorded.items() if k.split(".", 1)[1] in _SHORT}
            self._save(f"e2e_{variant}.safetensors", recorded, variant=variant, decoupled=extra or "no", **meta)
            if variant == "mask8":
                self._save("e2e_mask8_trace.safetensors", trace, **meta)

    def _prompt(self, which: int) -> tuple[Tensor, Tensor]:
        """Other lengths in every row."""
        length, g = self.config.dit.text_len, torch.Generator().manual_seed(which)
        ids, mask = torch.zeros(2, self.batch, length, dtype=torch.int64)
        for row in range(self.batch):
            n = length - 1 - (which + row) % 3
            ids[row, :n] = torch.randint(2, self.config.text.vocab, (n,), generator=g)
            ids[row, n], mask[row, : n + 1] = 1, 1
        return ids, mask

    def _calls(
        self, config: EngineConfig, inputs: dict[str, Tensor], calls: int | None, network_config: DreamZeroConfig
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        network = DreamZero.on_meta(network_config)
        network.load_state_dict(self.network.state_dict(), assign=True)
        cfg, b = network_config, self.batch
        noise = Noise(
            self._randn(b, 16, cfg.dit.num_frame_per_block, HEIGHT // 8, WIDTH // 8),
            self._randn(b, cfg.action_horizon, cfg.dit.action_dim),
        )
        state, path = WindowState(), PlainPath(network, config)
        recorded: dict[str, Tensor] = {}
        trace: dict[str, Tensor] = {}
        for i in range(len(self.size["plan"]))[:calls]:
            key, seen, before = f"call{i}.", {}, state.current_start_frame
            step = StepInputs(*(inputs[key + n] for n in ("images", "text", "text_attention_mask", "text_negative",
                                                          "text_attention_mask_negative")),
                              inputs[key + "state"].double())  # fmt: skip
            result = closed_loop_step(network, config, state, step, path, noise=noise, probe=seen.__setitem__)
            state = result.state
            seen |= {
                "action_pred": result.action, "video_pred": result.video,
                "noise_obs": noise.video, "noise_action": noise.action,
                "dit_steps_run": torch.tensor(result.evaluated),
                "csf_before_after": torch.tensor([before, state.current_start_frame]),
                "kv_last_layer_cond": torch.stack(state.cond.past()[-1]),
                "kv_first_layer_neg": torch.stack(state.uncond.past()[0]),
            }  # fmt: skip
            for name, value in seen.items():
                (trace if name.startswith(("step", "after_step")) else recorded)[key + name] = value
        return recorded, trace

    # -- encoders, solver, robot -----------------------------------------------------------------------------

    def encoders(self) -> None:
        text, image, vae = self.network.text_encoder, self.network.image_encoder, self.network.vae
        weights = {p: {k.removeprefix(p): v for k, v in self.weights.items() if k.startswith(p)}
                   for p in ("text_encoder.", "image_encoder.", "vae.")}  # fmt: skip
        ids, mask = self._prompt(3)
        hidden = text(ids, mask)
        length = ids.shape[1]
        relative = torch.arange(length)[None] - torch.arange(length)[:, None]
        buckets = relative_position_bucket(relative, text.config.num_buckets)
        t5 = {f"w.{k}": v for k, v in weights["text_encoder."].items()}
        t5 |= {"in.ids0": ids, "in.mask0": mask,
               "out.hidden0": hidden, "out.encode_prompt0": zero_padding(hidden, mask),
               "out.pos_bias_block0": text.blocks[0].pos_embedding(buckets), "const.rel_pos": relative,
               "const.rel_pos_bucket": buckets}  # fmt: skip
        self._save("t5.safetensors", t5, config=self.size["text"] | {"text_len": length, "num_buckets": 32})

        frame = self._randn(self.batch, 1, 3, 40, 24).clamp(-1, 1)
        clip = {f"w.{k}": v for k, v in weights["image_encoder."].items()}
        clip |= {"in.image0": frame, "out.clip_feature0": image(frame)}
        self._save("clip.safetensors", clip, config=self.size["image"])

        video, latent = self._randn(1, 3, 13, 24, 40).clamp(-1, 1), self._randn(1, 16, 2, 3, 5)
        io = {"in.video_long": video, "out.encode_long": vae.encode(video), "in.latent_2": latent,
              "out.decode_2": vae.decode(latent), "out.decode_1_unclamped": vae.decode(latent[:, :, :1], clamp=False),
              "out.encode_first6_of_long": vae.encode(video[:, :, :6]),
              "in.video_1f": video[:, :, :1],
              "out.encode_1f_plus_4_zero_frames": vae.encode(torch.cat([video[:, :, :1], 0 * video[:, :, :4]], 2)),
              }  # fmt: skip
        for i, part in enumerate(vae.encode(video).split(1, 2)):
            io[f"stream.latent_chunk{i}"] = part
        config = {"dim": 4, "num_res_blocks": 1, "z_dim": 16, "attn_scales": [],
                  "temperal_downsample": [False, True, True]}  # fmt: skip
        decoder = ("model.decoder.", "model.conv2.")
        for name, part in (("enc", False), ("dec", True)):
            half = {k: v for k, v in weights["vae."].items() if k.startswith(decoder) is part}
            self._save(f"vae_weights_{name}.safetensors", half, config=config)
        self._save("vae_io.safetensors", io, config=config)

    def schedulers(self) -> None:
        out: dict[str, Tensor] = {}
        for name, sigmas in (
            ("unipc_a", flow_sigmas(12, 3.0)), ("unipc_b", decouple(flow_sigmas(7, 4.5), 0.55)),
            ("unipc_c", flow_sigmas(1, 7.0)), ("unipc_d", flow_sigmas(2, 1.0)),
        ):  # fmt: skip
            n = len(sigmas) - 1
            flows, x = self._randn(n, 2, 3, 4), self._randn(2, 3, 4)
            out |= {f"{name}.sigmas": sigmas, f"{name}.timesteps": timesteps_of(sigmas), f"{name}.x_init": x,
                    f"{name}.model_outputs": flows, f"{name}.x_after": _trajectory(sigmas, flows, x)}  # fmt: skip
        mask = torch.tensor([1, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0, 1])
        held = torch.stack([out["unipc_a.model_outputs"][int(mask[: i + 1].nonzero().max())] for i in range(12)])
        out |= {"unipc_mask5.mask": mask,
                "unipc_mask5.x_after": _trajectory(out["unipc_a.sigmas"], held, out["unipc_a.x_init"])}  # fmt: skip
        self._save("schedulers.safetensors", out, settings="other")

    def robot(self) -> None:
        """Another robot with other raw sizes, no frame buffer sequence, no normaliser tables."""
        page = get_embodiment("yam")
        metadata = synthetic_metadata(page)
        for field in metadata["yam"]["statistics"]["action"].values():
            field["q99"] = [v + 0.3 for v in field["q99"]]
        for camera in metadata["yam"]["modalities"]["video"].values():
            camera["resolution"] = [80, 60]
        statistics = Statistics.from_metadata(metadata, "yam")
        rng = np.random.default_rng(0)
        tokenizer = ByteTokenizer(900, truncate=True)
        cameras = tuple(replace(c, height=60, width=80) for c in page.cameras)
        cases: list[dict[str, Any]] = []
        data: dict[str, Tensor] = {}
        images: dict[str, Tensor] = {}
        for i, prompt in enumerate(["Fold the towel", "('Zip the bag', 1)"]):
            text = build_prompt(prompt, page.prompt_template)
            cases.append({"prompt": prompt, "frames": 2,
                          "tokenised_texts": [[clean_text(NEGATIVE_PROMPT)], [clean_text(text)]]})  # fmt: skip
            state = {f.name: rng.normal(size=f.dim) for f in page.state}
            normalised = rng.normal(size=(9, 20)).astype(np.float32)
            rows = torch.from_numpy(decode_actions(normalised, page.action, statistics, state))
            ids, mask = tokenizer([text])
            vector = torch.from_numpy(encode_state(state, page.state, statistics, 30))
            key, at = f"case{i}.", 0
            data |= {key + "model_in.text": ids, key + "model_in.text_attention_mask": mask,
                     key + "model_in.state": vector[None, None],
                     key + "in.action_pred_normalised_bf16_as_f32": torch.from_numpy(normalised)[None],
                     key + "model_in.embodiment_id": torch.tensor([32])}  # fmt: skip
            for f in page.action:
                data[f"{key}in.state.{f.name}"] = torch.from_numpy(state[f.name])[None]
                data[f"{key}out.action.{f.name}"] = rows[:, at : at + f.dim].squeeze()
                at += f.dim
            frames = {c.name: rng.integers(0, 256, (2, 60, 80, 3), dtype=np.uint8) for c in cameras}
            images |= {f"{key}in.video.{name}": torch.from_numpy(v) for name, v in frames.items()}
            small = replace(page, view_height=24, view_width=40)
            images[key + "model_in.images"] = stitch_views(frames, small, cameras=cameras)
        info = {"metadata": metadata, "cases": cases, "max_length": 900, "out_hw": [24, 40], "action_horizon": 9,
                "relative_action_keys": [f.name for f in page.action]}  # fmt: skip
        (self.folder / "data.json").write_text(json.dumps(info))
        self._save("data.safetensors", data, note="other")
        self._save("data_images.safetensors", images, out_hw=[24, 40])


_SHORT = {
    "action_pred", "video_pred", "noise_obs", "noise_action", "dit_steps_run", "video_timesteps", "video_sigmas",
    "csf_before_after",
}  # fmt: skip


def _trajectory(sigmas: Tensor, flows: Tensor, x: Tensor) -> Tensor:
    solver, out = UniPC(sigmas), []
    for flow in flows:
        x = solver.step(flow, x)
        out.append(x)
    return torch.stack(out)
