"""A checkpoint folder and the run's log in a few files of bounded size, the newest version whole at any time."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path

PART_BYTES = 15 * 2**20


def write_bundle(place: Path, name: str, version: int, folder: Path | None, beside: Iterable[Path] = ()) -> list[Path]:
    """``place/name-vVERSION.tar.0``, ``.1``, ..; older versions go when this one is complete.

    ``cat name-vVERSION.tar.? | tar x`` gives the folder back. ``beside``: small files that are copied as they are;
    without a folder there are only these.
    """
    place.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    if folder is not None:
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            tar.add(folder, arcname=folder.name)
    whole = buffer.getvalue()
    parts = []
    for k in range(-(-len(whole) // PART_BYTES)):
        path = place / f"{name}-v{version}.tar.{k}"
        _replace(path, whole[k * PART_BYTES : (k + 1) * PART_BYTES])
        parts.append(path)
    for old in place.glob(f"{name}-v*.tar.*"):
        if old not in parts:
            old.unlink()
    for source in beside:
        if source.is_file():
            _replace(place / source.name, source.read_bytes())
    return parts


def _replace(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(data)
    os.replace(partial, path)
