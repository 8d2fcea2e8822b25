"""From the start of a process to its first chunk, measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from wam_policy_ros.contract.errors import EngineError

MARK = "cold-start:"


def process_age_s() -> float:
    """Seconds since this process was started, the interpreter's own start and all imports included (Linux)."""
    # Field 22, counted behind the command's name, which may hold spaces and parentheses.
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


def run_cold(words: list[str], timeout_s: float = 300.0) -> dict[str, Any]:
    """Run ``wam bench step`` with ``words`` and ``--cold-child`` in a new process; what it printed behind the mark.

    Raises:
        EngineError: the process failed; the end of what it said is in the message.
    """
    command = [sys.executable, "-m", "wam_policy_ros.tools.main", "bench", "step", *words, "--cold-child"]
    begin = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise EngineError("the cold start did not end in time", got=f"{timeout_s:.0f} s") from error
    found = next((line for line in done.stdout.splitlines() if line.startswith(MARK)), None)
    if done.returncode or found is None:
        raise EngineError("the cold start failed", got=f"status {done.returncode}: {done.stderr[-500:]}")
    report: dict[str, Any] = json.loads(found.removeprefix(MARK))
    return report | {"process_wall_s": time.perf_counter() - begin}
