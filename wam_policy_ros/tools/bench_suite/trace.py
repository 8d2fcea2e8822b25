"""One step under PyTorch's profiler: a trace that Perfetto opens, and how long the GPU had nothing to do."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_ON_THE_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_EXCHANGE = ("nccl", "ptop", "peer")
"""In names of kernels and copies between GPUs, lower case."""


def write_trace(work: Callable[[], object], path: Path, device: torch.device) -> dict[str, Any]:
    """Run ``work`` once and write what host and GPU did as Chrome trace events (Perfetto opens them).

    A ``path`` that ends in ``.gz`` is compressed, to about a tenth.

    Returns:
        JSON-serialisable summary, see :func:`summarise`.
    """
    gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if gpu else [])
    path.parent.mkdir(parents=True, exist_ok=True)
    with profile(activities=activities) as profiler:
        work()
        if gpu:
            torch.cuda.synchronize(device)
    profiler.export_chrome_trace(str(path))
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        return summarise(json.load(file)["traceEvents"])


def busy_seconds(work: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """The summary of :func:`write_trace` without keeping the trace."""
    with tempfile.TemporaryDirectory() as folder:
        return write_trace(work, Path(folder) / "trace.json", device)


def summarise(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What Chrome trace events (times in microseconds) say about the GPU.

    Returns:
        ``gpu_busy_s``: time with at least one kernel or copy running; ``gpu_span_s``: from the first to the end of the
        last; ``kernels``: launches; ``top``: [name, seconds, launches] of the ten that took longest; ``exchange_s``,
        ``exchange_kernels``: of those between GPUs, which also wait for the other side.
    """
    spans = [(float(e["ts"]), float(e["ts"]) + float(e["dur"]), str(e["name"]))
             for e in events if e.get("ph") == "X" and e.get("cat") in _ON_THE_GPU]  # fmt: skip
    spans.sort()
    between = [s for s in spans if any(word in s[2].lower() for word in _EXCHANGE)]
    end = max((stop for _, stop, _ in spans), default=0.0)
    seconds: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for start, stop, name in spans:
        seconds[name] += stop - start  # type: ignore[assignment]
        launches[name] += 1
    return {
        "gpu_busy_s": _union(spans) * 1e-6,
        "gpu_span_s": (end - spans[0][0]) * 1e-6 if spans else 0.0,
        "kernels": len(spans),
        "exchange_s": _union(between) * 1e-6,
        "exchange_kernels": len(between),
        "top": [[name[:160], value * 1e-6, launches[name]] for name, value in seconds.most_common(10)],
    }


def _union(spans: list[tuple[float, float, str]]) -> float:
    """Time in at least one of the spans, which are sorted."""
    total, end = 0.0, float("-inf")
    for start, stop, _ in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
