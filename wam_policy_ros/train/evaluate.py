"""Success of a checkpoint on seeds it was never trained on, by several processes, each with a policy of its own."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wam_policy_ros.engine.build import build_policy
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.policy import DreamZeroPolicy
from wam_policy_ros.engine.recommended import recommended
from wam_policy_ros.sim.expert import Expert
from wam_policy_ros.sim.tasks import TASKS
from wam_policy_ros.sim.world import World

from .episodes import Episode
from .generate import ShardWriter, choose_task, shrink, state_of
from .preset import PRESETS
from .rollout import Outcome, roll_out

EMBODIMENT = "oxe_droid"


@dataclass(frozen=True)
class Rollouts:
    """What is played.

    Attributes:
        checkpoint: folder; options: engine options on top of those it recommends.
        execute: rows of a chunk to execute; None: as the checkpoint recommends.
        blind: cameras show grey: a control that must fail.
        label_every: ticks between the expert's labels, for training on what the policy did.
    """

    checkpoint: str
    preset: str = "mug"
    tasks: tuple[str, ...] = tuple(TASKS)
    options: tuple[tuple[str, Any], ...] = ()
    execute: int | None = None
    max_ticks: int = 160
    blind: bool = False
    label_every: int = 4
    per_shard: int = 4
    threads: int = 1


def load(what: Rollouts) -> tuple[DreamZeroPolicy, int]:
    """The policy on the CPU in float32, as it runs on a robot without a GPU, and the rows to execute."""
    wanted = recommended(what.checkpoint, EMBODIMENT)
    config = EngineConfig.from_dict(wanted.options | dict(what.options))
    policy = build_policy(embodiment=EMBODIMENT, checkpoint=what.checkpoint, device="cpu", config=config)
    return policy, what.execute or wanted.execute_steps or policy.spec.horizon


class Player:
    """Plays seeds in one process."""

    def __init__(self, what: Rollouts) -> None:
        self.what, self.world = what, World()
        self.policy, self.execute = load(what)

    def play(self, seed: int) -> Outcome:
        task, words = choose_task(seed, self.what.tasks)
        change = (lambda f: {n: np.full_like(v, 127) for n, v in f.items()}) if self.what.blind else (lambda f: f)
        return roll_out(
            self.world,
            self.policy,
            seed,
            task,
            words,
            execute=self.execute,
            max_ticks=self.what.max_ticks,
            change=change,
        )


class Follower(Player, ShardWriter):
    """Plays a policy and has the expert say at every few ticks what it would have done (DAgger)."""

    def __init__(self, what: Rollouts) -> None:
        super().__init__(what)
        self.preset, self.expert = PRESETS[what.preset], Expert(self.world)

    def __call__(self, seed: int) -> Episode:
        preset, task_words = self.preset, choose_task(seed, self.what.tasks)
        views: list[Any] = []
        states: list[Any] = []
        actions: list[Any] = []
        labels: list[Any] = []
        nothing = np.full((preset.horizon, 8), np.nan, np.float32)

        def on_tick(frame: Any, row: Any) -> None:
            tick = len(actions)
            if tick % preset.stride == 0:
                views.append(shrink(frame, preset))
            states.append(state_of(frame))
            actions.append(np.asarray(row, np.float32))
            known = tick % self.what.label_every == 0
            labels.append(self.expert.label(self.world, preset.horizon).astype(np.float32) if known else nothing)

        outcome = roll_out(
            self.world,
            self.policy,
            seed,
            *task_words,
            execute=self.execute,
            max_ticks=self.what.max_ticks,
            on_tick=on_tick,
        )
        states.append(state_of(self.world.observe(images=False)))
        labels.append(nothing)
        return Episode(
            seed=seed, task=outcome.task, instruction=outcome.instruction, source="policy", success=outcome.success,
            views=np.stack(views), state=np.stack(states), action=np.stack(actions), label=np.stack(labels),
        )  # fmt: skip


def wilson(hits: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share (Wilson's score)."""
    if not count:
        return 0.0, 1.0
    p, n = hits / count, count
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))


def evaluate(
    what: Any,
    seeds: Sequence[int],
    *,
    workers: int,
    seconds: float | None = None,
    player: Callable[[Any], Any] = Player,
    on_outcome: Callable[[Any], None] = lambda outcome: None,
) -> tuple[list[Any], list[str]]:
    """Outcomes of as many of the seeds as there was time for, in order and without gaps, and errors of processes.

    Args:
        what: ``Rollouts``, or what ``player`` is made of; anything that can be pickled and has ``threads``.
        player: of one process: an object whose ``play(seed)`` gives an ``Outcome``; or a context with ``play_all(take,
            give)``, which plays what ``take()`` gives until that is None, and calls ``give`` with each ``Outcome``.
        on_outcome: told each one as it comes, in any order.
    """
    context = multiprocessing.get_context("spawn")
    news: Any = context.Queue()
    turn, stop = context.Value("l", 0), context.Event()
    count = min(workers, len(seeds))
    processes = [
        context.Process(target=_play, args=(player, what, list(seeds), turn, stop, news), daemon=True)
        for _ in range(count)
    ]
    for p in processes:
        p.start()
    end = time.monotonic() + seconds if seconds is not None else math.inf
    outcomes: list[Outcome] = []
    errors: list[str] = []
    while len(outcomes) < len(seeds) and time.monotonic() < end:
        try:
            found = news.get(timeout=0.2)
        except queue.Empty:
            if not any(p.is_alive() for p in processes) and news.empty():
                break
            continue
        if isinstance(found, str):
            errors.append(found)
        else:
            outcomes.append(found)
            on_outcome(found)
    stop.set()
    for p in processes:
        p.join(0.5 if time.monotonic() >= end else 10.0)
        if p.is_alive():
            p.terminate()
    return without_gaps(outcomes, seeds), errors


def _play(make: Callable[[Any], Any], what: Any, seeds: list[int], turn: Any, stop: Any, news: Any) -> None:
    try:
        torch.set_num_threads(what.threads)
        player = make(what)

        def take() -> int | None:
            if stop.is_set():
                return None
            with turn.get_lock():
                k = turn.value
                turn.value += 1
            return seeds[k] if k < len(seeds) else None

        if hasattr(player, "play_all"):
            with player:
                player.play_all(take, news.put)
            return
        while (seed := take()) is not None:
            news.put(player.play(seed))
    except Exception as error:  # told to the process that waits
        news.put(f"{type(error).__name__}: {error}")
        raise


def without_gaps(outcomes: Sequence[Outcome], seeds: Sequence[int]) -> list[Outcome]:
    """Outcomes up to the first seed that was not finished.

    Seeds are begun in order and failures take longest: of a run that was cut, whatever had ended by then would be the
    successes among the last ones.
    """
    known = {o.seed: o for o in outcomes}
    return [known[s] for s in itertools.takewhile(lambda s: s in known, seeds)]


def summary(outcomes: Sequence[Outcome], what: Rollouts) -> dict[str, Any]:
    """Success, overall and per task, with the time of a call on one thread."""
    hits = [o for o in outcomes if o.success]
    calls = np.array([s for o in outcomes for s in o.calls_s[1:]]) if outcomes else np.zeros(0)
    tasks = sorted({o.task for o in outcomes})
    low, high = wilson(len(hits), len(outcomes))
    return {
        "checkpoint": Path(what.checkpoint).name,
        "options": dict(what.options),
        "execute": what.execute,
        "blind": what.blind,
        "seeds": [o.seed for o in outcomes],
        "episodes": len(outcomes),
        "success": len(hits),
        "interval_95": [round(low, 3), round(high, 3)],
        "by_task": {
            t: [sum(o.success for o in outcomes if o.task == t), sum(o.task == t for o in outcomes)] for t in tasks
        },
        "failed_seeds": [o.seed for o in outcomes if not o.success],
        "ticks_of_successes": round(float(np.mean([o.ticks for o in hits])), 1) if hits else None,
        "call_s_p50": round(float(np.median(calls)), 4) if len(calls) else None,
        "threads_of_a_policy": what.threads,
        "cpus": os.cpu_count(),
    }


def write_summary(path: Path, outcomes: Sequence[Outcome], what: Rollouts) -> dict[str, Any]:
    report = summary(outcomes, what)
    details = [{k: v for k, v in dataclasses.asdict(o).items() if k != "calls_s"} for o in outcomes]
    path.write_text(json.dumps(report | {"details": details}, indent=1), encoding="utf-8")
    return report
