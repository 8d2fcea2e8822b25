"""``wam inspect CHECKPOINT``: what a checkpoint folder holds and what is missing. Reads headers, never weights."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from wam_policy_ros.contract.errors import CheckpointError, WamError
from wam_policy_ros.engine.memory import Account, Capacity, plain_window_bytes, prompt_bytes, step_bytes
from wam_policy_ros.engine.survey import Robot, Survey, fault_lines, survey
from wam_policy_ros.engine.window_slots import SlotLayout
from wam_policy_ros.model.checkpoint import CheckpointFolder, read_folder
from wam_policy_ros.model.config import DreamZeroConfig
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.model.errors import CheckpointFileError
from wam_policy_ros.model.fp8_layout import is_fp8_weight
from wam_policy_ros.model.key_maps import COMPONENTS
from wam_policy_ros.model.tokenizer import UMT5Tokenizer

MAX_PROBLEMS_SHOWN = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="folder with config.json")
    parser.add_argument("--embodiment", help="the robot it must fit; default: any of the folder's")
    parser.add_argument("--tokenizer", help="tokenizer.json or its folder, if it is not in the checkpoint")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    try:
        folder = read_folder(args.checkpoint)
    except CheckpointFileError as error:
        raise CheckpointError(error.what, problems=error.problems, remedy=error.remedy) from error
    report = describe(survey(folder, embodiment=args.embodiment, tokenizer=args.tokenizer))
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        _print(report)
    complete = not report["problems"]
    verdict = "complete: it can be loaded" if complete else f"{len(report['problems'])} problem(s): it will be refused"
    print(verdict, file=sys.stderr if args.json else sys.stdout)
    return 0 if complete else 1


def describe(found: Survey) -> dict[str, Any]:
    """Everything ``wam inspect`` says, JSON-serialisable. ``problems`` is empty when the folder can be loaded."""
    report: dict[str, Any] = {"path": str(found.folder.path), "about": found.folder.about}
    if found.config is not None:
        report["network"] = network_report(found.config)
    report["files"] = _files(found.folder)
    report["embodiments"] = {tag: _robot(robot) for tag, robot in found.robots.items()}
    report["tokenizer"] = None
    if isinstance(found.tokenizer, UMT5Tokenizer):
        report["tokenizer"] = f"fits, {found.tokenizer.max_length} tokens"
    report["problems"] = [line for fault in found.faults() for line in fault_lines(fault)]
    return report


def network_report(config: DreamZeroConfig) -> dict[str, Any]:
    """Size and memory of a network, without making it."""
    network = DreamZero.on_meta(config)
    return _network(config, {n: tuple(p.shape) for n, p in network.state_dict().items()})


def _network(config: DreamZeroConfig, expected: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    counts: dict[str, list[int]] = {title: [0, 0] for title in COMPONENTS.values()}
    eight = 0
    for name, shape in expected.items():
        title = next(t for prefix, t in COMPONENTS.items() if name.startswith(prefix))
        size = 1
        for n in shape:
            size *= n
        counts[title][0] += 1
        counts[title][1] += size
        eight += size if is_fp8_weight(name) else 0
    dit = config.dit
    parameters = sum(p for _, p in counts.values())
    window = plain_window_bytes(config, branches=2, dtype=torch.bfloat16)
    return {
        "components": {t: {"tensors": n, "parameters": p} for t, (n, p) in counts.items()},
        "parameters": parameters,
        "dit": {"dim": dit.dim, "layers": dit.num_layers, "heads": dit.num_heads, "tokens_per_frame": dit.frame_seqlen},
        "action_horizon": config.action_horizon,
        "window_frames": dit.local_attn_size,
        "decoupled_noise": config.decouple_inference_noise,
        "bf16_weights_GiB": round(parameters * 2 / 2**30, 2),
        "bf16_session_GiB": round(window / 2**30, 2),
        "eight_bit_parameters": eight,  # of an FP8 checkpoint
        "fused_session_GiB": {name: round(_slot(config, t) / 2**30, 2) for name, t in _WINDOWS.items()},
        "prompt_GiB": round(prompt_bytes(dit, torch.bfloat16) / 2**30, 3),
        "sessions_by_card_GB": {
            "bf16": _by_card(config, parameters, 2 * parameters, _WINDOWS["native"]),
            # As the preset has it: large layers in 8 bits, the text encoder in host memory.
            "fp8": _by_card(
                config, parameters, 2 * (parameters - counts[COMPONENTS["text_encoder."]][1]) - eight, _WINDOWS["fp8"]
            ),
        },
        "ignored_config_keys": list(config.ignored),
    }


_WINDOWS = {"native": torch.bfloat16, "fp8": torch.float8_e4m3fn}


CARDS_GB = (24, 32, 48, 80, 141)
"""Nominal, of 10**9 bytes: drivers give a little more or, with error correction, just that."""


def _by_card(config: DreamZeroConfig, parameters: int, weights: int, kv_dtype: torch.dtype) -> dict[int, int]:
    """Sessions that cards hold with the fused step, by arithmetic: recordings and libraries, which only a GPU knows,
    took 1 GiB on an H200 and are part of what is left for a step."""

    def sessions(card: int) -> int:
        found = Capacity.of(
            Account(weights=weights),
            window_bytes=_slot(config, kv_dtype),
            prompt_bytes=prompt_bytes(config.dit, torch.bfloat16),
            reserve_bytes=step_bytes(parameters, "fused"),
            budget_bytes=None,
            free_bytes=card * 10**9 - weights,
        )
        return found.sessions or 0

    return {card: sessions(card) for card in CARDS_GB}


def _slot(config: DreamZeroConfig, kv_dtype: torch.dtype) -> int:
    """Bytes of a session's window in the fused step with guidance, in bf16."""
    dit = config.dit
    return SlotLayout.of(
        dit, branches=2, latent_frames=config.latent_frames, latent_hw=(4, dit.frame_seqlen),
        dtype=torch.bfloat16, kv_dtype=kv_dtype, device=torch.device("meta"),
        image_tokens=config.image.num_tokens,
    ).nbytes  # fmt: skip


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


def _robot(found: Robot | WamError) -> dict[str, Any]:
    if isinstance(found, WamError):
        return {"usable": False, "why": str(found)}
    robot, _ = found
    return {
        "usable": True,
        "cameras": {c.name: f"{c.width}x{c.height}" for c in robot.cameras},
        "view": f"{robot.view_width}x{robot.view_height}, crop {robot.crop_scale:g}",
        "state": {f.name: f"{f.dim} {_unit(f.unit)}" for f in robot.state},
        "action": {f.name: f"{f.dim} {_unit(f.unit)}{' relative' if f.relative else ''}" for f in robot.action},
        "control_rate_hz": robot.control_rate_hz,
        "horizon": robot.horizon,
        "statistics": "q01, q99 complete",
    }


def _print(report: dict[str, Any]) -> None:
    print(report["path"])
    if report["about"]:
        print(f"what it says of itself: {report['about']}")
    network = report.get("network")
    if network:
        print(f"network: {_count(network['parameters'])} parameters, {network['bf16_weights_GiB']} GiB in bf16, "
              f"{network['bf16_session_GiB']} GiB more per open session")  # fmt: skip
        sizes, cards = network["fused_session_GiB"], network["sessions_by_card_GB"]
        for name, size in (("bf16", sizes["native"]), ("fp8", sizes["fp8"])):
            held = ", ".join(f"{card} GB {count}" for card, count in cards[name].items())
            print(f"  fused step in {name}: a window takes {size} GiB; sessions that a card holds: {held}")
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


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:.2f} M"


def _unit(unit: str) -> str:
    """What has no unit is a gripper, counted from 0 to 1 of its range."""
    return "of its range" if unit == "1" else unit


def _yes(present: bool) -> str:
    return "found" if present else "MISSING"
