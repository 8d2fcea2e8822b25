"""At which control steps predicted frames are due."""

from __future__ import annotations

from dataclasses import replace

from wam_policy_ros.contract.fakes import spec_of
from wam_policy_ros.contract.predicted import KEY, due_steps, trained_steps


def test_published_networks_predict_frames_evenly_over_the_rows() -> None:
    spec = spec_of("oxe_droid", weights="any")
    assert spec.horizon == 24 and due_steps(spec, 8) == [3, 6, 9, 12, 15, 18, 21, 24]


def test_a_network_trained_here_predicts_what_its_next_call_looks_at() -> None:
    """``train/samples.py``: the frames at s + 2, s + 4, s + 6, s + 8, each encoded twice, for 16 rows."""
    due = trained_steps((-6, -4, -2, 0), 8, 8)
    assert due == [2, 2, 4, 4, 6, 6, 8, 8]
    spec = replace(spec_of("oxe_droid", weights="any"), horizon=16, details={KEY: due})
    assert due_steps(spec, 8) == due
    assert due_steps(spec, 4) == [4, 8, 12, 16]  # another number of frames: not what was said


def test_what_cannot_be_is_not_claimed() -> None:
    assert trained_steps((-6, -4, -2, 0), 6, 8) is None  # would have been seen already
    assert trained_steps((-2, -1, 0), 3, 8) is None
    assert trained_steps((-23, -16, -8, 0), 24, 8) == [1, 1, 8, 8, 16, 16, 24, 24]
