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
LONG_CALL_S = 1.0
"""Rows with longer calls are given fewer: theirs vary by less than a percent."""
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
    prepared: bool = False,
    say: str = "",
) -> dict[str, Any]:
    """One cold window, then up to ``windows`` measured ones, at least ``min_windows`` of them.

    No window starts after ``budget_s``. The session is a real one: the first call sees one frame, later calls four, and
    every fifth call finds the window full and restarts, as in an episode. Observations are made outside the clock.

    Args:
        ahead: all frames of a call but the newest are encoded before the clock starts, as when they were encoded as
            they arrived: what is measured is the time from the newest frame to the chunk.
        prepared: nothing is compiled or recorded in a call any more, so where calls are long the cold window ends with
            its second call, and the measured ones have a session of their own.
    """
    device = policy.network.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    run = _Run(policy, want_video=want_video, ahead=ahead, say=say)
    run.calls_of_a_window(cold=True, stop_after_s=LONG_CALL_S if prepared else float("inf"))
    stop = time.perf_counter() + budget_s
    for window in range(windows):
        if window >= min_windows and time.perf_counter() > stop:
            break
        run.calls_of_a_window(cold=False)
    run.end()
    memory = {}
    if device.type == "cuda":
        memory = {
            "peak_GiB": round(torch.cuda.max_memory_allocated(device) / 2**30, 2),
            "peak_reserved_GiB": round(torch.cuda.max_memory_reserved(device) / 2**30, 2),
            "after_GiB": round(torch.cuda.memory_allocated(device) / 2**30, 2),
        }
    policy.close(run.session)
    return summarise(run.calls) | {"memory": memory, "calls": run.calls}


class _Run:
    """A session under the clock. ``calls``: what every call took."""

    def __init__(self, policy: DreamZeroPolicy, *, want_video: bool, ahead: bool, say: str) -> None:
        self._policy, self._want_video, self._ahead, self._say = policy, want_video, ahead, say
        self.session = policy.open()
        self.calls: list[dict[str, Any]] = []
        self._index = self._position = 0

    def calls_of_a_window(self, *, cold: bool, stop_after_s: float = float("inf")) -> None:
        """Four calls. Two and a new session when the first takes longer than ``stop_after_s``."""
        for i in range(4):
            wall = self._call(cold)
            if i == 1 and self.calls[-2]["wall_s"] > stop_after_s:
                self._policy.close(self.session)
                self.session, self._index = self._policy.open(), 0
                return
            if self._say:
                print(f"\r  {self._say}: call {len(self.calls)}, {wall * 1e3:.0f} ms   ", end="", file=sys.stderr)

    def _call(self, cold: bool) -> float:
        policy, session = self._policy, self.session
        observation = observation_at(policy, self._index, want_video=self._want_video)
        if self._ahead:
            _encode_ahead(policy, session, observation)
        begin = time.perf_counter()
        chunk: ActionChunk = policy.infer(session, observation)
        wall = time.perf_counter() - begin
        restarted = chunk.reset in (ResetReason.FIRST_CALL, ResetReason.WINDOW_FULL)
        self._position = 1 if restarted else self._position + 1
        self._index += 1
        self.calls.append({"position": self._position, "cold": cold, "wall_s": wall, **chunk.timings_s})
        return wall

    def end(self) -> None:
        if self._say:
            print(file=sys.stderr)


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
