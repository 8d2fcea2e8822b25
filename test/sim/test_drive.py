"""What the simulated arm is told, by the rules of joint_trajectory_controller."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from wam_policy_ros.ros.trajectory_faults import trajectory_faults
from wam_policy_ros.sim.drive import ARM, FINGERS, GRIPPER, Drive, Next
from wam_policy_ros.sim.errors import InvalidTarget
from wam_policy_ros.sim.runner import DT_NS

HOME = np.array([0.0, -0.2, 0.0, -2.4, 0.0, 2.2, 0.8])
T0 = 5_000_000_000


def stamp(ns: int) -> Any:
    return SimpleNamespace(sec=ns // 10**9, nanosec=ns % 10**9)


def message(
    rows: Any, *, names: Any = ARM, start_ns: int = 0, velocities: Any = None, first_ns: int = DT_NS, dt_ns: int = DT_NS
) -> Any:
    points = [
        SimpleNamespace(
            positions=list(row),
            velocities=[] if velocities is None else list(velocities[k]),
            accelerations=[],
            effort=[],
            time_from_start=stamp(first_ns + k * dt_ns),
        )
        for k, row in enumerate(rows)
    ]
    return SimpleNamespace(header=SimpleNamespace(stamp=stamp(start_ns)), joint_names=list(names), points=points)


@pytest.fixture
def drive() -> Drive:
    made = Drive(finger_open_m=0.04, dt_ns=DT_NS, ticks=8, faults=trajectory_faults)
    made.begin(HOME, T0)
    return made


def ramp(count: int, step: float = 0.01) -> np.ndarray:
    return HOME + step * np.arange(1, count + 1)[:, None]


def test_ticks_get_exactly_the_rows_of_a_trajectory(drive: Drive) -> None:
    drive.on_trajectory(message(ramp(10)), T0)
    for k in range(10):
        joints, gripper = drive.target(T0 + (k + 1) * DT_NS)
        assert joints.tolist() == ramp(10)[k].tolist() and gripper == 0.0
    assert drive.target(T0 + 30 * DT_NS)[0].tolist() == ramp(10)[-1].tolist(), "it holds at the end"


def test_between_points_velocities_make_a_cubic(drive: Drive) -> None:
    velocities = [[1.0] * 7, [0.0] * 7]
    drive.on_trajectory(message([HOME + 0.1, HOME + 0.2], velocities=velocities, dt_ns=4 * DT_NS), T0)
    u = 0.25  # a tick after the first point; Hermite from (0.1, 1.0) to (0.2, 0.0)
    t = 4 * DT_NS * 1e-9
    wanted = 0.1 * (2 * u**3 - 3 * u**2 + 1) + t * (u**3 - 2 * u**2 + u) + 0.2 * (-2 * u**3 + 3 * u**2)
    np.testing.assert_allclose(drive.target(T0 + 2 * DT_NS)[0] - HOME, wanted, atol=1e-9)


def test_a_new_trajectory_replaces_the_old_one_from_its_stamp_on(drive: Drive) -> None:
    drive.on_trajectory(message(ramp(10)), T0)
    other = HOME + np.array([[0.5], [0.6]])
    drive.on_trajectory(message(other, start_ns=T0 + 3 * DT_NS), T0)
    assert drive.target(T0 + 3 * DT_NS)[0].tolist() == ramp(10)[2].tolist(), "until then the old one"
    assert drive.target(T0 + 4 * DT_NS)[0].tolist() == other[0].tolist()
    assert drive.target(T0 + 9 * DT_NS)[0].tolist() == other[1].tolist(), "the old one is forgotten"


def test_points_that_have_passed_are_skipped(drive: Drive) -> None:
    now = T0 + 4 * DT_NS
    drive.on_trajectory(message(ramp(10), start_ns=T0), now)
    assert drive.target(now)[0].tolist() == HOME.tolist()
    assert drive.target(now + DT_NS)[0].tolist() == ramp(10)[4].tolist()


def test_a_trajectory_may_name_some_joints_in_any_order_and_the_gripper_in_its_own_unit(drive: Drive) -> None:
    drive.on_trajectory(message([[1.0, 0.01]], names=[ARM[2], FINGERS[0]]), T0)
    joints, gripper = drive.target(T0 + DT_NS)
    assert joints.tolist() == [*HOME[:2], 1.0, *HOME[3:]]
    assert gripper == pytest.approx(0.75)
    drive.on_trajectory(message([[0.5]], names=[GRIPPER]), T0 + DT_NS)
    assert drive.target(T0 + 2 * DT_NS)[1] == 0.5


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (message(ramp(2), names=["nobody", *ARM[1:]]), "nobody"),
        (message([]), "no points"),
        (message([[np.nan] * 7]), "finite"),
        (message([HOME[:6]]), "7 positions"),
        (message(ramp(2), dt_ns=0), "strictly increase"),
        (message(ramp(2), first_ns=0), "must be positive"),
        (message(ramp(2), velocities=[[0.1] * 7] * 2), "last point must be zero"),
        (message(ramp(2), start_ns=T0 - 9 * DT_NS), "in the past"),
    ],
)
def test_what_a_controller_refuses_is_refused_with_a_reason_and_changes_nothing(
    drive: Drive, broken: Any, why: str
) -> None:
    drive.on_trajectory(message(ramp(10)), T0)
    with pytest.raises(InvalidTarget, match=why):
        drive.on_trajectory(broken, T0)
    assert drive.target(T0 + 5 * DT_NS)[0].tolist() == ramp(10)[4].tolist()


def test_joint_commands_may_be_partial(drive: Drive) -> None:
    drive.on_joint_command([ARM[6], FINGERS[1]], [0.1, 0.0], T0)
    joints, gripper = drive.target(T0 + DT_NS)
    assert joints.tolist() == [*HOME[:6], 0.1] and gripper == 1.0
    drive.on_joint_command([ARM[0]], [0.2], T0 + DT_NS)
    joints, gripper = drive.target(T0 + 2 * DT_NS)
    assert joints.tolist() == [0.2, *HOME[1:6], 0.1] and gripper == 1.0
    for names, positions in (([ARM[0]], [np.inf]), (["nobody"], [0.0]), (ARM, [0.0]), ([], [])):
        with pytest.raises(InvalidTarget):
            drive.on_joint_command(names, positions, T0)


def test_the_gripper_has_a_topic_of_its_own(drive: Drive) -> None:
    drive.on_trajectory(message(ramp(10)), T0)
    drive.on_gripper(0.7)
    assert drive.target(T0 + DT_NS)[1] == 0.7, "beside a trajectory that does not name it"
    for value in (-0.1, 1.1, np.nan):
        with pytest.raises(InvalidTarget):
            drive.on_gripper(value)


def test_in_lock_step_a_trajectory_is_good_for_some_ticks_and_a_command_for_one(drive: Drive) -> None:
    def nexts(start: int, count: int) -> list[Next]:
        return [drive.next(T0 + k * DT_NS) for k in range(start, start + count)]

    assert nexts(0, 1) == [Next.REST]
    drive.on_trajectory(message(ramp(24)), T0)
    assert nexts(0, 24) == [Next.GO] * 8 + [Next.WAIT] * 16 and nexts(24, 1) == [Next.REST]
    drive.on_trajectory(message(ramp(24)), T0 + 8 * DT_NS)
    assert nexts(8, 9) == [Next.GO] * 8 + [Next.WAIT]
    drive.on_trajectory(message([HOME], first_ns=int(2.5 * DT_NS)), T0 + 16 * DT_NS)
    assert nexts(16, 4) == [Next.GO] * 3 + [Next.REST], "the tick in which it ends is its own"
    drive.on_joint_command([ARM[0]], [0.2], T0 + 20 * DT_NS)
    assert nexts(20, 3) == [Next.GO, Next.WAIT, Next.WAIT]
    drive.give_up(T0 + 22 * DT_NS)
    assert nexts(22, 1) == [Next.REST]
