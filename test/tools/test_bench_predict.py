"""``wam bench predict``: the algebra at its limits, the shipped prediction, and what the README shows of it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.model.config import DreamZeroConfig
from wam_policy_ros.tools.bench_suite import prediction
from wam_policy_ros.tools.bench_suite.predict import predict, table
from wam_policy_ros.tools.bench_suite.prediction import LAYOUTS, Assumptions, Layout, Traffic
from wam_policy_ros.tools.bench_suite.records import BENCH
from wam_policy_ros.tools.main import main

README = Path(__file__).resolve().parents[2] / "README.md"
CFG = DreamZeroConfig.dreamzero_14b()
FREE = Assumptions(bandwidth_GBps=1e12, latency_us=0.0, sequence_efficiency=1.0, handover_ms=0.0, branch_efficiency=1.0)
STAGES = {"total": 0.9, "prefill": 0.1, "denoise": 0.8}


def step(layout, assumed=FREE, stages=STAGES, evaluations=8, guided=8, share=0.5):
    return prediction.predict_step(stages, evaluations=evaluations, guided=guided, frames=2, layout=layout, share=share,
                                   assumed=assumed, cfg=CFG)  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_free_exchange_and_full_use_divide_the_time(layout):
    assert step(layout).seconds == pytest.approx(STAGES["total"] / layout.gpus)
    rest = STAGES | {"total": 1.0}
    assert step(layout, stages=rest).seconds == pytest.approx(0.1 + 0.9 / layout.gpus)


def test_one_gpu_takes_what_it_took():
    assert step(Layout(1, 1), Assumptions(), guided=7, share=0.55).seconds == pytest.approx(STAGES["total"])


def test_an_evaluation_of_one_branch_gains_nothing_from_the_other_gpu():
    got = step(Layout(2, 1), guided=7, stages={"total": 0.75, "prefill": 0.0, "denoise": 0.75}).seconds
    assert got == pytest.approx(8 * 0.05)  # 7 of 0.1 and one of 0.05, on one GPU; all of 0.05 on two


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("name", "worse"),
    [("bandwidth_GBps", 100.0), ("latency_us", 90.0), ("sequence_efficiency", 0.6), ("handover_ms", 9.0)],
)
def test_worse_assumptions_never_make_a_step_faster(layout, name, worse):
    usual = Assumptions()
    slower = step(layout, dataclasses.replace(usual, **{name: worse})).seconds
    concerns_it = name != "sequence_efficiency" or layout.sequence > 1
    assert slower > step(layout, usual).seconds if concerns_it else slower == step(layout, usual).seconds
    assert step(layout, usual, share=0.6).seconds > step(layout, usual).seconds


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_never_below_what_exchange_alone_takes(layout):
    nothing = {"total": 0.0, "prefill": 0.0, "denoise": 0.0}
    found = step(layout, Assumptions(), stages=nothing)
    assert found.seconds == pytest.approx(found.exchange_s + 2e-3) and found.exchange_s > 0
    assert step(layout, Assumptions()).seconds > found.seconds
    assert found.exchange_s >= found.traffic.nbytes / 360e9 + found.traffic.collectives * 20e-6 - 1e-12


def test_bytes():
    flow = 2 * 16 * 2 * 44 * 80  # bf16 [1, 16, 2, 44, 80]
    assert prediction.guidance_traffic(CFG, Layout(2, 1)) == Traffic(1, flow)
    assert step(Layout(2, 1), guided=7).traffic == Traffic(7, 7 * flow)
    # Half of q, k, v and of the result of half of the tokens: 1785 x 5120 x 2 bytes, in 40 layers, twice each.
    assert prediction.sequence_traffic(CFG, Layout(2, 2), 1785) == Traffic(80, pytest.approx(40 * 1785 * 5120 * 2))
    assert prediction.sequence_traffic(CFG, Layout(2, 1), 1785) == Traffic()
    assert step(Layout(1, 2), guided=7).traffic.nbytes > step(Layout(2, 2), guided=7).traffic.nbytes


def test_the_use_of_one_branch_comes_from_the_prefills():
    def row(took):
        return {"position_s": {str(p): {"stages_s": {"prefill": s}} for p, s in took.items()}}

    perfect = {1: 10 + 1 * 0.5, 2: 20 + 6 * 0.5, 3: 20 + 10 * 0.5, 4: 20 + 14 * 0.5}
    assert prediction.branch_efficiency(row(perfect)) == pytest.approx(1.0)
    assert prediction.branch_efficiency(row(perfect | {1: 12.5 + 0.5})) == pytest.approx(0.8)
    assert prediction.branch_efficiency(row(perfect | {1: 9.0})) == 1.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--assume", "speed=3"], "bandwidth_GBps"),
        (["--assume", "sequence_efficiency=1.5"], "sequence_efficiency"),
        (["--assume", "bandwidth_GBps=0"], "bandwidth_GBps"),
        (["--assume", "latency_us=-1"], "latency_us"),
        (["--from", "/nowhere.json"], "nowhere"),
    ],
)
def test_what_is_no_assumption_is_refused(words, said, capsys):
    assert main(["bench", "predict", *words]) == 1
    assert said in capsys.readouterr().err


def test_a_row_without_positions_is_refused():
    row = {"configuration": "fp8", "evaluations": 8, "step_s": {"p50": 1.0}, "position_s": {"all": {}}}
    with pytest.raises(ConfigError, match="positions"):
        prediction.predict_row(row, LAYOUTS[0], FREE, CFG, video=False)


@pytest.mark.parametrize(("file", "mark"), [("prediction.json", "prediction"), ("prediction_refit.json", "refit")])
def test_the_shipped_prediction_is_what_its_inputs_give_and_the_readme_shows(file, mark):
    """``wam bench predict --json bench/prediction.json`` wrote it before the runs that it is about; it stays as it is,
    with what it was made from, when the report of one GPU is measured anew. The other one was fitted to two GPUs."""
    shipped = json.loads((BENCH / file).read_text(encoding="utf-8"))
    note = {"note": shipped["note"]} if "note" in shipped else {}
    about = shipped["from"]
    report = {"video": about["video"], "provenance": {name: about[name] for name in ("commit", "gpu", "date")}}
    made = predict(report, shipped["inputs"], Assumptions(**shipped["assumed"]), about["file"])
    assert json.loads(json.dumps(made | note)) == shipped
    shown = re.search(rf"<!-- {mark} -->\n(.*?)\n<!-- /{mark} -->", README.read_text(encoding="utf-8"), re.S)
    expected = table(shipped)
    if mark == "refit":
        assert "re-fitted" in shipped["note"]
        expected = expected.replace("2 GPUs (2x1), predicted", "2 GPUs (2x1), fitted")
    assert shown is not None and shown.group(1) == expected


def test_the_fit_is_as_close_as_the_readme_says():
    rows = json.loads((BENCH / "h200_gpus.json").read_text(encoding="utf-8"))["rows"]
    two = {(r["configuration"], r["evaluations"]): r["step_s"]["p50"] * 1e3 for r in rows if r["gpus"] == 2}
    fitted = json.loads((BENCH / "prediction_refit.json").read_text(encoding="utf-8"))["rows"]
    errors = [r["step_ms"] / two[r["configuration"], r["evaluations"]] - 1 for r in fitted if r["gpus"] == 2]
    assert len(errors) == 6 and max(map(abs, errors)) < 0.016
    assert "within 1.6 % of its six rows" in README.read_text(encoding="utf-8")


def test_only_rows_of_one_gpu_are_predicted_from(tmp_path, capsys):
    report = json.loads((BENCH / "h200_gpus.json").read_text(encoding="utf-8"))
    assert len(report["rows"]) == 12
    words = ["bench", "predict", "--from", str(BENCH / "h200_gpus.json"), "--note", "why"]
    assert main([*words, "--json", str(tmp_path / "p.json")]) == 0
    made = json.loads((tmp_path / "p.json").read_text())
    one = {r["evaluations"]: round(r["step_s"]["p50"] * 1e3, 1) for r in report["rows"]
           if (r["gpus"], r["configuration"]) == (1, "fp8")}  # fmt: skip
    assert made["note"] == "why" and len(made["inputs"]) == 6
    assert {r["evaluations"]: r["one_gpu_ms"] for r in made["rows"] if r["configuration"] == "fp8"} == one


def test_command(tmp_path, capsys):
    report = {"rows": json.loads((BENCH / "prediction.json").read_text(encoding="utf-8"))["inputs"], "video": False,
              "provenance": {"commit": "c", "gpu": {"name": "NVIDIA H200"}, "date": "d"}}  # fmt: skip
    (tmp_path / "r.json").write_text(json.dumps(report))
    words = ["bench", "predict", "--from", str(tmp_path / "r.json")]
    assert main([*words, "--json", str(tmp_path / "p.json")]) == 0
    said = capsys.readouterr().out
    assert "PREDICTION, no measurement" in said and "goal of FP8 on two GPUs at 8 evaluations: 450 ms" in said
    assert len(json.loads((tmp_path / "p.json").read_text())["rows"]) == 18
    assert main([*words, "--assume", "branch_efficiency=0.5", "--table"]) == 0
    assert "8 GPUs (2x4), predicted" in capsys.readouterr().out


def test_upstreams_pair_is_predicted_within_a_twentieth():
    check = json.loads((BENCH / "prediction.json").read_text(encoding="utf-8"))["check"]
    assert [c["evaluations"] for c in check] == [16, 8, 4]
    assert [c["measured_ms"] for c in check] == [2537.76, 1436.0, 843.15]
    assert all(0.95 <= c["predicted_over_measured"] <= 1.0 for c in check)
