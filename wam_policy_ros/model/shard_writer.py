"""A checkpoint folder written tensor by tensor: shards of bounded size, an index, and nothing until all is there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import TracebackType

from torch import Tensor

from .errors import CheckpointFileError

SHARD_BYTES = 4 * 2**30


class FolderWriter:
    """Use as a context: the folder appears under its name when the block ends without an error, else not at all.

    Raises:
        CheckpointFileError: something with that name is there already.
    """

    def __init__(self, path: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        self.path, self.partial, self.shard_bytes = path, path.with_name(path.name + ".partial"), shard_bytes
        self._open: dict[str, Tensor] = {}
        self._bytes = 0
        self._shards: list[tuple[str, ...]] = []

    def __enter__(self) -> FolderWriter:
        for place in (self.path, self.partial):
            if place.exists():
                raise CheckpointFileError(f"{place} exists already", remedy="give another name, or remove it")
        self.partial.mkdir(parents=True)
        return self

    def add(self, name: str, tensor: Tensor) -> None:
        """``name`` as in the checkpoint."""
        self._open[name] = tensor.detach().cpu().contiguous()
        self._bytes += tensor.numel() * tensor.element_size()
        if self._bytes >= self.shard_bytes:
            self._flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            shutil.rmtree(self.partial, ignore_errors=True)
            return
        self._flush()
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._shards):
            final = f"model-{i + 1:05d}-of-{len(self._shards):05d}.safetensors"
            self._shard(i).rename(self.partial / final)
            weight_map |= dict.fromkeys(names, final)
        index = {"metadata": {}, "weight_map": weight_map}
        (self.partial / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        self.partial.rename(self.path)

    def _flush(self) -> None:
        from safetensors.torch import save_file

        if self._open:
            save_file(self._open, self._shard(len(self._shards)))
            self._shards.append(tuple(self._open))
            self._open, self._bytes = {}, 0

    def _shard(self, index: int) -> Path:
        return self.partial / f"shard-{index}.safetensors"
