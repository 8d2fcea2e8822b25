"""Policies that are no network: what must fail, and the most that can be reached. They stand where a policy stands.

They are asked like a policy and their rows are executed like a policy's, so that what they show holds for it.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.contract.fakes import HoldPolicy, spec_of
from wam_policy_ros.contract.interface import ActionChunk, Observation, Policy
from wam_policy_ros.sim.demonstrations import Noise, demonstrate
from wam_policy_ros.sim.expert import Expert
from wam_policy_ros.sim.world import World

HOLD, REPLAY, BLANK, EXPERT = "hold", "wrong-seed-replay", "blank-cameras", "expert"
CONTROLS = {
    HOLD: "stands still; must fail",
    REPLAY: "what the expert does in the next seed's scene, played blindly in this one; must fail, mostly",
    BLANK: "the policy itself with grey cameras; must fail",
    EXPERT: "the scripted expert, which reads true poses; the most that can be reached",
}
ROWS, EXECUTE = 16, 8


@dataclass
class _Session:
    session_id: str
    actions: npt.NDArray[np.float64]
    step: int = 0


class _Control(ABC):
    """Rows from the world itself. ``world``: the one that is played in."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        # Nothing is looked at: no frame but the newest needs to be drawn.
        self.spec = replace(
            spec_of("oxe_droid", weights=f"control: {name}, no network"), horizon=ROWS, frame_offsets=(0,)
        )

    def open(self, session_id: str | None = None, *, seed: int | None = None) -> _Session:
        return _Session(session_id or uuid.uuid4().hex, np.zeros((0, 8)))

    @abstractmethod
    def rows(self, session: _Session) -> npt.NDArray[np.float64]:
        """``[ROWS, 8]``: the next ones."""

    def infer(self, session: Any, observation: Observation, *, cancelled: Any = None) -> ActionChunk:
        rows = self.rows(session)
        session.step += 1
        return ActionChunk(rows, self.spec.dt_s, None, session.session_id, session.step - 1)

    def reset(self, session: Any) -> None:
        session.step = 0

    def close(self, session: Any) -> None:
        return None

    def render_video(self, chunk: ActionChunk) -> None:
        return None


class ExpertPolicy(_Control):
    """The scripted expert, asked every ``EXECUTE`` ticks for its next targets."""

    def __init__(self, world: World) -> None:
        super().__init__(world, EXPERT)
        self._expert = Expert(world)

    def rows(self, session: _Session) -> npt.NDArray[np.float64]:
        return self._expert.label(self.world, ROWS)


class ReplayPolicy(_Control):
    """Lifts the same thing where it lies in another scene."""

    def __init__(self, world: World) -> None:
        super().__init__(world, REPLAY)
        self._other = World(render=False)
        self._expert = Expert(self._other)

    def open(self, session_id: str | None = None, *, seed: int | None = None) -> _Session:
        session, world = super().open(session_id), self.world
        assert world.layout is not None and world.task is not None  # a scene is set up before a policy is asked
        steps = demonstrate(
            self._other, self._expert, world.layout.seed + 1, world.task, noise=Noise.none(), images=False
        )
        session.actions = np.array([s.executed.row for s in steps])
        return session

    def rows(self, session: _Session) -> npt.NDArray[np.float64]:
        at = np.arange(session.step * EXECUTE, session.step * EXECUTE + ROWS)
        return session.actions[np.minimum(at, len(session.actions) - 1)]


def control_policy(name: str, world: World) -> Policy:
    """Raises ConfigError for a name that is no control, or that is one of the policy itself."""
    made: Any = {HOLD: lambda w: HoldPolicy(), REPLAY: ReplayPolicy, EXPERT: ExpertPolicy}.get(name)
    if made is None:
        raise ConfigError("unknown control", got=repr(name), expected=f"one of {sorted(CONTROLS)}")
    return made(world)
