"""Camera frames to the mosaic the network sees, and the mosaic to its floating-point video (DreamZero spec 1.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from wam_policy_ros.contract.embodiment import Embodiment
from wam_policy_ros.contract.errors import ConfigError, InvalidImage, MissingInput
from wam_policy_ros.contract.interface import CameraSpec


def crop_box(height: int, width: int, scale: float) -> tuple[int, int, int, int]:
    """(top, left, height, width) of the centre crop; sides truncated, the anchor rounded half to even."""
    h, w = int(height * scale), int(width * scale)
    return round((height - h) / 2), round((width - w) / 2), h, w


def preprocess_view(frames: Tensor, *, crop_scale: float, view_height: int, view_width: int) -> Tensor:
    """One camera: centre crop, resize, back to uint8 by truncation. The aspect ratio is not kept.

    The image is resized as float32: resizing the uint8 image instead is off by one on half of the pixels.

    Args:
        frames: uint8 ``[T, H, W, 3]``.

    Returns:
        uint8 ``[T, view_height, view_width, 3]`` on the device of ``frames``.
    """
    top, left, h, w = crop_box(frames.shape[1], frames.shape[2], crop_scale)
    cropped = frames[:, top : top + h, left : left + w].permute(0, 3, 1, 2).float() / 255
    resized = F.interpolate(
        cropped.contiguous(), size=(view_height, view_width), mode="bilinear", align_corners=False, antialias=True
    )
    return (resized * 255).to(torch.uint8).permute(0, 2, 3, 1)


def stitch_views(
    frames: Mapping[str, npt.NDArray[np.uint8]],
    embodiment: Embodiment,
    device: torch.device | str = "cpu",
    *,
    cameras: Sequence[CameraSpec] | None = None,
    resize_device: torch.device | str = "cpu",
) -> Tensor:
    """Preprocess every view and lay them out as one picture.

    ``wrist_on_top``: view 2 over the whole top half, every column doubled; views 0 and 1 below. ``quad``: view 0 top
    left, view 2 top right, view 1 bottom left, black bottom right.

    Args:
        frames: camera name -> uint8 ``[T, H, W, 3]`` RGB of the camera's raw size, the same T for all.
        embodiment: mosaic, view size and crop.
        device: where the result goes.
        cameras: the three views in the network's order, if a checkpoint's raw sizes differ from the embodiment page.
        resize_device: where the resize is computed. The published model resizes on the CPU; another device may
            differ by one in a few pixels.

    Returns:
        uint8 ``[1, T, 2 * view_height, 2 * view_width, 3]``.

    Raises:
        MissingInput: a view is absent.
        InvalidImage: dtype, size or number of frames.
        ConfigError: not three cameras, or an unknown mosaic.
    """
    cameras = mosaic_cameras(embodiment, cameras)
    check_views(frames, cameras)
    views = [
        preprocess_view(
            torch.from_numpy(_writable(frames[c.name])).to(resize_device),
            crop_scale=embodiment.crop_scale,
            view_height=embodiment.view_height,
            view_width=embodiment.view_width,
        )
        for c in cameras
    ]
    return lay_out_mosaic(views, embodiment).to(device)


def mosaic_cameras(embodiment: Embodiment, cameras: Sequence[CameraSpec] | None) -> tuple[CameraSpec, ...]:
    """The three views of a mosaic.

    Raises:
        ConfigError: not three, or an unknown mosaic.
    """
    cameras = tuple(embodiment.cameras if cameras is None else cameras)
    if len(cameras) != 3:
        raise ConfigError("a mosaic has three views", got=[c.name for c in cameras], expected="three cameras")
    if embodiment.mosaic not in ("wrist_on_top", "quad"):
        raise ConfigError("unknown mosaic", got=embodiment.mosaic, expected="wrist_on_top or quad")
    return cameras


def lay_out_mosaic(views: Sequence[Tensor], embodiment: Embodiment) -> Tensor:
    """Three views ``[T, H, W, 3]`` as one picture ``[1, T, 2 * H, 2 * W, 3]``, see :func:`stitch_views`."""
    if embodiment.mosaic == "wrist_on_top":
        top = views[2].repeat_interleave(2, dim=2)
        bottom = torch.cat([views[0], views[1]], dim=2)
    else:
        top = torch.cat([views[0], views[2]], dim=2)
        bottom = torch.cat([views[1], torch.zeros_like(views[1])], dim=2)
    return torch.cat([top, bottom], dim=1)[None]


def mosaic_places(embodiment: Embodiment, height: int, width: int) -> dict[str, tuple[slice, slice]]:
    """Where each camera's view is in a mosaic of this size."""
    top, bottom = slice(0, height // 2), slice(height // 2, height)
    left, right = slice(0, width // 2), slice(width // 2, width)
    a, b, c = (camera.name for camera in embodiment.cameras)
    if embodiment.mosaic == "wrist_on_top":
        return {c: (top, slice(0, width)), a: (bottom, left), b: (bottom, right)}
    return {a: (top, left), c: (top, right), b: (bottom, left)}


def to_model_video(images: Tensor, dtype: torch.dtype, target_hw: tuple[int, int] | None = None) -> Tensor:
    """The mosaic as the network's video.

    ``/255`` in float32, cast to ``dtype``, then ``(x - 0.5) / 0.5`` in ``dtype``: in bf16 the values are quantised
    before they are stretched, as in the published model (DreamZero spec 10, no. 20).

    Args:
        images: uint8 ``[B, T, H, W, 3]``.
        dtype: of the network.
        target_hw: the checkpoint's ``target_video_height`` and ``target_video_width`` (spec 7); None: no resize.

    Returns:
        ``dtype`` ``[B, 3, T, H, W]`` in [-1, 1], contiguous, on the device of ``images``.

    Raises:
        InvalidImage: not uint8 ``[B, T, H, W, 3]``.
    """
    if images.dtype != torch.uint8 or images.ndim != 5 or images.shape[-1] != 3:
        got = f"{images.dtype} {list(images.shape)}"
        raise InvalidImage("the model video is made from a mosaic", field="images", got=got, expected="[B, T, H, W, 3]")
    video = ((images.float() / 255).to(dtype) - 0.5) / 0.5
    b, t, h, w, _ = images.shape
    if target_hw is not None and target_hw != (h, w):
        flat = video.flatten(0, 1).permute(0, 3, 1, 2).contiguous()
        flat = F.interpolate(flat, size=target_hw, mode="bilinear", align_corners=False, antialias=False)
        return flat.unflatten(0, (b, t)).transpose(1, 2).contiguous()
    return video.permute(0, 4, 1, 2, 3).contiguous()


def check_views(frames: Mapping[str, Any], cameras: Sequence[CameraSpec]) -> None:
    """
    Raises:
        MissingInput: a view is absent.
        InvalidImage: dtype, size or number of frames.
    """
    counts = {}
    for camera in cameras:
        name = camera.name
        if name not in frames:
            raise MissingInput(
                f"camera {name!r} is missing",
                field=name,
                got=f"cameras {sorted(frames)}",
                expected=f"cameras {[c.name for c in cameras]}",
            )
        found = frames[name]
        if isinstance(found, np.ndarray):
            shape, dtype = found.shape, found.dtype
        else:  # one array per frame
            shape, dtype = (len(found), *found[0].shape), found[0].dtype
        if dtype != np.uint8 or len(shape) != 4 or shape[0] < 1 or shape[1:] != (camera.height, camera.width, 3):
            raise InvalidImage(
                f"camera {name!r} does not have the raw size the network was trained with",
                field=name,
                got=f"{dtype} {list(shape)}",
                expected=f"uint8 [T, {camera.height}, {camera.width}, 3]",
            )
        counts[name] = shape[0]
    if len(set(counts.values())) > 1:
        raise InvalidImage("cameras carry different numbers of frames", field=", ".join(counts), got=counts)


def _writable(array: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """torch wants memory it may write to; arrays decoded from a message are read-only."""
    return array if array.flags.writeable and array.flags.c_contiguous else array.copy()
