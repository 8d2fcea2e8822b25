"""Network configuration: resolved once from ``config.json``, frozen, cross-checked.

Every architectural number comes from the checkpoint; what the published file leaves out (the encoders, DreamZero spec
6.3) has the published sizes as defaults. ``DreamZeroConfig.dreamzero_14b()`` and ``.tiny()`` are presets in code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .config_encoders import ImageEncoderConfig, TextEncoderConfig, VAEConfig, check_values, largest
from .errors import ModelConfigError

# Present in published configurations and irrelevant to inference (training, paths, dead switches: DreamZero spec 6.3).
_IGNORED_DIT_KEYS = frozenset(
    {"sink_size", "num_registers", "max_num_embodiments", "window_size", "qk_norm", "cross_attn_norm"}
    | {"patch_size", "local_attn_size", "vl_self_attention_cfg", "use_gradient_checkpointing", "clip_dim"}
)


@dataclass(frozen=True)
class DiTConfig:
    """Causal Wan DiT with action and state tokens (DreamZero spec 2.1). Defaults are the published 14B network.

    ``frame_seqlen`` is tokens per latent frame; ``clip_dim`` the width of the image features.
    """

    dim: int = 5120
    num_heads: int = 40
    num_layers: int = 40
    ffn_dim: int = 13824
    freq_dim: int = 256
    in_dim: int = 36
    out_dim: int = 16
    text_dim: int = 4096
    text_len: int = 512
    clip_dim: int = 1280
    hidden_size: int = 1024
    action_dim: int = 32
    max_state_dim: int = 64
    frame_seqlen: int = 880
    num_frame_per_block: int = 2
    num_action_per_block: int = 24
    num_state_per_block: int = 1
    max_chunk_size: int = 4
    eps: float = 1e-6
    model_type: str = "i2v"
    concat_first_frame_latent: bool = True

    def __post_init__(self) -> None:
        check_values(self)
        if self.model_type != "i2v" or not self.concat_first_frame_latent:
            raise ModelConfigError(
                f"diffusion model type {self.model_type!r} (concat_first_frame_latent="
                f"{self.concat_first_frame_latent}) is not supported; expected 'i2v' with the first-frame latent "
                "concatenated (the 14B family; the Wan2.2-5B variant has no published DreamZero weights)"
            )
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 2:
            raise ModelConfigError(f"dim {self.dim} must be an even multiple of num_heads {self.num_heads}")
        if self.freq_dim % 2:
            raise ModelConfigError(f"freq_dim must be even, got {self.freq_dim}")
        if self.num_action_per_block % self.num_state_per_block:
            raise ModelConfigError("num_action_per_block must be a multiple of num_state_per_block")

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def local_attn_size(self) -> int:
        """Latent frames of the attention window; the closed loop restarts when it is full."""
        return self.max_chunk_size * self.num_frame_per_block + 1

    @property
    def max_attention_size(self) -> int:
        """Video tokens a query may see."""
        return self.local_attn_size * self.frame_seqlen

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], **more: Any) -> DiTConfig:
        """Build from ``diffusion_model_cfg``. Unknown keys raise, keys irrelevant to inference are skipped."""
        known = {f.name for f in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        unknown = []
        for key, value in raw.items():
            if key in known:
                values[key] = value
            elif not (key in _IGNORED_DIT_KEYS or key.startswith("_") or key.endswith("_pretrained_path")):
                unknown.append(key)
        if unknown:
            raise ModelConfigError(f"unknown keys in diffusion_model_cfg: {sorted(unknown)}; known: {sorted(known)}")
        if list(raw.get("patch_size", (1, 2, 2))) != [1, 2, 2]:
            raise ModelConfigError(f"patch_size must be [1, 2, 2], got {raw['patch_size']}")
        for flag in ("qk_norm", "cross_attn_norm"):
            if not raw.get(flag, True):
                raise ModelConfigError(f"{flag}=false is not supported")
        values.update(more)
        return cls(**values)


@dataclass(frozen=True)
class DreamZeroConfig:
    """The whole network and the numbers of its head that inference needs (DreamZero spec 6.3).

    Attributes:
        num_frames: pixel frames of the conditioning clip, ``1 + 4 k``.
        action_horizon: rows of a chunk.
        target_video_hw: (height, width) the mosaic is resized to, or None.
        decouple_inference_noise, video_inference_final_noise: the decoupled video schedule (spec 4.7).
        ignored: keys of ``config.json`` that had no effect, for ``wam inspect``.
    """

    dit: DiTConfig = field(default_factory=DiTConfig)
    text: TextEncoderConfig = field(default_factory=TextEncoderConfig)
    image: ImageEncoderConfig = field(default_factory=ImageEncoderConfig)
    vae: VAEConfig = field(default_factory=VAEConfig)
    num_frames: int = 33
    action_horizon: int = 24
    target_video_hw: tuple[int, int] | None = None
    decouple_inference_noise: bool = False
    video_inference_final_noise: float = 0.8
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_frames", "action_horizon"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= largest(name):
                raise ModelConfigError(f"{name} must be an integer from 1 to {largest(name)}, got {value!r}")
        if self.target_video_hw is not None:
            self.check_picture(*self.target_video_hw, "target_video_height and target_video_width")
        if type(self.decouple_inference_noise) is not bool:
            raise ModelConfigError(f"decouple_inference_noise must be a bool, got {self.decouple_inference_noise!r}")
        if not 0 <= (final := self.video_inference_final_noise) < 1:
            raise ModelConfigError(f"video_inference_final_noise must be in [0, 1), got {final}")
        if self.num_frames < 1 or (self.num_frames - 1) % 4:
            raise ModelConfigError(f"num_frames must be 1 + 4 k, got {self.num_frames}")
        if self.dit.in_dim != 4 + 2 * self.vae.z_dim or self.dit.out_dim != self.vae.z_dim:
            raise ModelConfigError(
                f"in_dim {self.dit.in_dim} and out_dim {self.dit.out_dim} do not fit the VAE's {self.vae.z_dim} latent "
                f"channels; expected in_dim = 4 + 2 z = {4 + 2 * self.vae.z_dim} and out_dim = z"
            )
        if self.dit.text_dim != self.text.dim or self.dit.text_len != self.text.text_len:
            raise ModelConfigError(
                f"text width/length of the DiT ({self.dit.text_dim}, {self.dit.text_len}) and of the text encoder "
                f"({self.text.dim}, {self.text.text_len}) differ"
            )
        if self.dit.clip_dim != self.image.vision_dim:
            raise ModelConfigError(f"clip_dim {self.dit.clip_dim} differs from the tower's {self.image.vision_dim}")
        if self.action_horizon != self.dit.num_action_per_block:
            raise ModelConfigError(
                f"action_horizon {self.action_horizon} must equal num_action_per_block {self.dit.num_action_per_block}"
            )
        if self.latent_frames < self.dit.num_frame_per_block:
            raise ModelConfigError(f"num_frames {self.num_frames} gives fewer latent frames than one block")

    def check_picture(self, height: int, width: int, source: str) -> None:
        """
        Raises:
            ModelConfigError: a picture of this size does not give ``frame_seqlen`` tokens per latent frame.
        """
        factor = 2 * self.vae.spatial_factor
        tokens = (height // factor) * (width // factor)
        if height < 1 or width < 1 or height % factor or width % factor or tokens != self.dit.frame_seqlen:
            raise ModelConfigError(
                f"{source}: a picture of {height}x{width} gives {tokens} tokens per latent frame, expected "
                f"frame_seqlen = {self.dit.frame_seqlen} from sides that are multiples of {factor}"
            )

    @property
    def latent_frames(self) -> int:
        """Latent frames of the conditioning tensor ``ys``."""
        return (self.num_frames - 1) // 4 + 1

    @classmethod
    def dreamzero_14b(cls) -> DreamZeroConfig:
        """The published DROID network: 22.92 B parameters."""
        return cls()

    @classmethod
    def tiny(cls) -> DreamZeroConfig:
        """The same architecture at small widths: a step takes a fraction of a second on two CPU cores.

        The mosaic is shrunk to 64x112 (latent 8x14, 28 tokens per frame). The text is longer than the published 512
        because the stand-in tokenizer of this network spends one token per byte.
        """
        dit = DiTConfig(
            dim=64,
            num_heads=4,
            num_layers=3,
            ffn_dim=128,
            freq_dim=32,
            text_dim=48,
            text_len=1024,
            clip_dim=40,
            hidden_size=32,
            frame_seqlen=28,
        )
        text = TextEncoderConfig(
            vocab=512, dim=48, dim_attn=48, dim_ffn=96, num_heads=4, num_layers=2, text_len=dit.text_len
        )
        return cls(
            dit=dit,
            text=text,
            image=ImageEncoderConfig(vision_dim=40, vision_heads=4, vision_layers=3, embed_dim=32),
            vae=VAEConfig(dim=4),
            target_video_hw=(64, 112),
        )

    @classmethod
    def from_head_config(cls, raw: Mapping[str, Any]) -> DreamZeroConfig:
        """Build from the action head's ``config`` object (nested ``*_cfg`` dictionaries included)."""
        dit_raw = raw.get("diffusion_model_cfg")
        if not isinstance(dit_raw, Mapping):
            raise ModelConfigError("config.json has no action_head_cfg.config.diffusion_model_cfg")
        text_raw = _component(raw, "text_encoder_cfg")
        if "text_len" in dit_raw:
            text_raw.setdefault("text_len", dit_raw["text_len"])
        text = TextEncoderConfig.from_dict(text_raw)
        image = ImageEncoderConfig.from_dict(_component(raw, "image_encoder_cfg"))
        vae_raw = dict(_component(raw, "vae_cfg"))
        for key in ("tiled", "tile_size_height", "tile_size_width", "tile_stride_height", "tile_stride_width"):
            if key in raw:
                vae_raw.setdefault(key, raw[key])
        vae = VAEConfig.from_dict(vae_raw)
        shared = {k: raw[k] for k in ("action_dim", "max_state_dim", "num_frame_per_block") if k in raw}
        for key in shared.keys() & dit_raw.keys():
            if shared[key] != dit_raw[key]:
                raise ModelConfigError(f"{key} is {shared[key]} in the head and {dit_raw[key]} in diffusion_model_cfg")
        merged = shared | dict(dit_raw)
        dit = DiTConfig.from_dict({"text_dim": text.dim, "text_len": text.text_len} | merged, clip_dim=image.vision_dim)
        used = {"num_frames", "action_horizon", "decouple_inference_noise", "video_inference_final_noise"}
        size = (raw.get("target_video_height"), raw.get("target_video_width"))
        if any(s is not None and type(s) is not int for s in size) or (size[0] is None) != (size[1] is None):
            raise ModelConfigError(f"target_video_height and target_video_width must both be integers, got {size}")
        consumed = used | {"tiled", "action_dim", "max_state_dim", "num_frame_per_block"}
        ignored = sorted(
            k for k in raw if k not in consumed and not k.startswith(("_", "tile_", "target_video")) and "_cfg" not in k
        )
        return cls(
            dit=dit,
            text=text,
            image=image,
            vae=vae,
            target_video_hw=(size[0], size[1]) if size[0] is not None and size[1] is not None else None,
            ignored=tuple(ignored),
            **{k: raw[k] for k in sorted(used) if raw.get(k) is not None},
        )

    @classmethod
    def from_config_json(cls, raw: Mapping[str, Any]) -> DreamZeroConfig:
        """Build from the parsed ``config.json`` of a checkpoint folder. ``action_head_cfg`` may be nested or flat."""
        head = raw.get("action_head_cfg")
        if not isinstance(head, Mapping):
            raise ModelConfigError("config.json has no 'action_head_cfg'; is this a DreamZero checkpoint?")
        inner = head.get("config", head)
        if not isinstance(inner, Mapping):
            raise ModelConfigError(f"action_head_cfg.config must be a dictionary, got {type(inner).__name__}")
        top = {k: raw[k] for k in ("action_horizon", "action_dim") if k in raw}
        return cls.from_head_config({**top, **inner})


def _component(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A ``*_cfg`` dictionary without Hydra targets and paths of pretrained files."""
    section = raw.get(key) or {}
    if not isinstance(section, Mapping):
        raise ModelConfigError(f"{key} must be a dictionary, got {type(section).__name__}")
    return {k: v for k, v in section.items() if not k.startswith("_") and not k.endswith("_pretrained_path")}
