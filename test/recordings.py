"""Writes small rosbag2 folders for tests: an invented robot with three cameras and seven joints and a finger."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

NS = 1_000_000_000
T0 = 1_750_000_000 * NS


class Message(NamedTuple):
    """One message to write. ``kind`` is one of ``image``, ``compressed``, ``joints``, ``clock``, ``text``."""

    at_s: float
    topic: str
    kind: str
    fields: dict[str, Any]


TYPES = {
    "image": "sensor_msgs/msg/Image",
    "compressed": "sensor_msgs/msg/CompressedImage",
    "joints": "sensor_msgs/msg/JointState",
    "clock": "rosgraph_msgs/msg/Clock",
    "text": "std_msgs/msg/String",
}


def picture(height: int = 18, width: int = 32) -> np.ndarray:
    """uint8 ``[H, W, 3]`` RGB without any symmetry."""
    y, x = np.mgrid[0:height, 0:width]
    return np.dstack([(x * 7) % 256, (y * 11) % 256, (x + 3 * y + 40) % 256]).astype(np.uint8)


def image(at_s: float, topic: str, rgb: np.ndarray, *, stamp_s: float | None = None, **fields: Any) -> Message:
    """An rgb8 image, up to the fields that are given. Stamps count from ``T0``; a stamp of -inf is zero."""
    whole = {
        "stamp_s": at_s if stamp_s is None else stamp_s,
        "height": rgb.shape[0],
        "width": rgb.shape[1],
        "encoding": "rgb8",
        "is_bigendian": 0,
        "step": rgb.shape[1] * 3,
        "data": np.ascontiguousarray(rgb).reshape(-1),
    }
    return Message(at_s, topic, "image", whole | fields)


def joints(at_s: float, topic: str, positions: dict[str, float], **fields: Any) -> Message:
    whole = {
        "stamp_s": at_s,
        "name": list(positions),
        "position": np.array(list(positions.values()), dtype=np.float64),
        "velocity": np.zeros(0),
        "effort": np.zeros(0),
    }
    return Message(at_s, topic, "joints", whole | fields)


def write(folder: Path, messages: Iterable[Message], *, storage: str = "mcap", start_ns: int = T0) -> Path:
    """Write a recording; ``storage`` is ``mcap`` or ``sqlite3``."""
    from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin, Writer
    from rosbags.typesys import Stores, get_typestore

    store = get_typestore(Stores.ROS2_JAZZY)
    header, stamp = store.types["std_msgs/msg/Header"], store.types["builtin_interfaces/msg/Time"]
    plugin = {"mcap": StoragePlugin.MCAP, "sqlite3": StoragePlugin.SQLITE3}[storage]
    writer = Writer(folder, version=9, storage_plugin=plugin)
    if storage == "mcap":
        writer.set_compression(CompressionMode.STORAGE, CompressionFormat.ZSTD)
    with writer:
        connections: dict[str, Any] = {}
        for message in sorted(messages, key=lambda m: m.at_s):
            kind = TYPES[message.kind]
            if message.topic not in connections:
                connections[message.topic] = writer.add_connection(message.topic, kind, typestore=store)
            fields = dict(message.fields)
            stamp_s = fields.pop("stamp_s", 0.0)
            ns = 0 if stamp_s == float("-inf") else start_ns + round(stamp_s * NS)
            time = stamp(ns // NS, ns % NS)
            whole = {"header": header(time, "frame"), **fields}
            if message.kind in ("clock", "text"):
                whole = {"clock": time} if message.kind == "clock" else fields
            data = store.serialize_cdr(store.types[kind](**whole), kind)
            writer.write(connections[message.topic], start_ns + round(message.at_s * NS), data)
    return folder
