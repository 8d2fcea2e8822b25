"""The real node over DDS: limits, services, outputs of every kind."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from rclpy.parameter import Parameter
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64, String
from std_srvs.srv import Empty, SetBool, Trigger
from trajectory_msgs.msg import JointTrajectory

from wam_policy_ros.contract.fakes import HoldPolicy, ScriptedPolicy
from wam_policy_ros.ros.messages import stamp_to_ns
from wam_policy_ros.ros.qos import latched_qos, sensor_qos

from .conftest import wait_for
from .harness import HOME, NAMES, System, positions
from .test_limits import urdf
from .test_node import ramp

pytestmark = pytest.mark.usefixtures("ros")
Make = Callable[..., System]
NO_LIMITS: dict[str, Any] = {"safety.position_min": [], "safety.position_max": [], "safety.max_velocity": []}


@pytest.fixture
def make(ros: None) -> Iterator[Make]:
    systems: list[System] = []

    def start(policy: Any, **params: Any) -> System:
        systems.append(System(policy, **params))
        return systems[-1]

    yield start
    for system in systems:
        system.close()
    assert not [t.name for t in threading.enumerate() if t.name in ("wam_inference", "wam_stall_watch")]


def call(system: System, kind: Any, name: str, data: bool | None = None) -> Any:
    """A service of the node, from the robot's side."""
    robot = system.robot
    client = system.spinners[1].call(lambda: robot.create_client(kind, f"wam_policy/{name}"))
    assert client.wait_for_service(5)
    future = client.call_async(kind.Request() if data is None else kind.Request(data=data))
    wait_for(future.done, what=name)
    return future.result()


def listen(system: System, kind: Any, topic: str, qos: Any = 10) -> list[Any]:
    got: list[Any] = []
    system.spinners[1].call(lambda: system.robot.create_subscription(kind, topic, got.append, qos))
    return got


def test_without_limits_the_automatic_start_waits_and_gives_up_with_the_joints_names(make: Make) -> None:
    system = make(HoldPolicy(), **NO_LIMITS)
    wait_for(lambda: any("autostart gave up" in line for line in system.lines))
    wait_for(lambda: "no limits are known" in system.robot.state.get("refused", ""))
    assert NAMES[0] in system.robot.state["refused"] and not system.robot.trajectories


def test_limits_from_robot_description(make: Make) -> None:
    system = make(HoldPolicy(), **NO_LIMITS)
    text = urdf([*NAMES[:7], "finger"]).replace('"finger"', f'"{NAMES[7]}"').replace('upper="0.05"', 'upper="0.9"')
    publisher = system.robot.create_publisher(String, "robot_description", latched_qos())
    publisher.publish(String(data=text))
    system.robot.wait_state(substate="running")


def test_the_e_stop_over_services(make: Make) -> None:
    system = make(ScriptedPolicy(ramp, latency_s=0.1))
    system.robot.wait_state(substate="running")
    assert call(system, SetBool, "estop", True).success
    system.robot.wait_state(substate="holding", fault="e-stop")
    wait_for(system.robot.holds)
    count = len(system.robot.trajectories)
    refused = call(system, Trigger, "reset")
    assert not refused.success and "release it first" in refused.message
    assert "still latched" in call(system, SetBool, "estop", False).message
    time.sleep(0.3)
    assert len(system.robot.trajectories) == count, "silence"
    assert call(system, Trigger, "reset").success
    system.robot.wait_state(substate="running", fault="")


def test_no_transition_releases_an_e_stop(make: Make) -> None:
    system = make(ScriptedPolicy(ramp, latency_s=0.1))
    system.robot.wait_state(substate="running")
    call(system, SetBool, "estop", True)
    call(system, SetBool, "estop", False)
    for again in (False, True):
        system.on_node(system.node.trigger_deactivate)
        if again:
            system.on_node(system.node.trigger_cleanup)
            system.on_node(system.node.trigger_configure)
            wait_for(lambda: system.robot.loading("phase") == "ready")
        count = len(system.robot.trajectories)
        system.on_node(system.node.trigger_activate)
        system.robot.wait_state(lifecycle="active", substate="holding", fault="e-stop")
    time.sleep(0.3)
    assert len(system.robot.trajectories) == count
    assert call(system, Trigger, "reset").success
    system.robot.wait_state(substate="running", fault="")


def test_without_a_controller_nothing_runs(make: Make) -> None:
    system = make(ScriptedPolicy(ramp, latency_s=0.1))
    system.robot.wait_state(substate="running")
    listener = next(s for s in system.robot.subscriptions if s.topic_name.endswith("/joint_trajectory"))
    system.spinners[1].call(lambda: system.robot.destroy_subscription(listener))
    reason = system.robot.wait_state(substate="holding")["reason"]
    assert "nobody subscribes" in reason and "/joint_trajectory" in reason
    listen(system, JointTrajectory, "joint_trajectory")
    system.robot.wait_state(substate="running", fault="")


def test_limits_are_tightened_by_parameters_of_an_active_node(make: Make) -> None:
    system = make(ScriptedPolicy(ramp, latency_s=0.1))
    system.robot.wait_state(substate="running")

    def change(name: str, value: Any) -> Any:
        return system.on_node(lambda: system.node.set_parameters([Parameter(name, value=value)])[0])

    assert change("safety.max_velocity", [0.9]).successful
    refused = change("safety.max_velocity", [1.0])
    assert not refused.successful and "only tightened" in refused.reason and NAMES[0] in refused.reason
    assert not change("safety.clamp_excess", 0.1).successful
    assert list(system.node.get_parameter("safety.max_velocity").value) == [0.9]


def test_hold_stop_start_and_home_over_services(make: Make) -> None:
    home = [*HOME[:7], 0.1]
    home[1] += 0.1
    system = make(HoldPolicy(), **{"home.positions": home, "home.max_velocity": 1.0})
    system.robot.wait_state(substate="running")
    assert call(system, SetBool, "hold", True).success
    assert "~/hold" in system.robot.wait_state(substate="holding")["reason"]
    call(system, SetBool, "hold", False)
    system.robot.wait_state(substate="running")
    assert call(system, Trigger, "stop").success
    system.robot.wait_state(substate="holding")
    reply = call(system, Trigger, "home")
    assert reply.success and "on the way home" in reply.message
    plan = wait_for(lambda: next((m for _, m in system.robot.trajectories if len(m.points) not in (1, 24)), None))
    np.testing.assert_allclose(positions(plan)[-1], home, atol=1e-9)
    assert call(system, Trigger, "start").success
    system.robot.wait_state(substate="running")


def test_home_without_a_pose_is_refused(make: Make) -> None:
    system = make(HoldPolicy())
    system.robot.wait_state(substate="running")
    reply = call(system, Trigger, "home")
    assert not reply.success and "home.positions is not set" in reply.message


@pytest.mark.parametrize("kind", [Trigger, Empty])
def test_reset_resets_the_simulator_too(make: Make, kind: Any) -> None:
    params = {"sim_reset.service": "sim/reset", "sim_reset.type": kind.__name__.lower()}
    system = make(HoldPolicy(), **params)
    system.robot.wait_state(substate="running")
    asked: list[int] = []

    def serve(request: Any, response: Any) -> Any:
        asked.append(1)
        if kind is Trigger:
            response.success, response.message = len(asked) == 1, "jammed"
        return response

    system.spinners[1].call(lambda: system.robot.create_service(kind, "sim/reset", serve))
    client = system.spinners[0].call(lambda: system.node.create_client(kind, "sim/reset"))
    assert client.wait_for_service(5)
    assert call(system, Trigger, "reset").success
    system.robot.wait_state(substate="running")
    assert asked == [1]
    if kind is Trigger:
        call(system, Trigger, "reset")
        assert "jammed" in wait_for(lambda: system.robot.state.get("fault"))


def test_a_simulator_that_is_not_there_or_does_not_answer_is_a_fault(make: Make) -> None:
    system = make(HoldPolicy(), **{"sim_reset.service": "sim/reset", "sim_reset.timeout_s": 0.3})
    system.robot.wait_state(substate="running")
    call(system, Trigger, "reset")
    assert "nobody offers" in wait_for(lambda: system.robot.state.get("fault"))


def test_a_second_publisher_is_warned_of_or_refused(make: Make) -> None:
    for exclusive in (False, True):
        system = make(HoldPolicy(), autostart=False, **{"output.exclusive": exclusive})
        system.robot.create_publisher(JointTrajectory, "joint_trajectory", 1)
        system.on_node(system.node.trigger_configure)
        wait_for(lambda: system.robot.loading("phase") == "ready")  # noqa: B023 - called here
        topic = system.node.resolve_topic_name("joint_trajectory")
        wait_for(lambda: len(system.node.get_publishers_info_by_topic(topic)) > 1)  # noqa: B023
        system.on_node(system.node.trigger_activate)
        if exclusive:
            assert "two masters" in wait_for(lambda: system.robot.state["refused"])  # noqa: B023
        else:
            system.robot.wait_state(lifecycle="active")
            assert [line for line in system.lines if "two masters" in line]


def test_a_second_publisher_that_comes_later_is_told_of_or_holds_the_robot(make: Make) -> None:
    for exclusive in (False, True):
        system = make(ScriptedPolicy(ramp, latency_s=0.1), **{"output.exclusive": exclusive})
        system.robot.wait_state(substate="running")
        other = system.robot.create_publisher(JointTrajectory, "joint_trajectory", 1)
        if exclusive:
            assert "two masters" in system.robot.wait_state(substate="holding")["reason"]
        else:
            wait_for(lambda: "two masters" in system.robot.state["masters"])  # noqa: B023 - called here
            assert [line for line in system.lines if "two masters" in line]
        system.robot.destroy_publisher(other)
        wait_for(lambda: system.robot.state["masters"] == "")  # noqa: B023
        system.robot.wait_state(substate="running", fault="")


def test_the_plan_topic_carries_the_plan_with_its_time(make: Make) -> None:
    system = make(ScriptedPolicy(ramp))
    plans = listen(system, JointTrajectory, "wam_policy/plan", sensor_qos(5))
    plan = wait_for(lambda: next((m for m in plans if len(m.points) > 1), None))
    assert abs(stamp_to_ns(plan.header.stamp) - time.time_ns()) < 5e9 and list(plan.joint_names) == NAMES


def test_absolute_stamps_on_request(make: Make) -> None:
    system = make(ScriptedPolicy(ramp), **{"control.stamp": "absolute"})
    plan = wait_for(system.robot.plans)[0]
    assert abs(stamp_to_ns(plan.header.stamp) - time.time_ns()) < 5e9


def test_joint_command_streams_positions_at_the_control_rate_and_stops_after_a_hold(make: Make) -> None:
    system = make(ScriptedPolicy(ramp, latency_s=0.1), **{"output.mode": "joint_command"})
    got = listen(system, JointState, "joint_command")
    wait_for(lambda: len(got) > 20)
    assert list(got[0].name) == NAMES and not system.robot.trajectories
    first, last = got[2].position[0], got[18].position[0]
    assert first < last, "it moves"
    call(system, Trigger, "stop")
    time.sleep(0.5)
    count, at = len(got), got[-1].position[0]
    time.sleep(0.3)
    assert len(got) == count and got[-1].velocity[0] == 0.0 and got[-1].position[0] == at


@pytest.mark.parametrize(("mode", "topic"), [("trajectory", "gripper_trajectory"), ("float64", "gripper_command")])
def test_a_gripper_of_its_own(make: Make, mode: str, topic: str) -> None:
    system = make(ScriptedPolicy(ramp), **{"gripper.mode": mode, "gripper.min_interval_s": 0.0})
    got = listen(system, JointTrajectory if mode == "trajectory" else Float64, topic)
    plan = wait_for(system.robot.plans)[0]
    assert list(plan.joint_names) == NAMES[:7]
    message = wait_for(lambda: got and got[-1])
    if mode == "trajectory":
        assert list(message.joint_names) == NAMES[7:]
        assert message.points[-1].positions[0] == pytest.approx(0.8)
    else:
        assert message.data == pytest.approx(0.8)


def test_a_gripper_that_is_not_sent_and_one_that_is_inverted(make: Make) -> None:
    system = make(ScriptedPolicy(ramp), **{"gripper.mode": "none"})
    assert list(wait_for(system.robot.plans)[0].joint_names) == NAMES[:7]
    policy = ScriptedPolicy(ramp, record=True)
    system = make(policy, **{"gripper.invert": True})
    plan = wait_for(system.robot.plans)[0]
    assert plan.points[-1].positions[7] == pytest.approx(0.0), "the policy says 1: open"
    np.testing.assert_allclose(policy.sessions[1].seen[0].state["gripper_position"], [0.75])


@pytest.mark.skipif(importlib.util.find_spec("control_msgs") is not None, reason="control_msgs is installed")
@pytest.mark.parametrize("params", [{"output.mode": "action"}, {"gripper.mode": "action"}])
def test_actions_without_control_msgs_are_refused_with_what_to_do(make: Make, params: dict[str, Any]) -> None:
    system = make(HoldPolicy(), **params)
    refused = wait_for(lambda: system.robot.state.get("refused"))
    assert "control_msgs" in refused and "apt install" in refused


def test_an_executor_that_stands_still_is_held_from_outside_it(make: Make) -> None:
    system = make(ScriptedPolicy(ramp, latency_s=0.1), **{"safety.executor_stall_s": 0.4})
    system.robot.wait_state(substate="running")
    stuck = threading.Event()
    timer = system.on_node(lambda: system.node.create_timer(0.0, lambda: stuck.wait(1.2)))
    try:
        wait_for(system.robot.holds, 3.0, "a hold while the executor stands still")
    finally:
        stuck.set()
        system.on_node(lambda: system.node.destroy_timer(timer))
    wait_for(lambda: system.robot.state["counters"]["executor_stalls"] >= 1)
    system.robot.wait_state(substate="running", fault="")
