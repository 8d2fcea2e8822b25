"""Policies without a network, for tests and dry runs, and a generator of valid observations."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .embodiment import Embodiment, get_embodiment
from .errors import Cancelled, SessionError
from .interface import ActionChunk, Observation, PolicySpec, ResetReason


def spec_of(embodiment: Embodiment | str, *, weights: str, random_weights: bool = False) -> PolicySpec:
    """A policy spec with an embodiment's own numbers."""
    e = get_embodiment(embodiment) if isinstance(embodiment, str) else embodiment
    return PolicySpec(
        embodiment=e.tag,
        cameras=e.cameras,
        state=e.state,
        action=e.action,
        control_rate_hz=e.control_rate_hz,
        horizon=e.horizon,
        frame_offsets=e.frame_offsets,
        weights=weights,
        random_weights=random_weights,
    )


@dataclass
class FakeSession:
    """An episode of a fake policy. ``seen`` is filled only when the policy records."""

    session_id: str
    step: int = 0
    closed: bool = False
    seed: int | None = None
    seen: list[Observation] = field(default_factory=list)


class ScriptedPolicy:
    """A policy whose rows come from a function ``rows(observation, step) -> [N, action_dim]``.

    Args:
        rows: the script.
        latency_s: time one call takes; slept in small slices so that ``cancelled`` is honoured.
        record: for tests: keep every session in ``sessions`` and every observation in its ``seen``.
        inpainting: the script looks at ``Observation.committed``; without, such an observation is refused.
        interleaves: see ``Interleaves``; ``latency_s`` is then the step's own time.
    """

    def __init__(
        self,
        rows: Callable[[Observation, int], np.ndarray],
        *,
        embodiment: str = "oxe_droid",
        latency_s: float = 0.0,
        weights: str = "scripted, no network",
        record: bool = False,
        inpainting: bool = False,
        interleaves: bool = False,
    ) -> None:
        self.interleaves = interleaves
        self._rows = rows
        self._record = record
        self._latency_s = latency_s
        self.spec: PolicySpec = replace(spec_of(embodiment, weights=weights), inpainting=inpainting)
        self.sessions: list[FakeSession] = []

    def open(self, session_id: str | None = None, *, seed: int | None = None) -> FakeSession:
        session = FakeSession(session_id or uuid.uuid4().hex, seed=seed)
        if self._record:
            self.sessions.append(session)
        return session

    def infer(
        self, session: Any, observation: Observation, *, cancelled: Callable[[], bool] | None = None
    ) -> ActionChunk:
        if not isinstance(session, FakeSession) or session.closed:
            raise SessionError("session is closed or belongs to another policy", got=session)
        if observation.committed is not None:
            observation.committed.check_fit(self.spec)
        start, away_s = time.monotonic(), 0.0
        while (left := start + away_s + self._latency_s - time.monotonic()) > 0:
            if cancelled is not None:
                asked = time.monotonic()
                if cancelled():
                    raise Cancelled("step cancelled")
                away_s += time.monotonic() - asked
            time.sleep(min(left, 0.01))
        rows = np.asarray(self._rows(observation, session.step), dtype=np.float64)
        if self._record:
            session.seen.append(observation)
        step, session.step = session.step, session.step + 1
        return ActionChunk(
            actions=rows,
            dt_s=self.spec.dt_s,
            stamp_ns=observation.stamp_ns,
            session_id=session.session_id,
            step=step,
            reset=ResetReason.FIRST_CALL if step == 0 else None,
            timings_s={"total": time.monotonic() - start - away_s} | ({"interrupted": away_s} if away_s > 1e-3 else {}),
        )

    def fork(self, session: Any, session_id: str | None = None, *, seed: int | None = None) -> FakeSession:
        if not isinstance(session, FakeSession) or session.closed:
            raise SessionError("session is closed or belongs to another policy", got=session)
        twin = self.open(session_id, seed=session.seed if seed is None else seed)
        twin.step, twin.seen = session.step, list(session.seen)
        return twin

    def reset(self, session: Any) -> None:
        session.step = 0
        session.seen.clear()

    def close(self, session: Any) -> None:
        session.closed = True
        session.seen.clear()

    def render_video(self, chunk: ActionChunk) -> None:
        return None


class HoldPolicy(ScriptedPolicy):
    """Repeats the current state as every row: a robot driven by it stands still."""

    def __init__(self, *, embodiment: str = "oxe_droid", latency_s: float = 0.0) -> None:
        def rows(observation: Observation, step: int) -> np.ndarray:
            now = np.concatenate([observation.state[f.name] for f in self.spec.state])
            return np.tile(now, (self.spec.horizon, 1))

        super().__init__(rows, embodiment=embodiment, latency_s=latency_s, weights="hold policy, no network")


def example_observation(
    spec: PolicySpec,
    *,
    frames: int = 1,
    seed: int = 0,
    prompt: str = "pick up the red cup",
    stamp_ns: int | None = None,
) -> Observation:
    """A random but valid observation: ``frames`` images per camera and a state inside plausible bounds.

    With ``stamp_ns`` the frames carry stamps at the spec's offsets (``frames`` = 1 or len(frame_offsets)).
    """
    rng = np.random.default_rng(seed)
    stamps = None
    if stamp_ns is not None:
        offsets = (0,) if frames == 1 else spec.frame_offsets[-frames:]
        one = np.array([stamp_ns + round(o * 1e9 / spec.control_rate_hz) for o in offsets], dtype=np.int64)
        stamps = {c.name: one for c in spec.cameras}
    return Observation(
        frames={c.name: rng.integers(0, 256, (frames, c.height, c.width, 3), dtype=np.uint8) for c in spec.cameras},
        state={f.name: rng.uniform(0.0, 0.5, f.dim) for f in spec.state},
        prompt=prompt,
        stamp_ns=stamp_ns,
        frame_stamps_ns=stamps,
    )
