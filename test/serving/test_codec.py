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
from wam_policy_ros.serving.codec import DTYPES, MAX_DEPTH, CodecError, _count_nodes, decode, pack, unpack

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


# -- the test vectors of the OpenPI spec, 1.5 -------------------------------------------------------------------------

_ROWS = np.array([[0.5, -1.0], [2.0, 1.0]], dtype=np.float32)
VECTORS = {
    "TV1": ({"endpoint": "reset"}, "81a8656e64706f696e74a57265736574"),
    "TV2": (
        {"observation/joint_position": np.arange(7, dtype=np.float32), "prompt": "hi"},
        "82ba6f62736572766174696f6e2f6a6f696e745f706f736974696f6e84c40b5f5f6e6461727261795f5fc3c40464617461c41c0000000000"
        "00803f0000004000004040000080400000a0400000c040c4056474797065a33c6634c40573686170659107a670726f6d7074a26869",
    ),
    "TV3": (
        {"actions": _ROWS, "policy_timing": {"infer_ms": 2.0}, "server_timing": {"infer_ms": 1.5}},
        "83a7616374696f6e7384c40b5f5f6e6461727261795f5fc3c40464617461c4100000003f000080bf000000400000803fc4056474797065"
        "a33c6634c4057368617065920202ad706f6c6963795f74696d696e6781a8696e6665725f6d73cb4000000000000000ad7365727665725f"
        "74696d696e6781a8696e6665725f6d73cb3ff8000000000000",
    ),
    "TV4": (
        _ROWS,
        "84c40b5f5f6e6461727261795f5fc3c40464617461c4100000003f000080bf000000400000803fc4056474797065a33c6634c405736861"
        "7065920202",
    ),
    "TV5": (
        {
            "image_resolution": [180, 320],
            "needs_wrist_camera": True,
            "n_external_cameras": 2,
            "needs_stereo_camera": False,
            "needs_session_id": True,
            "action_space": "joint_position",
        },
        "86b0696d6167655f7265736f6c7574696f6e92ccb4cd0140b26e656564735f77726973745f63616d657261c3b26e5f65787465726e616c"
        "5f63616d6572617302b36e656564735f73746572656f5f63616d657261c2b06e656564735f73657373696f6e5f6964c3ac616374696f6e"
        "5f7370616365ae6a6f696e745f706f736974696f6e",
    ),
    "TV6a": (np.float32(1.5), "83c40d5f5f6e7067656e657269635f5fc3c40464617461cb3ff8000000000000c4056474797065a33c6634"),
    "TV6b": (
        np.zeros((0, 8), np.float32),
        "84c40b5f5f6e6461727261795f5fc3c40464617461c400c4056474797065a33c6634c4057368617065920008",
    ),
    "TV7": (
        {"endpoint": "reset", "session_ids": ["a", "b"]},
        "82a8656e64706f696e74a57265736574ab73657373696f6e5f69647392a161a162",
    ),
}
TV8 = "81a16185c4026e64c3c40474797065a33c6634c4046b696e64c400c40573686170659103c40464617461c40c000000000000803f00000040"
TV9 = "84c40b5f5f6e6461727261795f5fc3c40464617461c4084141414141414141c4056474797065a27c4fc40573686170659101"


@pytest.mark.parametrize("name", VECTORS)
def test_published_vectors_both_ways(name):
    value, text = VECTORS[name]
    assert pack(value).hex() == text
    assert _same(unpack(bytes.fromhex(text)), value)


def test_the_second_codec_both_ways():
    value = {"a": np.arange(3, dtype=np.float32)}
    message = decode(bytes.fromhex(TV8))
    assert message.codec == "msgpack_numpy" and _same(message.value, value)
    assert pack(value, "msgpack_numpy").hex() == TV8
    scalar = {"a": np.float32(1.5), "b": [np.bool_(True)]}
    assert _same(unpack(pack(scalar, "msgpack_numpy")), scalar)


def test_tv9_is_refused_before_it_is_an_array():
    with pytest.raises(CodecError, match=r"dtype '\|O'"):
        unpack(bytes.fromhex(TV9))


@settings(deadline=None)
@given(MESSAGES)
def test_unpack_undoes_pack_in_the_second_codec(message):
    try:
        raw = pack(message, "msgpack_numpy")
    except CodecError:  # lone surrogates
        return
    assert _same(unpack(raw), message)


@pytest.mark.parametrize(
    ("value", "codec"),
    [
        ({"__ndarray__": True, "data": bytes(8), "dtype": "float32", "shape": [2]}, "openpi"),
        ({b"__ndarray__": True, b"data": bytes(8), b"dtype": b"<f4", b"shape": [2]}, "openpi"),
        ({"nd": True, "type": b"<f4", "kind": "f", "shape": [2], "data": bytes(8)}, "msgpack_numpy"),
        ({b"nd": True, b"type": "<f4", b"shape": [2], b"data": bytes(8)}, "msgpack_numpy"),
    ],
)
def test_keys_as_text_or_bytes_and_dtypes_by_name(value, codec):
    message = decode(msgpack.packb({"a": value}))
    assert message.codec == codec and _same(message.value["a"], np.zeros(2, np.float32))


def test_plain_messages_tell_no_codec():
    assert decode(pack({"endpoint": "reset"})).codec is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({b"nd": True, b"type": "|O", b"kind": b"O", b"shape": [1], b"data": pickle.dumps([1])}, "dtype '|O'"),
        ({b"nd": True, b"type": [["a", "<f4"]], b"kind": b"V", b"shape": [1], b"data": bytes(4)}, "dtype"),
        ({b"nd": True, b"type": "<f4", b"kind": b"O", b"shape": [1], b"data": bytes(4)}, "kind 'O'"),
        ({b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [2], b"data": bytes(4)}, "4 bytes"),
        ({b"nd": False, b"type": "<f4", b"data": bytes(8)}, "8 bytes"),
        ({b"nd": 1, b"type": "<f4", b"data": bytes(4)}, "must be true or false"),
        ({b"__ndarray__": False, b"data": bytes(4), b"dtype": "<f4", b"shape": [1]}, "must be true"),
        ({b"__ndarray__": True, b"data": bytes(4), "data": bytes(4), b"dtype": "<f4", b"shape": [1]}, "twice"),
        ({b"__ndarray__": True, b"data": bytes(16), b"dtype": "<f16", b"shape": [1]}, "dtype"),
        ({b"__ndarray__": True, b"data": bytes(16), b"dtype": "float128", b"shape": [1]}, "dtype"),
    ],
)
def test_half_an_array_is_refused_by_key(value, words):
    with pytest.raises(CodecError) as e:
        unpack(msgpack.packb({"k": value}))
    assert e.value.field == "k" and words in str(e.value)


def test_two_codecs_in_one_message_are_refused():
    raw = msgpack.packb({"a": _array(), "b": {b"nd": False, b"type": "<f4", b"data": bytes(4)}})
    with pytest.raises(CodecError, match="mixes"):
        unpack(raw)


def test_values_are_counted_before_they_are_made():
    bomb = b"\xdd\x00\x00\x40\x00" + b"\x01" * 16384
    with pytest.raises(CodecError, match="too many values"):
        unpack(bomb)
    nested = bytes([0xDC, 0x01, 0x00]) + (bytes([0xDC, 0x01, 0x00]) + b"\xc0" * 256) * 256
    with pytest.raises(CodecError, match="too many values"):
        unpack(nested)
    assert len(unpack(pack(list(range(16000))))) == 16000


@settings(deadline=None)
@given(MESSAGES)
def test_counting_agrees_with_the_unpacker(message):
    """A walk that lost its place would call a good message bad, or the other way round."""

    def count(value: Any) -> int:
        if isinstance(value, dict):
            return 1 + sum(1 + count(v) for v in value.values())
        return 1 + (sum(map(count, value)) if isinstance(value, list) else 0)

    raw = msgpack.packb(message, default=lambda o: {"x": o.tobytes()}, unicode_errors="replace")
    assert _count_nodes(raw) == count(msgpack.unpackb(raw))


def test_a_message_of_any_length_has_a_short_error():
    for raw in (pack({"a" * 100_000: _array(dtype="|O")}), pack({"a": _array(shape=[1] * 10_000)})):
        with pytest.raises(CodecError) as e:
            unpack(raw)
        assert len(str(e.value)) < 1500
