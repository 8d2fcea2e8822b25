"""One seed, played: what happened, and what was told the arm."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wam_policy_ros.contract.executed import as_executed, sha256_of
from wam_policy_ros.contract.interface import ActionChunk, Policy
from wam_policy_ros.contract.predicted import due_steps
from wam_policy_ros.engine.policy import DreamZeroPolicy
from wam_policy_ros.sim.tasks import LIFT_M
from wam_policy_ros.sim.world import Frame, World
from wam_policy_ros.train.rollout import roll_out

from .controls import BLANK
from .doors import Rounded, Say, open_door
from .plan import Plan
from .predicted import Call, Eye, VideoError, video_error

Array = npt.NDArray[np.float64]
GREY = 127
Asked = tuple[int, ActionChunk]
"""At which tick, and the answer."""


@dataclass(frozen=True)
class Episode:
    """How a seed went.

    Attributes:
        ticks: until success or the end.
        highest_m: of the task's thing above where it lay, at most.
        moved_m: thing -> how far (m) from where it lay it ended; only those that were moved.
        taken: things other than the task's that were lifted as high as counts as lifted; None: not known.
        actions_sha256: of the rows that were executed, see ``contract.executed``; None: not known.
        calls_s: seconds per call of the policy.
        policy: what the policy says of itself; JSON.
        executed: ``[ticks, 8]``.
        video: how far the predicted frames are off; None: not asked for.
        disturbed: what kept a policy node from sending the policy's rows as they are, and how often.
    """

    seed: int
    task: str
    instruction: str
    success: bool
    ticks: int
    highest_m: float
    moved_m: dict[str, float]
    taken: tuple[str, ...] | None
    actions_sha256: str | None
    calls_s: tuple[float, ...]
    policy: dict[str, Any]
    executed: Array = field(repr=False)
    video: VideoError | None = None
    disturbed: dict[str, int] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "seed": self.seed,
            "task": self.task,
            "instruction": self.instruction,
            "success": self.success,
            "ticks": self.ticks,
            "highest_m": round(self.highest_m, 4),
            "moved_m": {n: round(d, 4) for n, d in self.moved_m.items()},
            "others_taken": None if self.taken is None else list(self.taken),
            "calls": len(self.calls_s),
            "actions_sha256": self.actions_sha256,
            **({"video_error": self.video.summary()["all"]} if self.video else {}),
            **({"disturbed": self.disturbed} if self.disturbed else {}),
        }


def sha256_of_all(episodes: Iterable[Episode]) -> str | None:
    """One name for what was executed in all episodes: of their seeds and hashes, by seed; None where one has none."""
    episodes = list(episodes)
    if any(e.actions_sha256 is None for e in episodes):
        return None
    lines = [f"{e.seed} {e.actions_sha256}\n" for e in sorted(episodes, key=lambda e: e.seed)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


class EpisodePlayer:
    """Plays seeds of a plan in one process. Made and used in one thread.

    Args:
        policy: the plan's, if it has been made; others may ask it, too.
    """

    def __init__(self, plan: Plan, say: Say = lambda line: None, *, policy: Policy | None = None) -> None:
        self.plan, self.world = plan, World()
        self.policy, self.execute = open_door(plan, self.world, say, policy)
        self.about = about(self.policy, self.execute)

    def play(self, seed: int) -> Episode:
        """One episode; drawn, if the plan wants pictures of such ones."""
        episode, calls = self.play_and_keep(seed)
        if self._is_drawn(episode):
            self.draw(episode, calls)
        return episode

    def play_and_keep(
        self, seed: int, on_call: Callable[[int, float, float], None] = lambda tick, high_m, took_s: None
    ) -> tuple[Episode, list[Asked]]:
        """One episode, and every chunk for ``draw``.

        Args:
            on_call: told after every call: the tick, the height (m) of the task's thing, and the seconds it took.
        """
        task, words = self.plan.chosen(seed)
        executed: list[Array] = []
        calls: list[Asked] = []
        high: set[str] = set()
        eye = Eye(self._engine) if self.plan.video_error else None
        seen: dict[int, npt.NDArray[np.uint8]] = {}

        def on_seen(frame: Frame) -> None:
            if eye is not None:
                seen[frame.tick] = eye.mosaic(frame.images)

        def look() -> None:
            high.update(n for n, z in self.world.raised_m.items() if z > LIFT_M)

        def on_tick(frame: Frame, row: Array) -> None:
            executed.append(as_executed(row))
            look()

        def asked(frame: Frame, chunk: ActionChunk) -> None:
            calls.append((frame.tick, chunk))
            on_call(frame.tick, self.world.raised_m[task.target], self.policy.took_s)

        out = roll_out(
            self.world,
            self.policy,
            seed,
            task,
            words,
            execute=self.execute,
            max_ticks=self.plan.max_ticks,
            on_call=asked,
            on_tick=on_tick,
            change=_grey if self.plan.control == BLANK else lambda frames: frames,
            look_at=eye.ticks if eye is not None else (),
            on_seen=on_seen,
        )
        look()
        video = None
        if eye is not None:
            video = video_error([self.call_of(a) for a in calls], seen, eye.places, out.ticks)
        episode = Episode(
            seed=seed, task=task.name, instruction=words, success=out.success, ticks=out.ticks,
            highest_m=out.lifted_m, moved_m=dict(self.world.outcome.moved_m),
            taken=tuple(sorted(high - {task.target})), actions_sha256=sha256_of(np.array(executed)),
            calls_s=tuple(out.calls_s), policy=self.about, executed=np.array(executed), video=video,
        )  # fmt: skip
        return episode, calls

    def close(self) -> None:
        self.world.close()

    def _is_drawn(self, episode: Episode) -> bool:
        if not self.plan.pictures or (episode.success and not self.plan.every):
            return False
        folder = Path(self.plan.pictures)
        folder.mkdir(parents=True, exist_ok=True)
        return len(list(folder.glob("*.mp4"))) < self.plan.shown

    def draw(self, episode: Episode, calls: list[Asked]) -> tuple[Path, Path]:
        """Video and plot of an episode of this player, in the plan's folder; see ``pictures.draw``."""
        from .pictures import draw  # matplotlib and av only where somebody wants pictures

        eye = Eye(self._engine) if isinstance(self._engine, DreamZeroPolicy) else None
        made = [self.call_of(a) for a in calls]
        return draw(self.world, episode, made, Path(self.plan.pictures), self.about["weights"], eye)

    @property
    def _engine(self) -> Any:
        """The policy itself, for what never changes in it."""
        policy = self.policy.policy
        return getattr(policy, "engine", policy)

    def call_of(self, asked: Asked) -> Call:
        """With its predicted video decoded, if it has one."""
        tick, chunk = asked
        predicted = self.policy.render_video(chunk)
        due = () if predicted is None else tuple(due_steps(self.policy.spec, len(predicted)))
        return Call(tick, chunk.actions, predicted, due)


def _grey(frames: dict[str, Any]) -> dict[str, Any]:
    return {name: np.full_like(pixels, GREY) for name, pixels in frames.items()}


def about(policy: Rounded, execute: int) -> dict[str, Any]:
    """What a policy says of itself and how it is executed; JSON-serialisable."""
    spec = policy.spec
    details = {k: v for k, v in spec.details.items() if isinstance(v, str | int | float | bool | None)}
    return {
        "weights": spec.weights,
        "random_weights": spec.random_weights,
        "horizon": spec.horizon,
        "frame_offsets": list(spec.frame_offsets),
        "execute": execute,
        "details": {k: v for k, v in details.items() if k != "uri"} | dict(spec.details.get("server", {})),
        "fingerprint": spec.fingerprint.as_dict() if spec.fingerprint else None,
    }
