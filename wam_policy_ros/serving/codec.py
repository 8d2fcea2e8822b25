"""msgpack with numpy arrays, as OpenPI clients write it (DreamZero spec 8.1). Nothing is ever unpickled.

An array is the map ``{b"__ndarray__": true, b"data": bytes in C order, b"dtype": "<f4", b"shape": [...]}``, a numpy
scalar ``{b"__npgeneric__": true, b"data": value, b"dtype": "<f4"}``.
"""

from __future__ import annotations

import math
from typing import Any

import msgpack
import numpy as np

from wam_policy_ros.contract.errors import ObservationError

# By exact spelling: np.dtype() itself would accept structured, object and sub-array dtypes.
_NAMES = ("|b1", "|u1", "|i1", *(order + kind + size for order in "<>" for kind in "iu" for size in "248"))
DTYPES = {name: np.dtype(name) for name in (*_NAMES, *(order + "f" + size for order in "<>" for size in "248"))}
MAX_DEPTH = 16
MAX_CONTAINER = 65536
_ARRAY, _SCALAR = b"__ndarray__", b"__npgeneric__"


class CodecError(ObservationError):
    """A message cannot be packed or unpacked. ``field`` is the path of the key, ``message`` for the whole."""


def pack(message: Any) -> bytes:
    """Message to bytes, keys in their order; byte-identical to OpenPI's client. Raises CodecError."""
    try:
        return msgpack.packb(message, default=_encode)
    except (TypeError, ValueError, OverflowError, RecursionError) as e:
        raise CodecError("the message cannot be packed", field="message", got=e) from e


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """Bytes to message. Arrays are read-only.

    Raises:
        CodecError: not one complete msgpack object, bytes left over, not UTF-8, nested too deeply, an extension type,
            a dtype that is not a plain number, or a buffer whose length does not match its shape.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise _error("the message is not binary", "message", type(data).__name__, "a msgpack frame")
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
    return _decode(raw, "", MAX_DEPTH)


def _encode(obj: Any) -> dict[bytes, Any]:
    if not isinstance(obj, np.ndarray | np.generic):
        raise TypeError(f"{type(obj).__name__} is not serialisable")
    if obj.dtype.str not in DTYPES:
        raise TypeError(f"dtype {obj.dtype} is not a plain number")
    if isinstance(obj, np.ndarray):
        return {_ARRAY: True, b"data": obj.tobytes(), b"dtype": obj.dtype.str, b"shape": obj.shape}
    return {_SCALAR: True, b"data": obj.item(), b"dtype": obj.dtype.str}


def _decode(obj: Any, path: str, depth: int) -> Any:
    if depth == 0:
        raise _error("the message is nested too deeply", path, None, f"at most {MAX_DEPTH} levels")
    if isinstance(obj, dict):
        if _ARRAY in obj:
            return _array(obj, path or "message")
        if _SCALAR in obj:
            return _scalar(obj, path or "message")
        return {k: _decode(v, f"{path}/{_name(k)}".lstrip("/"), depth - 1) for k, v in obj.items()}
    if isinstance(obj, list):
        return [_decode(v, f"{path}[{i}]", depth - 1) for i, v in enumerate(obj)]
    return obj


def _array(obj: dict[Any, Any], path: str) -> np.ndarray[Any, Any]:
    dtype, data, shape = _dtype(obj, path), obj.get(b"data"), obj.get(b"shape")
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


def _scalar(obj: dict[Any, Any], path: str) -> np.generic:
    dtype, value = _dtype(obj, path), obj.get(b"data")
    if not isinstance(value, bool | int | float):
        raise _error("a numpy scalar's data must be a number", path, type(value).__name__, dtype.str)
    try:
        return dtype.type(value)
    except (ValueError, OverflowError) as e:
        raise _error("a numpy scalar does not fit its dtype", path, value, f"{dtype.str} ({e})") from e


def _dtype(obj: dict[Any, Any], path: str) -> np.dtype[Any]:
    name = obj.get(b"dtype")
    if not isinstance(name, str) or name not in DTYPES:
        raise _error("this dtype is not accepted", path, f"dtype {name!r}", f"one of {sorted(DTYPES)}")
    return DTYPES[name]


def _refuse_extension(code: int, data: bytes) -> None:
    raise _error("msgpack extension types are not accepted", "message", f"type {code}", None)


def _name(key: Any) -> str:
    return key.decode("utf-8", "backslashreplace") if isinstance(key, bytes) else str(key)


def _error(what: str, path: str, got: object, expected: object) -> CodecError:
    return CodecError(f"{path}: {what}", field=path, got=got, expected=expected)
