"""msgpack with numpy arrays, in the two ways that clients of OpenPI servers write them. Nothing is ever unpickled.

``openpi`` (OpenPI spec 1.4): an array is the map ``{b"__ndarray__": true, b"data": bytes in C order, b"dtype": "<f4",
b"shape": [...]}``, a numpy scalar ``{b"__npgeneric__": true, b"data": value, b"dtype": "<f4"}``.

``msgpack_numpy`` (the PyPI package, OpenPI spec 5.2 F): an array is ``{b"nd": true, b"type": "<f4", b"kind": b"",
b"shape": [...], b"data": bytes}``, a numpy scalar ``{b"nd": false, b"type": "<f4", b"data": bytes}``.

Read are both, with binary or text keys and with either spelling of a dtype (``<f4``, ``float32``). A message is of one
kind; the reply is written in the kind of the request.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, Literal

import msgpack
import numpy as np

from wam_policy_ros.contract.errors import ObservationError

# By exact spelling: np.dtype() itself would accept structured, object and sub-array dtypes.
_NAMES = ("|b1", "|u1", "|i1", *(order + kind + size for order in "<>" for kind in "iu" for size in "248"))
DTYPES = {name: np.dtype(name) for name in (*_NAMES, *(order + "f" + size for order in "<>" for size in "248"))}
_SPELLED = DTYPES | {str(dtype): dtype for dtype in DTYPES.values() if dtype.isnative}
MAX_DEPTH = 16
MAX_CONTAINER = 65536
MAX_NODES = 16384
"""Values of one message, counted before any is made: a small frame can hold millions."""

Codec = Literal["openpi", "msgpack_numpy"]
_ARRAY, _SCALAR = b"__ndarray__", b"__npgeneric__"


@dataclass(frozen=True)
class Message:
    """A decoded frame. ``codec`` is None when nothing in it tells: no array, no numpy scalar."""

    value: Any
    codec: Codec | None


class CodecError(ObservationError):
    """A message cannot be packed or unpacked. ``field`` is the path of the key, ``message`` for the whole."""


def pack(message: Any, codec: Codec = "openpi") -> bytes:
    """Message to bytes, keys in their order; byte-identical to the clients' own packers. Raises CodecError."""
    try:
        return msgpack.packb(message, default=_encode if codec == "openpi" else _encode_msgpack_numpy)
    except (TypeError, ValueError, OverflowError, RecursionError) as e:
        raise CodecError("the message cannot be packed", field="message", got=e) from e


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """``decode(data).value``."""
    return decode(data).value


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Bytes to message. Arrays are read-only.

    Raises:
        CodecError: not one complete msgpack object, bytes left over, not UTF-8, nested too deeply, an extension type,
            a dtype that is not a plain number, or a buffer whose length does not match its shape.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise _error("the message is not binary", "message", type(data).__name__, "a msgpack frame")
    _count_nodes(data)
    try:
        raw = msgpack.unpackb(
            data, max_array_len=MAX_CONTAINER, max_map_len=MAX_CONTAINER, max_ext_len=0, ext_hook=_refuse_extension
        )
    except CodecError:
        raise
    except msgpack.ExtraData as e:
        raise _error("bytes are left over after the object", "message", len(e.args[1]), "one object") from None
    except Exception as e:  # msgpack documents no common base: ValueError, TypeError and exceptions of its own
        raise _error("the message is not valid msgpack", "message", str(e) or type(e).__name__, "one object") from e
    seen: set[Codec] = set()
    value = _decode(raw, "", MAX_DEPTH, seen)
    if len(seen) > 1:
        raise _error("the message mixes two ways to write arrays", "message", sorted(seen), "one of them")
    return Message(value, next(iter(seen), None))


# By first byte: bytes that follow, or how the length of what follows is written, or that and children per item.
_FIXED = {0xCA: 4, 0xCB: 8} | {0xCC + i: 1 << i for i in range(4)} | {0xD0 + i: 1 << i for i in range(4)}
_FIXED |= {0xD4 + i: (1 << i) + 1 for i in range(5)}
_BYTES = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_EXTENSIONS = {0xC7: ">B", 0xC8: ">H", 0xC9: ">I"}
_CONTAINERS = {0xDC: (">H", 1), 0xDD: (">I", 1), 0xDE: (">H", 2), 0xDF: (">I", 2)}


def _count_nodes(data: bytes | bytearray | memoryview) -> int:
    """Walk the headers only; returns how many values there are. The unpacker describes what is malformed."""
    at, pending, count, end = 0, 1, 0, len(data)
    try:
        while pending and at < end:
            count, pending = count + 1, pending - 1
            if count > MAX_NODES:
                raise _error("the message has too many values", "message", f"over {MAX_NODES}", f"at most {MAX_NODES}")
            first = data[at]
            at += 1
            if 0xA0 <= first < 0xC0:
                at += first & 0x1F
            elif 0x80 <= first < 0xA0:
                pending += (first & 0x0F) * (2 if first < 0x90 else 1)
            elif first in _BYTES:
                form = _BYTES[first]
                at += struct.calcsize(form) + struct.unpack_from(form, data, at)[0]
            elif first in _FIXED:
                at += _FIXED[first]
            elif first in _CONTAINERS:
                form, children = _CONTAINERS[first]
                pending += struct.unpack_from(form, data, at)[0] * children
                at += struct.calcsize(form)
            elif first in _EXTENSIONS:
                form = _EXTENSIONS[first]
                at += struct.calcsize(form) + struct.unpack_from(form, data, at)[0] + 1
    except struct.error:
        pass
    return count


def _encode(obj: Any) -> dict[bytes, Any]:
    if not isinstance(obj, np.ndarray | np.generic):
        raise TypeError(f"{type(obj).__name__} is not serialisable")
    if obj.dtype.str not in DTYPES:
        raise TypeError(f"dtype {obj.dtype} is not a plain number")
    if isinstance(obj, np.ndarray):
        return {_ARRAY: True, b"data": obj.tobytes(), b"dtype": obj.dtype.str, b"shape": obj.shape}
    return {_SCALAR: True, b"data": obj.item(), b"dtype": obj.dtype.str}


def _encode_msgpack_numpy(obj: Any) -> dict[bytes, Any]:
    plain = _encode(obj)
    if isinstance(obj, np.ndarray):
        return {b"nd": True, b"type": obj.dtype.str, b"kind": b"", b"shape": obj.shape, b"data": plain[b"data"]}
    return {b"nd": False, b"type": obj.dtype.str, b"data": obj.tobytes()}


def _decode(obj: Any, path: str, depth: int, seen: set[Codec]) -> Any:
    if depth == 0:
        raise _error("the message is nested too deeply", path, None, f"at most {MAX_DEPTH} levels")
    if isinstance(obj, dict):
        if any(name in obj for name in _MARKERS) or (_either(obj, "nd") and _either(obj, "type")):
            return _marked(obj, path or "message", seen)
        return {k: _decode(v, f"{path}/{_name(k)}".lstrip("/"), depth - 1, seen) for k, v in obj.items()}
    if isinstance(obj, list):
        return [_decode(v, f"{path}[{i}]", depth - 1, seen) for i, v in enumerate(obj)]
    return obj


_MARKERS = (_ARRAY, _SCALAR, "__ndarray__", "__npgeneric__")


def _either(obj: dict[Any, Any], name: str) -> bool:
    return name in obj or name.encode() in obj


def _marked(obj: dict[Any, Any], path: str, seen: set[Codec]) -> Any:
    """A map with a marker: an array or a scalar, or an error. It is never taken for anything else."""
    parts = {k.encode("utf-8", "replace") if isinstance(k, str) else k: v for k, v in obj.items()}
    if len(parts) != len(obj):
        raise _error("a key of an array is there twice, as text and as bytes", path, sorted(map(_name, obj)), None)
    if _ARRAY not in parts and _SCALAR not in parts:
        seen.add("msgpack_numpy")
        return _msgpack_numpy(parts, path)
    seen.add("openpi")
    marker = _ARRAY if _ARRAY in parts else _SCALAR
    if parts[marker] is not True or (_ARRAY in parts and _SCALAR in parts):
        raise _error(
            "an array's marker must be true, and there can be one", path, parts[marker], f"{_name(marker)}: true"
        )
    dtype = _dtype(parts.get(b"dtype"), path)
    if marker == _ARRAY:
        return _array(dtype, parts.get(b"data"), parts.get(b"shape"), path)
    return _scalar(dtype, parts.get(b"data"), path)


def _msgpack_numpy(parts: dict[Any, Any], path: str) -> Any:
    marker, data = parts[b"nd"], parts.get(b"data")
    dtype = _dtype(parts[b"type"], path)
    kind = _text(parts.get(b"kind", b""))
    if kind not in ("", dtype.kind):  # "V" structured, "O" pickled
        raise _error("this kind of array is not accepted", path, f"kind {kind!r}, dtype {dtype.str}", "a plain number")
    if marker is True:
        return _array(dtype, data, parts.get(b"shape"), path)
    if marker is not False:
        raise _error("the marker 'nd' must be true or false", path, marker, "true: array, false: scalar")
    return _array(dtype, data, [1], path)[0]


def _array(dtype: np.dtype[Any], data: Any, shape: Any, path: str) -> np.ndarray[Any, Any]:
    if not isinstance(data, bytes):
        raise _error("an array's data must be binary", path, type(data).__name__, "bytes")
    # bool is an int to Python; a dimension of True is a malformed message.
    if not isinstance(shape, list) or len(shape) > 8 or any(type(n) is not int or not 0 <= n < 2**31 for n in shape):
        raise _error("an array's shape must be a short list of sizes", path, shape, "[int, ...]")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise _error("an array's data does not match its shape", path, f"{len(data)} bytes", f"{dtype.str} {shape}")
    try:
        return np.frombuffer(data, dtype).reshape(shape)
    except ValueError as e:  # sizes beside a 0 may still overflow
        raise _error("an array's shape is not representable", path, shape, str(e)) from e


def _scalar(dtype: np.dtype[Any], value: Any, path: str) -> np.generic:
    if not isinstance(value, bool | int | float):
        raise _error("a numpy scalar's data must be a number", path, type(value).__name__, dtype.str)
    try:
        return dtype.type(value)
    except (ValueError, OverflowError) as e:
        raise _error("a numpy scalar does not fit its dtype", path, value, f"{dtype.str} ({e})") from e


def _dtype(name: Any, path: str) -> np.dtype[Any]:
    text = _text(name)
    if text not in _SPELLED:
        raise _error("this dtype is not accepted", path, f"dtype {name!r}", f"one of {sorted(DTYPES)}")
    return _SPELLED[text]


def _text(value: Any) -> Any:
    """Text that may have come as bytes; anything else becomes a string that matches nothing."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else f"not text: {type(value).__name__}"


def _refuse_extension(code: int, data: bytes) -> None:
    raise _error("msgpack extension types are not accepted", "message", f"type {code}", None)


def _name(key: Any) -> str:
    return _short(key.decode("utf-8", "backslashreplace") if isinstance(key, bytes) else str(key), 80)


def _short(value: Any, limit: int = 160) -> str:
    """For messages: what a client sent may be of any length."""
    text = str(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def _error(what: str, path: str, got: object, expected: object) -> CodecError:
    shown = None if got is None else _short(got)
    return CodecError(f"{path}: {what}", field=path, got=shown, expected=expected)
