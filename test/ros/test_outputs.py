"""What reaches the robot: plans, holds, streams of joint positions."""

from __future__ import annotations

import numpy as np
import pytest

from test.contract.motion import T0, broken_at_500_hz, limits
from wam_policy_ros.contract.plan import Plan
from wam_policy_ros.ros.messages import Trajectory
from wam_policy_ros.ros.outputs import BRAKING, HOLD_S, JointCommandStream, TrajectoryOutput

S = 10**9


def ramp(speed: float = 1.0, start_ns: int = T0) -> Plan:
    """A second; joint a moves at ``speed``, b stands at 0.5, the finger at 0.04. Velocities as a controller needs."""
    times = np.arange(11) * 0.1
    positions = np.stack([speed * times, np.full(11, 0.5), np.full(11, 0.04)], axis=1)
    velocities = np.zeros((11, 3))
    velocities[:-1, 0] = speed
    return Plan(start_ns + np.rint(times * 1e9).astype(np.int64), positions, velocities)


def make() -> tuple[TrajectoryOutput, list[Trajectory]]:
    sent: list[Trajectory] = []
    output = TrajectoryOutput(sent.append, ["a", "b", "finger"], with_velocities=True)
    output.use(limits())
    return output, sent


def test_a_plans_first_row_stays_here() -> None:
    output, sent = make()
    output.publish(ramp())
    assert sent[0].positions.shape == (10, 3) and sent[0].times_s[0] == pytest.approx(0.1)
    assert sent[0].velocities is not None and sent[0].stamp_ns == T0
    assert output.plan is not None and output.rest_ns == T0 + S


def test_a_hold_is_one_point_where_the_plan_was_and_is_sent_once() -> None:
    output, sent = make()
    output.publish(ramp(0.3))
    assert output.hold(T0 + 550_000_000) and not output.hold(T0 + 600_000_000)
    assert len(sent) == 2 and output.holds == 1
    np.testing.assert_allclose(sent[1].positions, [[0.165, 0.5, 0.04]], atol=1e-9)
    np.testing.assert_array_equal(sent[1].velocities, np.zeros((1, 3)))
    np.testing.assert_allclose(sent[1].times_s, [HOLD_S])


@pytest.mark.parametrize("speed", [0.1, 0.5, 0.8, -1.4, 2.0])
@pytest.mark.parametrize("acceleration", [2.0, 10.0])
def test_a_hold_brakes_within_the_limits_of_acceleration(speed: float, acceleration: float) -> None:
    output, sent = make()
    allowed = limits(velocity=2.0, acceleration=acceleration)
    output.use(allowed)
    output.publish(ramp(speed))
    output.hold(T0 + 550_000_000)
    assert output.plan is not None and not broken_at_500_hz(output.plan, allowed)
    way = abs(sent[1].positions[0, 0] - 0.55 * speed)
    assert way <= max(speed**2 / acceleration / BRAKING, abs(speed) * HOLD_S) / 2 + 1e-9, "no further"
    assert sent[1].times_s[0] <= max(HOLD_S, abs(speed) / acceleration / BRAKING) + 1e-9


def test_a_hold_without_velocities_stops_at_once() -> None:
    output, sent = make()
    plan = ramp()
    output.publish(Plan(plan.times_ns, plan.positions))
    output.hold(T0 + 550_000_000)
    np.testing.assert_allclose(sent[1].positions[0], [0.55, 0.5, 0.04], atol=1e-9)
    assert sent[1].velocities is None


def test_a_new_plan_ends_the_hold_and_the_next_hold_is_sent_again() -> None:
    output, sent = make()
    output.publish(ramp())
    output.hold(T0 + 9 * 10**8)
    output.publish(ramp(start_ns=T0 + 2 * S))
    assert output.hold(T0 + 29 * 10**8) and len(sent) == 4


def test_nothing_commanded_nothing_sent() -> None:
    output, sent = make()
    assert not output.hold(T0) and not sent and output.rest_ns == 0


def test_a_robot_at_rest_is_not_held_and_its_rest_does_not_begin_anew() -> None:
    output, sent = make()
    output.publish(ramp())
    assert not output.hold(T0 + S)
    assert len(sent) == 1 and output.rest_ns == T0 + S


def test_after_forget_the_last_command_says_nothing_but_a_braking_robot_brakes() -> None:
    output, _ = make()
    output.publish(ramp(0.3))
    output.hold(T0 + 500_000_000)
    output.forget(T0 + 510_000_000)
    assert output.plan is None and not output.hold(T0 + 520_000_000)
    assert output.rest_ns == T0 + 700_000_000
    output.forget(T0 - 3600 * S)
    assert output.rest_ns == T0 - 3600 * S + 200_000_000, "a clock set back does not keep the robot braking"


def test_the_plan_moves_with_the_clock() -> None:
    output, sent = make()
    output.publish(ramp(0.3))
    output.shift_clock(-60 * S)
    output.hold(T0 + 550_000_000 - 60 * S)
    np.testing.assert_allclose(sent[1].positions[0, 0], 0.165, atol=1e-9)


def test_a_hold_that_cannot_be_sent_is_tried_again() -> None:
    output, sent = make()
    output.publish(ramp())
    send, fails = output._send, [True]

    def broken(trajectory: Trajectory) -> None:
        if fails:
            raise RuntimeError("publisher is invalid")
        send(trajectory)

    output._send = broken
    with pytest.raises(RuntimeError):
        output.hold(T0 + 10**8)
    fails.clear()
    assert output.hold(T0 + 2 * 10**8) and len(sent) == 2


def test_a_stream_follows_the_plan_to_its_end_and_then_is_silent() -> None:
    output, _ = make()
    got: list[tuple[float, float]] = []
    stream = JointCommandStream(lambda: output.plan, lambda q, v: got.append((q[0], v[0])))
    stream.on_tick(T0)
    assert not got
    output.publish(ramp(0.3))
    for k in range(20):
        stream.on_tick(T0 + k * S // 15)
    assert len(got) == 16
    np.testing.assert_allclose([q for q, _ in got[:14]], 0.3 * np.arange(14) / 15, atol=1e-6)
    assert got[-1] == (pytest.approx(0.3), 0.0)
    output.publish(ramp(0.3, start_ns=T0 + 3 * S))
    stream.on_tick(T0 + 3 * S)
    assert len(got) == 17
