"""What passes between matrix products and the operations around them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wam_policy_ros.engine.fp8 import Fp8


class Product(NamedTuple):
    """What a matrix product left behind: ``value = raw + bias``.

    Attributes:
        raw: ``[M, N]`` bf16 or float32, rows contiguous.
        bias: ``[N]`` of any float dtype; None where there is none, or the product has added it.
    """

    raw: Tensor
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
    """Arguments by which every kernel that finishes a product takes it."""
    raw, bias = product or (None, None)
    return {"raw_ptr": raw, "product_bias_ptr": bias}


def words(x: Tensor) -> Tensor:
    """The same memory as integers, to be copied: ``[..., Dh]`` as 8-byte words, or as bytes where a head is no whole
    number of words."""
    return x.view(torch.uint8 if x.shape[-1] * x.dtype.itemsize % 8 else torch.int64)


def folded_keys(k: Tensor, wq: Tensor, head_dim: int) -> Tensor:
    """Keys as ``cross_attention`` takes them, float32: with everything in them that a logit is multiplied by but the
    query's own ``rstd``, so that queries go from memory to the matrix units as they are.

    ``(q * rstd * wq) . k / sqrt(Dh) = rstd * (q . folded) / log2(e)``, the logit in powers of two.

    Args:
        k: normalised keys ``[..., D]``; wq: ``[D]``, weight of the queries' norm.
    """
    return k.float() * (wq.float() * (math.log2(math.e) / math.sqrt(head_dim)))
