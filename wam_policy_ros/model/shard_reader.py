"""Tensors from shard files at the speed of the page cache: few large reads by several threads, ahead of their use.

To a GPU they go through a ring of pinned buffers, so that reading and copying overlap; to a CPU they are read straight
into their own memory. Nothing but the ring and the tensors in flight is ever held.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import CheckpointFileError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}
CHUNK_BYTES = 64 * 2**20
DEPTH = 8  # chunks in flight


@dataclass(frozen=True)
class Extent:
    """Bytes ``begin`` to ``end`` of a shard file are a tensor of this dtype (as safetensors names it) and shape."""

    shard: Path
    begin: int
    end: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Span:
    """``size`` bytes of tensor ``index`` from ``offset`` on."""

    index: int
    offset: int
    size: int


@dataclass
class _Chunk:
    """Consecutive bytes of one file and the tensors they belong to."""

    shard: Path
    begin: int
    size: int
    spans: list[_Span]


def read_tensors(
    extents: Sequence[Extent],
    device: torch.device,
    *,
    threads: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    depth: int = DEPTH,
) -> Iterator[tuple[int, Tensor]]:
    """(position in ``extents``, tensor on ``device``) in the order of the files.

    A tensor on a GPU may be used in the current stream at once.

    Raises:
        CheckpointFileError: a file ends before a tensor does, or cannot be read.
    """
    order = sorted(range(len(extents)), key=lambda i: (extents[i].shard, extents[i].begin))
    yield from ((i, _shaped(torch.empty(0, dtype=torch.uint8, device=device), extents[i])) for i in order
                if extents[i].begin == extents[i].end)  # fmt: skip
    chunks = _plan(extents, order, chunk_bytes)
    workers = threads or min(8, max(2, os.cpu_count() or 2))
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(workers, thread_name_prefix="shard-reader"))
        files = {shard: _open(stack, shard) for shard in sorted({c.shard for c in chunks})}
        reader = _GPUReader if device.type == "cuda" else _CPUReader
        yield from reader(extents, chunks, files, pool, device, chunk_bytes, depth).tensors()


def _plan(extents: Sequence[Extent], order: list[int], chunk_bytes: int) -> list[_Chunk]:
    chunks: list[_Chunk] = []
    for i in order:
        e, done = extents[i], 0
        while done < e.end - e.begin:
            last = chunks[-1] if chunks else None
            at = e.begin + done
            if last is None or last.shard != e.shard or last.begin + last.size != at or last.size >= chunk_bytes:
                last = _Chunk(e.shard, at, 0, [])
                chunks.append(last)
            size = min(chunk_bytes - last.size, e.end - at)
            last.spans.append(_Span(i, done, size))
            last.size += size
            done += size
    return chunks


def _open(stack: ExitStack, path: Path) -> int:
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise CheckpointFileError(f"{path} cannot be read: {error}") from error
    stack.callback(os.close, file)
    return file


def _shaped(flat: Tensor, extent: Extent) -> Tensor:
    return flat.view(DTYPES[extent.dtype]).view(extent.shape)


def _read(file: int, path: Path, begin: int, targets: list[memoryview]) -> None:
    """Fill the targets, one after the other, with the bytes of the file from ``begin`` on."""
    while targets:
        try:
            got = os.preadv(file, targets[:512], begin)
        except OSError as error:
            raise CheckpointFileError(f"{path} cannot be read: {error}") from error
        if got == 0:
            raise CheckpointFileError(f"{path} ends early, at byte {begin}", remedy="download the file again")
        begin += got
        while targets and got >= len(targets[0]):
            got -= len(targets[0])
            targets = targets[1:]
        if got:
            targets = [targets[0][got:], *targets[1:]]


def _view(tensor: Tensor, begin: int, size: int) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array)[begin : begin + size]


class _CPUReader:
    def __init__(
        self,
        extents: Sequence[Extent],
        chunks: list[_Chunk],
        files: dict[Path, int],
        pool: ThreadPoolExecutor,
        device: torch.device,
        chunk_bytes: int,
        depth: int,
    ) -> None:
        self.extents, self.chunks, self.files, self.pool = extents, chunks, files, pool
        self.device, self.chunk_bytes, self.depth = device, chunk_bytes, depth
        self.open: dict[int, tuple[Tensor, int]] = {}  # tensors begun: their memory and the bytes still missing

    def tensors(self) -> Iterator[tuple[int, Tensor]]:
        running: deque[tuple[_Chunk, Future[None]]] = deque()
        waiting = iter(self.chunks)
        try:
            while True:
                while len(running) < self.depth and (chunk := next(waiting, None)) is not None:
                    running.append((chunk, self._submit(chunk)))
                if not running:
                    return
                chunk, future = running.popleft()
                future.result()
                for span in chunk.spans:
                    yield from self._arrived(span)
        finally:
            for _, future in running:
                future.cancel()

    def _submit(self, chunk: _Chunk) -> Future[None]:
        views = [_view(self._memory(s.index), s.offset, s.size) for s in chunk.spans]
        return self.pool.submit(_read, self.files[chunk.shard], chunk.shard, chunk.begin, views)

    def _memory(self, index: int) -> Tensor:
        if index not in self.open:
            size = self.extents[index].end - self.extents[index].begin
            self.open[index] = (torch.empty(size, dtype=torch.uint8, device=self.device), size)
        return self.open[index][0]

    def _arrived(self, span: _Span) -> Iterator[tuple[int, Tensor]]:
        memory, missing = self.open[span.index]
        if missing > span.size:
            self.open[span.index] = (memory, missing - span.size)
            return
        del self.open[span.index]
        yield span.index, _shaped(memory, self.extents[span.index])


class _GPUReader(_CPUReader):
    def tensors(self) -> Iterator[tuple[int, Tensor]]:
        depth = min(self.depth, len(self.chunks))
        if depth == 0:
            return
        ring = torch.empty(depth, self.chunk_bytes, dtype=torch.uint8, pin_memory=True)
        copied: list[torch.cuda.Event | None] = [None] * depth
        running = deque(self._fill(ring[k], None, self.chunks[k]) for k in range(depth))
        try:
            for k, chunk in enumerate(self.chunks):
                slot = k % depth
                running.popleft().result()
                at = 0
                finished: list[tuple[int, Tensor]] = []
                for span in chunk.spans:
                    target = self._memory(span.index)[span.offset : span.offset + span.size]
                    target.copy_(ring[slot, at : at + span.size], non_blocking=True)
                    at += span.size
                    finished += self._arrived(span)
                event = copied[slot] = torch.cuda.Event()
                event.record()
                if k + depth < len(self.chunks):
                    running.append(self._fill(ring[slot], event, self.chunks[k + depth]))
                yield from finished
        finally:
            for future in running:
                future.cancel()
            torch.cuda.synchronize(self.device)  # copies out of the ring

    def _fill(self, buffer: Tensor, before: torch.cuda.Event | None, chunk: _Chunk) -> Future[None]:
        def work() -> None:
            if before is not None:
                before.synchronize()
            _read(self.files[chunk.shard], chunk.shard, chunk.begin, [_view(buffer, 0, chunk.size)])

        return self.pool.submit(work)
