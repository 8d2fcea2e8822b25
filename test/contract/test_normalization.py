"""Statistics from metadata.json and the five modes, against recorded numbers."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from test.golden_files import GOLDEN_DIR, golden
from wam_policy_ros.contract.embodiments import AGIBOT, DROID
from wam_policy_ros.contract.errors import ConfigError, StatisticsError
from wam_policy_ros.contract.interface import FieldSpec
from wam_policy_ros.contract.normalization import FieldStatistics, Statistics


@pytest.fixture
def recorded() -> dict:
    path = GOLDEN_DIR / "data.json"
    if not path.is_file():
        pytest.skip("fixture data.json is not in this checkout")
    return json.loads(path.read_text())


@pytest.fixture
def metadata(recorded) -> dict:
    return copy.deepcopy(recorded["metadata"])


@pytest.mark.parametrize("mode", ["q99", "min_max", "mean_std", "scale", "binary"])
def test_modes_equal_the_recording_bit_for_bit(metadata, mode):
    data = golden("data.safetensors")
    statistics = Statistics.from_metadata(metadata, "oxe_droid").action["joint_position"]
    x = data["normaliser.x"].numpy()
    forward = statistics.forward(x, mode)
    assert forward.dtype == np.float32
    np.testing.assert_array_equal(forward, data[f"normaliser.{mode}.forward"].numpy())
    if mode != "scale":  # its inverse was not recorded
        np.testing.assert_array_equal(statistics.inverse(x, mode), data[f"normaliser.{mode}.inverse_of_x"].numpy())


def test_per_horizon_equals_the_recording_bit_for_bit(recorded):
    data = golden("data.safetensors")
    statistics = FieldStatistics("joint", **{k: np.array(v) for k, v in recorded["per_horizon_stats"].items()})
    x = data["per_horizon.x"].numpy()
    assert statistics.per_horizon
    np.testing.assert_array_equal(statistics.forward(x), data["per_horizon.q99.forward"].numpy())
    np.testing.assert_array_equal(statistics.inverse(x), data["per_horizon.q99.inverse_of_x"].numpy())
    np.testing.assert_array_equal(statistics.inverse(x[:5]), data["per_horizon.q99.inverse_of_x"].numpy()[:5])


def test_per_horizon_refuses_more_rows_than_it_has():
    statistics = FieldStatistics("joint", q01=np.zeros((4, 2)), q99=np.ones((4, 2)))
    with pytest.raises(StatisticsError, match="per step"):
        statistics.inverse(np.zeros((5, 2)))
    with pytest.raises(StatisticsError, match="per step"):
        statistics.inverse(np.zeros(2))


def test_equal_quantiles_pass_through_and_decode_to_q01():
    statistics = FieldStatistics("x", q01=np.array([0.25, -1.0]), q99=np.array([0.25, 1.0]))
    np.testing.assert_array_equal(statistics.forward(np.array([0.6, 0.5])), [0.6, 0.5])
    np.testing.assert_array_equal(statistics.forward(np.array([3.0, 3.0])), [1.0, 1.0])
    np.testing.assert_array_equal(statistics.inverse(np.array([0.9, 0.5])), [0.25, 0.5])


def test_known_vector_both_ways():
    """Quantiles that are exact in binary, so that every result is too."""
    statistics = FieldStatistics("x", q01=np.array([-1.0, -1.0, -1.0, 0.0]), q99=np.array([1.0, 2.0, 1.0, 1.0]))
    np.testing.assert_array_equal(statistics.forward(np.array([0.5, 0.5, -1.5, 0.25])), [0.5, 0.0, -1.0, -0.5])
    np.testing.assert_array_equal(statistics.inverse(np.array([0.0, 0.0, 0.0, -1.0])), [0.0, 0.5, 0.0, 0.0])


def test_statistics_are_cast_to_the_dtype_of_the_values():
    q01, q99 = np.array([0.1]), np.array([0.7])
    statistics = FieldStatistics("x", q01=q01, q99=q99)
    n = np.array([0.3], dtype=np.float32)
    lo, hi = q01.astype(np.float32), q99.astype(np.float32)
    assert statistics.inverse(n)[0] == ((n + np.float32(1)) / np.float32(2) * (hi - lo) + lo)[0]
    assert statistics.forward(np.array([0.3])).dtype == np.float64


def test_embodiment_absent_lists_the_ones_present():
    with pytest.raises(StatisticsError) as e:
        Statistics.from_metadata({"agibot": {"statistics": {}}, "gr1": {"statistics": {}}}, "oxe_droid")
    for word in ("oxe_droid", "agibot", "gr1"):
        assert word in str(e.value)


def test_empty_statistics_are_refused_by_name():
    with pytest.raises(StatisticsError, match=r"statistics\.state") as e:
        Statistics.from_metadata({"oxe_droid": {"statistics": {}}}, "oxe_droid")
    assert any("statistics.action" in p for p in e.value.problems)


def test_unknown_embodiment_needs_explicit_fields():
    entry = {"statistics": {"state": {}, "action": {"hand": {"q01": [0], "q99": [1]}}}}
    with pytest.raises(ConfigError, match="unknown embodiment"):
        Statistics.from_metadata({"my_robot": entry}, "my_robot")
    hand = FieldSpec("hand", 1, "1", "gripper")
    statistics = Statistics.from_metadata({"my_robot": entry, "other": {}}, "my_robot", state=(), action=(hand,))
    assert statistics.action["hand"].q99 == [1.0]
    assert statistics.action["hand"].mean is None


def _set(metadata, group, key, value):
    metadata["oxe_droid"]["statistics"][group]["joint_position"][key] = value


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda m: m["oxe_droid"]["statistics"]["state"].pop("gripper_position"), r"state\.gripper_position is absent"),
        (
            lambda m: m["oxe_droid"]["statistics"]["action"]["joint_position"].pop("q99"),
            r"action\.joint_position has no 'q99'",
        ),
        (lambda m: _set(m, "state", "q01", None), r"state\.joint_position has no 'q01'"),
        (lambda m: _set(m, "state", "q01", [0.0] * 6), r"state\.joint_position\.q01 has shape \(6,\)"),
        (lambda m: _set(m, "action", "q99", [1.0] * 6 + [float("nan")]), r"action\.joint_position\.q99 is not finite"),
        (lambda m: _set(m, "action", "std", [float("inf")] * 7), r"action\.joint_position\.std is not finite"),
        (lambda m: _set(m, "action", "q99", ["a"] * 7), r"q99 is not an array of numbers"),
        (lambda m: _set(m, "action", "q99", [[1.0] * 7] * 24), r"shapes differ"),
        (lambda m: (_set(m, "state", "q01", [[0.0] * 7]), _set(m, "state", "q99", [[1.0] * 7])), r"actions only"),
    ],
)
def test_faults_are_named(metadata, break_it, message):
    break_it(metadata)
    with pytest.raises(StatisticsError, match=message):
        Statistics.from_metadata(metadata, "oxe_droid")


def test_every_fault_is_listed_at_once(metadata):
    del metadata["oxe_droid"]["statistics"]["state"]["gripper_position"]
    _set(metadata, "action", "q01", [0.0])
    with pytest.raises(StatisticsError) as e:
        Statistics.from_metadata(metadata, "oxe_droid")
    assert len([p for p in e.value.problems if "gripper_position" in p or "q01" in p]) == 2


def test_fields_not_asked_for_are_not_read(metadata):
    metadata["oxe_droid"]["statistics"]["state"]["cartesian_position"] = {"q01": "nonsense"}
    assert set(Statistics.from_metadata(metadata, "oxe_droid").state) == {f.name for f in DROID.state}


def test_another_embodiment_of_a_shared_file(metadata):
    def entry(fields):
        return {f.name: {"q01": [-1.0] * f.dim, "q99": [1.0] * f.dim} for f in fields}

    metadata["agibot"] = {"statistics": {"state": entry(AGIBOT.state), "action": entry(AGIBOT.action)}}
    assert list(Statistics.from_metadata(metadata, "agibot").action) == [f.name for f in AGIBOT.action]


@given(
    lo=st.floats(-10, 10),
    span=st.floats(1e-3, 10),
    x=st.floats(-30, 30),
    mode=st.sampled_from(["q99", "min_max", "mean_std", "scale"]),
)
def test_inverse_undoes_forward(lo, span, x, mode):
    lo_, hi_, x_ = np.array([lo]), np.array([lo + span]), np.array([x])
    statistics = FieldStatistics("x", q01=lo_, q99=hi_, min=lo_, max=hi_, mean=lo_, std=np.array([span]))
    back = statistics.inverse(statistics.forward(x_, mode, clamp=False), mode)
    np.testing.assert_allclose(back, x_, rtol=1e-9, atol=1e-9 * max(1.0, abs(lo)))
    clamped = statistics.forward(x_, mode)
    assert mode in ("mean_std", "scale") or abs(clamped[0]) <= 1
