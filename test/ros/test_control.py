"""The control loop by hand: clocks that jump, chunks that come late, one message per chunk."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from wam_policy_ros.contract.embodiment import get_embodiment
from wam_policy_ros.contract.errors import ConfigError, InvalidImage, PromptError
from wam_policy_ros.contract.fakes import spec_of
from wam_policy_ros.contract.interface import ActionChunk, ResetReason
from wam_policy_ros.contract.plan import Plan
from wam_policy_ros.ros.checks import check_steps
from wam_policy_ros.ros.clock_watch import ClockWatch
from wam_policy_ros.ros.control import ControlLoop, Substate
from wam_policy_ros.ros.inputs import Inputs
from wam_policy_ros.ros.joints import JointMap
from wam_policy_ros.ros.messages import Trajectory, ns_to_stamp, rgb_to_image, trajectory_to_msg
from wam_policy_ros.ros.observations import Foreseen
from wam_policy_ros.ros.outputs import TrajectoryOutput
from wam_policy_ros.ros.parameters import NodeParameters
from wam_policy_ros.ros.streams import Now
from wam_policy_ros.ros.worker import Phase, Request, Result, WorkerStatus

from .harness import NAMES
from .test_inputs import joints

SPEC = spec_of("oxe_droid", weights="none")
T0 = 1_800_000_000_000_000_000
DT_NS = round(1e9 / 15)
CAMERA = SPEC.cameras[0].name

LIMITS = {
    "safety.position_min": -2.9,
    "safety.position_max": 2.9,
    "safety.max_velocity": 2.0,
    "safety.max_acceleration": 50.0,
    "safety.executor_stall_s": 0,  # time passes here without ticks
}


class Worker:
    """Records requests; the test answers them."""

    superseded = after_step_skipped = 0
    status = WorkerStatus()

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.generations: list[int] = []
        self.foreseen: list[Foreseen] = []
        self.result: Result | None = None

    def new_generation(self, generation: int) -> None:
        self.generations.append(generation)

    def submit(self, request: Request) -> None:
        self.requests.append(request)

    def foresee(self, generation: int, foreseen: Foreseen) -> None:
        assert generation == self.generations[-1]
        self.foreseen.append(foreseen)

    def take_result(self) -> Result | None:
        result, self.result = self.result, None
        return result


class Publisher:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def __call__(self, plan: Trajectory) -> None:
        self.sent.append(trajectory_to_msg(plan))


class Desk:
    """A control loop whose time is moved by the test. Ticks are 1/15 s; cameras and joints deliver at every tick."""

    def __init__(self, *, simulated: bool = False, warm_up_s: tuple[float, ...] = (), **params: Any) -> None:
        self.lag_ns = 0  # age of the images at delivery
        self.ros_ns, self.steady_ns = T0, 7 * 10**9
        self.worker, self.publisher, self.log = Worker(), Publisher(), []  # type: ignore[var-annotated]
        self.worker.status = WorkerStatus(warm_up_s=warm_up_s)
        values = {"backend": "hold", "instruction": "go", **LIMITS, **params}
        self.params = NodeParameters.from_values(values)
        e = get_embodiment("oxe_droid")
        mapping = JointMap.build(e.state, e.action, names=NAMES, gripper_open=0.0, gripper_closed=1.0)
        self.inputs = Inputs(self.params, SPEC, mapping, warn=self.log.append)
        output = TrajectoryOutput(self.publisher, mapping.command_names, with_velocities=True)
        self.loop = ControlLoop(
            self.params,
            mapping,
            self.inputs,
            self.worker,  # type: ignore[arg-type]
            output,
            clock=self.now,
            simulated=simulated,
            changed=lambda: None,
            log=lambda level, line: self.log.append(f"{level}: {line}"),
        )
        self.loop.activate(SPEC)

    def now(self) -> Now:
        return Now(self.ros_ns, self.steady_ns)

    def deliver(self) -> None:
        image = rgb_to_image(np.zeros((18, 32, 3), np.uint8), stamp_ns=self.ros_ns - self.lag_ns)
        for camera in self.inputs.cameras.values():
            camera.on_message(image, self.now())
        state = joints(0, dict.fromkeys(NAMES, 0.0))
        state.header.stamp = ns_to_stamp(self.ros_ns)
        self.inputs.joint_states.on_message(state, self.now())

    def tick(self, count: int = 1, *, deliver: bool = True, jump_s: float = 0.0) -> None:
        for _ in range(count):
            self.ros_ns += DT_NS + round(jump_s * 1e9)
            self.steady_ns += DT_NS
            jump_s = 0.0
            if deliver:
                self.deliver()
            self.loop.on_tick()

    def answer(
        self,
        *,
        latency_s: float = 0.0,
        rows: np.ndarray | None = None,
        error: Any = None,
        reset: ResetReason | None = None,
    ) -> None:
        request = self.worker.requests[-1]
        self.ros_ns += round(latency_s * 1e9)
        self.steady_ns += round(latency_s * 1e9)
        chunk = None
        if error is None:
            rows = np.tile(np.arange(24.0)[:, None] * 0.01, (1, 8)) if rows is None else rows
            chunk = ActionChunk(rows, SPEC.dt_s, request.observation.stamp_ns, request.session_id, 0, reset=reset)
        self.worker.result = Result(request, chunk, error, latency_s)
        self.loop.on_worker()

    def run(self) -> None:
        """To the first published chunk."""
        self.tick(2)
        self.answer()
        assert self.loop.substate is Substate.RUNNING and len(self.publisher.sent) == 1


def test_one_message_per_chunk_and_one_request_in_flight() -> None:
    desk = Desk()
    desk.run()
    desk.tick(6)
    assert len(desk.publisher.sent) == 1 and len(desk.worker.requests) == 1
    desk.tick(6)
    assert len(desk.worker.requests) == 2, "asked once more, and not again before the answer"
    assert len(desk.publisher.sent) == 1


def test_resting_robot_is_asked_about_again_with_identical_observations() -> None:
    desk = Desk()
    desk.run()
    desk.tick(9)
    desk.answer()
    assert len(desk.publisher.sent) == 2


def test_the_same_frames_are_not_asked_about_twice() -> None:
    desk = Desk(**{"control.execute_steps": 1, "sync.max_age_s": 5.0, "sync.joint_max_age_s": 5.0})
    desk.run()
    desk.tick()
    desk.answer()
    desk.tick(5, deliver=False)
    assert len(desk.worker.requests) == 2
    desk.tick()
    assert len(desk.worker.requests) == 3


@pytest.mark.parametrize("jump_s", [-60.0, -0.6, 1.2, 3600.0])
def test_a_jump_of_the_clock_holds_drops_buffers_and_starts_a_new_session(jump_s: float) -> None:
    desk = Desk()
    desk.run()
    desk.tick(3)
    session, generation = desk.loop.session_id, desk.worker.generations[-1]
    desk.tick(1, jump_s=jump_s, deliver=False)
    assert desk.loop.session_id != session and desk.worker.generations[-1] > generation
    assert len(desk.publisher.sent) == 2
    (hold,) = desk.publisher.sent[1].points
    assert hold.positions[0] == pytest.approx(0.03, abs=0.011), "where the plan was on the clock it was made on"
    before = len(desk.worker.requests)
    desk.tick(6)
    assert len(desk.worker.requests) == before + 1, "resumes within six ticks"
    assert desk.worker.requests[-1].observation.session_start_ns > T0 + round(jump_s * 1e9)


@pytest.mark.parametrize("jump_s", [-0.4, 0.9])
def test_smaller_steps_of_the_clock_are_no_jump(jump_s: float) -> None:
    desk = Desk(**{"sync.max_age_s": 5.0, "sync.joint_max_age_s": 5.0, "sync.future_tolerance_s": 5.0})
    desk.run()
    session = desk.loop.session_id
    desk.tick(1, jump_s=jump_s)
    assert desk.loop.session_id == session


def test_simulated_time_may_pause_and_run_at_another_speed() -> None:
    watch = ClockWatch(simulated=True)
    second = 10**9
    assert watch.update(Now(0, 0)) is None
    assert watch.update(Now(0, 60 * second)) is None, "paused for a minute"
    assert watch.update(Now(second, 61 * second)) is None
    assert watch.update(Now(second // 10, 62 * second)) == pytest.approx(-0.9), "a bag that starts over"
    assert watch.update(Now(20 * second, 63 * second)) == pytest.approx(18.9)


def test_the_system_clock_set_back_is_seen_even_by_half_a_second() -> None:
    watch = ClockWatch(simulated=False)
    watch.update(Now(T0, 0))
    assert watch.update(Now(T0 - 433_333_333, 66_666_667)) == pytest.approx(-0.5)


def test_simulated_time_without_a_clock_says_so() -> None:
    desk = Desk(simulated=True)
    desk.ros_ns = -DT_NS
    desk.tick(deliver=False)
    assert "/clock" in desk.loop.reason and desk.loop.substate is Substate.WAITING


def test_chunks_that_come_too_late_are_counted_and_the_third_in_a_row_is_a_fault() -> None:
    desk = Desk(**{"safety.deadline_s": 60.0})
    desk.run()
    for n in range(1, 4):
        # The robot is kept moving by a chunk of normal speed, so that the late one finds it in motion.
        desk.loop.pace.mean_s = 0.0
        desk.loop._due_ns = 0
        desk.tick()
        times_ns = desk.ros_ns + np.rint(np.arange(25) * 1e9 / 15).astype(np.int64)
        desk.loop._output.publish(Plan(times_ns, np.zeros((25, 8))))
        desk.answer(latency_s=1.5)
        desk.deliver()
        assert desk.loop.counters["late"] == n
    assert "3 chunks in a row" in desk.loop.fault and desk.loop.substate is Substate.HOLDING


def test_a_result_of_an_older_session_is_discarded() -> None:
    desk = Desk()
    desk.tick(2)
    old = desk.worker.requests[-1]
    desk.loop.reset()
    desk.worker.result = Result(
        old, ActionChunk(np.zeros((24, 8)), SPEC.dt_s, old.observation.stamp_ns, old.session_id, 0), None, 0.1
    )
    desk.loop.on_worker()
    assert not desk.publisher.sent and desk.loop.counters["discarded"] == 1


def test_after_a_hold_nothing_seen_while_braking_is_used() -> None:
    desk = Desk()
    desk.run()
    desk.tick(3)
    desk.loop.reset()
    braked_ns = desk.ros_ns + 200_000_000
    desk.tick(8)
    assert len(desk.worker.requests) == 2
    assert desk.worker.requests[-1].observation.stamp_ns >= braked_ns


def test_a_refused_instruction_is_not_asked_again_until_it_changes() -> None:
    desk = Desk()
    desk.tick(2)
    desk.answer(error=PromptError("the instruction is too long", field="prompt"))
    desk.tick(10)
    assert len(desk.worker.requests) == 1 and "too long" in desk.loop.reason
    assert desk.loop.substate is Substate.HOLDING and not desk.loop.fault
    desk.loop.set_prompt("short")
    desk.tick(2)
    assert len(desk.worker.requests) == 2


def test_an_image_that_cannot_be_decoded_holds_and_is_tried_again() -> None:
    desk = Desk()
    desk.run()
    desk.tick(9)
    desk.answer(error=InvalidImage("broken jpeg or png", field="camera_wrist"))
    assert desk.loop.substate is Substate.HOLDING and "broken" in desk.loop.reason and not desk.loop.fault
    assert len(desk.publisher.sent) == 2
    desk.tick(8)
    assert len(desk.worker.requests) == 3


def test_the_deadline_is_on_the_steady_clock() -> None:
    desk = Desk(simulated=True, **{"safety.deadline_s": 2.0, "sync.max_age_s": 60.0, "sync.joint_max_age_s": 60.0})
    desk.run()
    desk.tick(9)
    assert len(desk.worker.requests) == 2
    for _ in range(32):  # /clock stands still
        desk.steady_ns += DT_NS
        desk.loop.on_tick()
    assert "deadline" in desk.loop.fault


def times_s(msg: Any) -> list[float]:
    return [p.time_from_start.sec + p.time_from_start.nanosec * 1e-9 for p in msg.points]


def test_a_session_that_starts_at_a_standstill_runs_its_first_chunk_whole() -> None:
    desk = Desk()
    desk.run()
    desk.tick(26)  # the plan has ended
    desk.loop.reset()
    assert len(desk.publisher.sent) == 1, "nothing to hold"
    desk.tick()
    assert len(desk.worker.requests) == 3, "asked at once"
    desk.answer(latency_s=0.9)
    assert len(desk.publisher.sent[-1].points) == 24
    assert times_s(desk.publisher.sent[-1])[0] == pytest.approx(1 / 15)


def test_activated_while_it_still_brakes_it_waits_until_it_stands() -> None:
    desk = Desk()
    desk.run()
    desk.tick(3)
    desk.loop.deactivate()
    braked_ns = desk.ros_ns + 200_000_000
    desk.loop.activate(SPEC)
    desk.tick(8)
    assert desk.worker.requests[-1].observation.stamp_ns >= braked_ns
    desk.answer(latency_s=0.9)
    assert len(desk.publisher.sent[-1].points) == 24


def test_a_second_reset_while_braking_does_not_brake_longer() -> None:
    desk = Desk()
    desk.run()
    desk.tick(3)
    desk.loop.reset()
    braked_ns = desk.ros_ns + 200_000_000
    desk.tick(1)
    desk.loop.reset()
    desk.tick(8)
    assert desk.worker.requests[-1].observation.session_start_ns == braked_ns


@pytest.mark.parametrize("latency_s", [1.34, 1.5])
def test_stop_and_go_wastes_no_step_on_frames_that_show_the_robot_in_motion(latency_s: float) -> None:
    desk = Desk(warm_up_s=(9.0, latency_s), **{"control.mode": "stop_and_go"})
    desk.lag_ns = 30_000_000  # as every real camera: the newest frame is older than the tick
    for _ in range(5):
        asked = len(desk.worker.requests)
        while len(desk.worker.requests) == asked:
            desk.tick()
        desk.answer(latency_s=latency_s)
    assert [len(m.points) for m in desk.publisher.sent] == [24] * 5
    assert desk.loop.counters["late"] == 0 and not desk.loop.fault
    assert desk.loop.counters["stop_and_go"] == 5, "said from the first chunk on"


def test_a_policy_that_has_failed_is_noticed_again_after_a_reset() -> None:
    desk = Desk()
    desk.tick(2)
    desk.worker.status = WorkerStatus(phase=Phase.FAILED, message="RuntimeError: the device is gone")
    desk.loop.on_worker()
    assert "the device is gone" in desk.loop.fault
    desk.loop.reset()
    asked = len(desk.worker.requests)
    desk.tick(4)
    assert "the device is gone" in desk.loop.fault and len(desk.worker.requests) == asked


def test_expected_latency_starts_with_the_warm_up_and_leaves_out_calls_from_an_empty_window() -> None:
    desk = Desk(warm_up_s=(3.0, 0.2))
    assert desk.loop.summary()["expected_latency_s"] == 0.2
    desk.tick(2)
    desk.answer(latency_s=0.9)
    assert (desk.loop.latency_s, desk.loop.summary()["expected_latency_s"]) == (0.9, 0.2), "the first call"
    desk.tick(9)
    desk.answer(latency_s=0.6, reset=ResetReason.WINDOW_FULL)
    assert (desk.loop.latency_s, desk.loop.summary()["expected_latency_s"]) == (0.6, 0.2)
    desk.tick(9)
    desk.answer(latency_s=0.3)
    assert desk.loop.summary()["expected_latency_s"] == pytest.approx(0.23)


def test_a_policy_slower_than_its_chunks_is_refused_unless_the_mode_provides_for_it() -> None:
    with pytest.raises(ConfigError, match=r"a step takes 1.40 s.*control.mode: stop_and_go"):
        Desk(warm_up_s=(9.0, 1.4))
    for mode in ("stop_and_go", "auto"):
        assert Desk(warm_up_s=(9.0, 1.4), **{"control.mode": mode}).loop.pace.stops
    assert not Desk(warm_up_s=(9.0, 0.5), **{"control.mode": "auto"}).loop.pace.stops


def test_without_limits_nothing_is_activated_and_the_joints_are_named() -> None:
    with pytest.raises(ConfigError, match=r"no limits are known.*panda_joint1.*panda_joint7"):
        Desk(**{"safety.position_max": []})


def test_a_policy_far_slower_than_in_its_warm_up_ends_in_stop_and_go_not_in_a_fault() -> None:
    desk = Desk(warm_up_s=(0.1, 0.1), **{"control.mode": "auto"})
    for _ in range(6):
        asked = len(desk.worker.requests)
        while len(desk.worker.requests) == asked:
            desk.tick()
        desk.answer(latency_s=1.5)
    assert not desk.loop.fault and desk.loop.counters["late"] == 1
    assert [len(m.points) for m in desk.publisher.sent if len(m.points) > 1] == [24] * 5


def test_sessions_are_counted_when_they_start() -> None:
    desk = Desk()
    desk.run()
    desk.tick(9)
    assert desk.loop.summary()["counters"]["sessions"] == 1
    desk.loop.latch("test")
    desk.loop.deactivate()
    desk.loop.activate(SPEC)
    assert desk.loop.summary()["counters"]["sessions"] == 1
    desk.tick(8)
    assert desk.loop.summary()["counters"]["sessions"] == 2


def test_a_hold_that_cannot_be_sent_still_latches_and_voids_the_step_under_way() -> None:
    desk = Desk()
    desk.run()
    desk.tick(9)
    generation = desk.worker.generations[-1]

    def broken(plan: Trajectory) -> None:
        raise RuntimeError("publisher is invalid")

    desk.loop._output._send = broken
    with pytest.raises(RuntimeError, match="invalid"):
        desk.loop.latch("test")
    assert desk.loop.fault == "test" and desk.loop.substate is Substate.HOLDING
    assert desk.worker.generations[-1] > generation
    with pytest.raises(RuntimeError, match="invalid"):
        desk.loop.deactivate()
    assert not desk.loop.active


@pytest.mark.parametrize(("steps", "fits"), [(21, True), (22, False), (24, False)])
def test_steps_to_execute_must_leave_rows_of_the_horizon(steps: int, fits: bool) -> None:
    params = NodeParameters.from_values({"backend": "hold", "control.execute_steps": steps})
    if fits:
        check_steps(params, SPEC)
    else:
        with pytest.raises(ConfigError, match=rf"execute_steps.*{steps} steps of a horizon of 24.*at most 21"):
            check_steps(params, SPEC)


def lines(desk: Desk) -> list[str]:
    return [line for line in desk.log if line.startswith(("info: ", "warn: ", "error: "))]


def test_what_is_said_at_the_first_start_and_at_a_recovery() -> None:
    desk = Desk()
    desk.tick(2, deliver=False)
    (waiting,) = lines(desk)
    assert waiting.startswith("info: waiting: no usable image from camera") and "waiting for" not in waiting
    desk.log.clear()
    desk.tick()
    desk.answer(latency_s=0.42)
    assert lines(desk) == ["info: running: first chunk of 24 rows, step 0.42 s"]
    desk.tick(9)
    desk.answer()
    assert len(lines(desk)) == 1, "once in a session"
    desk.log.clear()
    desk.tick(2, deliver=False)
    assert len(lines(desk)) == 1 and "holding" in lines(desk)[0]
    desk.tick(5)
    desk.answer(latency_s=0.1)
    assert lines(desk)[1:] == [
        "info: waiting: the inputs are sound again: new session",
        "info: running: first chunk of 24 rows, step 0.10 s",
    ]


def test_a_forgotten_instruction_is_said_together_with_what_else_is_missing() -> None:
    desk = Desk(instruction="")
    desk.tick(3, deliver=False)
    (line,) = lines(desk)
    assert "no instruction" in line and "~/prompt" in line and CAMERA in line and NAMES[0] in line
    desk.loop.set_prompt("go")
    desk.tick(2, deliver=False)
    assert "no instruction" not in desk.loop.reason and CAMERA in desk.loop.reason


def test_after_a_hold_a_step_is_asked_for_as_soon_as_the_inputs_are_sound() -> None:
    desk = Desk(**{"sync.joint_max_age_s": 0.1})
    desk.lag_ns = 30_000_000  # the newest frame is older than the tick that finds the joints sound again
    desk.run()
    for _ in range(3):
        desk.tick(9, deliver=False)
        assert desk.loop.substate is Substate.HOLDING
        asked, session = len(desk.worker.requests), desk.loop.session_id
        desk.tick()
        assert len(desk.worker.requests) == asked + 1, "in the first sound tick, not one frame later"
        assert desk.worker.requests[-1].observation.stamp_ns == desk.ros_ns - desk.lag_ns
        assert desk.worker.requests[-1].session_id == session
        desk.answer()
        assert desk.loop.substate is Substate.RUNNING


def test_frames_from_before_the_hold_are_not_used_after_it() -> None:
    desk = Desk(**{"sync.joint_max_age_s": 0.1})
    desk.run()
    desk.tick(3)
    desk.tick(9, deliver=False)
    desk.tick()
    request = desk.worker.requests[-1].observation
    skew_ns = round(desk.params.sync_max_skew_s * 1e9)
    assert request.session_start_ns == desk.ros_ns - skew_ns
    assert all(f.stamp_ns >= request.session_start_ns for frames in request.frames.values() for f in frames)


def test_images_that_cannot_be_decoded_are_said_once_and_each_is_tried_once() -> None:
    desk = Desk()
    desk.run()
    desk.tick(9)
    desk.log.clear()
    tried = set()
    for _ in range(10):
        desk.answer(error=InvalidImage("broken jpeg or png", field="camera_wrist"))
        assert desk.loop.substate is Substate.HOLDING and "broken" in desk.loop.reason
        stamp_ns = desk.worker.requests[-1].observation.stamp_ns
        assert stamp_ns not in tried
        tried.add(stamp_ns)
        asked = len(desk.worker.requests)
        while len(desk.worker.requests) == asked:
            desk.tick()
        assert "broken" in desk.loop.reason, "until it has proved otherwise"
    assert len(lines(desk)) == 1
    desk.answer()
    assert lines(desk)[1].startswith("info: running")


def test_a_fault_names_the_service_that_clears_it() -> None:
    desk = Desk()
    desk.run()
    desk.loop._reset_service = "/left/wam_policy/reset"
    desk.loop.latch("test")
    assert "holding until /left/wam_policy/reset is called" in lines(desk)[-1]
