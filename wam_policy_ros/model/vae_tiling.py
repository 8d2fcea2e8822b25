"""Encoding and decoding in overlapping tiles, to bound memory (DreamZero spec 5.3, last paragraph).

Off in the published configurations. The result is an approximation: a tile does not see beyond its edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import ModelConfigError


@dataclass(frozen=True)
class Tiling:
    """Tile size and distance between tile starts, (height, width), in latents."""

    size: tuple[int, int]
    stride: tuple[int, int]

    def __post_init__(self) -> None:
        if not all(1 <= stride <= size for size, stride in zip(self.size, self.stride, strict=True)):
            raise ModelConfigError(f"tiles of size {self.size} and stride {self.stride}: expected 1 <= stride <= size")


def tile_spans(length: int, size: int, stride: int) -> Iterator[tuple[int, int]]:
    """``(start, stop)`` of the tiles along one axis; the last one ends at ``length``."""
    for start in range(0, length, stride):
        stop = min(start + size, length)
        yield start, stop
        if stop == length:
            return


def edge_weight(span: tuple[int, int], length: int, border: int) -> Tensor:
    """Blending weight ``[stop - start]`` float32: ramps of ``border`` samples on the edges inside the image."""
    start, stop = span
    ramp = torch.arange(1, stop - start + 1) / max(border, 1)
    weight = torch.ones(stop - start)
    if start > 0:
        weight = torch.minimum(weight, ramp)
    if stop < length:
        weight = torch.minimum(weight, ramp.flip(0))
    return weight


def process_tiles(
    x: Tensor, process: Callable[[Tensor], Tensor], tiling: Tiling, unit_in: int, unit_out: int
) -> Tensor:
    """Apply ``process`` to every tile of ``x`` and blend the results.

    Args:
        x: ``[..., H, W]``.
        process: from a tile to its result; height and width change by ``unit_out / unit_in``.
        tiling: in latents.
        unit_in: samples of ``x`` per latent. unit_out: samples of the result per latent.

    Returns:
        ``sum(weight * result) / sum(weight)``, summed in at least float32, in the dtype of the results.
    """
    height, width = (n // unit_in for n in x.shape[-2:])
    total: Tensor | None = None
    weights = torch.zeros(height * unit_out, width * unit_out, device=x.device)
    for top, bottom in tile_spans(height, tiling.size[0], tiling.stride[0]):
        rows = slice(top * unit_out, bottom * unit_out)
        row_weight = edge_weight(
            (rows.start, rows.stop), height * unit_out, (tiling.size[0] - tiling.stride[0]) * unit_out
        )
        for left, right in tile_spans(width, tiling.size[1], tiling.stride[1]):
            cols = slice(left * unit_out, right * unit_out)
            col_weight = edge_weight(
                (cols.start, cols.stop), width * unit_out, (tiling.size[1] - tiling.stride[1]) * unit_out
            )
            weight = torch.minimum(row_weight[:, None], col_weight[None, :]).to(x.device)
            tile = process(x[..., top * unit_in : bottom * unit_in, left * unit_in : right * unit_in])
            if total is None:
                wide = torch.promote_types(tile.dtype, torch.float32)
                total = torch.zeros(*tile.shape[:-2], *weights.shape, dtype=wide, device=x.device)
            total[..., rows, cols] += weight * tile
            weights[rows, cols] += weight
    assert total is not None  # height and width are at least one latent
    return (total / weights).to(tile.dtype)
