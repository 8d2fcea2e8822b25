"""``wam bench table JSON``: the README's speed table from a report of ``wam bench step``, or its chart. No torch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from wam_policy_ros.contract.errors import ConfigError

from . import scaling
from .records import load_anchors

COLUMNS = {"plain": "plain, bf16", "bf16": "fused, bf16", "fp8": "fused, FP8"}
ROWS = {"16": "16", "8": "8 (upstream's default)", "4": "4 (dynamic rule, best case)"}
UNKNOWN = "not run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("report", type=Path, help="what wam bench step --json wrote")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw the bar chart (PNG), e.g. where the GPU "
                        "machine has no matplotlib")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    try:
        report = json.loads(args.report.read_text(encoding="utf-8"))
        several = len(report.get("gpus", [])) > 1
        print(scaling.markdown(report) if several else speed_table(report, load_anchors()))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("no report of wam bench step", got=f"{args.report}: {error!r}") from error
    if args.chart:
        from .chart import draw

        draw(report, args.chart)
    return 0


def speed_table(report: dict[str, Any] | None, anchors: dict[str, Any]) -> str:
    """Markdown. Milliseconds, median over whole windows, with n; without a report every cell of ours says so."""
    rows = {} if report is None else {(r["configuration"], str(r["evaluations"])): r for r in report["rows"]}
    head = ["evaluations", "upstream's code, measured", *COLUMNS.values()]
    lines = [_line(head), "|" + "---|" * len(head)]
    for count, title in ROWS.items():
        upstream = anchors["upstream_ms"][count]
        lines.append(_line([title, f"{upstream:.0f} ms", *(_cell(rows.get((c, count))) for c in COLUMNS)]))
    memory = [_peak([r for r in rows.values() if r["configuration"] == c]) for c in COLUMNS]
    peak = max(e["peak_GiB"] for e in anchors["upstream"]["evaluations"].values())
    lines.append(_line(["peak memory, one session", f"{peak:.0f} GiB", *memory]))
    return "\n".join(lines)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None or "step_s" not in row:
        return UNKNOWN
    return f"{row['step_s']['p50'] * 1e3:.0f} ms (n {row['step_s']['n']})"


def _peak(rows: list[dict[str, Any]]) -> str:
    found = [r["memory"]["peak_GiB"] for r in rows if r.get("memory")]
    return f"{max(found):.0f} GiB" if found else UNKNOWN


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
