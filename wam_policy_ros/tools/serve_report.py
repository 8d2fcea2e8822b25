"""``wam serve --dry-run``: what would run where, how much memory it needs, what would not work. Reads no weights."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
from typing import Any

from wam_policy_ros.contract.embodiment import get_embodiment
from wam_policy_ros.contract.errors import CheckpointError, ConfigError, WamError
from wam_policy_ros.contract.fakes import spec_of
from wam_policy_ros.contract.interface import PolicySpec
from wam_policy_ros.serving.config import ServerConfig
from wam_policy_ros.serving.dialects import DIALECTS, check_fit, get_dialect

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def dry_run(args: argparse.Namespace, config: ServerConfig) -> int:
    """Print the report; 0 when the server would start and serve its configured dialects."""
    report: dict[str, Any] = {"problems": [], "warnings": []}
    spec = _policy(args, report)
    report["memory"] = None if args.fake else _memory(args, config, report)
    report["endpoint"] = _endpoint(config, report)
    if args.record is not None and importlib.util.find_spec("mcap") is None:
        report["problems"].append("mcap is not installed: pip install 'wam_policy_ros[record]'")
    report["dialects"] = _dialects(config, spec, report)
    for private in [name for name in report if name.startswith("_")]:
        del report[private]
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        _print(report)
    return 1 if report["problems"] else 0


def _policy(args: argparse.Namespace, report: dict[str, Any]) -> PolicySpec:
    """The spec the policy would have, as far as it can be known."""
    robot = get_embodiment(args.embodiment)
    if args.fake:
        report["policy"] = "hold: no network, every row repeats the state"
        return spec_of(robot, weights="hold")
    _engine_options(args, report)
    for package in ("torch", "safetensors", "tokenizers", "ftfy"):
        if importlib.util.find_spec(package) is None:
            report["problems"].append(f"{package} is not installed: pip install 'wam_policy_ros[engine]'")
    if importlib.util.find_spec("torch") is None:
        report["policy"] = str(args.checkpoint or args.random_weights)
        return spec_of(robot, weights="unknown")
    from wam_policy_ros.engine.survey import survey
    from wam_policy_ros.model.checkpoint import read_folder
    from wam_policy_ros.model.config import DreamZeroConfig
    from wam_policy_ros.model.errors import CheckpointFileError

    from .inspect import describe, network_report

    if args.random_weights:
        network = DreamZeroConfig.tiny() if args.random_weights == "tiny" else DreamZeroConfig.dreamzero_14b()
        report["policy"] = f"RANDOM WEIGHTS ({args.random_weights} network, never trained): not a policy"
        report["_network"] = network_report(network)
        _impossible(args, network, report)
        return spec_of(robot, weights=report["policy"], random_weights=True)
    report["policy"] = f"checkpoint {args.checkpoint}"
    try:
        folder = read_folder(args.checkpoint)
    except CheckpointFileError as error:
        fault = CheckpointError(error.what, problems=error.problems, remedy=error.remedy)
        report["problems"] += [str(fault)]
        return spec_of(robot, weights="unreadable")
    if folder.about:
        report["policy"] += f": {folder.about}"
    found = survey(folder, embodiment=args.embodiment, tokenizer=args.tokenizer)
    report["_network"] = describe(found).get("network")
    report["problems"] += [str(fault) for fault in found.faults(robot.tag)]
    if found.config is not None:
        _impossible(args, found.config, report)
    known = found.robots.get(robot.tag)
    return spec_of(known[0] if isinstance(known, tuple) else robot, weights=report["policy"])


def _engine_options(args: argparse.Namespace, report: dict[str, Any]) -> None:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    from wam_policy_ros.engine.config import EngineConfig
    from wam_policy_ros.engine.recommended import recommended

    from .serve import engine_options

    gpu = args.device.startswith("cuda") or (args.device == "auto" and torch.cuda.is_available())
    try:
        options = {**recommended(args.checkpoint, args.embodiment).options, **engine_options(args)}
        config = EngineConfig.preset(args.preset, torch.device("cuda" if gpu else "cpu"), **options)
        report["_engine"] = config
        more = ", deterministic" if config.deterministic else ""
        more += f", {config.gpus} GPUs" if config.gpus > 1 else ""
        report["engine"] = f"{config.evaluations_text} evaluations, tier {config.tier}{more}"
    except (WamError, TypeError) as error:
        report["problems"].append(f"engine options: {error}")


def _impossible(args: argparse.Namespace, network: Any, report: dict[str, Any]) -> None:
    """What this machine cannot carry out of the engine's options, where it has the device."""
    from wam_policy_ros.engine.build import resolve_device, resolve_dtype
    from wam_policy_ros.engine.parallel.ranks import devices_of
    from wam_policy_ros.engine.preflight import Platform, refuse_impossible

    if (engine := report.get("_engine")) is None:
        return
    try:
        device = resolve_device(args.device)
    except ConfigError:
        return  # a device that is not there is told with the memory
    try:
        refuse_impossible(engine, Platform.of(device), network.dit, resolve_dtype(engine.dtype, device))
        devices_of(engine.gpus, device)
    except ConfigError as error:
        report["problems"].append(str(error))


def _memory(args: argparse.Namespace, config: ServerConfig, report: dict[str, Any]) -> dict[str, Any] | None:
    network = report.get("_network")
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    from wam_policy_ros.engine.memory import Account, Capacity, shown, step_bytes

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    wants_gpu = args.device.startswith("cuda") or (args.device == "auto" and bool(gpus))
    if args.device.startswith("cuda") and not gpus:
        report["problems"].append(f"device {args.device}: PyTorch {torch.__version__} sees no GPU")
    each = getattr(report.get("_engine"), "gpus", 1)
    if wants_gpu and gpus and args.replicas * each > len(gpus) and "," not in args.device:
        report["problems"].append(f"{args.replicas} replicas need {args.replicas * each} GPUs, there are {len(gpus)}")
    total, device = None, args.device
    if not wants_gpu:
        total, device = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, "CPU"
    elif gpus:
        total, device = gpus[0].total_memory / 2**30, gpus[0].name
    out: dict[str, Any] = {
        "device": device if total is None else f"{device}, {total:.0f} GiB",
        "dtype": "bfloat16" if wants_gpu else "float32",
    }
    if network is None:
        return out
    weights, session = (round(n * (1 if wants_gpu else 2), 2) for n in _sizes(network, report.get("_engine")))
    engine = report.get("_engine")
    step = step_bytes(network["parameters"], "plain" if engine is None else engine.step) / 2**30
    out |= {"weights_GiB": weights, "per_session_GiB": session, "step_GiB": round(step, 1)}
    budget = engine.memory_budget_gib if engine is not None and engine.memory_budget_gib else None
    if session and (total is not None or budget is not None):
        # What recordings and libraries take is known when they are there.
        fit = Capacity.of(
            Account(weights=round(weights * 2**30)),
            window_bytes=round(session * 2**30),
            prompt_bytes=round(network["prompt_GiB"] * 2**30 * (1 if wants_gpu else 2)),
            reserve_bytes=round(step * 2**30),
            budget_bytes=None if budget is None else round(budget * 2**30),
            free_bytes=None if total is None else round((total - weights) * 2**30),
        )
        room = out["sessions_that_fit"] = fit.sessions or 0
        if room < 1:
            needed = fit.fixed_bytes + fit.reserve_bytes + fit.session_bytes
            has = f"{device} has {total:.0f} GiB" if fit.where == "this GPU" else f"the budget is {budget:g} GiB"
            report["problems"].append(f"{shown(needed)} are needed, {has}")
        elif args.replicas * room < config.max_sessions:
            each = f", {room} in each of {args.replicas} replicas" if args.replicas > 1 else ""
            report["warnings"].append(
                f"about {args.replicas * room} sessions fit{each}, --max-sessions is {config.max_sessions}"
            )
    if not wants_gpu and network["parameters"] > 1e9:
        report["warnings"].append(f"on a CPU a step of {network['parameters'] / 1e9:.0f} B parameters takes minutes")
    return out


def _sizes(network: dict[str, Any], engine: Any) -> tuple[float, float]:
    """GiB of the weights on the first device and of a session's window there, as this engine keeps them in bf16."""
    weights, session = network["bf16_weights_GiB"], network["bf16_session_GiB"]
    apart = 2 if engine is not None and engine.gpus > 1 and engine.guidance_scale != 1.0 else 1
    if engine is None or engine.step == "plain":
        return weights, session / apart
    if engine.linears == "fp8":
        weights -= network["eight_bit_parameters"] / 2**30
    if engine.text == "streamed":
        weights -= 2 * network["components"]["umT5 text encoder"]["parameters"] / 2**30
    session = network["fused_session_GiB"]["fp8" if engine.attention == "fp8" else "native"]
    return max(weights, 0.0), session / apart


def _endpoint(config: ServerConfig, report: dict[str, Any]) -> list[str]:
    lines = []
    for port, name in {config.port: config.dialect, **config.ports}.items():
        lines.append(f"ws://{config.host}:{port}/ {name}")
        if port:
            try:
                with socket.create_server((config.host, port)):
                    pass
            except OSError as error:
                report["problems"].append(f"cannot listen on {config.host}:{port}: {error.strerror or error}")
    lines += [f"ws://{config.host}:{config.port}{path} {name}" for path, name in config.paths.items()]
    if config.host not in LOOPBACK and not config.api_key:
        report["warnings"].append(f"{config.host} without --api-key-file: anybody who reaches the port may use it")
    if config.wire.resize != "refuse" and importlib.util.find_spec("PIL") is None:
        report["problems"].append("Pillow is not installed: pip install 'wam_policy_ros[serve]'")
    return lines


def _dialects(config: ServerConfig, spec: PolicySpec, report: dict[str, Any]) -> dict[str, str]:
    configured = {config.dialect, *config.ports.values()}
    out = {}
    for dialect in DIALECTS.values():
        try:
            check_fit(dialect, spec)
            out[dialect.name] = f"served: {dialect.clients}"
        except ConfigError as error:
            out[dialect.name] = f"not served: {error.what}, this policy gives {spec.action_space}"
    for name in configured:
        dialect = get_dialect(name)
        if not out[dialect.name].startswith("served"):
            report["problems"].append(f"dialect {dialect.name} {out[dialect.name]}")
        strict = config.wire.resize == "refuse" or config.wire.single_exterior == "refuse"
        if dialect.sends and strict:
            report["warnings"].append(f"clients of {dialect.name} send {dialect.sends}")
        if dialect.blind and config.blind_positions == "refuse" and spec.action_space == "joint_position":
            report["warnings"].append(
                f"clients of {dialect.name} with one exterior camera are refused without --blind-positions send: some "
                "execute what they get as velocities"
            )
    return out


def _print(report: dict[str, Any]) -> None:
    print(f"policy: {report['policy']}")
    if "engine" in report:
        print(f"engine: {report['engine']}")
    if report["memory"]:
        print("memory: " + ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in report["memory"].items()))
    for line in report["endpoint"]:
        print(f"listens: {line}")
    for name, text in report["dialects"].items():
        print(f"  {name:19} {text}")
    for line in report["warnings"]:
        print(f"WARNING {line}")
    for line in report["problems"]:
        print(f"PROBLEM {line}")
    print(f"{len(report['problems'])} problem(s): it would not work" if report["problems"] else "it would start")
