"""``wam bench sessions`` on the tiny network: what it measures, writes and refuses."""

from __future__ import annotations

import json

import pytest

from wam_policy_ros.tools.main import main


@pytest.fixture(scope="module")
def run(tmp_path_factory, smaller_network):
    """(report, folder)"""
    folder = tmp_path_factory.mktemp("sessions")
    words = ["--device", "cpu", "--evaluations", "5", "--config", "bf16", "--sessions", "3,1", "--windows", "1"]
    out = ["--json", str(folder / "s.json"), "--chart", str(folder / "s.png")]
    assert main(["bench", "sessions", *words, *out]) == 0
    return json.loads((folder / "s.json").read_text()), folder


def test_rows(run):
    report, folder = run
    one, three = report["rows"]
    assert [(r["sessions"], r["steps"], len(r["session_p50_s"])) for r in (one, three)] == [(1, 4, 1), (3, 12, 3)]
    for row in (one, three):
        late = row["latency_s"]
        assert row["steps_per_s"] > 0 and 0 < late["p50"] <= late["p90"] <= late["p99"]
        first = row["first_window_s"]
        assert 0 < first["first_call_max"] <= first["max"] and row["max_s"] >= late["p99"]
        assert row["recordings"] == {"prepared": 0, "first_window": 0, "measured": 0}  # a CPU has none
    assert three["memory_bytes"]["windows"] == 3 * one["memory_bytes"]["windows"] > 0
    assert report["complete"] and report["ready_s"] > 0
    assert (folder / "s.png").stat().st_size > 10_000


def test_the_window_and_the_fork(run):
    report, _ = run
    assert report["rows"][0]["memory_bytes"]["windows"] == pytest.approx(report["window_bytes"], rel=0.05)
    fork = report["fork"]
    assert fork["n"] == 5 and fork["fork_s"] > 0 and fork["step_s"] > 0
    assert report["configuration"] == "bf16" and report["provenance"]["torch"]


def test_what_there_is_no_memory_for_is_told(smaller_network, tmp_path, capsys):
    """A budget for some sessions and not for all."""
    words = ["bench", "sessions", "--device", "cpu", "--evaluations", "5", "--windows", "1", "--config", "bf16"]
    limited = [*words, "--set", "memory_budget_gib=0.04", "--sessions", "1,8", "--json", str(tmp_path / "s.json")]
    assert main(limited) == 0
    first, last = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert "steps_per_s" in first and last["sessions"] == 8 and "memory for no other session" in last["refused"]
    assert "refused: " in capsys.readouterr().out
    assert main([*words, "--sessions", "1,none"]) == 1 and "numbers of sessions" in capsys.readouterr().err
