"""The LeRobot layout: what the index says is where it says."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("pyarrow")
av = pytest.importorskip("av")

import pyarrow.parquet as pq  # noqa: E402

from wam_policy_ros.train import lerobot  # noqa: E402
from wam_policy_ros.train.errors import DataError  # noqa: E402

CAMERAS = ("left", "wrist")


def recorded(seed: int, steps: int) -> lerobot.Recorded:
    rng = np.random.default_rng(seed)
    shade = np.linspace(20, 220, steps).astype(np.uint8)[:, None, None, None]
    images = {c: np.broadcast_to(shade, (steps, 32, 48, 3)).copy() for c in CAMERAS}
    numbers = rng.normal(size=(2, steps, 8)).astype(np.float32)
    return lerobot.Recorded(seed, "lift_mug", f"lift the mug {seed % 2}", True, images, numbers[0], numbers[1])


def test_every_episode_is_found_where_the_index_says(tmp_path):
    made = [recorded(k, 10 + k) for k in range(3)]
    lerobot.write_file(tmp_path, 1, made[2:], 15)
    assert lerobot.has_file(tmp_path, 1) and not lerobot.has_file(tmp_path, 0)
    lerobot.write_file(tmp_path, 0, made[:2], 15)
    for _ in range(2):  # finishing again changes nothing
        info = lerobot.finish(tmp_path, 15, (48, 32), CAMERAS)
    assert info["total_episodes"] == 3 and info["total_frames"] == 33 and info["total_tasks"] == 2
    assert json.loads((tmp_path / "meta" / "info.json").read_text()) == info
    tasks = pq.read_table(tmp_path / "meta" / "tasks.parquet").to_pylist()
    episodes = pq.read_table(tmp_path / "meta" / "episodes" / "chunk-000" / "file-000.parquet").to_pylist()
    for number, (row, e) in enumerate(zip(episodes, made, strict=True)):
        assert row["episode_index"] == number and row["length"] == len(e.action) and row["tasks"] == [e.instruction]
        where = {"chunk_index": row["data/chunk_index"], "file_index": row["data/file_index"]}
        table = pq.read_table(tmp_path / info["data_path"].format(**where)).to_pylist()
        own = [r for r in table if r["episode_index"] == number]
        assert [r["frame_index"] for r in own] == list(range(row["length"]))
        assert [r["index"] for r in own] == list(range(row["dataset_from_index"], row["dataset_to_index"]))
        np.testing.assert_allclose([r["timestamp"] for r in own], np.arange(row["length"]) / 15, atol=1e-6)
        np.testing.assert_array_equal(np.array([r["action"] for r in own], np.float32), e.action)
        np.testing.assert_array_equal(np.array([r["observation.state"] for r in own], np.float32), e.state)
        assert {tasks[r["task_index"]]["task"] for r in own} == {e.instruction}
        for camera in CAMERAS:
            key = f"{lerobot.VIDEO_PREFIX}{camera}"
            assert info["features"][key]["shape"] == [32, 48, 3]
            path = tmp_path / info["video_path"].format(
                video_key=key, chunk_index=row[f"videos/{key}/chunk_index"], file_index=row[f"videos/{key}/file_index"]
            )
            with av.open(str(path)) as container:
                frames = [f.to_ndarray(format="rgb24") for f in container.decode(video=0)]
            first = round(row[f"videos/{key}/from_timestamp"] * 15)
            last = round(row[f"videos/{key}/to_timestamp"] * 15)
            shown = np.stack(frames[first:last]).astype(int)
            assert len(shown) == len(e.action) and np.abs(shown - e.images[camera]).mean() < 6


def test_nothing_recorded_is_said(tmp_path):
    with pytest.raises(DataError, match="no episode"):
        lerobot.finish(tmp_path, 15, (48, 32), CAMERAS)
