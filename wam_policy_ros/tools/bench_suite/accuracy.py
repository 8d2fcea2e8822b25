"""``wam bench accuracy``: what rounding costs, against the plain step in float32 with the same weights.

The weights are drawn, or stored, in the network's dtype and widened for the reference, so that only arithmetic differs.
Two calls of one session go through every configuration; noise, instruction and pictures are the same. Reported are the
input of every block and both flows of one evaluation at the same samples, and the actions of whole calls.

The text encoder runs once, in the network's dtype, for all of them: its result is an input here.
"""

from __future__ import annotations

import argparse
import gc
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.encode import PromptEncoder
from wam_policy_ros.engine.fused_path import FusedPath
from wam_policy_ros.engine.plain_path import PlainPath
from wam_policy_ros.engine.policy import DreamZeroPolicy
from wam_policy_ros.engine.sampler import conditioning_slice
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.tools.provenance import provenance

from .configurations import CONFIGURATIONS, engine_config, parse_changes
from .network import add_network_arguments, build, configuration_names, on_a_gpu, reconfigured
from .records import write_json
from .windows import observation_at

CALLS = 2
AT_STEP = 6  # an evaluated step of every static schedule but one, in the middle of the noise


@dataclass
class Outcome:
    """What one configuration gave.

    Attributes:
        blocks: input of every block of the conditional branch, ``[tokens, D]`` on the host.
        video, action: flows of the same evaluation.
        rows: normalised actions per call ``[N, action_dim]``.
    """

    blocks: list[Tensor]
    video: Tensor
    action: Tensor
    rows: list[npt.NDArray[np.float64]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_network_arguments(parser)
    parser.add_argument("--config", default="plain,bf16,fp8", help=f"some of {','.join(CONFIGURATIONS)}")
    parser.add_argument("--evaluations", type=int, default=8)
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="engine option on top")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")


def run(args: argparse.Namespace) -> int:
    names, changes = configuration_names(args.config), parse_changes(args.set)
    changes |= {} if args.dtype == "auto" else {"dtype": args.dtype}
    gpu = on_a_gpu(args.device)
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        first = engine_config("plain", args.evaluations, gpu=gpu, changes=changes)
        policy = build(args, first)
        device = policy.network.device
        print("\r  reference in float32".ljust(60), file=sys.stderr)
        reference = _reference(policy, first)
        rows = []
        # In this order one network serves all: FP8 takes the weights over.
        for name in (n for n in CONFIGURATIONS if n in names):
            print(f"  {name}", file=sys.stderr)
            policy = reconfigured(policy, engine_config(name, args.evaluations, gpu=gpu, changes=changes))
            rows.append({"configuration": name, "tier": policy.config.tier} | compare(reference, outcome(policy)))
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32
    report = {
        "network": args.checkpoint or f"random {args.network}",
        "spec": dict(policy.spec.details) | {"weights": policy.spec.weights, "embodiment": policy.spec.embodiment},
        "evaluations": args.evaluations,
        "provenance": provenance(device),
        "rows": rows,
    }
    print(table(report))
    if args.json:
        write_json(report, args.json)
        print(f"written: {args.json}")
    return 0


def _reference(policy: DreamZeroPolicy, config: EngineConfig) -> Outcome:
    """The plain step in float32 with the policy's weights; its own copy is gone afterwards."""
    network = policy.network
    wide = DreamZero.on_meta(network.config)
    for part in ("model", "image_encoder", "vae"):
        weights = {name: p.float() for name, p in getattr(network, part).state_dict().items()}
        getattr(wide, part).load_state_dict(weights, assign=True)
    wide.requires_grad_(False).eval()
    # Both copies and the float32 windows are more than one GPU holds: the narrow one waits on the host.
    device = network.device
    network.model.to("cpu")
    reference = DreamZeroPolicy(
        wide,
        policy.embodiment,
        policy.statistics,
        policy.tokenizer,
        replace(config, dtype="float32"),
        weights="float32 copy",
    )
    assert isinstance(reference.path, PlainPath)
    reference.path.prompts = PromptEncoder(
        wide, encode=lambda ids, mask: network.text_encoder(ids.to(device), mask.to(device)).float()
    )
    found = outcome(reference)
    del reference, wide
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    network.model.to(device)
    return found


@torch.inference_mode()
def outcome(policy: DreamZeroPolicy) -> Outcome:
    """Run the calls and the evaluation of one configuration."""
    session = policy.open()
    rows = []
    noise = None
    for index in range(CALLS):
        seen: dict[str, Tensor] = {}
        chunk = policy.infer(session, observation_at(policy, index), noise=noise, probe=seen.__setitem__)
        assert chunk.video is not None
        rows.append(seen["after_step15.action"][0].double().cpu().numpy())
    # bf16 noise, as published: the same numbers in every dtype.
    noise = policy.path.draw_noise(policy.config.seed, chunk.video.latents)
    blocks, video, action = _evaluation(policy, session, noise)
    policy.close(session)
    return Outcome(blocks, video, action, rows)


def _evaluation(policy: DreamZeroPolicy, session: Any, noise: Any) -> tuple[list[Tensor], Tensor, Tensor]:
    path, state = policy.path, session.window
    dit, dtype = policy.network.model, policy.network.dtype
    start = state.current_start_frame - policy.network.config.dit.num_frame_per_block
    proprio = torch.zeros(1, 1, dit.cfg.max_state_dim, dtype=dtype, device=policy.network.device)
    y = conditioning_slice(state.ys, start, noise.video.shape[2])
    blocks: list[Tensor] = []
    if isinstance(path, FusedPath):
        times = path.dit.times
        flows, action = path.dit.evaluate(
            state.slot,
            noise.video,
            y,
            state.cached,
            start,
            1,
            e=times.e[AT_STEP],
            e6=times.e6[AT_STEP],
            action=noise.action,
            action_steps=times.action_steps[AT_STEP : AT_STEP + 1],
            state=proprio,
            watch=lambda i, x: blocks.append(x.float().cpu().clone()),  # updated in place
        )
        assert flows is not None
        return blocks, flows.float().cpu(), action.float().cpu()
    assert isinstance(path, PlainPath)
    hooks = [b.register_forward_pre_hook(lambda m, a: blocks.append(a[0][0].float().cpu())) for b in dit.blocks]
    try:
        out = path.evaluate_once(state, noise, proprio, y, start, AT_STEP)
    finally:
        for hook in hooks:
            hook.remove()
    assert out.action is not None
    return blocks, out.video.float().cpu(), out.action.float().cpu()


def compare(reference: Outcome, other: Outcome) -> dict[str, Any]:
    """Relative errors ``|a - b| / |b|`` per block and flow; root mean square and largest error of the actions."""
    layers = [_relative(a, b) for a, b in zip(other.blocks, reference.blocks, strict=True)]
    calls = []
    for a, b in zip(other.rows, reference.rows, strict=True):
        calls.append({"rms": float(np.sqrt(np.mean((a - b) ** 2))), "max": float(np.abs(a - b).max()),
                      "spread": float(b.std())})  # fmt: skip
    return {
        "block_input": layers,
        "video_flow": _relative(other.video, reference.video),
        "action_flow": _relative(other.action, reference.action),
        "actions": calls,
    }


def _relative(a: Tensor, b: Tensor) -> float:
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b))


def table(report: dict[str, Any]) -> str:
    """For people."""
    lines = [
        f"{report['network']}; {report['spec']['weights']}",
        "relative error against float32 in one evaluation: inputs of blocks, both flows; then normalised actions of",
        f"{CALLS} calls with {report['evaluations']} evaluations: rms and largest difference, spread of the reference",
        "config".ljust(10) + "".join(f"block {n}".rjust(11) for n in ("1/4", "1/2", "last"))
        + "video".rjust(10) + "action".rjust(10) + "   actions",
    ]  # fmt: skip
    for row in report["rows"]:
        layers = row["block_input"]
        picked = [layers[len(layers) // 4], layers[len(layers) // 2], layers[-1]]
        calls = "; ".join(f"{c['rms']:.4f} {c['max']:.4f} {c['spread']:.3f}" for c in row["actions"])
        lines.append(
            row["configuration"].ljust(10) + "".join(f"{v:11.2e}" for v in picked)
            + f"{row['video_flow']:10.2e}{row['action_flow']:10.2e}   {calls}"
        )  # fmt: skip
    if "random" in report["network"]:
        lines.append("random weights amplify errors; a trained network's numbers will differ")
    return "\n".join(lines)
