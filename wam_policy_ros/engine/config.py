"""How the engine runs the network: resolved once, frozen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from wam_policy_ros.contract.errors import ConfigError

from .step_schedule import BENCHMARK_ONLY, STATIC_MASKS, fixed_steps

NUM_STEPS = 16  # solver steps; hard-coded upstream, where config.json's num_inference_timesteps is dead

CHOICES: dict[str, tuple[str, ...]] = {
    "step": ("plain", "fused"),
    "linears": ("native", "fp8"),
    "attention": ("torch", "cudnn", "fp8"),
    "text": ("resident", "streamed"),
    "branches": ("together", "beside", "apart"),
}

PRESETS: dict[str, dict[str, Any]] = {
    "reference": {},
    "bf16": {"step": "fused", "attention": "cudnn", "graphs": True},
    "fp8": {"step": "fused", "linears": "fp8", "attention": "fp8", "text": "streamed", "graphs": True},
}
"""Options that belong together. ``reference``: the published algorithm, plain; the other two need a GPU."""


@dataclass(frozen=True)
class Bounds:
    """Of the error against the same step in float32 with the same weights.

    Attributes:
        block_input: relative error of the input of any block of the DiT, in one evaluation.
        flow: the same of the video and of the action flow.
        actions: root mean square error of a call's normalised actions, in units of their spread.
    """

    block_input: float
    flow: float
    actions: float


NUMERIC_BOUNDS = {"native": Bounds(0.02, 0.025, 0.02), "fp8": Bounds(0.08, 0.09, 0.09)}
"""What *numeric* promises, for steps in bfloat16 throughout (``native``) and with anything in 8 bits (``fp8``).

For random weights and calls with 5 evaluations. Seen on the full-size network, on an NVIDIA H200: 0.0145, 0.0167 and
0.0134 in bfloat16, with the plain step as well, and 0.0613, 0.0697 and 0.0654 in 8 bits; the rest is margin.
``wam bench accuracy`` measures and enforces them."""


@dataclass(frozen=True)
class EngineConfig:
    """Options of a step. The defaults are the published algorithm.

    Attributes:
        dtype: ``bfloat16`` as published, ``float32`` or ``float64`` for comparisons, ``auto``: bfloat16 on a GPU,
            float32 on a CPU.
        schedule: ``static`` (upstream's default), ``dynamic`` (upstream's cosine rule), ``full``, or, for benchmarks
            only, ``dynamic_best``: the pattern of the cosine rule when it skips as much as it can.
        evaluations: network evaluations of the static schedule, of 16 solver steps: 5, 6, 7, 8 or 16.
        guidance_scale: classifier-free guidance on the video flow. 1.0 leaves the second branch out.
        guidance_steps: solver steps that evaluate the unguided branch, a behavioural saving; None: every step that
            evaluates the network, as published.
        guidance_between: what the other evaluated steps do: ``reuse`` the last difference of the two branches, or
            ``off``: the conditional flow alone.
        seed: of the noise; the same for every call, as upstream.
        sigma_shift: of the flow-matching schedule.
        step: ``plain``: the published algorithm, operation by operation; ``fused``: both guidance branches as one
            batch, fused kernels, keys and values in place. *Numeric*: the same algorithm with other rounding.
        linears: of the fused step: ``native`` (the network's dtype) or ``fp8``.
        attention: of the fused step: ``torch`` (PyTorch chooses), ``cudnn``, or ``fp8`` (cuDNN's 8-bit kernel on NVIDIA
            GPUs that have one; keys and values then take half the memory).
        text: ``resident``, or ``streamed``: the text encoder waits in host memory and passes through the GPU when an
            instruction is new. *Exact*.
        graphs: replay the fused step as CUDA graphs. *Exact*: the same kernels.
        deterministic: the same weights, seeds and observations give the same bits in every process on the same kind of
            machine, see ``determinism``. The noise is then drawn by ``noise``: another draw than upstream's at the same
            seed. Costs up to half an evaluation per step when nobody looks at the video.
        branches: of the fused step on one GPU: both guidance branches ``together`` as one batch; ``beside`` each other,
            on two streams of a graph; or ``apart``, one after the other: slower. The last two give the bits that
            ``gpus`` gives. The plain step always has them apart.
        gpus: GPUs of this host that share a step, ``device`` and those after it, each in a process of its own: guidance
            branches first, *exact* against ``apart``; then the sequence of each branch, *numeric*.
        capture_exchange: with ``graphs`` and GPUs that share a branch: record their exchanges, too; False leaves all
            that contains one unrecorded. *Exact*.
        memory_budget_gib: what weights, windows and all else of this policy may take on the device, a step's working
            memory included: it decides how many sessions can be open, see ``memory.Capacity``. 0: what a GPU has, and
            no bound on a CPU.
        prepared_windows: windows of sessions whose graphs are recorded at the start, fewer where there is no memory for
            them. Those of another one are recorded in its first calls, between questions to whoever is urgent. *Exact*.
        rank_deadline_s: when another GPU's process does not answer for so long, the policy is lost; at least 1.
    """

    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"
    schedule: Literal["static", "dynamic", "full", "dynamic_best"] = "static"
    evaluations: int = 8
    guidance_scale: float = 5.0
    guidance_steps: tuple[int, ...] | None = None
    guidance_between: Literal["reuse", "off"] = "reuse"
    seed: int = 1140
    sigma_shift: float = 5.0
    step: Literal["plain", "fused"] = "plain"
    linears: Literal["native", "fp8"] = "native"
    attention: Literal["torch", "cudnn", "fp8"] = "torch"
    text: Literal["resident", "streamed"] = "resident"
    graphs: bool = False
    deterministic: bool = False
    branches: Literal["together", "beside", "apart"] = "together"
    gpus: int = 1
    capture_exchange: bool = True
    rank_deadline_s: float = 10.0
    memory_budget_gib: float = 0.0
    prepared_windows: int = 2

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "bfloat16", "float32", "float64"):
            raise ConfigError("unknown dtype", got=self.dtype, expected="auto, bfloat16, float32 or float64")
        if self.schedule not in ("static", "dynamic", "full", *BENCHMARK_ONLY):
            raise ConfigError("unknown step schedule", got=self.schedule, expected="static, dynamic or full")
        if self.schedule == "static" and self.evaluations not in (*STATIC_MASKS, NUM_STEPS):
            raise ConfigError(
                "no static schedule with this number of evaluations",
                got=self.evaluations,
                expected=f"one of {[*STATIC_MASKS, NUM_STEPS]}",
            )
        for name in ("guidance_scale", "sigma_shift", "rank_deadline_s", "memory_budget_gib"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigError(f"{name} must be a finite number", got=repr(value))
        if not self.sigma_shift > 0:
            raise ConfigError("sigma_shift must be positive", got=self.sigma_shift)
        if type(self.seed) is not int:
            raise ConfigError("seed must be an integer", got=repr(self.seed))
        if not 0 <= self.memory_budget_gib < 2**30:
            raise ConfigError(
                "memory_budget_gib is no size of memory",
                got=self.memory_budget_gib,
                expected="GiB, or 0: what the device has",
            )
        self._check_guidance()
        self._check_step()
        self._check_gpus()

    def _check_gpus(self) -> None:
        if type(self.prepared_windows) is not int or self.prepared_windows < 1:
            raise ConfigError("prepared_windows must be a whole number from 1 on", got=repr(self.prepared_windows))
        if type(self.gpus) is not int or self.gpus < 1:
            raise ConfigError("gpus must be a whole number from 1 on", got=repr(self.gpus))
        if self.rank_deadline_s < 1.0:  # a process says four times a second that it runs
            raise ConfigError(
                "rank_deadline_s is too short to tell a slow process from a dead one",
                got=self.rank_deadline_s,
                expected="1 or more, in seconds",
            )
        if self.branches != "together" and (self.gpus > 1 or self.guidance_scale == 1.0):
            raise ConfigError(
                f"branches: {self.branches} is for guidance on one GPU",
                got=f"gpus: {self.gpus}, guidance_scale: {self.guidance_scale}",
                remedy="leave branches out",
            )

    def one_branch(self) -> EngineConfig:
        """Of a path that runs one guidance branch of a call like this."""
        return dataclasses.replace(
            self, guidance_scale=1.0, guidance_steps=None, guidance_between="reuse", branches="together", gpus=1
        )

    def _check_step(self) -> None:
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"unknown {name}", got=repr(getattr(self, name)), expected=", ".join(known))
        for name in ("graphs", "deterministic", "capture_exchange"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(f"{name} must be true or false", got=repr(getattr(self, name)))
        if self.step == "plain":
            defaults = EngineConfig.__dataclass_fields__
            useless = [
                n
                for n in ("linears", "attention", "text", "graphs", "branches")
                if getattr(self, n) != defaults[n].default
            ]
            if useless:
                raise ConfigError(
                    "options of the fused step have no effect on the plain one",
                    got=", ".join(f"{n}: {getattr(self, n)}" for n in useless),
                    remedy="set step: fused, or leave them out",
                )
        elif self.dtype == "float64":
            raise ConfigError("the fused step computes in float32", got="dtype: float64", remedy="set step: plain")

    def _check_guidance(self) -> None:
        if self.guidance_between not in ("reuse", "off"):
            raise ConfigError("unknown guidance_between", got=self.guidance_between, expected="reuse or off")
        steps = self.guidance_steps
        if steps is None:
            if self.guidance_between != "reuse":
                raise ConfigError("guidance_between has no effect without guidance_steps", got=self.guidance_between)
            return
        if not isinstance(steps, tuple) or any(type(s) is not int for s in steps) or list(steps) != sorted(set(steps)):
            raise ConfigError("guidance_steps must be a tuple of different integers in rising order", got=repr(steps))
        if self.guidance_scale == 1.0:
            raise ConfigError("guidance_steps has no effect without guidance", got="guidance_scale 1.0")
        fixed = fixed_steps(self.schedule, self.evaluations, NUM_STEPS)
        possible = range(NUM_STEPS) if fixed is None else fixed
        if lost := [s for s in steps if s not in possible]:
            raise ConfigError(f"guidance_steps {lost} never evaluate the network", expected=f"among {list(possible)}")
        if self.guidance_between == "reuse" and steps[:1] != (0,):
            raise ConfigError(
                "there is no difference to reuse before the first guided step",
                got=f"guidance_steps {list(steps)}",
                expected="step 0 among them, or guidance_between: off",
            )

    def guides(self, step: int) -> bool:
        """Whether an evaluation at this solver step runs the unguided branch too."""
        return self.guidance_scale != 1.0 and (self.guidance_steps is None or step in self.guidance_steps)

    @classmethod
    def reference(cls) -> EngineConfig:
        """The published algorithm as upstream ships it: 8 of 16 evaluations, guidance 5, seed 1140."""
        return cls()

    @classmethod
    def preset(cls, name: str, device: torch.device, **changes: Any) -> EngineConfig:
        """
        Args:
            name: of ``PRESETS``, or ``auto``: ``reference`` on a CPU, ``bf16`` on a GPU.
            device: where it shall run; AMD GPUs take PyTorch's choice of attention, as cuDNN is NVIDIA's.
            changes: options on top.

        Raises:
            ConfigError: no such preset, or an option is wrong.
        """
        if name == "auto":
            name = "reference" if device.type == "cpu" else "bf16"
        if name not in PRESETS:
            raise ConfigError("unknown engine preset", got=name, expected=f"auto, {', '.join(PRESETS)}")
        options = PRESETS[name] | ({"attention": "torch"} if torch.version.hip and "attention" in PRESETS[name] else {})
        return cls.from_dict(options | changes)

    @classmethod
    def fast(cls, **changes: Any) -> EngineConfig:
        """The same algorithm at full speed on a GPU with FP8 units; tier *numeric*. See ``PRESETS``."""
        return cls(**(PRESETS["fp8"] | changes))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> EngineConfig:
        """Unknown keys raise and name the key."""
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(raw) - known)
        if unknown:
            raise ConfigError("unknown engine option", got=unknown, expected=f"keys among {sorted(known)}")
        return cls(**raw)

    @property
    def tier(self) -> str:
        """Against upstream's code at the same schedule and guidance. ``reference``: the algorithm as published;
        ``numeric``: the same one with other rounding; ``behavioural``: one that upstream does not ship."""
        if self.guidance_steps is not None or self.schedule in BENCHMARK_ONLY:
            return "behavioural"
        return "reference" if self.step == "plain" else "numeric"

    @property
    def bounds(self) -> Bounds:
        """That the step keeps against float32."""
        return NUMERIC_BOUNDS["fp8" if "fp8" in (self.linears, self.attention) else "native"]

    @property
    def evaluations_text(self) -> str:
        """For reports: every benchmark line names its evaluations."""
        fixed = fixed_steps(self.schedule, self.evaluations, NUM_STEPS)
        text = f"{'dynamic' if fixed is None else len(fixed)} of {NUM_STEPS}"
        if self.schedule in BENCHMARK_ONLY:
            text += " (best case of the dynamic rule, benchmark only)"
        if self.guidance_steps is not None:
            text += f", guidance at {len(self.guidance_steps)} ({self.guidance_between} between)"
        return text
