"""What can be known before the first step: options this machine cannot carry out are refused by name, and habits of its
libraries that would cost minutes, hang or give wrong numbers are found and said.

The only file of this room that looks at environment variables, those of PyTorch, Triton and MIOpen, never ours; the
processes of other GPUs get theirs in ``parallel``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn import functional as F

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.model.config import DiTConfig

from .config import EngineConfig
from .conv_check import median_ms
from .kernels.ops import quantize_rows
from .parallel.grid import Grid
from .quantize import Fp8Linear
from .sequence_parallel import check_ranks

_FP8_ATTENTION_FROM = (9, 0)
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_MIOPEN_SEARCHES = {
    "MIOPEN_FIND_MODE": ("1", "NORMAL"),
    "MIOPEN_FIND_ENFORCE": ("3", "4", "SEARCH", "SEARCH_DB_UPDATE"),
}


@dataclass(frozen=True)
class Platform:
    """What decides whether options work.

    Attributes:
        backend: ``cpu``, ``cuda`` or ``hip``.
        architecture: compute capability, or a name like ``gfx942``; empty on a CPU.
        environment: of the process. home: where libraries keep their caches unless told otherwise.
    """

    backend: str
    architecture: tuple[int, int] | str = ""
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    home: Path = Path("~")

    @classmethod
    def of(cls, device: torch.device) -> Platform:
        if device.type != "cuda":
            return cls("cpu")
        if torch.version.hip:
            return cls("hip", torch.cuda.get_device_properties(device).gcnArchName.split(":")[0])
        return cls("cuda", torch.cuda.get_device_capability(device))

    def place(self, variable: str, default: str) -> Path:
        """A folder that an environment variable names, or one below the home."""
        return Path(self.environment.get(variable) or self.home / default).expanduser()


def refuse_impossible(config: EngineConfig, platform: Platform, dit: DiTConfig, dtype: torch.dtype) -> None:
    """
    Args:
        dtype: of the network's weights.

    Raises:
        ConfigError: an option that this machine or this network cannot carry out, or that would have no effect.
    """
    name = str(dtype).removeprefix("torch.")
    if config.dtype not in ("auto", name):
        raise ConfigError(
            "the network was loaded in another dtype", got=f"dtype: {config.dtype}", expected=f"{name}, or auto",
            remedy="build a policy of its own for it",
        )  # fmt: skip
    check_ranks(Grid.of(config.gpus, guided=config.guidance_scale != 1.0).sequence, dit.num_heads)
    if config.step == "plain":
        return
    gpu = platform.backend != "cpu"
    if config.graphs and not gpu:
        raise ConfigError("graphs need a GPU", got="device cpu", remedy="set graphs: false, or preset: reference")
    if config.attention == "cudnn":
        if platform.backend != "cuda":
            raise ConfigError(
                "attention: cudnn needs a GPU of NVIDIA", got=f"backend {platform.backend}",
                remedy="set attention: torch",
            )  # fmt: skip
        if dtype != torch.bfloat16 or dit.head_dim % 8:
            raise ConfigError(
                "cuDNN's attention does not take this network", got=f"{name}, {dit.head_dim} numbers per head",
                expected="bfloat16 and a multiple of 8", remedy="set attention: torch",
            )  # fmt: skip
    if config.attention == "fp8" and gpu:
        _refuse_fp8_attention(platform, dit)
    if config.linears == "fp8" and gpu and dtype != torch.bfloat16:
        raise ConfigError(
            "8-bit matrix products with a scale per row give bfloat16", got=f"dtype: {name}",
            remedy="set dtype: bfloat16, or linears: native",
        )  # fmt: skip
    if gpu and (fault := unwritable(triton_cache(platform))):
        raise ConfigError(
            "Triton cannot write its cache, so no kernel can be compiled", got=fault,
            remedy="set TRITON_CACHE_DIR to a folder of your own",
        )  # fmt: skip


def _refuse_fp8_attention(platform: Platform, dit: DiTConfig) -> None:
    architecture = platform.architecture
    able = platform.backend == "cuda" and isinstance(architecture, tuple) and architecture >= _FP8_ATTENTION_FROM
    if not able:
        raise ConfigError(
            "attention: fp8 is cuDNN's kernel for NVIDIA GPUs of compute capability 9.0 or later",
            got=f"{platform.backend} {architecture}",
            remedy="set attention: torch (AMD) or cudnn",
        )
    if dit.head_dim % 16:
        raise ConfigError(
            "attention: fp8 does not take this network", got=f"{dit.head_dim} numbers per head",
            expected="a multiple of 16", remedy="set attention: cudnn",
        )  # fmt: skip


def warnings_of(config: EngineConfig, platform: Platform) -> list[str]:
    """Settings of the libraries that will hurt: each line says what to set instead."""
    out = []
    if platform.backend == "hip":
        env = platform.environment
        for name in _ALLOCATOR_VARIABLES:
            if "expandable_segments:true" in env.get(name, "").lower().replace(" ", ""):
                out.append(
                    f"{name} asks for expandable_segments, with which ROCm was seen to hang without an error: unset it"
                )
        for name, default in (
            ("MIOPEN_USER_DB_PATH", ".config/miopen"),
            ("MIOPEN_CUSTOM_CACHE_DIR", ".cache/miopen"),
        ):
            if fault := unwritable(platform.place(name, default)):
                out.append(
                    f"MIOpen cannot keep what it compiles, so every start does it again ({fault}): set {name} to a "
                    "writable folder"
                )
        for name, searching in _MIOPEN_SEARCHES.items():
            if env.get(name, "").upper() in searching:
                out.append(
                    f"{name}={env[name]} makes MIOpen search at every new shape, which can take minutes: unset it"
                )
    if platform.backend != "cpu" and config.step == "fused":
        cache = triton_cache(platform)
        if cache.exists() and hasattr(os, "getuid") and cache.stat().st_uid != os.getuid():
            out.append(
                f"Triton's cache {cache} belongs to another user; what is compiled there runs here: set "
                "TRITON_CACHE_DIR to a folder of your own"
            )
    return out


def triton_cache(platform: Platform) -> Path:
    """Where Triton keeps compiled kernels."""
    below = platform.place("TRITON_HOME", "") / ".triton/cache"
    return Path(platform.environment.get("TRITON_CACHE_DIR") or below).expanduser()


def unwritable(folder: Path) -> str:
    """Why no file can be made in ``folder``, which is created; empty when one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return str(error)


def slow_products(layer: Fp8Linear, rows: int) -> list[str]:
    """A warning when the 8-bit product of ``rows`` rows takes longer than the native one; measured, tens of ms."""
    (outputs, inputs), device = layer.weight.shape, layer.weight.device
    x = torch.randn(rows, inputs, device=device, dtype=layer.dtype)
    weight, eight = torch.randn(outputs, inputs, device=device, dtype=layer.dtype), quantize_rows(x, layer.fp8)
    with torch.inference_mode():
        eight_ms = median_ms(lambda: layer(eight), device, 5)
        native_ms = median_ms(lambda: F.linear(x, weight), device, 5)
    if eight_ms <= native_ms:
        return []
    return [
        f"linears: fp8 are slower than native ones here ({eight_ms:.2f} against {native_ms:.2f} ms for "
        f"{rows} x {inputs} x {outputs}, torch {torch.__version__}): they save memory only; set linears: native"
    ]
