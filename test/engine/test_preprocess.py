"""Mosaic and model video: recorded pixels for DROID, a plain numpy resize for everything else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from test.golden_files import golden
from wam_policy_ros.contract.embodiments import AGIBOT, DROID
from wam_policy_ros.contract.errors import ConfigError, InvalidImage, MissingInput
from wam_policy_ros.contract.interface import CameraSpec
from wam_policy_ros.engine.preprocess import crop_box, preprocess_view, stitch_views, to_model_video


def _frames(cameras, t=1, seed=0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {c.name: rng.integers(0, 256, (t, c.height, c.width, 3), dtype=np.uint8) for c in cameras}


def test_mosaic_equals_the_recording():
    data = golden("data_images.safetensors")
    cases = sorted(k.split(".")[0] for k in data if k.endswith(".model_in.images"))
    assert cases
    for case in cases:
        frames = {c.name: data[f"{case}.in.video.{c.name}"].numpy() for c in DROID.cameras}
        difference = (stitch_views(frames, DROID).int() - data[f"{case}.model_in.images"].int()).abs()
        # Bit-equal where it was recorded; other vector code may round a product differently before the truncation.
        assert int(difference.max()) <= 1
        assert int((difference > 0).sum()) < 1e-3 * difference.numel()


def test_crop_equals_the_recorded_stage():
    data, images = golden("data.safetensors"), golden("data_images.safetensors")
    top, left, _, w = crop_box(180, 320, 0.95)
    row = images["case0.in.video.wrist_image_left"][0, top, left : left + w]
    recorded = (data["stage.case0.wrist_after_center_crop_row0"] * 255).round()
    assert torch.equal(row.float().T, recorded)


@pytest.mark.parametrize(
    ("size", "box"),
    [((180, 320), (4, 8, 171, 304)), ((480, 640), (12, 16, 456, 608)), ((160, 320), (4, 8, 152, 304))],
)
def test_crop_box(size, box):
    assert crop_box(*size, 0.95) == box


def test_crop_anchor_rounds_half_to_even():
    assert crop_box(180, 186, 0.95)[:2] == (4, 5)  # 4.5 -> 4; (186 - 176) / 2 = 5
    assert crop_box(20, 100, 0.95)[0] == 0  # 0.5 -> 0
    assert crop_box(60, 100, 0.95)[0] == 2  # 1.5 -> 2


def _triangle_weights(source: int, target: int) -> np.ndarray:
    """float64 [target, source] of an antialiased bilinear resize."""
    scale = source / target
    width = max(scale, 1.0)
    centres = (np.arange(target) + 0.5) * scale
    weights = np.clip(1 - np.abs(np.arange(source) + 0.5 - centres[:, None]) / width, 0, None)
    return weights / weights.sum(1, keepdims=True)


@pytest.mark.parametrize("size", [(480, 640), (180, 320), (720, 1280), (100, 500)])
def test_resize_is_antialiased_and_truncated(size):
    """Shrinking, growing and one of each."""
    image = np.random.default_rng(3).integers(0, 256, (1, *size, 3), dtype=np.uint8)
    top, left, h, w = crop_box(*size, 0.95)
    cropped = image[0, top : top + h, left : left + w].astype(np.float64)
    exact = np.einsum("yh,hwc,xw->yxc", _triangle_weights(h, 176), cropped, _triangle_weights(w, 320), optimize=True)
    view = preprocess_view(torch.from_numpy(image), crop_scale=0.95, view_height=176, view_width=320)
    assert view.dtype == torch.uint8 and view.shape == (1, 176, 320, 3)
    difference = np.abs(view[0].numpy().astype(int) - np.floor(exact).astype(int))
    assert difference.max() <= 1 and (difference > 0).mean() < 1e-3


def test_quad_mosaic_layout():
    frames = _frames(AGIBOT.cameras, t=2)
    mosaic = stitch_views(frames, AGIBOT)
    views = [
        preprocess_view(torch.from_numpy(frames[c.name]), crop_scale=0.95, view_height=176, view_width=320)
        for c in AGIBOT.cameras
    ]
    assert mosaic.shape == (1, 2, 352, 640, 3) and mosaic.dtype == torch.uint8
    assert torch.equal(mosaic[0, :, :176, :320], views[0])
    assert torch.equal(mosaic[0, :, :176, 320:], views[2])
    assert torch.equal(mosaic[0, :, 176:, :320], views[1])
    assert not mosaic[0, :, 176:, 320:].any()


def test_wrist_on_top_layout_with_other_sizes():
    cameras = tuple(CameraSpec(c.name, c.topic, 40, 50 + 10 * i) for i, c in enumerate(DROID.cameras))
    small = replace(DROID, view_height=16, view_width=32, crop_scale=0.9)
    frames = _frames(cameras, t=4)
    mosaic = stitch_views(frames, small, cameras=cameras)[0]
    views = [
        preprocess_view(torch.from_numpy(frames[c.name]), crop_scale=0.9, view_height=16, view_width=32)
        for c in cameras
    ]
    assert mosaic.shape == (4, 32, 64, 3)
    assert torch.equal(mosaic[:, :16, 0::2], views[2]) and torch.equal(mosaic[:, :16, 1::2], views[2])
    assert torch.equal(mosaic[:, 16:, :32], views[0]) and torch.equal(mosaic[:, 16:, 32:], views[1])


def test_read_only_images_are_not_written_to():
    frames = _frames(DROID.cameras)
    for image in frames.values():
        image.setflags(write=False)
    before = {k: v.copy() for k, v in frames.items()}
    stitch_views(frames, DROID)
    assert all((frames[k] == before[k]).all() for k in frames)


def test_refusals():
    good = _frames(DROID.cameras)
    wrist = "wrist_image_left"
    with pytest.raises(MissingInput, match=wrist):
        stitch_views({k: v for k, v in good.items() if k != wrist}, DROID)
    for bad in (
        good[wrist][:, :100],
        good[wrist].astype(np.float32),
        good[wrist][0],
        good[wrist][..., :2],
        good[wrist][:0],
    ):
        with pytest.raises(InvalidImage, match=wrist):
            stitch_views({**good, wrist: bad}, DROID)
    with pytest.raises(InvalidImage, match="different numbers"):
        stitch_views({**good, wrist: np.repeat(good[wrist], 2, 0)}, DROID)
    with pytest.raises(ConfigError, match="three"):
        stitch_views(good, DROID, cameras=DROID.cameras[:2])
    with pytest.raises(ConfigError, match="mosaic"):
        stitch_views(good, replace(DROID, mosaic="circle"))  # type: ignore[arg-type]


def test_video_is_quantised_before_it_is_stretched():
    images = torch.arange(256, dtype=torch.uint8).repeat(3, 1).T.reshape(1, 1, 16, 16, 3)
    exact = to_model_video(images, torch.float32)
    assert exact.shape == (1, 3, 1, 16, 16) and exact.is_contiguous()
    assert float(exact.min()) == -1 and float(exact.max()) == 1
    assert torch.equal(exact[0, 0, 0].flatten(), (torch.arange(256) / 255 - 0.5) / 0.5)
    coarse = to_model_video(images, torch.bfloat16)
    assert coarse.dtype == torch.bfloat16
    quantised = (torch.arange(256) / 255).to(torch.bfloat16).float()
    assert torch.equal(coarse[0, 0, 0].flatten(), ((quantised - 0.5).to(torch.bfloat16).float() * 2).to(torch.bfloat16))
    assert not torch.equal(coarse, exact.to(torch.bfloat16))


def test_video_keeps_frames_channels_and_batch_apart():
    images = torch.randint(0, 256, (2, 3, 4, 5, 3), dtype=torch.uint8)
    video = to_model_video(images, torch.float64)
    assert video.shape == (2, 3, 3, 4, 5)
    torch.testing.assert_close(((video[1, 2, 0] + 1) / 2 * 255), images[1, 0, :, :, 2].double(), rtol=0, atol=1e-4)


def test_video_resize_is_plain_bilinear():
    """Half size without antialias: each output pixel is the mean of a 2 x 2 block; a quarter: of its inner 2 x 2."""
    images = torch.randint(0, 256, (3, 2, 16, 32, 3), dtype=torch.uint8)
    full = to_model_video(images, torch.float32)
    half = to_model_video(images, torch.float32, (8, 16))
    assert half.shape == (3, 3, 2, 8, 16) and half.is_contiguous()
    torch.testing.assert_close(half, full.unflatten(3, (8, 2)).unflatten(5, (16, 2)).mean((4, 6)))
    quarter = to_model_video(images, torch.float32, (4, 8))
    inner = full.unflatten(3, (4, 4)).unflatten(5, (8, 4))[:, :, :, :, 1:3, :, 1:3].mean((4, 6))
    torch.testing.assert_close(quarter, inner)
    assert torch.equal(to_model_video(images, torch.float32, (16, 32)), full)
    assert to_model_video(images, torch.bfloat16, (8, 16)).dtype == torch.bfloat16


def test_video_refuses_other_inputs():
    for bad in (torch.zeros(1, 1, 4, 4, 3), torch.zeros(1, 4, 4, 3, dtype=torch.uint8)):
        with pytest.raises(InvalidImage):
            to_model_video(bad, torch.float32)
