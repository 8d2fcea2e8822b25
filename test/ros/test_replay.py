"""A recording through the node's own path in virtual time, on a machine without ROS."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rosbags", reason="reading recordings needs the package rosbags (extra replay)")

from test.recordings import Message, image, joints, picture, write
from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.contract.fakes import HoldPolicy, ScriptedPolicy
from wam_policy_ros.ros.parameters import NodeParameters
from wam_policy_ros.ros.recording import Recording
from wam_policy_ros.ros.replay import full_name, replay, report, text
from wam_policy_ros.ros.virtual import VirtualRun
from wam_policy_ros.tools.main import main

CAMERAS = ["/left/image_raw", "/right/image_raw", "/hand/image_raw"]
NAMES = [f"axis{i}" for i in range(7)] + ["jaw"]
VALUES = {
    "backend": "hold",
    "cameras.topics": CAMERAS,
    "joints.topic": "/joint_states",
    "joints.names": NAMES,
    "gripper.open": 0.08,
    "gripper.closed": 0.0,
    "instruction": "stir",
    "safety.position_min": -2.9,
    "safety.position_max": 2.9,
    "safety.max_velocity": 2.0,
}


def episode(
    seconds: float = 3.0, *, without: Sequence[str] = (), gap: tuple[float, float] = (9.0, 9.0)
) -> list[Message]:
    """Cameras at 20 Hz, joints at 50 Hz; ``without`` some topics, the last camera silent in ``gap``."""
    out = []
    for k in range(round(seconds * 20)):
        t = k / 20
        silent = (CAMERAS[2],) if gap[0] < t < gap[1] else ()
        out += [image(t, topic, picture()) for topic in CAMERAS if topic not in (*without, *silent)]
    for k in range(round(seconds * 50)):
        out.append(joints(k / 50, "/joint_states", {"foreign": 9.0, **dict.fromkeys(reversed(NAMES), 0.04)}))
    return out


def run(folder: Path, policy: Any = None, latency_s: float = 0.2, **values: Any) -> tuple[VirtualRun, dict[str, Any]]:
    policy = policy or HoldPolicy()
    with Recording(folder) as recording:
        done = replay(
            recording,
            NodeParameters.from_values({**VALUES, **values}),
            policy,
            latency_s=lambda call, measured_s: latency_s,
            keep_observations=True,
        )
        return done, report(done, recording.contents, policy)


@pytest.mark.parametrize("storage", ["mcap", "sqlite3"])
def test_both_storages_give_the_same_chunks(tmp_path: Path, storage: str) -> None:
    done, data = run(write(tmp_path / "bag", episode(), storage=storage))
    assert (
        data["streams"]["/hand/image_raw"] | {"accepted": 60, "received": 60, "dropped": {}, "rate_hz": 20.0}
        == (data["streams"]["/hand/image_raw"])
    )
    assert data["published"]["trajectories"] >= 4 and data["fault"] == "" and data["counters"]["late"] == 0
    # 8 steps of 1/15 s from an observation until the next one's chunk takes over, and that chunk takes 0.2 s.
    at_s = np.array([done.elapsed_s(s.at_ns) for s in done.journal.sent if not s.hold])
    assert 0.2 < at_s[0] < 0.45 and np.diff(at_s[1:5]) == pytest.approx(8 / 15 - 0.2, abs=0.06)
    plan = done.journal.sent[0].plan
    assert plan.names == tuple(NAMES) and plan.positions == pytest.approx(np.full((24, 8), 0.04))
    seen = done.worker.calls[0].observation
    assert seen is not None and seen.state["gripper_position"] == pytest.approx([0.5])
    assert seen.frames["wrist_image_left"].shape == (1, 180, 320, 3)
    assert json.loads(json.dumps(data)) == data


def test_a_silent_camera_is_held_for_and_come_back_from(tmp_path: Path) -> None:
    policy = ScriptedPolicy(lambda o, step: np.tile(np.concatenate(list(o.state.values())), (24, 1)))
    done, data = run(write(tmp_path / "bag", episode(5.0, gap=(2.0, 3.5))), policy)
    holding = [s for s in data["states"] if s["substate"] == "holding" and "/hand/image_raw" in s["reason"]]
    assert holding and holding[0]["t_s"] == pytest.approx(2.2, abs=0.07), "0.2 s after the last frame, and a tick"
    assert data["streams"]["/hand/image_raw"]["longest_gap_s"] == pytest.approx(1.5)
    assert [e["line"] for e in data["log"] if "back after 1.50 s" in e["line"]]
    again = [s for s in data["states"] if s["substate"] == "running" and s["t_s"] > 3.5]
    assert again and again[0]["t_s"] < 4.0
    sent = [(done.elapsed_s(s.at_ns), s.hold) for s in done.journal.sent]
    assert [h for t, h in sent if 2.2 <= t < 3.5] == [True], "one hold, then silence"
    report_text = text(data)
    assert "holding for" in report_text and "the recording ends" in report_text


def test_what_is_missing_is_named_with_what_is_there(tmp_path: Path) -> None:
    _, data = run(write(tmp_path / "bag", episode(1.0, without=CAMERAS[2:])))
    assert data["recording"]["not_in_it"] == ["/hand/image_raw"]
    assert data["published"] == {"trajectories": 0, "holds": 0, "rows": 0, "first_s": None, "last_s": None,
                                 "highest_speed": {}}  # fmt: skip
    assert "MISSING     /hand/image_raw" in text(data) and "/left/image_raw" in text(data)
    assert len(data["states"]) < 10, "a growing count is no new state"


def test_a_slow_policy_is_late_and_said_to_be(tmp_path: Path) -> None:
    _, data = run(write(tmp_path / "bag", episode(8.0)), latency_s=2.0, **{"control.mode": "auto"})
    assert data["counters"]["stop_and_go"] > 0 and data["policy_calls"]["latency_s"]["p50"] == 2.0
    assert any("stands still" in e["line"] for e in data["log"])


def test_simulated_time_is_taken_from_the_recording(tmp_path: Path) -> None:
    messages = [m._replace(fields=m.fields | {"stamp_s": m.at_s - 1000.0}) for m in episode(2.0)]
    clock = [Message(k / 100 - 1e-4, "/clock", "clock", {"stamp_s": k / 100 - 1000.0}) for k in range(1, 200)]
    done, data = run(write(tmp_path / "bag", [*messages, *clock]))
    assert data["published"]["trajectories"] >= 2 and data["counters"]["clock_jumps"] == 0
    assert abs(done.clock().ros_ns - (1_750_000_000 - 1000 + 2) * 10**9) < 10**8


def test_limits_come_from_the_recorded_description(tmp_path: Path) -> None:
    limit = '<limit lower="-2" upper="2" velocity="0.5" effort="1"/>'
    urdf = "".join(f'<joint name="{n}" type="revolute">{limit}</joint>' for n in NAMES)
    described = Message(0.0, "/robot_description", "text", {"data": f'<robot name="r">{urdf}</robot>'})

    def fast(observation: Any, step: int) -> np.ndarray:
        rows = np.tile(np.concatenate(list(observation.state.values())), (24, 1))
        rows[:, 0] += 0.06 * np.arange(1, 25)  # 0.9 rad/s, which the parameters allow
        return rows

    none = {"safety.position_min": [], "safety.position_max": [], "safety.max_velocity": []}
    _, data = run(write(tmp_path / "bag", [*episode(1.0), described]), ScriptedPolicy(fast), **none)
    assert data["published"]["trajectories"] == 0
    assert any("speed of axis0" in s["reason"] and "0.5" in s["reason"] for s in data["states"]), data["states"]
    with pytest.raises(ConfigError, match="limit"):
        run(write(tmp_path / "without", episode(0.5)), **none)


@pytest.mark.parametrize(
    ("topic", "namespace", "full"),
    [("/a/b", "n", "/a/b"), ("a/b", "", "/a/b"), ("a/b", "/n/", "/n/a/b"), ("~/c", "n", "/n/wam_policy/c")],
)
def test_names_are_resolved_as_ros_does(topic: str, namespace: str, full: str) -> None:
    assert full_name(topic, namespace) == full


def test_a_folder_that_is_no_recording_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metadata\.yaml"):
        Recording(tmp_path)
    (tmp_path / "metadata.yaml").write_text("no: bag\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        Recording(tmp_path)


def test_the_command_writes_both_reports_and_needs_no_ros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "bag", episode(1.5))
    config = tmp_path / "robot.yaml"
    names = ", ".join(NAMES)
    config.write_text(
        f"/**/wam_policy:\n  ros__parameters:\n    joints: {{names: [{names}], topic: /joint_states}}\n"
        f"    cameras: {{topics: [{', '.join(CAMERAS)}]}}\n    gripper: {{open: 0.08, closed: 0}}\n"
        "    safety: {position_min: [-2.9], position_max: [2.9], max_velocity: [2.0]}\n"
    )
    asked: list[list[str]] = []

    def execv(program: str, argv: list[str]) -> None:
        asked.append(argv)
        raise SystemExit(0)

    monkeypatch.setattr("os.execv", execv)
    with pytest.raises(SystemExit):
        main(["replay", str(folder), "--config", str(config), "--latency", "0.1", "--json", str(tmp_path / "out.json"),
              "-p", "control.execute_steps:=4"])  # fmt: skip
    assert asked[0][1:3] == ["-m", "wam_policy_ros.ros.replay"]
    code = "import sys; sys.modules['rclpy'] = None; from wam_policy_ros.ros.replay import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, *asked[0][3:]], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["published"]["trajectories"] >= 3 and data["latency"] == "0.1"
    assert "trajectories" in done.stdout and "hold policy, no network" in done.stdout


def test_a_wrong_parameter_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from wam_policy_ros.ros.replay import main as replay_main

    folder = write(tmp_path / "bag", episode(0.2))
    assert replay_main([str(folder), "-p", "camera.topics:=[a]"]) == 1
    assert "camera.topics" in capsys.readouterr().err
    assert replay_main([str(folder), "-p", "backend=hold"]) == 1
    assert replay_main([str(folder), "-p", "backend:=hold", "--latency", "soon"]) == 1
