from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from wam_policy_ros.contract.errors import Cancelled, ConfigError, EngineError
from wam_policy_ros.contract.fakes import HoldPolicy, ScriptedPolicy
from wam_policy_ros.contract.interface import Observation
from wam_policy_ros.ros.checks import other_publishers
from wam_policy_ros.ros.control import ControlLoop
from wam_policy_ros.ros.joint_states import JointStateInput
from wam_policy_ros.ros.lifecycle import Autostart
from wam_policy_ros.ros.messages import stamp_to_ns
from wam_policy_ros.ros.outputs import TrajectoryOutput
from wam_policy_ros.ros.policy_node import PolicyNode
from wam_policy_ros.ros.streams import CameraInput

from .conftest import wait_for
from .harness import CAMERAS, HOME, NAMES, System, positions, times_s

pytestmark = pytest.mark.usefixtures("ros")
Make = Callable[..., System]


@pytest.fixture
def make(ros: None) -> Iterator[Make]:
    systems: list[System] = []

    def start(policy: Any, **params: Any) -> System:
        systems.append(System(policy, **params))
        return systems[-1]

    yield start
    for system in systems:
        system.close()
    assert not [t.name for t in threading.enumerate() if t.name == "wam_policy_owner"]


def ramp(observation: Observation, step: int) -> np.ndarray:
    """From the observed state, joint 1 at 0.3 rad/s; the gripper closes beyond its end."""
    rows = np.tile(np.concatenate(list(observation.state.values())), (24, 1))
    rows[:, 0] += 0.02 * np.arange(1, 25)
    rows[:, 7] = 1.2
    return rows


def test_cameras_and_shuffled_joints_become_the_right_trajectory(make: Make) -> None:
    policy = ScriptedPolicy(ramp, record=True)
    system = make(policy)
    plan = wait_for(system.robot.plans, what="a trajectory")[0]
    assert list(plan.joint_names) == NAMES and stamp_to_ns(plan.header.stamp) == 0
    want = np.tile(HOME, (24, 1))
    want[:, 0] += 0.02 * np.arange(1, 25)
    want[:, 7] = 0.8  # clipped to closed, then in joint units
    np.testing.assert_allclose(positions(plan), want, atol=1e-9)
    np.testing.assert_allclose(times_s(plan), np.arange(1, 25) / 15, atol=1e-9)
    speeds = np.array([p.velocities for p in plan.points])
    np.testing.assert_allclose(speeds[:-1, 0], 0.3, atol=1e-9)
    np.testing.assert_array_equal(speeds[-1], 0.0)
    seen = policy.sessions[1].seen[0]
    np.testing.assert_allclose(seen.state["gripper_position"], [0.25])
    assert seen.prompt == "stir the pot" and seen.frames[CAMERAS[0]].shape == (1, 180, 320, 3)
    assert seen.session_start_ns <= seen.stamp_ns  # type: ignore[operator]


def test_later_chunks_skip_what_has_passed_and_the_policy_sees_the_schedule(make: Make) -> None:
    policy = ScriptedPolicy(ramp, latency_s=0.1, record=True)
    system = make(policy)
    wait_for(lambda: len(system.robot.plans()) >= 6, 15, "six chunks")
    for plan in system.robot.plans()[1:6]:
        assert 18 <= len(plan.points) <= 23, "100 ms and the age of the images"
        assert times_s(plan)[0] > 0.03
    # Each chunk takes over when eight steps have passed since the observation of the one before, give or take a tick.
    plans = [(t, m) for t, m in system.robot.trajectories if len(m.points) > 1][1:6]
    origins = [t + times_s(m)[0] - (25 - len(m.points)) / 15 for t, m in plans]
    after_s = [arrival - origin for origin, (arrival, _) in zip(origins, plans[1:], strict=False)]
    assert 8 / 15 - 0.03 < np.median(after_s) < 8 / 15 + 0.1
    later = policy.sessions[1].seen[5]
    assert later.frames[CAMERAS[0]].shape[0] == 4 and later.frame_stamps_ns is not None
    offsets = (later.frame_stamps_ns[CAMERAS[0]] - later.stamp_ns) * 15e-9
    np.testing.assert_allclose(offsets, [-23, -16, -8, 0], atol=0.5)
    assert len(policy.sessions) == 2, "warm-up and one session"
    assert system.robot.state["substate"] == "running" and not system.robot.holds()


def test_a_dead_camera_holds_by_name_and_resumes_with_a_new_session(make: Make) -> None:
    policy = ScriptedPolicy(ramp, latency_s=0.05)
    system = make(policy, **{"sync.max_age_s": 0.3})
    robot = system.robot
    first = robot.wait_state(substate="running")["session"]
    robot.on[CAMERAS[2]] = False
    state = robot.wait_state(substate="holding")
    assert CAMERAS[2] in state["reason"] and "camera_wrist/image_raw" in state["reason"] and "0.3 s" in state["reason"]
    (hold,) = wait_for(robot.holds)
    assert len(hold.points) == 1 and not any(hold.points[0].velocities)
    count = len(robot.trajectories)
    plan, age_s = robot.trajectories[-2][1], robot.trajectories[-1][0] - robot.trajectories[-2][0]
    due = np.interp(age_s, times_s(plan), positions(plan)[:, 0])
    assert positions(hold)[0, 0] == pytest.approx(due, abs=0.03), "where the plan was, not where it ends"
    time.sleep(0.5)
    assert len(robot.trajectories) == count, "silence after one hold"
    robot.on[CAMERAS[2]] = True
    state = robot.wait_state(substate="running")
    assert state["session"] != first and not state["fault"]
    resumed = wait_for(lambda: robot.plans()[-1] if len(robot.trajectories) > count else None)
    np.testing.assert_allclose(times_s(resumed)[0], 1 / 15, atol=1e-9)


def test_silent_joints_hold_and_are_named(make: Make) -> None:
    system = make(HoldPolicy(), **{"sync.joint_max_age_s": 0.3})
    system.robot.wait_state(substate="running")
    system.robot.on["joints"] = False
    assert "panda_joint1" in system.robot.wait_state(substate="holding")["reason"]


def test_a_camera_that_never_came_is_waited_for_by_name_and_nothing_is_sent(make: Make) -> None:
    system = make(HoldPolicy())
    system.robot.on[CAMERAS[1]] = False
    state = system.robot.wait_state(lifecycle="active")
    if CAMERAS[1] not in state["reason"]:
        wait_for(lambda: CAMERAS[1] in system.robot.state["reason"])
    assert system.robot.state["substate"] == "waiting" and not system.robot.trajectories


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_chunk_that_is_not_finite_is_a_fault_and_nothing_reaches_the_robot(make: Make, bad: float) -> None:
    good = threading.Event()

    def rows(observation: Observation, step: int) -> np.ndarray:
        out = ramp(observation, step)
        if observation.prompt == "stir the pot" and not good.is_set():
            out[5, 3] = bad
        return out

    system = make(ScriptedPolicy(rows))
    state = wait_for(lambda: system.robot.state.get("fault") and system.robot.state)
    assert "not finite" in state["fault"] and state["substate"] == "holding" and state["counters"]["refused"] == 1
    time.sleep(0.3)
    assert not system.robot.trajectories, "latched"
    good.set()
    assert system.reset().success
    system.robot.wait_state(substate="running", fault="")


def test_a_wrong_shape_in_mid_run_holds_once(make: Make) -> None:
    system = make(
        ScriptedPolicy(lambda o, step: ramp(o, step)[:, : 7 if step == 2 and o.prompt == "stir the pot" else 8])
    )
    state = wait_for(lambda: system.robot.state.get("fault") and system.robot.state)
    assert "(24, 7)" in state["fault"] and "(24, 8)" in state["fault"]
    wait_for(system.robot.holds)
    assert len(system.robot.holds()) == 1 and len(system.robot.plans()) == 2


def test_an_engine_error_latches_and_names_the_cause(make: Make) -> None:
    def rows(observation: Observation, step: int) -> np.ndarray:
        if observation.prompt == "stir the pot":
            raise EngineError("out of memory on the device")
        return ramp(observation, step)

    system = make(ScriptedPolicy(rows))
    wait_for(lambda: "out of memory" in system.robot.state.get("fault", ""))
    assert not system.robot.trajectories


def test_compressed_cameras(make: Make) -> None:
    policy = ScriptedPolicy(ramp, record=True)
    system = make(policy, **{"image.compressed": True})
    wait_for(system.robot.plans)
    pixels = [policy.sessions[1].seen[0].frames[c][0, 0, 0, 0] for c in CAMERAS]
    assert np.diff(pixels).tolist() == [1, 1], "each camera its own picture of the same moment"


def test_a_slow_policy_does_not_block_callbacks(make: Make) -> None:
    system = make(ScriptedPolicy(ramp, latency_s=0.6))
    wait_for(system.robot.plans)
    ticks: list[float] = []
    control = system.node.control
    assert control is not None
    on_tick = control.on_tick
    system.on_node(lambda: setattr(control, "on_tick", lambda: (ticks.append(time.monotonic()), on_tick())))
    before = {n: system.robot.state["counters"]["streams"][n]["received"] for n in CAMERAS}
    sent, start = system.robot.sent, time.monotonic()
    wait_for(lambda: len(ticks) > 30)
    received = system.on_node(lambda: {n: control.summary()["counters"]["streams"][n]["received"] for n in CAMERAS})
    gaps = np.diff(ticks)
    assert np.median(gaps) == pytest.approx(1 / 15, abs=0.01) and gaps.max() < 0.3
    for name in CAMERAS:
        # the state may be one second old when the count starts, so only a lower bound
        assert received[name] - before[name] >= (system.robot.sent - sent) - 2, "no frame lost"
    assert time.monotonic() - start < 6
    assert system.robot.state["counters"]["late"] == 0


def test_a_policy_slower_than_its_chunk_executes_whole_chunks_from_a_standstill(make: Make) -> None:
    def rows(observation: Observation, step: int) -> np.ndarray:
        time.sleep(1.5 if observation.prompt == "stir the pot" or step == 1 else 0.0)
        return ramp(observation, step)

    ages = {"sync.max_age_s": 1.0, "sync.joint_max_age_s": 1.0}
    system = make(ScriptedPolicy(rows), **ages, **{"control.mode": "stop_and_go"})
    wait_for(lambda: len(system.robot.plans()) >= 2, 15, "two chunks")
    assert [len(p.points) for p in system.robot.plans()] == [24, 24]
    arrivals = [t for t, m in system.robot.trajectories if len(m.points) > 1]
    assert arrivals[1] - arrivals[0] > 1.6 + 1.5 - 0.1
    assert not system.robot.state["fault"] and not system.robot.holds()


def test_activate_is_refused_while_the_policy_loads(make: Make) -> None:
    loaded = threading.Event()

    def factory(params: Any, progress: Callable[[str, float], None]) -> Any:
        progress("shard 3 of 9", 0.33)
        loaded.wait(10)
        return HoldPolicy()

    system = make(factory, autostart=False)
    system.on_node(system.node.trigger_configure)
    state = system.robot.wait_state(lifecycle="inactive")
    wait_for(lambda: system.robot.loading("message") == "shard 3 of 9")
    system.on_node(system.node.trigger_activate)
    state = wait_for(lambda: "refused" in system.robot.state["refused"] and system.robot.state)
    assert state["lifecycle"] == "inactive" and "shard 3 of 9" in state["refused"]
    loaded.set()
    wait_for(lambda: system.robot.loading("phase") == "ready")
    system.on_node(system.node.trigger_activate)
    system.robot.wait_state(lifecycle="active", refused="")


def test_a_policy_that_cannot_be_loaded_says_why_and_can_be_configured_again(make: Make) -> None:
    def factory(params: Any, progress: Any) -> Any:
        raise FileNotFoundError("no shard 7")

    system = make(factory)
    wait_for(lambda: "no shard 7" in system.robot.state.get("reason", ""))
    assert system.robot.state["lifecycle"] == "inactive"
    system.on_node(system.node.trigger_cleanup)
    system.node._policy_factory = lambda params, progress: HoldPolicy()
    system.on_node(system.node.trigger_configure)
    wait_for(lambda: system.robot.loading("phase") == "ready")


def test_a_new_instruction_drops_what_is_under_way(make: Make) -> None:
    prompts: list[str] = []
    release = threading.Event()

    def rows(observation: Observation, step: int) -> np.ndarray:
        prompts.append(observation.prompt)
        if observation.prompt == "stir the pot":
            release.wait(5)
        return ramp(observation, step)

    system = make(ScriptedPolicy(rows))
    wait_for(lambda: "stir the pot" in prompts)
    system.robot.say("close the lid")
    state = system.robot.wait_state(prompt="close the lid")
    release.set()
    state = system.robot.wait_state(substate="running")
    assert prompts[-1] == "close the lid" and state["counters"]["chunks"] == 1, "the old answer was not used"
    session = state["session"]
    system.robot.say("close the lid")
    wait_for(lambda: len(system.robot.plans()) >= 3)
    assert system.robot.state["session"] == session, "the same instruction again changes nothing"


def test_without_an_instruction_the_node_waits_for_one(make: Make) -> None:
    system = make(HoldPolicy(), instruction="")
    wait_for(lambda: "no instruction" in system.robot.state.get("reason", ""))
    assert not system.robot.trajectories
    system.robot.say("wipe the table")
    system.robot.wait_state(substate="running", prompt="wipe the table")


def test_deactivate_holds_and_then_nothing_is_sent(make: Make) -> None:
    policy = ScriptedPolicy(ramp, latency_s=0.2, record=True)
    system = make(policy)
    wait_for(lambda: len(system.robot.plans()) >= 2)
    system.on_node(system.node.trigger_deactivate)
    system.robot.wait_state(lifecycle="inactive", substate="inactive")
    wait_for(system.robot.holds)
    count = len(system.robot.trajectories)
    time.sleep(0.6)
    assert len(system.robot.trajectories) == count and len(system.robot.holds()) == 1
    wait_for(lambda: all(s.closed for s in policy.sessions), what="no session is left open")
    system.on_node(system.node.trigger_activate)
    system.robot.wait_state(substate="running")


def test_an_answer_that_does_not_come_is_a_fault_and_the_node_stays_in_command(make: Make) -> None:
    stuck = threading.Event()

    def rows(observation: Observation, step: int) -> np.ndarray:
        if observation.prompt == "stir the pot" and step == 1:
            stuck.wait(20)
        return ramp(observation, step)

    system = make(ScriptedPolicy(rows), **{"safety.deadline_s": 0.5})
    state = wait_for(lambda: system.robot.state.get("fault") and system.robot.state)
    assert "no answer from the policy" in state["fault"]
    wait_for(system.robot.holds)
    start = time.monotonic()
    system.on_node(system.node.trigger_deactivate)
    assert time.monotonic() - start < 0.5
    system.on_node(system.node.trigger_cleanup)
    system.robot.wait_state(lifecycle="unconfigured")
    system.on_node(system.node.trigger_configure)
    assert "restart the process" in wait_for(lambda: system.robot.state["refused"])
    assert system.robot.state["lifecycle"] == "unconfigured"
    stuck.set()
    wait_for(lambda: not system.node._old_worker.alive)  # type: ignore[union-attr]
    system.on_node(system.node.trigger_configure)
    system.robot.wait_state(lifecycle="inactive")


def test_a_cancelled_step_is_not_a_fault(make: Make) -> None:
    raised = []

    def rows(observation: Observation, step: int) -> np.ndarray:
        if observation.prompt == "stir the pot" and not raised:
            raised.append(1)
            raise Cancelled("step cancelled")
        return ramp(observation, step)

    system = make(ScriptedPolicy(rows))
    assert system.robot.wait_state(substate="running")["fault"] == "" and raised


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"joints.names": NAMES[:7]}, "gripper_position[1]"),
        ({"control.rate_hz": 30}, "0.0333"),
        ({"cameras.topics": ["a", "b"]}, "wrist_image_left"),
        ({"embodiment": "droid2"}, "oxe_droid"),
        ({"sync.max_age": 1.0}, "sync.max_age_s"),
        ({"joints.topic": "no good"}, "topic name"),
        ({"backend": "engine"}, "exactly one of checkpoint and random_weights"),
    ],
)
def test_a_wrong_configuration_is_refused_with_the_reason(make: Make, params: dict[str, Any], says: str) -> None:
    system = make(HoldPolicy(), **params)
    state = wait_for(lambda: system.robot.state.get("refused") and system.robot.state)
    assert state["lifecycle"] == "unconfigured" and says in state["refused"]


def test_parameters_are_fixed_while_configured_except_the_instruction(make: Make) -> None:
    from rclpy.parameter import Parameter

    system = make(HoldPolicy())
    system.robot.wait_state(substate="running")
    session = system.robot.state["session"]
    change = [Parameter("sync.max_age_s", value=9.0)]
    (result,) = system.on_node(lambda: system.node.set_parameters(change))
    assert not result.successful and "sync.max_age_s" in result.reason
    change = [Parameter("instruction", value="open the drawer")]
    (result,) = system.on_node(lambda: system.node.set_parameters(change))
    assert result.successful
    state = system.robot.wait_state(substate="running", prompt="open the drawer")
    assert state["session"] != session


def test_pictures_are_sent_to_whoever_looks(make: Make) -> None:
    policy = HoldPolicy()
    rendered: list[Any] = []

    def render(chunk: Any) -> np.ndarray:
        rendered.append(chunk)
        return np.full((9, 16, 24, 3), 200, np.uint8)

    policy.render_video = render  # type: ignore[method-assign,assignment]
    system = make(policy)
    wait_for(lambda: len(system.robot.plans()) >= 2)
    assert not rendered, "nobody looks"
    system.on_node(lambda: None)
    system.spinners[1].call(system.robot.watch_pictures)
    wait_for(lambda: len(system.robot.images["predicted_video"]) >= 18)
    observed = wait_for(lambda: system.robot.images["observed"])[0]
    assert (observed.height, observed.width, observed.encoding) == (180, 960, "rgb8")
    stamps = [stamp_to_ns(m.header.stamp) for m in system.robot.images["predicted_video"][:9]]
    assert stamps == sorted(set(stamps)) and len(rendered) >= 2
    assert stamps[8] - stamps[0] == pytest.approx(8 / 9 * 24 / 15 * 1e9, abs=10)


def test_random_weights_are_announced_at_activation(make: Make) -> None:
    from dataclasses import replace

    policy = HoldPolicy()
    policy.spec = replace(policy.spec, random_weights=True)
    system = make(policy, autostart=False)
    system.on_node(system.node.trigger_configure)
    wait_for(lambda: system.robot.loading("phase") == "ready")
    system.on_node(system.node.trigger_activate)
    (line,) = [line for line in system.lines if "RANDOM WEIGHTS" in line]
    assert line == "warning: RANDOM WEIGHTS: not a policy (hold policy, no network)"
    assert system.robot.wait_state(lifecycle="active")["policy"]["random_weights"] is True


def test_random_weights_that_say_so_themselves_are_announced_once(make: Make) -> None:
    from dataclasses import replace

    policy = HoldPolicy()
    policy.spec = replace(policy.spec, random_weights=True, weights="RANDOM WEIGHTS (tiny): not a policy")
    system = make(policy)
    system.robot.wait_state(lifecycle="active")
    assert [line for line in system.lines if "RANDOM" in line] == ["warning: RANDOM WEIGHTS (tiny): not a policy"]


@pytest.mark.parametrize("autostart", [True, False])
@pytest.mark.parametrize("exits", [True, False])
def test_a_policy_that_cannot_be_loaded_is_said_at_once_in_readable_lines(
    make: Make, autostart: bool, exits: bool
) -> None:
    def factory(params: Any, progress: Any) -> Any:
        raise ConfigError("no static schedule with this number of evaluations", got=9)

    system = make(factory, autostart=autostart, exit_on_failure=exits)
    if not autostart:
        system.on_node(system.node.trigger_configure)
    wait_for(lambda: len([line for line in system.lines if line.startswith("error")]) == 1 + autostart)
    errors = [line for line in system.lines if line.startswith("error")]
    text = "no static schedule with this number of evaluations; got: 9"
    assert errors[0] == f"error: the policy cannot be loaded: {text}"
    if autostart:
        assert errors[1].startswith("error: autostart gave up: the policy cannot be loaded")
        assert ("the process ends" in errors[1]) == exits and ("clean up" in errors[1]) == (not exits)
    time.sleep(0.25)  # a few periods of the automatic start
    assert system.node.ended == (autostart and exits)
    assert errors == [line for line in system.lines if line.startswith("error")]


@pytest.mark.parametrize(
    ("params", "what"),
    [({"joints.names": NAMES[:7]}, "configure was refused"), ({"control.execute_steps": 22}, "activate was refused")],
)
def test_a_refused_start_ends_a_node_that_is_told_so(make: Make, params: dict[str, Any], what: str) -> None:
    system = make(HoldPolicy(), exit_on_failure=True, **params)
    wait_for(lambda: system.node.ended)
    assert f"autostart gave up: {what}; the process ends" in system.lines[-1]


def test_exit_on_failure_is_read_only(make: Make) -> None:
    from rclpy.parameter import Parameter

    system = make(HoldPolicy(), autostart=False)
    change = [Parameter("exit_on_failure", value=True)]
    (result,) = system.on_node(lambda: system.node.set_parameters(change))
    assert not result.successful and system.node.get_parameter("exit_on_failure").value is False


def test_the_console_tells_progress_and_the_start(make: Make) -> None:
    more = threading.Event()

    def factory(params: Any, progress: Callable[[str, float], None]) -> Any:
        progress("loading weights", 0.34)
        more.wait(10)
        return HoldPolicy()

    system = make(factory)
    wait_for(lambda: "info: loading: loading weights (34%)" in system.lines)
    more.set()
    system.robot.wait_state(substate="running")
    ready, running = (next(line for line in system.lines if w in line) for w in ("info: ready", "info: running"))
    assert system.lines.index(ready) < system.lines.index(running) and "first chunk of 24 rows" in running


def test_messages_name_topics_in_full(make: Make) -> None:
    system = make(HoldPolicy(), instruction="", **{"joints.topic": "arm/joints"})
    namespace = system.node.get_namespace()
    system.robot.on[CAMERAS[0]] = False
    wait_for(lambda: f"{namespace}/camera_exterior_1/image_raw" in system.robot.state.get("reason", ""))
    reason = system.robot.state["reason"]
    assert f"{namespace}/arm/joints" in reason and f"{namespace}/wam_policy/prompt" in reason
    assert set(system.robot.state["counters"]["streams"]) == {*CAMERAS, "arm/joints"}, "keys as configured"


def test_another_publisher_of_trajectories_is_named_at_activation(make: Make) -> None:
    from trajectory_msgs.msg import JointTrajectory

    system = make(HoldPolicy(), autostart=False)
    system.on_node(system.node.trigger_configure)
    wait_for(lambda: system.robot.loading("phase") == "ready")
    system.on_node(system.node.trigger_activate)
    system.robot.wait_state(lifecycle="active")
    assert not [line for line in system.lines if "two masters" in line], "alone"
    system.on_node(system.node.trigger_deactivate)
    system.robot.create_publisher(JointTrajectory, "joint_trajectory", 1)
    topic = f"{system.node.get_namespace()}/joint_trajectory"
    wait_for(lambda: system.node.count_publishers(topic) == 2)
    system.on_node(system.node.trigger_activate)
    (line,) = [line for line in system.lines if "two masters" in line]
    assert line.startswith(f"warning: {system.node.get_namespace()}/robot can publish on {topic}")


def test_another_node_of_the_same_name_is_another_publisher() -> None:
    def node(*publishers: tuple[str, str]) -> Any:
        found = [SimpleNamespace(node_namespace=n, node_name=m) for n, m in publishers]
        return SimpleNamespace(
            get_publishers_info_by_topic=lambda topic: found,
            get_namespace=lambda: "/",
            get_name=lambda: "wam_policy",
        )

    assert other_publishers(node(("/", "wam_policy")), "/t") == []
    assert other_publishers(node(), "/t") == [], "not discovered yet"
    assert other_publishers(node(("/", "wam_policy"), ("/", "wam_policy")), "/t") == ["/wam_policy"]
    assert other_publishers(node(("/a", "moveit"), ("/", "wam_policy")), "/t") == ["/a/moveit"]


def test_configure_while_the_last_policy_still_loads_says_to_try_again(make: Make) -> None:
    loading, more = threading.Event(), threading.Event()

    def factory(params: Any, progress: Any) -> Any:
        loading.set()
        more.wait(10)
        return HoldPolicy()

    system = make(factory, autostart=False)
    system.on_node(system.node.trigger_configure)
    loading.wait(5)
    system.on_node(system.node.trigger_cleanup)
    assert "warning: the worker thread still runs" in system.lines[-1]
    system.on_node(system.node.trigger_configure)
    assert "still loading" in system.node.refused and "in a moment" in system.node.refused
    assert "restart the process" not in system.node.refused
    more.set()


def test_a_worker_that_ends_late_is_no_error_when_the_process_ends(make: Make) -> None:
    loading, more = threading.Event(), threading.Event()

    def factory(params: Any, progress: Any) -> Any:
        loading.set()
        more.wait(10)
        return HoldPolicy()

    system = make(factory)
    loading.wait(5)
    threading.Timer(0.8, more.set).start()
    assert system.on_node(lambda: system.node.close(5.0)), "joined"
    # The robot of the tests sends pictures of one colour, of which the node may have warned by then.
    lines = [line for line in system.lines if "uniform image" not in line]
    assert not [line for line in lines if line.startswith(("error", "warning"))]


def test_a_policy_of_another_action_space_is_refused(make: Make) -> None:
    from dataclasses import replace

    policy = HoldPolicy()
    policy.spec = replace(policy.spec, action_space="joint_velocity")
    system = make(policy)
    state = wait_for(lambda: system.robot.state.get("refused") and system.robot.state)
    assert "joint_velocity" in state["refused"] and "joint_position" in state["refused"]
    assert state["lifecycle"] == "inactive"


def test_steps_to_execute_beyond_the_horizon_are_refused_at_activation(make: Make) -> None:
    system = make(HoldPolicy(), **{"control.execute_steps": 22})
    state = wait_for(lambda: system.robot.state.get("refused") and system.robot.state)
    assert "22 steps of a horizon of 24" in state["refused"] and state["lifecycle"] == "inactive"


class Sabotage:
    """Makes a method raise from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.on, self.raised = False, 0
        method = getattr(owner, name)

        def broken(*args: Any, **kwargs: Any) -> Any:
            if self.on:
                self.raised += 1
                raise RuntimeError(f"sabotage of {name}")
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, broken)


def reset(system: System) -> None:
    assert not system.reset().success


def instruct(system: System) -> None:
    from rclpy.parameter import Parameter

    change = [Parameter("instruction", value="open the drawer")]
    (result,) = system.on_node(lambda: system.node.set_parameters(change))
    assert not result.successful


@pytest.mark.parametrize(
    ("owner", "name", "cause"),
    [
        (CameraInput, "on_message", None),
        (JointStateInput, "on_message", None),
        (ControlLoop, "on_tick", None),
        (ControlLoop, "on_worker", None),
        (ControlLoop, "set_prompt", lambda system: system.robot.say("close the lid")),
        (ControlLoop, "set_prompt", instruct),
        (ControlLoop, "reset", reset),
        (PolicyNode, "state_summary", lambda system: system.on_node(system.node.publish_state)),
    ],
)
def test_a_defect_in_any_callback_holds_and_latches_and_the_node_lives_on(
    make: Make, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, cause: Callable[[System], None] | None
) -> None:
    sabotage = Sabotage(monkeypatch, owner, name)
    system = make(ScriptedPolicy(ramp))
    system.robot.wait_state(substate="running")
    sabotage.on = True
    if cause is not None:
        cause(system)
    wait_for(lambda: sabotage.raised)
    control = system.node.control
    assert control is not None
    wait_for(lambda: f"sabotage of {name}" in control.fault)
    wait_for(system.robot.holds, what="the robot is held")
    sabotage.on = False
    assert system.reset().success
    system.robot.wait_state(substate="running", fault="")


def test_a_defect_while_holding_does_not_end_the_node(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tick = Sabotage(monkeypatch, ControlLoop, "on_tick")
    hold = Sabotage(monkeypatch, TrajectoryOutput, "hold")
    summary = Sabotage(monkeypatch, PolicyNode, "state_summary")
    system = make(ScriptedPolicy(ramp))
    system.robot.wait_state(substate="running")
    hold.on = tick.on = summary.on = True
    wait_for(lambda: hold.raised and summary.raised)
    tick.on = hold.on = summary.on = False
    assert "sabotage of on_tick" in system.robot.wait_state(substate="holding")["fault"]


def test_a_defect_of_the_automatic_start_is_logged(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage = Sabotage(monkeypatch, Autostart, "_step")
    sabotage.on = True
    system = make(HoldPolicy())
    wait_for(lambda: sabotage.raised > 1)
    sabotage.on = False
    system.robot.wait_state(substate="running")


@pytest.mark.parametrize("name", ["deactivate", "hold"])
def test_the_worker_is_stopped_even_when_the_robot_cannot_be_held(
    make: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    sabotage = Sabotage(monkeypatch, ControlLoop if name == "deactivate" else TrajectoryOutput, name)
    system = make(ScriptedPolicy(ramp))
    system.robot.wait_state(substate="running")
    worker = system.node._parts.worker  # type: ignore[union-attr]
    sabotage.on = True
    system.on_node(system.node.trigger_shutdown)
    assert sabotage.raised and not worker.alive and system.node._old_worker is worker


def test_the_last_hold_has_arrived_before_its_publisher_goes(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from rclpy.lifecycle import LifecyclePublisher

    order: list[str] = []
    waits, destroys = LifecyclePublisher.wait_for_all_acked, PolicyNode.destroy_lifecycle_publisher
    monkeypatch.setattr(
        LifecyclePublisher,
        "wait_for_all_acked",
        lambda self, timeout: (order.append(f"acked {timeout.nanoseconds * 1e-9:.1f}"), waits(self, timeout))[1],
    )
    monkeypatch.setattr(
        PolicyNode,
        "destroy_lifecycle_publisher",
        lambda self, publisher: (order.append("destroyed"), destroys(self, publisher))[1],
    )
    system = make(ScriptedPolicy(ramp))
    system.robot.wait_state(substate="running")
    system.on_node(system.node.trigger_shutdown)
    assert order == ["acked 0.1", "destroyed"]
    wait_for(system.robot.holds)
