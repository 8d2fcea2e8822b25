"""``wam inspect CHECKPOINT``: what a checkpoint folder holds and what is missing. Reads headers, never weights."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wam_policy_ros.contract.embodiments import ALL
from wam_policy_ros.contract.errors import CheckpointError, WamError
from wam_policy_ros.engine.build import describe_robot
from wam_policy_ros.model.checkpoint import CheckpointFolder, check_weights, read_folder
from wam_policy_ros.model.config import DreamZeroConfig
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.model.errors import CheckpointFileError, ModelError
from wam_policy_ros.model.key_maps import COMPONENTS
from wam_policy_ros.model.tokenizer import find_tokenizer_folder

MAX_PROBLEMS_SHOWN = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="folder with config.json")
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json, if it is not in the checkpoint")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    try:
        folder = read_folder(args.checkpoint)
    except CheckpointFileError as error:
        raise CheckpointError(error.what, problems=error.problems, remedy=error.remedy) from error
    report = describe(folder, args.tokenizer)
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        _print(report)
    complete = not report["problems"]
    print("complete: it can be loaded" if complete else f"{len(report['problems'])} problem(s): it will be refused",
          file=sys.stderr if args.json else sys.stdout)  # fmt: skip
    return 0 if complete else 1


def describe(folder: CheckpointFolder, tokenizer: Path | None = None) -> dict[str, Any]:
    """Everything ``wam inspect`` says, JSON-serialisable. ``problems`` is empty when the folder can be loaded."""
    problems: list[str] = []
    config: DreamZeroConfig | None = None
    report: dict[str, Any] = {"path": str(folder.path)}
    try:
        config = folder.config
    except ModelError as error:
        problems += [f"config.json: {error}", *folder.problems]
    if config is not None:
        network = DreamZero.on_meta(config)
        expected = {name: tuple(p.shape) for name, p in network.state_dict().items()}
        problems += check_weights(folder)
        report["network"] = _network(config, expected)
    report["files"] = _files(folder)
    report["embodiments"], robot_problems = _embodiments(folder)
    problems += robot_problems
    try:
        report["tokenizer"] = str(find_tokenizer_folder(folder.path, tokenizer))
    except CheckpointFileError as error:
        report["tokenizer"] = None
        problems.append(f"{error.what}: {'; '.join(error.problems)}")
    report["problems"] = problems
    return report


def _network(config: DreamZeroConfig, expected: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    counts: dict[str, list[int]] = {title: [0, 0] for title in COMPONENTS.values()}
    for name, shape in expected.items():
        title = next(t for prefix, t in COMPONENTS.items() if name.startswith(prefix))
        size = 1
        for n in shape:
            size *= n
        counts[title][0] += 1
        counts[title][1] += size
    dit = config.dit
    parameters = sum(p for _, p in counts.values())
    window = 2 * (dit.local_attn_size - dit.num_frame_per_block) * dit.frame_seqlen * dit.dim * 2 * dit.num_layers * 2
    return {
        "components": {t: {"tensors": n, "parameters": p} for t, (n, p) in counts.items()},
        "parameters": parameters,
        "dit": {"dim": dit.dim, "layers": dit.num_layers, "heads": dit.num_heads, "tokens_per_frame": dit.frame_seqlen},
        "action_horizon": config.action_horizon,
        "window_frames": dit.local_attn_size,
        "decoupled_noise": config.decouple_inference_noise,
        "bf16_weights_GiB": round(parameters * 2 / 2**30, 2),
        "bf16_session_GiB": round(window / 2**30, 2),
        "ignored_config_keys": list(config.ignored),
    }


def _files(folder: CheckpointFolder) -> dict[str, Any]:
    shards = Counter(e.shard.name for e in folder.tensors.values())
    sizes = {
        name: {"tensors": count, "MiB": round((folder.path / name).stat().st_size / 2**20, 1)}
        for name, count in sorted(shards.items())
    }
    return {
        "shards": sizes,
        "stored_dtypes": dict(Counter(e.dtype for e in folder.tensors.values())),
        "skipped_tensors": len(folder.skipped),
        "metadata.json": folder.metadata is not None,
        "conf.yaml": folder.conf is not None,
    }


def _embodiments(folder: CheckpointFolder) -> tuple[dict[str, Any], list[str]]:
    """Every embodiment of metadata.json; at least one must be usable."""
    out: dict[str, Any] = {}
    if folder.metadata is None:
        return out, ["experiment_cfg/metadata.json is missing: no normalisation statistics"]
    pages = {e.tag for e in ALL}
    for tag in folder.metadata:
        if tag not in pages:
            out[tag] = {"usable": False, "why": "no embodiment page for this tag"}
            continue
        try:
            robot, _ = describe_robot(folder, tag)
        except (WamError, ModelError) as error:
            out[tag] = {"usable": False, "why": str(error)}
            continue
        out[tag] = {
            "usable": True,
            "cameras": {c.name: f"{c.width}x{c.height}" for c in robot.cameras},
            "state": {f.name: f"{f.dim} {f.unit}" for f in robot.state},
            "action": {f.name: f"{f.dim} {f.unit}{' relative' if f.relative else ''}" for f in robot.action},
            "control_rate_hz": robot.control_rate_hz,
            "horizon": robot.horizon,
            "statistics": "q01, q99 complete",
        }
    usable = [t for t, e in out.items() if e["usable"]]
    if usable:
        return out, []
    return out, [f"no usable embodiment in metadata.json (found {sorted(out)}, known {sorted(pages)})"] + [
        f"embodiment {tag}: {entry['why']}" for tag, entry in out.items()
    ]


def _print(report: dict[str, Any]) -> None:
    print(report["path"])
    network = report.get("network")
    if network:
        print(f"network: {network['parameters'] / 1e9:.2f} B parameters, {network['bf16_weights_GiB']} GiB in bf16, "
              f"{network['bf16_session_GiB']} GiB more per open session")  # fmt: skip
        for title, c in network["components"].items():
            print(f"  {title:22} {c['tensors']:5} tensors {c['parameters']:>15,} parameters")
        print(
            f"  dit {network['dit']}, chunk {network['action_horizon']} rows, window {network['window_frames']} frames"
        )
        if network["ignored_config_keys"]:
            print(f"  config keys without effect: {', '.join(network['ignored_config_keys'])}")
    files = report["files"]
    print(f"files: {len(files['shards'])} shard(s), stored as {files['stored_dtypes']}, "
          f"{files['skipped_tensors']} tensors skipped on purpose")  # fmt: skip
    for name, shard in files["shards"].items():
        print(f"  {name}: {shard['tensors']} tensors, {shard['MiB']} MiB")
    print(f"  metadata.json {_yes(files['metadata.json'])}, conf.yaml {_yes(files['conf.yaml'])}, "
          f"tokenizer {report['tokenizer'] or 'MISSING'}")  # fmt: skip
    for tag, entry in report["embodiments"].items():
        if not entry["usable"]:
            print(f"embodiment {tag}: NOT USABLE: {entry['why']}")
            continue
        print(f"embodiment {tag}: {entry['horizon']} rows at {entry['control_rate_hz']:g} Hz, {entry['statistics']}")
        for kind in ("cameras", "state", "action"):
            print(f"  {kind:8}", ", ".join(f"{k} ({v})" for k, v in entry[kind].items()))
    for line in report["problems"][:MAX_PROBLEMS_SHOWN]:
        print(f"PROBLEM {line}")
    if len(report["problems"]) > MAX_PROBLEMS_SHOWN:
        print(f"... and {len(report['problems']) - MAX_PROBLEMS_SHOWN} more (--json lists all)")


def _yes(present: bool) -> str:
    return "found" if present else "MISSING"
