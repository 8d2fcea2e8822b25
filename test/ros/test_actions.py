"""Actions of control_msgs against a real action server. Skipped where control_msgs is not installed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip(
    "control_msgs.action", reason="control_msgs is not installed: apt install ros-<distro>-control-msgs"
)

from control_msgs.action import FollowJointTrajectory, GripperCommand, ParallelGripperCommand
from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node

from wam_policy_ros.contract.fakes import ScriptedPolicy
from wam_policy_ros.ros.follower import Follower

from .conftest import wait_for
from .harness import HOME, NAMES, System
from .test_node import ramp

pytestmark = pytest.mark.usefixtures("ros")


class Controller:
    """An action server that accepts what a controller would, in an executor of its own; a new goal aborts the last."""

    def __init__(self, namespace: str, kind: Any, name: str, names: list[str] = NAMES) -> None:
        self.node = Node("controller", namespace=namespace)
        self.follower = Follower(names, HOME[: len(names)])
        self.goals: list[Any] = []
        self.reject = self.fail = self.ended = False
        self._running: threading.Event | None = None
        self._server = ActionServer(
            self.node,
            kind,
            name,
            execute_callback=self._execute,
            goal_callback=self._on_goal,
            handle_accepted_callback=self._on_accepted,
            cancel_callback=lambda handle: CancelResponse.ACCEPT,
        )
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(self.node)
        self._kind = kind
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._thread.start()

    def _spin(self) -> None:
        while not self.ended:
            self._executor.spin_once(timeout_sec=0.1)

    def _on_goal(self, goal: Any) -> GoalResponse:
        if self.reject:
            return GoalResponse.REJECT
        if hasattr(goal, "trajectory"):
            now = self.node.get_clock().now().nanoseconds * 1e-9
            try:
                self.follower.on_trajectory(goal.trajectory, now)
            except ValueError:
                return GoalResponse.REJECT
        self.goals.append(goal)
        return GoalResponse.ACCEPT

    def _on_accepted(self, handle: Any) -> None:
        if self._running is not None:
            self._running.set()
        self._running = threading.Event()
        threading.Thread(target=self._wait, args=(handle, self._running), daemon=True).start()

    def _wait(self, handle: Any, replaced: threading.Event) -> None:
        if not self.fail:
            replaced.wait(0.2 if not hasattr(handle.request, "trajectory") else 1.6)
        handle.execute()

    def _execute(self, handle: Any) -> Any:
        result = self._kind.Result()
        if self.fail and hasattr(result, "error_code"):
            result.error_code, result.error_string = -4, "path tolerance violated"
            handle.abort()
        elif handle.is_active:
            handle.succeed()
        return result

    def close(self) -> None:
        self.ended = True
        if self._running is not None:
            self._running.set()
        self._thread.join(5)
        self._server.destroy()
        self.node.destroy_node()


@pytest.fixture
def make(ros: None) -> Iterator[Callable[..., tuple[System, Controller]]]:
    made: list[Any] = []

    def start(kind: Any, name: str, names: list[str] = NAMES, **params: Any) -> tuple[System, Controller]:
        system = System(ScriptedPolicy(ramp, latency_s=0.1), autostart=False, **params)
        controller = Controller(system.node.get_namespace(), kind, name, names)
        made.extend((system, controller))
        system.on_node(system.node.trigger_configure)
        wait_for(lambda: system.robot.loading("phase") == "ready")
        clients = [e for e in system.node.waitables if hasattr(e, "server_is_ready")]
        wait_for(lambda: all(c.server_is_ready() for c in clients), what="the action server")
        system.on_node(system.node.trigger_activate)
        return system, controller

    yield start
    for one in made:
        one.close()


def test_every_chunk_is_a_goal_that_replaces_the_last(make: Any) -> None:
    system, controller = make(FollowJointTrajectory, "follow_joint_trajectory", **{"output.mode": "action"})
    wait_for(lambda: len(controller.goals) > 5, 15)
    assert list(controller.goals[0].trajectory.joint_names) == NAMES and controller.follower.rejected == 0
    state = system.robot.wait_state(substate="running")
    assert state["counters"]["controller_rejections"] == 0 and not system.robot.trajectories


def test_rejected_goals_hold_and_latch_in_a_row(make: Any) -> None:
    system, controller = make(FollowJointTrajectory, "follow_joint_trajectory", **{"output.mode": "action"})
    wait_for(lambda: len(controller.goals) > 1, 15)
    controller.reject = True
    state = wait_for(lambda: system.robot.state.get("fault") and system.robot.state, 15)
    assert "rejected" in state["fault"] and "in a row" in state["fault"]
    assert state["counters"]["controller_rejections"] == 3


def test_a_goal_that_fails_is_said_with_the_controllers_words(make: Any) -> None:
    system, controller = make(FollowJointTrajectory, "follow_joint_trajectory", **{"output.mode": "action"})
    wait_for(lambda: len(controller.goals) > 1, 15)
    controller.fail = True
    state = wait_for(lambda: system.robot.state["counters"]["controller_rejections"] > 0 and system.robot.state, 15)
    assert "path tolerance violated" in state["reason"] or state["counters"]["controller_rejections"] > 1


@pytest.mark.parametrize(("mode", "kind"), [("action", GripperCommand), ("parallel_action", ParallelGripperCommand)])
def test_grippers_as_actions(make: Any, mode: str, kind: Any) -> None:
    system, controller = make(kind, "gripper_cmd", **{"gripper.mode": mode, "gripper.max_effort": 20.0})
    goal = wait_for(lambda: controller.goals and controller.goals[-1], 15)
    if kind is GripperCommand:
        assert (goal.command.position, goal.command.max_effort) == (pytest.approx(0.8), 20.0)
    else:
        assert list(goal.command.name) == NAMES[7:] and np.allclose(goal.command.position, [0.8])
    assert len(wait_for(system.robot.plans)[0].joint_names) == 7
