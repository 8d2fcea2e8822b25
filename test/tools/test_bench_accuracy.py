"""``wam bench accuracy`` on the tiny network."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from test.engine.tiny_policy import make_policy
from test.tiny_checkpoint import config_json
from wam_policy_ros.engine.config import Bounds, EngineConfig
from wam_policy_ros.model.config import DreamZeroConfig
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.tools.bench_suite import accuracy
from wam_policy_ros.tools.bench_suite.accuracy import Outcome, compare, outcome, outside, reconfigured, widened
from wam_policy_ros.tools.bench_suite.configurations import CONFIGURATIONS
from wam_policy_ros.tools.bench_suite.records import BENCH
from wam_policy_ros.tools.main import main

README = Path(__file__).resolve().parents[2] / "README.md"


def test_errors_against_float32(tmp_path, capsys):
    """On a CPU the native fused step computes in float32, so only FP8 rounds; errors are bounded, not zero."""
    file = tmp_path / "accuracy.json"
    words = ["--network", "tiny", "--device", "cpu", "--config", "plain,bf16,fp8", "--evaluations", "5"]
    assert main(["bench", "accuracy", *words, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    rows = {r["configuration"]: r for r in report["rows"]}
    assert len(report["stages"]) == 9 and all(s["seconds"] > 0 and s["host_peak_GiB"] > 0 for s in report["stages"])
    assert max(rows["plain"]["block_input"]) == rows["plain"]["video_flow"] == rows["plain"]["actions"][1]["max"] == 0
    said = capsys.readouterr().out
    for name, low, high in (("bf16", 0, 1e-5), ("fp8", 1e-3, 0.15)):
        row = rows[name]
        assert len(row["block_input"]) == 3 and low <= max(row["block_input"]) < high
        assert low < row["video_flow"] < high and low < row["action_flow"] < high
        assert row["outside"] == [] and f"{name}: within block_input" in said
        for call in row["actions"]:
            assert call["rms"] < high * call["spread"] and call["rms"] <= call["max"]
    assert "random weights" in said and "fp8: input of block 2" in said and "fp8: call 2" in said


def test_a_wrong_scale_is_outside_the_bounds(tmp_path, monkeypatch, capsys):
    """One layer's 8-bit weights, half as large again."""

    def wrong(policy, config):
        policy = reconfigured(policy, config)
        with torch.inference_mode():
            policy.path.dit.blocks[0].down.scale.mul_(1.5)
        return policy

    monkeypatch.setattr(accuracy, "reconfigured", wrong)
    words = ["--network", "tiny", "--device", "cpu", "--config", "fp8", "--evaluations", "5", "--calls", "1"]
    assert main(["bench", "accuracy", *words, "--json", str(tmp_path / "a.json")]) == 1
    assert "fp8: OUTSIDE its bounds" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert row["outside"]


@pytest.mark.parametrize("value", [0.031, float("nan"), float("inf")])
def test_each_bound_is_one(value):
    fine = {
        "block_input": [0.01, 0.01],
        "video_flow": 0.01,
        "action_flow": 0.01,
        "actions": [{"rms": 0.02, "spread": 2}] * 2,
    }
    bounds = Bounds(0.03, 0.03, 0.03)
    assert outside(fine, bounds) == []
    for worse, said in (({"block_input": [0.01, value]}, "block_input"), ({"video_flow": value}, "flow"),
                        ({"action_flow": value}, "flow"),
                        ({"actions": [{"rms": 2 * value, "spread": 2.0}, fine["actions"][0]]}, "actions")):  # fmt: skip
        (words,) = outside(fine | worse, bounds)
        assert words.startswith(f"{said} {value:.4g}, allowed 0.03")


def test_the_run_at_full_size_is_within_the_declared_bounds_and_the_readme_shows_it():
    """What the declared bounds rest on; of the margin at least a fifth of each bound is left."""
    report = json.loads((BENCH / "accuracy_h200.json").read_text(encoding="utf-8"))
    shown = README.read_text(encoding="utf-8")
    for row in report["rows"]:
        bounds = EngineConfig(**CONFIGURATIONS[row["configuration"]]).bounds
        assert outside(row, Bounds(*(0.8 * b for b in dataclasses.astuple(bounds)))) == []
        actions = max(c["rms"] / c["spread"] for c in row["actions"])
        found = (max(row["block_input"]), row["video_flow"], row["action_flow"], actions)
        allowed = (bounds.block_input, bounds.flow, bounds.actions)
        cells = " | ".join(f"{v:.4f}" for v in found)
        assert f"| {row['configuration']} | {cells} | {', '.join(f'{b:g}' for b in allowed)} |" in shown


def test_the_reference_shares_the_large_weights():
    """And computes what a network would whose weights are float32."""
    config = DreamZeroConfig.from_config_json(config_json(text_len=256))
    narrow = DreamZero.with_random_weights(config, dtype=torch.bfloat16)
    wide = widened(narrow)
    copy = DreamZero.on_meta(config)
    copy.load_state_dict({n: p.float() for n, p in narrow.state_dict().items()}, assign=True)
    wide.text_encoder = copy.text_encoder
    a, b = ([], []), ([], [])
    for (calls, blocks), network in ((a, wide), (b, copy)):
        flows = outcome(make_policy(network=network), 2, lambda i, x, c=calls: c.append(torch.from_numpy(x)),
                        lambda i, x, c=blocks: c.append(x.clone()))  # fmt: skip
        calls += flows
    assert wide.dtype == torch.float32 and len(a[1]) == 2
    assert all(torch.equal(x, y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True))
    shared = wide.model.blocks[0].ffn[0].weight
    assert shared.dtype == torch.bfloat16 and shared.data_ptr() == narrow.model.blocks[0].ffn[0].weight.data_ptr()


def test_what_is_known_is_written_at_once():
    policy = make_policy()
    rows, blocks, written = [], [], []
    flows = outcome(policy, 1, lambda i, x: rows.append(x + 1), lambda i, x: blocks.append(2 * x.clone()))
    row = {"configuration": "plain"}
    compare(policy, Outcome(blocks, *flows, rows), row, lambda: written.append(json.dumps(row)))
    assert [len(json.loads(w)["block_input"]) for w in written] == [0, 1, 2] and len(row["actions"]) == 1
    assert row["actions"][0]["rms"] == 1 and row["block_input"] == [0.5, 0.5] and row["video_flow"] == 0
