"""Rows of area OPS that have no file of their own: a part for each, driven by what its case's JSON says."""

from __future__ import annotations

import ast
import importlib
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import wam_policy_ros

from .case import Case, Outcome

ACCEPTED = frozenset({"accept"})
ROOT = Path(wam_policy_ros.__file__).parent


def run(case: Case, data: dict[str, Any]) -> Outcome:
    return _PARTS[data["row"]](case, data)


def _bridge(case: Case, data: dict[str, Any]) -> Outcome:
    """Conversions where this package cannot be imported, and who imports it."""
    importers = []
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            importers += [str(path.relative_to(ROOT)) for n in names if n.split(".")[0] == data["absent"]]
    with mock.patch.dict(sys.modules, {data["absent"]: None}):
        messages = importlib.import_module("wam_policy_ros.ros.messages")
        picture = np.random.default_rng(0).integers(0, 256, (*data["picture_hw"], 3), dtype=np.uint8)
        back = messages.image_to_rgb(messages.rgb_to_image(picture, stamp_ns=1))
    facts = {"importers": len(importers), "picture_comes_back": np.array_equal(back, picture)}
    return Outcome(ACCEPTED, f"NumPy {np.__version__}; importers {importers}", facts)


def _silence(case: Case, data: dict[str, Any]) -> Outcome:
    """So many publishers are known, and nothing comes."""
    from wam_policy_ros.ros.silence import SILENT_S, Silence

    silence, said = Silence(data["look_s"]), ""
    for _ in range(int(data["seconds"] / data["look_s"])):
        said = silence.look(data["publishers"], 0)
    nobody = Silence(data["look_s"])
    quiet = all(not nobody.look(0, 0) for _ in range(100)) and not silence.look(data["publishers"], 1)
    return Outcome(ACCEPTED, said, {"within_s": SILENT_S, "nothing_said_without_reason": quiet})


def _waiting(case: Case, data: dict[str, Any]) -> Outcome:
    """While a job of the policy's thread waits, others submit; and the wait has an end of its own."""
    from wam_policy_ros.contract.fakes import HoldPolicy
    from wam_policy_ros.contract.policy_thread import Phase, PolicyThread

    owner = PolicyThread(lambda progress: HoldPolicy(), log=lambda level, line: None, warm_up=False)
    owner.start()
    try:
        end_s = time.monotonic() + 10
        while owner.status.phase is not Phase.READY:
            assert time.monotonic() < end_s
            time.sleep(0.002)
        began = threading.Event()

        def wait(policy: Any, cancelled: Any) -> bool:
            began.set()
            return owner.idle_for(data["wait_s"])

        waiting = owner.submit(wait, lane="waits")
        assert began.wait(10)
        begin_s = time.monotonic()
        other = owner.submit(lambda policy, cancelled: "done", lane="other")
        submitted_s = time.monotonic() - begin_s
        woken = not waiting.result(data["wait_s"] + 10)
        facts = {"others_get_in": submitted_s < data["wait_s"] / 2 and other.result(10) == "done", "woken": woken}
        facts["ends_by_itself"] = owner.submit(lambda policy, cancelled: owner.idle_for(0.05), lane="alone").result(10)
    finally:
        owner.stop(5)
    return Outcome(ACCEPTED, "", facts)


def _readiness(case: Case, data: dict[str, Any]) -> Outcome:
    """An engine that raises on every request."""
    from test.serving.harness import Client, request, served

    with served(errors="keep_open") as one, Client(one) as client:
        before = one.http("/readyz")[0]
        one.policy.error = RuntimeError(data["raises"])
        answers = [client.ask(request(i, f"s{i}")) for i in range(data["requests"])]
        code, text, _ = one.http("/readyz")
        facts = {"ready_before": before, "ready": code, "health": one.http("/healthz")[0]}
        facts |= {
            "answers_are_errors": all(isinstance(a, str) for a in answers),
            "sessions_left": len(one.policy.sessions),
        }
        one.policy.error = None
        assert not isinstance(client.ask(request(0, "s")), str)
        facts["ready_after"] = one.http("/readyz")[0]
    return Outcome(ACCEPTED, text, facts)


def _status(case: Case, data: dict[str, Any]) -> Outcome:
    """One stream of four whose messages are cut off; the others are sound."""
    from wam_policy_ros.ros.messages import ns_to_stamp, rgb_to_image

    from . import robot
    from .stage import FRAME, Stage

    stage = Stage(case)
    stage.play(1.0)
    bad = robot.topic(case.config, data["bad_camera"])
    for k in range(16, 16 + data["frames"]):
        stage.run.advance(k / 15)
        stamp_ns = stage.run.clock().ros_ns
        for name in case.config["cameras"]:
            image = rgb_to_image(FRAME, stamp_ns=stamp_ns)
            if name == data["bad_camera"]:
                image.data = bytes(image.data)[:100]
            stage.run.message(robot.topic(case.config, name), image)
        state = SimpleNamespace(header=SimpleNamespace(stamp=ns_to_stamp(stamp_ns)), name=robot.names(case.config),
                                position=list(stage.positions))  # fmt: skip
        stage.run.message(case.config["joint_states_topic"], state)
    counters = stage.run.control.summary()["counters"]["streams"]
    text = f"{stage.message}\n{counters}"
    named = [t for n in case.config["cameras"] if (t := robot.topic(case.config, n)) in stage.run.control.reason]
    return Outcome(frozenset({"hold"}) if stage.holds else ACCEPTED, text, {"topics_named": [t == bad for t in named]})


def _stamps(case: Case, data: dict[str, Any]) -> Outcome:
    """A record of steps that take longer than the camera's period: every frame with the moment it was taken."""
    pytest.importorskip("msgpack", reason="needs the extra record")
    from test.records.tools import events, look, record
    from wam_policy_ros.records.events import OBSERVATION, to_observation

    period_ns, base_ns = round(data["camera_period_s"] * 1e9), 10**12
    given: list[dict[str, Any]] = []

    def script(policy: Any, spec: Any) -> None:
        session = policy.open("one", seed=0)
        for call in range(data["calls"]):
            newest = base_ns + round(call * data["inference_s"] * 1e9)
            taken = newest - period_ns * np.arange(3, -1, -1, dtype=np.int64)
            stamps = {c.name: taken + 1000 * i for i, c in enumerate(spec.cameras)}
            given.append({name: one.tolist() for name, one in stamps.items()})
            seen = look(spec, call, frames=4)
            policy.infer(session, replace(seen, stamp_ns=newest, frame_stamps_ns=stamps))
        policy.close(session)

    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder), script)
        found = [to_observation(e) for e in events(Path(folder)) if e.topic == OBSERVATION]
    recorded = [{name: one.tolist() for name, one in (o.frame_stamps_ns or {}).items()} for o in found]
    return Outcome(ACCEPTED, "", {"frames_keep_their_stamps": recorded == given, "calls": len(recorded)})


_PARTS = {
    "OPS-05": _bridge,
    "OPS-06": _silence,
    "OPS-07": _waiting,
    "OPS-08": _readiness,
    "OPS-09": _status,
    "OPS-10": _stamps,
}
