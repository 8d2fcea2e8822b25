"""The demo, whole: two processes over real DDS, report included."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import av
import numpy as np
import pytest

from test.tiny_checkpoint import write_checkpoint
from wam_policy_ros.sim.errors import RenderingUnavailable
from wam_policy_ros.sim.world import World
from wam_policy_ros.tools import demo
from wam_policy_ros.tools.main import main
from wam_policy_ros.tools.report import Recording, mosaic

needs_ros = pytest.mark.skipif(
    importlib.util.find_spec("rclpy") is None, reason="rclpy is not installed: pip install 'wam_policy_ros[ros-kilted]'"
)


@needs_ros
@pytest.mark.ros
@pytest.mark.flaky(reruns=1)
@pytest.mark.timeout(240)
def test_demo_without_any_weights(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "packaged", dict)
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
    strip = [f[416:] for f in frames]
    assert strip[0].shape == (168, 1280, 3)
    drawn = [int((s.max(axis=2) > 120).sum()) for s in strip]
    assert drawn[-1] > drawn[5] + 200, "the joints are drawn as they move"
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


def _pictures_can_be_made() -> None:
    pytest.importorskip("torch._dynamo")  # before any OpenGL, see train/generate.py
    pytest.importorskip("mujoco", reason="mujoco is not installed: pip install 'wam_policy_ros[sim]'")
    try:
        World().close()
    except RenderingUnavailable as error:
        pytest.skip(str(error))


@needs_ros
@pytest.mark.ros
@pytest.mark.flaky(reruns=1)
@pytest.mark.timeout(240)
def test_demo_without_anything_given_lifts_the_mug(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _pictures_can_be_made()
    report = tmp_path / "report"
    assert main(["demo", "--report", str(report)]) == 0
    said = capfd.readouterr().out
    assert "LIFTED" in said and "pick up the white mug" in said
    summary = json.loads((report / "summary.json").read_text())
    assert summary["success"] and summary["random_weights"] is False
    assert "not DreamZero's weights" in summary["weights"]
    lifted = summary["scenes"][-1]
    assert lifted["highest_m"] > 0.10 and lifted["others_taken"] == []
    assert summary["greatest_motion_rad"] > 0.3
    assert summary["predicted_frames_received"] >= 8 * (summary["chunks"] - 1)
    for name in ("demo.mp4", "trajectory.png", "dashboard.png"):
        assert (report / name).stat().st_size > 20_000, name


@needs_ros
@pytest.mark.ros
@pytest.mark.flaky(reruns=1)
@pytest.mark.timeout(240)
def test_with_a_checkpoint_the_simulator_is_the_robot(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _pictures_can_be_made()
    # As if it came with the package; the node is another process and is given the folder.
    write_checkpoint(tmp_path / "shelf" / "lifter")
    monkeypatch.setattr(demo, "packaged", lambda: {"lifter": tmp_path / "shelf" / "lifter"})
    report = tmp_path / "report"
    words = ["--seconds", "1.7", "--attempts", "2", "--seed", "4", "--instruction", "lift the red apple"]
    assert main(["demo", "--report", str(report), *words]) == 0
    said = capfd.readouterr().out
    assert "scene 4" in said and "scene 5" in said and "chunk  1 of" in said and "the 2. that was tried" in said
    summary = json.loads((report / "summary.json").read_text())
    assert [s["seed"] for s in summary["scenes"]] == [4, 5] and not summary["success"]
    assert summary["weights"] == "checkpoint lifter" and summary["random_weights"] is False
    assert summary["predicted_frames_received"] >= 8 and summary["chunks"] >= 1
    recording = Recording.load(report / "clip_robot.npz")
    assert 20 < len(recording.frames) == summary["camera_frames"] <= 27  # one a tick, but for what was lost
    assert recording.frames.shape[1:] == (3, 180, 320, 3) and recording.frames.std() > 5
    assert recording.predicted_s.min() > 0.0 and recording.predicted_s.max() < 1.7 + 2 * 24 / 15
    with av.open(str(report / "demo.mp4")) as container:
        frames = [f.to_ndarray(format="rgb24") for f in container.decode(container.streams.video[0])]
    assert max(f[:352, 640:].std() for f in frames) > 5, "no predicted frame was drawn"


def test_mosaic_is_tiled_as_the_network_sees_it() -> None:
    views = np.stack([np.full((2, 3, 3), v, np.uint8) for v in (10, 20, 30)])
    views[2, :, 0] = 40
    page = mosaic(views)
    assert page.shape == (4, 6, 3)
    assert page[0, :, 0].tolist() == [40, 40, 30, 30, 30, 30]
    assert page[3, :, 0].tolist() == [10, 10, 10, 20, 20, 20]
