"""Seconds per stage of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

QUESTION_S = 1e-3
"""Another step takes longer than that."""


class StageTimer:
    """Adds up time per named stage without ever making the host wait for the device inside a step.

    On a GPU a stage is the time between two events in the current stream: what the device spent on it, waits for the
    host included. Stages that are the host's work (``host=True``), and every stage on a CPU, are wall time. Reading
    the numbers (:meth:`finish`) waits for the last event, once.

    What others do meanwhile (:meth:`away`) is nobody's stage.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._start = time.perf_counter()
        self._host: dict[str, float] = {}
        self._events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}
        self._order: list[str] = []
        self._open: list[str] = []
        self._away: dict[str, float] = {}
        self._interrupted = 0.0

    @contextmanager
    def stage(self, name: str, *, host: bool = False) -> Iterator[None]:
        """Charge the block to ``name``; with ``host`` it is counted on the host's clock alone."""
        if name not in self._order:
            self._order.append(name)
        self._open.append(name)
        if self._cuda and not host:
            begin = self._record()
            try:
                yield
            finally:
                self._open.pop()
                self._events.setdefault(name, []).append((begin, self._record()))
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            self._open.pop()
            self._host[name] = self._host.get(name, 0.0) + time.perf_counter() - start

    def away(self, seconds: float) -> None:
        """The last ``seconds`` belong to another step. The device had done all of this one's work when they began, and
        all of the other's when they ended. What a mere question takes is not counted."""
        if seconds < QUESTION_S:
            return
        self._interrupted += seconds
        for name in set(self._open):
            self._away[name] = self._away.get(name, 0.0) + seconds

    def finish(self) -> dict[str, float]:
        """Seconds per stage, and ``total`` since construction; on a GPU also ``outside_gpu``. All of them without
        ``interrupted``, which is there if there was any.

        ``outside_gpu`` is what of ``total`` no device stage covers: the host's stages, the code between stages, and
        the wait for the result.
        """
        covered = 0.0
        seconds = dict.fromkeys(self._order, 0.0)
        for name, spans in self._events.items():
            spans[-1][1].synchronize()
            seconds[name] = sum(a.elapsed_time(b) for a, b in spans) * 1e-3
            seconds[name] -= self._away.get(name, 0.0)
            covered += seconds[name]
        for name, value in self._host.items():
            seconds[name] += value - (0.0 if name in self._events else self._away.get(name, 0.0))
        seconds["total"] = time.perf_counter() - self._start - self._interrupted
        if self._cuda:
            seconds["outside_gpu"] = seconds["total"] - covered
        if self._interrupted:
            seconds["interrupted"] = self._interrupted
        return seconds

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
