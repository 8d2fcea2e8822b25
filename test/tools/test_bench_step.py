"""``wam bench step`` on the tiny network: what it measures, writes and refuses."""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import pytest
import torch

from wam_policy_ros.contract.errors import ConfigError, EngineError
from wam_policy_ros.tools.bench_suite import cold, flops, network, step, trace, windows
from wam_policy_ros.tools.bench_suite.ceilings import best
from wam_policy_ros.tools.bench_suite.configurations import engine_config, parse_changes
from wam_policy_ros.tools.bench_suite.records import BENCH, append_history, load_anchors
from wam_policy_ros.tools.bench_suite.windows import summarise
from wam_policy_ros.tools.main import main


@pytest.fixture(scope="module")
def run(tmp_path_factory, smaller_network):
    """One run with everything; (report, folder)."""
    folder = tmp_path_factory.mktemp("bench")
    words = ["--windows", "1", "--evaluations", "5,4", "--device", "cpu", "--json", str(folder / "deep" / "b.json"),
             "--chart", str(folder / "b.png"), "--trace", str(folder / "trace.json.gz"), "--note", "half of it",
             "--history", str(folder / "history.jsonl")]  # fmt: skip
    assert main(["bench", "step", *words]) == 0
    return json.loads((folder / "deep" / "b.json").read_text()), folder


def test_rows_windows_and_stages(run):
    report, _ = run
    assert [(r["configuration"], r["evaluations"]) for r in report["rows"]] == [("plain", 5), ("plain", 4)]
    five, four = report["rows"]
    assert five["text"] == "5 of 16" and five["tier"] == "reference"
    assert "benchmark only" in four["text"] and four["tier"] == "behavioural"
    assert [c["position"] for c in five["calls"]] == [1, 2, 3, 4] * 2
    assert [c["cold"] for c in five["calls"]] == [True] * 4 + [False] * 4
    assert five["step_s"]["n"] == 4 and five["stages_s"]["first_frame"]["n"] == 1
    assert five["first_call_s"] == five["calls"][0]["wall_s"] > 0
    assert set(five["position_s"]) == {"1", "2", "3", "4"} and five["position_s"]["1"]["n"] == 1
    for call in five["calls"]:
        parts = sum(v for k, v in call.items() if k not in ("position", "cold", "wall_s", "total"))
        assert 0.5 * call["total"] < parts <= call["total"] * 1.01


def test_rates_are_work_over_time(run):
    entry = run[0]["rows"][0]["position_s"]["2"]
    assert set(entry["stage_TFLOP"]) == {"vae_encode", "prefill", "denoise"}
    for stage, work in entry["stage_TFLOP"].items():
        assert entry["stage_TFLOPs"][stage] * entry["stages_s"][stage] == pytest.approx(work)
    four = run[0]["rows"][1]["position_s"]["2"]
    assert four["stage_TFLOP"]["denoise"] == pytest.approx(entry["stage_TFLOP"]["denoise"] * 4 / 5)


def test_ceilings_and_provenance(run):
    ceilings = run[0]["ceilings"]
    assert ceilings["rows"] == 2 * (4 + 24 + 1)
    assert list(ceilings["attention_TFLOPs_by_keys"]) == ["31", "35", "39", "43"]
    assert best(ceilings["gemm_native_TFLOPs"]) > 0 and ceilings["copy_GBps"] > 0
    assert best(ceilings["gemm_fp8_rowwise_TFLOPs"]) is None and "GPU" in ceilings["gemm_fp8_rowwise_TFLOPs"]["qkv"]
    where = run[0]["provenance"]
    assert where["torch"] == torch.__version__ and where["date"] and where["cpu_threads"] >= 1
    assert "RANDOM WEIGHTS" in run[0]["spec"]["weights"] and run[0]["anchors"] == {}


def test_the_history_beside_the_code_is_one_of_predictions_and_results():
    """As ``append_history`` writes it; kernels have microseconds of their own, a note says what became of it."""
    lines = [json.loads(line) for line in (BENCH / "history.jsonl").read_text(encoding="utf-8").splitlines()]
    keys = {"prediction", "result_ms", "peak_GiB", "network", "date", "commit", "gpu", "torch"}
    for line in lines:
        assert keys <= line.keys() <= keys | {"result_us", "note", "file"}, line
        assert line["prediction"] or line["note"], line
        assert all(value > 0 for name in ("result_ms", "result_us") for value in line.get(name, {}).values()), line
        assert "file" not in line or (BENCH.parent / line["file"]).is_file(), line


def test_trace_chart_and_history(run):
    report, folder = run
    events = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
    assert any(e.get("name") == "aten::scaled_dot_product_attention" for e in events)
    assert report["trace"]["kernels"] == 0  # a CPU has none
    assert (folder / "b.png").read_bytes().startswith(b"\x89PNG")
    (line,) = (folder / "history.jsonl").read_text().splitlines()
    assert json.loads(line)["prediction"] == "half of it"
    result = json.loads(line)["result_ms"]
    assert result["plain 4"] == pytest.approx(report["rows"][1]["step_s"]["p50"] * 1e3, abs=0.06)
    append_history(report, "again", folder / "history.jsonl")
    assert len((folder / "history.jsonl").read_text().splitlines()) == 2


def test_percentiles_are_of_warm_calls_at_equal_position():
    calls = [{"position": p, "cold": w == 0, "wall_s": 100.0 if w == 0 else p + (0.5 if (w, p) == (3, 4) else 0.0),
              "denoise": float(p)} for w in range(4) for p in (1, 2, 3, 4)]  # fmt: skip
    out = summarise(calls)
    assert out["step_s"] == pytest.approx({"p50": 2.5, "p90": 4.0, "p99": 4.445, "min": 1.0, "max": 4.5, "n": 12})
    assert out["position_s"]["1"]["p99_over_p50"] == 1.0
    assert out["worst_p99_over_p50"] == pytest.approx((4 + 0.98 * 0.5) / 4)
    assert out["first_call_s"] == 100.0 and out["cold_window_s"] == [100.0] * 4
    assert out["position_s"]["3"]["stages_s"] == {"denoise": 3.0}


def test_gpu_time_of_overlapping_kernels_is_counted_once():
    def event(ts, dur, name="gemm", cat="kernel"):
        return {"ph": "X", "cat": cat, "ts": ts, "dur": dur, "name": name}

    events = [event(10, 10), event(15, 10), event(40, 5, "copy", "gpu_memcpy"), event(41, 1, "x"),
              event(0, 1000, "aten::mm", "cpu_op"), {"ph": "M", "name": "process_name"}]  # fmt: skip
    out = trace.summarise(events)
    assert out["gpu_busy_s"] == pytest.approx(20e-6) and out["gpu_span_s"] == pytest.approx(35e-6)
    assert out["kernels"] == 4 and out["top"][0][0] == "gemm" and out["top"][0][2] == 2


def test_a_row_that_fails_does_not_take_the_others_along(smaller_network, monkeypatch, tmp_path, capsys):
    def measure(policy, **options):
        if policy.config.evaluations == 6:
            raise RuntimeError("out of memory")
        return real(policy, **options)

    real = step.measure
    monkeypatch.setattr(step, "measure", measure)
    words = ["--windows", "1", "--evaluations", "6,5", "--device", "cpu", "--no-ceilings", "--json"]
    assert main(["bench", "step", *words, str(tmp_path / "b.json")]) == 1
    failed, good = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert "out of memory" in failed["error"] and good["step_s"]["n"] == 4
    said = capsys.readouterr().out
    assert "RuntimeError: out of memory" in said and "failed" in said


def test_rows_of_a_configuration_share_prepared_windows(smaller_network, monkeypatch, tmp_path):
    """One preparation for each fused configuration: the first with the policy, the others before their first row."""
    prepared, rows = [], []
    real = step.measure

    def prepare(policy, *words):
        prepared.append((policy.config.linears, len(rows)))

    def measure(policy, **options):
        rows.append((policy.config.linears, policy.path.pool))
        return real(policy, **options)

    monkeypatch.setattr(step.DreamZeroPolicy, "prepare", prepare)
    monkeypatch.setattr(step, "measure", measure)
    words = ["--windows", "1", "--evaluations", "5,4", "--config", "bf16,fp8", "--device", "cpu", "--no-ceilings"]
    assert main(["bench", "step", *words, "--no-reaction", "--json", str(tmp_path / "b.json")]) == 0
    assert prepared == [("native", 0), ("fp8", 2)] and [linears for linears, _ in rows] == ["native"] * 2 + ["fp8"] * 2
    assert rows[0][1] is rows[1][1] and rows[2][1] is rows[3][1] and rows[0][1] is not rows[2][1]
    report = json.loads((tmp_path / "b.json").read_text())
    assert [len(r["calls"]) for r in report["rows"]] == [8] * 4 and "reaction_s" not in report["rows"][0]


def test_a_long_cold_window_of_prepared_work_is_cut(smaller_network, monkeypatch):
    args = argparse.Namespace(embodiment="oxe_droid", checkpoint=None, network="tiny", tokenizer=None, device="cpu")
    policy = network.build(args, engine_config("bf16", 5, gpu=False))
    monkeypatch.setattr(windows, "LONG_CALL_S", 0.0)
    cut = windows.measure(policy, windows=1, prepared=True)
    assert [(c["position"], c["cold"]) for c in cut["calls"]] == [(p, n < 2) for n, p in enumerate((1, 2, 1, 2, 3, 4))]
    assert cut["step_s"]["n"] == 4 and policy.path.pool.idle == policy.path.pool.made
    monkeypatch.setattr(windows, "LONG_CALL_S", 60.0)
    whole = windows.measure(policy, windows=1, prepared=True)
    assert [c["position"] for c in whole["calls"]] == [1, 2, 3, 4] * 2 and sum(c["cold"] for c in whole["calls"]) == 4


# -- cold starts ------------------------------------------------------------------------------------------------


def test_age_of_this_process_grows_and_began_before_the_test():
    first = cold.process_age_s()
    assert 0.1 < first < cold.process_age_s() + 1e-3


def test_a_cold_start_has_a_process_of_its_own():
    words = ["--network", "tiny", "--device", "cpu", "--config", "fp8", "--evaluations", "5"]
    out = cold.run_cold(words, timeout_s=90)
    assert 0 < out["imported_s"] < out["policy_ready_s"] < out["process_start_to_first_chunk_s"] < out["second_chunk_s"]
    assert out["second_chunk_s"] < out["process_wall_s"] + 0.1
    names = [row["stage"] for row in out["stages"]]
    assert names[0] == "process and imports" and names[-2:] == ["first call", "second call"]
    assert any("random weights" in n for n in names) and "taking the weights over" in names
    assert sum(row["seconds"] for row in out["stages"]) == pytest.approx(out["second_chunk_s"], rel=0.1)
    # PyTorch's compiler takes seconds to import, and nothing here compiles with it.
    assert out["pytorch_compiler_imported"] is False


def test_a_cold_start_that_fails_says_why():
    with pytest.raises(EngineError, match="cuda:99"):
        cold.run_cold(["--network", "tiny", "--device", "cuda:99", "--config", "plain"], timeout_s=90)


def test_fused_rows_on_one_network_and_the_unguided_branch_of_the_last_evaluation(smaller_network, tmp_path):
    out = tmp_path / "b.json"
    words = ["--windows", "1", "--evaluations", "4", "--config", "fp8,plain,bf16", "--device", "cpu", "--no-ceilings"]
    assert main(["bench", "step", *words, "--no-video", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [r["configuration"] for r in report["rows"]] == ["plain", "bf16", "fp8"] and report["video"] is False
    work = flops.step_stages(smaller_network, 1, 4, 2, (0, 0), guided_evaluations=3, want_video=False)
    for row in report["rows"]:
        assert row["step_s"]["n"] == 4
        assert row["position_s"]["1"]["stage_TFLOP"]["denoise"] == pytest.approx(work["denoise"] / 1e12)


# -- options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--evaluations", "9"], "4, 5, 6, 7, 8, 16"),
        (["--evaluations", "eight"], "eight"),
        (["--config", "fastest"], "plain"),
        (["--device", "cuda:99"], "cuda:99"),
        (["--set", "colour=red"], "colour"),
        (["--set", "colour"], "OPTION=VALUE"),
        (["--anchors", "/nowhere.json"], "nowhere"),
    ],
)
def test_contradictions_are_refused(words, said, capsys):
    assert main(["bench", "step", "--windows", "1", "--no-ceilings", *words]) == 1
    assert said in capsys.readouterr().err


def test_configurations():
    assert engine_config("plain", 4, gpu=False).schedule == "dynamic_best"
    assert engine_config("plain", 16, gpu=True).evaluations == 16
    changes = parse_changes(["guidance_steps=[0, 6]", "guidance_between=off", "seed=7"])
    assert changes == {"guidance_steps": (0, 6), "guidance_between": "off", "seed": 7}
    assert engine_config("plain", 8, gpu=False, changes=changes).guidance_steps == (0, 6)
    with pytest.raises(ConfigError, match="bf17"):
        engine_config("bf17", 8, gpu=False)


def test_shipped_anchors():
    anchors = load_anchors()
    assert anchors["upstream_ms"] == {"16": 4908.95, "8": 2661.33, "4": 1562.7}
    for name in ("upstream", "upstream_two_gpus"):
        entry = anchors[name]
        assert entry["source"] and "H200" in entry["hardware"] and entry["date"] and entry["torch"]
        for numbers in entry["evaluations"].values():
            assert numbers["min"] <= numbers["median"] <= numbers["max"] and len(numbers["by_position"]) == 4
    assert anchors["targets_ms"]["fp8"]["4"] == 480
    assert Path(BENCH / "anchors.json").is_file()
