from __future__ import annotations

import numpy as np
import pytest

from wam_policy_ros.contract.errors import UnsafeChunk
from wam_policy_ros.contract.fakes import spec_of
from wam_policy_ros.contract.safety import SafetyGate

GATE = SafetyGate.for_policy(spec_of("oxe_droid", weights="none"))
DT = 1 / 15


def rows() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(24, 8)).astype(np.float32)


def test_a_sound_chunk_passes_unchanged() -> None:
    out = GATE.admit(rows(), dt_s=DT)
    assert out.dtype == np.float64
    np.testing.assert_array_equal(out, rows())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_value_that_is_not_finite_refuses_the_whole_chunk(bad: float) -> None:
    chunk = rows()
    chunk[5, 3] = bad
    with pytest.raises(UnsafeChunk, match=r"not finite.*row 5, column 3"):
        GATE.admit(chunk, dt_s=DT)


@pytest.mark.parametrize("shape", [(24, 7), (23, 8), (24, 8, 1), (192,)])
def test_a_wrong_shape_names_both(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsafeChunk) as error:
        GATE.admit(np.zeros(shape), dt_s=DT)
    assert str(shape) in str(error.value) and "(24, 8)" in str(error.value)


def test_integers_lists_and_another_step_time_are_refused() -> None:
    with pytest.raises(UnsafeChunk, match="dtype"):
        GATE.admit(np.zeros((24, 8), dtype=np.int64), dt_s=DT)
    with pytest.raises(UnsafeChunk, match="not an array"):
        GATE.admit(rows().tolist(), dt_s=DT)
    with pytest.raises(UnsafeChunk, match=r"0\.033333 s.*0\.066667 s"):
        GATE.admit(rows(), dt_s=1 / 30)
