"""The report of ``wam bench step`` for people."""

from __future__ import annotations

from typing import Any

from . import scaling
from .ceilings import best

_STAGES = ("preprocess", "first_frame", "vae_encode", "prefill", "denoise", "decode_actions", "outside_gpu")


def summary(report: dict[str, Any]) -> str:
    """Table of the issue first, then stages, rates, ceilings, memory and cold numbers."""
    where = report["provenance"]
    machine = where["gpu"]["name"] if where["gpu"] else f"{where['cpu']}, {where['cpu_threads']} threads"
    lines = [
        f"{report['network']}; {report['spec']['weights']}",
        f"{machine}; {report['spec']['dtype']}; torch {where['torch']}; commit {where['commit'] or 'unknown'}",
        f"guidance {report['spec']['guidance_scale']}; "
        + ("action and video" if report["video"] else "action alone, nobody looks at the video"),
        *(_loaded(part) for part in report.get("parts", [report])),
        "",
        *_speed(report),
        *scaling.lines(report),
        "",
        *_stages(report),
    ]
    lines += _ceilings(report.get("ceilings"))
    for name, c in report["cold"].items():
        lines.append(
            f"cold {name}: imports {c['imported_s']:.1f} s, policy ready {c['policy_ready_s']:.1f} s, "
            f"first chunk {c['process_start_to_first_chunk_s']:.1f} s after process start"
        )
    return "\n".join(lines)


def _loaded(part: dict[str, Any]) -> str:
    """Of the report, or of one of its parts on several GPUs."""
    where = f"{part['gpus']} GPUs: " if "wall_s" in part else ""
    if "load_s" not in part:
        return f"{where}{part.get('trouble', 'no network')}"
    peak = part.get("load_peak_GiB")
    return f"{where}network ready in {part['load_s']:.1f} s" + (f", peak {peak} GiB" if peak is not None else "")


def _title(name: str, gpus: int) -> str:
    return name if gpus == 1 else f"{name} x{gpus}"


def _speed(report: dict[str, Any]) -> list[str]:
    rows = {(r["configuration"], r.get("gpus", 1), r["evaluations"]): r for r in report["rows"]}
    columns = [(name, gpus) for name in report["configurations"] for gpus in sorted(report.get("gpus", [1]))]
    head = "ms per step, median".ljust(30) + "upstream".rjust(10) + "".join(_title(*c).rjust(10) for c in columns)
    lines = [head]
    for count in report["evaluations"]:
        anchor = report["anchors"].get(str(count))
        line = f"{count} of 16 evaluations".ljust(30) + (f"{anchor:.0f}" if anchor else "-").rjust(10)
        ours = [rows.get((*column, count), {}).get("step_s") for column in columns]
        lines.append(line + "".join((f"{s['p50'] * 1e3:.1f}" if s else "failed").rjust(10) for s in ours))
    return lines


def _stages(report: dict[str, Any]) -> list[str]:
    lines = []
    for row in report["rows"]:
        if "error" in row:
            title = _title(row["configuration"], row.get("gpus", 1))
            lines.append(f"{title} {row['evaluations']}: {row['error']}")
            continue
        step, memory = row["step_s"], row["memory"]
        tail = f", peak {memory['peak_GiB']} GiB" if memory else ""
        lines.append(
            f"{_title(row['configuration'], row.get('gpus', 1))} {row['text']}, tier {row['tier']}: "
            f"p50 {step['p50'] * 1e3:.1f} p99 {step['p99'] * 1e3:.1f} "
            f"min {step['min'] * 1e3:.1f} max {step['max'] * 1e3:.1f} ms, n {step['n']}; "
            f"worst p99/p50 at one position "
            f"{row['worst_p99_over_p50']:.3f}; first call {row['first_call_s'] * 1e3:.0f} ms{tail}"
        )
        if "reaction_s" in row:
            r = row["reaction_s"]
            lines.append(
                f"  newest frame to chunk, earlier frames encoded as they came: p50 {r['p50'] * 1e3:.1f} p99 "
                f"{r['p99'] * 1e3:.1f} ms, n {r['n']}"
            )
        if "profile" in row:
            p = row["profile"]
            lines.append(
                f"  GPU busy {p['gpu_busy_s'] * 1e3:.1f} ms, idle {p['gpu_idle_s'] * 1e3:.2f} ms in a call at position "
                f"{p['position']}, {p['kernels']} kernels"
            )
        for position, entry in row["position_s"].items():
            parts = [f"{s} {entry['stages_s'][s] * 1e3:.1f}" for s in _STAGES if s in entry["stages_s"]]
            rates = [f"{s} {r:.3g}" for s, r in entry["stage_TFLOPs"].items()]
            lines.append(
                f"  call {position}: {entry['p50'] * 1e3:8.1f} ms: {', '.join(parts)}; TFLOP/s: {', '.join(rates)}"
            )
    return lines


def _ceilings(measured: dict[str, Any] | None) -> list[str]:
    if measured is None:
        return []
    lines = ["", f"ceilings, {measured['rows']} rows:"]
    for kind in ("gemm_native_TFLOPs", "gemm_fp8_rowwise_TFLOPs", "attention_TFLOPs_by_keys", "copy_GBps"):
        value = measured[kind]
        if best(value) is None:
            text = next(iter(value.values())) if isinstance(value, dict) else value
        elif isinstance(value, dict):
            text = ", ".join(f"{k} {v if not isinstance(v, dict) else best(v)}" for k, v in value.items())
        else:
            text = str(value)
        lines.append(f"  {kind:26} {text}")
    return lines
