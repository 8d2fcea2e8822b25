"""A bar chart of a report of ``wam bench step``, with what was measured elsewhere beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw(report: dict[str, Any], path: Path) -> None:
    """Write a PNG. Bars of one number of evaluations stand together; the stages of our own are stacked."""
    groups = [str(e) for e in report["evaluations"]]
    ours = [(name, gpus) for name in report["configurations"] for gpus in sorted(report.get("gpus", [1]))]
    upstream = {("upstream", n): measured for n in sorted(report.get("gpus", [1]))
                if (measured := _upstream(report, n))}  # fmt: skip
    names = [*upstream, *ours]
    rows = {((r["configuration"], r.get("gpus", 1)), str(r["evaluations"])): r for r in report["rows"]}
    stages = ["preprocess", "first_frame", "vae_encode", "prefill", "denoise"]
    figure, axis = plt.subplots(figsize=(9, 4.8))
    width = 0.8 / max(len(names), 1)
    for index, name in enumerate(names):
        for group, evaluations in enumerate(groups):
            x = group + (index - (len(names) - 1) / 2) * width
            if name in upstream:
                value = upstream[name].get(evaluations)
                if value is not None:
                    label = "upstream's code, measured" if group == index == 0 else None
                    axis.bar(x, value, width * 0.92, color="0.75", label=label)
                    title = f"{value:.0f}" if name[1] == 1 else f"x{name[1]}\n{value:.0f}"
                    axis.text(x, value, title, ha="center", va="bottom", fontsize=7)
                continue
            row = rows.get((name, evaluations))
            if row is None or "step_s" not in row:
                continue
            total, title = row["step_s"]["p50"] * 1e3, name[0] if name[1] == 1 else f"{name[0]}\nx{name[1]}"
            means = _mean_stages(row)
            bottom = 0.0
            for k, stage in enumerate(stages):
                part = means.get(stage, 0.0) * 1e3
                label = stage if group == 0 and index == len(names) - 1 else None
                axis.bar(x, part, width * 0.92, bottom=bottom, color=f"C{k}", label=label)
                bottom += part
            axis.bar(x, total, width * 0.92, fill=False, edgecolor="black", linewidth=0.8)
            axis.text(x, max(total, bottom), f"{title}\n{total:.0f}", ha="center", va="bottom", fontsize=7)
    axis.set_xticks(range(len(groups)), [f"{g} evaluations" for g in groups])
    axis.set_ylabel("ms per closed-loop step, median")
    axis.margins(y=0.15)
    where = report["provenance"]
    machine = where["gpu"]["name"] if where["gpu"] else where["cpu"]
    axis.set_title(f"{report['network']}; {machine}; torch {where['torch']}; {_commit(where)}", fontsize=9)
    axis.legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _commit(where: dict[str, Any]) -> str:
    """The first one where rows are of several."""
    return str(where["commit"] or "unknown").replace(",", " ").split()[0][:10]


def _upstream(report: dict[str, Any], gpus: int) -> dict[str, float]:
    """Milliseconds of upstream's code by number of evaluations; nothing where the report compares with nothing."""
    if not report.get("anchors"):
        return {}
    if gpus == 1:
        return dict(report["anchors"])
    rows = [r for r in report["rows"] if r.get("gpus", 1) == gpus and "upstream_ms" in r.get("scaling", {})]
    return {str(r["evaluations"]): r["scaling"]["upstream_ms"] for r in rows}


def _mean_stages(row: dict[str, Any]) -> dict[str, float]:
    """Stages averaged over the positions of a window: some stages do not occur at every position."""
    positions = row["position_s"].values()
    names = {s for p in positions for s in p["stages_s"]}
    return {s: sum(p["stages_s"].get(s, 0.0) for p in positions) / len(positions) for s in names}
