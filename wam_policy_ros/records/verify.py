"""Plays a record to a policy and compares what it gives, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from wam_policy_ros.contract.errors import WamError
from wam_policy_ros.contract.interface import ActionChunk, Forks, HashesStages, Policy

from .events import CHUNK, CLOSE, ERROR, FORK, OBSERVATION, OPEN, RESET, Event, digest, to_chunk, to_observation
from .read import Record


@dataclass(frozen=True)
class Difference:
    """The first one of a session; what follows in that session is its consequence.

    Attributes:
        call: number within the record; session_id and step: of the call.
        stage: the first that differs: a stage of the engine's, ``reset``, ``actions``, or ``error``. Without recorded
            stages only the last three can be told.
        what: in words.
        observation_changed: the recorded observation is not what it was when it was recorded.
    """

    call: int
    session_id: str
    step: int
    stage: str
    what: str
    observation_changed: bool


@dataclass
class Report:
    """What a verification found.

    Attributes:
        calls: compared, sessions: of them.
        same: calls whose bits are the same.
        skipped: calls that could not be compared: their session had lost an event, or differed before.
        refused: calls that gave an error when they were recorded; they change nothing.
        stages: they were compared, too.
        differences: see there.
        faults: why the record is incomplete.
        fingerprint: recorded; lines that differ here follow in ``elsewhere``.
    """

    record: str
    calls: int = 0
    same: int = 0
    skipped: int = 0
    refused: int = 0
    sessions: int = 0
    stages: bool = False
    deterministic: bool = False
    fingerprint: str = ""
    elsewhere: list[str] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return not self.faults

    @property
    def proven(self) -> bool:
        """Everything that was recorded was compared and is the same."""
        return self.complete and not self.differences and self.calls == self.same and not self.skipped

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"complete": self.complete, "proven": self.proven}


class _Replay:
    """State of one verification."""

    def __init__(self, record: Record, policy: Policy) -> None:
        self.policy = policy
        header = record.header
        mine, theirs = policy.spec.fingerprint, record.fingerprint
        self.report = Report(
            record.name,
            stages=bool(header.get("stages")) and isinstance(policy, HashesStages),
            deterministic=bool(header.get("deterministic")),
            fingerprint=theirs.id if theirs else "",
            elsewhere=theirs.differences(mine) if theirs and mine else [],
        )
        if self.report.stages:
            policy.stage_hashes = True  # type: ignore[attr-defined]
        self._names: dict[int, tuple[str, int | None]] = {}
        self._handles: dict[int, Any] = {}
        self._lost: set[int] = set()  # sessions of which something is not known
        self._waiting: dict[int, Event] = {}  # session -> observation whose outcome comes next
        self._last = 0

    def take(self, event: Event) -> None:
        if event.number != self._last + 1:
            self._gap()
        self._last = event.number
        session = event.values["session"]
        if event.topic == OPEN:
            self._names[session] = event.values["session_id"], event.values["seed"]
            self._lost.discard(session)
        elif event.topic == FORK:
            self._fork(session, event)
        elif event.topic == OBSERVATION:
            self._waiting[session] = event
        elif event.topic == ERROR:
            self._waiting.pop(session, None)
            self.report.refused += 1
        elif event.topic == CHUNK:
            self._compare(event, self._waiting.pop(session, None))
        elif event.topic == RESET:
            self._close(session)
        elif event.topic == CLOSE:
            self._close(session)
            self._names.pop(session, None)

    def _fork(self, session: int, event: Event) -> None:
        """What is not known of the parent is not known of its copy."""
        parent, name, seed = (event.values[key] for key in ("parent", "session_id", "seed"))
        known = self._names.get(parent)
        self._names[session] = name, known[1] if seed is None and known is not None else seed
        handle = self._handles.get(parent)  # None: it has not made a call yet
        if known is None or parent in self._lost or (handle is not None and not isinstance(self.policy, Forks)):
            self._lost.add(session)
        elif handle is not None:
            self._handles[session] = self.policy.fork(handle, name, seed=seed)  # type: ignore[attr-defined]
            self.report.sessions += 1

    def _gap(self) -> None:
        """What is missing may have been anything of any session that was open."""
        self._waiting.clear()
        for session in list(self._names):
            self._lost.add(session)

    def end(self) -> None:
        for session in list(self._handles):
            self._close(session)

    def _close(self, session: int) -> None:
        """Also for a reset: a session that was opened anew begins in the same state."""
        handle = self._handles.pop(session, None)
        if handle is not None:
            self.policy.close(handle)
        self._lost.discard(session)

    def _compare(self, event: Event, seen: Event | None) -> None:
        session, report = event.values["session"], self.report
        if seen is not None and (known := event.values.get("observation_digest")):
            changed = digest(seen.arrays, seen.values) != known
            report.changed += [event.values["call"]] if changed else []
        else:
            changed = False
        if seen is None or session in self._lost or session not in self._names:
            self._lost.add(session)
            report.skipped += 1
            return
        expected = to_chunk(event)
        report.calls += 1
        try:
            if session not in self._handles:
                name, seed = self._names[session]
                self._handles[session] = self.policy.open(name, seed=seed)
                report.sessions += 1
            chunk = self.policy.infer(self._handles[session], to_observation(seen))
        except (WamError, KeyError, TypeError) as error:
            found: tuple[str, str] | None = "error", f"{type(error).__name__}: {error}"
        else:
            found = first_difference(expected, chunk)
        if found is None:
            report.same += 1
            return
        self._lost.add(session)
        where = (event.values["call"], expected.session_id, expected.step)
        report.differences.append(Difference(*where, *found, observation_changed=changed))


def first_difference(expected: ActionChunk, got: ActionChunk) -> tuple[str, str] | None:
    """The first stage at which two chunks differ, and how; None when they are the same."""
    if got.stages:
        for stage, known in expected.stages.items():
            if (here := got.stages.get(stage)) != known:
                return stage, f"recorded {known}, here {here or 'it did not run'}"
        if more := [stage for stage in got.stages if stage not in expected.stages and expected.stages]:
            return more[0], "did not run when it was recorded"
    if (got.reset, got.step) != (expected.reset, expected.step):
        return "reset", f"recorded step {expected.step}, {expected.reset}; here step {got.step}, {got.reset}"
    a, b = np.asarray(expected.actions), np.asarray(got.actions)
    if a.shape != b.shape or a.dtype != b.dtype:
        return "actions", f"recorded {a.dtype} {list(a.shape)}, here {b.dtype} {list(b.shape)}"
    if a.tobytes() != b.tobytes():
        other = np.frombuffer(a.tobytes(), np.uint8) != np.frombuffer(b.tobytes(), np.uint8)
        count = int(other.reshape(a.size, -1).any(axis=1).sum())
        return "actions", f"{count} of {a.size} values, by up to {np.abs(a - b).max():.3g}"
    return None


def verify(record: Record, policy: Policy, *, progress: Callable[[Report], None] = lambda report: None) -> Report:
    """Play the whole record in its order.

    Args:
        policy: made as the recorded one was.
        progress: told after every call.

    Raises:
        ConfigError: a file is no record.
    """
    replay = _Replay(record, policy)
    try:
        for event in record.events():
            replay.take(event)
            if event.topic == CHUNK:
                progress(replay.report)
    finally:
        replay.end()
    replay.report.faults = list(record.faults)
    return replay.report
