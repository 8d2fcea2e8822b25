from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from wam_policy_ros.contract.errors import InvalidState
from wam_policy_ros.contract.fakes import spec_of
from wam_policy_ros.contract.interface import CommittedRows

SPEC = replace(spec_of("oxe_droid", weights="none"), inpainting=True)


def committed(rows: int = 4, columns: int = 8, weights: list[float] | None = None) -> CommittedRows:
    given = np.ones(rows) if weights is None else np.array(weights)
    return CommittedRows(np.zeros((rows, columns)), given)


def test_committed_rows_that_fit() -> None:
    committed(24).check_fit(SPEC)
    committed(3, weights=[1.0, 0.5, 0.0]).check_fit(SPEC)


@pytest.mark.parametrize(
    ("rows", "weights"),
    [((0, 8), (0,)), ((4,), (4,)), ((4, 8), (3,)), ((4, 8), (4, 1))],
)
def test_shapes_that_do_not_belong_together(rows: tuple[int, ...], weights: tuple[int, ...]) -> None:
    with pytest.raises(InvalidState, match="shape"):
        CommittedRows(np.zeros(rows), np.zeros(weights))


@pytest.mark.parametrize("weights", [[1.0, 0.5, 0.6], [1.1, 0.5, 0.0], [1.0, 0.0, -0.1]])
def test_weights_that_are_no_decay(weights: list[float]) -> None:
    with pytest.raises(InvalidState, match="not increasing"):
        committed(3, weights=weights)


def test_values_that_are_not_finite() -> None:
    with pytest.raises(InvalidState, match="not finite"):
        CommittedRows(np.full((2, 8), np.nan), np.ones(2))
    with pytest.raises(InvalidState, match="not finite"):
        committed(2, weights=[np.nan, 0.0])


def test_rows_of_another_policy_and_a_policy_that_cannot() -> None:
    with pytest.raises(InvalidState, match=r"\(25, 8\).*at most 24 rows of 8"):
        committed(25).check_fit(SPEC)
    with pytest.raises(InvalidState, match=r"\(4, 7\)"):
        committed(4, columns=7).check_fit(SPEC)
    with pytest.raises(InvalidState, match="cannot take committed rows"):
        committed().check_fit(replace(SPEC, inpainting=False))
