"""What a measurement ran on: commit, hardware, versions."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wam_policy_ros import __version__
from wam_policy_ros.contract.fingerprint import commit

if TYPE_CHECKING:
    import torch


def host() -> dict[str, Any]:
    """JSON-serialisable description of this machine and this code, as far as it is known without torch."""
    return {
        "wam_policy_ros": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(Path(__file__).resolve().parents[2]) or os.environ.get("WAM_COMMIT"),
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cpu_cores": os.cpu_count(),
    }


def provenance(device: torch.device) -> dict[str, Any]:
    """``host`` and what torch runs on."""
    import torch

    gpu: dict[str, Any] | None = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = {"name": properties.name, "memory_GiB": round(properties.total_memory / 2**30, 1)}
    return {
        **host(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "hip": getattr(torch.version, "hip", None),
        "cpu_threads": torch.get_num_threads(),
        "device": str(device),
        "gpu": gpu,
    }


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
