"""Grippers beside the arm: when they are sent what, and that nothing is half sent."""

from __future__ import annotations

import numpy as np
import pytest

from wam_policy_ros.ros.gripper import GripperSwitch, Outputs, open_or_closed
from wam_policy_ros.ros.messages import Trajectory

S = 10**9


def switch(least: float = 0.004) -> tuple[GripperSwitch, list[float]]:
    sent: list[float] = []
    return GripperSwitch(sent.append, ends=(0.04, 0.0), least=least, min_interval_s=0.3), sent


def at(seconds: list[float]) -> np.ndarray:
    return np.array([round(s * S) for s in seconds], dtype=np.int64)


def test_positions_are_sent_when_they_are_due_and_only_on_change() -> None:
    gripper, sent = switch()
    gripper.on_tick(0)
    gripper.prepare(at([1, 2, 3]), np.array([0.04, 0.04, 0.0]))()
    for tick in (0.5, 1.0, 1.5, 2.5, 3.0, 3.5):
        gripper.on_tick(round(tick * S))
    assert sent == [0.04, 0.0]


def test_small_changes_wait_and_end_positions_do_not() -> None:
    gripper, sent = switch()
    gripper.prepare(at([1, 2, 3, 4]), np.array([0.002, 0.004, 0.0, 0.01]))()
    for tick in (1, 2, 3, 4):
        gripper.on_tick(tick * S)
    assert sent == [0.002, 0.0, 0.01]


def test_no_more_often_than_allowed_and_the_last_wish_counts() -> None:
    gripper, sent = switch()
    gripper.prepare(at([1.0, 1.1, 1.2, 1.25]), np.array([0.04, 0.0, 0.04, 0.0]))()
    for k in range(100, 160):
        gripper.on_tick(k * S // 100)
    assert sent == [0.04, 0.0]


def test_after_a_hold_nothing_of_the_plan_is_sent() -> None:
    gripper, sent = switch()
    gripper.prepare(at([1, 2]), np.array([0.04, 0.0]))()
    gripper.on_tick(S)
    gripper.clear()
    gripper.on_tick(5 * S)
    assert sent == [0.04]


@pytest.mark.parametrize(
    ("fractions", "closed", "want"),
    [
        ([0.5, 0.51, 0.46, 0.44], None, [0, 0, 0, 0]),
        ([0.51, 0.46, 0.44, 0.54, 0.56], None, [1, 1, 0, 0, 1]),
        ([0.46, 0.54], True, [1, 1]),
        ([0.46, 0.54], False, [0, 0]),
    ],
)
def test_threshold_and_hysteresis(fractions: list[float], closed: bool | None, want: list[float]) -> None:
    np.testing.assert_array_equal(open_or_closed(np.array(fractions), closed, threshold=0.5, hysteresis=0.1), want)


def trajectory(points: int = 2) -> Trajectory:
    positions = np.tile([[1.0, 2.0, 0.04]], (points, 1))
    return Trajectory(("a", "b", "finger"), positions, np.arange(1.0, points + 1), np.zeros_like(positions), stamp_ns=S)


def test_arm_and_gripper_get_their_own_part_and_all_is_encoded_before_any_is_sent() -> None:
    events: list[str] = []
    got: dict[str, Trajectory] = {}

    def encoder(name: str):  # type: ignore[no-untyped-def]
        def encode(part: Trajectory):  # type: ignore[no-untyped-def]
            events.append(f"encode {name}")
            got[name] = part
            return lambda: events.append(f"send {name}")

        return encode

    outputs = Outputs(np.array([False, False, True]), encoder("arm"), [encoder("finger")], whole=False)
    outputs(trajectory())
    assert events == ["encode arm", "encode finger", "send arm", "send finger"]
    assert got["arm"].names == ("a", "b") and got["finger"].names == ("finger",)
    assert got["finger"].velocities is not None and got["finger"].stamp_ns == S


def test_a_gripper_that_cannot_be_encoded_leaves_the_arm_alone() -> None:
    sent: list[str] = []

    def broken(part: Trajectory):  # type: ignore[no-untyped-def]
        raise ValueError("no")

    outputs = Outputs(np.array([False, False, True]), lambda part: lambda: sent.append("arm"), [broken], whole=False)
    with pytest.raises(ValueError, match="no"):
        outputs(trajectory())
    assert not sent


def test_switches_follow_the_plan_and_stop_with_a_hold() -> None:
    gripper, sent = switch()
    seen: list[Trajectory] = []
    outputs = Outputs(
        np.array([False, False, True]),
        lambda part: lambda: None,
        switches=[gripper],
        whole=False,
        watch=seen.append,
    )
    outputs(trajectory())
    outputs.on_tick(2 * S - 1)
    assert not sent
    outputs.on_tick(2 * S)
    assert sent == [0.04]
    outputs(trajectory(1))
    outputs.on_tick(9 * S)
    assert sent == [0.04] and len(seen) == 2
