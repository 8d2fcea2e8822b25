"""What the libraries give at the network's shapes: matrix products by precision and scaling, attention by kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wam_policy_ros.contract.errors import ConfigError, MissingDependency
from wam_policy_ros.engine.fp8 import fp8_for
from wam_policy_ros.engine.kernels.cudnn_attention import CudnnFp8

from .kernel_cases import Sizes

Work = Callable[[int], object]
Clock = Callable[[Work], float]
_SETS = 3


def measure_products(sizes: Sizes, device: torch.device, seconds: Clock) -> dict[str, dict[str, Any]]:
    """TFLOP/s by ``M x N x K`` and variant; text that says why where a variant is not to be had.

    Variants: ``bf16``; ``row`` has one scale per row and per column applied in the product, ``raw`` one scale for all
    (1: the scales are applied later), both 8-bit with bf16 output, with ``fast`` or full accumulation.
    """
    d, ffn = sizes.width, sizes.ffn
    layers = ((3 * d, d), (d, d), (ffn, d), (d, ffn))
    out = {}
    for m in dict.fromkeys((sizes.rows, 2 * sizes.prefill_tokens, sizes.tokens)):
        for n, k in layers:
            rates: dict[str, Any] = {"bf16": _rate(partial(_native, m, n, k, device), 2 * m * n * k, seconds)}
            for scaling in ("row", "raw"):
                for fast in (True, False):
                    make = partial(_eight, m, n, k, device, scaling, fast=fast)
                    rates[f"{scaling}{' fast' if fast else ''}"] = _rate(make, 2 * m * n * k, seconds)
            out[f"{m}x{n}x{k}"] = rates
    return out


def measure_attention(sizes: Sizes, device: torch.device, seconds: Clock) -> dict[str, dict[str, Any]]:
    """TFLOP/s by number of keys and kernel: bf16, and all that cuDNN has for 8 bits, of both branches and of one."""
    out: dict[str, dict[str, Any]] = {}
    for keys in sizes.keys:
        flop = 4 * sizes.rows * keys * sizes.width
        out[str(keys)] = {
            name: _rate(partial(_attention, sizes, keys, device, name), flop, seconds)
            for name in (("cudnn", "flash") if device.type == "cuda" else ("default",))
        }
        if device.type == "cuda":
            for branches in sorted({sizes.branches, 1}, reverse=True):
                out[str(keys)] |= _eight_bit(sizes, branches, keys, device, seconds)
    return out


def _eight_bit(sizes: Sizes, branches: int, keys: int, device: torch.device, seconds: Clock) -> dict[str, Any]:
    """TFLOP/s of each kernel; the first is the one that the step takes."""
    title = f"fp8, {branches} branch{'es' if branches > 1 else ''}"
    try:
        kernel, dtype = CudnnFp8(device), fp8_for(device).dtype
        q, k, v = (torch.randn(branches, n, sizes.heads, sizes.head_dim, device=device).to(dtype)
                   for n in (sizes.tokens, keys, keys))  # fmt: skip
        plans = kernel.plans(q, k, v, kernel.scalars(1.0, 1.0, 1.0))
    except (ConfigError, MissingDependency, RuntimeError) as error:
        return {title: f"not available: {str(error).splitlines()[0][:120]}"}
    flop = 4 * branches * sizes.tokens * keys * sizes.width
    return {f"{title}: {i} {name}": _rate(partial(_ignoring, run), flop, seconds)
            for i, (name, run) in enumerate(plans)}  # fmt: skip


def _ignoring(run: Callable[[], Tensor]) -> Work:
    return lambda i: run()


def _rate(make: Callable[[], Work], flop: int, seconds: Clock) -> Any:
    try:
        return round(flop / seconds(make()) / 1e12, 2)
    except (RuntimeError, NotImplementedError, ConfigError) as error:
        return f"not available: {str(error).splitlines()[0][:120]}"


def _pairs(m: int, n: int, k: int, device: torch.device, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    return [tuple(torch.randn(r, k, device=device).to(dtype) for r in (m, n)) for _ in range(_SETS)]  # type: ignore


def _native(m: int, n: int, k: int, device: torch.device) -> Work:
    pairs = _pairs(m, n, k, device, torch.bfloat16)
    return lambda i: F.linear(*pairs[i % _SETS])


def _eight(m: int, n: int, k: int, device: torch.device, scaling: str, *, fast: bool) -> Work:
    if device.type != "cuda":
        raise NotImplementedError("8-bit products are measured on a GPU")
    pairs = _pairs(m, n, k, device, fp8_for(device).dtype)
    shapes = (((m, 1), (1, n))) if scaling == "row" else ((), ())
    scale_a, scale_b = (torch.ones(shape, device=device) for shape in shapes)

    def product(i: int) -> Tensor:
        a, b = pairs[i % _SETS]
        return torch._scaled_mm(
            a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    return product


def _attention(sizes: Sizes, keys: int, device: torch.device, name: str) -> Work:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def draw(tokens: int) -> Tensor:
        shape = (sizes.branches, tokens, sizes.heads, sizes.head_dim)
        return torch.randn(shape, device=device).bfloat16().transpose(1, 2)

    q, k, v = draw(sizes.tokens), draw(keys), draw(keys)
    kernels = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "default": SDPBackend.MATH}

    def attend(i: int) -> Tensor:
        with sdpa_kernel(kernels[name]):
            return F.scaled_dot_product_attention(q, k, v)

    return attend
