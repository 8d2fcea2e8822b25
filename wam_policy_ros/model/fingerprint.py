"""Names for the weights themselves: a quick one from samples, and one that covers every byte."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SAMPLES = 64
SAMPLE_BYTES = 4096

KNOWN = "weights.sha256.json"
"""File beside the shards with the hashes that were computed before."""

READ_BYTES = 8 * 2**20
THREADS = 4


def fingerprint(shards: Iterable[Path]) -> str:
    """SHA-256 over each shard's name, size, beginning (the header with names, shapes and offsets) and evenly spread
    samples of its bytes: milliseconds for tens of GiB. Two checkpoints of one architecture differ in nearly every
    sample; a single changed weight would go unnoticed, so this names weights, it does not protect them.
    """
    digest = hashlib.sha256()
    for path in _ordered(shards):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            head = file.read(8)
            header = min(int.from_bytes(head, "little"), size)
            digest.update(head + file.read(header))
            for i in range(SAMPLES):
                file.seek(8 + header + max(0, size - 8 - header - SAMPLE_BYTES) * i // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return f"sampled-sha256:{digest.hexdigest()}"


def known_hash(shards: Iterable[Path]) -> str | None:
    """The hash of all bytes, if it was computed before and no file was touched since; reads no weights."""
    paths = _ordered(shards)
    known = [_recall(path) for path in paths]
    return _combined(paths, [k for k in known if k is not None]) if all(known) else None


class FullHash:
    """SHA-256 of every byte of every shard, in threads of its own; use it in a ``with`` statement.

    Hashes are kept in ``weights.sha256.json`` beside the shards, with size, modification and change time of the file
    each of them belongs to: a file that has other ones is read again. Where that file cannot be written, every start
    reads everything.

    Args:
        shards: files of weights.
        trust: use what is kept.
    """

    def __init__(self, shards: Iterable[Path], *, trust: bool = True) -> None:
        self._paths = _ordered(shards)
        self._trust = trust
        self._stop = threading.Event()
        self._pool: ThreadPoolExecutor | None = None
        self._parts: list[Future[tuple[str, dict[str, Any]]]] = []

    def __enter__(self) -> FullHash:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="wam_hash")
        self._parts = [self._pool.submit(self._one, path) for path in self._paths]
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        assert self._pool is not None
        self._pool.shutdown(cancel_futures=True)

    @property
    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def result(self) -> str:
        """``sha256:`` and the hash; waits for it.

        Raises:
            OSError: a file cannot be read.
        """
        found = [part.result() for part in self._parts]
        _remember({path: {**stamp, "sha256": one} for path, (one, stamp) in zip(self._paths, found, strict=True)})
        return _combined(self._paths, [one for one, _ in found])

    def _one(self, path: Path) -> tuple[str, dict[str, Any]]:
        stamp = _stamp(path)  # before: a file that changes meanwhile must not be known
        known = _recall(path) if self._trust else None
        return known or hash_file(path, self._stop), stamp


def full_hash(shards: Iterable[Path]) -> str:
    """As ``FullHash``, waiting for it."""
    with FullHash(shards) as job:
        return job.result()


def hash_file(path: Path, stop: threading.Event | None = None) -> str:
    """SHA-256 of a file.

    Raises:
        OSError: it cannot be read, or ``stop`` was set.
    """
    digest, buffer = hashlib.sha256(), bytearray(READ_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(view):
            digest.update(view[:count])
            if stop is not None and stop.is_set():
                raise OSError(f"reading {path} was given up")
    return digest.hexdigest()


def tensors_hash(state: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes of tensors, for weights that come from no file."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return f"sha256:{digest.hexdigest()}"


def _ordered(shards: Iterable[Path]) -> list[Path]:
    return sorted(set(shards), key=lambda p: p.name)


def _combined(paths: list[Path], hashes: list[str]) -> str:
    lines = [f"{path.name} {path.stat().st_size} {one}\n" for path, one in zip(paths, hashes, strict=True)]
    return f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"


def _stamp(path: Path) -> dict[str, Any]:
    """What changes when a file does. The change time also tells of a file whose modification time was put back."""
    stat = path.stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns}


def _kept(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / KNOWN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _recall(path: Path) -> str | None:
    entry = _kept(path.parent).get(path.name)
    if not isinstance(entry, dict):
        return None
    known = entry.get("sha256")
    fits = {k: v for k, v in entry.items() if k != "sha256"} == _stamp(path)
    return known if fits and isinstance(known, str) and len(known) == 64 else None


def _remember(entries: Mapping[Path, dict[str, Any]]) -> None:
    """Keep hashes of shards; a folder that cannot be written stays as it is."""
    for folder in {path.parent for path in entries}:
        mine = {path.name: entry for path, entry in entries.items() if path.parent == folder}
        kept = _kept(folder)
        if all(kept.get(name) == entry for name, entry in mine.items()):
            continue
        partial = folder / f".{KNOWN}.{os.getpid()}"
        with suppress(OSError):
            try:
                partial.write_text(json.dumps(kept | mine, indent=1) + "\n", encoding="utf-8")
                partial.replace(folder / KNOWN)
            finally:
                partial.unlink(missing_ok=True)
