"""Seconds of a piece of device work: the median over repetitions, between events on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import torch


def median_seconds(
    work: Callable[[int], object], device: torch.device, *, repeats: int = 20, warmup: int = 3, budget_s: float = 1.0
) -> tuple[float, int]:
    """Median seconds of ``work(i)`` and how many repetitions it is over.

    Args:
        work: called with the number of the repetition, so that it can take turns among its inputs.
        budget_s: no further repetition starts after this time (at least three are made).
    """
    for i in range(warmup):
        work(i)
    seconds: list[float] = []
    if device.type != "cuda":
        stop = time.perf_counter() + budget_s
        while len(seconds) < repeats and (len(seconds) < 3 or time.perf_counter() < stop):
            begin = time.perf_counter()
            work(len(seconds))
            seconds.append(time.perf_counter() - begin)
        return sorted(seconds)[len(seconds) // 2], len(seconds)
    torch.cuda.synchronize(device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for i in range(repeats):
        work(i)
        marks[i + 1].record()
    marks[-1].synchronize()
    seconds = [a.elapsed_time(b) * 1e-3 for a, b in pairwise(marks)]
    return sorted(seconds)[len(seconds) // 2], len(seconds)
