"""CUDA graphs of the fused step: one per piece of work and window length, replayed from Python in microseconds.

Exact: a replay launches the same kernels with the same arguments as the call it was recorded from.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


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
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, T]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.enabled else None
        # One for all: what a stream frees stays reserved for it.
        self._side = torch.cuda.Stream(device) if self.enabled else None

    def run(self, key: Hashable, function: Callable[[], T]) -> T:
        """``function()``; recorded under ``key`` at its first call."""
        if not self.enabled:
            return function()
        known = self._graphs.get(key)
        if known is None:
            known = self._record(key, function)
        graph, out = known
        graph.replay()
        return out

    def clear(self) -> None:
        """Forget all recordings."""
        self._graphs.clear()

    def __len__(self) -> int:
        return len(self._graphs)

    def _record(self, key: Hashable, function: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        # Libraries set themselves up and kernels are compiled in a first run outside the recording, on a side stream as
        # PyTorch asks for.
        main, side = torch.cuda.current_stream(self._device), self._side
        assert side is not None
        side.wait_stream(main)
        with torch.cuda.stream(side):
            function()
        main.wait_stream(side)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Calls of other threads, which a policy beside this one may make, are not part of the recording.
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            out = function()
        self._graphs[key] = (graph, out)
        return self._graphs[key]
