"""The expert's episodes at the full rate and size, for a LeRobot data set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wam_policy_ros.sim.cameras import NAMES
from wam_policy_ros.sim.demonstrations import Noise, demonstrate
from wam_policy_ros.sim.expert import Expert
from wam_policy_ros.sim.tasks import TASKS
from wam_policy_ros.sim.world import World

from . import lerobot
from .generate import choose_task, state_of


@dataclass(frozen=True)
class Recording:
    """What to record; ``per_shard`` episodes go into one file. ``disturbed``: push the arm off its way now and then."""

    tasks: tuple[str, ...] = tuple(TASKS)
    per_shard: int = 8
    max_ticks: int = 200
    after: int = 10
    disturbed: bool = True
    fps: int = 15


class Recorder:
    """Makes and writes them, in one process of a ``Generator``."""

    def __init__(self, what: Recording) -> None:
        self.what, self.world = what, World()
        self.expert = Expert(self.world)

    def exists(self, folder: Path, first_seed: int, shard: int) -> bool:
        return lerobot.has_file(folder, shard)

    def write(self, folder: Path, first_seed: int, shard: int, episodes: list[Any]) -> None:
        lerobot.write_file(folder, shard, episodes, self.what.fps)

    def __call__(self, seed: int) -> lerobot.Recorded | None:
        """None when the expert failed."""
        what = self.what
        task, words = choose_task(seed, what.tasks)
        noise = Noise(joint_rad=0.0) if what.disturbed else Noise.none()
        steps = list(
            demonstrate(self.world, self.expert, seed, task, noise=noise, max_ticks=what.max_ticks, after=what.after)
        )
        if not self.world.outcome.success:
            return None
        return lerobot.Recorded(
            seed=seed,
            task=task.name,
            instruction=words,
            success=True,
            images={n: np.stack([s.frame.images[n] for s in steps]) for n in NAMES},
            state=np.stack([state_of(s.frame) for s in steps]),
            action=np.stack([s.executed.row.astype(np.float32) for s in steps]),
        )
