"""What the machine can do at the network's shapes, measured in the same run: the ruler for the stages' rates.

Both guidance branches are one batch, as in the fused step. Inputs are random: zeros run faster than data.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.engine.fp8 import fp8_for
from wam_policy_ros.model.config import DiTConfig

from .clock import median_seconds

COPY_BYTES = 2**31

Work = Callable[[int], object]


def measure_ceilings(cfg: DiTConfig, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """JSON-serialisable: TFLOP/s of matrix products and attention, GB/s of a copy (read plus written).

    A kind that this device or this build of PyTorch cannot run is a text that says why.
    """
    gpu = device.type == "cuda"
    rows = 2 * (cfg.num_frame_per_block * cfg.frame_seqlen + cfg.num_action_per_block + cfg.num_state_per_block)
    shapes = {
        "qkv": (3 * cfg.dim, cfg.dim),
        "o": (cfg.dim, cfg.dim),
        "ffn_up": (cfg.ffn_dim, cfg.dim),
        "ffn_down": (cfg.dim, cfg.ffn_dim),
    }
    native, eight = {}, {}
    for name, (n, k) in shapes.items():
        native[name] = _rate(partial(_gemm, rows, n, k, device, dtype), device, 2 * rows * n * k)
        eight[name] = _rate(partial(_gemm_fp8, rows, n, k, device), device, 2 * rows * n * k)
    attention: dict[str, Any] = {}
    block = cfg.num_frame_per_block * cfg.frame_seqlen
    for chunk in range(cfg.max_chunk_size):
        keys = (1 + cfg.num_frame_per_block * chunk) * cfg.frame_seqlen + rows // 2
        work = 4 * rows * keys * cfg.dim
        attention[str(keys)] = {
            name: _rate(partial(_attention, cfg, keys, device, dtype, backend), device, work)
            for name, backend in _backends(gpu).items()
        }
    size = COPY_BYTES if gpu else 2**26
    return {
        "rows": rows,
        "block_tokens": block,
        "gemm_native_TFLOPs": native,
        "gemm_fp8_rowwise_TFLOPs": eight,
        "attention_TFLOPs_by_keys": attention,
        "copy_GBps": measure_copy(size, device),
        "dtype": str(dtype).removeprefix("torch."),
    }


def measure_copy(size: int, device: torch.device) -> Any:
    """GB/s of a copy on the device, bytes read plus bytes written."""
    return _rate(partial(_copy, size, device), device, 2 * size, unit=1e9)


def best(value: Any) -> float | None:
    """The largest number in a nested dictionary of rates, or None."""
    if isinstance(value, dict):
        found = [b for v in value.values() if (b := best(v)) is not None]
        return max(found) if found else None
    return float(value) if isinstance(value, int | float) else None


def _rate(make: Callable[[], Work], device: torch.device, amount: int, unit: float = 1e12) -> Any:
    try:
        seconds, _ = median_seconds(make(), device, budget_s=0.05 if device.type != "cuda" else 1.0)
    except (RuntimeError, NotImplementedError, ConfigError) as error:
        return f"not available: {str(error).splitlines()[0][:120]}"
    return round(amount / seconds / unit, 4 if device.type != "cuda" else 1)


def _gemm(m: int, n: int, k: int, device: torch.device, dtype: torch.dtype) -> Work:
    xs = [torch.randn(m, k, device=device, dtype=dtype) for _ in range(3)]
    ws = [torch.randn(n, k, device=device, dtype=dtype) for _ in range(3)]
    return lambda i: F.linear(xs[i % 3], ws[i % 3])


def _gemm_fp8(m: int, n: int, k: int, device: torch.device) -> Work:
    if device.type != "cuda":
        raise NotImplementedError("row-wise FP8 products are measured on a GPU")
    fp8 = fp8_for(device)
    xs = [torch.randn(m, k, device=device).to(fp8.dtype) for _ in range(3)]
    ws = [torch.randn(n, k, device=device).to(fp8.dtype) for _ in range(3)]
    one_m, one_n = torch.ones(m, 1, device=device), torch.ones(1, n, device=device)

    def product(i: int) -> object:
        return torch._scaled_mm(
            xs[i % 3], ws[i % 3].t(), scale_a=one_m, scale_b=one_n, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return product


def _backends(gpu: bool) -> dict[str, Any]:
    from torch.nn.attention import SDPBackend

    if gpu:
        return {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    return {"default": None}


def _attention(cfg: DiTConfig, keys: int, device: torch.device, dtype: torch.dtype, backend: Any) -> Work:
    from torch.nn.attention import sdpa_kernel

    queries = cfg.num_frame_per_block * cfg.frame_seqlen + cfg.num_action_per_block + cfg.num_state_per_block

    def draw(tokens: int) -> torch.Tensor:
        return torch.randn(2, tokens, cfg.num_heads, cfg.head_dim, device=device, dtype=dtype).transpose(1, 2)

    q, k, v = draw(queries), draw(keys), draw(keys)

    def attend(i: int) -> object:
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    return attend


def _copy(size: int, device: torch.device) -> Work:
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda i: target.copy_(source)
