"""``wam bench step``: seconds per stage of a closed-loop step, over whole windows, cold calls included and named."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wam_policy_ros.contract.fakes import example_observation
from wam_policy_ros.contract.interface import ActionChunk, ResetReason
from wam_policy_ros.engine.build import build_policy
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.policy import DreamZeroPolicy
from wam_policy_ros.tools.provenance import provenance

PERCENTILES = (50, 90, 99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--checkpoint", help="checkpoint folder")
    source.add_argument("--network", choices=["tiny", "14b"], default="tiny", help="random weights of this size")
    parser.add_argument("--tokenizer", help="folder with tokenizer.json")
    parser.add_argument("--embodiment", default="oxe_droid")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--schedule", choices=["static", "dynamic", "full"], default="static")
    parser.add_argument("--evaluations", type=int, default=8, help="of 16 solver steps, static schedule")
    parser.add_argument("--windows", type=int, default=4, help="measured windows of four calls, after one cold window")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")


def run(args: argparse.Namespace) -> int:
    config = EngineConfig(dtype=args.dtype, schedule=args.schedule, evaluations=args.evaluations)
    begin = time.perf_counter()
    policy = build_policy(
        embodiment=args.embodiment,
        checkpoint=args.checkpoint,
        random_weights=None if args.checkpoint else args.network,
        tokenizer=args.tokenizer,
        device=args.device,
        config=config,
        progress=lambda text, fraction: print(f"  {text} {fraction:.0%}", file=sys.stderr),
    )
    load_s = time.perf_counter() - begin
    report = measure(policy, args.windows) | {"load_s": load_s, "network": args.checkpoint or f"random {args.network}"}
    report["provenance"] = provenance(policy.network.device)
    print(summary(report))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
        print(f"written: {args.json}")
    return 0


def measure(policy: DreamZeroPolicy, windows: int) -> dict[str, Any]:
    """Run one cold window and ``windows`` measured ones with fresh random observations, one session throughout.

    The session is a real one: the first call sees one frame, later calls four, and every fifth call finds the window
    full and restarts, as in an episode.
    """
    session = policy.open()
    device = policy.network.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    period_ns = round(policy.spec.horizon * 1e9 / policy.spec.control_rate_hz)
    calls: list[dict[str, Any]] = []
    position = 0
    for index in range((windows + 1) * 4):
        frames = 1 if index == 0 else len(policy.spec.frame_offsets)
        observation = example_observation(policy.spec, frames=frames, seed=index, stamp_ns=10**18 + index * period_ns)
        begin = time.perf_counter()
        chunk: ActionChunk = policy.infer(session, observation)
        wall = time.perf_counter() - begin
        position = 1 if chunk.reset in (ResetReason.FIRST_CALL, ResetReason.WINDOW_FULL) else position + 1
        calls.append({"position": position, "cold": index < 4, "wall_s": wall, **chunk.timings_s})
        print(f"\r  call {index + 1}/{(windows + 1) * 4}: {wall * 1e3:.0f} ms ", end="", file=sys.stderr)
    print(file=sys.stderr)
    warm = [c for c in calls if not c["cold"]]
    stages = sorted({k for c in calls for k in c} - {"position", "cold"})
    return {
        "spec": dict(policy.spec.details) | {"weights": policy.spec.weights, "embodiment": policy.spec.embodiment},
        "calls": calls,
        "cold_first_call_s": calls[0]["wall_s"],
        "stages_s": {s: _percentiles([c[s] for c in warm if s in c]) for s in stages},
        "position_s": {str(p): _percentiles([c["wall_s"] for c in warm if c["position"] == p]) for p in (1, 2, 3, 4)},
        "session_window_bytes": sum(w.nbytes for w in (session.window.cond, session.window.uncond) if w is not None),
        "peak_memory_GiB": round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if device.type == "cuda" else None,
    }


def _percentiles(values: list[float]) -> dict[str, float]:
    """p50, p90, p99, min, max and n; empty when nothing was measured."""
    if not values:
        return {}
    out = {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return out | {"min": min(values), "max": max(values), "n": len(values)}


def summary(report: dict[str, Any]) -> str:
    """A table for people; the evaluations, hardware and versions are on its first lines."""
    spec, where = report["spec"], report["provenance"]
    machine = where["gpu"]["name"] if where["gpu"] else f"{where['cpu']}, {where['cpu_threads']} threads"
    lines = [
        f"{report['network']}, {spec['dtype']}, {spec['evaluations']} evaluations, guidance {spec['guidance_scale']}",
        f"{machine}; torch {where['torch']}; commit {where['commit'] or 'unknown'}",
        f"load {report['load_s']:.1f} s, first (cold) call {report['cold_first_call_s'] * 1e3:.0f} ms"
        + (f", peak memory {report['peak_memory_GiB']} GiB" if report["peak_memory_GiB"] is not None else ""),
        f"{'ms':16}{'p50':>9}{'p90':>9}{'p99':>9}{'min':>9}{'max':>9}{'n':>5}",
    ]
    rows = [(f"call {p} of 4", v) for p, v in report["position_s"].items()]
    order = ["preprocess", "text", "first_frame", "vae_encode", "prefill", "denoise", "decode_actions", "total"]
    rows += [(s, report["stages_s"][s]) for s in order if s in report["stages_s"]]
    for name, v in rows:
        if v:
            numbers = "".join(f"{v[k] * 1e3:9.1f}" for k in ("p50", "p90", "p99", "min", "max"))
            lines.append(f"{name:16}{numbers}{v['n']:5}")
    return "\n".join(lines)
