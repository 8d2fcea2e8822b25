"""The Triton forms against their twins, in Triton's interpreter, and compiled for the GPUs that are meant."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")

TWINS = """
import itertools, json
import torch
from wam_policy_ros.engine.kernels import conv3d_ops as ops, conv3d_triton as fused

torch.manual_seed(0)
draw = lambda *shape: torch.randn(shape).to(dtype)
worst = {}
c = 12
for dtype, stacked, stepwise, residual, past in itertools.product(
    (torch.float32, torch.float16), (False, True), (False, True), (False, True), (None, "window", "stacked")
):
    if dtype == torch.float32 and (stepwise or past == "window"):
        continue
    x = draw(1, 2, 3, 5, c)
    h = draw(1, 3, 3, 5, c) if residual else None
    before = None
    if past == "window":
        before = draw(1, 2, 3, 5, c)
    if past == "stacked":
        before = ops.past_of(draw(1, 3, 3, 5, 3 * c), stacked=True)
    options = dict(frames=5, stacked=stacked, stepwise=stepwise)
    gamma = draw(c)
    total, window = ops.norm_silu_window(x, h, gamma, before, **options)
    total_fused, window_fused = fused.norm_silu_window(x, h, gamma, before, **options)
    assert torch.equal(total, total_fused) and window.shape == window_fused.shape
    error = (window.double() - window_fused.double()).abs().max() / window.double().std()
    worst[str(dtype)] = max(worst.get(str(dtype), 0.0), float(error))
    if h is not None:
        assert torch.equal(ops.padded_sum(x, h), fused.padded_sum(x, h))
print(json.dumps(worst))
"""

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from wam_policy_ros.engine.kernels import conv3d_triton as fused

def build(kernel, target, **constants):
    types = {"scale": "fp32"}
    types |= {n: "*bf16" for n in kernel.arg_names if n.endswith("_ptr")} | {n: "constexpr" for n in constants}
    signature = {n: types.get(n, "i32") for n in kernel.arg_names}
    return triton.compile(ASTSource(kernel, signature, constexprs=constants), target=target).asm

for target in (GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64), GPUTarget("hip", "gfx950", 64)):
    size = dict(C=96, BLOCK_C=128, ROWS=32)
    flags = dict(HAS_RESIDUAL=True, HAS_PAST=True, STACKED=True, STEPWISE=True)
    asm = dict(build(fused.norm_silu_window_kernel, target, **size, **flags))
    asm |= build(fused.padded_sum_kernel, target, **size)
    assert ("cubin" if target.backend == "cuda" else "hsaco") in asm
print("compiled")
"""


def run(program: str, **environment: str) -> str:
    """In a process of its own: the interpreter is chosen when a kernel is defined."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | environment, timeout=110
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_kernels_do_what_their_twins_do() -> None:
    worst = json.loads(run(TWINS, TRITON_INTERPRET="1"))
    assert worst["torch.float32"] < 1e-5
    # One step of float16 here and there, where the order of a sum decides a rounding.
    assert worst["torch.float16"] < 4e-3


def test_kernels_compile_for_nvidia_and_amd(tmp_path) -> None:
    assert "compiled" in run(COMPILE, TRITON_CACHE_DIR=str(tmp_path))
