"""What passes between matrix products and the operations around them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wam_policy_ros.engine.fp8 import Fp8


class Product(NamedTuple):
    """What a matrix product left behind, not yet scaled: ``value = raw * row_scale[:, None] * col_scale + bias``.

    Attributes:
        raw: ``[M, N]`` bf16 or float32, rows contiguous.
        row_scale: float32 ``[M]``, or ``[1]`` for one scale for all rows, or None.
        col_scale: float32 ``[N]``, or ``[1]``, or None.
        bias: ``[N]`` of any float dtype, or None.
    """

    raw: Tensor
    row_scale: Tensor | None = None
    col_scale: Tensor | None = None
    bias: Tensor | None = None


class Quantized(NamedTuple):
    """8-bit rows: ``value = values.float() * row_scale[:, None]``; ``values [M, K]``, ``row_scale`` float32 ``[M]``."""

    values: Tensor
    row_scale: Tensor


def quantized_like(x: Tensor, fp8: Fp8) -> Quantized:
    """Uninitialised 8-bit rows of the shape of ``x``."""
    return Quantized(
        torch.empty(x.shape, dtype=fp8.dtype, device=x.device),
        torch.empty(x.shape[0], dtype=torch.float32, device=x.device),
    )


def product_arguments(product: Product | None) -> dict[str, Any]:
    """Arguments by which every kernel that finishes a product takes it; a stride of 0 is one scale for all."""
    raw, row, col, bias = product or (None, None, None, None)
    return {
        "raw_ptr": raw,
        "row_ptr": row,
        "col_ptr": col,
        "product_bias_ptr": bias,
        "ROW_STRIDE": int(row is not None and row.numel() > 1),
        "COL_STRIDE": int(col is not None and col.numel() > 1),
    }


def words(x: Tensor) -> Tensor:
    """The same memory as integers, to be copied: ``[..., Dh]`` as 8-byte words, or as bytes where a head is no whole
    number of words."""
    return x.view(torch.uint8 if x.shape[-1] * x.dtype.itemsize % 8 else torch.int64)
