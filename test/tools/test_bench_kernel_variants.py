"""``wam bench kernels --tune``: variants of the kernels compute the same, and the report names the best."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from test.engine.triton_runtime import DEVICE, sound_interpreter
from wam_policy_ros.tools.bench_suite import kernel_variants
from wam_policy_ros.tools.bench_suite.kernel_cases import SIZES

_ = sound_interpreter
WHERE = torch.device(DEVICE)
SMALL = SIZES["tiny"]._replace(branches=1, tokens=3, video_tokens=2, heads=4, head_dim=128, ffn=2048, keys=(9, 12))


def few(only: str, count: int = 3) -> list[kernel_variants.Variant]:
    found = list(kernel_variants.variants(SMALL, WHERE, [only]))
    return found[:1] + found[1:][-count:]


@pytest.mark.parametrize(
    "name", ["residual_norm fp8", "gelu", "quantize_rows", "rms_rstd", "qk_norm", "cross_attention 120"]
)
def test_variants_compute_what_the_planned_kernel_does(name):
    torch.manual_seed(0)
    found = few(name)
    assert len(found) > 1 and all(v.name.startswith(name) for v in found)
    rows = kernel_variants.measure_variants(found, WHERE, lambda work: work(0) or 1e-6)
    assert [r["planned"] for r in rows] == [True] + [False] * (len(rows) - 1)
    assert all(r["us"] == 1.0 for r in rows), rows
    assert rows[0]["difference"] == 0


def test_a_variant_that_computes_something_else_has_no_time():
    planned, other = few("quantize_rows", 1)
    broken = [replace(x, arguments={**x.arguments, "limit": 100.0}) for x in other.launches]
    rows = kernel_variants.measure_variants([planned, other._replace(launches=broken)], WHERE, lambda work: 1e-6)
    assert rows[0]["us"] == 1.0 and rows[1]["us"].startswith("wrong")
    assert any(line.strip().startswith("CHUNK") and "wrong" in line for line in kernel_variants.lines(rows))


def test_the_report_names_the_best_and_what_it_would_gain():
    def row(name, variant, us, planned=False):
        return {"name": name, "variant": variant, "us": us, "planned": planned}

    rows = [
        row("a", "first", 50.0, True), row("a", "second", 40.0), row("a", "third", "not available: registers"),
        row("b", "first", 10.0, True), row("b", "second", 11.0),
        row("c", "first", "not available: nothing", True), row("c", "second", 3.0),
    ]  # fmt: skip
    text = list(kernel_variants.lines(rows))
    assert text[0] == "a: planned 50.0 us, +25.0% over 40.0 us (second)"
    assert "    1 of 3 not available" in text
    assert "b: planned 10.0 us (first) is the best of 2" in text
    assert "c: planned kernel not available: nothing" in text
