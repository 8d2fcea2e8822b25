from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wam_policy_ros.contract.chunking import (
    committed_weights,
    next_request_due,
    rows_to_run,
    stops_between_chunks,
    velocities,
)
from wam_policy_ros.contract.errors import ChunkError, LateChunk
from wam_policy_ros.contract.interface import ActionChunk

DT = 1 / 15
T0 = 1_800_000_000_000_000_000  # of the size of a real clock: float64 seconds would lose 200 ns here


def chunk(n: int = 24, stamp_ns: int | None = T0) -> ActionChunk:
    rows = np.arange(n, dtype=np.float64)[:, None] * np.array([[1.0, -2.0]])
    return ActionChunk(actions=rows, dt_s=DT, stamp_ns=stamp_ns, session_id="s", step=1)


@pytest.mark.parametrize(
    ("latency_s", "skipped"),
    [(0.0, 0), (0.036, 0), (0.037, 1), (1 / 15, 1), (0.25, 4), (1.0, 15), (1.36, 20), (1.369, 20)],
)
def test_rows_in_the_past_and_too_near_are_dropped(latency_s: float, skipped: int) -> None:
    run = rows_to_run(chunk(), T0 + round(latency_s * 1e9), min_lead_s=0.03, first_of_session=False)
    assert run.rows[0, 0] == skipped
    np.testing.assert_allclose(run.time_from_start_s, np.arange(skipped + 1, 25) * DT - latency_s, atol=2e-9)
    assert run.time_from_start_s[0] > 0.03


def test_fewer_than_three_rows_left_is_late() -> None:
    assert (
        len(rows_to_run(chunk(), T0 + round((22 * DT - 0.031) * 1e9), min_lead_s=0.03, first_of_session=False).rows)
        == 3
    )
    with pytest.raises(LateChunk, match="2 of 24 rows"):
        rows_to_run(chunk(), T0 + round((22 * DT - 0.029) * 1e9), min_lead_s=0.03, first_of_session=False)


def test_first_chunk_of_a_session_is_executed_whole_however_long_it_took() -> None:
    run = rows_to_run(chunk(), T0 + 60 * 10**9, min_lead_s=0.03, first_of_session=True)
    np.testing.assert_array_equal(run.rows, chunk().actions)
    np.testing.assert_allclose(run.time_from_start_s, np.arange(1, 25) * DT)


def test_a_chunk_without_a_stamp_cannot_be_placed() -> None:
    with pytest.raises(ChunkError, match="stamp"):
        rows_to_run(chunk(stamp_ns=None), T0, min_lead_s=0.03, first_of_session=False)


@given(st.floats(0, 1.3), st.floats(0, 0.2), st.integers(3, 60))
def test_kept_rows_are_the_tail_in_order(latency_s: float, lead_s: float, n: int) -> None:
    now = T0 + round(latency_s * 1e9)
    try:
        run = rows_to_run(chunk(n), now, min_lead_s=lead_s, first_of_session=False)
    except LateChunk:
        assert n - np.floor((latency_s + lead_s) / DT) <= 3
        return
    np.testing.assert_array_equal(run.rows, chunk(n).actions[-len(run.rows) :])
    assert (np.diff(run.time_from_start_s) > 0).all() and run.time_from_start_s[0] > max(0.0, lead_s - 1e-3 * DT - 1e-9)


def test_velocities_are_exact_for_a_parabola_and_end_with_zero() -> None:
    t = 0.02 + np.arange(10) * DT
    rows = np.stack([t**2, 3 * t], axis=1)
    v = velocities(rows, t)
    np.testing.assert_allclose(v[1:-1], np.stack([2 * t, np.full(10, 3.0)], axis=1)[1:-1], atol=1e-12)
    np.testing.assert_allclose(v[0], (rows[1] - rows[0]) / DT)
    np.testing.assert_array_equal(v[-1], 0.0)


def test_velocity_of_the_first_row_uses_the_row_before_it() -> None:
    t = 0.02 + np.arange(4) * DT
    v = velocities((t**2)[:, None], t, before=(np.array([(t[0] - DT) ** 2]), t[0] - DT))
    np.testing.assert_allclose(v[0, 0], 2 * t[0])
    assert v.shape == (4, 1)


@pytest.mark.parametrize("n", [1, 2])
def test_velocities_of_very_short_runs(n: int) -> None:
    v = velocities(np.arange(n, dtype=np.float64)[:, None], np.arange(1, n + 1) * 0.5)
    np.testing.assert_array_equal(v[:, 0], [2.0, 0.0][2 - n :])


def test_request_is_due_so_that_the_answer_is_there_after_the_steps_to_execute() -> None:
    due = {"execute_steps": 8, "dt_s": DT, "plan_end_ns": T0 + 10**9}
    assert next_request_due(T0, latency_s=0.2, stops=False, **due) == T0 + round((8 * DT - 0.2) * 1e9)
    assert next_request_due(T0, latency_s=None, stops=False, **due) == T0 + round(8 * DT * 1e9)
    assert next_request_due(T0, latency_s=3.0, stops=True, **due) == T0 + 10**9


def test_a_policy_slower_than_its_chunk_makes_the_robot_stop_between_chunks() -> None:
    at = {"horizon": 24, "dt_s": DT, "min_lead_s": 0.03}
    assert not stops_between_chunks(latency_s=None, **at)
    assert not stops_between_chunks(latency_s=1.36, **at)
    assert stops_between_chunks(latency_s=1.38, **at)


@pytest.mark.parametrize(
    ("latency_s", "skipped"), [(0.0, 0), (0.25, 4), (0.0666667, 1), (0.0667, 1), (0.068, 2), (0.61, 10)]
)
def test_with_a_lead_of_one_step_the_latency_in_steps_is_rounded_up(latency_s: float, skipped: int) -> None:
    run = rows_to_run(chunk(), T0 + round(latency_s * 1e9), min_lead_s=DT, first_of_session=False)
    assert run.rows[0, 0] == skipped and len(run.rows) == 24 - skipped


def test_committed_rows_are_firm_until_the_chunk_comes_and_free_at_the_plans_end() -> None:
    w = committed_weights(np.arange(1, 25) * DT, arrival_s=0.5, end_s=1.2)
    np.testing.assert_array_equal(w[:7], 1.0)
    np.testing.assert_array_equal(w[17:], 0.0)
    assert (np.diff(w) <= 0).all() and 0.4 < w[12] < 0.6
    assert committed_weights(np.array([0.1]), arrival_s=0.5, end_s=0.2)[0] == 1.0
