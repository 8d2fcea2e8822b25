"""Byte-exact with recorded frames, and nothing but a typed error on anything else."""

from __future__ import annotations

import contextlib
import json
import pickle
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from test.golden_files import GOLDEN_DIR
from wam_policy_ros.serving.codec import DTYPES, MAX_DEPTH, CodecError, pack, unpack

FRAMES = GOLDEN_DIR / "msgpack"
NAMES = (
    "00_server_config",
    "01_infer_request",
    "02_infer_response",
    "03_infer_request_4frames",
    "04_infer_response",
    "05_reset_request",
)


def _revive(obj: Any) -> Any:
    if isinstance(obj, dict) and "ndarray" in obj:
        return np.array(obj["ndarray"], dtype=obj["dtype"]).reshape(obj["shape"])
    if isinstance(obj, dict) and "npgeneric" in obj:
        return np.dtype(obj["dtype"]).type(obj["npgeneric"])
    return {k: _revive(v) for k, v in obj.items()} if isinstance(obj, dict) else obj


def _recorded(name: str) -> tuple[bytes, Any]:
    if not FRAMES.is_dir():
        pytest.skip("the recorded frames are not in this checkout")
    decoded = json.loads((FRAMES / "decoded.json").read_text())["decoded"]
    return (FRAMES / f"{name}.msgpack").read_bytes(), _revive(decoded[name])


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, np.generic):
        return type(a) is type(b) and a.tobytes() == b.tobytes()
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("name", NAMES)
def test_recorded_frames_both_ways(name):
    raw, message = _recorded(name)
    assert pack(message) == raw
    assert _same(unpack(raw), message)
    assert pack(unpack(raw)) == raw


SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary()
)
ARRAYS = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda d: hnp.arrays(np.dtype(d), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
)
# np.float64 is a Python float and travels as one
GENERICS = st.sampled_from([d for d in sorted(DTYPES) if not d.endswith("f8")]).flatmap(
    lambda d: hnp.from_dtype(np.dtype(d)).map(np.dtype(d).type)
)
MESSAGES = st.recursive(
    SCALARS | ARRAYS | GENERICS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(MESSAGES)
def test_unpack_undoes_pack(message):
    try:
        raw = pack(message)
    except CodecError as e:  # hypothesis finds lone surrogates
        assert "surrogates" in str(e) or "utf-8" in str(e)
        return
    assert _same(unpack(raw), message)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_random_bytes_never_crash(data):
    with contextlib.suppress(CodecError):
        unpack(data)


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_damaged_messages_never_crash(data):
    raw = bytearray(
        pack({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": [np.float32(1), "é"], "c": {"d": np.zeros(0)}})
    )
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CodecError):
        unpack(bytes(raw[: data.draw(st.integers(0, len(raw)))]))


ANY = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()


@settings(deadline=None, max_examples=300)
@given(
    marker=st.sampled_from([b"__ndarray__", b"__npgeneric__"]),
    data=ANY | st.lists(ANY, max_size=3),
    dtype=ANY | st.sampled_from([*sorted(DTYPES), "|O", "|V8", "<c8", "f4,f4", "(2,)f4", "<U3", "|S3", "<M8[s]"]),
    shape=ANY | st.lists(ANY | st.integers(-2, 3), max_size=10),
)
def test_any_marker_map_gives_a_number_or_a_typed_error(marker, data, dtype, shape):
    try:
        out = unpack(msgpack.packb({"k": {marker: True, b"data": data, b"dtype": dtype, b"shape": shape}}))
    except CodecError as e:
        assert e.field in ("k", "message")
    except UnicodeEncodeError:
        pass  # from msgpack.packb, above
    else:
        assert isinstance(out["k"], np.ndarray | np.generic) and out["k"].dtype.kind in "biuf"


def _array(**changes: Any) -> dict[bytes, Any]:
    return {b"__ndarray__": True, b"data": bytes(24), b"dtype": "<f4", b"shape": [2, 3]} | {
        k.encode(): v for k, v in changes.items()
    }


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (_array(dtype="|O", data=pickle.dumps([1.0] * 6)), "dtype '|O'"),
        (_array(dtype="|V4"), "dtype '|V4'"),
        (_array(dtype="<c8", shape=[3]), "dtype '<c8'"),
        (_array(dtype="<U6", shape=[1]), "dtype '<U6'"),
        (_array(dtype="f4,f4", shape=[3]), "dtype 'f4,f4'"),
        (_array(dtype=None), "dtype None"),
        (_array(data=bytes(23)), "23 bytes"),
        (_array(data=bytes(25)), "25 bytes"),
        (_array(data="x" * 24), "must be binary"),
        (_array(shape=[-2, -3]), "shape"),
        (_array(shape=[True, 6]), "shape"),
        (_array(shape=[2.0, 3.0]), "shape"),
        (_array(shape=6), "shape"),
        (_array(shape=[1] * 9), "shape"),
        (_array(shape=[0] + [2**31 - 1] * 7, data=b""), "shape"),
        ({b"__npgeneric__": True, b"data": 300, b"dtype": "|u1"}, "fit"),
        ({b"__npgeneric__": True, b"data": float("nan"), b"dtype": "<i4"}, "fit"),
        ({b"__npgeneric__": True, b"data": "1", b"dtype": "<i4"}, "must be a number"),
        ({b"__npgeneric__": True, b"data": 1, b"dtype": "|O"}, "dtype '|O'"),
    ],
)
def test_bad_values_are_refused_by_key(value, message, monkeypatch):
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *a, **k: pytest.fail("unpickled"))
    raw = msgpack.packb({"prompt": "p", "observation/joint_position": value})
    with pytest.raises(CodecError) as e:
        unpack(raw)
    assert "observation/joint_position" in str(e.value) and message in str(e.value)
    assert e.value.field == "observation/joint_position"


def test_nested_keys_are_named():
    raw = msgpack.packb({"a": [{"b": _array(dtype="|O")}]})
    with pytest.raises(CodecError, match=r"a\[0\]/b"):
        unpack(raw)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not valid msgpack"),
        (pack({"a": "bcdef"})[:-2], "not valid msgpack"),
        (pack({"a": 1}) + b"\x00\x00", "left over"),
        (msgpack.packb(msgpack.ExtType(5, b"abc")), "not valid msgpack"),
        (msgpack.packb(msgpack.Timestamp(1, 2)), "not valid msgpack"),
        (b"\xc7\x00\x05", "extension"),
        (b"\xa2\xff\xfe", "not valid msgpack"),
        (b"\xdd\xff\xff\xff\xff", "not valid msgpack"),
        (msgpack.packb({1: 2}), "not valid msgpack"),
        (b"\x91" * (MAX_DEPTH + 1) + b"\x01", "nested"),
        (b"\x91" * 5000 + b"\x01", "not valid msgpack"),
    ],
)
def test_malformed_messages(raw, message):
    with pytest.raises(CodecError, match=message):
        unpack(raw)


def test_text_is_not_a_message():
    with pytest.raises(CodecError, match="not binary"):
        unpack("hello")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value",
    [
        np.array([object()]),
        np.zeros(2, dtype=complex),
        np.zeros(2, dtype="V8"),
        np.zeros(2, dtype=[("a", "f4")]),
        np.array(["text"]),
        np.datetime64("2020-01-01"),
        object(),
        {1, 2},
        2**70,
    ],
)
def test_what_cannot_be_packed(value):
    with pytest.raises(CodecError, match="cannot be packed"):
        pack({"a": value})


def test_arrays_out_of_order_in_memory_travel_in_c_order():
    array = np.arange(6, dtype=np.uint8).reshape(2, 3).T
    np.testing.assert_array_equal(unpack(pack(array)), array)
    assert unpack(pack(array)).flags.writeable is False


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer(kind):
    assert unpack(kind(pack({"a": 1}))) == {"a": 1}
