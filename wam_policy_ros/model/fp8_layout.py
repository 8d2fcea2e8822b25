"""FP8 checkpoint folders: which tensors are 8-bit, what their scales are called, what ``fp8.json`` says.

A linear layer is ``weight`` (float8_e4m3fn ``[N, K]``) and ``weight_scale`` (float32 ``[N]``):
``weight[n, k] = values[n, k] * scale[n]``. Everything else is stored as in the checkpoint it was made from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MANIFEST = "fp8.json"
FORMAT = "e4m3fn"
SCALES = "one per output row, float32: weight = values * scale"
_SCALE = "_scale"
_WEIGHT = re.compile(
    r"model\.blocks\.\d+\.(self_attn\.[qkvo]|cross_attn\.([qkvo]|k_img|v_img)|ffn\.[02])\.weight", re.ASCII
)


def is_fp8_weight(module: str) -> bool:
    """Whether this ``DreamZero.state_dict()`` entry is 8-bit in an FP8 checkpoint: the linear layers of the blocks."""
    return _WEIGHT.fullmatch(module) is not None


def scale_name(weight: str) -> str:
    return weight + _SCALE


def scale_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the scales that belong to a network with these tensors."""
    return {scale_name(n): shape[:1] for n, shape in shapes.items() if is_fp8_weight(n)}


def is_scale(module: str) -> bool:
    return module.endswith(_SCALE) and is_fp8_weight(module.removesuffix(_SCALE))


@dataclass(frozen=True)
class Fp8Manifest:
    """``fp8.json``.

    Attributes:
        source: name of the checkpoint this folder was made from.
        source_sha256: of its files, by name.
        version: of this package, when it was made.
        tier: how the results relate to the source's: ``numeric``.
    """

    source: str
    source_sha256: Mapping[str, str]
    version: str
    tier: str = "numeric"

    def to_json(self, layers: Iterable[str]) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "scales": SCALES,
            "tier": self.tier,
            "layers": len(list(layers)),
            "source": self.source,
            "source_sha256": dict(self.source_sha256),
            "wam_policy_ros": self.version,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> tuple[Fp8Manifest, list[str]]:
        """The manifest, and what is wrong with it."""
        problems = [
            f"{MANIFEST}: {key} is {raw.get(key)!r}, expected {expected!r}"
            for key, expected in (("format", FORMAT), ("scales", SCALES), ("tier", "numeric"))
            if raw.get(key) != expected
        ]
        hashes = raw.get("source_sha256")
        if not isinstance(hashes, Mapping) or not all(isinstance(v, str) for v in hashes.values()):
            problems.append(f"{MANIFEST}: source_sha256 is {hashes!r}, expected file names and hashes")
            hashes = {}
        manifest = cls(str(raw.get("source")), dict(hashes), str(raw.get("wam_policy_ros")))
        return manifest, problems
