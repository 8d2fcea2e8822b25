"""CUDA graphs of the fused step: one per piece of work and window length, replayed from Python in microseconds.

Exact: a replay launches the same kernels with the same arguments as the call it was recorded from.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

_MARGIN_BYTES = 8 << 30
"""With less free memory than this, what PyTorch keeps for later is given back before a recording."""


class GraphCache(Generic[T]):
    """Runs functions of fixed shapes and addresses, and replays them from their second call on.

    A function must read and write only tensors that live longer than this cache, and return a tensor, or a structure of
    tensors, that is overwritten by its next run.

    Args:
        device: graphs exist on CUDA devices only.
        enabled: False runs every function as it is; the slow twin.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled = enabled and device.type == "cuda"
        self._device = device
        self._graphs: dict[Hashable, tuple[Callable[[], T], T]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.enabled else None
        # One for all: what a stream frees stays reserved for it.
        self._side = torch.cuda.Stream(device) if self.enabled else None
        self._run_before: set[Hashable] = set()
        self._paused = self._only_recording = False

    def run(self, key: Hashable, function: Callable[[], T], kind: Hashable = None) -> T:
        """``function()``; recorded under ``key`` at its first call.

        Args:
            kind: the same for work with the same kernels and shapes at other addresses; None: there is no other.
        """
        if not self.enabled or self._paused:
            return function()
        known = self._graphs.get(key)
        if known is None:
            known = self._graphs[key] = self._record(function, kind)
        replay, out = known
        return out if self._only_recording else replay()

    def missing(self, key: Hashable) -> bool:
        """Whether ``run`` would record before it runs."""
        return self.enabled and not self._paused and key not in self._graphs

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Functions run as they are, and nothing is recorded."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    @contextmanager
    def recording_only(self) -> Iterator[None]:
        """What is not recorded yet is recorded, nothing is replayed: results are whatever memory holds."""
        self._only_recording = True
        try:
            yield
        finally:
            self._only_recording = False

    def clear(self) -> None:
        """Forget all recordings."""
        self._graphs.clear()

    def __len__(self) -> int:
        return len(self._graphs)

    def _record(self, function: Callable[[], T], kind: Hashable) -> tuple[Callable[[], T], T]:
        """What replays it, and what it gives."""
        side = self._side
        assert side is not None
        if kind is None or kind not in self._run_before:
            self._run_first(function, side)
            self._run_before |= set() if kind is None else {kind}
        torch.cuda.synchronize(self._device)
        # Not torch.cuda.graph: it gives all memory back before every recording, which costs more than the recording.
        if torch.cuda.mem_get_info(self._device)[0] < _MARGIN_BYTES:
            torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            # Calls of other threads, which a policy beside this one may make, are not part of the recording.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                out = function()
            except BaseException:
                with suppress(RuntimeError):  # that the recording is void; what made it so is the error
                    graph.capture_end()
                raise
            graph.capture_end()

        def replay() -> T:
            graph.replay()
            return out

        return replay, out

    def _run_first(self, function: Callable[[], T], side: torch.cuda.Stream) -> None:
        """Libraries set themselves up and kernels are compiled in a run outside the recording, on a side stream as
        PyTorch asks for."""
        main = torch.cuda.current_stream(self._device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            function()
        main.wait_stream(side)
