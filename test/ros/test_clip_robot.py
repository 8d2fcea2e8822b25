from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.contract.fakes import HoldPolicy
from wam_policy_ros.ros.clip_robot import DROID_HOME, DROID_NAMES, clip_pictures, parse, play
from wam_policy_ros.ros.scene import render

from .harness import CAMERAS, SPEC, System


def write_clips(folder: Path, names: list[str]) -> None:
    for i, name in enumerate(names):
        video = cv2.VideoWriter(str(folder / f"{name}.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 15, (320, 180))
        for k in range(5):
            frame = np.zeros((180, 320, 3), np.uint8)
            frame[..., 2] = 200  # red, in OpenCV's BGR
            frame[..., i % 2] = 20 * k
            video.write(frame)
        video.release()


def test_clips_are_found_by_camera_name_decoded_as_rgb_and_looped(tmp_path: Path) -> None:
    write_clips(tmp_path, CAMERAS)
    pictures = clip_pictures(tmp_path, SPEC.cameras)
    first = [next(pictures) for _ in range(6)]
    assert len(first[0]) == 3 and first[0][0].shape == (180, 320, 3)
    assert first[0][0][90, 160, 0] > 150 and first[0][0][90, 160, 2] < 60, "red stays red"
    np.testing.assert_array_equal(first[5][1], first[0][1])
    assert (first[3][1] != first[0][1]).any()


def test_a_missing_clip_names_the_camera(tmp_path: Path) -> None:
    write_clips(tmp_path, CAMERAS[:2])
    with pytest.raises(ConfigError, match="wrist_image_left"):
        next(clip_pictures(tmp_path, SPEC.cameras))


def test_the_scene_moves_and_differs_by_view() -> None:
    now, later = render(0.0), render(1.0)
    assert [i.shape for i in now] == [(180, 320, 3)] * 3
    for a, b in zip(now, later, strict=True):
        moved = (a != b).any(axis=2).mean()
        assert 0.001 < moved < 0.2, "the block moves, the rest stands still"
    assert (now[0] != now[1]).any(axis=2).mean() > 0.05
    red = (now[2][..., 0] > 150) & (now[2][..., 1] < 80)
    assert red.any(), "the block is red in RGB"


def test_home_is_never_made_up(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--scene", "--joint-names", "a", "b"])
    assert "never made up" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(["--help"])
    assert "SIMULATED FOLLOWER" in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("ros")
def test_it_plays_a_robot_for_the_node_and_records_what_went_over_the_wire(tmp_path: Path) -> None:
    system = System(HoldPolicy(), instruction="", **{"joints.names": list(DROID_NAMES)})
    system.robot.on = dict.fromkeys(system.robot.on, False)
    lines: list[str] = []
    try:
        namespace = system.node.get_namespace()
        words = ["--scene", "--namespace", namespace, "--seconds", "3", "--prompt", "push", "--record", str(tmp_path)]
        received = play(parse(words), lines.append)
    finally:
        system.close()
    assert received >= 3 and any("rows  24" in line for line in lines), lines
    with np.load(tmp_path / "clip_robot.npz") as d:
        assert len(d["trajectory_arrival_s"]) == received
        np.testing.assert_allclose(d["trajectory_0000_positions"][-1], DROID_HOME, atol=1e-9)
        np.testing.assert_allclose(d["joint_positions"], np.tile(DROID_HOME, (len(d["joint_time_s"]), 1)), atol=1e-9)
        assert d["frames"].shape[1:] == (3, 90, 160, 3) and len(d["frames"]) > 30
        assert d["observed_images"].shape[1:] == (180, 960, 3)
