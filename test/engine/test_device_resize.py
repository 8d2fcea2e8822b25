"""The mosaic made on the device against the one made on the host, bit for bit (here both devices are the CPU)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from test.golden_files import golden
from wam_policy_ros.contract.embodiments import AGIBOT, DROID
from wam_policy_ros.contract.errors import ConfigError, InvalidImage, MissingInput
from wam_policy_ros.contract.interface import CameraSpec
from wam_policy_ros.engine import device_resize
from wam_policy_ros.engine.device_resize import DeviceMosaic
from wam_policy_ros.engine.preprocess import stitch_views


def pictures(cameras, frames: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {c.name: rng.integers(0, 256, (frames, c.height, c.width, 3), dtype=np.uint8) for c in cameras}


@pytest.mark.parametrize("robot", [DROID, AGIBOT], ids=["growing", "shrinking"])
def test_bits_of_the_host(robot) -> None:
    mosaic = DeviceMosaic(robot, "cpu")
    for frames, seed in ((2, 0), (1, 1)):
        views = pictures(robot.cameras, frames, seed)
        assert torch.equal(mosaic(views), stitch_views(views, robot))


def test_recorded_mosaic() -> None:
    data = golden("data_images.safetensors")
    mosaic = DeviceMosaic(DROID, "cpu")
    for case in sorted(k.split(".")[0] for k in data if k.endswith(".model_in.images")):
        views = {c.name: data[f"{case}.in.video.{c.name}"].numpy() for c in DROID.cameras}
        difference = (mosaic(views).int() - data[f"{case}.model_in.images"].int()).abs()
        assert int(difference.max()) <= 1
        assert int((difference > 0).sum()) < 1e-3 * difference.numel()


def test_it_knows_when_its_bits_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DeviceMosaic(DROID, "cpu").matches_host()
    original = device_resize._resize

    def rounded_elsewhere(x, taps, dim):
        never = torch.zeros(1, dtype=torch.bool)
        return original(x, [replace(t, fused=never) for t in taps], dim)

    monkeypatch.setattr(device_resize, "_resize", rounded_elsewhere)
    assert not DeviceMosaic(DROID, "cpu").matches_host()


def test_more_frames_than_the_buffer_holds_and_cameras_of_several_sizes() -> None:
    views = pictures(DROID.cameras, 2)
    assert torch.equal(DeviceMosaic(DROID, "cpu", max_frames=1)(views), stitch_views(views, DROID))
    sizes = [(180, 320), (90, 160), (200, 300)]
    cameras = [CameraSpec(f"c{i}", f"camera_{i}", h, w) for i, (h, w) in enumerate(sizes)]
    views = pictures(cameras, 1)
    mosaic = DeviceMosaic(DROID, "cpu", cameras=cameras)
    assert torch.equal(mosaic(views), stitch_views(views, DROID, cameras=cameras))


def test_results_do_not_share_the_buffer() -> None:
    mosaic = DeviceMosaic(DROID, "cpu")
    views = pictures(DROID.cameras, 1, 3)
    first = mosaic(views)
    kept = first.clone()
    mosaic(pictures(DROID.cameras, 1, 4))
    assert torch.equal(first, kept)


def test_wrong_views_are_refused() -> None:
    mosaic = DeviceMosaic(DROID, "cpu")
    views = pictures(DROID.cameras, 1)
    with pytest.raises(MissingInput):
        mosaic(dict(list(views.items())[:2]))
    with pytest.raises(InvalidImage):
        mosaic({k: v[:, 1:] for k, v in views.items()})
    with pytest.raises(ConfigError, match="unknown mosaic"):
        DeviceMosaic(replace(DROID, mosaic="ring"), "cpu")
