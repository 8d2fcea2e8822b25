"""``wam bench step``: milliseconds per closed-loop step for each configuration and number of evaluations.

Every row is a whole number of windows of four calls with fresh random pictures; the table shows the median over them,
as the upstream numbers beside it do. Rates are operations of the algorithm (``flops``) over time, next to what this
machine reached at the network's shapes in the same run (``ceilings``).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from wam_policy_ros.contract.errors import ConfigError, WamError
from wam_policy_ros.engine.build import resolve_device
from wam_policy_ros.engine.config import NUM_STEPS, EngineConfig
from wam_policy_ros.engine.policy import DreamZeroPolicy
from wam_policy_ros.engine.step_schedule import fixed_steps
from wam_policy_ros.tools.provenance import provenance

from . import cold, exchange, flops, gpus, trace
from .ceilings import measure_ceilings
from .configurations import CONFIGURATIONS, engine_config, parse_changes
from .network import (
    Progress,
    add_network_arguments,
    build,
    configuration_names,
    free_memory,
    on_a_gpu,
    reconfigured,
)
from .records import append_history, load_anchors, write_json
from .stages import Stages, line
from .table import summary
from .windows import LONG_CALL_S, measure, observation_at


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_network_arguments(parser)
    parser.add_argument("--config", default="plain", help=f"some of {','.join(CONFIGURATIONS)}, separated by commas")
    parser.add_argument("--evaluations", default="8", help="of 16 solver steps: some of 16,8,7,6,5 and 4 (best case of "
                        "the dynamic rule, benchmark only)")  # fmt: skip
    parser.add_argument("--gpus", default="1", metavar="N,...", help="numbers of GPUs of this host that share a step; "
                        "several numbers run one after the other, each in processes of its own")  # fmt: skip
    parser.add_argument("--budget-s", type=float, default=480.0, help="with several numbers of GPUs: what "
                        "has not run by then is left out")  # fmt: skip
    parser.add_argument("--stall-s", type=float, default=150.0, help="with several numbers of GPUs: a "
                        "process that gives no row for so long is ended")  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="engine option on top")
    parser.add_argument("--windows", type=int, default=8, help="at most so many measured windows after the cold one")
    parser.add_argument("--row-seconds", type=float, default=10.0, help="no further window of a row starts after this")
    parser.add_argument("--no-video", action="store_true", help="steps whose predicted video nobody looks at")
    parser.add_argument("--cold", default="", metavar="CONFIG,...", help="also: process start to first chunk, each in "
                        "a process of its own")  # fmt: skip
    parser.add_argument("--cold-child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--no-ceilings", action="store_true", help="leave out what the machine can do")
    parser.add_argument("--no-profile", action="store_true", help="leave out the GPU's idle time, in the fused rows of "
                        "fewest evaluations")  # fmt: skip
    parser.add_argument("--no-reaction", action="store_true", help="leave out newest frame to chunk")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="one step of the last row as Chrome trace events")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="write a bar chart (PNG)")
    parser.add_argument(
        "--anchors", type=Path, metavar="FILE", help="numbers to compare with; default bench/anchors.json"
    )
    parser.add_argument("--note", metavar="PREDICTION", help="append this run to the history, with what was predicted")
    parser.add_argument("--history", type=Path, metavar="FILE", help="default bench/history.jsonl")


def run(args: argparse.Namespace) -> int:
    names, evaluations, changes = (
        configuration_names(args.config),
        _numbers(args.evaluations, "--evaluations"),
        parse_changes(args.set),
    )
    changes |= {} if args.dtype == "auto" else {"dtype": args.dtype}
    # In this order one network serves all: FP8 takes the weights over.
    names = [n for n in CONFIGURATIONS if n in names]
    counts = _gpu_counts(args.gpus, names)
    if len(counts) > 1:
        return _several_counts(args, counts, names, evaluations)
    changes |= {"gpus": counts[0]} if counts[0] > 1 else {}
    if args.cold_child:
        return _cold_child(args, names[0], evaluations[0], changes)
    report: dict[str, Any] = {"cold": {}, "rows": []}
    anchors = load_anchors(args.anchors).get("upstream_ms", {})
    for name in configuration_names(args.cold) if args.cold else []:
        found = report["cold"][name] = cold.run_cold([*_words(args, name, evaluations[-1:]), "--gpus", args.gpus])
        for row in found["stages"]:
            print(line(row), file=sys.stderr)
        print(f"  cold start of {name}: {found['process_start_to_first_chunk_s']:.1f} s", file=sys.stderr)
    begin = time.perf_counter()
    policy = build(args, engine_config(names[0], evaluations[0], gpu=on_a_gpu(args.device), changes=changes))
    device = policy.network.device
    report |= {
        "video": not args.no_video,
        "network": args.checkpoint or f"random {args.network}",
        "load_s": time.perf_counter() - begin,
        "load_peak_GiB": round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if device.type == "cuda" else None,
        "configurations": names,
        "evaluations": evaluations,
        "spec": dict(policy.spec.details) | {"weights": policy.spec.weights, "embodiment": policy.spec.embodiment},
        "provenance": provenance(device),
        "anchors": anchors if args.network == "14b" or args.checkpoint else {},
    }
    if not args.no_ceilings:
        print("  ceilings of this machine", file=sys.stderr)
        report["ceilings"] = measure_ceilings(policy.network.config.dit, device, policy.network.dtype)
    running = prepared = names[0]
    for name in names:
        for count in evaluations:
            config = engine_config(name, count, gpu=device.type == "cuda", changes=changes)
            try:
                before, policy = policy, reconfigured(policy, config)
                if name != running:
                    before.disconnect()  # the last configuration's windows, on other GPUs, too
                    running = name
                del before
                free_memory(device)
                if name != prepared:  # as a policy that ships is; rows of one configuration share the windows
                    policy.prepare(Progress())
                    prepared = name
                row = _row(policy, name, count, args)
            except (WamError, RuntimeError) as error:  # the other rows cost minutes of a GPU: keep them
                row = {"configuration": name, "evaluations": count, "error": f"{type(error).__name__}: {error}"}
            report["rows"].append(row)
            if args.json:
                write_json(report, args.json)
    if args.trace:
        work = _one_step(policy, want_video=not args.no_video)
        report["trace"] = trace.write_trace(work, args.trace, device) | {"file": args.trace.name}
    policy.disconnect()
    print(summary(report))
    if args.trace:
        print(f"trace: {args.trace} (open it in Perfetto)")
    _write(report, args)
    return 1 if any("error" in row for row in report["rows"]) else 0


def _several_counts(args: argparse.Namespace, counts: list[int], names: list[str], evaluations: list[int]) -> int:
    words = [*_words(args, None, evaluations), "--windows", str(args.windows), "--row-seconds", str(args.row_seconds)]
    words += [f"--no-{part}" for part in ("video", "profile", "reaction") if getattr(args, f"no_{part}")]

    def write(report: dict[str, Any]) -> None:
        if args.json:
            write_json(report, args.json)

    report = gpus.run_counts(args, counts, names, evaluations, [*words, "--no-ceilings"], write)
    if "provenance" in report:
        print(summary(report))
    else:
        print("\n".join(f"{r['configuration']} {r['evaluations']}, {r['gpus']} GPUs: {r['error']}"
                        for r in report["rows"]))  # fmt: skip
    _write(report, args)
    return 1 if any("error" in row for row in report["rows"]) else 0


def _gpu_counts(text: str, names: list[str]) -> list[int]:
    counts = list(dict.fromkeys(_numbers(text, "--gpus")))
    if not counts or min(counts) < 1:
        raise ConfigError("--gpus must be numbers of GPUs separated by commas", got=text, expected="e.g. 1,2")
    if max(counts) > 1 and "plain" in names:
        raise ConfigError("the plain step runs on one GPU", got=f"--gpus {text}", expected="--config bf16,fp8")
    return counts


def _write(report: dict[str, Any], args: argparse.Namespace) -> None:
    if args.json:
        write_json(report, args.json)
        print(f"written: {args.json}")
    if args.note:
        print(f"appended: {append_history(report, args.note, args.history)}")
    if args.chart:
        from .chart import draw  # matplotlib is an extra that a GPU machine need not have

        draw(report, args.chart)
        print(f"drawn: {args.chart}")


def _row(policy: DreamZeroPolicy, name: str, count: int, args: argparse.Namespace) -> dict[str, Any]:
    config, network, many = policy.config, policy.network, _numbers(args.gpus, "--gpus")[0]
    row: dict[str, Any] = {
        "configuration": name,
        "evaluations": count,
        "text": config.evaluations_text,
        "tier": config.tier,
    }
    if many > 1:
        exchange.peaks_GiB(policy)  # from here on
    prepared = config.step == "fused" and config.graphs and network.device.type == "cuda"
    row |= measure(
        policy,
        windows=args.windows,
        budget_s=args.row_seconds,
        min_windows=min(2, args.windows),
        want_video=not args.no_video,
        prepared=prepared,
        say=f"{name} {count}",
    )
    if config.step == "fused" and not args.no_reaction:
        # What is encoded ahead is the same work at any number of evaluations, so slow rows get one window.
        windows = 1 if row["step_s"]["p50"] > LONG_CALL_S else min(2, args.windows)
        reaction = measure(
            policy, windows=windows, ahead=True, want_video=False, prepared=prepared, say=f"{name} {count} ahead"
        )
        row["reaction_s"] = reaction["step_s"]
        row["reaction_stages_s"] = {s: v["p50"] for s, v in reaction["stages_s"].items()}
    branches = 1 if config.guidance_scale == 1.0 else 2
    guided = _guided(config, want_video=not args.no_video)
    picture = network.config.target_video_hw or (2 * policy.embodiment.view_height, 2 * policy.embodiment.view_width)
    for position, entry in row["position_s"].items():
        work = flops.step_stages(
            network.config, int(position), count, branches, picture, guided_evaluations=guided,
            want_video=not args.no_video,
        )  # fmt: skip
        entry["stage_TFLOP"] = {s: w / 1e12 for s, w in work.items()}
        entry["stage_TFLOPs"] = {
            s: w / 1e12 / entry["stages_s"][s] for s, w in work.items() if entry["stages_s"].get(s)
        }
    # The trace of thousands of small launches takes longer to read than the row took, and what the GPU waits for is the
    # same in every row of a configuration: one fused row of each.
    profiled = many > 1 or count == min(_numbers(args.evaluations, "--evaluations"))
    if network.device.type == "cuda" and name != "plain" and profiled and not args.no_profile:
        at = 4  # the last position of a window: the longest call
        busy = trace.busy_seconds(_one_step(policy, at, want_video=not args.no_video), network.device)
        step_s = row["position_s"][str(at)]["p50"]
        row["profile"] = busy | {"position": at, "gpu_idle_s": step_s - busy["gpu_busy_s"]}
        if many > 1:
            row["exchange"] = exchange.seconds_and_share(busy, step_s)
    if many > 1:
        item = torch.empty((), dtype=network.dtype).element_size()
        sizes = exchange.leader_bytes(network.config, config, 4, count, guided, itemsize=item)
        row.setdefault("exchange", {})["MB"] = sizes / 1e6
        row["gpu_peak_GiB"] = exchange.peaks_GiB(policy)
    if network.device.type == "cuda":
        row["gpu_in_use_GiB"] = exchange.memory_in_use_GiB(many)
    return row


def _guided(config: EngineConfig, *, want_video: bool) -> int:
    """Evaluations that need the unguided branch; the last one moves nothing but the video."""
    steps = fixed_steps(config.schedule, config.evaluations, NUM_STEPS)
    assert steps is not None  # the rows of this bench have a number of evaluations
    return sum(config.guides(s) for s in (steps if want_video else steps[:-1]))


def _one_step(policy: DreamZeroPolicy, position: int = 4, *, want_video: bool = True) -> Any:
    """A warm call at this window position, ready to be run once."""
    session = policy.open()
    for i in range(position - 1):
        policy.infer(session, observation_at(policy, i))
    observation = observation_at(policy, position - 1, want_video=want_video)

    def work() -> None:
        policy.infer(session, observation)
        policy.close(session)

    return work


def _cold_child(args: argparse.Namespace, name: str, count: int, changes: dict[str, Any]) -> int:
    gpu = on_a_gpu(args.device)
    stages = Stages(say=False)
    stages.add("process and imports", import_s := cold.process_age_s())
    if gpu:
        with stages.stage("GPU found"):
            stages.device = resolve_device(args.device)
            torch.zeros(1, device=stages.device)
    policy = build(args, engine_config(name, count, gpu=gpu, changes=changes), stages)
    stages.end()
    built_s = cold.process_age_s()
    with stages.stage("first call"):
        session = policy.open()
        policy.infer(session, observation_at(policy, 0))
    first_s = cold.process_age_s()
    with stages.stage("second call"):
        policy.infer(session, observation_at(policy, 1))
    out = {"configuration": name, "evaluations": count, "imported_s": import_s, "policy_ready_s": built_s,
           "process_start_to_first_chunk_s": first_s, "second_chunk_s": cold.process_age_s(),
           "stages": stages.rows, "pytorch_compiler_imported": "torch._dynamo" in sys.modules}  # fmt: skip
    print(cold.MARK + json.dumps(out))
    return 0


def _words(args: argparse.Namespace, name: str | None, counts: list[int]) -> list[str]:
    words = ["--evaluations", ",".join(map(str, counts)), "--device", args.device, "--dtype", args.dtype]
    words += [] if name is None else ["--config", name]
    words += ["--checkpoint", args.checkpoint] if args.checkpoint else ["--network", args.network]
    words += ["--embodiment", args.embodiment] + (["--tokenizer", args.tokenizer] if args.tokenizer else [])
    return words + [w for change in args.set for w in ("--set", change)]


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(n) for n in text.split(",") if n.strip()]
    except ValueError as error:
        raise ConfigError(f"{option} must be numbers separated by commas", got=text) from error
