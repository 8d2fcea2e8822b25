"""Ranks of sequence parallelism as threads of this process: many small cases in little time. Processes, with a real
process group, are in test_sequence_processes.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from wam_policy_ros.engine.sequence_parallel import SequenceExchange

T = TypeVar("T")
PATIENCE_S = 30


class Exchanger:
    """``Swap`` among threads: everybody shows what it sends, then takes its blocks."""

    def __init__(self, ranks: int) -> None:
        self._shown: list[Tensor] = [torch.empty(0)] * ranks
        self._barrier = threading.Barrier(ranks, timeout=PATIENCE_S)

    def swap(self, rank: int) -> Callable[[Tensor, Tensor], None]:
        def run(received: Tensor, sent: Tensor) -> None:
            self._shown[rank] = sent
            self._barrier.wait()
            for i, other in enumerate(self._shown):
                received[i].copy_(other[rank])
            self._barrier.wait()

        return run

    def abort(self) -> None:
        """Whoever waits for a rank that failed fails too."""
        self._barrier.abort()


def in_threads(ranks: int, work: Callable[[SequenceExchange], T]) -> list[T]:
    """``work`` on every rank at once; the results in the order of the ranks."""
    shared = Exchanger(ranks)

    def one(rank: int) -> T:
        try:
            with torch.inference_mode():
                return work(SequenceExchange(rank, ranks, shared.swap(rank), torch.device("cpu")))
        except BaseException:
            shared.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(one, rank) for rank in range(ranks)]
        errors = [e for e in (f.exception() for f in futures) if e is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [f.result() for f in futures]
