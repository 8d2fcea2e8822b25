"""Recorded WebSocket frames: packing the decoded form gives the recorded bytes, unpacking them the decoded form."""

from __future__ import annotations

from typing import Any

import numpy as np

from wam_policy_ros.serving.codec import pack, unpack

from .folder import GoldenFolder, Group, Row

FOLDER = "msgpack"


def check(folder: GoldenFolder) -> list[Row]:
    if not folder.has(f"{FOLDER}/decoded.json"):
        return []
    recorded = folder.json(f"{FOLDER}/decoded.json")
    group = Group(f"{FOLDER}/*", "frames, byte for byte", 0.0)
    for entry in recorded.get("index", []):
        name = entry["file"]
        path = folder.path / FOLDER / name
        if not path.is_file():
            group.fail(name, "file is missing")
            continue
        folder.used.add(f"{FOLDER}/{name}")
        content = path.read_bytes()
        if entry["frame"] == "text":
            group.exact(name, content.decode("utf-8"), "reset successful")
            continue
        key = name.removesuffix(".msgpack")
        if key not in recorded["decoded"]:
            group.fail(name, "not in decoded.json")
            continue
        value = _from_json(recorded["decoded"][key])
        group.exact(f"{name} packed", pack(value), content)
        group.exact(f"{name} unpacked", _same(unpack(content), value), True)
    return [group.row()] if group.count else []


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        if {"ndarray", "dtype", "shape"} <= set(value):
            return np.array(value["ndarray"], dtype=value["dtype"]).reshape(value["shape"])
        if {"npgeneric", "dtype"} <= set(value):
            return np.dtype(value["dtype"]).type(value["npgeneric"])
        return {k: _from_json(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_from_json(v) for v in value]
    return value


def _same(a: Any, b: Any) -> bool:
    if isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(b, dict):
        return isinstance(a, dict) and list(a) == list(b) and all(_same(a[k], b[k]) for k in b)
    if isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) and (not isinstance(b, np.generic) or np.asarray(a).dtype == b.dtype)
