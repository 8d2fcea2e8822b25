"""From chunks to plans: committed rows for the denoiser, grippers, the pace."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from wam_policy_ros.contract.errors import ConfigError, InvalidState
from wam_policy_ros.contract.fakes import ScriptedPolicy, example_observation
from wam_policy_ros.contract.interface import CommittedRows, Observation
from wam_policy_ros.ros.pace import Pace
from wam_policy_ros.ros.parameters import NodeParameters

from .rig import DT, START_NS, Rig, wander


def recording(**options: Any) -> tuple[ScriptedPolicy, list[Observation]]:
    seen: list[Observation] = []
    good = wander()

    def rows(observation: Observation, step: int) -> np.ndarray:
        seen.append(observation)
        return np.asarray(good._rows(observation, step))

    return ScriptedPolicy(rows, **options), seen


def test_committed_rows_say_what_the_robot_will_do_until_the_chunk_comes() -> None:
    policy, seen = recording(inpainting=True)
    rig = Rig(policy, lambda call: 0.4, **{"control.rtc": "denoiser"})
    rig.play(6.0)
    assert seen[0].committed is None, "a robot at rest is bound to nothing"
    late = seen[6]
    assert late.committed is not None and late.stamp_ns is not None
    asked_s = (late.stamp_ns - START_NS) * 1e-9
    (at_s, plan) = max((t, m) for t, m in rig.plans if t <= asked_s + 0.05)
    rows, weights = late.committed.rows, late.committed.weights
    assert 10 < len(rows) <= 24
    due_s = asked_s + np.arange(1, len(rows) + 1) * DT
    # Between the plan's points, which are at other times, it is a cubic; a line is close.
    want = np.array([np.interp(due_s, at_s + plan.times_s, column) for column in plan.positions.T]).T
    inside = due_s > at_s + plan.times_s[0]
    np.testing.assert_allclose(rows[inside, :7], want[inside, :7], atol=3e-3)
    np.testing.assert_allclose(rows[inside, 7], 1.0 - want[inside, 7] / 0.04, atol=1e-6)
    assert (weights[: round(0.4 / DT) - 1] == 1.0).all() and weights[-1] < 0.2 and (np.diff(weights) <= 0).all()
    assert not rig.control.fault and rig.control.counters["refused"] == 0


def test_blending_alone_gives_no_committed_rows_and_a_policy_that_cannot_is_refused() -> None:
    policy, seen = recording()
    rig = Rig(policy)
    rig.play(3.0)
    assert seen and all(o.committed is None for o in seen)
    with pytest.raises(ConfigError, match=r"control\.rtc"):
        Rig(policy, **{"control.rtc": "denoiser"})
    rows = CommittedRows(np.zeros((4, 8)), np.ones(4))
    given = dataclasses.replace(example_observation(policy.spec), committed=rows)
    with pytest.raises(InvalidState, match="cannot take committed rows"):
        policy.infer(policy.open(), given)


def test_a_binary_gripper_is_open_or_closed_and_does_not_flutter() -> None:
    values = iter([0.2, 0.54, 0.56, 0.46, 0.44, 0.52] + [0.52] * 50)
    good = wander()

    def rows(observation: Observation, step: int) -> np.ndarray:
        out = np.asarray(good._rows(observation, step))
        out[:, 7] = next(values)
        return out

    rig = Rig(ScriptedPolicy(rows), **{"gripper.command": "binary"})
    rig.play(5.0)
    last = [float(m.positions[-1, 7]) for _, m in rig.plans]
    assert last[:6] == [0.04, 0.04, 0.0, 0.0, 0.04, 0.04]


def pace(**params: Any) -> Pace:
    out = Pace(NodeParameters.from_values({"backend": "hold", **params}))
    out.activate(wander().spec, DT, (9.0, 0.3))
    return out


def test_stall_share_is_the_part_of_the_running_time_after_the_plans_end() -> None:
    p, second = pace(), 10**9
    assert p.stall_share is None
    for k in range(5):
        p.tick(k * second, 2 * second + second // 2)
    assert (p.running_s, p.stalled_s, p.stall_share) == (4.0, 1.5, 0.375)
    p.tick(5 * second, None)
    p.tick(6 * second, second)
    assert p.running_s == 4.0, "what lies between is not running"
    p.tick(3 * second, 9 * second)
    p.tick(4 * second, 9 * second)
    assert p.running_s == 5.0, "a clock that goes back is not counted"


def test_the_next_request_leaves_room_for_the_expected_step() -> None:
    p = pace()
    assert p.next_due_ns(0, 10**10) == round((8 * DT - 0.3) * 1e9)
    p.took(0.5)
    assert p.mean_s == pytest.approx(0.36)
    p.was_late(2.0)
    assert p.mean_s == 2.0 and not p.stops
    assert pace(**{"control.mode": "stop_and_go"}).next_due_ns(0, 77) == 77
