from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test.serving.script_server import ScriptServer
from wam_policy_ros.serving.codec import pack, unpack
from wam_policy_ros.tools.bench_suite import openpi_servers
from wam_policy_ros.tools.bench_suite.openpi import bare_policy_s
from wam_policy_ros.tools.bench_suite.openpi_clients import Asker, run_load
from wam_policy_ros.tools.bench_suite.openpi_servers import answer
from wam_policy_ros.tools.main import main


def test_both_servers_answer_every_client_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--clients", "4", "--rate", "5", "--seconds", "0.6"]
    files = ["--json", str(tmp_path / "r.json"), "--chart", str(tmp_path / "r.png")]
    assert main(["bench", "openpi", *words, *files]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert 510_000 < report["request_bytes"] < 530_000 and report["bare_policy_ms"]["p50"] < 5
    for kind in ("ours", "plain"):
        server = report["servers"][kind]
        assert server["rss_mb"][0][1] > 10
        for name, load in server["loads"].items():
            assert load["mixed"] == 0 and load["errors"] == [] and load["latency_ms"]["n"] > 0, (kind, name)
        assert 4 <= server["loads"]["steady"]["latency_ms"]["n"] <= 16, "about three requests of each of four clients"
    assert (tmp_path / "r.png").stat().st_size > 10_000
    assert "overhead per request" in capsys.readouterr().out


def test_requests_say_whose_they_are() -> None:
    asker = Asker(7, "t")
    asker.asked = 3
    request: Any = unpack(asker.next_request())
    rows = answer(request["observation/joint_position"], 3).astype(np.float32)
    assert request["session_id"] == "t-7" and asker.is_mine(rows)
    for wrong in (answer(request["observation/joint_position"], 2), answer(np.zeros(7), 3)):
        assert not asker.is_mine(wrong.astype(np.float32))


def test_mixed_sessions_and_errors_are_found() -> None:
    lock, seen = threading.Lock(), []

    def mixing(request: dict[str, Any], number: int) -> Any:
        with lock:
            seen.append(request["observation/joint_position"])
        return pack(answer(seen[0], 0).astype(np.float32))

    with ScriptServer(mixing) as server:
        load = asyncio.run(run_load(server.uri, clients=2, seconds=0.2, rate_hz=10, tag="t"))
    assert load.mixed == len(load.latencies_s) - 1 > 0
    with ScriptServer(lambda *_: "no") as server:
        load = asyncio.run(run_load(server.uri, clients=2, seconds=0.1, rate_hz=None, tag="t"))
    assert load.errors == ["no", "no"] and not load.latencies_s


def test_the_bare_policy_takes_its_time() -> None:
    assert np.median(bare_policy_s(0.002, 10)) > 0.002
    assert openpi_servers.echo_policy(0.0).spec.weights.startswith("answers with its question")
