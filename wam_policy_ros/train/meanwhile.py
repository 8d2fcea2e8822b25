"""What the simulators do while the GPU trains: more demonstrations, then episodes of the newest weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .evaluate import Follower, Rollouts
from .generate import Demonstrations, Generator

if TYPE_CHECKING:
    from .pipeline import Plan

PLAYED = "played"
"""Folders of episodes of a policy begin with this."""
PLAYED_SEEDS = 10_000_000
"""Added to the seed of what a policy plays, so that its scenes are no demonstration's."""


def meanwhile(plan: Plan, out: Path, part: int) -> Generator:
    """Simulators beside part ``part`` of a training in ``out``.

    They play the checkpoint in ``out`` from the second part on; before that there is none, unless training began with
    one, and demonstrations are made.
    """
    workers = max(1, plan.workers - plan.spare_cores)
    if part == 0:
        what = Demonstrations(plan.preset, tasks=plan.tasks)
        known = len(list((out / "data").glob("*.npz")))
        count = known + -(-plan.round_episodes // what.per_shard)
        return Generator(out / "data", what, workers=workers, first_seed=plan.first_seed, count=count)
    # One episode to a file: none is lost when the part is over.
    watched = Rollouts(str(out / "checkpoint"), plan.preset, tasks=plan.tasks, per_shard=1)
    first = plan.first_seed + PLAYED_SEEDS * (1 + part)
    return Generator(out / f"{PLAYED}-{part}", watched, workers=workers, first_seed=first, count=None, make=Follower)
