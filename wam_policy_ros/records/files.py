"""Events in mcap files, the only file that knows the package ``mcap``.

Every event is a chunk of its own, compressed and with a checksum, and is handed to the system before the next one is
taken: a process that is killed leaves a file that is readable up to its last complete event.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wam_policy_ros import __version__
from wam_policy_ros.contract.errors import ConfigError, MissingDependency

from .events import TOPICS, WITH_ARRAYS, Event

PROFILE = "wam_policy"
SUFFIX = ".mcap"


class EventFile:
    """A file that is being written.

    Args:
        path: must not exist.

    Attributes:
        nbytes: written so far.

    Raises:
        OSError: it cannot be written. What is complete in it stays readable.
        MissingDependency: the package ``mcap`` is not installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            from mcap.writer import CompressionType, Writer
        except ModuleNotFoundError as error:
            raise MissingDependency(str(error.name), "record", "a record") from error
        self.path, self.nbytes = path, 0
        self._file = path.open("xb")
        self._writer = Writer(self._file, chunk_size=0, compression=CompressionType.ZSTD, use_chunking=True)
        try:
            self._writer.start(profile=PROFILE, library=f"wam_policy_ros {__version__}")
            self._channels = {
                topic: self._writer.register_channel(topic, "safetensors" if topic in WITH_ARRAYS else "json", 0)
                for topic in TOPICS
            }
            self._settle()
        except OSError:
            self.abandon()
            raise

    def write(self, event: Event) -> None:
        self._writer.add_message(
            channel_id=self._channels[event.topic],
            log_time=event.time_ns,
            publish_time=event.time_ns,
            sequence=event.number & 0xFFFFFFFF,
            data=event.encode(),
        )
        self._settle()

    def finish(self) -> None:
        """Write the index and close."""
        self._writer.finish()
        self._settle()
        self._file.close()

    def abandon(self) -> None:
        """Close after an error: what was only half written is cut off."""
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            os.truncate(self.path, self.nbytes)

    def _settle(self) -> None:
        self._file.flush()
        self.nbytes = self._file.tell()


@dataclass
class Reading:
    """How reading a file went.

    Attributes:
        whole: it ends as it should.
        faults: what is wrong with it, one line each.
    """

    path: Path
    whole: bool = False
    faults: tuple[str, ...] = ()

    def fault(self, line: str) -> None:
        self.faults = (*self.faults, f"{self.path.name}: {line}")


def read_events(path: Path, reading: Reading) -> Iterator[Event]:
    """The events of a file that may be truncated or damaged, as far as they can be read.

    Args:
        reading: told how it went.

    Raises:
        ConfigError: it is no record.
        MissingDependency: the package ``mcap`` is not installed.
    """
    try:
        from mcap.records import Channel, Chunk, Header, Message
        from mcap.stream_reader import StreamReader, breakup_chunk
    except ModuleNotFoundError as error:
        raise MissingDependency(str(error.name), "record", "reading a record") from error
    topics: dict[int, str] = {}
    with path.open("rb") as file:
        records = iter(StreamReader(file, emit_chunks=True, record_size_limit=path.stat().st_size).records)
        while True:
            at = file.tell()
            try:
                record: Any = next(records)
            except StopIteration:  # behind the last bytes of a whole file
                reading.whole = True
                return
            except Exception as error:  # the library's own, and those of what it unpacks with
                if not topics and at == 0:
                    raise ConfigError("this is no mcap file", got=path) from error
                reading.fault(f"ends in the middle of an event, at byte {at}")
                return
            if isinstance(record, Header) and record.profile != PROFILE:
                raise ConfigError(
                    "this mcap file is no record of a policy",
                    got=f"{path}, profile {record.profile!r}",
                    expected=f"profile {PROFILE!r}, as wam serve --record and record.folder write",
                )
            if isinstance(record, Channel):
                topics[record.id] = record.topic
            if not isinstance(record, Chunk):
                continue
            try:
                inside = breakup_chunk(record, validate_crc=True)
                topics |= {r.id: r.topic for r in inside if isinstance(r, Channel)}
                found = [
                    Event.decode(topics[r.channel_id], r.data, r.sequence, r.log_time)
                    for r in inside
                    if isinstance(r, Message)
                ]
            except Exception as error:  # of the decompressor, of the checksum, of the event
                reading.fault(f"an event is damaged, at byte {at}: {type(error).__name__}")
                continue
            yield from found


def is_record(path: Path) -> bool:
    """Whether a file, or a folder with such files, holds a record of a policy."""
    return bool(record_files(path))


def record_files(path: Path) -> list[Path]:
    """The record files of a folder, or of the folder of a file, in order; empty when there are none."""
    if path.is_dir():
        return [p for p in sorted(path.glob(f"*{SUFFIX}")) if _begins_like_one(p)]
    return [path] if path.suffix == SUFFIX and path.is_file() and _begins_like_one(path) else []


def _begins_like_one(path: Path) -> bool:
    """Magic, opcode and length of the header, then the profile with its length."""
    with suppress(OSError), path.open("rb") as file:
        head = file.read(64)
        return head[17 : 21 + len(PROFILE)] == len(PROFILE).to_bytes(4, "little") + PROFILE.encode()
    return False
