"""What passes between matrix products and the operations around them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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
