"""What a record is made of, and how it becomes bytes. Nothing here opens a file.

A record is a row of events with consecutive numbers. Small ones are JSON, those with arrays are safetensors, whose
``json`` entry holds the rest.

| topic | what |
|---|---|
| `/record/start` | first event of every file: fingerprint, how the policy was made, number of the file |
| `/session/open`, `/session/reset`, `/session/close` | JSON: ``session`` (a number), with ``open`` its id and seed |
| `/session/fork` | JSON: as ``open``, and ``parent``, the session it goes on from; ``seed`` null: the parent's |
| `/call/observation` | before the policy is asked: every array of the observation as it was |
| `/call/chunk`, `/call/error` | what came of it: rows, timings, fingerprint, stages; or the error |
| `/record/end` | last event of a record that was closed: how many events were written and dropped |
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save

from wam_policy_ros.contract.interface import ActionChunk, CommittedRows, Observation, ResetReason

FORMAT = 1
START, END = "/record/start", "/record/end"
OPEN, FORK, RESET, CLOSE = "/session/open", "/session/fork", "/session/reset", "/session/close"
OBSERVATION, CHUNK, ERROR = "/call/observation", "/call/chunk", "/call/error"
TOPICS = (START, OPEN, FORK, RESET, CLOSE, OBSERVATION, CHUNK, ERROR, END)
WITH_ARRAYS = frozenset({OBSERVATION, CHUNK})

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        topic: see the top of this file.
        values: JSON-serialisable.
        arrays: name -> array; only where the topic has any.
        number: consecutive within a record, from 1; a gap was dropped.
        time_ns: wall clock.
    """

    topic: str
    values: Mapping[str, Any]
    arrays: Arrays = field(default_factory=dict)
    number: int = 0
    time_ns: int = 0

    @property
    def nbytes(self) -> int:
        return 512 + sum(a.nbytes for a in self.arrays.values())

    def encode(self) -> bytes:
        text = json.dumps(self.values, default=_plain, separators=(",", ":"))
        if self.topic not in WITH_ARRAYS:
            return text.encode()
        arrays = {name: np.ascontiguousarray(a) for name, a in self.arrays.items()}
        return save(arrays, metadata={"json": text})

    @classmethod
    def decode(cls, topic: str, data: bytes, number: int = 0, time_ns: int = 0) -> Event:
        """
        Raises:
            ValueError: these are not the bytes of an event.
        """
        if topic not in WITH_ARRAYS:
            return cls(topic, json.loads(data), {}, number, time_ns)
        # The format: eight bytes with the length of the header, the header as JSON, the arrays.
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        try:
            arrays = load(data)
        except Exception as error:  # of the library's own kind
            raise ValueError(f"no arrays: {error}") from error
        return cls(topic, json.loads(header["__metadata__"]["json"]), arrays, number, time_ns)


def digest(arrays: Arrays, values: Mapping[str, Any]) -> str:
    """Of everything an event says, whatever its encoding."""
    out = hashlib.sha256(json.dumps(values, default=_plain, sort_keys=True).encode())
    for name in sorted(arrays):
        a = np.ascontiguousarray(arrays[name])
        out.update(f"{name} {a.dtype.str} {a.shape}\n".encode())
        out.update(a.data)
    return out.hexdigest()[:32]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)


# -- observation and chunk ----------------------------------------------------------------------------------------


def of_observation(observation: Observation, session: int, call: int) -> Event:
    """Arrays are copied: the caller's may change when the call is over."""
    o = observation
    arrays: dict[str, npt.NDArray[Any]] = {f"frames/{n}": np.array(a) for n, a in o.frames.items()}
    arrays |= {f"state/{n}": np.array(a, dtype=np.float64) for n, a in o.state.items()}
    arrays |= {f"stamps/{n}": np.array(a, dtype=np.int64) for n, a in (o.frame_stamps_ns or {}).items()}
    if o.committed is not None:
        arrays |= {"committed/rows": np.array(o.committed.rows), "committed/weights": np.array(o.committed.weights)}
    values = {
        "session": session,
        "call": call,
        "prompt": o.prompt,
        "stamp_ns": o.stamp_ns,
        "stamped": o.frame_stamps_ns is not None,
        "session_start_ns": o.session_start_ns,
        "want_video": o.want_video,
    }
    return Event(OBSERVATION, values, arrays)


def to_observation(event: Event) -> Observation:
    """
    Raises:
        KeyError: something is missing.
    """
    groups: dict[str, dict[str, npt.NDArray[Any]]] = {}
    for name, array in event.arrays.items():
        group, _, key = name.partition("/")
        groups.setdefault(group, {})[key] = array
    committed, v = groups.get("committed"), event.values
    return Observation(
        frames=groups["frames"],
        state=groups.get("state", {}),
        prompt=v["prompt"],
        stamp_ns=v["stamp_ns"],
        frame_stamps_ns=groups.get("stamps", {}) if v["stamped"] else None,
        session_start_ns=v["session_start_ns"],
        committed=None if committed is None else CommittedRows(committed["rows"], committed["weights"]),
        want_video=v["want_video"],
    )


def of_chunk(chunk: ActionChunk, session: int, call: int, took_s: float) -> Event:
    values = {
        "session": session,
        "call": call,
        "took_s": took_s,
        "session_id": chunk.session_id,
        "step": chunk.step,
        "dt_s": chunk.dt_s,
        "stamp_ns": chunk.stamp_ns,
        "reset": None if chunk.reset is None else chunk.reset.name,
        "timings_s": dict(chunk.timings_s),
        "info": dict(chunk.info),
        "fingerprint": chunk.fingerprint,
        "stages": dict(chunk.stages),
    }
    return Event(CHUNK, values, {"actions": np.array(chunk.actions)})


def to_chunk(event: Event) -> ActionChunk:
    """Without its video.

    Raises:
        KeyError: something is missing.
    """
    v = event.values
    return ActionChunk(
        actions=event.arrays["actions"],
        dt_s=v["dt_s"],
        stamp_ns=v["stamp_ns"],
        session_id=v["session_id"],
        step=v["step"],
        reset=None if v["reset"] is None else ResetReason[v["reset"]],
        timings_s=v["timings_s"],
        info=v["info"],
        fingerprint=v["fingerprint"],
        stages=v["stages"],
    )
