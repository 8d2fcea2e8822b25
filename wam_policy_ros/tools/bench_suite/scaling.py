"""What more GPUs bring: rows of one configuration and number of evaluations beside those of one GPU in the same run."""

from __future__ import annotations

import json
from typing import Any

from .records import BENCH, load_anchors

Report = dict[str, Any]
Row = dict[str, Any]


def annotate(report: Report) -> None:
    """Give rows on several GPUs their ``scaling``: ``speedup`` and ``efficiency`` (speedup per GPU) against one GPU of
    the same report, ``predicted_ms`` where it was predicted, and ``upstream_ms`` where upstream's code was measured on
    as many."""
    rows = report["rows"]
    one = {(r["configuration"], r["evaluations"]): r for r in rows if r.get("gpus", 1) == 1 and "step_s" in r}
    predicted = _predictions() if _is_predicted(report) else {}
    for row in rows:
        if row.get("gpus", 1) == 1 or "step_s" not in row:
            continue
        scaling: dict[str, float] = {}
        if (alone := one.get((row["configuration"], row["evaluations"]))) is not None:
            speedup = alone["step_s"]["p50"] / row["step_s"]["p50"]
            scaling |= {"speedup": speedup, "efficiency": speedup / row["gpus"]}
        if (guess := predicted.get((row["configuration"], row["evaluations"], row["gpus"]))) is not None:
            scaling["predicted_ms"] = guess
        if (upstream := _upstream(report, row)) is not None:
            scaling["upstream_ms"] = upstream
        row["scaling"] = scaling


def lines(report: Report) -> list[str]:
    """For people; nothing when all rows are of one GPU."""
    found = [r for r in report["rows"] if r.get("gpus", 1) > 1 and "step_s" in r]
    if not found:
        return []
    out = ["", "several GPUs:  ms p50  speedup  per GPU  predicted  upstream  exchanged MB  of the time  GiB per GPU"]
    for row in found:
        scaling, exchange = row.get("scaling", {}), row.get("exchange", {})
        cells = [
            f"{row['step_s']['p50'] * 1e3:8.1f}",
            _number(scaling.get("speedup"), 8, 2),
            _number(scaling.get("efficiency"), 8, 2),
            _number(scaling.get("predicted_ms"), 10, 0),
            _number(scaling.get("upstream_ms"), 9, 0),
            _number(exchange.get("MB"), 13, 2),
            f"{exchange['share']:.2%}".rjust(12) if "share" in exchange else "-".rjust(12),
            "  " + ", ".join(f"{g:.1f}" for g in row.get("gpu_peak_GiB") or row.get("gpu_in_use_GiB", [])),
        ]
        lead = f"{row['configuration']} {row['evaluations']} x{row['gpus']}".ljust(13)
        out.append(lead + " ".join(cells).rstrip())
    return out


def markdown(report: Report) -> str:
    """For the README: a line per configuration and number of evaluations, a column per number of GPUs."""
    rows = {(r["configuration"], r["evaluations"], r.get("gpus", 1)): r for r in report["rows"]}
    counts = sorted(report["gpus"])
    head = ["evaluations", "", *(f"{n} GPU{'s' if n > 1 else ''}" for n in counts)]
    titles = ("speedup on {}", "per GPU", "predicted for {}", "upstream on {}", "exchanged MB", "GiB per GPU")
    head += [title.format(n) for n in counts if n > 1 for title in titles]
    out = [head, ["---"] * len(head)]
    for evaluations in report["evaluations"]:
        for name in report["configurations"]:
            found = [rows.get((name, evaluations, n), {}) for n in counts]
            cells = [f"{r['step_s']['p50'] * 1e3:.0f} ms (n {r['step_s']['n']})" if "step_s" in r else "not run"
                     for r in found]  # fmt: skip
            for row in (r for r, n in zip(found, counts, strict=True) if n > 1):
                scaling = row.get("scaling", {})
                cells += [_number(scaling.get(key), 0, 2) for key in ("speedup", "efficiency")]
                for name_ms in ("predicted_ms", "upstream_ms"):
                    cells.append(f"{scaling[name_ms]:.0f} ms" if name_ms in scaling else "-")
                cells.append(_number(row.get("exchange", {}).get("MB"), 0, 1))
                cells.append(", ".join(f"{g:.0f}" for g in row.get("gpu_peak_GiB", [])) or "-")
            out.append([str(evaluations), name, *cells])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in out)


def _number(value: float | None, width: int, digits: int) -> str:
    return ("-" if value is None else f"{value:.{digits}f}").rjust(width)


def _is_predicted(report: Report) -> bool:
    """Whether the shipped prediction is about runs like this one."""
    where = report.get("provenance", {}).get("gpu") or {}
    return report.get("network") == "random 14b" and "H200" in where.get("name", "") and not report.get("video", True)


def _upstream(report: Report, row: Row) -> float | None:
    """Upstream's code is its own at a number of evaluations, so bf16 and FP8 have the same."""
    if row["gpus"] != 2 or not report.get("anchors"):
        return None
    known = load_anchors().get("upstream_two_gpus", {}).get("evaluations", {}).get(str(row["evaluations"]))
    return None if known is None else float(known["median"])


def _predictions() -> dict[tuple[str, int, int], float]:
    file = BENCH / "prediction.json"
    if not file.is_file():
        return {}
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    return {(r["configuration"], r["evaluations"], r["gpus"]): r["step_ms"] for r in rows}
