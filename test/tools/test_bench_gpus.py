"""``wam bench step --gpus 1,2``: parts in processes of their own, here played by a script, and what is made of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from wam_policy_ros.tools.bench_suite import exchange, gpus, scaling, trace
from wam_policy_ros.tools.main import main

PART = """
import json, os, subprocess, sys, time
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
count, names = int(words["--gpus"]), words["--config"].split(",")
report = {"video": False, "network": "random 14b", "load_s": 1.0, "load_peak_GiB": None, "rows": [],
          "anchors": {"8": 1}, "spec": {"weights": "RANDOM WEIGHTS", "dtype": "bfloat16", "guidance_scale": 5.0},
          "provenance": {"gpu": {"name": "NVIDIA H200"}, "torch": "2", "commit": "c", "date": "d"}}
print("loading 100%", file=sys.stderr)
for name in names:
    for evaluations in (8, 4):
        behaviour = os.environ.get(f"PLAY_{count}_{name}_{evaluations}", "")
        if behaviour == "die":
            print("NCCL error: unhandled", file=sys.stderr, flush=True)
            os._exit(3)
        if behaviour == "hang":
            child = subprocess.Popen(["sleep", "60"])
            open(os.environ["PLAY_PID"], "w").write(str(child.pid))
            time.sleep(60)
        s = evaluations * (0.2 if name == "bf16" else 0.1) / (1 if count == 1 else 1.6)
        row = {"configuration": name, "evaluations": evaluations, "text": f"{evaluations} of 16", "tier": "numeric",
               "step_s": {"p50": s, "p99": s, "min": s, "max": s, "n": 8}, "position_s": {}, "memory": {},
               "worst_p99_over_p50": 1.0, "first_call_s": s}
        if behaviour == "raise":
            row = {"configuration": name, "evaluations": evaluations, "error": "RuntimeError: out of memory"}
        report["rows"].append(row)
        with open(words["--json"] + "~", "w") as f:
            json.dump(report, f)
        os.replace(words["--json"] + "~", words["--json"])
        time.sleep(0.05)
"""
WORDS = ["bench", "step", "--network", "14b", "--config", "fp8,bf16", "--evaluations", "8,4", "--no-video"]


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Runs the command with parts that do as they are told; (exit status, report, seconds)."""
    script = tmp_path / "part.py"
    script.write_text(PART)
    real = gpus.subprocess.Popen

    def popen(command, **options):
        assert command[3:5] == ["bench", "step"]
        return real([sys.executable, str(script), *_pairs(command[5:])], **options)

    def run(*words, **behaviour):
        for name, value in behaviour.items():
            monkeypatch.setenv(f"PLAY_{name}", value)
        monkeypatch.setenv("PLAY_PID", str(tmp_path / "pid"))
        monkeypatch.setattr(gpus.subprocess, "Popen", popen)
        begin = time.monotonic()
        status = main([*WORDS, *words, "--json", str(tmp_path / "out.json")])
        return status, json.loads((tmp_path / "out.json").read_text()), time.monotonic() - begin

    return run


def _pairs(words):
    """Without the flags that stand alone."""
    return [w for w in words if not w.startswith("--no-")]


def outcome(report):
    return {(r["gpus"], r["configuration"], r["evaluations"]): r.get("error", "ok") for r in report["rows"]}


def test_every_row_of_every_number_of_gpus(play, capsys, tmp_path):
    status, report, _ = play("--gpus", "1,2")
    assert status == 0 and set(outcome(report).values()) == {"ok"} and len(report["rows"]) == 8
    # bf16 first: FP8 takes the weights over.
    assert [r["configuration"] for r in report["rows"][:4]] == ["bf16", "bf16", "fp8", "fp8"]
    assert [p["gpus"] for p in report["parts"]] == [1, 2]
    two = next(r for r in report["rows"] if (r["gpus"], r["configuration"], r["evaluations"]) == (2, "fp8", 8))
    assert two["scaling"]["speedup"] == pytest.approx(1.6) and two["scaling"]["efficiency"] == pytest.approx(0.8)
    assert two["scaling"]["predicted_ms"] == pytest.approx(500, abs=20)
    said = capsys.readouterr().out
    assert "fp8 x2" in said and "1.60" in said and "2 GPUs: network ready in 1.0 s" in said
    assert main(["bench", "table", str(tmp_path / "out.json")]) == 0
    line = "| 8 | fp8 | 800 ms (n 8) | 500 ms (n 8) | 1.60 | 0.80 | 501 ms | 1436 ms | - | - |"
    assert line in capsys.readouterr().out


def test_a_part_that_dies_takes_one_configuration_along(play):
    status, report, _ = play("--gpus", "2,1", **{"2_bf16_8": "die"})
    assert status == 1
    found = outcome(report)
    assert "NCCL error" in found.pop((2, "bf16", 8)) and "status 3" in report["rows"][0]["error"]
    assert "not run" in found.pop((2, "bf16", 4)) and set(found.values()) == {"ok"} and len(found) == 6


def test_a_part_that_hangs_is_ended_with_its_children(play, tmp_path):
    status, report, took = play("--gpus", "2,1", "--stall-s", "1.5", **{"2_bf16_4": "hang"})
    assert status == 1 and took < 30
    found = outcome(report)
    assert "no row came within" in found.pop((2, "bf16", 4)) and set(found.values()) == {"ok"} and len(found) == 7
    assert _ends(int((tmp_path / "pid").read_text()))


def test_a_row_that_fails_inside_a_part_is_told_and_the_rest_goes_on(play):
    status, report, _ = play("--gpus", "2,1", **{"2_fp8_8": "raise"})
    found = outcome(report)
    assert status == 1 and found.pop((2, "fp8", 8)) == "RuntimeError: out of memory" and set(found.values()) == {"ok"}
    assert len(report["parts"]) == 2  # nothing was started again


def test_what_does_not_fit_into_the_time_is_said(play):
    status, report, took = play("--gpus", "2,1", "--budget-s", "2", **{"2_bf16_4": "hang"})
    found = outcome(report)
    assert status == 1 and took < 30 and found[2, "bf16", 8] == "ok" and len(found) == 8
    assert "time for all of it" in found[2, "bf16", 4] and "time for all of it" in found[1, "fp8", 8]


def test_rows_are_written_as_they_come(play, tmp_path, monkeypatch):
    seen = []
    real = scaling.annotate
    monkeypatch.setattr(gpus, "POLL_S", 0.01)
    monkeypatch.setattr(gpus.scaling, "annotate", lambda report: (real(report), seen.append(len(report["rows"]))))
    play("--gpus", "1,2")
    assert len(set(seen)) >= 4 and seen[-1] == 8


def _ends(pid):
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("words", [["--gpus", "0"], ["--gpus", "two"], ["--gpus", "1,2", "--config", "plain"]])
def test_numbers_of_gpus_that_cannot_be_are_refused(words, capsys):
    assert main([*WORDS, *words]) == 1
    assert "gpus" in capsys.readouterr().err


def test_time_between_gpus():
    def event(ts, dur, name, cat="kernel"):
        return {"ph": "X", "cat": cat, "ts": ts, "dur": dur, "name": name}

    out = trace.summarise([event(0, 50, "gemm"), event(40, 20, "ncclDevKernel_Broadcast"), event(55, 15, "ncclDev"),
                           event(90, 10, "Memcpy PtoP (Device -> Device)", "gpu_memcpy")])  # fmt: skip
    assert out["exchange_s"] == pytest.approx(40e-6) and out["exchange_kernels"] == 3
    assert exchange.seconds_and_share(out, 400e-6)["share"] == pytest.approx(0.1)


def test_memory_is_asked_of_the_driver(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '%s\\n' 1024 3072\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert exchange.memory_in_use_GiB(2) == [1.0, 3.0]
    monkeypatch.setenv("PATH", "/nowhere")
    assert exchange.memory_in_use_GiB(2) == []


def test_rows_on_two_processes(tmp_path):
    """The real thing on a CPU: the ranks are processes beside the part's own."""
    pytest.importorskip("torch")
    words = ["bench", "step", "--network", "tiny", "--device", "cpu", "--config", "bf16,fp8", "--evaluations", "4"]
    words += ["--windows", "1", "--gpus", "2", "--no-ceilings", "--no-reaction", "--no-video"]
    done = subprocess.run(
        [sys.executable, "-m", "wam_policy_ros.tools.main", *words, "--json", str(tmp_path / "b.json")],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((tmp_path / "b.json").read_text())
    assert [(r["configuration"], r["step_s"]["n"]) for r in report["rows"]] == [("bf16", 4), ("fp8", 4)]
    assert all(len(r["gpu_peak_GiB"]) == 2 and r["exchange"]["MB"] > 0 for r in report["rows"])


def test_bytes_of_the_first_gpu():
    from wam_policy_ros.engine.config import EngineConfig
    from wam_policy_ros.model.config import DreamZeroConfig

    cfg, two = DreamZeroConfig.dreamzero_14b(), EngineConfig(gpus=2, step="fused")
    flow = 16 * 2 * 44 * 80  # numbers of a video sample, and of a flow
    samples = flow + 24 * 32 + 64
    # Seven samples out, seven flows back, the observed latents; the eighth evaluation is of one branch.
    assert exchange.leader_bytes(cfg, two, 4, 8, 7, itemsize=2) == 2 * (7 * (samples + flow) + flow)
    first = exchange.leader_bytes(cfg, two, 1, 8, 7, itemsize=2)
    assert first == 2 * (7 * (samples + flow) + flow // 2 + 257 * 1280 + 20 * 9 * 44 * 80)
    four = exchange.leader_bytes(cfg, replace(two, gpus=4), 4, 8, 7, itemsize=2)
    assert four > 1000 * exchange.leader_bytes(cfg, two, 4, 8, 7, itemsize=2)
    assert exchange.leader_bytes(cfg, replace(two, gpus=4, attention="fp8"), 4, 8, 7, itemsize=2) < 0.51 * four
