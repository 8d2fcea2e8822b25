"""``wam bench step --gpus 1,2``: the same rows on several numbers of GPUs, each number in a process of its own.

A row is written as soon as it is there. A process that fails, hangs or dies takes its configuration along and nothing
else: the next one starts with the configuration after it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import scaling

POLL_S = 0.2
TERM_S = 5.0
"""What a process gets to end by itself before it is killed."""
TAIL = 700
SHARED = ("video", "network", "spec", "provenance", "anchors")
"""What a part's report says about all of them."""
Report = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """Seconds. ``stall_s``: without a new row; ``deadline_s``: of everything, on ``time.monotonic``."""

    stall_s: float
    deadline_s: float


def run_counts(
    args: argparse.Namespace,
    counts: list[int],
    names: list[str],
    evaluations: list[int],
    words: list[str],
    write: Callable[[Report], None],
) -> Report:
    """Run every number of GPUs, one after the other.

    Args:
        names: configurations, in the order in which they can share a network.
        words: of the command line of each part, without ``--gpus``, ``--config`` and ``--json``.
        write: called with the report whenever it has a new row.

    Returns:
        The rows of all parts, each with ``gpus``; a row that was not measured has ``error``.
    """
    limits = Limits(args.stall_s, time.monotonic() + args.budget_s)
    report: Report = {"gpus": counts, "configurations": names, "evaluations": evaluations, "cold": {}, "rows": [],
                      "parts": []}  # fmt: skip

    def take(part: Report, rows: list[Row], gpus: int) -> None:
        report.update({key: part[key] for key in SHARED if key in part and key not in report})
        report["rows"] += [{"gpus": gpus, **row} for row in rows]
        scaling.annotate(report)
        write(report)

    for gpus in counts:
        left = names
        while left:
            wanted = [(name, count) for name in left for count in evaluations]
            part = Part([*words, "--gpus", str(gpus), "--config", ",".join(left)], limits)
            trouble = part.run(lambda rows, n=gpus, p=part: take(p.report, rows, n))  # type: ignore[misc]
            about = {"gpus": gpus, "configurations": left, "wall_s": round(part.wall_s, 1)}
            report["parts"].append(about | {k: part.report[k] for k in ("load_s", "load_peak_GiB") if k in part.report})
            lost = wanted[part.rows :]
            if not lost:
                write(report)
                break
            report["parts"][-1]["trouble"] = trouble
            failed = lost[0][0]
            take(part.report, [_lost(name, count, trouble, lost[0]) for name, count in lost if name == failed], gpus)
            left = left[left.index(failed) + 1 :]
    return report


def _lost(name: str, count: int, trouble: str, first: tuple[str, int]) -> Row:
    error = trouble if (name, count) == first else f"not run: its process ended in {first[0]} {first[1]}"
    return {"configuration": name, "evaluations": count, "error": error}


class Part:
    """``wam bench step`` in a process of its own, with a session of its own, so that what it starts ends with it.

    Attributes:
        report: its report so far.
        rows: how many rows of it were handed over.
    """

    def __init__(self, words: list[str], limits: Limits) -> None:
        self._words, self._limits = words, limits
        self.report: Report = {}
        self.rows = 0
        self.wall_s = 0.0

    def run(self, take: Callable[[list[Row]], None]) -> str:
        """Hand over rows as they come. Returns why there are no more of them: nothing useful when all are there."""
        begin = time.monotonic()
        if begin > self._limits.deadline_s:
            return "not run: the time for all of it was used up"
        with tempfile.TemporaryDirectory() as folder:
            path, errors = Path(folder) / "part.json", Path(folder) / "stderr"
            command = [sys.executable, "-m", "wam_policy_ros.tools.main", "bench", "step", *self._words]
            with errors.open("wb") as sink:
                process = subprocess.Popen(
                    [*command, "--json", str(path)], stdout=subprocess.DEVNULL, stderr=sink, start_new_session=True
                )
            try:
                why = self._watch(process, path, errors, take)
            finally:
                _end(process)
                self.wall_s = time.monotonic() - begin
            self._read(path, take)
            return f"{why or f'its process ended with status {process.returncode}'}: {_tail(errors)}"

    def _watch(
        self, process: subprocess.Popen[bytes], path: Path, errors: Path, take: Callable[[list[Row]], None]
    ) -> str:
        """Until the process ends, or has to: the reason then."""
        shown, last = 0, time.monotonic()
        while process.poll() is None:
            shown = _show(errors, shown)
            if self._read(path, take):
                last = time.monotonic()
            now = time.monotonic()
            if now > self._limits.deadline_s:
                return "the time for all of it was used up"
            if now - last > self._limits.stall_s:
                return f"no row came within {self._limits.stall_s:.0f} s"
            time.sleep(POLL_S)
        _show(errors, shown)
        return ""

    def _read(self, path: Path, take: Callable[[list[Row]], None]) -> bool:
        """Take what is new in the report. True when there was something."""
        try:
            self.report = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        rows = self.report["rows"]
        new, self.rows = rows[self.rows :], len(rows)
        if new:
            take(new)
        return bool(new)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and everything it started."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TERM_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left of its session
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _show(errors: Path, shown: int) -> int:
    """Pass on what the process said."""
    text = errors.read_bytes()[shown:]
    sys.stderr.write(text.decode("utf-8", "replace"))
    sys.stderr.flush()
    return shown + len(text)


def _tail(errors: Path) -> str:
    """The end of what a process said, progress aside."""
    lines = errors.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()
    said = [line.strip() for line in lines if line.strip() and not line.rstrip().endswith(("%", "ms"))]
    return " | ".join(said)[-TAIL:] or "it said nothing"
