"""Records made by small policies, and ways to damage them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from test.serving.harness import RememberingPolicy
from wam_policy_ros.contract.fakes import example_observation
from wam_policy_ros.contract.interface import Observation, PolicySpec
from wam_policy_ros.records.events import Event
from wam_policy_ros.records.files import EventFile, Reading, read_events, record_files
from wam_policy_ros.records.policy import recorded
from wam_policy_ros.records.recorder import Recorder, RecordLimits


class Lines(list[str]):
    """A log."""

    def __call__(self, level: str, line: str) -> None:
        self.append(f"{level}: {line}")


def look(spec: PolicySpec, seed: int, **options: Any) -> Observation:
    return example_observation(spec, seed=seed, **options)


def record(
    folder: Path,
    script: Callable[[Any, PolicySpec], None],
    policy: Any = None,
    *,
    stages: bool = False,
    close: bool = True,
    how: dict[str, Any] | None = None,
    **limits: int,
) -> Recorder:
    """Run a script with a recorded policy."""
    recorder = Recorder(folder, log=Lines(), limits=RecordLimits(**limits))
    policy = recorded(policy or RememberingPolicy(), recorder, stages=stages, how=how or {})
    script(policy, policy.spec)
    if close:
        policy.disconnect()
    return recorder


def episode(calls: int = 3, session: str = "a", seed: int = 0, **options: Any) -> Callable[[Any, PolicySpec], None]:
    """One session from its beginning to its end."""

    def script(policy: Any, spec: PolicySpec) -> None:
        handle = policy.open(session, seed=seed)
        for i in range(calls):
            policy.infer(handle, look(spec, 100 * seed + i, **options))
        policy.close(handle)

    return script


def events(folder: Path) -> list[Event]:
    return [e for path in record_files(folder) for e in read_events(path, Reading(path))]


def rewrite(folder: Path, change: Callable[[Event], Event | None]) -> None:
    """Write every file anew with its events changed, or left out. The files are sound afterwards."""
    for path in record_files(folder):
        found = list(read_events(path, Reading(path)))
        path.unlink()
        file = EventFile(path)
        for event in found:
            new = change(event)
            if new is not None:
                file.write(new)
        file.finish()


def flip(event: Event, name: str, index: int, bit: int = 0) -> Event:
    """One bit of one array."""
    array = event.arrays[name].copy()
    array.view("u1").reshape(-1)[index] ^= 1 << bit
    return replace(event, arrays={**event.arrays, name: array})
