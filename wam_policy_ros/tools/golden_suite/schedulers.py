"""The solver on recorded flows, and the training-side flow-matching tables."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from wam_policy_ros.engine.unipc import SIGMA_MAX, UniPC, decouple, flow_sigmas, timesteps_of
from wam_policy_ros.model import flow_matching as fm

from .folder import BF16_COMPONENT_LIMIT, COMPONENT_LIMIT, GoldenFolder, Group, Recording, Row

FILE = "schedulers.safetensors"


def check(folder: GoldenFolder) -> list[Row]:
    if not folder.has(FILE):
        return []
    data = folder.read(FILE)
    tables = Group(FILE, "sigmas and timesteps", COMPONENT_LIMIT)
    wide = Group(FILE, "UniPC trajectories", COMPONENT_LIMIT)
    narrow = Group(FILE, "UniPC trajectories in bf16", BF16_COMPONENT_LIMIT)
    for name in sorted({m[1] for k in data if (m := re.fullmatch(r"(unipc_\w+)\.sigmas", k))}):
        recorded = data[f"{name}.sigmas"]
        sigmas = _schedule_like(recorded)
        tables.compare(f"{name}.sigmas", sigmas, recorded)
        if f"{name}.timesteps" in data:
            tables.exact(f"{name}.timesteps", timesteps_of(sigmas).tolist(), data[f"{name}.timesteps"].tolist())
        if f"{name}.model_outputs" not in data or f"{name}.x_init" not in data:
            continue
        flows = data[f"{name}.model_outputs"]
        _trajectory(wide, f"{name}.x_after", data, sigmas, flows, data[f"{name}.x_init"])
        _trajectory(narrow, f"bf16.{name}.x_after", data, sigmas, flows.bfloat16(), data[f"{name}.x_init"].bfloat16())
    for name in sorted({m[1] for k in data if (m := re.fullmatch(r"(unipc_mask\w+)\.mask", k))}):
        if not {"unipc_a.model_outputs", "unipc_a.x_init", "unipc_a.sigmas"} <= set(data):
            continue
        mask = data[f"{name}.mask"].bool().tolist()
        flows = data["unipc_a.model_outputs"]
        last, reused = 0, []
        for i, run in enumerate(mask):
            last = i if run else last
            reused.append(flows[last])
        held, start = torch.stack(reused), data["unipc_a.x_init"]
        sigmas = _schedule_like(data["unipc_a.sigmas"])
        _trajectory(wide, f"{name}.x_after", data, sigmas, held, start)
        _trajectory(narrow, f"bf16.{name}.x_after", data, sigmas, held.bfloat16(), start.bfloat16())
    groups = (tables, wide, narrow, _flow_matching(folder.read(FILE, on_cpu=True)))
    return [g.row() for g in groups if g.count] or [tables.row()]


def _schedule_like(recorded: Tensor) -> Tensor:
    """The schedule with the length, shift and final noise of a recorded one. The file does not state its shift, so the
    shift is recovered from one value; the comparison then covers all of them."""
    steps = len(recorded) - 1
    final = float(recorded[-1])
    first = recorded[0].double()
    base = recorded.double() if final == 0 else (recorded.double() - final) * first / (first - final)
    # The first value is so close to one that float32 keeps few digits of the shift; later ones keep more.
    index, digits = (1, 3) if steps > 1 else (0, 2)
    linear = SIGMA_MAX * (1 - index / steps)
    shift = round(float(base[index] * (1 - linear) / (linear * (1 - base[index]))), digits)
    sigmas = flow_sigmas(steps, shift)
    return sigmas if final == 0 else decouple(sigmas, round(final, 6))


def _trajectory(group: Group, name: str, data: Recording, sigmas: Tensor, flows: Tensor, sample: Tensor) -> None:
    if name not in data:
        return
    solver, got = UniPC(sigmas), []
    for flow in flows:
        sample = solver.step(flow, sample)
        got.append(sample.float())
    group.compare(name, torch.stack(got), data[name])


def _flow_matching(data: Recording) -> Group:
    group = Group(FILE, "training-side tables", COMPONENT_LIMIT)
    for levels in sorted({int(m[1]) for k in data if (m := re.match(r"flowmatch(\d+)\.sigmas", k))}):
        key = f"flowmatch{levels}."
        sigmas, table = fm.sigmas(levels), fm.timesteps(levels)
        group.compare(key + "sigmas", sigmas, data[key + "sigmas"])
        group.check(table, data, key + "timesteps")
        group.check(fm.training_weights(table), data, key + "weights")
        if key + "euler_x_after" in data and {"unipc_a.x_init", "unipc_a.model_outputs"} <= set(data):
            x, after = data["unipc_a.x_init"], []
            for i, flow in enumerate(data["unipc_a.model_outputs"]):
                x = fm.euler_step(x, flow, sigmas[i], sigmas[i + 1] if i + 1 < levels else 0.0)
                after.append(x)
            group.compare(key + "euler_x_after", torch.stack(after), data[key + "euler_x_after"])
        if key + "add_noise.out" in data:
            clean, noise, t = (data[f"{key}add_noise.{n}"] for n in ("clean", "noise", "timestep"))
            group.compare(key + "add_noise", fm.add_noise(clean, noise, t), data[key + "add_noise.out"])
            group.check(fm.training_target(clean, noise), data, key + "training_target")
            group.check(fm.training_weight(t, table), data, key + "training_weight")
    return group
