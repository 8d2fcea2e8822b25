"""``wam bench accuracy`` on the tiny network."""

from __future__ import annotations

import json

from wam_policy_ros.tools.main import main


def test_errors_against_float32(tmp_path, capsys):
    """On a CPU the native fused step computes in float32, so only FP8 rounds; errors are bounded, not zero."""
    file = tmp_path / "accuracy.json"
    words = ["--network", "tiny", "--device", "cpu", "--config", "plain,bf16,fp8", "--evaluations", "5"]
    assert main(["bench", "accuracy", *words, "--json", str(file)]) == 0
    rows = {r["configuration"]: r for r in json.loads(file.read_text())["rows"]}
    assert max(rows["plain"]["block_input"]) == rows["plain"]["video_flow"] == rows["plain"]["actions"][1]["max"] == 0
    for name, low, high in (("bf16", 0, 1e-5), ("fp8", 1e-3, 0.15)):
        row = rows[name]
        assert len(row["block_input"]) == 3 and low <= max(row["block_input"]) < high
        assert low < row["video_flow"] < high and low < row["action_flow"] < high
        for call in row["actions"]:
            assert call["rms"] < high * call["spread"] and call["rms"] <= call["max"]
    assert "random weights" in capsys.readouterr().out
