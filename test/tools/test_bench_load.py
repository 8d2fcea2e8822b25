"""``wam bench load``, and the table that the README shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from wam_policy_ros.model.config import DreamZeroConfig
from wam_policy_ros.tools.bench_suite import scaling
from wam_policy_ros.tools.bench_suite.from_files import config_json
from wam_policy_ros.tools.bench_suite.markdown import speed_table
from wam_policy_ros.tools.bench_suite.records import BENCH, load_anchors
from wam_policy_ros.tools.main import main

README = Path(__file__).resolve().parents[2] / "README.md"
REPORT = BENCH / "h200_step.json"


def test_load(tmp_path, capsys):
    out = tmp_path / "load.json"
    assert (
        main(["bench", "load", "--gib", "0.02", "--device", "cpu", "--folder", str(tmp_path), "--json", str(out)]) == 0
    )
    report = json.loads(out.read_text())
    assert report["bytes"] == pytest.approx(0.02 * 2**30, rel=0.01)
    assert len(report["rates_GBps"]) == 5 and all(v > 0 for v in report["rates_GBps"].values())
    assert "8 threads" in capsys.readouterr().out and [p.name for p in tmp_path.iterdir()] == ["load.json"]


def test_load_of_a_network(tmp_path, capsys):
    from test.tiny_checkpoint import write_checkpoint

    write_checkpoint(tmp_path / "c")
    assert main(["bench", "load", "--checkpoint", str(tmp_path / "c"), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "8-bit layers" in said and "native precision" in said


@pytest.mark.parametrize(("layers", "config"), [("fp8", ""), ("native", "bf16")])
def test_a_start_from_the_files_of_a_made_up_network(layers, config, tmp_path, capsys):
    out = tmp_path / "load.json"
    words = ["--network", "tiny", "--layers", layers, "--config", config, "--folder", str(tmp_path)]
    assert main(["bench", "load", *words, "--gib", "0.001", "--device", "cpu", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    names = [row["stage"] for row in report["stages"]]
    assert names[0] == "files written" and names[-2:] == ["first call", "second call"]
    assert {"loading weights", "taking the weights over"} < set(names)
    assert report["configuration"] == (config or "fp8") and report["files_to_ready_s"] > 0
    assert "a policy that is ready" in capsys.readouterr().out and [p.name for p in tmp_path.iterdir()] == [out.name]


@pytest.mark.parametrize("config", [DreamZeroConfig.tiny(), DreamZeroConfig.dreamzero_14b()], ids=["tiny", "14b"])
def test_the_made_up_config_means_the_network(config):
    assert DreamZeroConfig.from_config_json(config_json(config)) == config


def test_table():
    row = {"configuration": "fp8", "evaluations": 4, "step_s": {"p50": 0.4561, "n": 12}, "memory": {"peak_GiB": 38.7}}
    failed = {"configuration": "bf16", "evaluations": 16, "error": "out of memory"}
    lines = speed_table({"rows": [row, failed]}, load_anchors()).splitlines()
    assert lines[4] == "| 4 (dynamic rule, best case) | 1563 ms | not run | not run | 456 ms (n 12) |"
    assert lines[2] == "| 16 | 4909 ms | not run | not run | not run |"
    assert lines[5] == "| peak memory, one session | 66 GiB | not run | not run | 39 GiB |"


def test_the_readme_shows_what_was_measured():
    """`wam bench table bench/h200_step.json` writes the lines between the marks."""
    shown = re.search(r"<!-- speed -->\n(.*?)\n<!-- /speed -->", README.read_text(encoding="utf-8"), re.S)
    assert shown is not None
    report = json.loads(REPORT.read_text(encoding="utf-8")) if REPORT.is_file() else None
    assert shown.group(1) == speed_table(report, load_anchors())


def test_the_readme_shows_what_was_measured_on_two_gpus():
    """`wam bench table bench/h200_gpus.json` writes the lines between the marks."""
    shown = re.search(r"<!-- gpus -->\n(.*?)\n<!-- /gpus -->", README.read_text(encoding="utf-8"), re.S)
    report = json.loads((BENCH / "h200_gpus.json").read_text(encoding="utf-8"))
    assert shown is not None and shown.group(1) == scaling.markdown(report)
    one = json.loads(REPORT.read_text(encoding="utf-8"))["rows"]
    both = {(r["configuration"], r["evaluations"]): r["step_s"] for r in report["rows"] if r["gpus"] == 1}
    assert both == {(r["configuration"], r["evaluations"]): r["step_s"] for r in one if r["configuration"] != "plain"}


def test_table_command(tmp_path, capsys):
    (tmp_path / "r.json").write_text(json.dumps({"rows": []}))
    assert main(["bench", "table", str(tmp_path / "r.json")]) == 0
    assert "| 8 (upstream's default) | 2661 ms |" in capsys.readouterr().out
    assert main(["bench", "table", str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err
