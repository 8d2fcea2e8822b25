"""Recorded episodes: what was seen, where the robot was, what the expert would do. In files without compression.

A shard is one ``.npz`` file of a few episodes, uncompressed, written under another name and renamed when complete: a
folder of shards can be read while it is being written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import DataError

VERSION = 1


@dataclass(frozen=True)
class Episode:
    """One episode of T control steps. What is known at step s: the frame, the state, and the rows that come next.

    Attributes:
        seed: of the scene; task: name; instruction: in words.
        source: ``expert``, or ``policy`` when the robot followed a policy and the expert only said what it would do.
        success: the task was done.
        views: uint8 ``[1 + T // stride, 3, view_height, view_width, 3]``: the three cameras as the mosaic takes them
            (cropped, resized), at steps 0, stride, 2 stride, ..; one less where nothing was drawn at the end.
        state: float32 ``[T + 1, 8]`` measured joints (rad) and gripper at every step.
        action: float32 ``[T, 8]`` targets that were sent from step s to s + 1.
        label: float32 ``[T + 1, N, 8]``: targets the expert would send from step s, s + 1, .. s + N - 1, absolute. NaN
            where nobody said.
    """

    seed: int
    task: str
    instruction: str
    source: str
    success: bool
    views: npt.NDArray[np.uint8]
    state: npt.NDArray[np.float32]
    action: npt.NDArray[np.float32]
    label: npt.NDArray[np.float32]

    def __post_init__(self) -> None:
        steps = len(self.action)
        if len(self.state) != steps + 1 or len(self.label) != steps + 1 or not 1 <= len(self.views) <= steps + 1:
            raise DataError(
                "an episode's parts do not fit each other",
                got=f"views {len(self.views)}, states {len(self.state)}, actions {steps}, labels {len(self.label)}",
                expected="one state and label more than actions",
            )

    @property
    def steps(self) -> int:
        return len(self.action)


def labels_of(actions: npt.NDArray[Any], wanted: npt.NDArray[np.bool_], horizon: int) -> npt.NDArray[np.float32]:
    """Labels of an episode in which the expert's targets were sent, but for disturbances.

    Behind the end the last target counts as held. Rows that would contain a disturbance are NaN: what the expert would
    have done there without it was not seen.

    Args:
        actions: ``[T, 8]`` targets sent; wanted: ``[T]``, False where the target was disturbed.

    Returns:
        float32 ``[T + 1, horizon, 8]``.
    """
    steps = len(actions)
    rows = np.minimum(np.arange(steps + 1)[:, None] + np.arange(horizon)[None, :], steps - 1)
    label = np.asarray(actions, dtype=np.float32)[rows]
    label[~np.asarray(wanted)[rows].all(axis=1)] = np.nan
    return label


def write_shard(folder: Path, name: str, episodes: Sequence[Episode]) -> Path:
    """``folder/name.npz``; there as a whole or not at all."""
    about = [
        {"seed": e.seed, "task": e.task, "instruction": e.instruction, "source": e.source, "success": bool(e.success),
         "steps": e.steps, "frames": len(e.views)}
        for e in episodes
    ]  # fmt: skip
    arrays = {key: np.concatenate([getattr(e, key) for e in episodes]) for key in ("views", "state", "action", "label")}
    header = np.frombuffer(json.dumps({"version": VERSION, "episodes": about}).encode(), dtype=np.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    path, partial = folder / f"{name}.npz", folder / f".{name}.{os.getpid()}.partial"
    with partial.open("wb") as f:
        np.savez(f, header=header, **arrays)  # type: ignore[arg-type]
    partial.rename(path)
    return path


def read_shard(path: Path) -> list[Episode]:
    """
    Raises:
        DataError: not a shard, or of another version.
    """
    try:
        with np.load(path) as f:
            parts = {key: f[key] for key in f.files}
        header = json.loads(parts["header"].tobytes())
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} is not a shard of episodes", got=str(error)) from error
    if header.get("version") != VERSION:
        raise DataError(f"{path} has another version", got=header.get("version"), expected=VERSION)
    out, at, frame = [], 0, 0
    for k, about in enumerate(header["episodes"]):
        steps, frames = about.pop("steps"), about.pop("frames")
        states = slice(at + k, at + k + steps + 1)  # each episode has one state more than actions
        out.append(
            Episode(
                **about,
                views=parts["views"][frame : frame + frames],
                state=parts["state"][states],
                action=parts["action"][at : at + steps],
                label=parts["label"][states],
            )
        )
        at, frame = at + steps, frame + frames
    return out


def shards(folder: Path) -> list[Path]:
    """Complete shards, in the order of their names."""
    return sorted(folder.glob("*.npz"))


def read_all(folders: Iterable[Path]) -> list[Episode]:
    """
    Raises:
        DataError: there is none.
    """
    places = list(folders)
    found = [e for folder in places for path in shards(folder) for e in read_shard(path)]
    if not found:
        raise DataError("no episodes", got=[str(p) for p in places], remedy="wam data --episodes N --out DIR")
    return found
