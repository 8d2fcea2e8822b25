"""Trajectories and grippers as actions of control_msgs. Futures and callbacks only: nothing here waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rclpy.action import ActionClient

from wam_policy_ros.contract.errors import MissingDependency

from .gripper import Command
from .messages import Trajectory, trajectory_to_msg

SUCCEEDED = 4
"""action_msgs/GoalStatus.STATUS_SUCCEEDED"""


def action_type(name: str) -> Any:
    """An action of control_msgs.

    Raises:
        MissingDependency: control_msgs, or this action of it, is not installed.
    """
    try:
        import control_msgs.action as actions

        return getattr(actions, name)
    except (ImportError, AttributeError):
        raise MissingDependency(
            "control_msgs",
            "",
            f"the action {name}",
            remedy="apt install ros-<distro>-control-msgs, or use output.mode: topic and gripper.mode: in_trajectory, "
            "trajectory or float64",
        ) from None


class _Goals:
    """Sends goals one after the other; only the newest counts."""

    def __init__(self, node: Any, kind: Any, name: str, rejected: Callable[[str], Any], accepted: Callable[[], Any]):
        self._client: Any = ActionClient(node, kind, name)
        self._kind, self._name = kind, name
        self._rejected, self._accepted = rejected, accepted
        self._newest = 0

    def send(self, goal: Any) -> None:
        self._newest += 1
        number = self._newest
        if not self._client.server_is_ready():
            self._rejected(f"no action server {self._name}")
            return
        self._client.send_goal_async(goal).add_done_callback(lambda future: self._on_response(number, future.result()))

    def _on_response(self, number: int, handle: Any) -> None:
        if not handle.accepted:
            self._rejected(f"{self._name} rejected a goal")
            return
        self._accepted()
        handle.get_result_async().add_done_callback(lambda future: self._on_result(number, future.result()))

    def _on_result(self, number: int, outcome: Any) -> None:
        # A goal that a newer one replaced ends as aborted or cancelled; that is no failure.
        if number != self._newest or outcome.status == SUCCEEDED:
            return
        code = getattr(outcome.result, "error_code", 0)
        if code:
            self._rejected(f"{self._name}: error {code} {getattr(outcome.result, 'error_string', '')}".strip())

    def ready(self) -> bool:
        return bool(self._client.server_is_ready())

    def destroy(self) -> None:
        self._client.destroy()


class FollowTrajectory:
    """control_msgs/FollowJointTrajectory. Every new trajectory preempts the one before.

    Args:
        node: an rclpy node.
        name: of the action.
        absolute: see ``control.stamp``.
        rejected: called with a reason for every goal that was refused or failed.
        accepted: called for every goal that was accepted.
    """

    def __init__(
        self,
        node: Any,
        name: str,
        *,
        absolute: bool,
        rejected: Callable[[str], Any],
        accepted: Callable[[], Any] = lambda: None,
    ) -> None:
        kind = action_type("FollowJointTrajectory")
        self._goal, self._absolute = kind.Goal, absolute
        self._goals = _Goals(node, kind, name, rejected, accepted)

    def prepare(self, trajectory: Trajectory) -> Command:
        goal = self._goal(trajectory=trajectory_to_msg(trajectory, absolute=self._absolute))
        return lambda: self._goals.send(goal)

    def ready(self) -> bool:
        """Its server is there."""
        return self._goals.ready()

    def destroy(self) -> None:
        self._goals.destroy()


class Gripper:
    """control_msgs/GripperCommand (gripper_controllers), or ParallelGripperCommand (parallel_gripper_controller).

    Args:
        node, name, rejected: as for ``FollowTrajectory``.
        joint: its name.
        parallel: the second of the two.
        max_effort: N; 0: the controller's own.
    """

    def __init__(
        self, node: Any, name: str, joint: str, *, parallel: bool, max_effort: float, rejected: Callable[[str], Any]
    ) -> None:
        kind = action_type("ParallelGripperCommand" if parallel else "GripperCommand")
        self._joint, self._parallel, self._max_effort, self._goal = joint, parallel, max_effort, kind.Goal
        self._goals = _Goals(node, kind, name, rejected, lambda: None)

    def send(self, position: float) -> None:
        """Joint units."""
        goal = self._goal()
        if self._parallel:
            goal.command.name, goal.command.position = [self._joint], [position]
            goal.command.effort = [self._max_effort] if self._max_effort else []
        else:
            goal.command.position, goal.command.max_effort = position, self._max_effort
        self._goals.send(goal)

    def ready(self) -> bool:
        """Its server is there."""
        return self._goals.ready()

    def destroy(self) -> None:
        self._goals.destroy()
