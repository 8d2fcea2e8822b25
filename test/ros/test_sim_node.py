"""The simulator as a node, over DDS: what it publishes, what it follows, and time."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip("mujoco", reason="mujoco is not installed: pip install 'wam_policy_ros[sim]'")

from rclpy.node import Node
from rclpy.parameter import Parameter
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import CameraInfo, Image, JointState
from std_msgs.msg import Bool, Float64, String
from std_srvs.srv import Trigger
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from wam_policy_ros.contract.executed import carried
from wam_policy_ros.contract.fakes import ScriptedPolicy
from wam_policy_ros.model.packaged import packaged
from wam_policy_ros.ros.messages import image_to_rgb, ns_to_stamp, stamp_to_ns
from wam_policy_ros.ros.parameters import NodeParameters
from wam_policy_ros.ros.policy_node import PolicyNode
from wam_policy_ros.ros.qos import latched_qos, sensor_qos
from wam_policy_ros.sim import cameras
from wam_policy_ros.sim.drive import ARM, FINGERS, GRIPPER
from wam_policy_ros.sim.errors import RenderingUnavailable
from wam_policy_ros.sim.expert import Expert
from wam_policy_ros.sim.runner import DT_NS, GAP_NS
from wam_policy_ros.sim.sim_node import PARAMETERS, SimNode
from wam_policy_ros.sim.world import World

from .conftest import wait_for
from .harness import CAMERAS, SPEC, Spinner
from .test_parameters import CONFIG, load

pytestmark = pytest.mark.usefixtures("ros")
_number = itertools.count()
FAST = {"real_time_factor": 0.0, "render": False}


class Driver(Node):
    """Hears everything, says what it is told."""

    def __init__(self, namespace: str) -> None:
        super().__init__("driver", namespace=namespace)
        self.states: list[JointState] = []
        self.pictures: dict[str, dict[int, Image]] = {c: {} for c in CAMERAS}
        self.infos: dict[str, CameraInfo] = {}
        self.clocks: list[int] = []
        self.successes: list[bool] = []
        self.episodes: list[dict[str, Any]] = []
        self.create_subscription(JointState, "joint_states", self.states.append, 100)
        for c in SPEC.cameras:
            self.create_subscription(
                Image, f"{c.topic}/image_raw", self._on_image(c.name), sensor_qos(5, reliable=True)
            )
            self.create_subscription(
                CameraInfo, f"{c.topic}/camera_info", lambda m, name=c.name: self.infos.update({name: m}), sensor_qos(5)
            )
        self.create_subscription(Clock, "/clock", lambda m: self.clocks.append(stamp_to_ns(m.clock)), 100)
        self.create_subscription(Bool, "sim/success", lambda m: self.successes.append(m.data), latched_qos())
        self.create_subscription(
            String, "sim/episode", lambda m: self.episodes.append(json.loads(m.data)), latched_qos()
        )
        self.trajectories = self.create_publisher(JointTrajectory, "panda_arm_controller/joint_trajectory", 10)
        self.commands = self.create_publisher(JointState, "joint_command", 10)
        self.gripper = self.create_publisher(Float64, "panda_gripper/command", 10)
        self.askers = {name: self.create_client(Trigger, f"sim/{name}") for name in ("reset", "step")}

    def _on_image(self, name: str) -> Callable[[Image], None]:
        return lambda msg: self.pictures[name].update({stamp_to_ns(msg.header.stamp): msg})

    @property
    def episode(self) -> dict[str, Any]:
        return self.episodes[-1] if self.episodes else {}

    def send(self, rows: np.ndarray, stamp_ns: int = 0) -> None:
        """``[N, 8]``, one row per tick."""
        msg = JointTrajectory(joint_names=[*ARM, GRIPPER])
        msg.header.stamp = ns_to_stamp(stamp_ns)
        for k, row in enumerate(rows):
            after = ns_to_stamp((k + 1) * DT_NS)
            point = JointTrajectoryPoint(positions=row.tolist())
            point.time_from_start.sec, point.time_from_start.nanosec = after.sec, after.nanosec
            msg.points.append(point)
        self.trajectories.publish(msg)

    def call(self, name: str) -> Trigger.Response:
        assert self.askers[name].wait_for_service(10)
        future = self.askers[name].call_async(Trigger.Request())
        wait_for(future.done, what=name)
        return future.result()

    def joints(self, stamp_ns: int) -> np.ndarray:
        """``[8]`` of a frame that has come or comes: joints and gripper."""
        found: list[JointState] = []

        def look() -> bool:
            found[:] = [m for m in list(self.states) if stamp_to_ns(m.header.stamp) == stamp_ns]
            return bool(found)

        wait_for(look, what=f"joint states of {stamp_ns}")
        by_name = dict(zip(found[0].name, found[0].position, strict=True))
        return np.array([by_name[n] for n in (*ARM, GRIPPER)])

    def after(self, tick: int) -> int:
        """Stamp of the frame after so many ticks of the world in this episode."""
        wait_for(lambda: self.episode.get("tick") == tick, what=f"tick {tick}, last {self.episode}")
        return int(self.episode["stamp_ns"])


class Cell:
    way: np.ndarray  # for tests that send one

    def __init__(self, **params: Any) -> None:
        self.namespace = f"/sim{next(_number)}"
        overrides = [Parameter(k, value=v) for k, v in params.items()]
        self.node = SimNode(namespace=self.namespace, parameter_overrides=overrides)
        self.driver = Driver(self.namespace)
        self.spinners = [Spinner(self.node), Spinner(self.driver)]
        d = self.driver
        for publisher in (d.trajectories, d.commands, d.gripper):
            wait_for(publisher.get_subscription_count, what=publisher.topic_name)
        wait_for(lambda: d.states and d.episodes, what="the first frame")

    def reset(self, **params: Any) -> dict[str, Any]:
        """The simulator's answer."""
        results = self.node.set_parameters([Parameter(k, value=v) for k, v in params.items()])
        assert all(r.successful for r in results), results
        answer = self.driver.call("reset")
        assert answer.success, answer.message
        status: dict[str, Any] = json.loads(answer.message)
        wait_for(lambda: self.driver.episode.get("episode") == status["episode"] and self.driver.episode["idle_ticks"])
        return status

    def close(self) -> None:
        assert self.node.close(), "the world's thread ends"
        assert self.node.runner.failure is None
        for spinner in self.spinners:
            spinner.close()


@pytest.fixture
def make(ros: None) -> Iterator[Callable[..., Cell]]:
    cells: list[Cell] = []

    def start(**params: Any) -> Cell:
        try:
            cells.append(Cell(**params))
        except RenderingUnavailable as error:
            pytest.skip(str(error))
        return cells[-1]

    yield start
    for cell in cells:
        cell.close()


def test_frames_are_those_of_the_world_with_one_stamp(make: Callable[..., Cell]) -> None:
    cell = make(seed=3, idle_s=0.2)
    driver = cell.driver
    complete = lambda: set.intersection(*(set(p) for p in driver.pictures.values()))  # noqa: E731
    stamp_ns = sorted(wait_for(complete, what="three pictures of one stamp"))[0]
    world = World()
    frame = world.reset(3, "lift_mug")
    for name in CAMERAS:
        msg = driver.pictures[name][stamp_ns]
        assert (msg.encoding, msg.width, msg.height) == ("rgb8", 320, 180)
        np.testing.assert_array_equal(image_to_rgb(msg), frame.images[name])
        info = wait_for(lambda name=name: driver.infos.get(name), what="camera_info")
        np.testing.assert_array_equal(info.k.reshape(3, 3), cameras.intrinsics(name))
        assert info.header.frame_id == msg.header.frame_id
    assert driver.joints(stamp_ns).tolist() == [*frame.joint_position.tolist(), frame.gripper_position]
    assert list(driver.states[-1].name) == [*ARM, *FINGERS, GRIPPER]
    wait_for(lambda: stamp_ns in driver.clocks or max(driver.clocks, default=0) > stamp_ns, what="/clock")
    rows = world.target_rad + 0.01 * np.arange(1, 5)[:, None]
    start_ns, rows8 = driver.episode["stamp_ns"], np.c_[rows, [0.0, 0.3, 0.6, 1.0]]
    driver.send(rows8)
    seen = [world.step(row[:7], row[7]) for row in carried(rows8)]
    last_ns = driver.after(4)
    assert last_ns >= start_ns + 4 * DT_NS
    for name in CAMERAS:
        wait_for(lambda name=name: last_ns in driver.pictures[name], what="the last picture")
        np.testing.assert_array_equal(image_to_rgb(driver.pictures[name][last_ns]), seen[-1].images[name])
    world.close()


def test_a_trajectory_is_followed_as_the_world_steps_bit_for_bit(make: Callable[..., Cell]) -> None:
    cell = make(**FAST, seed=1)
    world = World(render=False)
    world.reset(1)
    for chunk in range(3):  # the second and third replace the rest of the one before
        rows = world.target_rad + 0.02 * np.sin(np.arange(1, 25))[:, None] * np.ones(7)
        cell.driver.send(np.c_[rows, np.full(24, 0.2 * chunk)])
        frames = [world.step(row, float(np.float32(0.2 * chunk))) for row in carried(rows[:8])]
        end_ns = cell.driver.after(8 * (chunk + 1))
        for k, frame in enumerate(frames):
            got = cell.driver.joints(end_ns - (7 - k) * DT_NS)
            assert got.tolist() == [*frame.joint_position.tolist(), frame.gripper_position]
    wait_for(lambda: cell.driver.episode["waits"], what="eight ticks per trajectory, then it waits")
    time.sleep(0.2)
    assert cell.driver.episode["tick"] == 24


def test_joint_commands_one_per_tick_the_gripper_and_steps(make: Callable[..., Cell]) -> None:
    cell = make(**FAST, seed=1)
    world = World(render=False)
    world.reset(1)
    target = world.target_rad
    for k in range(3):
        target[2] += 0.03
        cell.driver.commands.publish(JointState(name=[ARM[2]], position=[float(target[2])]))
        frame = world.step(carried(target), 0.0)
        assert cell.driver.joints(cell.driver.after(k + 1))[:7].tolist() == frame.joint_position.tolist()
    cell.driver.gripper.publish(Float64(data=1.0))
    time.sleep(0.2)
    answer = cell.driver.call("step")
    assert answer.success and json.loads(answer.message)["tick"] == 4
    frame = world.step(carried(target), 1.0)
    assert cell.driver.joints(cell.driver.after(4))[7] == frame.gripper_position > 0.0


def test_a_refused_message_is_told_with_its_reason(make: Callable[..., Cell]) -> None:
    cell = make(**FAST)
    cell.driver.send(np.full((3, 8), np.nan))
    cell.driver.commands.publish(JointState(name=["elbow"], position=[0.0]))
    cell.driver.gripper.publish(Float64(data=2.0))
    time.sleep(0.1)
    answer = json.loads(cell.driver.call("step").message)
    wait_for(lambda: json.loads(cell.driver.call("step").message)["refused"] == 3, what=f"three refusals, {answer}")
    assert cell.node.runner.failure is None


def test_a_reset_gives_the_asked_scene_and_moves_the_clock_on(make: Callable[..., Cell]) -> None:
    cell = make(**FAST, seed=5, task="pick up the red apple")
    assert (cell.driver.episode["seed"], cell.driver.episode["task"]) == (5, "lift_red_apple")
    before_ns = cell.driver.episode["stamp_ns"]
    status = cell.reset(seed=7, task="lift_mug")
    assert (status["seed"], status["task"], status["tick"]) == (7, "lift_mug", 0)
    assert status["stamp_ns"] >= before_ns + GAP_NS
    world = World(render=False)
    frame = world.reset(7)
    stamp_ns = cell.driver.after(0)
    assert cell.driver.joints(stamp_ns).tolist() == [*frame.joint_position.tolist(), frame.gripper_position]
    assert [cell.reset(seed=-1)["seed"] for _ in range(2)] == [8, 9]
    for name, value in (("task", "lift the elephant"), ("seed", -2), ("lockstep", False), ("width", 64)):
        assert not cell.node.set_parameters([Parameter(name, value=value)])[0].successful


def lift(cell: Cell, seed: int, slow_s: Callable[[], float] = lambda: 0.0) -> list[list[float]]:
    """The expert lifts the mug over topics, looking at a twin of the world. Every joint state of the episode."""
    driver = cell.driver
    cell.reset(seed=seed, task="lift_mug")
    world = World(render=False)
    world.reset(seed, "lift_mug")
    expert, out = Expert(world), []
    while not world.outcome.success and world.observe(images=False).tick < 200:
        time.sleep(slow_s())
        rows = expert.label(world, 8)
        driver.send(rows)
        for row in carried(rows):
            world.step(row[:7], row[7])
        end_ns = driver.after(world.observe(images=False).tick)
        out += [driver.joints(end_ns - (7 - k) * DT_NS).tolist() for k in range(8)]
    assert world.outcome.success
    return out


def test_the_expert_lifts_the_mug_over_topics_and_a_slow_one_does_exactly_the_same(make: Callable[..., Cell]) -> None:
    cell = make(**FAST)
    first = lift(cell, 2)
    wait_for(lambda: cell.driver.successes[-1], what="success is published")
    assert cell.driver.episode["success"] and cell.driver.episode["lifted_m"] > 0.1
    cell.reset(seed=2)
    wait_for(lambda: not cell.driver.successes[-1], what="no success in a new episode")
    delays = itertools.cycle([0.0, 0.15, 0.03])
    assert lift(cell, 2, lambda: next(delays)) == first, "bit for bit"


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_without_lock_step_time_goes_on_by_itself_at_its_pace(make: Callable[..., Cell], factor: float) -> None:
    cell = make(lockstep=False, real_time_factor=factor, render=False)
    driver = cell.driver
    wait_for(lambda: len(driver.clocks) > 5, what="/clock")
    start_s, start_ns = time.monotonic(), driver.clocks[-1]
    time.sleep(1.0)
    ratio = (driver.clocks[-1] - start_ns) * 1e-9 / (time.monotonic() - start_s)
    assert 0.4 * factor < ratio < 1.15 * factor
    tick = driver.episode["tick"]
    driver.send(np.c_[np.tile(World(render=False).reset(0).joint_position, (30, 1)), np.zeros(30)])
    wait_for(lambda: driver.episode["tick"] > tick + 40, what="it does not wait for a command")


def test_lock_step_gives_up_a_trajectory_that_nobody_replaces(make: Callable[..., Cell]) -> None:
    cell = make(**FAST, patience_s=0.3)
    cell.driver.send(np.c_[np.tile(World(render=False).reset(0).joint_position, (24, 1)), np.zeros(24)])
    cell.driver.after(24)


POLICY: dict[str, Any] = {
    **load("sim_demo.yaml"),
    "backend": "hold",
    "checkpoint": "",
    "instruction": "lift the mug",
    "safety.executor_stall_s": 5.0,
}


def test_the_demo_s_file_sets_what_exists() -> None:
    given = yaml.safe_load((CONFIG / "sim_demo.yaml").read_text())["/**/wam_sim"]["ros__parameters"]
    for name, value in given.items():
        if name != "use_sim_time":
            assert value == PARAMETERS[name][0] and type(value) is type(PARAMETERS[name][0]), (
                "the defaults, to be changed"
            )
    params = NodeParameters.from_values({**load("dreamzero.yaml"), **load("sim_demo.yaml")})
    assert params.checkpoint in packaged(), "without an argument the demo lifts the mug"
    assert params.control_execute_steps == given["lockstep_ticks"]


def sway(observation: Any, index: int) -> np.ndarray:
    """``[24, 8]``: a motion that depends on the call, the pictures and the state."""
    q = observation.state["joint_position"]
    seen = float(np.mean([f[-1].mean() for f in observation.frames.values()]))
    k = np.arange(1, 25)[:, None]
    arm = q + 0.01 * np.sin(k / 6 + index + seen) * (k / 24)
    return np.c_[arm, np.full(24, (index % 3) / 4)]


def reset_by_the_node(driver: Driver) -> None:
    """The node's own reset starts the simulator over, and the policy goes on there."""
    episode, client = driver.episode["episode"], driver.create_client(Trigger, "wam_policy/reset")
    assert client.wait_for_service(10)
    client.call_async(Trigger.Request())
    wait_for(lambda: driver.episode["episode"] > episode and driver.episode["tick"] >= 8, 30.0, "reset")


def test_the_policy_node_drives_it_and_its_latency_changes_nothing(make: Callable[..., Cell]) -> None:
    cell = make(real_time_factor=0.0, idle_s=2.0, seed=4)
    runs = []
    for latency_s in (0.02, 0.2):
        cell.reset(seed=4)
        policy = ScriptedPolicy(sway, latency_s=latency_s)
        overrides = [Parameter(k, value=v) for k, v in POLICY.items() if v != ""]
        node = PolicyNode(
            lambda p, progress, policy=policy: policy, namespace=cell.namespace, parameter_overrides=overrides
        )
        spinner = Spinner(node)
        try:
            wait_for(lambda: cell.driver.episode["tick"] >= 32, 30.0, f"ticks {cell.driver.episode}")
            driver = cell.driver
            zero_ns = driver.episode["stamp_ns"] - driver.episode["tick"] * DT_NS
            runs.append([driver.joints(zero_ns + k * DT_NS).tolist() for k in range(33)])
            if len(runs) == 2:
                reset_by_the_node(driver)
        finally:
            spinner.call(partial(node.close, 5.0))
            spinner.close()
    assert np.ptp([r[0] for r in runs[0]]) > 0.005, "it moves"
    assert runs[0] == runs[1]
