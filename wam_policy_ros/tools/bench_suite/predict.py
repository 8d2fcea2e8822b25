"""``wam bench predict``: milliseconds per step on 2, 4 and 8 GPUs, predicted from a report of one. No torch.

Of a report on several numbers of GPUs the rows of one GPU are taken.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.model.config import DreamZeroConfig

from .configurations import parse_changes
from .prediction import LAYOUTS, SPLIT_STAGES, Assumptions, Layout, predict_row, predict_step
from .records import BENCH, load_anchors, write_json

GOALS_MS = {"8": 450, "4": 260}
"""FP8 on two GPUs."""
COLUMNS = {"bf16": "bf16", "fp8": "FP8"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--from", dest="report", type=Path, default=BENCH / "h200_step.json", metavar="FILE",
                        help="what wam bench step --json wrote on one GPU; default bench/h200_step.json")  # fmt: skip
    names = ", ".join(f.name for f in dataclasses.fields(Assumptions))
    parser.add_argument("--assume", action="append", default=[], metavar="NAME=VALUE", help=f"one of {names}")
    parser.add_argument("--note", help="kept with the prediction: what it is for, what its assumptions rest on")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the prediction")
    parser.add_argument("--table", action="store_true", help="the README's table alone")


def run(args: argparse.Namespace) -> int:
    try:
        report = json.loads(args.report.read_text(encoding="utf-8"))
        rows = report["rows"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("no report of wam bench step", got=f"{args.report}: {error!r}") from error
    made = predict(report, rows, assumptions(args.assume), args.report.name)
    made |= {} if args.note is None else {"note": args.note}
    if args.json:
        write_json(made, args.json)
    print(table(made) if args.table else text(made))
    return 0


def assumptions(words: list[str]) -> Assumptions:
    changes = parse_changes(words)
    known = {f.name for f in dataclasses.fields(Assumptions)}
    if unknown := sorted(set(changes) - known):
        raise ConfigError("no such assumption", got=unknown, expected=f"some of {sorted(known)}")
    return Assumptions(**changes)


def predict(report: dict[str, Any], rows: list[dict[str, Any]], assumed: Assumptions, source: str) -> dict[str, Any]:
    """Of every fused row, on every layout."""
    cfg = DreamZeroConfig.dreamzero_14b()
    fused = [r for r in rows if r["configuration"] in COLUMNS and "step_s" in r and r.get("gpus", 1) == 1]
    if not fused:
        raise ConfigError("nothing to predict from", got=source, expected=f"rows of {list(COLUMNS)}")
    return {
        "what": "PREDICTION, no measurement: a step on several GPUs of one host, from the stage times of one GPU",
        "from": {"file": source, "commit": report["provenance"]["commit"], "gpu": report["provenance"]["gpu"],
                 "date": report["provenance"]["date"], "video": report["video"]},
        "layouts": "guidance groups x GPUs that share the tokens of one branch",
        "assumed": dataclasses.asdict(assumed),
        "rows": [predict_row(r, layout, assumed, cfg, video=report["video"]) for layout in LAYOUTS for r in fused],
        "inputs": [_input(r) for r in fused],
        "check": check(assumed, cfg, load_anchors()),
        "goals_ms_fp8_two_gpus": GOALS_MS,
    }  # fmt: skip


def _input(row: dict[str, Any]) -> dict[str, Any]:
    """What a prediction takes of a row, kept with it: the report may be measured anew."""
    stages = {p: {"stages_s": {s: e["stages_s"][s] for s in ("total", *SPLIT_STAGES)}}
              for p, e in row["position_s"].items()}  # fmt: skip
    kept: dict[str, Any] = {key: {"p50": row[key]["p50"]} for key in ("step_s", "reaction_s") if key in row}
    return {"configuration": row["configuration"], "evaluations": row["evaluations"], **kept, "position_s": stages}


def check(assumed: Assumptions, cfg: DreamZeroConfig, anchors: dict[str, Any]) -> list[dict[str, Any]]:
    """The same algebra on upstream's code, which was measured on one GPU and on two.

    Its branches run one after the other, so one alone takes a half, texts included; both are always evaluated.
    """
    out = []
    for count, one in anchors["upstream"]["evaluations"].items():
        text_s = one["stages"]["text_encode(x2)"] * 1e-3
        stages = {"total": one["median"] * 1e-3 - text_s / 2, "prefill": one["stages"]["dit_prefill"] * 1e-3,
                  "denoise": one["stages"]["dit_denoise"] * 1e-3}  # fmt: skip
        step = predict_step(stages, evaluations=int(count), guided=int(count), frames=2, layout=Layout(2, 1),
                            share=0.5, assumed=assumed, cfg=cfg)  # fmt: skip
        measured = anchors["upstream_two_gpus"]["evaluations"][count]["median"]
        out.append({"what": "upstream's code, two GPUs", "evaluations": int(count), "one_gpu_ms": one["median"],
                    "predicted_ms": round(step.seconds * 1e3, 1), "measured_ms": measured,
                    "predicted_over_measured": round(step.seconds * 1e3 / measured, 3)})  # fmt: skip
    return out


def table(made: dict[str, Any]) -> str:
    """Markdown, for the README."""
    cells = {(r["configuration"], r["evaluations"], r["layout"]): r for r in made["rows"]}
    counts = sorted({r["evaluations"] for r in made["rows"]}, reverse=True)
    head = ["evaluations", "", "one GPU, measured", *(f"{x.gpus} GPUs ({x}), predicted" for x in LAYOUTS)]
    lines = [_line(head), "|" + "---|" * len(head)]
    for count in counts:
        for name, title in COLUMNS.items():
            found = [cells.get((name, count, str(x))) for x in LAYOUTS]
            if found[0] is not None:
                one = f"{found[0]['one_gpu_ms']:.0f} ms"
                lines.append(_line([str(count), title, one, *(f"{r['step_ms']:.0f} ms" if r else "" for r in found)]))
    return "\n".join(lines)


def text(made: dict[str, Any]) -> str:
    lines = [made["what"], f"from {made['from']['file']}, commit {made['from']['commit']}", ""]
    lines += ["assumed:", *(f"  {k:22} {'from the report' if v is None else v}" for k, v in made["assumed"].items())]
    lines += ["", "config evals layout  one GPU ms  predicted ms  efficiency  exchanged MB       ms  frame to chunk ms"]
    for r in made["rows"]:
        reaction = f"{r['reaction_ms']:.1f}" if "reaction_ms" in r else "-"
        lines.append(
            f"{r['configuration']:6} {r['evaluations']:5} {r['layout']:>6} {r['one_gpu_ms']:11.1f} "
            f"{r['step_ms']:13.1f} {r['scaling_efficiency']:11.2f} {r['exchange_MB']:13.1f} "
            f"{r['exchange_ms']:8.2f} {reaction:>18}"
        )
    lines += ["", "the same algebra on upstream's code, measured on one and on two GPUs:"]
    for c in made["check"]:
        lines.append(
            f"  {c['evaluations']:2} evaluations: predicted {c['predicted_ms']:.0f}, measured "
            f"{c['measured_ms']:.0f} ms ({c['predicted_over_measured']:.3f})"
        )
    goals = {str(r["evaluations"]): r["step_ms"] for r in made["rows"]
             if (r["configuration"], r["layout"]) == ("fp8", "2x1")}  # fmt: skip
    lines += [f"  goal of FP8 on two GPUs at {n} evaluations: {goal} ms, predicted {goals[n]:.0f} ms"
              for n, goal in made["goals_ms_fp8_two_gpus"].items() if n in goals]  # fmt: skip
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
