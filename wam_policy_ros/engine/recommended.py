"""How a checkpoint wants to be run: the block ``inference`` of an embodiment's entry in ``metadata.json``.

The published checkpoints have no such block and run as published. It belongs to networks that were trained with other
timing (see the room ``train``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wam_policy_ros.contract.embodiment import get_embodiment
from wam_policy_ros.contract.errors import CheckpointError
from wam_policy_ros.model.checkpoint import read_folder
from wam_policy_ros.model.errors import CheckpointFileError

ENGINE_OPTIONS = ("evaluations", "guidance_scale")


@dataclass(frozen=True)
class Recommended:
    """None where the checkpoint does not say.

    Attributes:
        frame_offsets: control steps at which the frames of later calls were taken in training, ending with 0.
        execute_steps: rows of a chunk to execute before the next call.
        evaluations, guidance_scale: see ``EngineConfig``.
    """

    frame_offsets: tuple[int, ...] | None = None
    execute_steps: int | None = None
    evaluations: int | None = None
    guidance_scale: float | None = None

    @property
    def options(self) -> dict[str, Any]:
        """For ``EngineConfig``; what a person gives goes on top."""
        return {n: getattr(self, n) for n in ENGINE_OPTIONS if getattr(self, n) is not None}


def recommended_of(metadata: Mapping[str, Any] | None, tag: str) -> Recommended:
    """From a parsed ``metadata.json``.

    Raises:
        CheckpointError: the block is there and unusable.
    """
    entry = metadata.get(tag) if isinstance(metadata, Mapping) else None
    block = entry.get("inference") if isinstance(entry, Mapping) else None
    if block is None:
        return Recommended()
    known = {f.name for f in dataclasses.fields(Recommended)}
    if not isinstance(block, Mapping) or set(block) - known:
        raise CheckpointError(
            "metadata.json: inference is unusable", got=repr(block)[:120], expected=f"{sorted(known)}"
        )
    offsets = block.get("frame_offsets")
    if offsets is not None:
        rising = isinstance(offsets, list) and all(type(o) is int for o in offsets) and sorted(set(offsets)) == offsets
        if not rising or not offsets or offsets[-1] != 0:
            raise CheckpointError(
                "metadata.json: frame_offsets are unusable",
                got=repr(offsets),
                expected="rising integers that end with 0",
            )
    for name, kinds, least in (
        ("execute_steps", (int,), 1),
        ("evaluations", (int,), 1),
        ("guidance_scale", (int, float), 0),
    ):
        value = block.get(name)
        if value is not None and (type(value) not in kinds or value < least):
            raise CheckpointError(f"metadata.json: {name} is unusable", got=repr(value), expected=f"at least {least}")
    return Recommended(**{**block, "frame_offsets": tuple(offsets) if offsets is not None else None})


def recommended(checkpoint: str | Path | None, embodiment: str) -> Recommended:
    """From a checkpoint folder; nothing without one, or when the folder cannot be read (whoever loads it says why)."""
    if not checkpoint:
        return Recommended()
    try:
        folder = read_folder(checkpoint)
    except CheckpointFileError:
        return Recommended()
    return recommended_of(folder.metadata, get_embodiment(embodiment).tag)
