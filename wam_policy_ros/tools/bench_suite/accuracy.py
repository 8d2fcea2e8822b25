"""``wam bench accuracy``: what rounding costs, against the plain step in float32 with the same weights.

The weights are drawn, or stored, in the network's dtype and widened for the reference as they are used, so that only
arithmetic differs. Calls of one session go through every configuration; noise, instruction and pictures are the same.
Reported are the input of every block and both flows of one evaluation at the same samples, and the actions of whole
calls. Everything is printed and written as soon as it is known. Exit status 1: a configuration is outside the bounds
that it declares (``EngineConfig.bounds``), or something is not finite.

The text encoder runs in the network's dtype for all of them, and resident: its result is an input here. Graphs are off:
a replay has the bits of the call it was recorded from.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wam_policy_ros.engine.config import Bounds, EngineConfig
from wam_policy_ros.engine.encode import PromptEncoder
from wam_policy_ros.engine.fused_path import FusedPath
from wam_policy_ros.engine.plain_path import PlainPath
from wam_policy_ros.engine.policy import DreamZeroPolicy
from wam_policy_ros.engine.sampler import conditioning_slice
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.tools.provenance import provenance

from .configurations import CONFIGURATIONS, engine_config, parse_changes
from .network import add_network_arguments, build, configuration_names, free_memory, on_a_gpu, reconfigured
from .records import write_json
from .stages import Stages
from .windows import observation_at

AT_STEP = 6  # an evaluated step of every static schedule but one, in the middle of the noise
_SAME_BITS = {"text": "resident", "graphs": False}


@dataclass
class Outcome:
    """What the reference gave.

    Attributes:
        blocks: input of every block of the conditional branch, float32 ``[tokens, D]`` on the host.
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
    parser.add_argument("--calls", type=int, default=2, help="of one session; the window grows with each, up to 4")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="engine option on top")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured, as soon as it is")


def run(args: argparse.Namespace) -> int:
    names, changes = configuration_names(args.config), parse_changes(args.set)
    changes |= {} if args.dtype == "auto" else {"dtype": args.dtype}
    gpu = on_a_gpu(args.device)
    stages = Stages()
    report: dict[str, Any] = {"network": args.checkpoint or f"random {args.network}", "evaluations": args.evaluations,
                              "calls": args.calls, "stages": stages.rows, "rows": []}  # fmt: skip

    def save() -> None:
        if args.json:
            write_json(report, args.json)

    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        first = engine_config("plain", args.evaluations, gpu=gpu, changes=changes)
        with stages.stage("network"):
            policy = build(args, first)
            stages.device = policy.network.device
        report |= {
            "spec": dict(policy.spec.details) | {"weights": policy.spec.weights, "embodiment": policy.spec.embodiment},
            "provenance": provenance(policy.network.device),
        }
        reference = _reference(policy, first, args.calls, stages)
        # In this order one network serves all: FP8 takes the weights over.
        for name in (n for n in CONFIGURATIONS if n in names):
            row: dict[str, Any] = {"configuration": name}
            report["rows"].append(row)
            options = changes if name == "plain" else _SAME_BITS | changes
            with stages.stage(f"{name}: weights"):
                policy = reconfigured(policy, engine_config(name, args.evaluations, gpu=gpu, changes=options))
                free_memory(policy.network.device)
            row["tier"] = policy.config.tier
            row["bounds"] = dataclasses.asdict(policy.config.bounds)
            with stages.stage(f"{name}: {args.calls} calls and an evaluation"):
                compare(policy, reference, row, save)
            row["outside"] = outside(row, policy.config.bounds)
            save()
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32
    print(table(report))
    if args.json:
        print(f"written: {args.json}")
    return 1 if any(row["outside"] for row in report["rows"]) else 0


class _Widened(nn.Linear):
    """A layer whose weights stay narrow in memory and are widened, exactly, when they are used."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.float(), None if self.bias is None else self.bias.float())


def widened(network: DreamZero) -> DreamZero:
    """A network that computes in float32 with the weights of ``network``, which stay where they are.

    The large layers share their memory, so that both need little more than one. The text encoder stays without weights.
    """
    wide = DreamZero.on_meta(network.config)
    shared = set()
    for name, layer in wide.model.blocks.named_modules(prefix="blocks"):
        if type(layer) is nn.Linear:
            layer.__class__ = _Widened
            shared |= {f"{name}.weight", f"{name}.bias"}
    for part in ("model", "image_encoder", "vae"):
        weights = {
            name: p if part == "model" and name in shared else p.float()
            for name, p in getattr(network, part).state_dict().items()
        }
        getattr(wide, part).load_state_dict(weights, assign=True)
    return wide.requires_grad_(False).eval()


def _reference(policy: DreamZeroPolicy, config: EngineConfig, calls: int, stages: Stages) -> Outcome:
    """The plain step in float32 with the policy's weights."""
    network, device = policy.network, policy.network.device
    with stages.stage("reference: weights"):
        wide = widened(network)
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
    rows, blocks = [], []

    def call(index: int, action: npt.NDArray[np.float64]) -> None:
        rows.append(action)
        print(f"\r  reference: call {index + 1} of {calls}", file=sys.stderr, flush=True)

    with stages.stage(f"reference: {calls} calls and an evaluation"):
        video, action = outcome(reference, calls, call, lambda i, x: blocks.append(x.float().cpu()))
    del reference, wide
    free_memory(policy.network.device)
    return Outcome(blocks, video, action, rows)


@torch.inference_mode()
def outcome(
    policy: DreamZeroPolicy,
    calls: int,
    on_call: Callable[[int, npt.NDArray[np.float64]], None],
    on_block: Callable[[int, Tensor], None],
) -> tuple[Tensor, Tensor]:
    """Run the calls, then one evaluation on the window they left.

    Args:
        on_call: told the number of a call and its normalised actions ``[N, action_dim]``.
        on_block: told the number of a block and its input ``[tokens, D]``, which is overwritten afterwards.

    Returns:
        Both flows of the evaluation, float32 on the host.
    """
    session = policy.open()
    chunk = None
    for index in range(calls):
        seen: dict[str, Tensor] = {}
        chunk = policy.infer(session, observation_at(policy, index), probe=seen.__setitem__)
        on_call(index, seen["after_step15.action"][0].double().cpu().numpy())
    assert chunk is not None and chunk.video is not None
    # bf16 noise, as published: the same numbers in every dtype.
    noise = policy.path.draw_noise(policy.config.seed, chunk.video.latents)
    flows = _evaluation(policy, session, noise, on_block)
    policy.close(session)
    return flows


def _evaluation(
    policy: DreamZeroPolicy, session: Any, noise: Any, on_block: Callable[[int, Tensor], None]
) -> tuple[Tensor, Tensor]:
    path, state = policy.path, session.window
    dit, dtype = policy.network.model, policy.network.dtype
    start = state.current_start_frame - policy.network.config.dit.num_frame_per_block
    proprio = torch.zeros(1, 1, dit.cfg.max_state_dim, dtype=dtype, device=policy.network.device)
    y = conditioning_slice(state.ys, start, noise.video.shape[2])
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
            watch=on_block,
        )
        assert flows is not None
        return flows.float().cpu(), action.float().cpu()
    assert isinstance(path, PlainPath)
    hooks = [
        block.register_forward_pre_hook(lambda m, a, i=i: on_block(i, a[0][0])) for i, block in enumerate(dit.blocks)
    ]
    try:
        out = path.evaluate_once(state, noise, proprio, y, start, AT_STEP)
    finally:
        for hook in hooks:
            hook.remove()
    assert out.action is not None
    return out.video.float().cpu(), out.action.float().cpu()


def compare(policy: DreamZeroPolicy, reference: Outcome, row: dict[str, Any], save: Callable[[], None]) -> None:
    """Fill ``row``: root mean square and largest error of each call's actions, and relative errors ``|a - b| / |b|`` of
    every block's input and of both flows. ``save`` is called after each call and each block."""
    layers: list[float] = []
    row |= {"actions": [], "block_input": layers}
    name = row["configuration"]

    def call(index: int, action: npt.NDArray[np.float64]) -> None:
        expected = reference.rows[index]
        error = action - expected
        found = {"rms": float(np.sqrt(np.mean(error**2))), "max": float(np.abs(error).max()),
                 "spread": float(expected.std())}  # fmt: skip
        row["actions"].append(found)
        print(f"{name}: call {index + 1}, actions rms {found['rms']:.5f} max {found['max']:.5f}, "
              f"spread {found['spread']:.4f}", flush=True)  # fmt: skip
        save()

    def block(i: int, x: Tensor) -> None:
        layers.append(_relative(x.float().cpu(), reference.blocks[i]))
        print(f"{name}: input of block {i}: {layers[-1]:.3e}", flush=True)
        save()

    video, action = outcome(policy, len(reference.rows), call, block)
    row |= {"video_flow": _relative(video, reference.video), "action_flow": _relative(action, reference.action)}


def outside(row: dict[str, Any], bounds: Bounds) -> list[str]:
    """What of a row is more than ``bounds`` allow, in words; what is not finite is."""
    found = {
        "block_input": max(row["block_input"], key=_or_infinite),
        "flow": max(row["video_flow"], row["action_flow"], key=_or_infinite),
        "actions": max((call["rms"] / call["spread"] for call in row["actions"]), key=_or_infinite),
    }
    limits = dataclasses.asdict(bounds)
    return [f"{name} {value:.4g}, allowed {limits[name]:g}" for name, value in found.items()
            if not value <= limits[name]]  # fmt: skip


def _or_infinite(value: float) -> float:
    """``max`` overlooks what is not a number."""
    return value if value == value else float("inf")


def _relative(a: Tensor, b: Tensor) -> float:
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b))


def table(report: dict[str, Any]) -> str:
    """For people."""
    lines = [
        f"{report['network']}; {report['spec']['weights']}",
        "relative error against float32 in one evaluation: inputs of blocks, both flows; then normalised actions of",
        f"{report['calls']} calls with {report['evaluations']} evaluations: rms and largest difference, spread of the "
        "reference",
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
    for row in report["rows"]:
        lines.append(f"{row['configuration']}: " + ("OUTSIDE its bounds: " + "; ".join(row["outside"]) if row["outside"]
                     else "within " + ", ".join(f"{k} {v:g}" for k, v in row["bounds"].items())))  # fmt: skip
    if "random" in report["network"]:
        lines.append("random weights amplify errors; a trained network's numbers will differ")
    return "\n".join(lines)
