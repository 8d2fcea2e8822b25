from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wam_policy_ros.contract.errors import ConfigError, LimitViolation
from wam_policy_ros.contract.joining import Joined, Rules, join, smoothstep
from wam_policy_ros.contract.plan import Plan
from wam_policy_ros.contract.safety import too_sharp

from .motion import DT, T0, at_500_hz, broken_at_500_hz, limits, rows, times_s

RAMP = np.arange(1, 25) * DT
STILL = Plan.standing(np.array([0.0, 0.5, 0.04]), T0)
CLAMP = Rules(clamp=True)


def first(targets: np.ndarray, rules: Rules = Rules(), **changes: float) -> Joined:
    """Of a robot that stands."""
    return join(STILL, targets, times_s(), T0, limits(**changes), rules, at_rest=True)


def test_rows_of_a_gentle_first_chunk_leave_as_they_are() -> None:
    targets = rows(0.1 * RAMP, 0.5, 0.04)
    joined = first(targets)
    np.testing.assert_array_equal(joined.plan.positions[1:], targets)
    np.testing.assert_allclose(joined.plan.times_s, np.arange(25) * DT, atol=1e-9)
    assert joined.plan.velocities is not None
    np.testing.assert_allclose(joined.plan.velocities[1:-1, 0], 0.1, atol=1e-9)
    np.testing.assert_array_equal(joined.plan.velocities[-1], 0.0)
    assert (joined.blended, joined.eased, joined.braked, joined.clamped) == (0, 0, 0, ())


@pytest.mark.parametrize("speed", [0.8, 1.9])
def test_a_first_chunk_that_starts_sharply_is_eased_into_along_its_path_and_ends_at_rest(speed: float) -> None:
    targets = rows(speed * RAMP - 1.0, 0.5 - speed / 2 * RAMP, 0.04)
    still = Plan.standing(np.array([-1.0, 0.5, 0.04]), T0)
    joined = join(still, targets, times_s(), T0, limits(), Rules(), at_rest=True)
    assert joined.eased >= 2 and joined.braked >= 2 and not joined.blended and not joined.clamped
    assert not broken_at_500_hz(joined.plan, limits())
    q, v, _ = at_500_hz(joined.plan)
    np.testing.assert_allclose(q[:, 1] - 0.5, -(q[:, 0] + 1.0) / 2, atol=1e-9)
    assert np.abs(v).max() <= speed * (1 + 1e-6), "never faster than the policy asked for"
    lag = targets[10, 0] - joined.plan.positions[11, 0]
    assert lag == pytest.approx(speed * DT * joined.eased / 2, rel=0.3), "half of the easing behind"


def moving(speed: float) -> Plan:
    """Since T0, joint a."""
    at = np.arange(25) * DT
    still = np.zeros((25, 2))
    return Plan(
        T0 + np.rint(at * 1e9).astype(np.int64),
        rows(speed * at, 0.5, 0.04, count=25),
        np.concatenate([np.append(np.full(24, speed), 0.0)[:, None], still], axis=1),
    )


@pytest.mark.parametrize("off_by", [0.0, 0.01, -0.03])
def test_a_chunk_joins_the_running_plan_without_a_jump_in_position_or_velocity(off_by: float) -> None:
    old = moving(0.8)
    now = T0 + round(0.6e9)
    targets = rows(0.8 * (0.6 + RAMP + 0.02) + off_by, 0.5, 0.04)
    joined = join(old, targets, times_s(first=DT + 0.02), now, limits(), Rules(), at_rest=False)
    q, v = old.state_at(now)
    np.testing.assert_allclose(joined.plan.positions[0], q)
    assert joined.plan.velocities is not None
    np.testing.assert_allclose(joined.plan.velocities[0], v)
    assert joined.blended == 6 and joined.step == pytest.approx(abs(off_by), abs=1e-6)
    np.testing.assert_allclose(joined.plan.positions[7:20, 0], targets[6:19, 0], atol=1e-9)
    assert not broken_at_500_hz(joined.plan, limits())
    if not off_by:
        assert np.abs(at_500_hz(joined.plan)[2][:500, 0]).max() < 0.1, "not felt at all"


def test_chunks_that_disagree_much_are_joined_over_more_rows() -> None:
    joined = join(STILL, rows(0.19, 0.5, 0.04), times_s(), T0, limits(acceleration=3.0), Rules(), at_rest=False)
    assert joined.blended > 6 and not broken_at_500_hz(joined.plan, limits(acceleration=3.0))


def test_without_velocities_the_plan_has_none() -> None:
    joined = first(rows(0.1 * RAMP, 0.5, 0.04), Rules(with_velocities=False))
    assert joined.plan.velocities is None
    sharp = first(rows(1.0 * RAMP, 0.5, 0.04), Rules(with_velocities=False))
    assert sharp.braked >= 2 and not broken_at_500_hz(sharp.plan, limits())


def test_one_row_that_lies_ahead_is_enough() -> None:
    now = T0 + 10**9
    joined = join(STILL, rows(0.0, 0.5, 0.04, count=1), np.array([0.1]), now, limits(), Rules(), at_rest=False)
    assert len(joined.plan.positions) == 2


@pytest.mark.parametrize(
    ("column", "says"),
    [
        (RAMP * 0.0 + 2.95, "position of a: 2.95 at row 0; expected: limit 2.9"),
        (np.where(RAMP < 0.5, 0.0, 0.5), "speed of a: .* limit 2"),
        (RAMP * 0.0 + 0.3, "first step of a: 0.3 at row 0; expected: limit 0.2"),
        (0.02 * np.sin(RAMP * 30), "acceleration of a: .* limit 10"),
    ],
)
def test_what_breaks_a_limit_is_refused_by_name(column: np.ndarray, says: str) -> None:
    with pytest.raises(LimitViolation, match=says) as refused:
        first(rows(column, 0.5, 0.04))
    assert not refused.value.far


def test_degrees_are_refused_in_every_mode_and_said_to_be_far_outside() -> None:
    for rules in (Rules(), CLAMP, replace(CLAMP, max_excess=100.0)):
        with pytest.raises(LimitViolation, match=r"far outside.*degrees") as refused:
            first(np.degrees(rows(0.1, 0.5, 0.04)), rules)
        assert refused.value.far


def test_clamping_slows_the_plan_down_along_its_path() -> None:
    targets = rows(1.5 * RAMP - 1.5 * DT + 0.01, 0.5 - 0.75 * RAMP, 0.04)
    with pytest.raises(LimitViolation):
        first(targets, velocity=1.2)
    joined = first(targets, CLAMP, velocity=1.2)
    assert not broken_at_500_hz(joined.plan, limits(velocity=1.2))
    (line,) = joined.clamped
    assert "speed of a" in line and "% of its speed" in line
    fast = at_500_hz(joined.plan)[1]
    assert 0.7 < np.abs(fast[:, 0]).max() <= 1.2
    done = joined.plan.positions[10:-4]
    np.testing.assert_allclose(np.diff(done[:, 1]) / np.diff(done[:, 0]), -0.5, atol=0.06)


def test_clamping_has_an_end() -> None:
    with pytest.raises(LimitViolation, match="speed of a"):
        first(rows(1.7 * RAMP - 1.7 * DT, 0.5, 0.04), CLAMP, velocity=1.0)
    with pytest.raises(LimitViolation, match="first step"):
        first(rows(0.3, 0.5, 0.04), CLAMP)


def test_clamping_clips_positions_that_are_a_little_outside() -> None:
    near = Plan.standing(np.array([2.85, 0.5, 0.04]), T0)
    targets = rows(np.minimum(2.85 + 0.05 * RAMP, 2.92), 0.5, 0.04)
    joined = join(near, targets, times_s(), T0, limits(), CLAMP, at_rest=True)
    assert joined.plan.positions[:, 0].max() == 2.9 and "position of a" in joined.clamped[0]
    assert not broken_at_500_hz(joined.plan, limits())


def test_rows_at_a_limit_do_not_lead_the_controllers_cubic_beyond_it() -> None:
    near = Plan.standing(np.array([2.8, 0.5, 0.04]), T0)
    targets = rows(np.minimum(2.8 + 0.2 * RAMP, 2.9), 0.5, 0.04)
    joined = join(near, targets, times_s(), T0, limits(acceleration=50.0), Rules(), at_rest=True)
    assert at_500_hz(joined.plan)[0][:, 0].max() <= 2.9 + 1e-9


def test_a_robot_outside_its_limits_may_come_back_but_not_go_further_out() -> None:
    out = Plan.standing(np.array([2.95, 0.5, 0.04]), T0)
    joined = join(out, rows(2.89, 0.5, 0.04), times_s(), T0, limits(), Rules(), at_rest=True)
    assert not broken_at_500_hz(joined.plan, limits())
    with pytest.raises(LimitViolation, match="position of a"):
        join(out, rows(2.96, 0.5, 0.04), times_s(), T0, limits(), Rules(), at_rest=True)


def test_a_gripper_switches_at_once_without_overshoot_and_no_faster_than_allowed() -> None:
    targets = rows(0.0, 0.5, np.where(RAMP < 0.5, 0.06, -0.02))
    joined = first(targets, finger_speed=np.inf)
    finger = joined.plan.positions[1:, 2]
    np.testing.assert_array_equal(finger, np.where(RAMP < 0.5, 0.04, 0.0))
    q, _, _ = at_500_hz(joined.plan)
    assert q[:, 2].min() >= 0.0 and q[:, 2].max() <= 0.04
    slow = first(targets, finger_speed=0.2)
    assert not broken_at_500_hz(slow.plan, limits())
    assert slow.plan.positions[-1, 2] == 0.0 and (slow.plan.positions[:, 2] > 0.001).sum() > 10


@pytest.mark.parametrize("ease", [True, False])
def test_a_gripper_that_is_replanned_in_mid_stroke_stays_in_its_range(ease: bool) -> None:
    rng, plan, now = np.random.default_rng(0), STILL, T0
    low = high = 0.02
    for _ in range(200):
        finger = np.where(rng.uniform(0, 1.6) > RAMP, *rng.permutation([0.0, 0.04])) if rng.random() < 0.8 else 0.02
        targets = rows(0.0, 0.5, finger)
        lead = times_s(first=float(rng.uniform(1, 2)) * DT)
        allowed = limits(finger_speed=np.inf)
        plan = join(plan, targets, lead, now, allowed, Rules(ease_grippers=ease), at_rest=False).plan
        now += round(float(rng.uniform(0.2, 0.6)) * 1e9)
        done = plan.sample(np.arange(plan.times_ns[0], now, 2_000_000))[0][:, 2]
        low, high = min(low, done.min()), max(high, done.max())
    assert bool(low > -1e-6 and high < 0.04 + 1e-6) is ease, (low, high)


def test_an_eased_gripper_is_where_it_is_told_to_be_after_a_few_rows() -> None:
    joined = first(rows(0.0, 0.5, np.where(RAMP < 0.5, 0.04, 0.0)), Rules(ease_grippers=True), finger_speed=np.inf)
    finger = joined.plan.positions[1:, 2]
    switch = int((RAMP < 0.5).sum())
    assert finger[switch] <= 0.02 and finger[switch + 4] < 0.002 and abs(finger[-1]) < 1e-6


def test_smoothstep_starts_and_ends_without_a_kink() -> None:
    w, slope = smoothstep(6, 10)
    assert 0 < w[0] < 0.1 and 0.9 < w[5] < 1.0
    np.testing.assert_array_equal(w[6:], 1.0)
    np.testing.assert_allclose(w[:6] + w[5::-1], 1.0)
    np.testing.assert_allclose(slope[1:-1], (w[2:] - w[:-2]) / 2, atol=0.03)


def test_rules_that_make_no_sense() -> None:
    with pytest.raises(ConfigError):
        Rules(blend_steps=-1)


JITTER_S = 0.003
walk = st.lists(st.floats(-0.3, 0.3), min_size=24, max_size=24)


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(walk, min_size=2, max_size=2),
    finger=st.lists(st.floats(-0.5, 0.5), min_size=24, max_size=24),
    scale=st.floats(0.01, 3.0),
    at_rest=st.booleans(),
    clamp=st.booleans(),
    with_velocities=st.booleans(),
    speed=st.floats(-1.2, 1.2),
    acceleration=st.floats(2.0, 40.0),
    lead=st.floats(0.03, 0.2),
)
def test_nothing_that_leaves_breaks_a_limit_at_500_hz(
    steps: list[list[float]],
    finger: list[float],
    scale: float,
    at_rest: bool,
    clamp: bool,
    with_velocities: bool,
    speed: float,
    acceleration: float,
    lead: float,
) -> None:
    allowed = limits(acceleration=acceleration)
    rules = Rules(clamp=clamp, with_velocities=with_velocities, jitter_s=JITTER_S)
    old, now = STILL, T0
    if not at_rest:
        running = rows(0.5 * speed * RAMP**2, 0.5, 0.04)
        try:
            old = join(STILL, running, times_s(), T0, allowed, rules, at_rest=True).plan
        except LimitViolation:
            return
        now = T0 + 600_000_000
    q, v = old.state_at(now)
    arm = q[:2, None] + v[:2, None] * (RAMP + lead - DT) + 0.1 * scale * np.cumsum(np.array(steps), axis=1)
    targets = np.stack([*arm, np.array(finger)], axis=1)
    try:
        joined = join(old, targets, times_s(first=lead), now, allowed, rules, at_rest=at_rest)
    except LimitViolation:
        return
    assert not broken_at_500_hz(joined.plan, allowed)
    np.testing.assert_allclose(joined.plan.positions[0], q)
    assert (np.diff(joined.plan.times_ns) > 0).all()
    if joined.plan.velocities is not None:
        np.testing.assert_allclose(joined.plan.velocities[0], v)
        np.testing.assert_array_equal(joined.plan.velocities[-1], 0.0)
        for late_s in (-JITTER_S, JITTER_S):
            q, v = joined.plan.positions.copy(), joined.plan.velocities.copy()
            q[0], v[0] = old.state_at(now + round(late_s * 1e9))
            assert too_sharp(Plan(joined.plan.times_ns, q, v), allowed) is None, "begun late by the controller"
