"""``wam bench tiers``: the same pictures through every variant, differences in the robot's units."""

from __future__ import annotations

import json

import numpy as np
import pytest

from test.engine.tiny_policy import make_policy
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.tools.bench_suite import tiers
from wam_policy_ros.tools.main import main


def test_every_variant_is_an_engine_configuration():
    counts = {name: EngineConfig(**options).evaluations_text for name, options in tiers.VARIANTS.items()}
    assert counts["upstream's mask of 5"] == "5 of 16" and len(set(counts.values())) >= 10
    assert tiers.tier(EngineConfig(evaluations=16)) == "reference"
    for options in list(tiers.VARIANTS.values())[1:]:
        assert tiers.tier(EngineConfig(**options)) == "behavioural"


def test_differences_are_the_largest_and_the_mean_in_the_units_of_the_robot():
    policy = make_policy()
    a = tiers.Outcome(np.zeros((2, 24, 8)), np.zeros((2, 24, 8)), 32.0, 16.0)
    moved, wide = np.zeros((2, 24, 8)), np.zeros((2, 24, 8))
    moved[1, 3, 2], moved[0, 0, 7], wide[1, 3, 2] = -0.5, 0.25, -2.0
    out = tiers.compare(policy, a, tiers.Outcome(moved, wide, 9.0, 8.0))
    assert out["joint_position [rad]"] == pytest.approx({"max": 0.5, "rms": 0.5 / np.sqrt(2 * 24 * 7)})
    assert out["gripper_position [of its range]"] == pytest.approx({"max": 0.25, "rms": 0.25 / np.sqrt(2 * 24)})
    assert out["normalised"] == pytest.approx({"max": 2.0, "rms": 2.0 / np.sqrt(2 * 24 * 8)})
    assert (out["branch_runs"], out["evaluations"]) == (9.0, 8.0)


def test_command(tmp_path, monkeypatch, capsys, smaller_network):
    chosen = ("16 of 16", "mask of 8, guidance at 0, reused", "mask of 8, no guidance")
    monkeypatch.setattr(tiers, "VARIANTS", {k: tiers.VARIANTS[k] for k in chosen})
    words = ["--device", "cpu", "--config", "plain,bf16", "--calls", "2", "--json", str(tmp_path / "t.json")]
    assert main(["bench", "tiers", *words]) == 0
    said = capsys.readouterr().out
    assert "nothing about how well a robot moves" in said and "behavioural" in said
    rows = {(r["configuration"], r["variant"]): r for r in json.loads((tmp_path / "t.json").read_text())["rows"]}
    assert list(rows) == [*(("plain", c) for c in chosen), ("bf16", "16 of 16")]
    same, part, off = (rows["plain", c] for c in chosen)
    assert same["normalised"] == {"max": 0.0, "rms": 0.0} and same["branch_runs"] == 32
    assert (part["branch_runs"], part["evaluations"]) == (9, 8) and off["branch_runs"] == 8
    assert part["normalised"]["rms"] > 0.001 and off["normalised"]["rms"] > 0.001
    assert 0 < rows["bf16", "16 of 16"]["normalised"]["max"] < 1e-3 and rows["bf16", "16 of 16"]["tier"] == "numeric"
