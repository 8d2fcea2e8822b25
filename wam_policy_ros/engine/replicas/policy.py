"""Replicas as one policy: ``contract.places.Placed``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from wam_policy_ros.contract.errors import Cancelled, ConfigError, SessionError
from wam_policy_ros.contract.interface import ActionChunk, Observation, PolicySpec
from wam_policy_ros.contract.policy_thread import WARNING

from .replica import Care, RemoteFactory, Replica, ReplicaSession, same_policy

Progress = Callable[[str, float], None]


class Replicas:
    """N independent policies, each in a process of its own. Sessions stay where they were opened.

    Its owner calls ``places``, each in a thread of its own; called as one policy it opens sessions at the place with
    the fewest, and is not faster than one.

    Args:
        factory: see ``RemoteFactory``. count: of replicas.
        progress: told what they say while they load; may raise to give up.
        log: told with a level and a line what happens to them later; any thread. None: ``progress`` is, as a warning.
        care: how they are looked after.

    Raises:
        ConfigError: fewer than one.
        WamError: what kept one of them from starting; the others have been ended.
    """

    def __init__(
        self,
        factory: RemoteFactory,
        count: int,
        *,
        progress: Progress = lambda text, fraction: None,
        log: Callable[[str, str], None] | None = None,
        care: Care | None = None,
    ) -> None:
        if count < 1:
            raise ConfigError("replicas must be at least 1", got=count)

        def warn(level: str, line: str) -> None:
            with suppress(Cancelled):
                progress(WARNING + line, 1.0)

        self._said: dict[int, tuple[str, float]] = {}
        self._warnings: list[str] = []
        self.places = [
            Replica(factory, index, care=care or Care(), progress=self._tell, log=log or warn) for index in range(count)
        ]
        try:
            for place in self.places:
                place.start()
            self._wait(progress)
            self.spec: PolicySpec = self._common_spec(progress)
        except BaseException:
            self.disconnect()
            raise

    def _common_spec(self, progress: Progress) -> PolicySpec:
        specs = [place.spec for place in self.places]
        first = specs[0]
        for spec in specs[1:]:
            if not same_policy(first, spec):
                raise ConfigError("the replicas are not the same policy", got=spec, expected=first)
        alike = all(spec.fingerprint == first.fingerprint for spec in specs)
        if not alike:
            progress(f"{WARNING}the replicas have different fingerprints: their bits may differ", 1.0)
        devices = ", ".join(str(spec.details.get("device", "")) for spec in specs)
        details = {**first.details, "replicas": len(specs), "device": devices}
        # Sessions go where there are the fewest, so the smallest is full first.
        each = [
            spec.details["sessions_capacity"] for spec in specs if spec.details.get("sessions_capacity") is not None
        ]
        if each:
            details["sessions_capacity"] = len(specs) * min(each)
            details["memory"] = f"each of {len(specs)} replicas: {first.details['memory']}"
        return replace(first, details=details, fingerprint=first.fingerprint if alike else None)

    def _tell(self, place: int, text: str, fraction: float) -> None:
        if text.startswith(WARNING):
            self._warnings.append(f"{WARNING}replica {place}: {text.removeprefix(WARNING)}")
        else:
            self._said[place] = (text, fraction)

    def _wait(self, progress: Progress) -> None:
        shown: tuple[str, float] | None = None
        for place in self.places:
            while not place.wait_ready(0.1):
                if failed := next((p.failed for p in self.places if p.failed is not None), None):
                    raise failed
                while self._warnings:
                    progress(self._warnings.pop(0), 0.0)
                if self._said:
                    # The one that is furthest behind is who is waited for.
                    at, (text, fraction) = min(self._said.items(), key=lambda item: item[1][1])
                    now = (f"replica {at}: {text}", fraction)
                    if now != shown:
                        shown = now
                        progress(*now)
                progress(*(shown or ("starting the replicas", 0.0)))
            if place.failed is not None:
                raise place.failed

    def disconnect(self) -> None:
        """End the processes. Idempotent."""
        for place in self.places:
            place.end(timeout_s=0.0)
        for place in self.places:
            place.end()

    # -- contract.interface.Policy ----------------------------------------------------------------------------------

    def open(self, session_id: str | None = None, *, seed: int | None = None) -> ReplicaSession:
        there = [p for p in self.places if not p.trouble] or self.places
        return min(there, key=lambda p: p.sessions).open(session_id, seed=seed)

    def fork(self, session: Any, session_id: str | None = None, *, seed: int | None = None) -> ReplicaSession:
        return self._of(session).fork(session, session_id, seed=seed)

    def infer(
        self, session: Any, observation: Observation, *, cancelled: Callable[[], bool] | None = None
    ) -> ActionChunk:
        return self._of(session).infer(session, observation, cancelled=cancelled)

    def reset(self, session: Any) -> None:
        self._of(session).reset(session)

    def close(self, session: Any) -> None:
        self._of(session).close(session)

    def render_video(self, chunk: ActionChunk) -> npt.NDArray[np.uint8] | None:
        there = [p for p in self.places if not p.trouble] or self.places
        return there[0].render_video(chunk)

    def _of(self, session: Any) -> Replica:
        if not isinstance(session, ReplicaSession) or session.replica not in self.places:
            raise SessionError("not a session of this policy", got=type(session).__name__, remedy="use policy.open()")
        return session.replica
