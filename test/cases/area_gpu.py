"""Area GPU: what the engine asks of a device before it serves. On a CPU the twins run; what needs a GPU is skipped."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from . import rows_gpu
from .case import Case, Outcome, Unavailable, contains

CPU_GFLOP = 4.0
"""A case that needs more in one convolution is for a GPU."""


def run(case: Case) -> Outcome:
    pytest.importorskip("torch", reason="needs torch (extra engine)")
    if case.kind == "json" and "row" in case.json():
        return rows_gpu.run(case, case.json())
    for key, part in {
        "cases": _convolutions_right,
        "shape": _convolutions_fast,
        "shapes_MKN": _products,
        "sequence": _captures,
    }.items():
        if case.kind in ("json", "scenario") and key in case.json():
            return part(case, case.json())
    if case.kind == "npz":
        return _resize(case)
    raise Unavailable(f"no part here runs {case.area} cases of kind {case.kind!r} like this one")


def _device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _need_gpu_for(gflop: float, what: str) -> None:
    if _device().type == "cpu" and gflop > CPU_GFLOP:
        raise Unavailable(f"{what}: {gflop:.0f} GFLOP in one call; run on a GPU")


def _gflop(inputs: int, outputs: int, size: tuple[int, ...], kernel: tuple[int, ...]) -> float:
    return 2e-9 * inputs * outputs * float(np.prod(size)) * float(np.prod(kernel))


def _convolutions_right(case: Case, data: dict[str, Any]) -> Outcome:
    """The convolutions of the case on this device, and what the engine's own check does when one is wrong."""
    import torch

    from wam_policy_ros.engine import conv_check
    from wam_policy_ros.engine.conv_plan import FORMS, CausalConv, ConvKey, ConvPlan

    device = _device()
    wrong, lines = [], []
    for c in data["cases"]:
        size, kernel = (c["d"], c["h"], c["w"]), tuple(c["k"])
        _need_gpu_for(_gflop(c["cin"], c["cout"], size, kernel), f"conv3d {c['cin']}->{c['cout']} of {size}")
        plain = conv_check.PlainConv(c["cin"], c["cout"], size, kernel)
        for last in (False, True):
            found = conv_check.check_conv3d(plain, device=device, dtype=torch.bfloat16, channels_last=last, repeats=1)
            lines.append(f"{found.key}, {found.form}: relative error {found.relative_error:.2g}")
            if not found.relative_error <= data["max_rel_err"]:
                wrong.append(found.form)

    def self_check(broken: tuple[str, ...]) -> str:
        class Wrong(CausalConv):
            def __call__(self, window: Any) -> Any:
                out = super().__call__(window)
                return out * 2 if self.form in broken else out

        plan, keys = ConvPlan(default=broken[0]), [ConvKey(16, 16, 1)]  # type: ignore[arg-type]
        with mock.patch.object(conv_check, "CausalConv", Wrong):
            try:
                checked, said = conv_check.checked_plan(
                    plan, keys, 16, 16, frames=2, device=device, dtype=torch.bfloat16
                )
            except conv_check.EngineError as error:
                lines.append(str(error))
                return "refused"
        lines.extend(said)
        return "switched" if not set(broken) & set(checked.forms.values()) and said else "served"

    reactions = [self_check((FORMS[0],)), self_check(FORMS[:2]), self_check(FORMS)]
    # What this device's own conv3d gets wrong is said; the engine asks its own check, of the shapes that will run.
    lines.append(f"wrong here: {wrong}")

    def check(expected: str, case: Case, outcome: Outcome) -> str | None:
        if expected != "refuse or switch the algorithm, never serve":
            return f"the runner does not know what {expected!r} asks for"
        return None if reactions == ["switched", "switched", "refused"] else f"a wrong result was {reactions}"

    return Outcome(frozenset({"accept"}), "\n".join(lines), checks={"wrong_result": check})


def _convolutions_fast(case: Case, data: dict[str, Any]) -> Outcome:
    import torch

    from wam_policy_ros.engine import conv_check

    s = data["shape"]
    size, kernel = (s["d"], s["h"], s["w"]), (s["k"],) * 3
    _need_gpu_for(_gflop(s["c"], s["c"], size, kernel), f"conv3d of {size}")
    plain = conv_check.PlainConv(s["c"], s["c"], size, kernel)
    kinds = {"bf16": torch.bfloat16, "fp32": torch.float32}
    found = {
        (dtype, layout): conv_check.check_conv3d(
            plain, device=_device(), dtype=kinds[dtype], channels_last=layout == "channels_last_3d"
        )
        for dtype in data["dtypes"]
        for layout in data["layouts"]
    }
    best = min((layout for layout in data["layouts"]), key=lambda x: found["bf16", x].convolution_ms)
    warnings = [
        line
        for layout in data["layouts"]
        for line in conv_check.compare_with_float32(found["bf16", layout], found["fp32", layout])
    ]
    # cuDNN or MIOpen, or that there is none.
    lines = [f"torch {torch.__version__}, {conv_check.backend_version()}, layout chosen: {best}", *warnings]
    return Outcome(frozenset({"accept"}), "\n".join(lines), checks={"reports": contains})


def _products(case: Case, data: dict[str, Any]) -> Outcome:
    """8-bit layers of the case's widths against bf16 ones; on a CPU at most 64 rows."""
    import torch

    from wam_policy_ros.engine.fp8 import fp8_for
    from wam_policy_ros.engine.kernels.ops import quantize_rows
    from wam_policy_ros.engine.quantize import Fp8Linear

    device, errors = _device(), {}
    fp8 = fp8_for(device)
    g = torch.Generator(device=device).manual_seed(0)
    for m, k, n in data["shapes_MKN"]:
        rows = m if device.type == "cuda" else min(m, 64)
        x = torch.randn(rows, k, generator=g, device=device, dtype=torch.bfloat16)
        weight = torch.randn(n, k, generator=g, device=device, dtype=torch.bfloat16)
        with torch.inference_mode():
            out = Fp8Linear.from_weight(weight, None, fp8)(quantize_rows(x, fp8)).raw.float()
            wanted = (x @ weight.T).float()
        assert out.shape == (rows, n)
        errors[f"{rows}x{k}x{n}"] = float((out - wanted).norm() / wanted.norm())
    worst = max(errors.values())
    facts = {"no_exception": True}  # one would have failed the case
    checks = {"max_rel_err": lambda e, c, o: None if 0 < worst <= e else f"relative errors {errors}, expected {e}"}
    return Outcome(frozenset({"accept"}), f"relative errors {errors}", facts, checks)


def _captures(case: Case, data: dict[str, Any]) -> Outcome:
    """The case's calls on a prepared policy: pieces of work that no graph was recorded of before."""

    from test.engine.tiny_policy import look, make_network, make_policy
    from wam_policy_ros.engine.config import EngineConfig

    device = _device()
    config = EngineConfig(evaluations=5, step="fused", graphs=device.type == "cuda")
    network = make_network().to(device)
    policy = make_policy(config, network=network)
    path, seen = policy.path, set()
    caches = {name: getattr(path, name) for name in ("graphs", "encoders", "first_frames")}
    for name, cache in caches.items():
        run = cache.run
        # Without a GPU nothing is recorded, but the same keys are asked for.
        cache.run = lambda key, function, name=name, run=run: (seen.add((name, key)), run(key, function))[1]
    path.prepare()
    prepared, compiled = set(seen), _compiled()
    session = policy.open()
    for i, word in enumerate(data["sequence"]):
        if "reset" in word:
            policy.reset(session)
        observation = look(policy.spec, i, frames=int(word.rpartition("=")[2]))
        policy.infer(session, replace(observation, want_video=i % 2 == 0))
    facts = {
        "recompiles_after_warmup": _compiled() - compiled,
        "graph_captures_after_warmup": len(seen - prepared),
    }
    return Outcome(frozenset({"accept"}), f"{len(prepared)} pieces of work prepared; {seen - prepared} later", facts)


def _compiled() -> int:
    """Graphs that torch.compile made, and kernels that Triton did, in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    graphs = 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])
    kernels = 0
    for name, module in sys.modules.items():
        if name.startswith("wam_policy_ros.engine.kernels."):
            for value in vars(module).values():
                for caches in getattr(value, "device_caches", {}).values():
                    kernels += len(caches[0])
    return graphs + kernels


def _resize(case: Case) -> Outcome:
    """The mosaic of the case's picture made on the device, watched for resizes of integers."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from wam_policy_ros.contract.embodiment import get_embodiment
    from wam_policy_ros.contract.interface import CameraSpec
    from wam_policy_ros.engine.device_resize import DeviceMosaic
    from wam_policy_ros.engine.preprocess import stitch_views

    picture = np.load(case.path(".npz"))["image"]
    height, width, _ = picture.shape
    cameras = [CameraSpec(f"c{i}", f"camera_{i}", height, width) for i in range(3)]
    robot, device = get_embodiment("oxe_droid"), _device()
    views = {c.name: picture[None] for c in cameras}
    integers: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = str(function)
            if any(w in name for w in ("upsample", "grid_sampler", "mul", "add")):
                integers.extend(
                    name for a in args if isinstance(a, torch.Tensor) and a.ndim and not a.is_floating_point()
                )
            return function(*args, **(kwargs or {}))

    mosaic = DeviceMosaic(robot, device, cameras=cameras)
    with Watch():
        made = mosaic(views)
    difference = int((made.cpu().int() - stitch_views(views, robot, cameras=cameras).int()).abs().max())
    message = f"largest difference to the host's resize: {difference} of 255"
    facts = {"float_first": not integers and difference <= 1}
    return Outcome(frozenset({"accept"}), message, facts)
