"""What a step would take on several GPUs, from the stage times of one: a model to be proved wrong, no measurement.

Guidance parallel: one branch of the guidance per group of GPUs, so a group does what one GPU did with half of the rows.
Sequence parallel, inside a group: the tokens of a branch are shared out, and every layer exchanges twice (queries, keys
and values before attention, its result behind it; Ulysses, arXiv 2309.14509). Everything else of a step is done by
every GPU alike and takes what it took. Exchanges overlap with nothing.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.model.config import DreamZeroConfig

POSITIONS = (1, 2, 3, 4)  # of a call in its window: all of them, or the median is of something else
SPLIT_STAGES = ("prefill", "denoise")


@dataclass(frozen=True)
class Assumptions:
    """What one GPU cannot tell. All of it goes into the report.

    Attributes:
        bandwidth_GBps: that a GPU receives over NVLink; an H200 has 450 per direction on paper, of which about four
            fifths reach the program.
        latency_us: of one collective inside a CUDA graph, start to end with nothing to carry.
        sequence_efficiency: per halving of a branch's tokens; below about 900 rows matrix products no longer fill the
            GPU and element-wise kernels cost their launch.
        handover_ms: per step: the observation reaches the other processes, and they begin.
        branch_efficiency: of the work on one branch alone; None: from the report, see :func:`branch_efficiency`.
    """

    bandwidth_GBps: float = 360.0
    latency_us: float = 20.0
    sequence_efficiency: float = 0.85
    handover_ms: float = 2.0
    branch_efficiency: float | None = None

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value is None and name == "branch_efficiency":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise ConfigError(f"{name} must be a number of at least 0", got=repr(value))
            if "efficiency" in name and not 0 < value <= 1:
                raise ConfigError(f"{name} must be in (0, 1]", got=value)
        if self.bandwidth_GBps == 0:
            raise ConfigError("bandwidth_GBps must be positive", got=0)

    def seconds(self, collectives: int, received: float) -> float:
        """Of so many collectives that bring ``received`` bytes to a GPU in all."""
        return collectives * self.latency_us * 1e-6 + received / (self.bandwidth_GBps * 1e9)


@dataclass(frozen=True)
class Layout:
    """``guidance`` groups (1 or 2) of ``sequence`` GPUs."""

    guidance: int
    sequence: int

    @classmethod
    def of(cls, gpus: int, branches: int) -> Layout:
        """Guidance first, as it exchanges least; what is left shares the tokens."""
        guidance = 2 if branches == 2 and gpus % 2 == 0 else 1
        return cls(guidance, gpus // guidance)

    @property
    def gpus(self) -> int:
        return self.guidance * self.sequence

    def __str__(self) -> str:
        return f"{self.guidance}x{self.sequence}"


LAYOUTS = (Layout(2, 1), Layout(2, 2), Layout(2, 4))


@dataclass(frozen=True)
class Traffic:
    """What one GPU receives: ``collectives`` and ``nbytes``."""

    collectives: int = 0
    nbytes: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.collectives + other.collectives, self.nbytes + other.nbytes)

    def __mul__(self, times: int) -> Traffic:
        return Traffic(self.collectives * times, self.nbytes * times)


def guidance_traffic(cfg: DreamZeroConfig, layout: Layout, width: int = 2) -> Traffic:
    """Of an evaluation of both branches: the other group's video flow, ``width`` bytes a value."""
    if layout.guidance == 1:
        return Traffic()
    dit = cfg.dit
    values = dit.num_frame_per_block * dit.frame_seqlen * 4 * dit.out_dim  # a token is a patch of 2x2 latents
    return Traffic(1, values * width)


def sequence_traffic(cfg: DreamZeroConfig, layout: Layout, tokens: int, width: int = 2) -> Traffic:
    """Of one pass of ``tokens`` through all layers: of q, k, v and the result a GPU receives what it does not have."""
    p = layout.sequence
    if p == 1:
        return Traffic()
    return Traffic(2, tokens / p * (p - 1) / p * 4 * cfg.dit.dim * width) * cfg.dit.num_layers


def step_traffic(cfg: DreamZeroConfig, layout: Layout, *, frames: int, evaluations: int, guided: int) -> Traffic:
    """Of a call that prefills ``frames`` latent frames. ``guided``: of the evaluations, those of both branches."""
    dit = cfg.dit
    tokens = dit.num_frame_per_block * dit.frame_seqlen + dit.num_action_per_block + dit.num_state_per_block
    branches = 3 - layout.guidance  # that a group carries
    both = sequence_traffic(cfg, layout, branches * tokens) + guidance_traffic(cfg, layout)
    observed = sequence_traffic(cfg, layout, branches * frames * dit.frame_seqlen)
    return observed + both * guided + sequence_traffic(cfg, layout, tokens) * (evaluations - guided)


def branch_efficiency(row: Mapping[str, Any]) -> float:
    """How fully a GPU is used by the rows of one branch, relative to both, at most 1; from a row's prefills.

    The first call of a window prefills one frame of each branch, about the rows of one branch's evaluation, the others
    two. The time that grows with the window is attention's; without it half of the rows should take half of the time.
    """
    took = {p: row["position_s"][str(p)]["stages_s"]["prefill"] for p in POSITIONS}
    # In units of frames: queries x keys; a window has 2 p - 1 frames at position p > 1.
    pairs = {1: 1, 2: 2 * 3, 3: 2 * 5, 4: 2 * 7}
    per_pair = (took[4] - took[2]) / (pairs[4] - pairs[2])
    whole = statistics.fmean(took[p] - pairs[p] * per_pair for p in POSITIONS[1:])
    return min(1.0, whole / 2 / (took[1] - per_pair))


@dataclass(frozen=True)
class Step:
    """Seconds of a step, and of them in exchanges; bytes that a GPU receives in it."""

    seconds: float
    exchange_s: float
    traffic: Traffic


def predict_step(
    stages: Mapping[str, float], *, evaluations: int, guided: int, frames: int, layout: Layout, share: float,
    assumed: Assumptions, cfg: DreamZeroConfig,
) -> Step:  # fmt: skip
    """One call.

    Args:
        stages: seconds of a call on one GPU, both branches as one batch: ``total``, ``prefill``, ``denoise``.
        evaluations: of the network; guided: those of them that evaluate both branches.
        frames: observed latent frames of the prefill.
        share: of the time of both branches that one branch takes: a half when nothing is lost.
    """
    both = stages["denoise"] / (guided + (evaluations - guided) * share)  # one evaluation of both branches
    one = both * share if layout.guidance == 2 else both
    parts = layout.sequence * assumed.sequence_efficiency ** math.log2(layout.sequence)
    prefill = stages["prefill"] * (share if layout.guidance == 2 else 1.0)
    single = both * share * (evaluations - guided)
    work = (prefill + one * guided + single) / parts
    traffic = step_traffic(cfg, layout, frames=frames, evaluations=evaluations, guided=guided)
    exchange = assumed.seconds(traffic.collectives, traffic.nbytes)
    handover = assumed.handover_ms * 1e-3 if layout.gpus > 1 else 0.0
    rest = stages["total"] - sum(stages[s] for s in SPLIT_STAGES)
    return Step(rest + work + exchange + handover, exchange, traffic)


def predict_row(
    row: Mapping[str, Any], layout: Layout, assumed: Assumptions, cfg: DreamZeroConfig, *, video: bool
) -> dict[str, Any]:
    """A row of ``wam bench step`` on another number of GPUs; milliseconds, median over a window as there.

    Raises:
        ConfigError: the row has not all positions of a window.
    """
    positions = row.get("position_s", {})
    if any(str(p) not in positions for p in POSITIONS):
        raise ConfigError(
            "the row has no stage times of every call of a window",
            got=f"{row.get('configuration')} {row.get('evaluations')}, positions {sorted(positions)}",
            remedy="measure it again with wam bench step --json",
        )
    count = int(row["evaluations"])
    efficiency = assumed.branch_efficiency or branch_efficiency(row)
    # Without a video the last evaluation needs no unguided branch.
    guided = count if video else count - 1
    steps = {
        p: predict_step(
            positions[str(p)]["stages_s"], evaluations=count, guided=guided, frames=1 if p == 1 else 2, layout=layout,
            share=0.5 / efficiency, assumed=assumed, cfg=cfg,
        )
        for p in POSITIONS
    }  # fmt: skip
    step = statistics.median(s.seconds for s in steps.values())
    one = float(row["step_s"]["p50"])
    out = {
        "configuration": row["configuration"],
        "evaluations": count,
        "gpus": layout.gpus,
        "layout": str(layout),
        "one_gpu_ms": round(one * 1e3, 1),
        "step_ms": round(step * 1e3, 1),
        "position_ms": {str(p): round(s.seconds * 1e3, 1) for p, s in steps.items()},
        "scaling_efficiency": round(one / step / layout.gpus, 3),
        "branch_efficiency": round(efficiency, 3),
        "exchange_ms": round(statistics.median(s.exchange_s for s in steps.values()) * 1e3, 2),
        "exchange_MB": round(statistics.median(s.traffic.nbytes for s in steps.values()) / 1e6, 2),
    }
    if "reaction_s" in row:
        # What was encoded ahead is encoded ahead by every GPU.
        out["reaction_ms"] = round((step - one + row["reaction_s"]["p50"]) * 1e3, 1)
    return out
