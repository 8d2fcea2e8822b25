"""Several simulators beside one policy in one process, each in a thread of its own.

The network of the door ``engine`` is asked through ``contract.rollouts``: what an episode gets does not depend on how
many others are played. Behind every other door each simulator has a policy, or a connection, of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from wam_policy_ros.contract.errors import Cancelled
from wam_policy_ros.contract.fakes import example_observation
from wam_policy_ros.contract.interface import ActionChunk, Observation, Policy
from wam_policy_ros.contract.rollouts import Blocking, Episode, Rollouts

from .doors import Say, engine_factory, is_network
from .episode import EpisodePlayer
from .plan import Plan

LOOK_S = 0.02
FRAMES = (1, 4, 4, 4, 4, 4)
"""Of a client beside: its window fills, and it begins anew."""


class Shared:
    """See ``Policy``: that of rollouts, for threads that wait for their answers.

    Args:
        engine: the policy itself, which only its owner may call.
    """

    def __init__(self, wait: Blocking, engine: Policy) -> None:
        self._wait, self.engine, self.spec = wait, engine, wait.rollouts.spec

    def open(self, session_id: str | None = None, *, seed: int | None = None) -> Episode:
        return self._wait(self._wait.rollouts.open(session_id, seed=seed))

    def infer(
        self, session: Any, observation: Observation, *, cancelled: Callable[[], bool] | None = None
    ) -> ActionChunk:
        if cancelled is None:
            chunk: ActionChunk = self._wait(session.step(observation))
            return chunk
        return self._wait(_unless(cancelled, session, observation))

    def reset(self, session: Any) -> None:
        self._wait(session.reset())

    def close(self, session: Any) -> None:
        self._wait(session.close())

    def render_video(self, chunk: ActionChunk) -> Any:
        return self._wait(self._wait.rollouts.render_video(chunk))


async def _unless(cancelled: Callable[[], bool], session: Episode, observation: Observation) -> ActionChunk:
    steps, step = session.steps, asyncio.ensure_future(session.step(observation))
    while not step.done():
        await asyncio.wait([step], timeout=LOOK_S)
        if cancelled() and step.cancel():
            await asyncio.wait([step])
    if step.cancelled():
        if session.steps > steps and session.last is not None:  # it could not be given up any more
            return session.last
        raise Cancelled("step cancelled")
    return step.result()


class SideBySide:
    """Plays seeds of a plan with ``plan.parallel`` simulators at once. A context of one thread."""

    def __init__(self, plan: Plan, say: Say = lambda line: None) -> None:
        self.plan, self._say = plan, say
        self._stack = contextlib.ExitStack()
        self._policy: Policy | None = None
        self._engine: Policy | None = None

    def __enter__(self) -> SideBySide:
        """The policy is loaded and the first simulator made; raises what kept them from it."""
        torch.set_num_threads(self.plan.threads)
        with contextlib.ExitStack() as stack:
            if is_network(self.plan):
                rollouts = Rollouts(self._load, log=lambda level, line: self._say(line))
                wait = stack.enter_context(Blocking(rollouts))
                for number in range(self.plan.beside):
                    stack.enter_context(_busy(wait, number))
                assert self._engine is not None
                self._policy = Shared(wait, self._engine)
            self._first = stack.enter_context(contextlib.closing(self._player()))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _load(self, progress: Callable[[str, float], None]) -> Policy:
        torch.set_num_threads(self.plan.threads)  # of this thread, too
        self._engine = engine_factory(self.plan).policy(progress)
        return self._engine

    def _player(self) -> EpisodePlayer:
        return EpisodePlayer(self.plan, self._say, policy=self._policy)

    def play_all(self, take: Callable[[], int | None], give: Callable[[Any], None]) -> None:
        """Play what ``take`` gives until it gives None; each ``Episode`` to ``give``, in any order. Both are called by
        one thread at a time. The first error ends all, when their episodes have ended, and is raised."""
        lock, errors = threading.Lock(), list[BaseException]()

        def play(player: EpisodePlayer) -> None:
            try:
                while True:
                    with lock:
                        seed = None if errors else take()
                    if seed is None:
                        break
                    episode = player.play(seed)
                    with lock:
                        give(episode)
            except BaseException as error:
                errors.append(error)

        def run() -> None:
            try:
                with contextlib.closing(self._player()) as player:
                    play(player)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=run, daemon=True) for _ in range(self.plan.parallel - 1)]
        for thread in threads:
            thread.start()
        play(self._first)  # this thread is one of them
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


@contextlib.contextmanager
def _busy(wait: Blocking, number: int) -> Iterator[None]:
    """A client beside that asks all the time, about something else, and now and then forks its episode."""

    async def ask() -> None:
        rollouts = wait.rollouts
        episode, words = await rollouts.open(seed=1000 + number), f"put it down, number {number}"
        for call in itertools.count():
            seen = example_observation(rollouts.spec, frames=FRAMES[call % len(FRAMES)], seed=call, prompt=words)
            await episode.step(replace(seen, want_video=call % 2 == 0))
            if call % 5 == 3:
                old, episode = episode, await episode.fork(seed=call)
                await old.close()

    future = asyncio.run_coroutine_threadsafe(ask(), wait.loop)
    try:
        yield
        if future.done():
            future.result()  # it ended by itself: why
    finally:
        future.cancel()
        with contextlib.suppress(Exception):
            future.exception(timeout=10.0)
