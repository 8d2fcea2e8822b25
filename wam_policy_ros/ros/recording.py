"""Reads a rosbag2 folder (mcap or sqlite3) without ROS. The only file that knows the package ``rosbags``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from wam_policy_ros.contract.errors import ConfigError, MissingDependency

IMAGE, COMPRESSED, JOINTS = "sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage", "sensor_msgs/msg/JointState"


class Recorded(NamedTuple):
    """A message of a recording.

    Attributes:
        at_ns: when it was received.
        topic, msg: as a subscriber sees it; of its fields those that the node reads.
    """

    at_ns: int
    topic: str
    msg: Any


@dataclass(frozen=True)
class Contents:
    """What a recording holds.

    Attributes:
        start_ns, end_ns: of its messages, on the clock of the recorder.
        topics: topic -> (type, number of messages).
    """

    start_ns: int
    end_ns: int
    topics: dict[str, tuple[str, int]]

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) * 1e-9


class Recording:
    """An open recording; use it in a ``with`` statement.

    Args:
        folder: with a ``metadata.yaml``.

    Raises:
        ConfigError: not a rosbag2 folder, or damaged.
        MissingDependency: the package ``rosbags`` is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from rosbags.highlevel import AnyReader
            from rosbags.typesys import Stores, get_typestore
        except ModuleNotFoundError as error:
            raise MissingDependency(str(error.name), "replay", "reading a recording") from error
        if not (folder / "metadata.yaml").is_file():
            raise ConfigError("not a recording", got=str(folder), expected="a rosbag2 folder with a metadata.yaml")
        self.folder = folder
        try:
            # Recordings of sqlite3 may not say what their messages look like.
            self._reader = AnyReader([folder], default_typestore=get_typestore(Stores.ROS2_JAZZY))
            self._reader.open()
        except Exception as error:  # the package and its formats have many kinds
            raise ConfigError(
                "the recording cannot be read", got=f"{folder}: {type(error).__name__}: {error}"
            ) from error

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.close()

    @property
    def contents(self) -> Contents:
        topics: dict[str, tuple[str, int]] = {}
        for connection in self._reader.connections:
            count = topics.get(connection.topic, ("", 0))[1] + connection.msgcount
            topics[connection.topic] = (connection.msgtype, count)
        return Contents(self._reader.start_time, self._reader.end_time, topics)

    def text(self, topic: str) -> str | None:
        """The first std_msgs/String on a topic, None when there is none."""
        chosen = [c for c in self._reader.connections if c.topic == topic and c.msgtype == "std_msgs/msg/String"]
        for connection, _, raw in self._reader.messages(connections=chosen) if chosen else ():
            return str(getattr(self._reader.deserialize(raw, connection.msgtype), "data"))  # noqa: B009
        return None

    def messages(self, topics: Sequence[str]) -> Iterator[Recorded]:
        """The messages of some topics in the order of reception; of other types than the node's are left out."""
        kinds = {IMAGE, COMPRESSED, JOINTS, "rosgraph_msgs/msg/Clock"}
        chosen = [c for c in self._reader.connections if c.topic in topics and c.msgtype in kinds]
        if not chosen:
            return
        for connection, at_ns, raw in self._reader.messages(connections=chosen):
            try:
                msg = self._reader.deserialize(raw, connection.msgtype)
            except Exception as error:
                raise ConfigError(
                    "a message of the recording cannot be read",
                    got=f"{connection.topic} at {at_ns}: {type(error).__name__}: {error}",
                ) from error
            yield Recorded(at_ns, connection.topic, _as_received(msg, connection.msgtype))


def _as_received(msg: Any, kind: str) -> Any:
    """With plain bytes and lists, as rclpy gives them: NumPy arrays behave differently in ``if`` and in arithmetic."""
    if kind == JOINTS:
        return SimpleNamespace(header=msg.header, name=list(msg.name), position=msg.position.tolist())
    if kind == COMPRESSED:
        return SimpleNamespace(header=msg.header, format=msg.format, data=msg.data.tobytes())
    if kind == IMAGE:
        fields = {n: getattr(msg, n) for n in ("header", "height", "width", "encoding", "is_bigendian", "step")}
        return SimpleNamespace(**fields, data=msg.data.tobytes())
    return msg
