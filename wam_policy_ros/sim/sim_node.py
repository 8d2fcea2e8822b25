"""``wam_sim``: the simulated robot cell as a ROS 2 node. To a policy node it is a robot: only topics."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import rclpy
from builtin_interfaces.msg import Time
from rcl_interfaces.msg import ParameterDescriptor, SetParametersResult
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile
from rclpy.signals import SignalHandlerOptions
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import CameraInfo, Image, JointState
from std_msgs.msg import Bool, Float64, String
from std_srvs.srv import Trigger
from trajectory_msgs.msg import JointTrajectory

from wam_policy_ros.contract.embodiments import DROID
from wam_policy_ros.contract.errors import ConfigError, WamError
from wam_policy_ros.ros.main import StopSignals, find_problem
from wam_policy_ros.ros.messages import ns_to_stamp, rgb_to_image
from wam_policy_ros.ros.params_files import split_arguments
from wam_policy_ros.ros.qos import latched_qos, sensor_qos
from wam_policy_ros.ros.trajectory_faults import trajectory_faults

from . import cameras
from .drive import ARM, FINGERS, GRIPPER, Drive
from .layout import Variation
from .runner import DT_NS, Asked, Hand, Pacing, Runner, Status
from .tasks import find_task
from .world import Frame, World

EPISODE = ("seed", "task", "instruction", "max_ticks")
"""Parameters that a reset reads; the others are read once, at the start."""

# name -> default, what it is
PARAMETERS: dict[str, tuple[Any, str]] = {
    "seed": (0, "of the scene that the next reset gives; -1: the one after the last"),
    "task": ("lift_mug", "name or instruction of what counts as success from the next reset on; empty: nothing does"),
    "instruction": ("", "said from the next reset on, whatever the task is; empty: the task's first wording"),
    "max_ticks": (0, "an episode is over after so many ticks or with its success, and what is counted stays; 0: never"),
    "lockstep": (True, "a tick waits for a command, so that a slow policy does not change what happens"),
    "lockstep_ticks": (8, "a trajectory is good for so many ticks: control.execute_steps of the policy node"),
    "real_time_factor": (1.0, "simulated seconds per second, at most; 0: as fast as it can"),
    "idle_s": (1.0, "lock-step without anything under way: a frame every so often, the world stands still [s]"),
    "patience_s": (60.0, "lock-step in mid-trajectory without a new one: run it to its end after so long [s]"),
    "render": (True, "publish the cameras; needs OpenGL"),
    "width": (cameras.SIZE[0], "of the pictures [pixels]"),
    "height": (cameras.SIZE[1], "of the pictures [pixels]"),
    "variation": (True, "a seed changes light, colours, cameras and the arm's start, too; false: only poses"),
    "shadows": (False, "soft shadows; several times slower"),
    "reliable": (True, "offer the pictures reliably, which also suits best-effort subscribers; false: best effort"),
}
TRAJECTORY = "panda_arm_controller/joint_trajectory"


class SimNode(Node):
    """See docs/simulator.md for topics, services and parameters.

    Args:
        kwargs: for ``rclpy.node.Node``.

    Raises:
        WamError: a parameter does not fit, or the world cannot be made.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__("wam_sim", **kwargs)
        for name, (default, text) in PARAMETERS.items():
            fixed = name not in EPISODE
            number = isinstance(default, float)
            descriptor = ParameterDescriptor(description=text, read_only=fixed, dynamic_typing=number)
            self.declare_parameter(name, default, descriptor)
        self._size = (int(self._value("width")), int(self._value("height")))
        self._infos = {c.name: camera_info(c.name, c.topic, self._size) for c in DROID.cameras}
        self._success: tuple[int, bool] | None = None
        self._told = (-1, False, False)  # episode, success, over
        self._instruction_said = ""
        self._seed = -1
        self._publish_on()
        pacing = Pacing(
            lockstep=bool(self._value("lockstep")),
            real_time_factor=self._positive("real_time_factor", zero=True),
            idle_s=self._positive("idle_s"),
            patience_s=self._positive("patience_s"),
        )
        ticks = int(self._positive("lockstep_ticks"))
        self.runner = Runner(
            self._make_world,
            lambda world: Drive(
                finger_open_m=world.arm.finger_open, dt_ns=DT_NS, ticks=ticks, faults=trajectory_faults
            ),
            self,
            pacing,
            warn=self._warn,
        )
        self.runner.start(self._asked())
        self.create_subscription(
            JointTrajectory, "panda_arm_controller/joint_trajectory", self.runner.on_trajectory, 10
        )
        self.create_subscription(JointState, "joint_command", self.runner.on_joint_command, 10)
        self.create_subscription(Float64, "panda_gripper/command", lambda m: self.runner.on_gripper(m.data), 10)
        self.create_service(Trigger, "sim/reset", self._on_reset)
        self.create_service(Trigger, "sim/step", self._on_step)
        self.create_service(Trigger, "sim/executed", self._on_executed)
        self.add_on_set_parameters_callback(self._on_set)

    def close(self) -> bool:
        """End the world's thread, before the node is destroyed. True when it has ended."""
        return self.runner.close()

    # -- Outlet: in the world's thread ----------------------------------------------------------------------------

    def clock(self, stamp_ns: int) -> None:
        self._clock_topic.publish(Clock(clock=ns_to_stamp(stamp_ns)))

    def joints(self, frame: Frame, hand: Hand, stamp_ns: int) -> None:
        msg = JointState(name=[*ARM, *FINGERS, GRIPPER])
        msg.header.stamp = ns_to_stamp(stamp_ns)
        msg.position = [*frame.joint_position.tolist(), *hand.positions, frame.gripper_position]
        msg.velocity = [*frame.joint_velocity.tolist(), *hand.velocities, hand.closing]
        self._joints_topic.publish(msg)

    def pictures(self, frame: Frame, stamp_ns: int) -> None:
        stamp: Time = ns_to_stamp(stamp_ns)
        for name, (_, info) in self._cameras.items():
            self._infos[name].header.stamp = stamp
            info.publish(self._infos[name])
        for name, (image, _) in self._cameras.items():
            image.publish(
                rgb_to_image(frame.images[name], stamp_ns=stamp_ns, frame_id=self._infos[name].header.frame_id)
            )

    def status(self, status: Status) -> None:
        done = (status.episode, status.outcome.success)
        if done != self._success:
            self._success = done
            self._success_topic.publish(Bool(data=status.outcome.success))
        instruction = status.asked.said
        if instruction and instruction != self._instruction_said:
            self._instruction_said = instruction
            self._instruction.publish(String(data=instruction))
        self._episode.publish(String(data=describe(status)))
        self._tell(status)

    # -- callbacks: in the executor's thread ----------------------------------------------------------------------

    def _on_reset(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        return self._answer(response, lambda: describe(self.runner.reset(self._asked())))

    def _on_step(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        return self._answer(response, lambda: describe(self.runner.step()))

    def _on_executed(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        def told() -> str:
            episode, rows = self.runner.executed()
            return json.dumps({"episode": episode, "rows": rows.tolist()})

        return self._answer(response, told)

    def _answer(self, response: Trigger.Response, order: Callable[[], str]) -> Trigger.Response:
        try:
            response.success, response.message = True, order()
        except WamError as error:
            response.success, response.message = False, str(error)
        except TimeoutError:
            response.success, response.message = False, "the simulator did not answer in time"
        return response

    def _on_set(self, parameters: list[Parameter]) -> SetParametersResult:
        for parameter in parameters:
            try:
                if parameter.name == "task" and parameter.value:
                    find_task(str(parameter.value))
                if parameter.name == "seed" and int(parameter.value) < -1:
                    raise ConfigError("seed", got=parameter.value, expected="0 or more, or -1")
                if parameter.name == "max_ticks" and int(parameter.value) < 0:
                    raise ConfigError("max_ticks", got=parameter.value, expected="0 or more")
            except WamError as error:
                return SetParametersResult(successful=False, reason=str(error))
        return SetParametersResult(successful=True)

    # -- inside -------------------------------------------------------------------------------------------------

    def _warn(self, line: str) -> None:
        self.get_logger().warning(line)

    def _tell(self, status: Status) -> None:
        """In the log, for people: what a scene is about, and how it went."""
        now = (status.episode, status.outcome.success, status.over)
        if now == self._told:
            return
        (episode, success, _), self._told = self._told, now
        asked, scene = status.asked, f"scene {status.asked.seed}"
        if episode != status.episode:
            said = f", {asked.said!r}" if asked.said else ""
            self.get_logger().info(f"{scene}: {asked.task.name if asked.task else 'no task'}{said}")
        at = f"after {status.tick} ticks ({status.tick * DT_NS * 1e-9:.1f} s)"
        if status.outcome.success:
            if (episode, success) != (status.episode, True):
                self.get_logger().info(f"{scene}: success {at}, {status.highest_m:.2f} m up")
        elif status.over:
            self.get_logger().info(f"{scene}: over {at} without success, {status.highest_m:.2f} m at most")

    def _publish_on(self) -> None:
        """Before the world begins, which publishes from its first moment on."""
        reliable = bool(self._value("reliable"))
        qos = sensor_qos(5, reliable=reliable)
        self._cameras = {
            c.name: (
                self.create_publisher(Image, f"{c.topic}/image_raw", qos),
                self.create_publisher(CameraInfo, f"{c.topic}/camera_info", qos),
            )
            for c in (DROID.cameras if self._value("render") else ())
        }
        self._clock_topic = self.create_publisher(Clock, "/clock", QoSProfile(depth=1))
        self._joints_topic = self.create_publisher(JointState, "joint_states", 10)
        self._success_topic = self.create_publisher(Bool, "sim/success", latched_qos())
        self._episode = self.create_publisher(String, "sim/episode", latched_qos())
        self._instruction = self.create_publisher(String, "sim/instruction", latched_qos())

    def _make_world(self) -> World:
        variation = Variation() if self._value("variation") else Variation.none()
        render, shadows = bool(self._value("render")), bool(self._value("shadows"))
        return World(render=render, size=self._size, variation=variation, shadows=shadows)

    def _value(self, name: str) -> Any:
        return self.get_parameter(name).value

    def _positive(self, name: str, *, zero: bool = False) -> float:
        value = float(self._value(name))
        if not (value > 0.0 or (zero and value == 0.0)):
            raise ConfigError(f"parameter {name}", got=value, expected="0 or more" if zero else "more than 0")
        return value

    def _next_seed(self) -> int:
        wanted = int(self._value("seed"))
        self._seed = self._seed + 1 if wanted == -1 else wanted
        return self._seed

    def _asked(self) -> Asked:
        text = str(self._value("task"))
        task = find_task(text) if text else None
        return Asked(self._next_seed(), task, str(self._value("instruction")), int(self._value("max_ticks")))


def camera_info(name: str, frame_id: str, size: tuple[int, int]) -> CameraInfo:
    """Of one camera: no distortion, as it is mounted before a seed moves it a little."""
    k = cameras.intrinsics(name, size)
    info = CameraInfo(width=size[0], height=size[1], distortion_model="plumb_bob", d=[0.0] * 5)
    info.header.frame_id = frame_id
    info.k, info.r = k.ravel().tolist(), [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    info.p = [*k[0], 0.0, *k[1], 0.0, *k[2], 0.0]
    return info


def describe(status: Status) -> str:
    """JSON of ``sim/episode`` and of the services' answers."""
    outcome, asked = status.outcome, status.asked
    return json.dumps(
        {
            "episode": status.episode,
            "seed": asked.seed,
            "task": asked.task.name if asked.task else "",
            "instruction": asked.said,
            "tick": status.tick,
            "stamp_ns": status.stamp_ns,
            "success": outcome.success,
            "held_ticks": outcome.held_ticks,
            "lifted_m": outcome.lifted_m,
            "highest_m": status.highest_m,
            "moved_m": outcome.moved_m,
            "others_taken": status.taken,
            "limited": [ARM[k] for k in status.limited],
            "idle_ticks": status.idle_ticks,
            "waits": status.waits,
            "rests": status.rests,
            "over": status.over,
            "refused": status.refused,
            "refusal": status.refusal,
        }
    )


HELP = """\
wam_sim: a simulated robot cell (Franka Panda, table, three cameras) as a ROS 2 node; see docs/simulator.md.

usage: wam_sim --ros-args [--params-file FILE] [-p NAME:=VALUE]... [-r FROM:=TO]...

Parameters (default):
"""


def help_text() -> str:
    """What ``--help`` prints."""
    return HELP + "\n".join(f"  {name} ({default!r}): {text}" for name, (default, text) in PARAMETERS.items())


def run(node: SimNode, stop: StopSignals) -> int:
    """Spin until SIGINT, SIGTERM, or the world's thread has ended by itself (exit code 1)."""
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    try:
        while not stop.received and node.runner.failure is None and rclpy.ok():
            executor.spin_once(timeout_sec=0.1)
    except ExternalShutdownException:
        pass
    finally:
        stop.ignore()
        node.close()
        executor.shutdown(1.0)
    if node.runner.failure is not None:
        node.get_logger().fatal(f"the world has ended: {node.runner.failure}")
        return 1
    return 0


def main(args: Sequence[str] | None = None) -> int:
    """Entry point of ``wam_sim``."""
    argv = list(sys.argv if args is None else args)
    plain, _ = split_arguments(argv[1:])
    if {"-h", "--help"} & set(plain):
        print(help_text())
        return 0
    if plain:
        print(f"wam_sim: unknown argument {plain[0]!r}; options are ROS parameters, see --help", file=sys.stderr)
        return 2
    if (problem := find_problem()) is not None:
        print(f"wam_sim: {problem}", file=sys.stderr)
        return 2
    stop = StopSignals()
    rclpy.init(args=argv, signal_handler_options=SignalHandlerOptions.NO)
    try:
        return run(SimNode(), stop)
    except WamError as error:
        print(f"wam_sim: {error}", file=sys.stderr)
        return 2
    finally:
        rclpy.try_shutdown()
