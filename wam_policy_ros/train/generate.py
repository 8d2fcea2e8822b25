"""Demonstrations from the simulator, by as many processes as there are cores, for as long as there is time.

Every seed is one episode, the same wherever and whenever it is played. Shards hold the seeds of a fixed range and are
complete or absent, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch._dynamo  # before any OpenGL: Triton and Mesa's software renderer bring an LLVM each, in this order only

from wam_policy_ros.engine.preprocess import preprocess_view
from wam_policy_ros.sim.cameras import NAMES
from wam_policy_ros.sim.demonstrations import Noise, demonstrate
from wam_policy_ros.sim.expert import Expert
from wam_policy_ros.sim.tasks import TASKS, Task
from wam_policy_ros.sim.world import Frame, World

from .episodes import Episode, labels_of, write_shard
from .preset import PRESETS, Preset

EVALUATION_SEEDS = range(1000)
"""Never trained on, never validated on."""
VALIDATION_SEEDS = range(1000, 2000)
TRAINING_SEEDS = 10_000
"""From here on."""

# Bursts only: between them the arm does exactly what the expert says, so that its targets are labels without noise.
NOISE = Noise(joint_rad=0.0, burst=0.02, burst_rad=0.03)


@dataclass(frozen=True)
class Demonstrations:
    """What to generate.

    Attributes:
        preset: name; sizes, stride and horizon.
        tasks: names; a seed picks one of them and one of its wordings.
        per_shard: seeds of a shard.
        max_ticks: of an episode without success, which is dropped.
        after: ticks behind the success.
    """

    preset: str = "mug"
    tasks: tuple[str, ...] = tuple(TASKS)
    per_shard: int = 8
    max_ticks: int = 200
    after: int = 10


def choose_task(seed: int, tasks: tuple[str, ...]) -> tuple[Task, str]:
    """The task and the wording of a seed."""
    rng = np.random.Generator(np.random.PCG64([seed, 104729]))
    task = TASKS[tasks[int(rng.integers(len(tasks)))]]
    return task, task.instructions[int(rng.integers(len(task.instructions)))]


def shrink(frame: Frame, preset: Preset) -> npt.NDArray[np.uint8]:
    """The three pictures as the mosaic takes them: uint8 ``[3, view_height, view_width, 3]``."""
    page = preset.embodiment
    views = [
        preprocess_view(
            torch.from_numpy(np.ascontiguousarray(frame.images[name]))[None],
            crop_scale=page.crop_scale,
            view_height=page.view_height,
            view_width=page.view_width,
        )[0]
        for name in NAMES
    ]
    return torch.stack(views).numpy()


def state_of(frame: Frame) -> npt.NDArray[np.float32]:
    """``[8]`` joints (rad) and gripper."""
    return np.append(frame.joint_position, frame.gripper_position).astype(np.float32)


def record(world: World, expert: Expert, seed: int, what: Demonstrations) -> Episode:
    """One episode of the expert."""
    preset = PRESETS[what.preset]
    task, words = choose_task(seed, what.tasks)
    views, states, labels, wanted = [], [], [], []
    steps = demonstrate(
        world, expert, seed, task, noise=NOISE, max_ticks=what.max_ticks, after=what.after, images=False
    )
    for k, step in enumerate(steps):
        # The world stands where the frame was taken until the generator goes on.
        if k % preset.stride == 0:
            views.append(shrink(world.observe(), preset))
        states.append(state_of(step.frame))
        labels.append(step.label.row)
        wanted.append(not step.burst)
    end = world.observe()
    states.append(state_of(end))
    if len(labels) % preset.stride == 0:
        views.append(shrink(end, preset))
    actions = np.array(labels, dtype=np.float32)
    return Episode(
        seed=seed,
        task=task.name,
        instruction=words,
        source="expert",
        success=world.outcome.success,
        views=np.stack(views),
        state=np.stack(states),
        action=actions,
        label=labels_of(actions, np.array(wanted), preset.horizon),
    )


@dataclass
class Progress:
    """Counts of a generator."""

    episodes: int = 0
    dropped: int = 0
    steps: int = 0
    shards: int = 0


class Generator:
    """Processes that write shards into a folder until they have written ``count`` of them, or are stopped.

    Args:
        first_seed: of shard 0; count: of shards, None: until stopped.
        make: module-level class, made of ``what`` in every process, that gives the episode of a seed, or None, and
            writes them (see ``ShardWriter``); default: the expert's demonstrations.
    """

    def __init__(
        self,
        folder: Path,
        what: Any,
        *,
        workers: int,
        first_seed: int,
        count: int | None,
        make: Callable[..., Any] | None = None,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.folder, self.progress = folder, Progress()
        self.errors: list[str] = []
        self._stop = context.Event()
        self._news: Any = context.Queue()
        next_shard = context.Value("l", 0)
        self._shared = next_shard  # processes find it by name: it must not be collected before they start
        args = (str(folder), what, first_seed, count, next_shard, self._stop, self._news, make or Demonstrator)
        self._processes = [context.Process(target=_work, args=args, daemon=True) for _ in range(workers)]
        for p in self._processes:
            p.start()

    def poll(self) -> Progress:
        """Take in what was reported."""
        while True:
            try:
                kind, value = self._news.get_nowait()
            except queue.Empty:
                return self.progress
            if kind == "error":
                self.errors.append(value)
            else:
                p = self.progress
                self.progress = Progress(p.episodes + value[0], p.dropped + value[1], p.steps + value[2], p.shards + 1)

    @property
    def running(self) -> bool:
        self.poll()
        return any(p.is_alive() for p in self._processes)

    def stop(self, patience_s: float = 20.0) -> Progress:
        """No further episode is begun; processes that do not end in time are ended. What failed is in ``errors``."""
        self._stop.set()
        end = time.monotonic() + patience_s
        while self.running and time.monotonic() < end:
            time.sleep(0.05)
        for p in self._processes:
            if p.is_alive():
                p.terminate()
            p.join(1.0)
        return self.poll()


class ShardWriter:
    """Where a process puts its episodes: one file of a fixed range of seeds."""

    def exists(self, folder: Path, first_seed: int, shard: int) -> bool:
        return (folder / f"seeds-{first_seed:08d}.npz").exists()

    def write(self, folder: Path, first_seed: int, shard: int, episodes: list[Any]) -> None:
        write_shard(folder, f"seeds-{first_seed:08d}", episodes)


class Demonstrator(ShardWriter):
    """Makes the expert's episodes in one process."""

    def __init__(self, what: Demonstrations) -> None:
        self.what, self.world = what, World()
        self.expert = Expert(self.world)

    def __call__(self, seed: int) -> Episode | None:
        """None when the expert failed."""
        episode = record(self.world, self.expert, seed, self.what)
        return episode if episode.success else None


def _work(
    folder: str,
    what: Any,
    first_seed: int,
    count: int | None,
    next_shard: Any,
    stop: Any,
    news: Any,
    make: Callable[..., Any],
) -> None:
    try:
        torch.set_num_threads(1)
        player = make(what)
        while not stop.is_set():
            with next_shard.get_lock():
                shard = next_shard.value
                next_shard.value += 1
            if count is not None and shard >= count:
                break
            first = first_seed + shard * what.per_shard
            if player.exists(Path(folder), first, shard):
                continue
            made, dropped = [], 0
            for seed in range(first, first + what.per_shard):
                if stop.is_set():
                    return
                episode = player(seed)
                if episode is None:
                    dropped += 1
                else:
                    made.append(episode)
            if made:
                player.write(Path(folder), first, shard, made)
            news.put(("shard", (len(made), dropped, sum(len(e.action) for e in made))))
    except Exception as error:  # told to the process that waits
        news.put(("error", f"{type(error).__name__}: {error}"))
        raise
