"""``wam serve`` as a process: dry run, smoke, serving, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.sync.client import connect

from test.tiny_checkpoint import write_checkpoint
from wam_policy_ros.model.fingerprint import fingerprint
from wam_policy_ros.serving.codec import pack, unpack
from wam_policy_ros.tools.main import main


def report(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["serve", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_dry_run_of_a_good_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path / "ckpt")
    code, said = report(capsys, str(folder), "--dry-run", "--port", "0", "--dialect", "roboarena")
    assert code == 0 and said["problems"] == [], said
    assert said["memory"]["weights_GiB"] >= 0 and said["engine"].startswith("8 of 16")
    assert said["dialects"]["roboarena"].startswith("served")
    assert said["dialects"]["openpi_droid"].startswith("not served")


@pytest.mark.parametrize(
    ("preset", "weights", "window"), [("reference", 42.7, 9.6), ("bf16", 42.7, 13.0), ("fp8", 17.0, 7.0)]
)
def test_dry_run_knows_how_much_memory_a_preset_takes(
    preset: str, weights: float, window: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the published sizes: 8-bit weights and windows take half, and the text encoder waits on the host."""
    words = ("--random-weights", "14b", "--device", "cuda", "--preset", preset, "--dry-run", "--port", "0")
    memory = report(capsys, *words)[1]["memory"]
    assert (memory["weights_GiB"], memory["per_session_GiB"]) == pytest.approx((weights, window), abs=0.1)
    assert memory["step_GiB"] == (8.0 if preset == "reference" else 4.0)


@pytest.mark.parametrize(("budget", "sessions"), [("60", 3), ("32", 1), ("20", 0)])
def test_dry_run_says_how_many_sessions_a_budget_holds(
    budget: str, sessions: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """8-bit windows of 7.4 GiB with their instructions, beside 17.1 GiB of weights, 4 for a step and 1.6 of texts."""
    words = ("--random-weights", "14b", "--device", "cuda", "--preset", "fp8", "--dry-run", "--port", "0")
    _, said = report(capsys, *words, "--engine", f"memory_budget_gib={budget}")
    assert said["memory"]["sessions_that_fit"] == sessions
    assert any("are needed, the budget is 20 GiB" in line for line in said["problems"]) == (budget == "20")


def test_an_option_that_is_given_twice_is_refused_unless_both_agree(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--random-weights", "tiny", "--dry-run", "--port", "0", "--gpus", "2")
    code, said = report(capsys, *words, "--engine", "gpus=4")
    assert code == 1 and "gpus is given twice" in "\n".join(said["problems"])
    assert "given twice" not in "\n".join(report(capsys, *words, "--engine", "gpus=2")[1]["problems"])


def test_dry_run_names_what_would_not_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path / "ckpt")
    (folder / "experiment_cfg" / "metadata.json").unlink()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, said = report(
            capsys, str(folder), "--dry-run", "--port", port, "--dialect", "openpi-droid", "--evaluations", "9"
        )
    text = "\n".join(said["problems"])
    assert code == 1
    for words in ("statistics", f"127.0.0.1:{port}", "joint_velocity", "evaluations"):
        assert words in text, words
    code, said = report(
        capsys, "--fake", "hold", "--dry-run", "--port", "0", "--host", "0.0.0.0", "--dialect", "polaris"
    )
    assert code == 0 and "anybody" in said["warnings"][0] + said["warnings"][1]
    assert any("224x224" in line for line in said["warnings"])


def test_dry_run_refuses_what_this_machine_cannot_carry_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path / "ckpt")
    for policy in (str(folder), "--random-weights=tiny"):
        code, said = report(capsys, policy, "--dry-run", "--port", "0", "--device", "cpu", "--preset", "bf16")
        assert code == 1 and ["graphs need a GPU" in problem for problem in said["problems"]] == [True], said


def test_contradictions_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        ([], "give a checkpoint"),
        (["a", "--fake", "hold"], "give a checkpoint"),
        (["--fake", "hold", "--set", "max_sesions=3"], "max_sesions"),
        (["--fake", "hold", "--also", "9000"], "PORT=DIALECT"),
        (["--fake", "hold", "--dialect", "pi"], "unknown OpenPI dialect"),
        (["--fake", "hold", "--smoke", "--record", "x"], "--smoke records nothing"),
        (["--fake", "hold", "--record", "x", "--record-mb", "nan"], "--record-mb must be a number"),
    ):
        assert main(["serve", *words]) == 1
        assert said in capsys.readouterr().err


def test_smoke_loads_and_makes_one_chunk(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = report(capsys, "--fake", "hold", "--smoke")
    assert code == 0 and said["rows"] == [24, 8] and said["finite"]
    assert main(["serve", "/nowhere", "--smoke"]) == 1
    assert "/nowhere" in capsys.readouterr().err


@contextmanager
def process(*words: str) -> Iterator[tuple[subprocess.Popen[str], int, list[str]]]:
    command = [sys.executable, "-m", "wam_policy_ros.tools.main", "serve", "--port", "0", *words]
    lines: list[str] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        stderr = running.stderr

        def collect() -> None:
            lines.extend(iter(stderr.readline, ""))

        reader = threading.Thread(target=collect, daemon=True)
        reader.start()
        try:
            end = time.monotonic() + 30
            while not (found := [x for x in lines if "server listening on" in x]):
                assert time.monotonic() < end and running.poll() is None, lines
                time.sleep(0.01)
            yield running, int(found[0].partition("127.0.0.1:")[2].partition(",")[0]), lines
        finally:
            running.kill()
            reader.join(5)


def hold_request() -> dict[str, Any]:
    picture = np.zeros((180, 320, 3), np.uint8)
    names = ("exterior_image_0_left", "exterior_image_1_left", "wrist_image_left")
    return {f"observation/{n}": picture for n in names} | {
        "observation/joint_position": np.arange(7.0),
        "observation/gripper_position": np.ones(1),
        "prompt": "hold",
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_within_two_seconds_with_a_step_in_flight(number: signal.Signals) -> None:
    with process("--fake", "hold", "--fake-latency-s", "30", "--no-warm-up") as (running, port, lines):
        with connect(f"ws://127.0.0.1:{port}", compression=None, proxy=None) as client:
            client.recv(timeout=5)
            client.send(pack(hold_request()))
            end = time.monotonic() + 5
            while "wam_openpi_waiting_jobs 0.0" not in (text := _metrics(port)) or "connections 1.0" not in text:
                assert time.monotonic() < end
            time.sleep(0.05)
            start = time.monotonic()
            running.send_signal(number)
            assert running.wait(5) == 0, lines
            assert time.monotonic() - start < 2
            with pytest.raises(Exception, match="1001"):
                client.recv(timeout=1)
        assert not any("Traceback" in line for line in lines)


def _metrics(port: int) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
        return str(reply.read().decode())


def test_it_serves() -> None:
    with process("--fake", "hold", "--dialect", "openpi") as (_, port, lines):
        with connect(f"ws://127.0.0.1:{port}", compression=None, proxy=None) as client:
            assert unpack(client.recv(timeout=5))["contract"]["weights"].startswith("hold")  # type: ignore[arg-type]
            client.send(pack(hold_request()))
            rows = unpack(client.recv(timeout=5))["actions"]  # type: ignore[arg-type]
        np.testing.assert_array_equal(rows, np.tile(np.r_[np.arange(7.0), 1.0], (24, 1)).astype(np.float32))
        assert any("Application startup complete" in line for line in lines)


@pytest.mark.parametrize("how", ["signal", "lost"])
def test_several_gpus_end_with_it_and_it_ends_with_them(how: str) -> None:
    """On a CPU a GPU is a process more."""
    with process("--random-weights", "tiny", "--gpus", "2", "--no-warm-up") as (running, port, lines):
        wait_for(lambda: _ready(port), 60)
        (other,) = _children(running.pid)
        if how == "signal":
            running.send_signal(signal.SIGTERM)
        else:
            os.kill(other, signal.SIGKILL)
            wait_for(lambda: not _ready(port), 5)
        assert running.wait(30) == (0 if how == "signal" else 1), lines
        wait_for(lambda: not Path(f"/proc/{other}").exists(), 5)
        wait_for(lambda: how == "signal" or any("SIGKILL" in line for line in lines), 5)


def _ready(port: int) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/readyz", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:  # 503 too
        return False


def _children(pid: int) -> list[int]:
    found = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(one) for some in found for one in some]


def wait_for(true: Callable[[], bool], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.02)


def test_a_checkpoint_that_cannot_be_loaded_ends_it() -> None:
    command = [sys.executable, "-m", "wam_policy_ros.tools.main", "serve", "/nowhere", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "/nowhere" in done.stderr and "Traceback" not in done.stderr


def test_weights_have_a_short_name(tmp_path: Path) -> None:
    shards = sorted(write_checkpoint(tmp_path / "a").glob("*.safetensors"))
    name = fingerprint(shards)
    assert name.startswith("sampled-sha256:") and fingerprint([*reversed(shards)]) == name
    raw = bytearray(shards[0].read_bytes())
    raw[-1] ^= 1
    shards[0].write_bytes(raw)
    assert fingerprint(shards) != name
