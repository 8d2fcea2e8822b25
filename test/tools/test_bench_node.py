"""``wam bench node``: its arithmetic, and a short run of the real thing."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.tools.bench_suite import node as bench_node
from wam_policy_ros.tools.main import main


def arguments(**changes: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_node.add_arguments(parser)
    args = parser.parse_args([])
    for name, value in changes.items():
        setattr(args, name, value)
    return args


def measured(slow_s: float = 0.004, received: int = 300) -> tuple[dict[str, Any], dict[str, Any]]:
    values = [0.002] * 95 + [slow_s] * 5
    node = {
        "durations_s": {"frame_to_step": values, "step_to_publish": [0.001] * 100, "frame_to_request": [0.0001] * 100},
        "received": {"a/image_raw": received, "joint_states": 1000},
        "cpu_cores": 0.3,
        "counters": {"chunks": 100},
        "control_rate_hz": {"nominal": 15.0, "achieved": 15.0, "longest_gap_s": 0.08},
    }
    return node, {"sent": {"a/image_raw": 300}, "cpu_cores": 0.1, "late_s": 0.001, "publish_burst_s": [0.001]}


def test_within_the_targets_is_ok_and_says_so() -> None:
    report = bench_node.summarise(*measured(), arguments())
    assert report["ok"] and report["paths_s"]["frame_to_step"]["p99"] == 0.004
    text = bench_node.text(report)
    assert "300 sent, 0 lost" in text and text.count("  ok") == 2 and "node 0.30 cores" in text


@pytest.mark.parametrize(("slow_s", "received", "says"), [(0.011, 300, "above 10"), (0.004, 299, "300 sent, 1 lost")])
def test_a_slow_tail_or_a_lost_frame_is_a_failure(slow_s: float, received: int, says: str) -> None:
    report = bench_node.summarise(*measured(slow_s, received), arguments())
    assert not report["ok"] and says in bench_node.text(report)


def test_a_size_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="640x480"):
        bench_node.measure(arguments(size="big"))


@pytest.mark.slow
@pytest.mark.flaky(reruns=1)
@pytest.mark.skipif(importlib.util.find_spec("rclpy") is None, reason="rclpy is not installed")
def test_a_short_run_measures_both_paths_and_loses_no_frame(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, png = tmp_path / "a" / "node.json", tmp_path / "node.png"
    status = main(["bench", "node", "--seconds", "3", "--step", "0.05", "--json", str(out), "--png", str(png)])
    report = json.loads(out.read_text())
    assert status == (0 if report["ok"] else 1)
    assert png.read_bytes()[:4] == b"\x89PNG" and "frame's arrival to start of the step" in capsys.readouterr().out
    assert report["paths_s"]["frame_to_step"]["n"] >= 3
    # A busy test machine is not what is judged here.
    assert 0 < report["paths_s"]["frame_to_step"]["p50"] < 0.5 and 0 < report["paths_s"]["step_to_publish"]["p50"] < 0.2
    assert len(report["frames"]) == 3 and all(f["sent"] >= 0.9 * 150 for f in report["frames"].values())
    assert all(f["lost"] <= 0.1 * f["sent"] for f in report["frames"].values()), report["frames"]
