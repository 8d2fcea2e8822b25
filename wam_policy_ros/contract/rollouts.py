"""Rollouts: episodes of one policy, many at once, for whoever has an event loop.

    async with Rollouts(factory) as rollouts:
        episodes = [await rollouts.open(seed=k) for k in range(8)]
        chunks = await rollouts.step({episode: looks[episode]() for episode in episodes})

The policy stays with its owner (``PolicyThread``), which may serve a robot and other clients beside: what an episode
gets does not depend on them. The policy does one step after the other, the episodes take turns. Everything here belongs
to one event loop; ``Blocking`` is for callers without one.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .episodes import Episode, H, Held, Snapshot
from .errors import Cancelled, ConfigError, NotReady, SessionError, WamError, bare
from .interface import ActionChunk, Observation, Policy, PolicySpec
from .policy_thread import AskCancelled, Phase, PolicyFactory, PolicyThread, Priority, Progress, Work

__all__ = ["Blocking", "Episode", "Rollouts", "Snapshot"]

T = TypeVar("T")
STOP_S = 30.0
"""For the sessions of an owner that was made here to close, and for it to stop: else it hangs, and its thread is left
behind."""


class Rollouts:
    """Episodes of one policy.

    Args:
        policy: its owner, started by whoever stops it; or a factory, for an owner of its own.
        priority: beside others of the same owner: as a client, or only when nobody else asks.
        max_in_flight: jobs of these episodes that wait or run at the owner; more wait here for their turn.
        log: told with a level and a line what an owner of its own has to say.

    Raises:
        ConfigError: the robot's priority, or no job at all.
    """

    def __init__(
        self,
        policy: PolicyThread | PolicyFactory,
        *,
        priority: Priority = Priority.CLIENT,
        max_in_flight: int = 64,
        log: Callable[[str, str], None] = lambda level, line: None,
    ) -> None:
        if priority is Priority.ROBOT or max_in_flight < 1:
            raise ConfigError(
                "rollouts come after the robot, and do something",
                got=f"priority {priority.name}, max_in_flight {max_in_flight}",
                expected="CLIENT or IDLE, at least 1",
            )
        self._mine = not isinstance(policy, PolicyThread)
        # What a warm-up would do once, the first episode does.
        self._owner = (
            policy if isinstance(policy, PolicyThread) else PolicyThread(self._made_by(policy), log=log, warm_up=False)
        )
        self._why: WamError | None = None
        self._priority = priority
        self._room = asyncio.Semaphore(max_in_flight)
        self._held: set[Held] = set()
        self._over = True
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unsubscribe: Callable[[], None] = lambda: None

    # -- life -------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Rollouts:
        """Returns when the policy is loaded.

        Raises:
            NotReady: it never will be. Of an owner of its own: what the factory raised.
        """
        self._loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def listen() -> None:
            if self._owner.status.phase in (Phase.FAILED, Phase.STOPPED):
                for held in list(self._held):  # what is kept of a policy keeps all of it
                    held._handle, held._lost = None, held._lost or "the policy's owner has ended"
            with suppress(RuntimeError):  # the loop is closed
                assert self._loop is not None
                self._loop.call_soon_threadsafe(changed.set)

        self._unsubscribe = self._owner.subscribe(listen)
        try:
            if self._mine:
                self._owner.start()
            while (status := self._owner.status).phase is not Phase.READY:
                if status.phase in (Phase.FAILED, Phase.STOPPED) or not self._owner.alive:
                    if self._why is not None:
                        raise bare(self._why)
                    raise NotReady("the policy takes no episodes", got=f"{status.phase.value}: {status.message}")
                changed.clear()
                if self._owner.status is status:
                    await changed.wait()
        except BaseException:
            await self._leave()
            raise
        self._over = False
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all that is open; an owner of its own is stopped, also when a call of it does not end."""
        self._over = True
        closing = [held._begin_close() for held in list(self._held)]
        try:
            if closing:
                await asyncio.wait(closing, timeout=STOP_S if self._mine else None)
            for one in closing:
                if one.done():
                    one.result()
        finally:
            await self._leave()

    def _made_by(self, factory: PolicyFactory) -> PolicyFactory:
        def made(progress: Progress) -> Policy:
            try:
                return factory(progress)
            except WamError as error:
                self._why = error
                raise

        return made

    async def _leave(self) -> None:
        self._unsubscribe()
        if self._mine:
            await asyncio.shield(asyncio.to_thread(self._owner.stop, STOP_S))

    @property
    def spec(self) -> PolicySpec:
        """Raises NotReady before the policy is loaded."""
        spec = self._owner.status.spec
        if spec is None:
            raise NotReady("the policy is not loaded", got=self._owner.status.message)
        return spec

    @property
    def sessions(self) -> int:
        """Episodes and snapshots that are open."""
        return len(self._held)

    # -- episodes ---------------------------------------------------------------------------------------------------

    async def open(self, session_id: str | None = None, *, seed: int | None = None) -> Episode:
        """Start an episode, and reserve its place in memory.

        Args:
            seed: of the noise of all its steps; None: the policy's own.

        Raises:
            Overloaded: as many sessions are open as there is memory for.
        """
        episode = Episode(self, session_id, seed, None)

        def work(policy: Policy, cancelled: AskCancelled) -> None:
            episode._refuse_if_over()
            episode._handle = policy.open(episode.session_id, seed=seed)

        return await self._begun(episode, episode._job("its opening", work))

    async def step(
        self, observations: Mapping[Episode, Observation], *, timeout_s: float | None = None
    ) -> dict[Episode, ActionChunk | WamError]:
        """One step of each episode. What became of it stands beside it: a chunk, or the error that kept it from
        having one. An error of one ends none of the others; cancelled, all are given up."""

        async def one(episode: Episode, observation: Observation) -> ActionChunk | WamError:
            try:
                if episode._rollouts is not self:
                    raise SessionError("an episode of other rollouts", got=episode.session_id)
                return await episode.step(observation, timeout_s=timeout_s)
            except WamError as error:
                return error

        async with asyncio.TaskGroup() as group:
            tasks = {e: group.create_task(one(e, o)) for e, o in observations.items()}
        return {episode: task.result() for episode, task in tasks.items()}

    async def render_video(self, chunk: ActionChunk) -> npt.NDArray[np.uint8] | None:
        """See ``Policy.render_video``."""
        return await self._run(lambda policy, cancelled: policy.render_video(chunk), Held(self, None, None))

    # -- jobs -------------------------------------------------------------------------------------------------------

    async def _begun(self, held: H, job: Coroutine[Any, Any, None]) -> H:
        """What ``job`` makes, or nothing at all."""
        if self._over:
            job.close()
            raise SessionError("these rollouts are not open", remedy="use them inside async with")
        self._held.add(held)
        try:
            await job
        except asyncio.CancelledError:
            held._begin_close()  # it may have been made all the same
            raise
        except BaseException:
            self._held.discard(held)
            raise
        held._origin = None
        return held

    async def _run(self, work: Work[T], held: Held, *, timeout_s: float | None = None) -> T:
        """One job of ``held``, from its turn here to its end, which is waited for also by who is cancelled."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            await self._room.acquire()
        except BaseException:
            held._started(None)
            raise
        try:
            held._refuse_if_over()
            ticket = self._owner.submit(work, lane=held, priority=self._priority, deadline_s=end_s, about=held._about)
        except BaseException:
            self._room.release()
            held._started(None)
            raise
        held._started(ticket)
        ended = asyncio.wrap_future(ticket.future)
        ended.add_done_callback(lambda future: self._ended(held, future))
        try:
            await asyncio.wait([ended])
        except asyncio.CancelledError:
            ticket.cancel()
            await asyncio.wait([ended])
            raise
        return ended.result()

    def _ended(self, held: Held, future: asyncio.Future[Any]) -> None:
        self._room.release()
        held._started(None)
        if not future.cancelled():
            future.exception()  # nobody may be left who asks

    def _end(self, held: Held) -> asyncio.Future[None]:
        """Close a session: the job goes to the queue at once, whatever becomes of its caller."""
        assert self._loop is not None
        done: asyncio.Future[None] = self._loop.create_future()

        def work(policy: Policy, cancelled: AskCancelled) -> None:
            handle, held._handle = held._handle, None
            if handle is not None:
                policy.close(handle)

        def over(future: asyncio.Future[None] | None) -> None:
            held._handle, held._origin = None, None
            self._held.discard(held)
            error = None if future is None else future.exception()
            if done.done():
                return
            if error is None or isinstance(error, Cancelled | NotReady):  # its owner has ended, and the policy with it
                done.set_result(None)
            else:
                done.set_exception(error)
                done.exception()

        try:
            ticket = self._owner.submit(work, lane=held, priority=self._priority, upkeep=True, about=held._about)
        except NotReady:
            over(None)
        else:
            asyncio.wrap_future(ticket.future).add_done_callback(over)
        return done


class Blocking:
    """Rollouts for callers without an event loop: one runs in a thread of its own. Any thread may call.

    with Blocking(Rollouts(factory)) as wait:
        episode = wait(wait.rollouts.open(seed=1))
        chunk = wait(episode.step(observation))
    """

    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts = rollouts
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="wam_rollouts", daemon=True)

    def __call__(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result, or the error it raises. A caller that is interrupted gives it up."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def __enter__(self) -> Blocking:
        self._thread.start()
        try:
            self(self.rollouts.__aenter__())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self(self.rollouts.__aexit__(*error))
        finally:
            self._end()

    def _end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
