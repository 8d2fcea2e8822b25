"""A record as a whole: its files in order, what is missing of it, its events one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.contract.fingerprint import Fingerprint

from .events import END, FORMAT, START, Event
from .files import Reading, read_events, record_files


@dataclass
class Record:
    """One record: what one process wrote between two ends.

    Attributes:
        files: in order.
        header: of the first file, see ``recorder.Recorder.begin``.
        faults: why it is incomplete, one line each; complete only when all events were read.
    """

    files: list[Path]
    header: dict[str, Any]
    faults: list[str] = field(default_factory=list)

    @property
    def fingerprint(self) -> Fingerprint | None:
        raw = self.header.get("fingerprint")
        return None if raw is None else Fingerprint.from_dict(raw)

    @property
    def name(self) -> str:
        return self.files[0].name.rpartition("-")[0]

    def events(self) -> Iterator[Event]:
        """All of it, but ``START`` and ``END``; ``faults`` is filled on the way."""
        self.faults = []
        expected, number, ended = 1, -1, False
        for path in self.files:
            reading = Reading(path)
            for event in read_events(path, reading):
                if event.topic == START:
                    if event.values["file"] != number + 1:
                        missing = event.values["file"] - number - 1
                        self.faults.append(f"{missing} file(s) before {path.name} are missing")
                    number = event.values["file"]
                    continue
                if event.number != expected:
                    self.faults.append(f"{event.number - expected} event(s) before number {event.number} are missing")
                expected = event.number + 1
                if event.topic == END:
                    ended = True
                    if event.values["dropped"]:
                        self.faults.append(f"{event.values['dropped']} event(s) dropped: {event.values['trouble']}")
                    continue
                yield event
            self.faults += reading.faults
            if not reading.whole and not reading.faults:
                self.faults.append(f"{path.name}: has no end, as after a kill or on a full disk")
        if not ended:
            self.faults.append("no end was written: the process was killed, the disk was full, or it still records")


def open_records(path: Path) -> list[Record]:
    """The records of a folder in the order of their beginning, or the one that a file belongs to.

    Raises:
        ConfigError: there is none, or none that this version can read.
        MissingDependency: the extra ``record`` is not installed.
    """
    stem = path.name.rpartition("-")[0] if path.is_file() else ""
    files = record_files(path.parent if stem else path)
    groups: dict[str, list[Path]] = {}
    for one in files:
        groups.setdefault(one.name.rpartition("-")[0], []).append(one)
    records = [_opened(found) for name, found in groups.items() if not stem or name == stem]
    if not records:
        raise ConfigError(
            "there is no record of a policy", got=path, expected="a folder or a file that wam serve --record wrote"
        )
    return records


def _opened(files: list[Path]) -> Record:
    for event in read_events(files[0], Reading(files[0])):
        if event.topic != START:
            break
        if event.values.get("format") != FORMAT:
            raise ConfigError(
                "the record has a format that this version does not read",
                got=f"{files[0]}, format {event.values.get('format')}",
                expected=FORMAT,
            )
        return Record(files, dict(event.values))
    raise ConfigError("the record does not say how it was made", got=files[0], remedy="its first event is damaged")
