"""The node with ``backend: openpi``: a policy on another machine behind the same safety path."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from test.serving.script_server import GREETING, ScriptServer
from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.ros import control as control_module
from wam_policy_ros.ros.backend import make_policy, secret
from wam_policy_ros.ros.parameters import NodeParameters

from .conftest import wait_for
from .harness import CAMERAS, HOME, System, positions

pytestmark = pytest.mark.usefixtures("ros")
Make = Callable[..., System]
WARM_UP = "pick up the red cup"


@pytest.fixture
def make(ros: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(control_module, "RETRY_S", 0.2)
    systems: list[System] = []

    def start(uri: str, **params: Any) -> System:
        given = {"backend": "openpi", "server.uri": uri, "server.timeout_s": 1.0, **params}
        systems.append(System(make_policy, **given))
        return systems[-1]

    yield start
    for system in systems:
        system.close()
    assert not [t.name for t in threading.enumerate() if t.name == "wam_policy_owner"]


def ramp(request: dict[str, Any], number: int = 0) -> np.ndarray:
    now = np.concatenate([request["observation/joint_position"], request["observation/gripper_position"]])
    rows = np.tile(now, (24, 1)).astype(np.float32)
    rows[:, 0] += 0.02 * np.arange(1, 25, dtype=np.float32)
    return rows


def test_a_robot_moves_by_a_policy_on_another_machine(make: Make) -> None:
    with ScriptServer(ramp) as server:
        system = make(server.uri)
        plan = wait_for(system.robot.plans, what="a trajectory")[0]
        want = np.tile(HOME, (24, 1))
        want[:, 0] += 0.02 * np.arange(1, 25)
        np.testing.assert_allclose(positions(plan), want, atol=1e-6)
        wait_for(lambda: len(system.robot.plans()) >= 4, what="more")
        ours = [r for r in server.infers() if r["prompt"] == "stir the pot"]
        assert [r["observation/wrist_image_left"].ndim for r in ours[:4]] == [3, 4, 4, 4]
        assert len({r["session_id"] for r in ours}) == 1
        firsts = [ours[0][f"observation/{n}"][0, 0, 0] for n in ("exterior_image_0_left", "exterior_image_1_left")]
        assert int(firsts[1]) - int(firsts[0]) == 1, "each camera under its own key"
        state = system.robot.wait_state(substate="running")
        assert state["policy"]["details"]["uri"] == server.uri


def test_a_lost_server_holds_with_a_reason_and_the_robot_goes_on_by_itself(make: Make) -> None:
    with ScriptServer(ramp) as server:
        system = make(server.uri)
        first = system.robot.wait_state(substate="running")["session"]
    state = system.robot.wait_state(substate="holding")
    assert server.uri in state["reason"] and not state["fault"]
    (hold,) = wait_for(system.robot.holds)
    assert not any(hold.points[0].velocities)
    wait_for(lambda: system.on_node(lambda: system.node.control.counters["policy_lost"]) >= 3, what="it is tried again")
    assert system.robot.state["substate"] == "holding" and len(system.robot.holds()) == 1
    lost = [line for line in system.lines if server.uri in line and "holding" in line]
    assert 1 <= len(lost) <= 3, f"said once for each way of being lost, not at every attempt: {lost}"
    assert not [line for line in system.lines if "Traceback" in line]
    with ScriptServer(ramp, port=server.port) as again:
        state = system.robot.wait_state(substate="running")
        assert state["session"] != first and not state["fault"]
        assert {r["session_id"] for r in again.infers()} >= {state["session"]}
        assert first in again.resets(), "what the old episode left behind is freed"


def test_a_server_that_hangs_is_left_and_its_late_reply_is_not_executed(make: Make) -> None:
    hang, gate = threading.Event(), threading.Event()

    def answer(request: dict[str, Any], number: int) -> Any:
        if hang.is_set():
            hang.clear()
            gate.wait(10)
            return np.full((24, 8), 9.0, np.float32)
        return ramp(request)

    with ScriptServer(answer) as server:
        system = make(server.uri, **{"server.timeout_s": 0.5})
        system.robot.wait_state(substate="running")
        hang.set()
        state = system.robot.wait_state(substate="holding")
        assert "in time" in state["reason"] and not state["fault"]
        gate.set()
        system.robot.wait_state(substate="running")
        wait_for(lambda: len(system.robot.plans()) > 5)
        assert max(positions(p).max() for p in system.robot.plans()) < 3.0


def test_an_error_of_the_server_is_a_fault_and_never_a_motion(make: Make) -> None:
    bad = threading.Event()

    def answer(request: dict[str, Any], number: int) -> Any:
        return "the device is out of memory" if bad.is_set() else ramp(request)

    with ScriptServer(answer) as server:
        system = make(server.uri)
        system.robot.wait_state(substate="running")
        bad.set()
        state = wait_for(lambda: system.robot.state.get("fault") and system.robot.state)
        assert "out of memory" in state["fault"] and state["substate"] == "holding"
        count, asked = len(system.robot.trajectories), len(server.infers())
        time.sleep(0.4)
        assert (len(system.robot.trajectories), len(server.infers())) == (count, asked), "latched"
        bad.clear()
        assert system.reset().success
        system.robot.wait_state(substate="running", fault="")


def test_a_server_for_another_robot_is_refused_at_the_start(make: Make) -> None:
    with ScriptServer(ramp, greeting={**GREETING, "action_space": "joint_velocity"}) as server:
        system = make(server.uri)
        wait_for(lambda: system.robot.loading("phase") == "failed")
        assert "joint_velocity" in system.robot.loading("message")
        assert system.robot.state["lifecycle"] == "inactive" and not system.robot.trajectories
        assert not server.requests


def test_the_node_waits_for_a_server_that_is_not_there_yet(make: Make) -> None:
    with ScriptServer(ramp) as once:
        port = once.port
    system = make(once.uri)
    wait_for(lambda: "waiting for the policy server" in str(system.robot.loading("message")))
    assert system.robot.loading("phase") == "loading"
    with ScriptServer(ramp, greeting={**GREETING, "contract": {"random_weights": True, "weights": "tiny"}}, port=port):
        system.robot.wait_state(substate="running")
        assert any("RANDOM WEIGHTS" in line for line in system.lines), "what a server says of its weights is shown"


def test_stopping_does_not_wait_for_a_server_that_hangs(make: Make) -> None:
    gate = threading.Event()

    def answer(request: dict[str, Any], number: int) -> Any:
        if request["prompt"] != WARM_UP:
            gate.wait(10)
        return ramp(request)

    with ScriptServer(answer) as server:
        system = make(server.uri, **{"server.timeout_s": 8.0})
        wait_for(lambda: [r for r in server.infers() if r["prompt"] != WARM_UP], what="a call that hangs")
        start = time.monotonic()
        assert system.on_node(lambda: system.node.close(5.0)), "the worker thread ends"
        assert time.monotonic() - start < 2.0
        gate.set()


def test_the_server_parameters_are_checked() -> None:
    base = {"backend": "openpi", "joints.names": CAMERAS, "server.uri": "ws://h:1"}
    NodeParameters.from_values(base)
    for change, text in [
        ({"server.uri": ""}, "belong together"),
        ({"backend": "hold"}, "belong together"),
        ({"server.timeout_s": 10.0}, r"safety\.deadline_s"),
        ({"checkpoint": "/c"}, "uses no weights"),
    ]:
        with pytest.raises(ConfigError, match=text):
            NodeParameters.from_values({**base, **change})


def test_a_key_can_be_in_a_file(tmp_path: Any) -> None:
    (tmp_path / "key").write_text("abc\n")
    assert secret(f"file:{tmp_path}/key") == "abc" == secret("abc")
    for bad in ("missing", "empty"):
        (tmp_path / "empty").write_text("\n")
        with pytest.raises(ConfigError, match=bad):
            secret(f"file:{tmp_path}/{bad}")
