"""What a configured node has besides its inputs: outputs to the robot, services, the robot's description."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
from rclpy.duration import Duration
from rclpy.qos import QoSProfile
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64, String
from std_srvs.srv import Empty, SetBool, Trigger
from trajectory_msgs.msg import JointTrajectory

from wam_policy_ros.contract.errors import ConfigError

from .checks import other_publishers
from .commands import Answer, Commands
from .control import ControlLoop
from .gripper import Command, GripperSwitch, Outputs
from .joints import JointMap
from .lifecycle import steady_clock
from .messages import Trajectory, ns_to_stamp, trajectory_to_msg
from .outputs import JointCommandStream, TrajectoryOutput
from .parameters import NodeParameters
from .qos import latched_qos, sensor_qos

ACKED_S = 0.1
"""How long a publisher of trajectories waits for its last one, a hold, to arrive before it is destroyed."""

_REMEDY = "remedy: start the controller, or remap its name"

_GRIPPER_NAMES = {
    "trajectory": "gripper_trajectory",
    "action": "gripper_cmd",
    "parallel_action": "gripper_cmd",
    "float64": "gripper_command",
}

Guard = Callable[..., Any]


class RobotOutputs:
    """Publishers and action clients towards one robot. Callable with a trajectory of all commanded joints.

    Args:
        node: a lifecycle node.
        params, joints: which and for what.
        entities: what has to be destroyed is put here.

    Attributes:
        masters: that others publish trajectories for the same robot; empty when nobody does.

    Raises:
        MissingDependency: an action is wanted and control_msgs is not installed.
        ConfigError: another number of gripper outputs than grippers.
    """

    def __init__(self, node: Any, params: NodeParameters, joints: JointMap, entities: ExitStack) -> None:
        self._node, self._params, self._joints, self._entities = node, params, joints, entities
        self._stream: JointCommandStream | None = None
        self._takers: list[tuple[Callable[[], bool], str]] = []
        self._arm_topic: str | None = None
        self.masters = ""
        self._control: ControlLoop | None = None
        whole = params.gripper_mode == "in_trajectory"
        plan = node.create_publisher(JointTrajectory, "~/plan", sensor_qos(1))
        entities.callback(node.destroy_publisher, plan)
        self._outputs = Outputs(
            grippers=joints.grippers,
            arm=self._arm(joints.command_names if whole else [n for n, g in self._named() if not g]),
            whole=whole,
            watch=lambda trajectory: plan.publish(trajectory_to_msg(trajectory, absolute=True)),
        )
        self._grippers()

    def __call__(self, trajectory: Trajectory) -> None:
        self._outputs(trajectory)

    def serve(self, control: ControlLoop, output: TrajectoryOutput) -> None:
        """Whom to tell of rejected goals, and whose plan is streamed."""
        self._control = control
        if self._params.output_wait_for_controller:
            control.controller = self.missing
        if self._params.output_mode == "joint_command":
            self._stream = JointCommandStream(lambda: output.plan, self._send_joint_command)

    def missing(self) -> str:
        """Who does not take what is sent, or who else sends; empty when all is well."""
        if self._params.output_exclusive and self.masters:
            return f"{self.masters}; remedy: stop the other one, or set output.exclusive: false"
        return next((text for takes, text in self._takers if not takes()), "")

    def look_for_masters(self) -> None:
        """Who else publishes trajectories; at activation, and once a second."""
        if self._arm_topic is None:
            return
        others = other_publishers(self._node, self._arm_topic)
        text = f"{', '.join(others)} can publish on {self._arm_topic}, too: two masters of one robot" if others else ""
        if text and text != self.masters and self._control is not None:
            self._control.warn(text)
        self.masters = text

    def on_tick(self, now_ns: int) -> None:
        """At every control tick, after the loop's."""
        self._outputs.on_tick(now_ns)
        if self._stream is not None:
            self._stream.on_tick(now_ns)

    def _rejected(self, what: str) -> None:
        if self._control is not None:
            self._control.controller_rejected(what)

    def _accepted(self) -> None:
        if self._control is not None:
            self._control.controller_accepted()

    def _named(self) -> list[tuple[str, bool]]:
        return list(zip(self._joints.command_names, self._joints.grippers, strict=True))

    def _publisher(self, kind: Any, topic: str) -> Any:
        publisher = self._node.create_lifecycle_publisher(kind, topic, QoSProfile(depth=1))
        self._entities.callback(self._node.destroy_lifecycle_publisher, publisher)
        self._entities.callback(publisher.wait_for_all_acked, Duration(seconds=ACKED_S))
        shown = self._node.resolve_topic_name(topic)
        self._takers.append((lambda: publisher.get_subscription_count() > 0, f"nobody subscribes {shown}; {_REMEDY}"))
        return publisher

    def _trajectories(self, topic: str) -> Callable[[Trajectory], Command]:
        publisher, absolute = self._publisher(JointTrajectory, topic), self._params.control_stamp == "absolute"

        def encode(trajectory: Trajectory) -> Command:
            msg = trajectory_to_msg(trajectory, absolute=absolute)
            return lambda: publisher.publish(msg)

        return encode

    def _arm(self, names: Any) -> Callable[[Trajectory], Command]:
        mode = self._params.output_mode
        if mode == "topic":
            self._arm_topic = self._node.resolve_topic_name(self._params.output_topic)
            return self._trajectories(self._params.output_topic)
        if mode == "action":
            from .action_output import FollowTrajectory

            client = FollowTrajectory(
                self._node,
                self._params.output_action,
                absolute=self._params.control_stamp == "absolute",
                rejected=self._rejected,
                accepted=self._accepted,
            )
            self._entities.callback(client.destroy)
            self._takers.append((client.ready, f"no action server {self._params.output_action}; {_REMEDY}"))
            return client.prepare
        self._command_names = list(names)
        self._columns = [self._joints.command_names.index(n) for n in names]
        self._arm_topic = self._node.resolve_topic_name(self._params.output_joint_command)
        self._joint_command = self._publisher(JointState, self._params.output_joint_command)
        return lambda trajectory: lambda: None  # the stream sends what the plan says at each tick

    def _send_joint_command(self, positions: npt.NDArray[np.float64], velocities: npt.NDArray[np.float64]) -> None:
        msg = JointState(name=self._command_names, position=positions[self._columns].tolist())
        msg.velocity = velocities[self._columns].tolist()
        msg.header.stamp = ns_to_stamp(self._node.get_clock().now().nanoseconds)
        self._joint_command.publish(msg)

    def _grippers(self) -> None:
        p, mode = self._params, self._params.gripper_mode
        count = int(self._joints.grippers.sum())
        if mode in ("in_trajectory", "none") or not count:
            return
        names = p.gripper_outputs or (_GRIPPER_NAMES[mode],) * (count == 1)
        if len(names) != count:
            raise ConfigError(
                "gripper.outputs does not fit the robot", got=list(names), expected=f"{count} names, one per gripper"
            )
        if mode == "trajectory":
            self._outputs.gripper_trajectories = [self._trajectories(n) for n in names]
            return
        ends = (self._joints.gripper_open, self._joints.gripper_closed)
        joints = [n for n, is_gripper in self._named() if is_gripper]
        for name, joint in zip(names, joints, strict=True):
            self._outputs.switches.append(
                GripperSwitch(
                    self._single(mode, name, joint),
                    ends=ends,
                    least=p.gripper_hysteresis * abs(ends[1] - ends[0]),
                    min_interval_s=p.gripper_min_interval_s,
                )
            )

    def _single(self, mode: str, name: str, joint: str) -> Callable[[float], None]:
        if mode == "float64":
            publisher = self._publisher(Float64, name)
            return lambda position: publisher.publish(Float64(data=position))
        from .action_output import Gripper

        gripper = Gripper(
            self._node,
            name,
            joint,
            parallel=mode == "parallel_action",
            max_effort=self._params.gripper_max_effort,
            rejected=self._rejected,
        )
        self._entities.callback(gripper.destroy)
        self._takers.append((gripper.ready, f"no action server {name}; {_REMEDY}"))
        return gripper.send


def serve(node: Any, params: NodeParameters, control: ControlLoop, entities: ExitStack, guard: Guard) -> None:
    """The services of a configured node, and the client of a simulator's.

    Args:
        guard: calls a function and lets no exception through.
    """
    commands = Commands(control)
    if params.sim_reset_service:
        commands = Commands(control, SimulatorReset(node, params, entities, guard, lambda: commands).call)

    def answer(response: Any, result: Answer | None) -> Any:
        response.success, response.message = result or (False, "defect in the node, see the log")
        return response

    def offer(kind: Any, name: str, call: Callable[[Any], Answer]) -> None:
        service = node.create_service(kind, name, lambda request, response: answer(response, guard(call, request)))
        entities.callback(node.destroy_service, service)

    offer(SetBool, "~/estop", lambda request: commands.estop(request.data))
    offer(SetBool, "~/hold", lambda request: commands.hold(request.data))
    offer(Trigger, "~/start", lambda request: commands.start())
    offer(Trigger, "~/stop", lambda request: commands.stop())
    offer(Trigger, "~/home", lambda request: commands.home())
    offer(Trigger, "~/reset", lambda request: commands.reset())


class SimulatorReset:
    """Asks a simulator to start over, and waits no longer than ``sim_reset.timeout_s``."""

    def __init__(
        self, node: Any, params: NodeParameters, entities: ExitStack, guard: Guard, commands: Callable[[], Commands]
    ) -> None:
        self._node, self._guard, self._commands = node, guard, commands
        self._name, self._timeout_s = params.sim_reset_service, params.sim_reset_timeout_s
        kind = Trigger if params.sim_reset_type == "trigger" else Empty
        self._request = kind.Request
        self._client = node.create_client(kind, self._name)
        entities.callback(node.destroy_client, self._client)
        self._future: Any = None
        self._timer: Any = None
        entities.callback(self._cancel)

    def call(self) -> None:
        """Returns at once; the answer goes to ``Commands.simulator_was_reset``."""
        self._cancel()
        if not self._client.service_is_ready():
            self._commands().simulator_was_reset(f"nobody offers {self._name}")
            return
        self._timer = self._node.create_timer(
            self._timeout_s,
            lambda: self._guard(self._done, None, f"no answer from {self._name} within {self._timeout_s} s"),
            clock=steady_clock(),
        )
        self._future = self._client.call_async(self._request())
        self._future.add_done_callback(lambda future: self._guard(self._done, future, ""))

    def _done(self, future: Any, problem: str) -> None:
        if future is not None and future is not self._future:
            return  # an answer to a call that was given up
        self._cancel()
        if future is not None:
            response = future.result()
            if response is not None and not getattr(response, "success", True):
                problem = f"{self._name} says: {response.message}"
        self._commands().simulator_was_reset(problem)

    def _cancel(self) -> None:
        self._future = None
        if self._timer is not None:
            self._node.destroy_timer(self._timer)
            self._timer = None


def watch_description(
    node: Any, params: NodeParameters, control: ControlLoop, entities: ExitStack, guard: Guard
) -> None:
    """Take the robot's URDF from the topic robot_description, unless the parameter gives one."""
    if params.safety_urdf:
        return
    topic = node.resolve_topic_name("robot_description")

    def take(text: str) -> None:
        if control.active and (control.description is None or control.description[0] != text):
            control.warn(f"{topic} has changed: its limits count from the next activation")
        control.description = text, topic

    subscription = node.create_subscription(
        String, "robot_description", lambda msg: guard(take, msg.data), latched_qos()
    )
    entities.callback(node.destroy_subscription, subscription)
