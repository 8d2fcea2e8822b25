"""Shapes of the three encoders. The defaults are the published DreamZero networks.

``from_dict`` reads the names used by the checkpoint's ``config.json``. Every fault raises
:class:`~.errors.ModelConfigError`; nothing is guessed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from .errors import ModelConfigError

# Where a file was loaded from and which class upstream instantiates say nothing about the network.
_IGNORED = frozenset({"_target_", "_convert_", "_recursive_"})
_IGNORED_SUFFIX = "_pretrained_path"

# Statistics of the Wan2.1 latents, per channel. They are not stored in any checkpoint (DreamZero spec 5.3).
WAN_LATENT_MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
WAN_LATENT_STD = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)


@dataclass(frozen=True)
class TextEncoderConfig:
    """umT5 encoder (DreamZero spec 5.1)."""

    vocab: int = 256384
    dim: int = 4096
    dim_attn: int = 4096
    dim_ffn: int = 10240
    num_heads: int = 64
    num_layers: int = 24
    num_buckets: int = 32
    text_len: int = 512

    def __post_init__(self) -> None:
        check_values(self)
        _require_divides(self, "num_heads", "dim_attn")
        if self.num_buckets % 4:
            raise ModelConfigError(f"{_name(self)}: num_buckets is {self.num_buckets}, expected a multiple of 4")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Raises ModelConfigError for an unknown key or a value this network does not have."""
        return cls(**_fields_from(cls, values, fixed={"shared_pos": False}))


@dataclass(frozen=True)
class ImageEncoderConfig:
    """CLIP ViT-H/14 visual tower (DreamZero spec 5.2)."""

    vision_dim: int = 1280
    vision_heads: int = 16
    vision_layers: int = 32
    embed_dim: int = 1024
    image_size: int = 224
    patch_size: int = 14
    vision_mlp_ratio: int = 4

    def __post_init__(self) -> None:
        check_values(self)
        _require_divides(self, "vision_heads", "vision_dim")
        _require_divides(self, "patch_size", "image_size")

    @property
    def num_tokens(self) -> int:
        """Class token and patches."""
        return 1 + (self.image_size // self.patch_size) ** 2

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Raises ModelConfigError for an unknown key or a value this network does not have."""
        return cls(**_fields_from(cls, values, fixed={"activation": "gelu", "pre_norm": True}))


@dataclass(frozen=True)
class VAEConfig:
    """Causal video VAE of Wan2.1 (DreamZero spec 5.3). Tile sizes and strides are in latents."""

    dim: int = 96
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temporal_downsample: tuple[bool, ...] = (False, True, True)
    latent_mean: tuple[float, ...] = WAN_LATENT_MEAN
    latent_std: tuple[float, ...] = WAN_LATENT_STD
    tiled: bool = False
    tile_size_height: int = 34
    tile_size_width: int = 34
    tile_stride_height: int = 18
    tile_stride_width: int = 16

    def __post_init__(self) -> None:
        check_values(self)
        if len(self.temporal_downsample) != len(self.dim_mult) - 1:
            raise ModelConfigError(
                f"{_name(self)}: temporal_downsample has {len(self.temporal_downsample)} entries, expected one fewer "
                f"than dim_mult, which has {len(self.dim_mult)}"
            )
        if odd := [self.dim * m for m in self.dim_mult[1:] if self.dim * m % 2]:
            raise ModelConfigError(f"{_name(self)}: widths {odd} are odd; the decoder halves them when it upsamples")
        for name in ("latent_mean", "latent_std"):
            if len(getattr(self, name)) != self.z_dim:
                raise ModelConfigError(
                    f"{_name(self)}: {name} has {len(getattr(self, name))} entries, expected z_dim = {self.z_dim}"
                )
        for axis in ("height", "width"):
            size, stride = getattr(self, f"tile_size_{axis}"), getattr(self, f"tile_stride_{axis}")
            if stride > size:
                raise ModelConfigError(
                    f"{_name(self)}: tile_stride_{axis} is {stride}, expected at most tile_size_{axis} = {size}"
                )

    @property
    def spatial_factor(self) -> int:
        """Pixels per latent along height and width."""
        return 2 ** len(self.temporal_downsample)

    @property
    def temporal_factor(self) -> int:
        """Frames per latent, after the first frame, which has a latent of its own."""
        return int(2 ** sum(self.temporal_downsample))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Raises ModelConfigError for an unknown key or a value this network does not have."""
        # Upstream's spelling.
        aliases = {"temperal_downsample": "temporal_downsample"}
        return cls(**_fields_from(cls, values, fixed={"attn_scales": []}, aliases=aliases))


def _fields_from(
    cls: type, values: Mapping[str, Any], *, fixed: Mapping[str, Any], aliases: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Constructor arguments from a file's dictionary; ``fixed`` lists options with one supported value."""
    known = {f.name for f in dataclasses.fields(cls)}
    out: dict[str, Any] = {}
    for key, value in values.items():
        name = (aliases or {}).get(key, key)
        plain = list(value) if isinstance(value, list | tuple) else value
        if key in _IGNORED or key.endswith(_IGNORED_SUFFIX):
            continue
        if key in fixed:
            if plain != fixed[key]:
                raise ModelConfigError(
                    f"{cls.__name__}: {key} is {value!r}, expected {fixed[key]!r} (no other is supported)"
                )
        elif name not in known:
            raise ModelConfigError(f"{cls.__name__}: unknown key {key!r}, expected one of {sorted(known | set(fixed))}")
        elif name in out:
            raise ModelConfigError(f"{cls.__name__}: {name} is given twice (also as {key!r})")
        else:
            out[name] = tuple(plain) if isinstance(plain, list) else plain
    return out


def _name(config: object) -> str:
    return type(config).__name__


# Far above any published network: a damaged number is refused here, not by an allocation that fails, or does not.
_LARGEST = 10_000_000
_LARGEST_OF = {
    "num_layers": 512,
    "vision_layers": 512,
    "num_res_blocks": 64,
    "text_len": 65_536,
    "frame_seqlen": 65_536,
    "num_action_per_block": 65_536,
    "num_state_per_block": 65_536,
    "num_frame_per_block": 1_024,
    "max_chunk_size": 1_024,
    "num_frames": 16_385,
}


def largest(name: str) -> int:
    """The largest value of an integer field that is believed."""
    return _LARGEST_OF.get(name, _LARGEST)


def check_values(config: Any) -> None:
    """Every field (and every item of a tuple) has the type of its default; integers lie in [1, largest]."""
    for f in dataclasses.fields(config):
        value, default = getattr(config, f.name), f.default
        if isinstance(default, tuple) and not isinstance(value, tuple):
            raise ModelConfigError(f"{_name(config)}: {f.name} is {value!r}, expected a list")
        kind = type(default[0] if isinstance(default, tuple) else default)
        for item in value if isinstance(value, tuple) else (value,):
            if not _is_a(item, kind):
                expected = "a positive integer" if kind is int else f"a {kind.__name__}"
                raise ModelConfigError(f"{_name(config)}: {f.name} is {value!r}, expected {expected}")
            if kind is int and item > largest(f.name):
                raise ModelConfigError(f"{_name(config)}: {f.name} is {value!r}, expected at most {largest(f.name)}")


def _is_a(item: Any, kind: type) -> bool:
    if kind is int:
        return type(item) is int and item >= 1
    return type(item) in ((int, float) if kind is float else (kind,))


def _require_divides(config: object, divisor: str, of: str) -> None:
    d, n = getattr(config, divisor), getattr(config, of)
    if n % d:
        raise ModelConfigError(f"{_name(config)}: {of} is {n}, expected a multiple of {divisor} = {d}")
