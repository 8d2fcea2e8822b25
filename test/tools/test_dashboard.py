from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from wam_policy_ros.tools.dashboard import HEIGHT, WIDTH, _wrapped, write_dashboard
from wam_policy_ros.tools.report import Recording, Trajectory


def recording(**changes: object) -> Recording:
    t = np.arange(0, 6, 1 / 15)
    rows = np.linspace(0, 1, 24)[:, None] * np.ones((1, 2))
    base = {
        "joint_names": ("one", "two"),
        "camera_names": ("a", "b", "c"),
        "trajectories": tuple(Trajectory(s, np.arange(1, 25) / 15, rows + s) for s in (1.0, 2.0, 3.0)),
        "joint_s": t,
        "joints": np.stack([np.sin(t), t], axis=1),
        "frame_s": t,
        "frames": np.tile((np.arange(len(t)) % 250).astype(np.uint8)[:, None, None, None, None], (1, 3, 90, 160, 3)),
        "predicted_s": t + 0.01,
        "predicted": np.full((len(t), 44, 80, 3), 200, np.uint8),
        "status_s": np.array([0.5, 2.0]),
        "statuses": ("waiting", "running\nline two"),
    }
    return Recording(**{**base, **changes})  # type: ignore[arg-type]


def test_the_picture_shows_cameras_prediction_plan_and_status(tmp_path: Path) -> None:
    path = tmp_path / "a" / "d.png"
    write_dashboard(recording(), path, "caption", at_s=2.5)
    page = cv2.imread(str(path))
    assert page is not None and page.shape == (HEIGHT, WIDTH, 3) and path.stat().st_size < 300_000
    frame = int(np.searchsorted(recording().frame_s, 2.5, side="right")) - 1
    assert (page[150, 300] == frame).all(), "the newest frame of that moment"
    assert (page[150, 900] == 200).all(), "the prediction for it"
    none = tmp_path / "none.png"
    write_dashboard(
        recording(predicted_s=np.array([]), predicted=np.zeros((0, 4, 4, 3), np.uint8)), none, "c", at_s=2.5
    )
    assert (cv2.imread(str(none))[150, 900] == 60).all(), "no prediction is not a black picture of one"
    other = tmp_path / "other.png"
    write_dashboard(recording(statuses=("waiting", "holding")), other, "caption", at_s=2.5)
    assert (cv2.imread(str(other)) != page).any(), "the status is drawn"


def test_without_chunks_or_frames_nothing_is_drawn(tmp_path: Path) -> None:
    for gone in ({"trajectories": ()}, {"frames": np.zeros((0, 3, 9, 16, 3), np.uint8), "frame_s": np.array([])}):
        with pytest.raises(ValueError, match="nothing to draw"):
            write_dashboard(recording(**gone), tmp_path / "d.png", "c")


def test_text_is_broken_between_words() -> None:
    text = "  policy   a checkpoint-of-mine\n\nfault none"
    assert _wrapped(text, 24) == ["  policy   a", "    checkpoint-of-mine", "", "fault none"]
    assert all(len(line) <= 10 for line in _wrapped("x" * 45, 10))
