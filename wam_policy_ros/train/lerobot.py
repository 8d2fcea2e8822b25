"""Demonstrations as a LeRobot v3 data set: one table, one video per camera, a few index files.

    meta/info.json                             features, rates, counts, where files are
    meta/stats.json                            minimum, maximum, mean, standard deviation of state and action
    meta/tasks.parquet                         every instruction and its number
    meta/episodes/chunk-000/file-NNN.parquet   where each episode's rows and pictures are
    data/chunk-000/file-NNN.parquet            state, action, time, numbers: one row per control step
    videos/CAMERA/chunk-000/file-NNN.mp4       the episodes' pictures, one after the other

File NNN holds the episodes of one fixed range of seeds and is complete or absent: a recording goes on where it stopped.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from .errors import DataError

STATE = ("panda_joint1", "panda_joint2", "panda_joint3", "panda_joint4", "panda_joint5", "panda_joint6", "panda_joint7",
         "gripper")  # fmt: skip
VIDEO_PREFIX = "observation.images."


@dataclass(frozen=True)
class Recorded:
    """One episode at the full rate and size.

    Attributes:
        images: camera -> uint8 ``[T, H, W, 3]``; state, action: float32 ``[T, 8]``; row t is what was seen at step t
            and what was sent from there.
    """

    seed: int
    task: str
    instruction: str
    success: bool
    images: dict[str, npt.NDArray[np.uint8]]
    state: npt.NDArray[np.float32]
    action: npt.NDArray[np.float32]


def file_name(index: int) -> str:
    return f"chunk-000/file-{index:03d}"


def has_file(root: Path, index: int) -> bool:
    """Whether the episodes of this file are there: its table is written last."""
    return (root / "data" / f"{file_name(index)}.parquet").is_file()


def write_file(root: Path, index: int, episodes: Sequence[Recorded], fps: int) -> None:
    """The videos and the table of one file, and what ``finish`` needs to number its episodes."""
    name = file_name(index)
    for camera in episodes[0].images:
        path = root / "videos" / f"{VIDEO_PREFIX}{camera}" / f"{name}.mp4"
        _write_video(path, [e.images[camera] for e in episodes], fps)
    about = [{"seed": e.seed, "task": e.task, "instruction": e.instruction, "success": e.success,
              "length": len(e.action)}
             for e in episodes]  # fmt: skip
    table = pa.table(
        {
            "observation.state": _lists(np.concatenate([e.state for e in episodes])),
            "action": _lists(np.concatenate([e.action for e in episodes])),
        }
    ).replace_schema_metadata({"episodes": json.dumps(about)})
    path = root / "data" / f"{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    pq.write_table(table, partial)
    partial.rename(path)


def finish(root: Path, fps: int, size: tuple[int, int], cameras: Sequence[str]) -> dict[str, Any]:
    """Number the episodes of all files in order and write ``meta/``. Returns ``info.json``.

    Raises:
        DataError: no file is there.
    """
    files = sorted((root / "data" / "chunk-000").glob("file-*.parquet"))
    if not files:
        raise DataError("no episode was recorded", got=str(root))
    tasks: dict[str, int] = {}
    rows: list[dict[str, Any]] = []
    at, all_state, all_action = 0, [], []
    for path in files:
        table = pq.read_table(path)
        about = json.loads(table.schema.metadata[b"episodes"])
        file_index, columns, seconds = int(path.stem.split("-")[1]), [], 0.0
        for e in about:
            number, length = len(rows), e["length"]
            task = tasks.setdefault(e["instruction"], len(tasks))
            row = {"episode_index": number, "tasks": [e["instruction"]], "length": length, "data/chunk_index": 0,
                   "data/file_index": file_index, "dataset_from_index": at, "dataset_to_index": at + length,
                   "meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0, "seed": e["seed"],
                   "success": e["success"]}  # fmt: skip
            for camera in cameras:
                key = f"videos/{VIDEO_PREFIX}{camera}"
                row |= {f"{key}/chunk_index": 0, f"{key}/file_index": file_index, f"{key}/from_timestamp": seconds,
                        f"{key}/to_timestamp": seconds + length / fps}  # fmt: skip
            rows.append(row)
            steps = np.arange(length)
            columns.append((steps / fps, steps, np.full(length, number), at + steps, np.full(length, task)))
            at, seconds = at + length, seconds + length / fps
        kinds = (np.float32, np.int64, np.int64, np.int64, np.int64)
        joined = [np.concatenate(c).astype(k) for c, k in zip(zip(*columns, strict=True), kinds, strict=True)]
        names = ("timestamp", "frame_index", "episode_index", "index", "task_index")
        plain = {c: table[c] for c in ("observation.state", "action")}
        full = pa.table(plain | dict(zip(names, joined, strict=True)))
        _replace_table(path, full.replace_schema_metadata(table.schema.metadata))
        all_state.append(np.stack(table["observation.state"].to_numpy()))
        all_action.append(np.stack(table["action"].to_numpy()))
    meta = root / "meta"
    shutil.rmtree(meta, ignore_errors=True)
    (meta / "episodes" / "chunk-000").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), meta / "episodes" / "chunk-000" / "file-000.parquet")
    pq.write_table(pa.table({"task_index": list(tasks.values()), "task": list(tasks)}), meta / "tasks.parquet")
    stats = {"observation.state": _stats(np.concatenate(all_state)), "action": _stats(np.concatenate(all_action))}
    (meta / "stats.json").write_text(json.dumps(stats, indent=1), encoding="utf-8")
    info = _info(fps, size, cameras, episodes=len(rows), frames=at, tasks=len(tasks))
    (meta / "info.json").write_text(json.dumps(info, indent=1), encoding="utf-8")
    return info


def _info(
    fps: int, size: tuple[int, int], cameras: Sequence[str], *, episodes: int, frames: int, tasks: int
) -> dict[str, Any]:
    width, height = size
    video = {
        f"{VIDEO_PREFIX}{c}": {"dtype": "video", "shape": [height, width, 3], "names": ["height", "width", "channels"],
                               "info": {"video.fps": fps, "video.height": height, "video.width": width,
                                        "video.channels": 3, "video.codec": "h264", "video.pix_fmt": "yuv420p",
                                        "video.is_depth_map": False, "has_audio": False}}
        for c in cameras
    }  # fmt: skip
    numbers = {
        n: {"dtype": "float32", "shape": [len(STATE)], "names": list(STATE)} for n in ("observation.state", "action")
    }
    index = {n: {"dtype": "float32" if n == "timestamp" else "int64", "shape": [1], "names": None}
             for n in ("timestamp", "frame_index", "episode_index", "index", "task_index")}  # fmt: skip
    return {
        "codebase_version": "v3.0",
        "robot_type": "panda (simulated)",
        "total_episodes": episodes,
        "total_frames": frames,
        "total_tasks": tasks,
        "chunks_size": 1000,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": fps,
        "splits": {"train": f"0:{episodes}"},
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": {**numbers, **video, **index},
    }


def _lists(values: npt.NDArray[np.float32]) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(values.astype(np.float32).ravel()), values.shape[1])


def _stats(values: npt.NDArray[np.float32]) -> dict[str, Any]:
    wide = values.astype(np.float64)
    return {"min": wide.min(0).tolist(), "max": wide.max(0).tolist(), "mean": wide.mean(0).tolist(),
            "std": wide.std(0).tolist(), "count": [len(wide)]}  # fmt: skip


def _replace_table(path: Path, table: pa.Table) -> None:
    partial = path.with_suffix(".partial")
    pq.write_table(table, partial)
    partial.rename(path)


def _write_video(path: Path, clips: Sequence[npt.NDArray[np.uint8]], fps: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.{os.getpid()}.mp4")
    height, width = clips[0].shape[1:3]
    with av.open(str(partial), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps), options={"crf": "18", "preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.thread_count = 1
        for clip in clips:
            for picture in clip:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    partial.rename(path)
