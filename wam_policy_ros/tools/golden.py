"""``wam golden DIR``: compare everything in a folder of recorded reference runs, print a table, exit 1 on a miss."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from wam_policy_ros.engine.build import resolve_device

from .golden_suite import closed_loop, data, dit, encoders, schedulers, wire
from .golden_suite.folder import GoldenFolder, Row

SUITES: dict[str, Callable[[GoldenFolder], list[Row]]] = {
    "schedulers": schedulers.check,
    "encoders": encoders.check,
    "dit": dit.check,
    "data": data.check,
    "msgpack": wire.check,
    "closed loop": closed_loop.check,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="folder with *.safetensors, data.json and msgpack/")
    parser.add_argument("--device", default="cpu", help="cpu (as recorded) or cuda; TF32 is off either way")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table as JSON")


def run(args: argparse.Namespace) -> int:
    if not args.folder.is_dir():
        print(f"wam golden: no such folder: {args.folder}", file=sys.stderr)
        return 2
    resolve_device(args.device)  # one clear error instead of one per file
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    rows = compare_folder(args.folder, lambda text: print(text, file=sys.stderr, flush=True), device=args.device)
    print(table(rows))
    if args.json:
        # JSON knows no infinity: "worst" is null where something could not be compared at all.
        records = [asdict(r) | {"ok": r.ok, "worst": r.worst if math.isfinite(r.worst) else None} for r in rows]
        args.json.write_text(json.dumps(records, indent=1, allow_nan=False), encoding="utf-8")
    if not rows:
        print("nothing was compared: no file in this folder is known", file=sys.stderr)
        return 1
    missed = [r for r in rows if not r.ok]
    print(f"{len(rows) - len(missed)} of {len(rows)} comparisons within their limits" + (": FAIL" if missed else ""))
    return 1 if missed else 0


def compare_folder(
    path: Path, progress: Callable[[str], None] = lambda text: None, *, device: str = "cpu"
) -> list[Row]:
    """All rows for a folder. A suite that raises becomes a failed row with the error; unknown files are rows too."""
    folder = GoldenFolder(path, device)
    rows: list[Row] = []
    for name, check in SUITES.items():
        start = time.perf_counter()
        try:
            with torch.inference_mode():
                found = check(folder)
        except Exception as error:  # a broken file must not hide the other comparisons
            progress(traceback.format_exc())
            found = [Row(name, f"{type(error).__name__}: {error}", 0, float("inf"), 0.0)]
        rows += found
        if found:
            progress(f"  {name}: {len(found)} rows, {time.perf_counter() - start:.1f} s")
    for file, tensors in folder.uncompared().items():
        what = f"{len(tensors)} recorded tensors were not compared: no rule for these names"
        rows.append(Row(file, what, 0, float("inf"), 0.0, ", ".join(tensors[:4]) + (", ..." if tensors[4:] else "")))
    unknown = "not compared: no rule for this file"
    return rows + [Row(name, unknown, 0, float("inf"), 0.0) for name in folder.unused()]


def table(rows: list[Row]) -> str:
    """Fixed-width text: file, what, number of tensors, worst max|a-b|/std(b), limit, verdict, where the worst is."""
    header = ("file", "what", "n", "worst", "limit", "", "at")
    lines = [header]
    for r in rows:
        what = r.what if len(r.what) <= 60 else r.what[:57] + "..."
        lines.append(
            (r.file, what, str(r.tensors), f"{r.worst:.1e}", f"{r.limit:.0e}", "ok" if r.ok else "MISS", r.note)
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
