"""What several GPUs tell each other in a step, and how much memory each has in use."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any


def seconds_and_share(profile: dict[str, Any], step_s: float) -> dict[str, float]:
    """Of a profiled step: time in exchanges, waiting for the other GPUs included, and their share of the step."""
    taken = float(profile["exchange_s"])
    return {"s": taken, "share": taken / step_s, "kernels": profile["exchange_kernels"]}


def memory_in_use_GiB(count: int) -> list[float]:
    """Of the first ``count`` NVIDIA GPUs of the host, as the driver counts it; empty where it cannot be asked."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    words = [tool, "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", ",".join(map(str, range(count)))]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
        return [round(float(line) / 1024, 2) for line in done.stdout.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
