"""What the simulators do while the GPU trains: more demonstrations, then episodes of the newest weights."""

from __future__ import annotations

from pathlib import Path

from .evaluate import Follower, Rollouts
from .generate import Demonstrations, Generator
from .plan import Plan

PLAYED = "played"
"""Folders of episodes of a policy begin with this."""
PLAYED_SEEDS = 10_000_000
"""Added to the seed of what a policy plays, so that its scenes are no demonstration's."""


def meanwhile(plan: Plan, out: Path, part: int) -> Generator:
    """Simulators beside part ``part`` of a training in ``out``.

    Beside the first part they make demonstrations, as ``out`` has no checkpoint yet; beside every later one they play
    the checkpoint that the part before has left there.
    """
    workers = max(1, plan.workers - plan.spare_cores)
    if part == 0:
        what = Demonstrations(plan.preset, tasks=plan.tasks)
        known = len(list((out / "data").glob("*.npz")))
        count = known + -(-plan.round_episodes // what.per_shard)
        return Generator(out / "data", what, workers=workers, first_seed=plan.first_seed, count=count)
    # One episode to a file: when the part is over only those are lost that are being played.
    watched = Rollouts(str(out / "checkpoint"), plan.preset, tasks=plan.tasks, per_shard=1)
    first = plan.first_seed + PLAYED_SEEDS * (1 + part)
    return Generator(out / f"{PLAYED}-{part}", watched, workers=workers, first_seed=first, count=None, make=Follower)
