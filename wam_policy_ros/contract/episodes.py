"""Episodes of rollouts, and points of them to come back to: what they promise, and their jobs at the policy.

Made by ``rollouts.Rollouts``, which hands the jobs to the policy's owner. Everything here belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import Cancelled, SessionBusy, SessionError
from .interface import ActionChunk, Forks, Observation, Policy
from .policy_thread import AskCancelled, Ticket, Work

if TYPE_CHECKING:
    from .rollouts import Rollouts

T = TypeVar("T")


class Held:
    """One of the policy's sessions. All jobs on one go through a lane of its own, in order."""

    def __init__(
        self, rollouts: Rollouts, session_id: str | None, seed: int | None, origin: Held | None = None
    ) -> None:
        self.session_id, self.seed = session_id or uuid.uuid4().hex, seed
        self._rollouts, self._origin = rollouts, origin
        self._handle: Any = None  # the policy's session; jobs touch it, and nobody else while there are any
        self._lost = ""  # why it ended without its holder's wish
        self._closing: asyncio.Future[None] | None = None

    async def fork(self, session_id: str | None = None, *, seed: int | None = None) -> Episode:
        """An episode that goes on from this point; ``seed`` None: with the same seed. Takes a window of its own.

        Raises:
            Overloaded: no memory for one. SessionError: closed, or sessions of this policy cannot be forked.
        """
        return await self._copied(Episode(self._rollouts, session_id, self.seed if seed is None else seed, self))

    async def close(self) -> None:
        """Free its memory: when this returns, it is free. What is under way is given up. Idempotent."""
        await asyncio.shield(self._begin_close())

    def _begin_close(self) -> asyncio.Future[None]:
        if self._closing is None:
            self._closing = self._rollouts._end(self)
        return self._closing

    async def _copied(self, child: H) -> H:
        def work(policy: Policy, cancelled: AskCancelled) -> None:
            if not isinstance(policy, Forks):
                raise SessionError("sessions of this policy cannot be forked", got=type(policy).__name__)
            child._refuse_if_over()
            child._handle = policy.fork(self._handle, child.session_id, seed=child.seed)

        return await self._rollouts._begun(child, self._job("a fork", work))

    async def _job(self, what: str, work: Work[T], timeout_s: float | None = None) -> T:
        self._refuse_if_over()
        return await self._rollouts._run(work, self, timeout_s=timeout_s)

    def _refuse_if_over(self) -> None:
        if self._lost:
            raise SessionError(f"the session has ended: {self._lost}", got=self.session_id)
        if self._closing is not None:
            raise SessionError("the session is closed", got=self.session_id, remedy="open or fork another one")

    def _about(self) -> Any:
        """For the owner: where its jobs run; before it is made, where it will be."""
        return self._handle if self._handle is not None or self._origin is None else self._origin._about()

    def _started(self, ticket: Ticket[Any] | None) -> None:
        """Its job waits in the queue; None: it has ended, or never got there."""


H = TypeVar("H", bound=Held)


class Episode(Held):
    """One episode. Made by ``Rollouts.open`` and by ``fork``. It does one thing at a time: what comes meanwhile is
    refused with ``SessionBusy``.

    Attributes:
        session_id, seed: as opened.
        steps: that have succeeded since it was opened, forked or reset.
        last: chunk of the newest of them.
    """

    def __init__(self, rollouts: Rollouts, session_id: str | None, seed: int | None, origin: Held | None) -> None:
        super().__init__(rollouts, session_id, seed, origin)
        self.steps = 0
        self.last: ActionChunk | None = None
        self._doing = ""
        self._ticket: Ticket[Any] | None = None

    async def step(self, observation: Observation, *, timeout_s: float | None = None) -> ActionChunk:
        """One call of the policy. It succeeds, or leaves the episode as it was.

        A task that is cancelled here waits for the call to end, within one evaluation of the network. A call that had
        none left has succeeded all the same: ``steps`` and ``last`` say so. Cancelled once more, the task waits no
        longer, and the episode is busy until the call has ended.

        Args:
            timeout_s: from now until the end of the call, waiting included.

        Raises:
            DeadlineExceeded: ``timeout_s`` has passed.
            SessionBusy, SessionError: something is under way in this episode; it is closed.
            WamError: what ``Policy.infer`` and ``PolicyThread.submit`` raise.
        """

        def work(policy: Policy, cancelled: AskCancelled) -> ActionChunk:
            chunk = policy.infer(self._handle, observation, cancelled=cancelled)
            self.steps, self.last = self.steps + 1, chunk
            return chunk

        return await self._job("a step", work, timeout_s)

    async def snapshot(self) -> Snapshot:
        """This point of the episode, to come back to. A fork that is kept: it takes as much, and raises the same."""
        return await self._copied(Snapshot(self._rollouts, None, self.seed, self))

    async def reset(self, *, seed: int | None = None) -> None:
        """Forget the episode and free its window; the next step is a first one. ``seed`` None: the same again."""
        seed = self.seed if seed is None else seed

        def work(policy: Policy, cancelled: AskCancelled) -> None:
            if seed == self.seed:
                policy.reset(self._handle)
            else:  # a session keeps its seed; where there is room for no other, there is when this one is closed
                old, self._handle, self._lost = self._handle, None, "its reset failed"
                policy.close(old)
                self._handle, self._lost = policy.open(self.session_id, seed=seed), ""
            self.steps, self.last, self.seed = 0, None, seed

        await self._job("a reset", work)

    async def _job(self, what: str, work: Work[T], timeout_s: float | None = None) -> T:
        self._refuse_if_over()
        if self._doing:
            raise SessionBusy(f"{self._doing} is under way in this episode", got=what, remedy="await it first")
        self._doing = what
        return await super()._job(what, work, timeout_s)

    def _started(self, ticket: Ticket[Any] | None) -> None:
        self._ticket = ticket
        if ticket is None:
            self._doing = ""

    def _begin_close(self) -> asyncio.Future[None]:
        if self._closing is None and self._ticket is not None:
            self._ticket.cancel(Cancelled("the episode was closed"))
        return super()._begin_close()


class Snapshot(Held):
    """A point of an episode, made by ``Episode.snapshot``. ``fork`` it as often as wanted, then ``close`` it."""
