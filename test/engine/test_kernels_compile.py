"""Every Triton kernel compiles for the architectures the package names: no GPU needed, AMD's compiler is in Triton."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from wam_policy_ros.engine.kernels.launch import MACHINES, Machine, chunking

pytestmark = pytest.mark.slow
KERNELS = ("residual_norm", "norm only", "rms_rstd", "gelu", "quantize_rows", "qk_norm_rope_store", "cross_attention",
           "unpack_heads", "pack_tokens")  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What compile_kernels.py found, by machine."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: pip install 'wam_policy_ros[kernels]'")
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": str(root)}
    environment.pop("TRITON_INTERPRET", None)
    program = [sys.executable, str(Path(__file__).with_name("compile_kernels.py"))]
    done = subprocess.run(program, capture_output=True, text=True, env=environment, cwd=root, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: [line for line in lines if line["machine"] == name] for name in MACHINES}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", list(MACHINES))
def test_every_kernel_compiles_within_the_machines_limits(compiled, name):
    machine, lines = MACHINES[name], compiled[name]
    assert {k for k in KERNELS for line in lines if line["kernel"].startswith(k)} == set(KERNELS)
    assert {line["kernel"]: line["error"] for line in lines if "error" in line} == {}
    for line in lines:
        assert line["shared"] <= machine.shared_bytes, line
        assert line["threads"] <= 1024 and line["threads"] % machine.warp_size == 0, line
        # At full size nothing but single scales and a few vectors is read in small pieces.
        assert line["wide"] >= 0.9 * line["loads"] or line["kernel"].startswith("cross_attention"), line


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", list(MACHINES))
def test_what_no_instruction_saturates_is_clamped(compiled, name):
    """By fixed scales a value may be too large for 8 bits; a GPU that rounds it to NaN needs it clamped before."""
    fixed = ("qk_norm_rope_store fp8", "cross_attention fp8")
    lines = [line for line in compiled[name] if line["kernel"] in fixed]
    assert len(lines) == len(fixed)
    for line in lines:
        assert line["saturating"] if line["limit"] is None else line["limit"] in (240.0, 448.0), line
        assert (line["limit"] is None) is MACHINES[name].saturates, line


def test_threads_become_warps_of_the_machines_width():
    assert MACHINES["sm_90"].warps(256) == 8 and MACHINES["gfx942"].warps(256) == 4
    assert Machine("hip", "gfx942", 64, 65536).warps(32) == 1


@pytest.mark.parametrize("width", [7, 16, 64, 96, 512, 1100, 2560, 3072, 5120, 13824, 8960])
def test_chunks_cover_the_row_and_waste_little(width):
    chunk, count = chunking(width)
    assert chunk & (chunk - 1) == 0 and chunk * (count - 1) < width <= chunk * count
    assert width <= 1024 or chunk * count <= width * 17 // 16 + 512
