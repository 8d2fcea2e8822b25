"""``wam bench kernels`` on the tiny network's shapes, where the plain twins run."""

from __future__ import annotations

import json

import pytest
import torch

from wam_policy_ros.engine.kernels import ops
from wam_policy_ros.tools.bench_suite import kernels
from wam_policy_ros.tools.bench_suite.kernel_cases import SIZES, cases
from wam_policy_ros.tools.main import main

CPU = torch.device("cpu")


def test_every_operation_is_measured_and_the_table_shows_prediction_and_result(tmp_path, capsys):
    file = tmp_path / "kernels.json"
    assert main(["bench", "kernels", "--network", "tiny", "--device", "cpu", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    named = {row["name"].split()[0] for row in report["operations"]}
    assert named == set(ops.__all__) - {"Product", "Quantized"}
    for row in report["operations"]:
        assert row["ok"] and row["us"] > 0
        assert row["predicted_us"] == pytest.approx(max(row["bytes"] / 4e12, row["flop"] / 600e12) * 1e6)
    assert report["implementation"] == "plain twins"
    assert len(report["products_TFLOPs"]) == 12 and len(report["attention_TFLOPs"]) == 2
    printed = capsys.readouterr().out
    assert "predicted" in printed and "qk_norm_rope_store fp8" in printed


def test_a_wrong_kernel_is_named_and_fails_the_run(monkeypatch, capsys):
    right = ops.rms_rstd

    def wrong(q, eps, *, plain=False):
        return right(q, eps) * (1.0 if plain else 1.001)

    monkeypatch.setattr(ops, "rms_rstd", wrong)
    words = ["--network", "tiny", "--device", "cpu", "--no-libraries", "--only", "rms", "quantize"]
    assert main(["bench", "kernels", *words]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert [("WRONG" in line) for line in printed if line.startswith(("rms_rstd", "quantize"))] == [True, False]


def test_an_output_that_is_not_a_number_is_wrong(monkeypatch):
    right = ops.quantize_rows

    def broken(x, fp8, *, plain=False):
        q = right(x, fp8)
        return q if plain else q._replace(row_scale=q.row_scale * float("nan"))

    monkeypatch.setattr(ops, "quantize_rows", broken)
    case = next(c for c in cases(SIZES["tiny"], CPU) if c.name == "quantize_rows")
    assert case.error() == float("inf")


def test_bytes_of_the_large_network_are_those_of_its_tensors():
    rows, width = 3570, 5120
    expected = {
        "residual_norm gated fp8": 7 * rows * width,
        "qk_norm_rope_store bf16": 12 * rows * width,
        "gelu_quant fp8": 3 * rows * 13824,
    }
    sizes = SIZES["14b"]
    assert (sizes.rows, sizes.width) == (rows, width)
    small = {c.name: c.bytes for c in cases(SIZES["tiny"], CPU)}
    tiny = SIZES["tiny"]
    ratio = rows * width / (tiny.rows * tiny.width)
    for name, count in expected.items():
        scale = ratio if "gelu" not in name else rows * 13824 / (tiny.rows * tiny.ffn)
        assert small[name] * scale == pytest.approx(count)


def test_tuning_needs_a_gpu(capsys):
    assert main(["bench", "kernels", "--network", "tiny", "--device", "cpu", "--tune"]) == 1
    assert "GPU" in capsys.readouterr().err
    assert kernels.ASSUMED_BYTES_PER_S == 4e12
