"""Play a checkpoint while the expert says what it would have done, and train on (DAgger)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from .episodes import shards
from .errors import DataError
from .evaluate import Follower, Rollouts
from .footage import Footage
from .generate import Demonstrations, Generator
from .meanwhile import PLAYED, PLAYED_SEEDS
from .pipeline import Run
from .plan import Plan

EVALUATION_SHARE = 0.12
"""Of the time; the rest behind the playing is training."""


class Dagger(Run):
    """Play ``plan.start`` while the expert watches, then train it further on that and on fresh demonstrations.

    Args:
        rollout_share: of the time, for playing.
    """

    def __init__(self, out: Path, plan: Plan, *, rollout_share: float) -> None:
        super().__init__(out, plan)
        self.played, self.rollout_share = out / PLAYED, rollout_share

    def everything(self) -> dict[str, Any]:
        plan, clock = self.plan, self.clock
        assert plan.start is not None
        self.log.line(f"dagger from {plan.start} on {self.device}, {plan.minutes:g} minutes, {plan.workers} simulators")
        network = self.given()  # before anything is played: it may be no checkpoint of this preset
        some = max(1, plan.workers // 4)
        what = Demonstrations(plan.preset, tasks=plan.tasks)
        count = None if plan.episodes is None else -(-plan.episodes // what.per_shard)
        watched = Rollouts(plan.start, plan.preset, tasks=plan.tasks)
        fresh = Generator(self.out / "data", what, workers=some, first_seed=plan.first_seed, count=count)
        player = Generator(
            self.played, watched, workers=max(1, plan.workers - some), first_seed=plan.first_seed + PLAYED_SEEDS,
            count=None if plan.episodes is None else -(-plan.episodes // watched.per_shard), make=Follower,
        )  # fmt: skip
        try:
            self.compile_layers()
            while (player.running or fresh.running) and clock.spent < clock.seconds * self.rollout_share:
                time.sleep(0.2)
                self.load_new()
        finally:
            made, also = self.stopped(player, 20.0), self.stopped(fresh, 20.0)
        self.load_new()
        self.log.line(
            f"played: {made.episodes} episodes; demonstrations: {also.episodes}; {self.footage.frames} frames"
        )
        if not shards(self.played):
            raise DataError(
                "the checkpoint was not played once", got=next(iter(player.errors), f"{clock.spent:.0f} s"),
                remedy="give more minutes",
            )  # fmt: skip
        network, sources, validation = self.sources(network.vae, network)
        self.fit(network, sources, validation, clock.seconds * (1 - EVALUATION_SHARE))
        del network, sources, validation
        self.footage = self.held_out = Footage(self.preset, self.device)
        return self.evaluate()
