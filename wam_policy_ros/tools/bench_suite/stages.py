"""Pieces of a long measurement: what each took and held, said as they end, so that a run cut short has told it."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stages:
    """Wall seconds and peak memory of named pieces, in order.

    Args:
        device: waited for at the end of a piece, so that its work counts where it was asked for.
        say: print a line when a piece ends.

    Attributes:
        rows: ``{"stage", "seconds", "gpu_peak_GiB", "host_peak_GiB"}`` per piece; the host's peak is the process's so
            far, the GPU's that of the piece.
    """

    def __init__(self, device: torch.device | None = None, *, say: bool = True) -> None:
        self.device, self._say = device, say
        self.rows: list[dict[str, Any]] = []
        self._running: tuple[str, float] | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """The block is a piece."""
        self.next(name)
        try:
            yield
        finally:
            self.end()

    def next(self, name: str) -> None:
        """End the piece that is going on, if there is one, and begin another."""
        self.end()
        if (gpu := self._gpu()) is not None:
            torch.cuda.reset_peak_memory_stats(gpu)
        self._running = (name, time.perf_counter())

    def end(self) -> None:
        """End the piece that is going on."""
        if self._running is None:
            return
        (name, begin), self._running = self._running, None
        gpu = self._gpu()
        if gpu is not None:
            torch.cuda.synchronize(gpu)
        peak = None if gpu is None else round(torch.cuda.max_memory_allocated(gpu) / 2**30, 2)
        self.add(name, time.perf_counter() - begin, peak)

    def add(self, name: str, seconds: float, gpu_peak_gib: float | None = None) -> None:
        """A piece that was timed elsewhere."""
        row = {"stage": name, "seconds": seconds, "gpu_peak_GiB": gpu_peak_gib, "host_peak_GiB": host_peak_gib()}
        self.rows.append(row)
        if self._say:
            print(line(row), file=sys.stderr, flush=True)

    def _gpu(self) -> torch.device | None:
        return self.device if self.device is not None and self.device.type == "cuda" else None


def line(row: dict[str, Any]) -> str:
    """For people."""
    gpu = "" if row["gpu_peak_GiB"] is None else f", GPU peak {row['gpu_peak_GiB']:.1f} GiB"
    return f"\r  {row['seconds']:7.2f} s  {row['stage']} (host peak {row['host_peak_GiB']:.1f} GiB{gpu})"


def host_peak_gib() -> float:
    """Most memory this process ever held; pinned memory counts, the page cache does not (Linux)."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
