"""``wam bench tiers``: how far the actions move when the network is evaluated less often, or with fewer bits.

The same observations go through a session of every variant; each chunk is compared with the chunk of 16 evaluations in
the first configuration. Observations do not depend on the actions, so nothing adds up from call to call but what the
network remembers. With random weights the numbers say how sensitive this network is, not how a robot moves: a
*behavioural* variant is judged by tasks done in a closed loop.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from wam_policy_ros.contract.errors import WamError
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.policy import DreamZeroPolicy
from wam_policy_ros.tools.provenance import provenance

from .configurations import CONFIGURATIONS, engine_config, parse_changes
from .network import add_network_arguments, build, configuration_names, free_memory, on_a_gpu, reconfigured
from .records import write_json
from .windows import observation_at

VARIANTS: dict[str, dict[str, Any]] = {
    "16 of 16": {"evaluations": 16},
    "upstream's mask of 8": {"evaluations": 8},
    "upstream's mask of 7": {"evaluations": 7},
    "upstream's mask of 6": {"evaluations": 6},
    "upstream's mask of 5": {"evaluations": 5},
    "upstream's dynamic rule": {"schedule": "dynamic"},
    "dynamic rule's best case": {"schedule": "dynamic_best"},
    "16, guidance every 2nd, reused": {"evaluations": 16, "guidance_steps": tuple(range(0, 16, 2))},
    "16, guidance every 4th, reused": {"evaluations": 16, "guidance_steps": (0, 4, 8, 12)},
    "16, guidance in the first 8": {"evaluations": 16, "guidance_steps": tuple(range(8)), "guidance_between": "off"},
    "mask of 8, guidance at 4, reused": {"evaluations": 8, "guidance_steps": (0, 2, 10, 14)},
    "mask of 8, guidance at 0, reused": {"evaluations": 8, "guidance_steps": (0,)},
    "mask of 8, no guidance": {"evaluations": 8, "guidance_scale": 1.0},
}


@dataclass(frozen=True)
class Outcome:
    """What one variant gave, call by call.

    Attributes:
        actions: ``[calls, rows, action_dim]`` in the units of the robot.
        normalised: the same before decoding.
        branch_runs: evaluations of a guidance branch per call; evaluations: of the network.
    """

    actions: npt.NDArray[np.float64]
    normalised: npt.NDArray[np.float64]
    branch_runs: float
    evaluations: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_network_arguments(parser)
    parser.add_argument("--config", default="plain", help="first: what everything is compared with and every variant "
                        f"runs in; the others at 16 evaluations only; some of {','.join(CONFIGURATIONS)}")  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="engine option on top")
    parser.add_argument("--calls", type=int, default=4, help="of one session, per variant")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")


def run(args: argparse.Namespace) -> int:
    names, changes = configuration_names(args.config), parse_changes(args.set)
    changes |= {} if args.dtype == "auto" else {"dtype": args.dtype}
    gpu = on_a_gpu(args.device)
    policy = build(args, engine_config(names[0], 16, gpu=gpu, changes=changes))
    policy = reconfigured(policy, engine_config(names[0], 16, gpu=gpu, changes=changes))
    report: dict[str, Any] = {
        "network": args.checkpoint or f"random {args.network}",
        "spec": dict(policy.spec.details) | {"weights": policy.spec.weights, "embodiment": policy.spec.embodiment},
        "calls": args.calls,
        "provenance": provenance(policy.network.device),
        "rows": (rows := []),
    }
    reference = _outcome(policy, args.calls)
    for name in names:
        for title, options in VARIANTS.items() if name == names[0] else [("16 of 16", VARIANTS["16 of 16"])]:
            row: dict[str, Any] = {"configuration": name, "variant": title}
            begin = time.perf_counter()
            try:
                policy = reconfigured(policy, engine_config(name, 16, gpu=gpu, changes=changes | options))
                free_memory(policy.network.device)  # the last variant's windows
                row |= {"tier": tier(policy.config)} | compare(policy, reference, _outcome(policy, args.calls))
            except (WamError, RuntimeError) as error:
                row["error"] = f"{type(error).__name__}: {error}"
            rows.append(row)
            print(f"  {name}: {title}: {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
            if args.json:
                write_json(report, args.json)  # the variants that follow cost minutes of a GPU: keep these
    print(table(report))
    if args.json:
        print(f"written: {args.json}")
    return 1 if any("error" in r for r in rows) else 0


def tier(config: EngineConfig) -> str:
    """Against 16 evaluations, every schedule that evaluates less is another algorithm."""
    less = config.schedule != "full" and (config.schedule != "static" or config.evaluations != 16)
    return "behavioural" if less or config.guidance_scale != 5.0 else config.tier


def _outcome(policy: DreamZeroPolicy, calls: int) -> Outcome:
    session = policy.open()
    actions, normalised, evaluations, branches = [], [], [], []
    for index in range(calls):
        seen: dict[str, torch.Tensor] = {}

        def probe(name: str, value: torch.Tensor, seen: dict[str, torch.Tensor] = seen) -> None:
            if name.startswith(("after_step15.action", "step")):
                seen[name] = value if name.endswith("action") else torch.empty(0)

        chunk = policy.infer(session, observation_at(policy, index), probe=probe)
        actions.append(chunk.actions)
        normalised.append(seen["after_step15.action"][0, :, : policy.spec.action_dim].double().cpu().numpy())
        evaluations.append(len(chunk.info["evaluated"]))
        branches.append(sum("video_flow_" in n for n in seen))
    policy.close(session)
    return Outcome(np.stack(actions), np.stack(normalised), float(np.mean(branches)), float(np.mean(evaluations)))


def compare(policy: DreamZeroPolicy, reference: Outcome, other: Outcome) -> dict[str, Any]:
    """Largest and root-mean-square difference, over all calls and rows."""
    out: dict[str, Any] = {"evaluations": other.evaluations, "branch_runs": other.branch_runs}
    out["normalised"] = _difference(reference.normalised, other.normalised)
    at = 0
    for f in policy.spec.action:
        columns = slice(at, at + f.dim)
        at += f.dim
        unit = f.unit if f.unit != "1" else "of its range"
        out[f"{f.name} [{unit}]"] = _difference(reference.actions[..., columns], other.actions[..., columns])
    return out


def _difference(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> dict[str, float]:
    return {"max": float(np.abs(a - b).max()), "rms": float(np.sqrt(np.mean((a - b) ** 2)))}


def table(report: dict[str, Any]) -> str:
    """For people."""
    fields = [k for k in next(r for r in report["rows"] if "error" not in r) if "[" in k]
    lines = [
        f"{report['network']}; {report['spec']['weights']}",
        f"difference of the actions from 16 evaluations in {report['rows'][0]['configuration']}: max, rms; "
        f"n {report['calls']} calls",
        "config".ljust(8) + "variant".ljust(36) + "tier".ljust(13) + "runs".rjust(6) + "normalised".rjust(20)
        + "".join(f.rjust(32) for f in fields),
    ]  # fmt: skip
    for r in report["rows"]:
        line = r["configuration"].ljust(8) + r["variant"].ljust(36)
        if "error" in r:
            lines.append(line + r["error"])
            continue
        pairs = [(r["normalised"], 20), *((r[f], 32) for f in fields)]
        lines.append(
            line + r["tier"].ljust(13) + f"{r['branch_runs']:6.1f}"
            + "".join(f"{d['max']:.4f} {d['rms']:.5f}".rjust(width) for d, width in pairs)
        )  # fmt: skip
    if "random" in report["network"]:
        lines.append("random weights: how sensitive this network is; nothing about how well a robot moves")
    return "\n".join(lines)
