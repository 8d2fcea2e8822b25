"""The demo, whole: two processes over real DDS, report included."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import av
import numpy as np
import pytest

from wam_policy_ros.tools.main import main
from wam_policy_ros.tools.report import Recording, mosaic

needs_ros = pytest.mark.skipif(
    importlib.util.find_spec("rclpy") is None, reason="rclpy is not installed: pip install 'wam_policy_ros[ros-kilted]'"
)


@needs_ros
@pytest.mark.ros
@pytest.mark.flaky(reruns=1)
@pytest.mark.timeout(240)
def test_demo_without_anything_given(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report"
    assert main(["demo", "--seconds", "9", "--report", str(report)]) == 0
    said = capfd.readouterr().out
    assert "RANDOM WEIGHTS" in said and "NOT a policy" in said and "simulated follower" in said
    assert "warm-up" in said and "first joints" in said

    summary = json.loads((report / "summary.json").read_text())
    assert summary["random_weights"] is True and summary["chunks"] >= 2
    assert summary["predicted_frames_received"] >= 8

    with av.open(str(report / "demo.mp4")) as container:
        stream = container.streams.video[0]
        frames = [f.to_ndarray(format="rgb24") for f in container.decode(stream)]
    assert len(frames) == summary["camera_frames_sent"] > 100
    assert min(f[:352, :640].std() for f in frames) > 5, "the observed side is empty"
    assert max(f[:352, 640:].std() for f in frames) > 5, "no predicted frame was drawn"
    assert (report / "trajectory.png").stat().st_size > 10_000
    assert 20_000 < (report / "dashboard.png").stat().st_size < 400_000

    recording = Recording.load(report / "clip_robot.npz")
    chunk = next(t for t in recording.trajectories if len(t.positions) > 1)
    assert np.isfinite(chunk.positions).all() and (np.diff(chunk.time_s) > 0).all()
    moved = recording.joints[-1] - recording.joints[0]
    assert np.abs(moved).max() > 0, "the follower did not follow"


@needs_ros
@pytest.mark.ros
@pytest.mark.flaky(reruns=1)
def test_a_node_that_cannot_start_ends_the_demo(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status = main(["demo", "--seconds", "3", "--checkpoint", str(tmp_path), "--report", str(tmp_path / "report")])
    assert status == 1
    assert "config.json" in capfd.readouterr().out
    assert not (tmp_path / "report" / "demo.mp4").exists()


def test_mosaic_is_tiled_as_the_network_sees_it() -> None:
    views = np.stack([np.full((2, 3, 3), v, np.uint8) for v in (10, 20, 30)])
    views[2, :, 0] = 40
    page = mosaic(views)
    assert page.shape == (4, 6, 3)
    assert page[0, :, 0].tolist() == [40, 40, 30, 30, 30, 30]
    assert page[3, :, 0].tolist() == [10, 10, 10, 20, 20, 20]
