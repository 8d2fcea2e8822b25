"""The Triton forms around the VAE's convolutions against their twins, and compiled for the GPUs that are meant."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from wam_policy_ros.engine.kernels import conv3d_ops as ops

from .triton_runtime import DEVICE, sound_interpreter

fused = pytest.importorskip("wam_policy_ros.engine.kernels.conv3d_triton")
_ = sound_interpreter

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
    for asm in (build(fused.norm_silu_window_kernel, target, **size, **flags),
                build(fused.norm_silu_window_kernel, target, **size, **flags | {"STACKED": False}, count=1, x_frames=1),
                build(fused.padded_sum_kernel, target, **size)):
        assert ("cubin" if target.backend == "cuda" else "hsaco") in asm
    print("compiled for", target.arch)
"""


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def past(kind: str | None, channels: int, dtype: torch.dtype) -> Tensor | None:
    if kind == "window":
        return draw(1, 2, 3, 5, channels, dtype=dtype)
    if kind == "stacked":
        return ops.past_of(draw(1, 3, 3, 5, 3 * channels, dtype=dtype), stacked=True)
    return None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("stepwise", [False, True])
def test_norm_and_window_are_the_twins(dtype: torch.dtype, stacked: bool, stepwise: bool) -> None:
    torch.manual_seed(0)
    channels = 12
    for residual, kind in itertools.product((False, True), (None, "window", "stacked")):
        x, gamma = draw(1, 2, 3, 5, channels, dtype=dtype), draw(channels, dtype=dtype)
        x[0, 1, 2, 4] = 0  # the norm of zeros must not divide by zero
        added = draw(1, 3, 3, 5, channels, dtype=dtype) if residual else None
        options = {"frames": 5, "stacked": stacked, "stepwise": stepwise}
        before = past(kind, channels, dtype)
        total, window = ops.norm_silu_window(x, added, gamma, before, plain=True, **options)
        total_fused, window_fused = fused.norm_silu_window(x, added, gamma, before, **options)
        assert torch.equal(total, total_fused)
        assert window.shape == window_fused.shape and window.dtype == window_fused.dtype
        close = (window.float() - window_fused.float()).abs()
        step = 2.0 ** (-7 if dtype == torch.bfloat16 else -20)
        assert (close <= step * window.float().abs() + 1e-7).all()
        if dtype == torch.bfloat16:
            # The order of a sum decides a rounding here and there, no more.
            assert (close > 0).float().mean() < 0.02


def test_padded_sum_is_the_twins() -> None:
    torch.manual_seed(0)
    x, added = draw(1, 2, 3, 5, 12, dtype=torch.bfloat16), draw(1, 4, 3, 5, 12, dtype=torch.bfloat16)
    assert torch.equal(ops.padded_sum(x, added, plain=True), fused.padded_sum(x, added))


@pytest.mark.slow
def test_kernels_compile_for_nvidia_and_amd(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    environment.pop("TRITON_INTERPRET", None)  # it replaces the language that is to be compiled
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[:3] == [f"compiled for {arch}" for arch in (90, "gfx942", "gfx950")]
