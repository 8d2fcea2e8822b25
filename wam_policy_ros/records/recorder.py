"""Writes events from a thread of its own. Whoever has one never waits: not for the disk, not for room in the queue."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wam_policy_ros.contract.errors import ConfigError

from .events import CHUNK, END, ERROR, FORMAT, OBSERVATION, START, Event, digest
from .files import SUFFIX, EventFile

Log = Callable[[str, str], None]

RETRY_S = 10.0
"""After an error of the disk, so long until another file is tried."""

CALLS_AT_ONCE = 256
"""More cannot have begun and not ended."""

CLOSE_S = 0.3
"""What ``close`` waits for the queue: it is part of the end of a process, which is short."""


@dataclass(frozen=True)
class RecordLimits:
    """Bounds of a recorder.

    Attributes:
        file_bytes: a file that has grown beyond it is closed and followed by another one.
        queue_bytes: of events that wait for the disk; more are dropped.
    """

    file_bytes: int = 2**30
    queue_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        for name in ("file_bytes", "queue_bytes"):
            if getattr(self, name) < 2**16:
                raise ConfigError(f"record: {name} is too small", got=getattr(self, name), expected=f">= {2**16}")


@dataclass(frozen=True)
class RecordStatus:
    """How it goes.

    Attributes:
        folder: where. files: so far. written, dropped: events. nbytes: on the disk.
        trouble: why the record is incomplete; empty when it is not.
    """

    folder: str
    files: int = 0
    written: int = 0
    dropped: int = 0
    nbytes: int = 0
    trouble: str = ""


class Recorder:
    """One record: numbered files in a folder. ``put`` may be called from any thread.

    Args:
        folder: made if need be.
        log: called with a level and a line, from the recorder's thread or the one that calls.
        limits: see there.

    Attributes:
        sessions, calls: their numbers within the record.

    Raises:
        ConfigError: nothing can be written there.
        MissingDependency: the extra ``record`` is not installed.
    """

    def __init__(self, folder: Path, *, log: Log, limits: RecordLimits | None = None) -> None:
        self.folder, self.limits, self._log = folder, limits or RecordLimits(), log
        self.record_id = uuid.uuid4().hex
        self._stem = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{self.record_id[:8]}"
        self._status = RecordStatus(str(folder))
        self._header: dict[str, Any] = {}
        self._cond = threading.Condition()
        self._queue: deque[Event] = deque()
        self._queued_bytes = self._number = 0
        self._closing = False
        self._deadline_s = 0.0
        self._rest_until_s, self._refusal = 0.0, ""
        self._digests: dict[int, str] = {}
        self.sessions, self.calls = itertools.count(1), itertools.count(1)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f"{self._stem}.probe"
            try:
                EventFile(probe).finish()
            finally:
                probe.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError("no record can be written", got=str(error), remedy="give another folder") from error
        self._file: EventFile | None = None
        self._thread = threading.Thread(target=self._run, name="wam_recorder", daemon=True)

    @property
    def status(self) -> RecordStatus:
        return self._status

    def gauges(self) -> dict[str, tuple[str, Callable[[], float]]]:
        """For a server's metrics."""
        return {
            "wam_record_written_events": ("Events on the disk", lambda: self._status.written),
            "wam_record_dropped_events": ("Events that are missing in the record", lambda: self._status.dropped),
            "wam_record_bytes": ("Size of the record", lambda: self._status.nbytes),
        }

    # -- any thread ---------------------------------------------------------------------------------------------------

    def begin(self, header: Mapping[str, Any]) -> None:
        """Start to write, or go on with a policy that was made again. ``header``: fingerprint and whatever a replay
        needs; it is in every file."""
        self._header = dict(header)
        if self._thread.ident is None:
            self._thread.start()

    def put(self, event: Event) -> None:
        """Take an event, or drop it when the queue is full. Returns at once."""
        with self._cond:
            if self._closing:
                return
            self._number += 1
            event = replace(event, number=self._number, time_ns=time.time_ns())
            full = self._queued_bytes + event.nbytes > self.limits.queue_bytes
            if not full:
                self._queue.append(event)
                self._queued_bytes += event.nbytes
                self._cond.notify_all()
        if full:
            self._drop(1, "the disk is too slow")

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Write what waits, as far as time allows, and the end. False when the disk did not answer in time."""
        with self._cond:
            self._closing = True
            self._deadline_s = time.monotonic() + timeout_s
            self._cond.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s + 0.2)
        return not self._thread.is_alive()

    # -- the recorder's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._guarded(self._open_if_need_be)
        while (event := self._next()) is not None:
            self._take(event)
        self._finish()

    def _next(self) -> Event | None:
        with self._cond:
            self._cond.wait_for(lambda: self._queue or self._closing)
            if not self._queue:
                return None
            late = len(self._queue) if self._closing and time.monotonic() > self._deadline_s else 0
            event = self._queue.popleft()
            self._queued_bytes -= event.nbytes
            if late:
                self._queue.clear()
        if late:
            self._drop(late, "the process ended before they were written")
        return None if late else event

    def _take(self, event: Event) -> None:
        if time.monotonic() < self._rest_until_s or not self._guarded(self._write, event):
            self._drop(1, self._refusal)

    def _guarded(self, step: Callable[..., object], *args: Any) -> bool:
        """False when the disk refuses; another file is tried later."""
        try:
            step(*args)
        except OSError as error:
            if self._file is not None:
                self._file.abandon()
                self._file = None
            self._rest_until_s = time.monotonic() + RETRY_S
            self._refusal = f"the disk refuses: {error.strerror or error}"
            return False
        return True

    def _write(self, event: Event) -> None:
        if self._file is not None and self._file.nbytes > self.limits.file_bytes:
            self._end_file(self._file)
        file = self._open_if_need_be()
        before = file.nbytes
        file.write(self._sealed(event))
        self._count(written=1, nbytes=file.nbytes - before)

    def _end_file(self, file: EventFile) -> None:
        before = file.nbytes
        file.finish()
        self._file = None
        self._count(nbytes=file.nbytes - before)

    def _sealed(self, event: Event) -> Event:
        """A chunk says of which observation it is, by what that was when it was recorded."""
        if event.topic == OBSERVATION:
            self._digests[event.values["call"]] = digest(event.arrays, event.values)
            while len(self._digests) > CALLS_AT_ONCE:  # of some the end was dropped
                del self._digests[next(iter(self._digests))]
        elif event.topic == CHUNK:
            known = self._digests.pop(event.values["call"], "")
            return replace(event, values={**event.values, "observation_digest": known})
        elif event.topic == ERROR:
            self._digests.pop(event.values["call"], None)
        return event

    def _open_if_need_be(self) -> EventFile:
        if self._file is not None:
            return self._file
        number = self._status.files
        path = self.folder / f"{self._stem}-{number:04d}{SUFFIX}"
        path.unlink(missing_ok=True)  # of an attempt for which there was no room
        file = EventFile(path)
        header = {**self._header, "format": FORMAT, "record": self.record_id, "file": number}
        try:
            file.write(Event(START, header, time_ns=time.time_ns()))
        except OSError:
            file.abandon()
            path.unlink(missing_ok=True)
            raise
        self._file = file
        self._count(files=1, nbytes=file.nbytes)
        return file

    def _count(self, trouble: str = "", **more: int) -> bool:
        """Add to the status. True for the first trouble."""
        with self._cond:
            status = self._status
            counts = {name: getattr(status, name) + n for name, n in more.items()}
            self._status = replace(status, trouble=trouble or status.trouble, **counts)
            return bool(trouble and not status.trouble)

    def _drop(self, count: int, why: str) -> None:
        if self._count(why, dropped=count):
            self._log("warning", f"the record in {self.folder} is incomplete: {why}; the policy goes on")

    def _finish(self) -> None:
        status = self._status
        values = {"written": status.written, "dropped": status.dropped, "trouble": status.trouble}
        self._guarded(self._write_end, Event(END, values, number=self._number + 1, time_ns=time.time_ns()))

    def _write_end(self, end: Event) -> None:
        file = self._open_if_need_be()
        before = file.nbytes
        file.write(end)
        self._count(nbytes=file.nbytes - before)
        self._end_file(file)
