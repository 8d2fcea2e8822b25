"""What a person and a dashboard are told, from states as the node makes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from diagnostic_msgs.msg import DiagnosticArray
from std_msgs.msg import String

from wam_policy_ros.contract.fakes import HoldPolicy
from wam_policy_ros.ros.diagnostics import Level, Status, diagnose
from wam_policy_ros.ros.meters import Durations, Rate, Ticks
from wam_policy_ros.ros.qos import latched_qos
from wam_policy_ros.ros.reporter import key_of
from wam_policy_ros.ros.reports import Monitor
from wam_policy_ros.ros.status_text import WIDTH, status_text

from .conftest import wait_for
from .harness import CAMERAS, System
from .test_inputs import FRAME_NS, Rig, at, image, ms

SERVING = {"addresses": ["ws://127.0.0.1:8000"], "connections": 1, "sessions": 1, "trouble": ""}


def parts(state: dict[str, Any]) -> dict[str, Status]:
    return {status.part: status for status in diagnose(state)}


def sound_state(**changes: Any) -> dict[str, Any]:
    """As of a running node."""
    rig = Rig()
    end = rig.episode(20)
    monitor = Monitor(rig.inputs, 15.0)
    monitor.summary(at(end))
    streams = {}
    for k in range(1, 16):
        rig.all_cameras(end + k * FRAME_NS)
        rig.all_joints(end + k * FRAME_NS)
        streams = monitor.summary(at(end + k * FRAME_NS))
    state = {
        "node": "/arm/wam_policy",
        "lifecycle": "active",
        "substate": "running",
        "reason": "",
        "fault": "",
        "refused": "",
        "session": "0123456789abcdef",
        "step": 4,
        "prompt": "pick up the mug",
        "loading": {"phase": "ready", "message": "ready", "fraction": 1.0},
        "policy": {
            "weights": "checkpoint x",
            "random_weights": False,
            "embodiment": "oxe_droid",
            "fingerprint": {"id": "wam1-5"},
            "details": {"weights_hash": "sha256:9"},
        },
        "counters": {"chunks": 4, "late": 1, "refused": 0, "off_schedule": 2},
        "durations_s": {"latency": {"p50": 0.5, "p99": 0.75, "max": 0.8, "n": 4}},
        **streams,
        "control_rate_hz": {"nominal": 15.0, "achieved": 15.0, "longest_gap_s": 0.07},
    }
    return {**state, **changes}


def test_a_running_node_is_ok_with_rates_ages_and_latencies() -> None:
    found = parts(sound_state())
    assert list(found) == ["policy", "observation", "controller", "server"]
    assert {s.level for s in found.values()} == {Level.OK}, found
    seen = found["observation"].values
    assert seen[f"{CAMERAS[0]} rate [Hz]"] == "15.0" and seen["joints age of stamp [s]"] == "0.000"
    assert seen["skew of the cameras [s]"] == "0.000" and seen["off schedule"] == "2"
    assert found["policy"].values["latency p99 [ms]"] == "750.0" and found["policy"].values["late"] == "1"
    assert found["policy"].values["fingerprint"] == "wam1-5" and found["policy"].values["weights hash"] == "sha256:9"
    assert found["controller"].values["control rate [Hz]"] == "15.00"


@pytest.mark.parametrize(
    ("changes", "part", "level", "says"),
    [
        ({"fault": "chunk not finite"}, "controller", Level.ERROR, "latched: chunk not finite"),
        ({"substate": "holding", "reason": "camera gone"}, "controller", Level.WARN, "holding: camera gone"),
        ({"stall_share": 0.02}, "controller", Level.WARN, "lacked a command 2.0%"),
        ({"stall_share": 0.005}, "controller", Level.OK, "running"),
        ({"lifecycle": "inactive"}, "controller", Level.OK, "nothing is sent"),
        (
            {"control_rate_hz": {"nominal": 15.0, "achieved": 12.0, "longest_gap_s": 0.2}},
            "controller",
            Level.WARN,
            "only 12.0 of 15",
        ),
        ({"loading": {"phase": "failed", "message": "no shard", "fraction": 0.1}}, "policy", Level.ERROR, "no shard"),
        ({"loading": {"phase": "loading", "message": "w", "fraction": 0.5}}, "policy", Level.WARN, "loading: w (50%)"),
        ({"policy": {"random_weights": True, "weights": "RANDOM"}}, "policy", Level.WARN, "not a policy: RANDOM"),
        ({"openpi": SERVING}, "server", Level.OK, "serving on ws://127.0.0.1:8000"),
        ({"openpi": {**SERVING, "trouble": "a call hangs"}}, "server", Level.ERROR, "a call hangs"),
        (
            {
                "openpi": {**SERVING, "trouble": "the policy loads"},
                "loading": {"phase": "loading", "message": "w", "fraction": 0.5},
            },
            "server",
            Level.WARN,
            "loads",
        ),
    ],
)
def test_levels(changes: dict[str, Any], part: str, level: Level, says: str) -> None:
    status = parts(sound_state(**changes))[part]
    assert status.level is level and says in status.message, status


def test_refusals_are_counted_by_reason() -> None:
    status = parts(sound_state(refusals={"speed": 2, "not finite": 1}))["controller"]
    assert status.values["refused: speed"] == "2" and status.values["refused: not finite"] == "1"


def test_stale_when_no_data_ever_came() -> None:
    rig = Rig()
    streams = Monitor(rig.inputs, 15.0).summary(at(0))
    status = parts(sound_state(**streams))["observation"]
    assert status.level is Level.STALE and "ever" in status.message
    rig.camera(0, 0)
    streams = Monitor(rig.inputs, 15.0).summary(at(0))
    status = parts(sound_state(**streams))["observation"]
    assert status.level is Level.ERROR and CAMERAS[1] in status.message and CAMERAS[0] not in status.message
    assert {s.level for s in diagnose({"lifecycle": "unconfigured"})} == {Level.STALE, Level.OK}


def test_one_bad_topic_among_five_is_named_with_age_and_reasons() -> None:
    """OPS-09."""
    rig = Rig()
    end = rig.episode(20)
    cut = image(end + ms(20))
    cut.data = cut.data[:100]
    rig.inputs.cameras[CAMERAS[1]].on_message(cut, at(end + ms(20)))
    for k in range(1, 6):
        now = end + k * FRAME_NS
        rig.camera(0, now)
        rig.camera(2, now)
        rig.all_joints(now)
    state = sound_state(**Monitor(rig.inputs, 15.0).summary(at(end + 5 * FRAME_NS)), substate="holding", reason="x")
    text = status_text(state)
    topic = rig.inputs.cameras[CAMERAS[1]].shown
    row = next(line for line in text.splitlines() if line.startswith(topic))
    assert row.split()[2:] == ["0.333", "21", "1", "BAD", "32x18"]
    assert text.count("BAD") == 1 and f"{topic} dropped 1 x truncated image" in text
    flat = " ".join(text.split())
    assert f"camera {CAMERAS[1]!r} ({topic}): nothing usable arrives" in flat and "remedy: look at" in flat
    status = parts(state)["observation"]
    assert status.level is Level.ERROR and status.values[f"{CAMERAS[1]} dropped"] == "1 x truncated image"


def test_the_status_is_one_screen_and_says_what_why_and_the_remedy() -> None:
    reason = (
        "camera 'wrist' (/camera_wrist/image_raw): nothing arrives; got: last message 0.4 s ago; remedy: plug it in"
    )
    text = status_text(sound_state(substate="holding", reason=reason, since_s=3.2))
    lines = text.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= WIDTH
    assert "HOLDING: the robot stands still (for 3 s)" in text
    why, remedy = (next(i for i, line in enumerate(lines) if line.startswith(w)) for w in ("why", "remedy"))
    assert why < remedy and "plug it in" in lines[remedy] and "remedy" not in lines[why]
    fault = status_text(sound_state(substate="holding", fault="not finite"))
    assert "FAULT, latched" in fault and "~/reset" in fault
    assert "no weights yet" in status_text({"lifecycle": "unconfigured", "refused": "no weights yet", "node": "/n"})


def test_numbers_that_always_change_are_no_news_but_another_camera_is() -> None:
    one = key_of(sound_state(substate="holding", reason="nothing for 0.31 s"))
    assert one == key_of(sound_state(substate="holding", reason="nothing for 2.50 s", step=9))
    assert one != key_of(sound_state(substate="holding", reason="nothing for 2.50 s from camera b"))
    assert one != key_of(sound_state(substate="holding", reason="nothing for 0.31 s", fault="x"))


def test_rate_durations_and_ticks() -> None:
    rate = Rate(span_s=2.0)
    assert rate.update(10.0, 100) is None
    assert rate.update(11.0, 110) == 10.0
    assert [rate.update(11.0 + k, 110 + 20 * k) for k in (1, 2, 3)][-1] == 20.0, "only the last two seconds"
    assert rate.update(15.0, 3) is None, "started again"
    durations = Durations()
    for k in range(1, 1001):
        durations.add("a", k * 1e-3)
    assert durations.summary()["a"] == {
        "p50": pytest.approx(0.8725),
        "p99": pytest.approx(0.99745),
        "max": 1.0,
        "n": 256,
    }
    ticks = Ticks()
    assert ticks.longest_gap_s() is None
    for t in (0.0, 0.1, 0.5, 0.6):
        ticks.tick(t)
    assert ticks.count == 4 and ticks.longest_gap_s() == pytest.approx(0.4)


@pytest.fixture
def system(ros: None) -> Iterator[System]:
    made = System(HoldPolicy())
    yield made
    made.close()


def test_diagnostics_and_status_of_a_real_node(system: System) -> None:
    arrays: list[DiagnosticArray] = []
    texts: list[str] = []
    node = system.node.get_fully_qualified_name()

    def listen() -> None:
        system.robot.create_subscription(DiagnosticArray, "/diagnostics", arrays.append, 10)
        system.robot.create_subscription(String, f"{node}/status", lambda msg: texts.append(msg.data), latched_qos())

    system.spinners[1].call(listen)
    system.robot.wait_state(substate="running")

    def level(part: str) -> bytes | None:
        mine = [s for a in arrays for s in a.status if s.name == f"{node}: {part}"]
        return mine[-1].level if mine else None

    wait_for(lambda: level("observation") == bytes([Level.OK]) and level("controller") == bytes([Level.OK]), 15)
    assert {s.name for s in arrays[-1].status} == {
        f"{node}: {p}" for p in ("policy", "observation", "controller", "server")
    }
    assert arrays[-1].status[0].hardware_id == "oxe_droid"
    wait_for(lambda: "the robot follows the policy" in texts[-1], what="status")
    count = len(arrays)
    system.robot.on[CAMERAS[0]] = False
    system.robot.wait_state(substate="holding")
    wait_for(lambda: len(arrays) > count and level("observation") == bytes([Level.ERROR]), 2, "told at once")
    wait_for(lambda: "HOLDING" in texts[-1] and "camera_exterior_1/image_raw" in texts[-1])
    durations = system.robot.state["durations_s"]
    assert durations["step_to_publish"]["p50"] < 0.05 and durations["frame_to_step"]["n"] >= 1
