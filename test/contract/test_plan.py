"""Plans and the controller's interpolation: values at hand-checked places, extremes against samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wam_policy_ros.contract.hermite import Cubics, evaluate, minmod
from wam_policy_ros.contract.plan import Plan

T0 = 1_800_000_000_000_000_000
NS = np.array([0, 10**9, 3 * 10**9]) + T0


def test_lines_without_velocities() -> None:
    plan = Plan(NS, np.array([[0.0], [1.0], [5.0]]))
    np.testing.assert_allclose(
        plan.sample(T0 + np.array([-(10**9), 5 * 10**8, 2 * 10**9, 9 * 10**9]))[0], [[0], [0.5], [3], [5]]
    )
    q, v = plan.state_at(T0 + 2 * 10**9)
    assert (q[0], v[0]) == (3.0, 2.0)
    assert plan.state_at(plan.end_ns)[1][0] == 0.0 and plan.state_at(T0 - 1)[1][0] == 0.0


def test_cubics_reproduce_a_cubic() -> None:
    def f(t: np.ndarray) -> np.ndarray:
        return t**3 - 2 * t**2 + 0.5

    t = np.array([0.0, 1.0, 3.0])
    positions, rates = f(t)[:, None], (3 * t**2 - 4 * t)[:, None]
    at = np.linspace(0, 2.99, 50)
    q, v = evaluate(t, positions, rates, at)
    np.testing.assert_allclose(q[:, 0], f(at), atol=1e-12)
    np.testing.assert_allclose(v[:, 0], 3 * at**2 - 4 * at, atol=1e-12)


def test_a_plan_moves_with_the_clock_and_keeps_nanoseconds() -> None:
    plan = Plan(NS, np.array([[0.0], [1.0], [5.0]])).shifted(-(10**10) + 1)
    assert plan.end_ns == T0 + 3 * 10**9 - 10**10 + 1
    assert plan.at(T0 + 5 * 10**8 - 10**10 + 1)[0] == pytest.approx(0.5, abs=1e-9)


def test_a_standing_robot_stands() -> None:
    q, v = Plan.standing(np.array([1.0, 2.0]), T0).state_at(T0 + 5)
    np.testing.assert_array_equal((q, v), [[1.0, 2.0], [0.0, 0.0]])


numbers = st.lists(st.floats(-3, 3), min_size=5, max_size=5)


@settings(max_examples=200, deadline=None)
@given(numbers, numbers, st.lists(st.floats(0.05, 2.0), min_size=4, max_size=4), st.booleans())
def test_extremes_are_those_of_the_curve(q: list[float], v: list[float], h: list[float], lines: bool) -> None:
    t = np.concatenate([[0.0], np.cumsum(h)])
    positions, rates = np.array(q)[:, None], None if lines else np.array(v)[:, None]
    cubics = Cubics.through(t, positions, rates)
    low, high = cubics.range()
    u = np.linspace(0, 1, 400)[:, None, None] * cubics.h
    at, speed = cubics.position(u)[..., 0], np.abs(cubics.velocity(u))[..., 0]
    spread = np.ptp(at, axis=0) + 1e-9
    assert (at.min(axis=0) >= low[:, 0] - 1e-9).all() and (at.max(axis=0) <= high[:, 0] + 1e-9).all()
    assert (at.min(axis=0) <= low[:, 0] + 1e-3 * spread).all() and (at.max(axis=0) >= high[:, 0] - 1e-3 * spread).all()
    top = cubics.highest_speed()[:, 0]
    assert (speed.max(axis=0) <= top + 1e-9).all() and (speed.max(axis=0) >= 0.99 * top - 1e-3).all()
    sharp = np.abs(np.diff(cubics.velocity(u)[..., 0], axis=0) / np.diff(u[..., 0], axis=0)).max(axis=0)
    assert (sharp <= cubics.highest_acceleration()[:, 0] + 1e-6).all()


@given(numbers)
def test_minmod_velocities_do_not_overshoot(q: list[float]) -> None:
    t, positions = np.arange(5.0), np.array(q)[:, None]
    v = minmod(t, positions)
    cubics = Cubics.through(t, positions, v)
    low, high = cubics.range()
    ends = np.stack([positions[:-1], positions[1:]])
    assert (low >= ends.min(axis=0) - 1e-9).all() and (high <= ends.max(axis=0) + 1e-9).all()
    assert (cubics.highest_speed() <= 1.5 * np.abs(np.diff(positions, axis=0)) + 1e-9).all()
    assert v[0] == v[-1] == 0
