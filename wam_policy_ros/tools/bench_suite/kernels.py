"""``wam bench kernels``: each fused operation against its twin and against the memory bandwidth, and what the libraries
give for the products and attentions between them.

Times are of CUDA graph replays, so that launches cost nothing; inputs are random and take turns, so that the second
level cache holds none of them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.tools.provenance import provenance

from .ceilings import measure_copy
from .kernel_cases import SIZES, Case, Sizes, cases
from .kernel_variants import lines as variant_lines
from .kernel_variants import measure_variants, variants
from .products import measure_attention, measure_products
from .records import write_json

ASSUMED_BYTES_PER_S, ASSUMED_FLOPS = 4e12, 600e12
_REPEATS, _CALLS = 15, 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--network", choices=list(SIZES), default="14b", help="whose shapes (default 14b)")
    parser.add_argument("--device", default="auto", help="a CPU runs the plain twins")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="operations whose name starts with one of these")
    parser.add_argument("--no-libraries", action="store_true", help="leave out matrix products and attention")
    parser.add_argument("--tune", action="store_true", help="time the kernels with other block sizes and warps too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")


def run(args: argparse.Namespace) -> int:
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device)
    if args.tune and device.type != "cuda":
        raise ConfigError("block sizes are tuned on a GPU", got=str(device), remedy="leave --tune out")
    torch.manual_seed(0)
    report = measure(SIZES[args.network], device, args.only or [""], libraries=not args.no_libraries, tune=args.tune)
    report |= {"network": args.network, "provenance": provenance(device)}
    print(table(report))
    if args.json:
        write_json(report, args.json)
        print(f"written: {args.json}")
    return 0 if all(row["ok"] for row in report["operations"]) else 1


def measure(sizes: Sizes, device: torch.device, only: list[str], *, libraries: bool, tune: bool) -> dict[str, Any]:
    """JSON-serialisable; see ``table`` for what is in it."""
    copies = {str(size): measure_copy(size, device) for size in _copy_sizes(device)}
    bytes_per_s = max(v for v in copies.values()) * 1e9
    chosen = [case for case in cases(sizes, device) if any(case.name.startswith(word) for word in only)]
    if device.type == "cuda":
        with ThreadPoolExecutor(os.cpu_count()) as threads:  # the first call of each compiles its kernel
            list(threads.map(lambda case: case.work(0), chosen))
    rows = [_operation(case, bytes_per_s, device) for case in chosen]
    report: dict[str, Any] = {
        "sizes": sizes._asdict(),
        "implementation": "Triton" if device.type == "cuda" else "plain twins",
        "copy_GBps_by_bytes": copies,
        "assumed": {"bytes_per_s": ASSUMED_BYTES_PER_S, "flops": ASSUMED_FLOPS},
        "operations": rows,
    }

    def seconds(work: Callable[[int], object]) -> float:
        return replay_seconds(work, device)

    if tune:
        report["variants"] = measure_variants(list(variants(sizes, device, only)), device, seconds)
    if libraries:
        report["products_TFLOPs"] = measure_products(sizes, device, seconds)
        report["attention_TFLOPs"] = measure_attention(sizes, device, seconds)
    return report


def _copy_sizes(device: torch.device) -> list[int]:
    return [2**31, 2**27, 2**25] if device.type == "cuda" else [2**24]


def _operation(case: Case, bytes_per_s: float, device: torch.device) -> dict[str, Any]:
    error = case.error()
    seconds = replay_seconds(case.work, device)
    predicted = max(case.bytes / ASSUMED_BYTES_PER_S, case.flop / ASSUMED_FLOPS)
    return {
        "name": case.name,
        "error": error,
        "bound": case.bound,
        "ok": error <= case.bound,
        "bytes": case.bytes,
        "flop": case.flop,
        "predicted_us": predicted * 1e6,
        "us": seconds * 1e6,
        "GBps": case.bytes / seconds / 1e9,
        "of_copy": case.bytes / seconds / bytes_per_s,
    }


def replay_seconds(work: Callable[[int], object], device: torch.device) -> float:
    """Median device seconds of one ``work(i)``; on a GPU several calls are captured and the graph is replayed."""
    from .clock import median_seconds

    if device.type != "cuda":
        return median_seconds(work, device, budget_s=0.05)[0]
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for i in range(3):
            work(i)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Kept, so that each call has an output of its own: one that is overwritten would stay in the cache.
        kept = [work(i) for i in range(_CALLS)]
    seconds, _ = median_seconds(lambda i: graph.replay(), device, repeats=_REPEATS)
    del kept
    return seconds / _CALLS


def table(report: dict[str, Any]) -> str:
    """For people."""
    where = report["provenance"]
    gpu = where["gpu"]["name"] if where["gpu"] else where["cpu"]
    lines = [
        f"{gpu}; torch {where['torch']}; commit {where['commit'] or 'unknown'}; {report['implementation']}",
        "copy, GB/s: " + ", ".join(f"{int(k) >> 20} MiB {v:.0f}" for k, v in report["copy_GBps_by_bytes"].items()),
        f"{'operation':34}{'error':>10}{'MB':>8}{'predicted':>11}{'us':>9}{'GB/s':>8}{'of copy':>9}",
    ]
    for r in report["operations"]:
        lines.append(
            f"{r['name']:34}{r['error']:10.1e}{r['bytes'] / 1e6:8.1f}{r['predicted_us']:11.1f}{r['us']:9.1f}"
            f"{r['GBps']:8.0f}{r['of_copy']:9.0%}{'' if r['ok'] else '  WRONG: bound ' + format(r['bound'], '.0e')}"
        )
    lines += variant_lines(report.get("variants", []))
    for title in ("products_TFLOPs", "attention_TFLOPs"):
        for shape, rates in report.get(title, {}).items():
            words = ", ".join(f"{k} {v:.0f}" if isinstance(v, float) else f"{k} -" for k, v in rates.items())
            lines.append(f"{title.split('_')[0]} {shape}: {words}")
    return "\n".join(lines)
