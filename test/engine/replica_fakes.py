"""What replicas of the tests are made of; imported in their processes, too."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import numpy as np

from wam_policy_ros.contract.errors import Cancelled, ConfigError, EngineError, InvalidState, Overloaded, PolicyLost
from wam_policy_ros.contract.fakes import ScriptedPolicy


class Sleeper(ScriptedPolicy):
    """A step takes ``latency_s`` and says which process it ran in. Its state decides what else it does."""

    def __init__(self, index: int, latency_s: float = 0.0) -> None:
        super().__init__(self._rows_of, latency_s=latency_s, weights="sleeps")
        self.spec = replace(self.spec, details={"device": f"fake:{index}"})
        self._index = index
        self.lost: PolicyLost | None = None

    def _rows_of(self, observation: Any, step: int) -> np.ndarray:
        wish = observation.prompt
        if wish == "die":
            os._exit(7)
        if wish == "hang":
            time.sleep(60)
        if wish == "bad state":
            raise InvalidState("no such state", field="joint_position", got=[1.0], remedy="another one")
        if wish == "lose":
            self.lost = PolicyLost("the policy lost a GPU", got="rank 1", remedy="load the policy again")
            raise self.lost
        if wish == "bug":
            raise ValueError("a bug")
        rows = np.zeros((self.spec.horizon, self.spec.action_dim))
        rows[0, :3] = os.getpid(), self._index, step
        return rows

    def infer(self, session: Any, observation: Any, **options: Any) -> Any:
        end = time.monotonic() + 1.5
        while observation.prompt == "long" and time.monotonic() < end:
            if options["cancelled"]():
                raise Cancelled("step cancelled")
            time.sleep(0.005)
        chunk = super().infer(session, observation, **options)
        return replace(chunk, video=("predicted", session.session_id)) if observation.want_video else chunk

    def render_video(self, chunk: Any) -> Any:
        return None if chunk.video is None else np.full((1, 2, 2, 3), len(chunk.video[1]), dtype=np.uint8)


def sleeper(index: int, progress: Any) -> Sleeper:
    progress("making a sleeper", 0.5)
    return Sleeper(index)


class Bounded(Sleeper):
    """Has memory for so many sessions. ``most``: that were open at a time."""

    def __init__(self, index: int = 0, places: int = 2) -> None:
        super().__init__(index)
        told = {"sessions_capacity": places, "memory": f"this GPU holds {places} sessions"}
        self.spec = replace(self.spec, details={**self.spec.details, **told})
        self._places, self._held, self.most = places, {}, 0

    @property
    def details(self) -> dict[str, Any]:
        held = len(self._held)
        return {"sessions_capacity": self._places, "sessions_open": held, "memory_bytes": {"windows": 100 * held}}

    def open(self, session_id: str | None = None, *, seed: int | None = None) -> Any:
        if len(self._held) == self._places:
            raise Overloaded("this GPU has memory for no other session", got=f"{self._places} open", remedy="close one")
        session = super().open(session_id, seed=seed)
        self._held[id(session)] = session
        self.most = max(self.most, len(self._held))
        return session

    def close(self, session: Any) -> None:
        super().close(session)
        self._held.pop(id(session), None)

    def reserve(self) -> Any:
        return self.open("reserved")


def bounded(index: int, progress: Any) -> Bounded:
    return Bounded(index)


def slow(index: int, progress: Any) -> Sleeper:
    return Sleeper(index, latency_s=0.15)


def refuses(index: int, progress: Any) -> Sleeper:
    if index == 1:
        raise ConfigError("device is not available", got="cuda:1", remedy="fewer replicas")
    return Sleeper(index)


def dies_loading(index: int, progress: Any) -> Sleeper:
    if index == 1:
        os._exit(9)
    return Sleeper(index)


def differs(index: int, progress: Any) -> Sleeper:
    made = Sleeper(index)
    made.spec = replace(made.spec, horizon=made.spec.horizon + index)
    return made


def tiny(index: int, progress: Any) -> Any:
    import torch

    from test.engine.tiny_policy import make_policy

    torch.set_num_threads(1)  # sums depend on it
    return make_policy()


def not_again(index: int, progress: Any) -> Sleeper:
    """Comes about once per folder."""
    mark = os.path.join(os.environ["WAM_TEST_FOLDER"], f"replica-{index}")
    if os.path.exists(mark):
        raise EngineError("the GPU has fallen off the bus")
    with open(mark, "w"):
        return Sleeper(index)
