"""The encodings of sensor_msgs/Image that this node reads, and how each becomes RGB. Arrays only, no messages.

Names as in ``sensor_msgs/image_encodings``. ``mono16`` is read only when a parameter says so: on a topic it is nearly
always depth.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Convert = Callable[[Bytes, int, int, int, bool], Bytes]
"""(flat bytes, height, width, step, big endian) -> uint8 ``[H, W, 3]`` RGB, may share memory with the bytes."""

_GRID_ROWS, _GRID_COLUMNS = 16, 32
"""So many rows, and pixels in a row, tell whether a picture is uniform."""


@dataclass(frozen=True)
class Encoding:
    """One encoding.

    Attributes:
        to_rgb: the conversion.
        bits_per_pixel: in a row; a row is ``step`` bytes or less.
        rows_per_height: rows of ``step`` bytes per row of pixels: 1.5 and 3 for the planar ones.
        multiple: width and height must be multiples of these.
        group: bytes after which the channels repeat.
        bits: of one channel.
    """

    to_rgb: Convert
    bits_per_pixel: int
    rows_per_height: float = 1.0
    multiple: tuple[int, int] = (1, 1)
    group: int = 1
    bits: int = 8

    def row_bytes(self, width: int) -> int:
        return width * self.bits_per_pixel // 8

    def size_bytes(self, height: int, step: int) -> int:
        return round(height * self.rows_per_height) * step

    def spread(self, flat: Bytes, height: int, width: int, step: int, big: bool) -> float:
        """How much a picture varies: the largest standard deviation of a channel over a grid of pixels, on the scale
        0 to 255. 0 for a picture of one colour; costs some ten microseconds at any size."""
        rows = flat[: height * step].reshape(height, step)[:, : self.row_bytes(width)]
        if self.bits == 16:
            rows = rows[:, (0 if big else 1) :: 2]  # the high bytes
        skip = (self.multiple[1], self.group // (2 if self.bits == 16 else 1))
        groups = rows[:, : rows.shape[1] // skip[1] * skip[1]].reshape(height, -1, skip[1])
        down = max(skip[0], height // _GRID_ROWS // skip[0] * skip[0])
        grid = groups[::down, :: max(1, groups.shape[1] // _GRID_COLUMNS)]
        return float(grid.reshape(-1, skip[1]).std(axis=0).max()) if grid.size else 0.0


def _rows(flat: Bytes, height: int, step: int, row_bytes: int) -> Bytes:
    """``[height, row_bytes]`` without the padding at the end of each row."""
    return np.ascontiguousarray(flat[: height * step].reshape(height, step)[:, :row_bytes])


def _eight_bits(rows: Bytes, big: bool) -> Bytes:
    """16-bit channels to 8: the full range to the full range, rounded, as cv_bridge scales."""
    wide = rows.view(">u2" if big else "<u2").astype(np.uint16)
    return np.asarray(cv2.convertScaleAbs(wide, alpha=1 / 257), dtype=np.uint8).reshape(wide.shape)


def _packed(channels: int, code: int | None, bits: int = 8) -> Encoding:
    def convert(flat: Bytes, height: int, width: int, step: int, big: bool) -> Bytes:
        rows = _rows(flat, height, step, width * channels * bits // 8)
        pixels = (_eight_bits(rows, big) if bits == 16 else rows).reshape(height, width, channels)
        return pixels if code is None else np.asarray(cv2.cvtColor(pixels, code), dtype=np.uint8)

    return Encoding(convert, channels * bits, group=channels * bits // 8, bits=bits)


def _bayer(code: int, bits: int = 8) -> Encoding:
    def convert(flat: Bytes, height: int, width: int, step: int, big: bool) -> Bytes:
        rows = _rows(flat, height, step, width * bits // 8)
        mosaic = _eight_bits(rows, big) if bits == 16 else rows
        return np.asarray(cv2.cvtColor(mosaic, code), dtype=np.uint8)

    # Two neighbouring pixels are two channels; of two neighbouring rows only the first is looked at for the spread.
    return Encoding(convert, bits, multiple=(2, 2), group=2 * bits // 8, bits=bits)


def _yuv422(code: int) -> Encoding:
    def convert(flat: Bytes, height: int, width: int, step: int, big: bool) -> Bytes:
        pixels = _rows(flat, height, step, width * 2).reshape(height, width, 2)
        return np.asarray(cv2.cvtColor(pixels, code), dtype=np.uint8)

    return Encoding(convert, 16, multiple=(2, 1), group=4)


def _nv420(code: int) -> Encoding:
    def convert(flat: Bytes, height: int, width: int, step: int, big: bool) -> Bytes:
        return np.asarray(cv2.cvtColor(_rows(flat, height * 3 // 2, step, width), code), dtype=np.uint8)

    return Encoding(convert, 8, rows_per_height=1.5, multiple=(2, 2))


_YUV_TO_RGB = np.array(
    [[1.164, 0.0, 1.596], [1.164, -0.391, -0.813], [1.164, 2.018, 0.0]], dtype=np.float64
)  # ITU-R BT.601, luma 16 to 235, as OpenCV's YUV 4:2:2 and 4:2:0


def _nv24(flat: Bytes, height: int, width: int, step: int, big: bool) -> Bytes:
    luma = _rows(flat, height, step, width)
    chroma = _rows(flat[height * step :], height, 2 * step, 2 * width).reshape(height, width, 2)
    offset = -_YUV_TO_RGB @ np.array([16.0, 128.0, 128.0])
    return np.asarray(cv2.transform(np.dstack([luma, chroma]), np.column_stack([_YUV_TO_RGB, offset])), dtype=np.uint8)


_UYVY, _YUYV = _yuv422(cv2.COLOR_YUV2RGB_UYVY), _yuv422(cv2.COLOR_YUV2RGB_YUY2)
BY_NAME: dict[str, Encoding] = {
    "rgb8": _packed(3, None),
    "bgr8": _packed(3, cv2.COLOR_BGR2RGB),
    "rgba8": _packed(4, cv2.COLOR_RGBA2RGB),
    "bgra8": _packed(4, cv2.COLOR_BGRA2RGB),
    "mono8": _packed(1, cv2.COLOR_GRAY2RGB),
    "rgb16": _packed(3, None, 16),
    "bgr16": _packed(3, cv2.COLOR_BGR2RGB, 16),
    "rgba16": _packed(4, cv2.COLOR_RGBA2RGB, 16),
    "bgra16": _packed(4, cv2.COLOR_BGRA2RGB, 16),
    "mono16": _packed(1, cv2.COLOR_GRAY2RGB, 16),
    "yuv422": _UYVY,
    "uyvy": _UYVY,
    "yuv422_yuy2": _YUYV,
    "yuyv": _YUYV,
    "nv12": _nv420(cv2.COLOR_YUV2RGB_NV12),
    "nv21": _nv420(cv2.COLOR_YUV2RGB_NV21),
    "nv24": Encoding(_nv24, 8, rows_per_height=3.0),
} | {
    # OpenCV's other names for these are those of the second row and column.
    f"bayer_{pattern.lower()}{bits}": _bayer(getattr(cv2, f"COLOR_Bayer{pattern}2RGB"), bits)
    for bits in (8, 16)
    for pattern in ("RGGB", "BGGR", "GBRG", "GRBG")
}

READ_ONLY_WHEN_TOLD = frozenset({"mono16"})
"""Labels that are refused unless ``image.encodings`` says that the camera means them: depth cameras use them, too."""

SUPPORTED = tuple(name for name in BY_NAME if name not in READ_ONLY_WHEN_TOLD)


def nearest(label: str) -> str | None:
    """The supported name that a vendor's label looks most like, None when there is none."""
    squeezed = {name.replace("_", ""): name for name in BY_NAME}
    found = difflib.get_close_matches(label.lower().replace("_", ""), squeezed, n=1, cutoff=0.7)
    return squeezed[found[0]] if found else None
