"""Camera frames to the mosaic on the device: the host only copies the cropped pixels into one buffer.

The twin is ``preprocess.stitch_views``, which resizes on the CPU as the published model does. PyTorch's GPU resize
rounds differently, and AMD GPUs have none for uint8; here the CPU's own order of operations is carried out with plain
tensor operations: along the width, then along the height, every output a chain of multiply-adds over its taps in
float32, fused or not as the CPU's code has it. A fused one is made in float64, where the product of two float32 numbers
is exact.

Tier *exact* where :meth:`DeviceMosaic.matches_host` says so, which compares whole pictures on this machine: other
vector code may round the CPU's own result differently. Otherwise *numeric*: single levels of 255.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from wam_policy_ros.contract.embodiment import Embodiment
from wam_policy_ros.contract.interface import CameraSpec

from .preprocess import check_views, crop_box, lay_out_mosaic, mosaic_cameras, stitch_views

Views = Mapping[str, npt.NDArray[np.uint8] | Sequence[npt.NDArray[np.uint8]]]


# PyTorch's CPU builds multiply four taps at a time and add the products in turn; what fills no group is fused.
_GROUP = 4


@dataclass(frozen=True)
class _Tap:
    """One tap of every output along an axis: int64 and float64 ``[output]``, weight 0 where an output has fewer taps.

    ``fused``: bool ``[output]``, whether the product is added without being rounded; None: everywhere.
    """

    index: Tensor
    weight: Tensor
    fused: Tensor | None


def _taps(source: int, target: int, device: torch.device) -> list[_Tap]:
    """The weights PyTorch uses, read from the resize of an identity matrix; exact, as the others multiply zeros."""
    eye = torch.eye(source).view(1, 1, source, source)
    table = F.interpolate(eye, size=(source, target), mode="bilinear", align_corners=False, antialias=True)[0, 0]
    scale = source / target
    reach = max(scale, 1.0)
    centre = scale * (torch.arange(target, dtype=torch.float64) + 0.5)
    first = (centre - reach + 0.5).long().clamp(min=0)
    count = (centre + reach + 0.5).long().clamp(max=source) - first
    out = []
    for j in range(int(count.max())):
        index = (first + j).clamp(max=source - 1)
        weight = torch.where(j < count, table.gather(0, index[None])[0], 0.0).double()
        fused = j > (count - 1) // _GROUP * _GROUP
        out.append(_Tap(index.to(device), weight.to(device), None if fused.all() else fused.to(device)))
    return out


def _resize(x: Tensor, taps: Sequence[_Tap], dim: int) -> Tensor:
    """float32 -> float32 along ``dim``."""
    shape = [1] * x.ndim
    shape[dim] = -1
    total = x.index_select(dim, taps[0].index) * taps[0].weight.float().view(shape)
    for tap in taps[1:]:
        product = x.index_select(dim, tap.index).double() * tap.weight.view(shape)
        if tap.fused is not None:
            product = torch.where(tap.fused.view(shape), product, product.float().double())
        total = (product + total.double()).float()
    return total


class DeviceMosaic:
    """Camera views to the mosaic, uint8 ``[1, T, 2 * view_height, 2 * view_width, 3]`` on a device.

    Args:
        embodiment: mosaic, view size and crop. cameras: the three views in the network's order, as ``stitch_views``.
        device: where the resize runs and the result is.
        max_frames: of a call; the staging buffer is made for as many.

    Raises:
        ConfigError: not three cameras, or an unknown mosaic.
    """

    def __init__(
        self,
        embodiment: Embodiment,
        device: torch.device | str,
        *,
        cameras: Sequence[CameraSpec] | None = None,
        max_frames: int = 4,
    ) -> None:
        self._embodiment, self._device = embodiment, torch.device(device)
        self._cameras = mosaic_cameras(embodiment, cameras)
        self._crops = [crop_box(c.height, c.width, embodiment.crop_scale) for c in self._cameras]
        self._max_frames = max_frames
        size = max_frames * sum(h * w * 3 for _, _, h, w in self._crops)
        cuda = self._device.type == "cuda"
        self._staging = torch.empty(size, dtype=torch.uint8, pin_memory=cuda)
        self._copied = torch.cuda.Event() if cuda else None
        target = (embodiment.view_height, embodiment.view_width)
        self._axes = {
            (h, w): (_taps(h, target[0], self._device), _taps(w, target[1], self._device)) for _, _, h, w in self._crops
        }
        # A tensor: dividing by a Python number multiplies by its rounded inverse on a GPU.
        self._full = torch.full((), 255.0, device=self._device)

    def __call__(self, frames: Views) -> Tensor:
        """
        Args:
            frames: camera name -> T times uint8 ``[H, W, 3]`` RGB of the camera's raw size, the same T for all: one
                array, or one per frame.

        Raises:
            MissingInput, InvalidImage: as ``stitch_views``.
        """
        check_views(frames, self._cameras)
        count = len(frames[self._cameras[0].name])
        if count > self._max_frames:
            whole = {name: np.asarray(images) for name, images in frames.items()}
            return stitch_views(whole, self._embodiment, self._device, cameras=self._cameras)
        if self._copied is not None:
            self._copied.synchronize()  # of the call before; long done
        parts, at = [], 0
        for camera, (top, left, h, w) in zip(self._cameras, self._crops, strict=True):
            part = self._staging[at : at + count * h * w * 3].view(count, h, w, 3)
            for into, image in zip(part.numpy(), frames[camera.name], strict=True):
                np.copyto(into, image[top : top + h, left : left + w])
            parts.append(part.shape)
            at += part.numel()
        pixels = self._staging[:at].to(self._device, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))
        return lay_out_mosaic(self._views(pixels, parts), self._embodiment)

    def _views(self, pixels: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Resized views; cameras of one size go together."""
        if len(set(shapes)) == 1:
            count, h, w, _ = shapes[0]
            return list(self._resized(pixels.view(-1, h, w, 3)).split(count))
        sizes = [int(np.prod(s)) for s in shapes]
        return [self._resized(p.view(*s)) for p, s in zip(pixels.split(sizes), shapes, strict=True)]

    def _resized(self, pixels: Tensor) -> Tensor:
        """uint8 ``[N, h, w, 3]`` -> uint8 ``[N, view_height, view_width, 3]``, truncated."""
        vertical, horizontal = self._axes[(pixels.shape[1], pixels.shape[2])]
        resized = _resize(_resize(pixels.float() / self._full, horizontal, 2), vertical, 1)
        return (resized * 255).to(torch.uint8)

    def matches_host(self, frames: int = 2, seed: int = 0) -> bool:
        """Whether random pictures give the host's bits on this machine."""
        rng = np.random.default_rng(seed)
        views = {c.name: rng.integers(0, 256, (frames, c.height, c.width, 3), dtype=np.uint8) for c in self._cameras}
        return torch.equal(self(views).cpu(), stitch_views(views, self._embodiment, cameras=self._cameras))
