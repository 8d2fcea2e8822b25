"""How the engine runs the network: resolved once, frozen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from wam_policy_ros.contract.errors import ConfigError

from .step_schedule import STATIC_MASKS

NUM_STEPS = 16  # solver steps; hard-coded upstream, where config.json's num_inference_timesteps is dead


@dataclass(frozen=True)
class EngineConfig:
    """Options of a step. The defaults are the published algorithm.

    Attributes:
        dtype: ``bfloat16`` as published, ``float32`` or ``float64`` for comparisons, ``auto``: bfloat16 on a GPU,
            float32 on a CPU.
        schedule: ``static`` (upstream's default), ``dynamic`` (upstream's cosine rule) or ``full``.
        evaluations: network evaluations of the static schedule, of 16 solver steps: 5, 6, 7, 8 or 16.
        guidance_scale: classifier-free guidance on the video flow. 1.0 leaves the second branch out.
        seed: of the noise; the same for every call, as upstream.
        sigma_shift: of the flow-matching schedule.
    """

    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"
    schedule: Literal["static", "dynamic", "full"] = "static"
    evaluations: int = 8
    guidance_scale: float = 5.0
    seed: int = 1140
    sigma_shift: float = 5.0

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "bfloat16", "float32", "float64"):
            raise ConfigError("unknown dtype", got=self.dtype, expected="auto, bfloat16, float32 or float64")
        if self.schedule not in ("static", "dynamic", "full"):
            raise ConfigError("unknown step schedule", got=self.schedule, expected="static, dynamic or full")
        if self.schedule == "static" and self.evaluations not in (*STATIC_MASKS, NUM_STEPS):
            raise ConfigError(
                "no static schedule with this number of evaluations",
                got=self.evaluations,
                expected=f"one of {[*STATIC_MASKS, NUM_STEPS]}",
            )
        for name in ("guidance_scale", "sigma_shift"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigError(f"{name} must be a finite number", got=repr(value))
        if not self.sigma_shift > 0:
            raise ConfigError("sigma_shift must be positive", got=self.sigma_shift)
        if type(self.seed) is not int:
            raise ConfigError("seed must be an integer", got=repr(self.seed))

    @classmethod
    def reference(cls) -> EngineConfig:
        """The published algorithm as upstream ships it: 8 of 16 evaluations, guidance 5, seed 1140."""
        return cls()

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> EngineConfig:
        """Unknown keys raise and name the key."""
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(raw) - known)
        if unknown:
            raise ConfigError("unknown engine option", got=unknown, expected=f"keys among {sorted(known)}")
        return cls(**raw)

    @property
    def evaluations_text(self) -> str:
        """For reports: every benchmark line names its evaluations."""
        if self.schedule == "dynamic":
            return f"dynamic of {NUM_STEPS}"
        return f"{NUM_STEPS if self.schedule == 'full' else self.evaluations} of {NUM_STEPS}"
