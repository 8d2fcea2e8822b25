"""State and action vectors against recorded ones, and decode(encode(x)) = x."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from test.golden_files import GOLDEN_DIR, golden
from wam_policy_ros.contract.embodiments import AGIBOT, DROID
from wam_policy_ros.contract.errors import ChunkError, ConfigError, InvalidState, MissingInput
from wam_policy_ros.contract.interface import FieldSpec
from wam_policy_ros.contract.normalization import FieldStatistics, Statistics
from wam_policy_ros.contract.transforms import decode_actions, encode_actions, encode_state, raw_state


def _recorded_statistics() -> Statistics:
    path = GOLDEN_DIR / "data.json"
    if not path.is_file():
        pytest.skip("fixture data.json is not in this checkout")
    return Statistics.from_metadata(json.loads(path.read_text())["metadata"], "oxe_droid")


def _recorded_state(case: int) -> dict[str, np.ndarray]:
    data = golden("data.safetensors")
    return {f.name: data[f"case{case}.in.state.{f.name}"].numpy()[0] for f in DROID.state}


def _statistics(fields, seed=0, rows=None) -> Statistics:
    """Random quantiles; ``rows`` gives the actions one row per step."""
    rng = np.random.default_rng(seed)

    def group(kind, rows):
        out = {}
        for f in fields:
            shape = (f.dim,) if rows is None else (rows, f.dim)
            lo = rng.uniform(-2, 0, shape)
            out[f.name] = FieldStatistics(f"{kind}.{f.name}", q01=lo, q99=lo + rng.uniform(0.1, 2, shape))
        return out

    return Statistics("test", group("state", None), group("action", rows))


@pytest.mark.parametrize("case", range(4))
def test_state_equals_the_recording(case):
    encoded = encode_state(_recorded_state(case), DROID.state, _recorded_statistics())
    assert encoded.shape == (64,) and encoded.dtype == np.float64
    recorded = golden("data.safetensors")[f"case{case}.model_in.state"].numpy()[0, 0]
    np.testing.assert_array_equal(encoded.astype(np.float32), recorded)
    mask = golden("data.safetensors")[f"case{case}.model_in.state_mask"].numpy()[0, 0]
    assert not encoded[~mask].any() and mask.sum() == 8


def test_state_in_float64_equals_the_recorded_stage():
    encoded = encode_state(_recorded_state(0), DROID.state, _recorded_statistics())
    stage = golden("data.safetensors")["stage.case0.state_joint_normalised"].numpy()[0]
    assert stage.dtype == np.float64
    np.testing.assert_array_equal(encoded[:7], stage)


@pytest.mark.parametrize("case", range(4))
def test_actions_equal_the_recording_bit_for_bit(case):
    data = golden("data.safetensors")
    network = data[f"case{case}.in.action_pred_normalised_bf16_as_f32"].numpy()[0]
    actions = decode_actions(network, DROID.action, _recorded_statistics(), _recorded_state(case))
    assert actions.dtype == np.float64 and actions.shape == (24, 8)
    np.testing.assert_array_equal(actions[:, :7], data[f"case{case}.out.action.joint_position"].numpy())
    np.testing.assert_array_equal(actions[:, 7], data[f"case{case}.out.action.gripper_position"].numpy())


def test_padding_stays_zero_whatever_the_statistics():
    statistics = _statistics(AGIBOT.state)
    state = {f.name: np.full(f.dim, 0.5) for f in AGIBOT.state}
    assert not encode_state(state, AGIBOT.state, statistics, 44)[20:].any()
    assert encode_state(state, AGIBOT.state, statistics, 20).shape == (20,)
    with pytest.raises(ConfigError, match="wider"):
        encode_state(state, AGIBOT.state, statistics, 19)


def test_field_order_is_the_order_given():
    statistics = _statistics(DROID.state)
    state = {"joint_position": np.zeros(7), "gripper_position": np.ones(1)}
    swapped = encode_state(state, DROID.state[::-1], statistics)
    np.testing.assert_array_equal(swapped[:8], np.roll(encode_state(state, DROID.state, statistics)[:8], 1))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"gripper_position": None}, MissingInput, "gripper_position"),
        ({"joint_position": np.zeros(6)}, InvalidState, r"shape \(6,\)"),
        ({"joint_position": np.zeros((1, 7))}, InvalidState, r"shape \(1, 7\)"),
        ({"joint_position": np.array([0, 0, 0, np.nan, 0, 0, 0])}, InvalidState, "not finite"),
        ({"joint_position": np.array([0, 0, 0, np.inf, 0, 0, 0])}, InvalidState, "not finite"),
        ({"joint_position": np.array(["0"] * 7)}, InvalidState, "not numeric"),
        ({"joint_position": np.zeros(7, dtype=complex)}, InvalidState, "not numeric"),
    ],
)
def test_unusable_states_are_refused(change, error, message):
    state = {"joint_position": np.zeros(7), "gripper_position": np.zeros(1)} | change
    state = {k: v for k, v in state.items() if v is not None}
    with pytest.raises(error, match=message) as e:
        encode_state(state, DROID.state, _statistics(DROID.state))
    assert e.value.field == next(iter(change))


def test_relative_fields_need_their_state_and_absolute_ones_do_not():
    statistics = _statistics(DROID.action)
    network = np.zeros((24, 32), dtype=np.float32)
    decode_actions(network, DROID.action, statistics, {"joint_position": np.zeros(7)})
    with pytest.raises(MissingInput, match="joint_position"):
        decode_actions(network, DROID.action, statistics, {"gripper_position": np.zeros(1)})


def test_every_row_is_relative_to_the_moment_of_the_call():
    statistics = _statistics(DROID.action)
    network = np.random.default_rng(1).normal(size=(24, 32)).astype(np.float32)
    at_zero = decode_actions(network, DROID.action, statistics, {"joint_position": np.zeros(7)})
    moved = decode_actions(network, DROID.action, statistics, {"joint_position": np.arange(7.0)})
    np.testing.assert_allclose(moved[:, :7] - at_zero[:, :7], np.tile(np.arange(7.0), (24, 1)), atol=1e-12)
    np.testing.assert_array_equal(moved[:, 7], at_zero[:, 7])


def test_normalised_actions_are_not_clamped_and_nan_survives():
    statistics = _statistics(DROID.action)
    network = np.full((2, 32), 3.0, dtype=np.float32)
    network[1, 7] = np.nan
    out = decode_actions(network, DROID.action, statistics, {"joint_position": np.zeros(7)})
    gripper = statistics.action["gripper_position"]
    assert out[0, 7] > gripper.q99[0]
    assert np.isnan(out[1, 7]) and np.isfinite(out[1, :7]).all()


def test_too_few_columns_are_refused():
    with pytest.raises(ChunkError, match=r"\(24, 7\)"):
        decode_actions(np.zeros((24, 7), np.float32), DROID.action, _statistics(DROID.action), {})
    with pytest.raises(ChunkError, match=r"\(24, 9\)"):
        encode_actions(np.zeros((24, 9)), DROID.action, _statistics(DROID.action), {})


@settings(deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), per_horizon=st.booleans(), rows=st.integers(1, 48))
def test_decode_undoes_encode(data, seed, per_horizon, rows):
    dims = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    fields = tuple(
        FieldSpec(f"f{i}", dim, "rad", "joint_position", relative=data.draw(st.booleans()))
        for i, dim in enumerate(dims)
    )
    statistics = _statistics(fields, seed, rows if per_horizon else None)
    actions = data.draw(hnp.arrays(np.float64, (rows, sum(dims)), elements=st.floats(-4, 4)))
    state = {f.name: data.draw(hnp.arrays(np.float64, f.dim, elements=st.floats(-4, 4))) for f in fields}
    encoded = encode_actions(actions, fields, statistics, state, 32)
    assert encoded.dtype == np.float32 and not encoded[:, sum(dims) :].any()
    # float32 arithmetic on values up to 8 and spans down to 0.1
    np.testing.assert_allclose(decode_actions(encoded, fields, statistics, state), actions, atol=2e-5)


@pytest.mark.parametrize("state", [None, [0.0] * 8, "joint_position"])
def test_a_state_that_is_no_mapping(state):
    with pytest.raises(InvalidState, match="not a mapping"):
        raw_state(state, DROID.state[0])
