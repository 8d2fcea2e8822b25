from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace as Msg
from typing import Any

import numpy as np
import pytest

from wam_policy_ros.ros.messages import Trajectory, trajectory_to_msg
from wam_policy_ros.ros.trajectory_faults import trajectory_faults


def sound() -> Any:
    times = [(0, 66_666_667), (0, 133_333_333), (1, 0)]
    points = [
        Msg(positions=[0.1 * k, 0.2], velocities=[0.1, 0.0] if k < 2 else [0.0, 0.0], accelerations=[], effort=[],
            time_from_start=Msg(sec=s, nanosec=ns))
        for k, (s, ns) in enumerate(times)
    ]  # fmt: skip
    return Msg(header=Msg(stamp=Msg(sec=0, nanosec=0)), joint_names=["a", "b"], points=points)


def test_a_sound_one_has_none() -> None:
    assert trajectory_faults(sound()) == []
    plan = Trajectory(("a", "b"), np.zeros((3, 2)), np.array([0.1, 0.2, 0.3]), np.zeros((3, 2)))
    assert trajectory_faults(trajectory_to_msg(plan)) == []


def drop_a_joint(msg: Any) -> None:
    msg.points[1].positions = [0.1]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda m: setattr(m.header.stamp, "sec", 17), "stamp must be zero"),
        (lambda m: setattr(m, "joint_names", ["a", "a"]), "names"),
        (lambda m: setattr(m, "joint_names", []), "names"),
        (lambda m: m.points.clear(), "no points"),
        (lambda m: setattr(m.points[0].time_from_start, "nanosec", 0), "first point must be positive"),
        (lambda m: setattr(m.points[1].time_from_start, "nanosec", 66_666_667), "strictly increase"),
        (drop_a_joint, "2 positions"),
        (lambda m: setattr(m.points[0], "velocities", []), "velocities must be absent, or complete"),
        (lambda m: setattr(m.points[1], "accelerations", [0.0]), "accelerations must be absent, or complete"),
        (lambda m: m.points[1].positions.__setitem__(0, float("nan")), "finite"),
        (lambda m: m.points[0].velocities.__setitem__(0, float("inf")), "finite"),
        (lambda m: m.points[-1].velocities.__setitem__(0, 0.1), "last point must be zero"),
    ],
)
def test_each_fault_is_named(spoil: Callable[[Any], None], says: str) -> None:
    msg = sound()
    spoil(msg)
    assert any(says in line for line in trajectory_faults(msg)), trajectory_faults(msg)


def test_absolute_times_need_a_stamp() -> None:
    msg = sound()
    assert trajectory_faults(msg, absolute=True) == ["the header stamp is zero"]
    msg.header.stamp.sec = 17
    assert trajectory_faults(msg, absolute=True) == []


def test_a_message_with_a_fault_is_not_made() -> None:
    moving = Trajectory(("a",), np.zeros((2, 1)), np.array([0.1, 0.2]), np.full((2, 1), 0.5))
    with pytest.raises(ValueError, match="last point must be zero"):
        trajectory_to_msg(moving)
