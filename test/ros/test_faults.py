"""The fault matrix in virtual time: always a hold, in time, with a reason, and back by itself when the input is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from wam_policy_ros.contract.errors import ConfigError, EngineError
from wam_policy_ros.contract.fakes import ScriptedPolicy
from wam_policy_ros.contract.interface import Observation
from wam_policy_ros.contract.policy_thread import Phase
from wam_policy_ros.ros.commands import Commands
from wam_policy_ros.ros.control import Substate
from wam_policy_ros.ros.parameters import NodeParameters

from .rig import DT, NAMES, VALUES, Rig, wander

AGE_S = {"/left": 0.2, "/right": 0.2, "/hand": 0.2, "/joints": 0.1}


def running(policy: Any = None, **params: Any) -> Rig:
    rig = Rig(policy or wander(), **params)
    rig.play(3.0)
    assert rig.control.substate is Substate.RUNNING and not rig.holds
    return rig


def held(rig: Rig, since_s: float, within_s: float) -> None:
    """One hold, in time; then silence."""
    (at_s, hold), *more = [(t, m) for t, m in rig.holds if t >= since_s]
    assert not more and at_s - since_s <= within_s + 1e-6
    assert hold.velocities is not None and not hold.velocities.any()
    assert not [t for t, _ in rig.plans if t > at_s], "nothing after the hold"
    assert rig.control.substate is Substate.HOLDING and rig.control.reason


def resumes(rig: Rig, within_s: float = 1.0) -> None:
    sent, session = len(rig.plans), rig.control.session_id
    rig.play(within_s)
    assert rig.control.substate is Substate.RUNNING and len(rig.plans) > sent and not rig.control.fault
    assert rig.control.session_id == session, "one new session, begun when the input was lost"
    rig.play(2.0)
    assert rig.follower.rejected == 0 and rig.watch.acceleration <= 10.0 * (1 + 1e-6) and rig.watch.speed <= 2.0


@pytest.mark.parametrize("topic", list(AGE_S))
def test_a_stream_that_falls_silent(topic: str) -> None:
    rig = running()
    session, since_s = rig.control.session_id, rig.now_s
    rig.silent = {topic}
    rig.play(2.0)
    held(rig, since_s, AGE_S[topic] + DT)
    assert topic in rig.control.reason and session != rig.control.session_id
    rig.silent = set()
    resumes(rig)


def test_images_that_get_too_old() -> None:
    rig = running()
    since_s, rig.lag_s = rig.now_s, 0.4
    rig.play(1.0)
    held(rig, since_s, 0.2 + DT)
    assert "stamp" in rig.control.reason
    rig.lag_s = 0.0
    resumes(rig)


@pytest.mark.parametrize("jump_s", [-60.0, -0.7, 1.5, 7200.0])
def test_the_clock_jumps(jump_s: float) -> None:
    rig = running()
    session, since_s = rig.control.session_id, rig.now_s
    rig.run.clock.set_by(round(jump_s * 1e9))
    rig.play(0.1)
    (hold,) = rig.holds
    assert hold[0] - since_s <= DT + 1e-6 and rig.control.session_id != session
    assert rig.control.counters["clock_jumps"] == 1
    resumes(rig, 1.5)


def test_after_a_jump_empty_buffers_are_no_news_but_silence_is() -> None:
    rig = running()
    rig.silent = set(AGE_S)
    rig.run.clock.set_by(round(10e9))
    rig.play(0.4)
    assert rig.control.reason.startswith("the node's clock jumped by +10.")
    rig.play(0.4)
    assert "/left" in rig.control.reason and "/joints" in rig.control.reason


def test_a_step_that_hangs_is_a_fault_at_the_deadline_and_the_plan_under_way_ends_at_rest() -> None:
    hangs: list[int] = []
    rig = Rig(wander(), lambda call: float("inf") if hangs else 0.2, **{"safety.deadline_s": 1.0})
    rig.play(3.0)
    hangs.append(1)
    rig.play(3.0)
    assert "no answer from the policy" in rig.control.fault
    held(rig, 3.0, 8 * DT + 1.0 + 2 * DT)
    hangs.clear()
    rig.play(2.0)
    assert rig.control.substate is Substate.HOLDING, "latched"
    rig.control.reset()
    resumes(rig)


def test_a_step_that_hangs_for_longer_than_the_plan_lasts_leaves_the_robot_at_rest() -> None:
    rig = Rig(wander(), lambda call: 0.2 if call < 4 else float("inf"), **{"safety.deadline_s": 60.0})
    rig.play(6.0)
    assert not rig.follower.state_at(6.0)[1].any() and rig.watch.acceleration <= 10.0 * (1 + 1e-6)
    assert rig.control.summary()["stall_share"] > 0.3, "counted as time without a command"


def bad(change: Callable[[np.ndarray], np.ndarray], since: int, until: int = 10**9) -> ScriptedPolicy:
    good = wander()

    def rows(observation: Observation, step: int) -> np.ndarray:
        calls.append(1)
        out = np.asarray(good._rows(observation, step))
        return change(out) if since <= len(calls) <= until else out

    calls: list[int] = []
    return ScriptedPolicy(rows)


def nan(rows: np.ndarray) -> np.ndarray:
    rows[5, 3] = np.nan
    return rows


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (nan, "not finite"),
        (lambda rows: rows[:, :7], r"(24, 7)"),
        (lambda rows: rows[:20], r"(20, 8)"),
        (np.degrees, "far outside the limits"),
    ],
)
def test_a_chunk_that_makes_no_sense_latches_and_nothing_of_it_leaves(change: Any, says: str) -> None:
    rig = running(bad(change, 8))
    sent = len(rig.plans)
    rig.play(3.0)
    assert says in rig.control.fault and len(rig.plans) <= sent + 1 and len(rig.holds) == 1
    assert rig.control.counters["refused"] == 1 and sum(rig.control.refusals.values()) == 1
    held(rig, 0.0, 10.0)


def fast(rows: np.ndarray) -> np.ndarray:
    rows[8:, 2] += 0.5
    return rows


def test_a_chunk_that_breaks_a_limit_is_refused_and_the_next_one_is_taken() -> None:
    rig = running(bad(fast, 8, 8))
    rig.play(3.0)
    assert len(rig.holds) == 1 and not rig.control.fault and rig.control.refusals == {"speed": 1}
    assert any("the chunk breaks a limit" in r and "speed of j2" in r for r in rig.reasons)
    assert rig.control.substate is Substate.RUNNING
    assert rig.watch.acceleration <= 10.0 * (1 + 1e-6)


@pytest.mark.parametrize(("param", "refused"), [({}, 3), ({"safety.max_consecutive_rejects": 1}, 1),
                                               ({"safety.on_violation": "fault"}, 1)])  # fmt: skip
def test_refusals_in_a_row_latch(param: dict[str, Any], refused: int) -> None:
    rig = running(bad(fast, 8), **param)
    rig.play(10.0)
    assert rig.control.fault and rig.control.counters["refused"] == refused
    assert ("3 chunks in a row" in rig.control.fault) == (refused == 3)


def test_clamping_is_counted_and_said() -> None:
    def swift(rows: np.ndarray) -> np.ndarray:
        rows[:, 2] += np.linspace(0, 2.8, 24)
        return rows

    rig = running(bad(swift, 8, 8), **{"safety.on_violation": "clamp", "safety.max_velocity": 1.8})
    rig.play(3.0)
    assert rig.control.counters["clamped"] == 1 and rig.control.counters["refused"] == 0
    assert any(
        level == "warn" and "of j2" in line and "% of its speed" in line for _, level, line in rig.run.journal.log
    )
    assert rig.watch.speed <= 1.8 * (1 + 1e-6)


def test_on_fault_stop_publishing_lets_the_plan_end_at_rest() -> None:
    rig = running(bad(nan, 8), **{"safety.on_fault": "stop_publishing"})
    rig.play(3.0)
    assert rig.control.fault and not rig.holds
    assert not rig.follower.state_at(rig.now_s)[1].any() and rig.watch.acceleration <= 10.0 * (1 + 1e-6)


def test_an_engine_that_fails_latches_with_its_words() -> None:
    calls: list[int] = []
    good = wander()

    def rows(observation: Observation, step: int) -> np.ndarray:
        calls.append(1)
        if len(calls) > 8:
            raise EngineError("out of memory on the device")
        return np.asarray(good._rows(observation, step))

    rig = running(ScriptedPolicy(rows))
    rig.play(2.0)
    assert "out of memory" in rig.control.fault
    held(rig, 0.0, 10.0)


def test_a_device_that_is_lost_holds_and_no_reset_brings_it_back() -> None:
    """The step says it, and from then on the policy's owner does: the remedy is the one that helps."""
    torch = pytest.importorskip("torch", reason="needs torch (extra engine)")
    from wam_policy_ros.engine.device import DeviceWatch

    calls: list[int] = []
    good = wander()
    watch = DeviceWatch(torch.device("cpu"), ask=lost)

    def rows(observation: Observation, step: int) -> np.ndarray:
        calls.append(1)
        with watch.around():
            if len(calls) > 8:
                lost()
            return np.asarray(good._rows(observation, step))

    rig = running(ScriptedPolicy(rows))
    rig.play(2.0)
    held(rig, 0.0, 10.0)
    assert rig.control.fault.startswith("the device answers no call") and "restart the process" in rig.control.fault
    made = len(calls)
    rig.run.worker.status = replace(rig.run.worker.status, phase=Phase.FAILED, message=str(watch.lost))
    for _ in range(2):
        rig.control.reset()
        rig.play(1.0)
        assert rig.control.substate is Substate.HOLDING and rig.control.fault.startswith(
            "the policy failed: the device"
        )
    assert len(calls) == made and "configure" not in rig.control.fault and len(rig.holds) == 1


def lost() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_the_end_of_the_process_in_mid_step_holds() -> None:
    rig = running()
    rig.run.close()
    (hold,) = rig.holds
    assert hold[0] == pytest.approx(rig.now_s) and rig.control.substate is Substate.INACTIVE
    rig.play(2.0)
    assert len(rig.sent) == len(rig.plans) + 1, "and nothing after it"


def test_the_e_stop_takes_release_and_reset() -> None:
    rig = running()
    commands, since_s = Commands(rig.control), rig.now_s
    assert commands.estop(True)[0]
    held(rig, since_s, 0.0)
    ok, text = commands.reset()
    assert not ok and "release it first" in text
    ok, text = commands.estop(False)
    assert "still latched" in text
    rig.play(2.0)
    assert "e-stop" in rig.control.fault and rig.control.substate is Substate.HOLDING
    assert commands.reset()[0]
    resumes(rig)


def test_an_e_stop_pressed_before_the_activation_counts() -> None:
    rig = running()
    rig.control.deactivate()
    Commands(rig.control).estop(True)
    rig.control.activate(wander().spec)
    sent = len(rig.sent)
    rig.play(2.0)
    assert rig.control.fault == "e-stop" and len(rig.sent) == sent


def test_hold_pauses_and_goes_on_by_itself() -> None:
    rig = running()
    commands, since_s = Commands(rig.control), rig.now_s
    commands.hold(True)
    held(rig, since_s, 0.0)
    rig.play(1.0)
    held(rig, since_s, 0.0)
    assert commands.hold(False) == (True, "going on")
    resumes(rig)


def test_stop_lasts_until_start_and_not_until_something_else() -> None:
    rig = running()
    commands, since_s = Commands(rig.control), rig.now_s
    commands.stop()
    rig.play(0.5)
    commands.hold(True)
    commands.hold(False)
    rig.control.set_prompt("something else")
    commands.reset()
    rig.play(1.0)
    held(rig, since_s, 0.0)
    assert "~/start" in rig.control.reason
    assert commands.start() == (True, "going on")
    resumes(rig)


HOME = [0.5, -0.5, 0.0, 1.0, 0.2, 0.3, -0.4, 0.04]


@pytest.mark.parametrize("velocities", [True, False])
def test_home_goes_there_at_limited_speed_and_waits_for_start(velocities: bool) -> None:
    rig = running(**{"home.positions": HOME, "control.publish_velocities": velocities})
    commands = Commands(rig.control)
    ok, text = commands.home()
    assert ok and "on the way home" in text, text
    before = rig.watch.speed
    rig.play(0.4)
    rig.watch.speed = 0.0  # it has stopped
    rig.play(9.0)
    np.testing.assert_allclose(rig.follower.at(rig.now_s), HOME, atol=1e-9)
    assert 0.1 < rig.watch.speed <= 0.3 * (1 + 1e-6) and before > 0.3
    assert rig.control.substate is Substate.HOLDING and "home" in rig.control.reason
    if velocities:
        assert rig.watch.acceleration <= 10.0 * (1 + 1e-6)
        commands.start()
        resumes(rig)


def test_home_is_refused_with_a_reason() -> None:
    commands = Commands((rig := running()).control)
    assert commands.home()[0] is False and "home.positions is not set" in commands.home()[1]
    rig.play(0.2)
    assert "refused: home.positions is not set" in rig.control.reason and "~/start" in rig.control.reason
    rig = running(**{"home.positions": [*HOME[:6], 3.5, 0.0]})
    assert "the way home breaks a limit" in Commands(rig.control).home()[1]
    rig = running(**{"home.positions": HOME[:7]})
    assert "7 values" in Commands(rig.control).home()[1]
    Commands(rig.control).estop(True)
    assert "latched: e-stop" in Commands(rig.control).home()[1]
    rig.control.deactivate()
    assert "not active" in Commands(rig.control).home()[1] and not Commands(rig.control).start()[0]


def test_a_hold_on_the_way_home_stops_there() -> None:
    rig = running(**{"home.positions": HOME})
    commands = Commands(rig.control)
    commands.home()
    rig.play(1.5)
    commands.estop(True)
    rig.play(2.0)
    assert not rig.follower.state_at(rig.now_s)[1].any()
    assert np.abs(rig.follower.at(rig.now_s) - HOME).max() > 0.05


def test_a_simulator_is_reset_with_the_session() -> None:
    rig = running()
    asked: list[int] = []
    commands = Commands(rig.control, lambda: asked.append(1))
    commands.reset()
    rig.play(2.0)
    assert asked and rig.control.reason == "the simulator is being reset"
    commands.simulator_was_reset("")
    resumes(rig)
    commands.reset()
    commands.simulator_was_reset("nobody offers reset")
    assert "nobody offers reset" in rig.control.fault


def test_a_controller_that_rejects_trajectories() -> None:
    rig = running()
    rig.control.controller_rejected("the goal was rejected")
    assert rig.control.substate is Substate.HOLDING and "rejected a trajectory" in rig.control.reason
    rig.control.controller_accepted()
    resumes(rig)
    for _ in range(3):
        rig.control.controller_rejected("the goal was rejected")
    assert "rejected 3 trajectories in a row" in rig.control.fault


def test_callbacks_that_stand_still_are_noticed_when_they_go_on() -> None:
    rig = running()
    assert rig.control.ticked_ns > 0
    rig.run.clock.steady_ns += 600_000_000
    rig.run.tick()
    assert "stood still for 0.6" in rig.control.reason and rig.control.counters["executor_stalls"] == 1
    assert len(rig.holds) == 1 and rig.control.ticked_ns == 0
    rig.run._next_tick_ns = rig.run.clock.steady_ns
    rig.now_s = rig.clock_s
    rig.play(2.0)
    assert rig.control.substate is Substate.RUNNING


def test_somebody_else_moved_the_robot_while_it_was_stopped() -> None:
    rig = running()
    commands = Commands(rig.control)
    commands.stop()
    rig.play(1.0)
    moved = rig.follower.at(rig.now_s)
    moved[:7] += 0.3
    rig.follower._times_s, rig.follower._positions, rig.follower._velocities = np.array([rig.now_s]), moved[None], None
    rig.watch._last = None
    commands.start()
    rig.play(1.0)
    first = next(m for t, m in rig.plans if t > rig.now_s - 1.0)
    assert np.abs(first.positions[0, :7] - moved[:7]).max() < 0.1, "from where it stands now"
    assert rig.control.substate is Substate.RUNNING and list(first.names) == NAMES


def test_a_controller_that_went_away_and_came_back_begins_where_the_robot_stands() -> None:
    rig = running()
    since_s, session, gone = rig.now_s, rig.control.session_id, ["nobody subscribes /joint_trajectory"]
    rig.control.controller = lambda: gone[0]
    rig.play(1.0)
    held(rig, since_s, DT)
    assert rig.control.reason == gone[0] and rig.control.session_id != session
    # Somebody has moved the robot meanwhile, by less than would be noticed otherwise.
    moved = rig.follower.at(rig.now_s) + np.array([0.04] * 7 + [0.0])
    rig.follower = type(rig.follower)(NAMES, list(moved), partial=False)
    gone[0] = ""
    rig.play(1.0)
    assert rig.control.substate is Substate.RUNNING
    plan = next(m for t, m in rig.plans if t > since_s + 1.0)
    assert np.abs(plan.positions[0] - moved)[:7].max() < 0.02, "from where it stands now"


def test_a_controller_that_comes_back_finds_the_fault_still_latched() -> None:
    rig = running(bad(nan, 8, 8))
    rig.play(3.0)
    assert rig.control.fault
    rig.control.controller = lambda: "nobody subscribes /joint_trajectory"
    rig.play(0.5)
    rig.control.controller = lambda: ""
    rig.play(1.0)
    assert rig.control.fault and rig.control.substate is Substate.HOLDING
    rig.control.reset()
    rig.play(1.0)
    assert rig.control.substate is Substate.RUNNING


def test_an_answer_that_comes_after_a_stall_moves_nothing_before_a_tick_has_looked() -> None:
    rig = running()
    while rig.run.worker.due_ns is None:
        rig.play(DT)
    sent = len(rig.sent)
    rig.run.clock.steady_ns += 700_000_000
    rig.run.worker.deliver()
    rig.control.on_worker()
    assert len(rig.sent) == sent and rig.control.counters["discarded"] == 1
    rig.control.on_tick()
    assert rig.control.counters["executor_stalls"] == 1 and "stood still" in rig.control.reason


def test_limits_are_tightened_while_the_robot_moves_and_never_loosened() -> None:
    rig = running()
    values = {**VALUES, "safety.max_velocity": 0.5, "safety.max_acceleration": 9.0}
    rig.control.tighten(NodeParameters.from_values(values))
    assert rig.control.substate is Substate.HOLDING and "tightened" in rig.control.reason and rig.holds
    rig.play(1.5)
    rig.watch.speed = 0.0
    rig.play(3.0)
    assert rig.watch.speed <= 0.5 * (1 + 1e-6), "what breaks them now is refused"
    with pytest.raises(ConfigError, match=r"only tightened.*velocity of j0"):
        rig.control.tighten(NodeParameters.from_values({**values, "safety.max_velocity": 0.6}))
    rig.control.tighten(NodeParameters.from_values({**values, "safety.position_max": 2.0}))


def test_a_clock_that_jumps_is_no_time_without_a_command() -> None:
    rig = running()
    rig.run.clock.set_by(100 * 10**9)
    rig.play(3.0)
    assert rig.control.pace.running_s < 7.0 and rig.control.pace.stalled_s == 0.0


@pytest.mark.parametrize("step_s", [0.4, -0.3, 0.9])
def test_a_clock_that_is_set_a_little_moves_the_robot_no_further(step_s: float) -> None:
    rig = running()
    while rig.run.worker.due_ns is None:  # an answer is under way, too
        rig.play(DT / 2)
    rig.run.clock.set_by(round(step_s * 1e9))
    rig.play(4.0)
    assert rig.control.counters["clock_jumps"] == 0 and rig.control.substate is Substate.RUNNING
    assert rig.watch.acceleration <= 10.0 * (1 + 1e-6) and rig.watch.speed <= 2.0 * (1 + 1e-6)


def test_a_jump_between_two_ticks_is_seen_by_an_answer_that_comes_first() -> None:
    rig = running()
    while rig.run.worker.due_ns is None:
        rig.play(DT / 2)
    sent = len(rig.plans)
    rig.run.clock.set_by(-5_000_000_000)
    rig.run.worker.deliver()
    rig.control.on_worker()
    assert len(rig.plans) == sent and rig.holds and rig.control.counters["clock_jumps"] == 1
    assert "jumped by -5.000 s" in rig.control.reason


def test_a_step_that_takes_too_long_is_told_of_when_the_plan_has_ended() -> None:
    hangs: list[int] = []
    rig = Rig(wander(), lambda call: 3.0 if hangs else 0.2)
    rig.play(3.0)
    hangs.append(1)
    rig.play(3.0)
    assert rig.control.substate is Substate.HOLDING and not rig.control.fault
    assert "the last chunk has ended; the policy has worked on the next one for" in rig.control.reason
    share = rig.control.summary()["stall_share"]
    assert share is not None and share > 0.1
    hangs.clear()
    rig.play(3.0)
    assert rig.control.substate is Substate.RUNNING and rig.control.reason == ""
