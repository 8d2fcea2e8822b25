"""Seconds per stage of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StageTimer:
    """Adds up time per named stage without ever making the host wait for the device inside a step.

    On a GPU a stage is the time between two events in the current stream: what the device spent on it, waits for the
    host included. Stages that are the host's work (``host=True``), and every stage on a CPU, are wall time. Reading
    the numbers (:meth:`finish`) waits for the last event, once.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._start = time.perf_counter()
        self._host: dict[str, float] = {}
        self._events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}
        self._order: list[str] = []

    @contextmanager
    def stage(self, name: str, *, host: bool = False) -> Iterator[None]:
        """Charge the block to ``name``; with ``host`` it is counted on the host's clock alone."""
        if name not in self._order:
            self._order.append(name)
        if self._cuda and not host:
            begin = self._record()
            try:
                yield
            finally:
                self._events.setdefault(name, []).append((begin, self._record()))
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            self._host[name] = self._host.get(name, 0.0) + time.perf_counter() - start

    def finish(self) -> dict[str, float]:
        """Seconds per stage, and ``total`` since construction; on a GPU also ``outside_gpu``.

        ``outside_gpu`` is what of ``total`` no device stage covers: the host's stages, the code between stages, and
        the wait for the result.
        """
        covered = 0.0
        seconds = dict.fromkeys(self._order, 0.0)
        for name, spans in self._events.items():
            spans[-1][1].synchronize()
            seconds[name] = sum(a.elapsed_time(b) for a, b in spans) * 1e-3
            covered += seconds[name]
        for name, value in self._host.items():
            seconds[name] += value
        seconds["total"] = time.perf_counter() - self._start
        if self._cuda:
            seconds["outside_gpu"] = seconds["total"] - covered
        return seconds

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
