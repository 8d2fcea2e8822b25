from __future__ import annotations

import numpy as np

from wam_policy_ros.ros.follower import Follower
from wam_policy_ros.ros.messages import Trajectory, trajectory_to_msg
from wam_policy_ros.ros.outputs import HOLD_S, TrajectoryOutput

T0 = 1_800_000_000_000_000_000


class Publisher:
    def __init__(self) -> None:
        self.sent: list = []

    def __call__(self, plan: Trajectory) -> None:
        self.sent.append(trajectory_to_msg(plan))


def ramp() -> tuple[np.ndarray, np.ndarray]:
    """Ten rows, one every 0.1 s; joint a moves at 1 rad/s from 0, joint b stands at 5."""
    times = np.arange(1, 11) * 0.1
    return np.stack([times, np.full(10, 5.0)], axis=1), times


def make(with_velocities: bool = True) -> tuple[TrajectoryOutput, Publisher]:
    publisher = Publisher()
    return TrajectoryOutput(publisher, ["a", "b"], with_velocities=with_velocities), publisher


def test_plan_has_complete_velocities_and_the_last_is_zero() -> None:
    output, publisher = make()
    output.publish(*ramp(), T0, before=np.array([0.0, 5.0]))
    points = publisher.sent[0].points
    np.testing.assert_allclose([p.velocities for p in points[:-1]], [[1.0, 0.0]] * 9, atol=1e-12)
    assert list(points[-1].velocities) == [0.0, 0.0]


def test_positions_only_on_request() -> None:
    output, publisher = make(with_velocities=False)
    output.publish(*ramp(), T0)
    output.hold(T0)
    assert not any(p.velocities for msg in publisher.sent for p in msg.points)


def test_hold_is_one_point_at_the_commanded_position_and_is_sent_once() -> None:
    output, publisher = make()
    output.publish(*ramp(), T0)
    assert output.hold(T0 + 550_000_000)
    assert not output.hold(T0 + 600_000_000)
    assert len(publisher.sent) == 2
    (point,) = publisher.sent[1].points
    np.testing.assert_allclose(point.positions, [0.55, 5.0], atol=1e-9)
    assert list(point.velocities) == [0.0, 0.0]
    assert point.time_from_start.sec == 0 and point.time_from_start.nanosec == round(HOLD_S * 1e9)


def test_a_new_plan_ends_the_hold_and_the_next_hold_is_sent_again() -> None:
    output, publisher = make()
    output.publish(*ramp(), T0)
    output.hold(T0 + 9 * 10**8)
    output.publish(*ramp(), T0 + 2 * 10**9)
    assert output.hold(T0 + 29 * 10**8)
    assert len(publisher.sent) == 4


def test_nothing_commanded_nothing_sent() -> None:
    output, publisher = make()
    assert not output.hold(T0)
    assert publisher.sent == [] and output.rest_ns == 0


def test_a_robot_at_rest_is_not_held_and_its_rest_does_not_begin_anew() -> None:
    output, publisher = make()
    output.publish(*ramp(), T0)
    assert output.rest_ns == T0 + 10**9
    assert not output.hold(T0 + 10**9)
    assert len(publisher.sent) == 1 and output.rest_ns == T0 + 10**9


def test_after_forget_the_last_command_says_nothing_but_a_braking_robot_brakes() -> None:
    output, _ = make()
    output.publish(*ramp(), T0)
    output.hold(T0 + 500_000_000)
    output.forget(T0 + 510_000_000)
    assert output.plan is None and not output.hold(T0 + 520_000_000)
    assert output.rest_ns == T0 + 700_000_000
    output.forget(T0 - 3600 * 10**9)
    assert output.rest_ns == T0 - 3600 * 10**9 + 200_000_000, "a clock set back does not keep the robot braking"


def test_the_plan_moves_with_the_clock() -> None:
    output, publisher = make()
    output.publish(*ramp(), T0)
    output.shift_clock(-60 * 10**9)
    output.hold(T0 + 550_000_000 - 60 * 10**9)
    np.testing.assert_allclose(publisher.sent[1].points[0].positions, [0.55, 5.0], atol=1e-9)


def test_before_its_first_row_a_plan_starts_where_the_last_one_was() -> None:
    output, publisher = make()
    output.publish(*ramp(), T0)
    positions, times = ramp()
    output.publish(positions + 1.0, times, T0 + 500_000_000)
    output.hold(T0 + 550_000_000)
    np.testing.assert_allclose(publisher.sent[2].points[0].positions, [0.5 + 0.5 * (1.1 - 0.5), 5.5], atol=1e-9)


def test_follower_executes_what_was_sent() -> None:
    output, publisher = make()
    output.publish(*ramp(), T0)
    follower = Follower(["b", "c", "a"], [5.0, 7.0, 0.0])
    follower.on_trajectory(publisher.sent[0], 100.0)
    np.testing.assert_allclose(follower.at(100.25), [5.0, 7.0, 0.25])
    output.hold(T0 + 250_000_000)
    follower.on_trajectory(publisher.sent[1], 100.25)
    np.testing.assert_allclose(follower.at(103.0), [5.0, 7.0, 0.25])
