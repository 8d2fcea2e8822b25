"""The fingerprint of an engine: everything that decides the bits of an action, but seed and observation."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wam_policy_ros.contract.embodiment import Embodiment
from wam_policy_ros.contract.fingerprint import Fingerprint, code
from wam_policy_ros.contract.normalization import Statistics
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.model.tokenizer import Tokenizer

from .config import EngineConfig

LIBRARIES = ("numpy", "torch", "triton", "pytorch-triton-rocm", "nvidia-cudnn-frontend", "tokenizers", "safetensors",
             "ftfy")  # fmt: skip

_TEXT = "Pick up the RED cup; don't spill (100 %) its contents. Öffne die Tür 打开抽屉"
"""Its ids tell tokenizers apart."""


_NO_BITS = ("rank_deadline_s", "capture_exchange", "memory_budget_gib", "prepared_windows")
"""Options of the engine that decide nothing of an action."""


def fingerprint_of(
    network: DreamZero,
    config: EngineConfig,
    embodiment: Embodiment,
    statistics: Statistics,
    tokenizer: Tokenizer,
    weights_hash: str | None,
) -> Fingerprint:
    """
    Args:
        weights_hash: of ``model.fingerprint``; None: weights that nobody named.
    """
    ids, _ = tokenizer([_TEXT])
    options = {name: value for name, value in dataclasses.asdict(config).items() if name not in _NO_BITS}
    return Fingerprint.of(
        weights={"hash": weights_hash},
        code=code(),
        config={**options, "dtype": str(network.dtype).removeprefix("torch.")},
        inputs={
            "embodiment": embodiment.tag,
            "robot": _digest(dataclasses.asdict(embodiment)),
            "statistics": _digest(dataclasses.asdict(statistics)),
            "tokenizer": hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:32],
            "network": _digest(dataclasses.asdict(network.config)),
        },
        device=device(network.device),
        libraries=libraries(),
    )


def device(where: torch.device) -> dict[str, Any]:
    """What of the hardware decides which kernels run and how they add."""
    if where.type != "cuda":
        return {
            "type": "cpu",
            "name": _cpu(),
            "architecture": platform.machine(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        }
    found = torch.cuda.get_device_properties(where)
    architecture = getattr(found, "gcnArchName", "") if torch.version.hip else f"sm_{found.major}{found.minor}"
    return {
        "type": "hip" if torch.version.hip else "cuda",
        "name": found.name,
        "architecture": architecture,
        "multiprocessors": found.multi_processor_count,
        "memory_GiB": round(found.total_memory / 2**30, 1),
    }


def libraries() -> dict[str, Any]:
    """Versions of what computes."""
    cudnn = torch.backends.cudnn
    out: dict[str, Any] = {
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": cudnn.version() if cudnn.is_available() else None,
        "nccl": _nccl(),
    }
    for name in LIBRARIES:
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            out[name] = None
    out["torch"] = str(torch.__version__)  # with the build's suffix
    return out


def _nccl() -> str | None:
    """It chooses how several GPUs add."""
    if torch.version.cuda is None and torch.version.hip is None:
        return None
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError, TypeError):  # a build without it
        return None


def _digest(value: Any) -> str:
    def plain(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return [str(x.dtype), list(x.shape), x.tobytes().hex()]
        return str(x)

    return hashlib.sha256(json.dumps(value, sort_keys=True, default=plain).encode()).hexdigest()[:32]


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()
