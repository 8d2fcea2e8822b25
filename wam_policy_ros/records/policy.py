"""A policy that is recorded: the same four verbs, and the recorder is told before and after each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.contract.interface import (
    ActionChunk,
    EncodesAhead,
    Forks,
    HashesStages,
    Observation,
    Policy,
    PolicySpec,
    interleaves,
)
from wam_policy_ros.contract.places import Placed

from .events import CLOSE, ERROR, FORK, OPEN, RESET, Event, of_chunk, of_observation
from .recorder import Recorder

Sessions = dict[int, tuple[int, Any]]
"""id of a session's object -> its number, and the object: an id is free for others when its object is gone."""


def recorded(policy: Policy, recorder: Recorder, *, stages: bool = False, how: Mapping[str, Any]) -> RecordingPolicy:
    """Start to record a policy.

    Args:
        recorder: it ends with the policy (``disconnect``, which its owner's thread calls).
        stages: record a digest of every stage of a call as well, so that a replay can name the first that differs. It
            waits for the device at every stage, so a step takes longer.
        how: how the policy was made, for a replay: checkpoint, tokenizer, ...; JSON-serialisable.

    Raises:
        ConfigError: the policy has no stages.
    """
    if stages and isinstance(policy, HashesStages):
        policy.stage_hashes = True
    elif stages and not isinstance(policy, Placed):  # those are made with or without
        raise ConfigError(
            "this policy has no stages to record", got=type(policy).__name__, remedy="record without them"
        )
    spec = policy.spec
    recorder.begin(
        {
            "fingerprint": None if spec.fingerprint is None else spec.fingerprint.as_dict(),
            "weights": spec.weights,
            "random_weights": spec.random_weights,
            "embodiment": spec.embodiment,
            "deterministic": bool(spec.details.get("deterministic")),
            "stages": stages,
            "how": dict(how),
        }
    )
    return _wrapped(policy, recorder, {})


def _wrapped(policy: Policy, recorder: Recorder, sessions: Sessions) -> RecordingPolicy:
    if isinstance(policy, Placed):
        return _InPlaces(policy, recorder, sessions)  # type: ignore[arg-type]
    kinds = {
        (False, False): RecordingPolicy,
        (True, False): _EncodingAhead,
        (False, True): _Forking,
        (True, True): _EncodingAheadAndForking,
    }
    return kinds[isinstance(policy, EncodesAhead), isinstance(policy, Forks)](policy, recorder, sessions)


class RecordingPolicy:
    """See ``Policy``. Made by :func:`recorded`. What the policy has besides is reached through it."""

    def __init__(self, policy: Policy, recorder: Recorder, sessions: Sessions) -> None:
        self._policy, self._recorder, self._sessions = policy, recorder, sessions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    @property
    def spec(self) -> PolicySpec:
        return self._policy.spec

    @property
    def interleaves(self) -> bool:
        """As the policy: events of several calls may be mixed, and say whose they are."""
        return interleaves(self._policy)

    def open(self, session_id: str | None = None, *, seed: int | None = None) -> Any:
        return self._began(OPEN, self._policy.open(session_id, seed=seed), seed=seed)

    def _began(self, topic: str, session: Any, **values: Any) -> Any:
        number = next(self._recorder.sessions)
        self._sessions[id(session)] = number, session
        self._put(topic, session=number, session_id=session.session_id, **values)
        return session

    def infer(
        self, session: Any, observation: Observation, *, cancelled: Callable[[], bool] | None = None
    ) -> ActionChunk:
        number, call = self._number(session), next(self._recorder.calls)
        self._recorder.put(of_observation(observation, number, call))
        start_s = time.perf_counter()
        try:
            chunk = self._policy.infer(session, observation, cancelled=cancelled)
        except BaseException as error:
            self._put(ERROR, session=number, call=call, error=type(error).__name__, text=str(error))
            raise
        took_s = time.perf_counter() - start_s - chunk.timings_s.get("interrupted", 0.0)
        self._recorder.put(of_chunk(chunk, number, call, took_s))
        return chunk

    def reset(self, session: Any) -> None:
        self._policy.reset(session)
        self._put(RESET, session=self._number(session))

    def close(self, session: Any) -> None:
        self._policy.close(session)
        number, _ = self._sessions.pop(id(session), (0, None))
        if number:
            self._put(CLOSE, session=number)

    def render_video(self, chunk: ActionChunk) -> npt.NDArray[np.uint8] | None:
        return self._policy.render_video(chunk)

    def disconnect(self) -> None:
        """No more calls will come: the record ends."""
        self._recorder.close()
        leave = getattr(self._policy, "disconnect", None)
        if leave is not None:
            leave()

    def _number(self, session: Any) -> int:
        return self._sessions.get(id(session), (0, None))[0]

    def _put(self, topic: str, **values: Any) -> None:
        self._recorder.put(Event(topic, values))


class _Forking(RecordingPolicy):
    """A copy is a session of its own, which begins where its parent stands."""

    def fork(self, session: Any, session_id: str | None = None, *, seed: int | None = None) -> Any:
        copy = self._policy.fork(session, session_id, seed=seed)  # type: ignore[attr-defined]
        return self._began(FORK, copy, parent=self._number(session), seed=seed)


class _InPlaces(_Forking):
    """A policy that consists of several, each called by a thread of its own: each of them is recorded."""

    def __init__(self, policy: Policy, recorder: Recorder, sessions: Sessions) -> None:
        super().__init__(policy, recorder, sessions)
        self.places: Sequence[Any] = [_wrapped(place, recorder, sessions) for place in policy.places]  # type: ignore[attr-defined]


class _EncodingAhead(RecordingPolicy):
    """``observe`` changes no result, so it is not recorded."""

    def observe(self, session: Any, slot: int, frames: Mapping[str, npt.NDArray[np.uint8]]) -> bool:
        return self._policy.observe(session, slot, frames)  # type: ignore[attr-defined]


class _EncodingAheadAndForking(_EncodingAhead, _Forking):
    pass
