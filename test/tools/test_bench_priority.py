"""``wam bench priority`` on the tiny network, and the figures of docs/sessions.md: they follow from bench/*.json."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from wam_policy_ros.contract.errors import Overloaded
from wam_policy_ros.engine.policy import DreamZeroPolicy
from wam_policy_ros.model.config import DreamZeroConfig
from wam_policy_ros.tools.bench_suite import flops, priority
from wam_policy_ros.tools.bench_suite.records import BENCH
from wam_policy_ros.tools.main import main

DOCS = Path(__file__).resolve().parents[2] / "docs" / "sessions.md"


def test_priority(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "priority.json"
    words = ["bench", "priority", "--network", "tiny", "--device", "cpu", "--evaluations", "4", "--clients", "1"]
    assert main([*words, "--seconds", "0.5", "--json", str(file)]) == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    runs = report["runs"]
    assert list(runs) == list(priority.RUNS) and report["evaluation_s"] > 0
    assert all(found["robot_s"]["n"] >= 1 for found in runs.values())
    assert runs["alone"]["client_steps_per_s"] == runs["alone"]["p99_above_alone_s"] == 0
    assert runs["priority"]["interleaved"] >= 1 and runs["priority"]["restarted"] == 0
    assert runs["restarts"]["interleaved"] == runs["no priority"]["interleaved"] == 0
    assert sum(runs["no priority"]["client_steps"]) >= 1
    first = report["first_calls"]
    assert len(first["robot_alone_s"]) == priority.CALLS + 1 and first["client_calls"][0] >= 1
    assert first["robot_beside_s"]["n"] >= 1 and len(first["client_open_s"]) == len(first["client_first_s"]) == 1
    assert first["robot_max_s"] == max(*first["robot_alone_s"], first["robot_beside_s"]["max"])
    largest = max(first["robot_max_s"], runs["alone"]["robot_s"]["max"], runs["priority"]["robot_s"]["max"])
    assert report["robot_max_s_first_calls_included"] == largest and report["complete"] and report["ready_s"] > 0
    assert [found["recordings"] for found in runs.values()] == [0, 0, 0, 0]  # a CPU has none
    said = capsys.readouterr().out
    assert all(kind in said for kind in priority.RUNS) and "1 busy clients" in said
    assert "first calls included" in said


def test_a_run_ends_though_the_robot_is_always_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within its time, and what was measured before is kept."""
    infer, calls = DreamZeroPolicy.infer, itertools.count()

    def refusing(self: DreamZeroPolicy, session: Any, *args: Any, **kwargs: Any) -> Any:
        if session.seed == 0 and next(calls) > priority.CALLS:  # the robot's, after its first window
            raise Overloaded("no memory")
        return infer(self, session, *args, **kwargs)

    monkeypatch.setattr(DreamZeroPolicy, "infer", refusing)
    file = tmp_path / "priority.json"
    words = ["bench", "priority", "--device", "cpu", "--evaluations", "4", "--clients", "1", "--runs", "priority"]
    assert main([*words, "--seconds", "0.5", "--steps", "2", "--json", str(file)]) == 1
    report = json.loads(file.read_text(encoding="utf-8"))
    assert list(report["runs"]) == ["alone", "priority"] and len(report["first_calls"]["robot_alone_s"]) == 5
    for found in report["runs"].values():
        assert found["robot_s"]["n"] == 0 and found["robot_refused"] >= priority.REFUSALS
        assert found["p99_above_alone_s"] is None
    assert report["robot_max_s_first_calls_included"] == report["first_calls"]["robot_max_s"]


def test_an_interrupted_run_leaves_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, handler = priority.Bench.measure, signal.getsignal(signal.SIGTERM)

    def interrupted(self: priority.Bench, kind: str, *args: Any) -> dict[str, Any]:
        if kind == "restarts":
            os.kill(os.getpid(), signal.SIGTERM)  # as ``timeout`` does
        return measure(self, kind, *args)

    monkeypatch.setattr(priority.Bench, "measure", interrupted)
    file = tmp_path / "priority.json"
    words = ["bench", "priority", "--device", "cpu", "--evaluations", "4", "--clients", "1", "--steps", "1"]
    assert main([*words, "--seconds", "0.5", "--json", str(file)]) == 1
    report = json.loads(file.read_text(encoding="utf-8"))
    assert not report["complete"] and list(report["runs"]) == ["alone", "priority"]
    assert report["runs"]["priority"]["p99_above_alone_s"] is not None
    assert signal.getsignal(signal.SIGTERM) is handler


def test_nothing_to_measure_is_said() -> None:
    assert main(["bench", "priority", "--clients", "0"]) != 0
    assert main(["bench", "priority", "--steps", "0"]) != 0
    assert main(["bench", "priority", "--runs", "alone,faster"]) != 0


def _step(name: str) -> dict[str, Any]:
    return next(
        row
        for row in json.loads((BENCH / "h200_step.json").read_text())["rows"]
        if (row["configuration"], row["evaluations"]) == (name, 16)
    )


def test_the_documented_share_of_the_ceilings() -> None:
    measured = json.loads((BENCH / "h200_step.json").read_text())["ceilings"]
    config = DreamZeroConfig.dreamzero_14b()
    dit = config.dit
    tokens = dit.num_frame_per_block * dit.frame_seqlen + dit.num_action_per_block + dit.num_state_per_block
    parts = {"qkv": 3 * dit.dim, "o": 3 * dit.dim, "ffn_up": dit.ffn_dim, "ffn_down": dit.ffn_dim}
    shares = []
    for position, found in _step("bf16")["position_s"].items():
        cached = (2 * int(position) - 1) * dit.frame_seqlen
        work, once = flops.evaluation(config, cached), flops.common(config, tokens, cached + tokens)
        linear, rest = 2 * work.linear - once.linear, 2 * (work.attention + work.cross) - once.attention
        least_s = rest / measured["attention_TFLOPs_by_keys"][str(cached + tokens)]["cudnn"] / 1e12
        for part, width in parts.items():
            least_s += linear * width / sum(parts.values()) / measured["gemm_native_TFLOPs"][part] / 1e12
        shares.append(16 * least_s / found["stages_s"]["denoise"])
    assert [round(100 * share) for share in shares] in ([91, 91, 91, 92], [91, 91, 91, 91])
    text = DOCS.read_text(encoding="utf-8")
    assert f"{measured['rows']} rows" in text and "at 91 % of the speed" in text
    assert round(100 / min(shares) - 100) == 10 and "would gain 10 %" in text


def test_the_documented_gain_of_more_rows() -> None:
    rows = json.loads((BENCH / "h200_gpus.json").read_text())["rows"]
    text = " ".join(DOCS.read_text(encoding="utf-8").split())
    for name, times, gain in (("bf16", "1.82", "10 %"), ("fp8", "1.79", "11 %")):
        one, two = (
            next(r for r in rows if (r["gpus"], r["configuration"], r["evaluations"]) == (gpus, name, 16))
            ["position_s"]["1"]["stages_s"]["denoise"]
            for gpus in (1, 2)
        )  # fmt: skip
        assert f"{one / two:.2f}" == times and f"{100 * (2 * two / one - 1):.0f} %" == gain
        assert f"{times} times ({name})" in text and gain in text
    evaluation_ms = [p["stages_s"]["denoise"] / 16 * 1e3 for p in _step("fp8")["position_s"].values()]
    assert f"{min(evaluation_ms):.0f} to 2 x {max(evaluation_ms):.0f} ms" in text


def test_judged_by_evaluations() -> None:
    spread = {"n": 3, "p50": 1.0, "p99": 1.0, "max": 1.0}
    runs: dict[str, Any] = {"alone": {"robot_s": spread}, "priority": {"robot_s": spread | {"p99": 1.05}}}
    for found in runs.values():
        found["evaluation_s"] = 0.1
    report: dict[str, Any] = {"runs": runs, "first_calls": {"robot_max_s": 1.3}}
    priority.judge(report)
    assert report["evaluation_s"] == 0.1 and report["robot_max_s_first_calls_included"] == 1.3
    assert runs["priority"]["p99_above_alone_evaluations"] == pytest.approx(0.5)
