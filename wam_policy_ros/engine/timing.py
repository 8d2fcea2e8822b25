"""Seconds per stage of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StageTimer:
    """Adds up wall time per named stage; waits for the device at the end of each stage so that work is charged where it
    was caused. A step has about eight stages, so the waits cost microseconds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def finish(self) -> dict[str, float]:
        """Stages and ``total`` since construction."""
        return {**self.seconds, "total": time.perf_counter() - self._start}
