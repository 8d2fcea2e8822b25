"""Whole windows of calls, cold ones included and named, and what they say."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from wam_policy_ros.contract.fakes import example_observation
from wam_policy_ros.contract.interface import ActionChunk, Observation, ResetReason
from wam_policy_ros.engine.policy import DreamZeroPolicy
from wam_policy_ros.engine.session import Session

PERCENTILES = (50, 90, 99)
NOT_STAGES = ("position", "cold", "wall_s")
STAGE_ORDER = (
    *("preprocess", "text", "first_frame", "vae_encode", "prefill", "denoise"),
    *("decode_actions", "outside_gpu", "total"),
)


def observation_at(policy: DreamZeroPolicy, index: int, *, want_video: bool = True) -> Observation:
    """Fresh random pictures of call ``index`` of an episode: one frame in the first, all the policy looks at later."""
    spec = policy.spec
    period_ns = round(spec.horizon * 1e9 / spec.control_rate_hz)
    frames = 1 if index == 0 else len(spec.frame_offsets)
    made = example_observation(spec, frames=frames, seed=index, stamp_ns=10**18 + index * period_ns)
    return replace(made, want_video=want_video)


def measure(
    policy: DreamZeroPolicy,
    *,
    windows: int,
    budget_s: float = float("inf"),
    min_windows: int = 1,
    want_video: bool = True,
    ahead: bool = False,
    say: str = "",
) -> dict[str, Any]:
    """One cold window, then up to ``windows`` measured ones in one session, at least ``min_windows`` of them.

    No window starts after ``budget_s``. The session is a real one: the first call sees one frame, later calls four, and
    every fifth call finds the window full and restarts, as in an episode. Observations are made outside the clock.

    With ``ahead`` all frames of a call but the newest are encoded before the clock starts, as when they were encoded as
    they arrived: what is measured is the time from the newest frame to the chunk.
    """
    session = policy.open()
    device = policy.network.device
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    calls: list[dict[str, Any]] = []
    position, stop = 0, float("inf")
    for window in range(windows + 1):
        if window > min_windows and time.perf_counter() > stop:
            break
        if window == 1:
            stop = time.perf_counter() + budget_s
        for i in range(4):
            index = 4 * window + i
            observation = observation_at(policy, index, want_video=want_video)
            if ahead:
                _encode_ahead(policy, session, observation)
            begin = time.perf_counter()
            chunk: ActionChunk = policy.infer(session, observation)
            wall = time.perf_counter() - begin
            position = 1 if chunk.reset in (ResetReason.FIRST_CALL, ResetReason.WINDOW_FULL) else position + 1
            calls.append({"position": position, "cold": window == 0, "wall_s": wall, **chunk.timings_s})
            if say:
                print(f"\r  {say}: call {index + 1}, {wall * 1e3:.0f} ms   ", end="", file=sys.stderr)
    if say:
        print(file=sys.stderr)
    memory = {}
    if gpu:
        memory = {
            "peak_GiB": round(torch.cuda.max_memory_allocated(device) / 2**30, 2),
            "peak_reserved_GiB": round(torch.cuda.max_memory_reserved(device) / 2**30, 2),
            "after_GiB": round(torch.cuda.memory_allocated(device) / 2**30, 2),
        }
    policy.close(session)
    return summarise(calls) | {"memory": memory, "calls": calls}


def _encode_ahead(policy: DreamZeroPolicy, session: Session, observation: Observation) -> None:
    count = len(next(iter(observation.frames.values())))
    for slot in range(count - 1):
        policy.observe(session, slot, {name: frames[slot] for name, frames in observation.frames.items()})
    if policy.network.device.type == "cuda":
        torch.cuda.synchronize(policy.network.device)


def summarise(calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Percentiles of the warm calls: over whole windows, per stage, per window position."""
    warm = [c for c in calls if not c["cold"]]
    stages = [s for s in STAGE_ORDER if any(s in c for c in warm)]
    stages += sorted({k for c in warm for k in c} - set(stages) - set(NOT_STAGES))
    by_position: dict[str, Any] = {}
    for position in sorted({c["position"] for c in warm}):
        here = [c for c in warm if c["position"] == position]
        entry: dict[str, Any] = percentiles([c["wall_s"] for c in here])
        entry["p99_over_p50"] = entry["p99"] / entry["p50"]
        found = {s: [c[s] for c in here if s in c] for s in stages}
        entry["stages_s"] = {s: percentiles(v)["p50"] for s, v in found.items() if v}
        by_position[str(position)] = entry
    return {
        "step_s": percentiles([c["wall_s"] for c in warm]),
        "position_s": by_position,
        "stages_s": {s: percentiles([c[s] for c in warm if s in c]) for s in stages},
        "first_call_s": calls[0]["wall_s"],
        "cold_window_s": [c["wall_s"] for c in calls if c["cold"]],
        "worst_p99_over_p50": max((e["p99_over_p50"] for e in by_position.values()), default=None),
    }


def percentiles(values: list[float]) -> dict[str, float]:
    """p50, p90, p99, min, max and n; empty when nothing was measured."""
    if not values:
        return {}
    out = {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return out | {"min": min(values), "max": max(values), "n": len(values)}
