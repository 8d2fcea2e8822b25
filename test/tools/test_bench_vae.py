"""``wam bench vae`` on the tiny network: every row is measured, and a wrong result is a failure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from wam_policy_ros.engine.conv_check import ConvReport
from wam_policy_ros.engine.conv_plan import ConvPlan
from wam_policy_ros.engine.fast_vae import FastVAE
from wam_policy_ros.tools.bench_suite.vae import Bench
from wam_policy_ros.tools.main import main

ARGUMENTS = ["bench", "vae", "--device", "cpu", "--dtype", "bfloat16", "--repeats", "1"]


def test_everything_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out" / "vae.json"
    assert main([*ARGUMENTS, "--json", str(file)]) == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["ok"] and report["size"] == [32, 48]
    assert [f["plan"] for f in report["fast"]] == ["measured", "measured, 8 frames", "channels_last", "stacked"]
    for part in ("clip", "conditioning"):
        plain = report["plain"][part]
        assert plain["ms"] > 0 and 1e-3 < plain["error"] < 2e-2
    for fast in report["fast"]:
        assert fast["pieces_equal_whole"]
        assert all(1e-3 < fast[f"clip, pieces of {n}"]["error"] < 2e-2 for n in (2, 4, 8))
        assert fast["last 2 of 9"]["ms"] > 0
    assert report["preprocess"]["equal"]
    text = capsys.readouterr().out
    assert "random tiny" in text and "last 2 of 9" in text and "ok" in text.splitlines()[-2]


def test_pieces_that_differ_from_the_whole_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("tiny", torch.device("cpu"), torch.bfloat16, 1)
    report = ConvReport(ConvPlan(), (), (), "", "", "cpu")
    references = bench._references()
    assert bench._fast("channels_last", report, references)["pieces_equal_whole"]
    original = FastVAE.encode
    monkeypatch.setattr(FastVAE, "encode", lambda *args, **kwargs: original(*args, **kwargs) * 1.01)
    assert not bench._fast("channels_last", report, references)["pieces_equal_whole"]
