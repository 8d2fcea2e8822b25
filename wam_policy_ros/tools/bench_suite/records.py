"""Files beside the code: numbers to compare with, and the history of predictions and results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wam_policy_ros.contract.errors import ConfigError

BENCH = Path(__file__).resolve().parents[3] / "bench"


def load_anchors(path: Path | None = None) -> dict[str, Any]:
    """``bench/anchors.json``: measurements of other programs with source, hardware and date; empty when absent.

    Raises:
        ConfigError: a file was named and is not there, or it is not JSON.
    """
    file = path or BENCH / "anchors.json"
    if not file.is_file():
        if path is not None:
            raise ConfigError("no such file", got=path)
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ConfigError("anchors are not valid JSON", got=f"{file}: {error}") from error


def write_json(report: dict[str, Any], path: Path) -> None:
    """The whole file or none of it, also for somebody who reads it meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def append_history(report: dict[str, Any], note: str, path: Path | None = None) -> Path:
    """One line per run: what was predicted, and what came out.

    Args:
        note: the prediction, in words and numbers.
    """
    file = path or BENCH / "history.jsonl"
    line = {
        "prediction": note,
        "result_ms": {
            f"{r['configuration']} {r['evaluations']}": round(r["step_s"]["p50"] * 1e3, 1)
            for r in report["rows"] if "step_s" in r
        },
        "peak_GiB": {
            f"{r['configuration']} {r['evaluations']}": r["memory"]["peak_GiB"]
            for r in report["rows"] if r.get("memory")
        },
        "network": report["network"],
        "date": report["provenance"]["date"],
        "commit": report["provenance"]["commit"],
        "gpu": report["provenance"]["gpu"],
        "torch": report["provenance"]["torch"],
    }  # fmt: skip
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as f:
        f.write(json.dumps(line) + "\n")
    return file
