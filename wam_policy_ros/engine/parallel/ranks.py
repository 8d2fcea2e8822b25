"""The leader's side of a policy on several GPUs: the other ranks, told what to do and waited for."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

import torch

from wam_policy_ros.contract.errors import ConfigError, PolicyLost, WamError
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.device import on_device
from wam_policy_ros.engine.weights import WeightSource

from .grid import Grid
from .groups import Groups, Place, connect, disconnect, environment, place_to_meet, refuse_groups
from .keeper import Keeper

Progress = Callable[[str, float], None]

START_S = 3600.0
"""Limit for what happens before a policy is ready: reading weights, recording the step."""
FIRST_S = 300.0
"""Limit for a piece of work that was not done before: kernels may be compiled for it."""
LEAVE_S = 20.0
REMEDY = "load the policy again"


@dataclass(frozen=True)
class RankReport:
    """What a rank holds.

    Attributes:
        rank: its number. windows: of sessions and of calls under way.
        slots: memory for windows that the fused step has made; idle: that no window uses.
        memory_bytes: peak of what PyTorch had allocated on the GPU since the last report; 0 on a CPU.
        fit: windows that fit on its device; None: nothing bounds them, or it was not asked.
    """

    rank: int
    windows: int
    slots: int
    idle: int
    memory_bytes: int
    fit: int | None = None


@dataclass(frozen=True)
class Setup:
    """What a follower is told first.

    Attributes:
        device: as text; dtype: of the weights. picture_hw: size of the pictures the network sees.
        config: decides how weights are loaded.
        place: where the ranks meet; backend: see ``connect``.
        threads: of PyTorch on a CPU, where sums depend on it.
    """

    rank: int
    grid: Grid
    device: str
    dtype: torch.dtype
    weights: WeightSource
    picture_hw: tuple[int, int]
    config: EngineConfig
    place: Place
    backend: str
    threads: int


class Ranks:
    """Processes beside this one, each with a GPU of its own. One thread uses this object, and it alone decides:
    followers do what they are told, in order.

    Args:
        config: its ``gpus``, this process included, and its ``rank_deadline_s``.
        device: of rank 0. On GPUs the others are those that follow it.
        devices: of all ranks, for tests; default: see ``device``.
        backend: see ``connect``.

    Raises:
        ConfigError: there are not so many GPUs.
    """

    def __init__(
        self,
        config: EngineConfig,
        weights: WeightSource,
        *,
        device: torch.device,
        dtype: torch.dtype,
        picture_hw: tuple[int, int],
        devices: list[str] | None = None,
        backend: str = "auto",
    ) -> None:
        self.grid = Grid.of(config.gpus, guided=config.guidance_scale != 1.0)
        self.deadline_s = config.rank_deadline_s
        self.device = device
        self.groups: Groups | None = None
        devices = devices or devices_of(self.grid.size, device)
        refuse_groups()
        place = place_to_meet()
        variables = environment()
        for name, value in variables.items():
            os.environ.setdefault(name, value)
        first = Setup(
            rank=0,
            grid=self.grid,
            device=devices[0],
            dtype=dtype,
            weights=weights,
            picture_hw=picture_hw,
            config=config,
            place=place,
            backend=backend,
            threads=torch.get_num_threads(),
        )
        self._setup = first
        self._keeper = Keeper(self.grid.size - 1, variables, 6 * self.deadline_s, kept_open=[place.descriptor])
        self._met: list[bool] = []  # something, as soon as there may be groups
        self._finalizer = weakref.finalize(self, _end, self._keeper, self._met)
        self._known: set[Hashable] = set()
        self._new: set[Hashable] = set()
        self._limits: list[float | None] = []
        self._users: set[int] = set()
        # Paths that nobody has any more; the collector may find that in any thread.
        self.forgotten: deque[int] = deque()
        try:
            self._keeper.begin()
        except OSError as error:
            raise ConfigError("the processes of the other GPUs cannot be started", got=str(error)) from error
        for index in range(self.grid.size - 1):
            self._keeper.send(index, replace(first, rank=index + 1, device=devices[index + 1]))

    # -- life ---------------------------------------------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        """Of the other processes."""
        return self._keeper.pids

    @property
    def lost(self) -> PolicyLost | None:
        """Why this cannot go on; None while it can. Any thread."""
        fault = self._keeper.fault
        return None if fault is None else PolicyLost("the policy lost a GPU", got=fault, remedy=REMEDY)

    def join(self, progress: Progress) -> Groups:
        """Meet the others, once they have their weights. Afterwards ``groups`` are there.

        Raises:
            WamError: what kept one of them from it.
        """
        if self.groups is not None:
            return self.groups
        self.answers(START_S, progress)
        self.send("join")
        with self._waiting(START_S):
            refuse_groups()
            self._met.append(True)
            self.groups = self._connected(progress)
        self._keeper.at_fault(self.groups.give_up)
        self.answers(START_S, progress)
        return self.groups

    def _connected(self, progress: Progress) -> Groups:
        """``connect`` waits for a rank that died as for one that is slow, and nothing ends that: it has a thread of its
        own, which is left to it."""
        setup, found, given_up = self._setup, SimpleQueue[Groups | BaseException](), threading.Event()

        def meet() -> None:
            try:
                with on_device(self.device):
                    found.put(connect(self.grid, 0, self.device, setup.place, setup.backend))
            except BaseException as error:
                found.put(error)
            if given_up.is_set():
                disconnect(LEAVE_S)

        threading.Thread(target=meet, name="wam_groups_meet", daemon=True).start()
        try:
            while found.empty():
                self.check()
                progress("the processes meet", 1.0)
                time.sleep(0.02)
        except BaseException:
            given_up.set()
            raise
        groups = found.get()
        if isinstance(groups, BaseException):
            raise groups
        return groups

    def hold(self, user: object) -> None:
        """``close`` waits for this user's, too."""
        self._users.add(id(user))

    def close(self, user: object | None = None) -> None:
        """``end``, when nobody else uses them."""
        self._users.discard(id(user))
        if not self._users:
            self.end()

    def end(self) -> None:
        """End the processes, whoever uses them. Idempotent."""
        self._finalizer()
        self.groups = None

    # -- what they are told -------------------------------------------------------------------------------------

    def send(self, name: str, *content: Any) -> None:
        """Tell all others; returns at once."""
        while self.forgotten:
            self._tell("drop", self.forgotten.popleft())
        self._tell(name, *content)

    def _tell(self, *command: Any) -> None:
        for index in range(self.grid.size - 1):
            self._keeper.send(index, command)

    def answers(self, limit_s: float | None = None, progress: Progress | None = None) -> list[Any]:
        """One answer of each of the others.

        Args:
            limit_s: default: ``deadline_s``, or much more when something was asked for the first time.
            progress: told what they say meanwhile; may raise ``Cancelled``.

        Raises:
            PolicyLost: one of them does not answer.
            WamError: one of them answered with it.
        """
        out: list[Any] = []
        with self._waiting(limit_s):
            for index, queue in enumerate(self._keeper.answers):
                while True:
                    self.check()
                    try:
                        out.append(queue.get(timeout=0.05))
                        break
                    except Empty:
                        if progress is not None:
                            text, fraction = self._keeper.said[index]
                            progress(f"rank {index + 1}: {text}", fraction)
        for answer in out:
            if isinstance(answer, WamError):
                raise answer
        return out

    @contextmanager
    def exchanging(self, key: Hashable) -> Iterator[Groups]:
        """Around a collective operation.

        Args:
            key: see ``asked``.

        Raises:
            PolicyLost: another rank does not take part.
        """
        assert self.groups is not None
        self.asked(key)
        self.check()
        with self._waiting():
            yield self.groups
        self.check()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around work that exchanges with others in its midst.

        Raises:
            PolicyLost: another rank does not take part, or this one fails and leaves it waiting.
        """
        with self._waiting():
            try:
                yield
            except RuntimeError:
                raise
            except BaseException as error:
                self._keeper.lose(f"waits for one that failed: {error}")
                raise
        self.check()

    def wait(self, ready: Callable[[], bool], pause: Callable[[], None]) -> None:
        """Until ``ready()``, with ``pause()`` in between.

        Raises:
            PolicyLost: another rank is gone, or this takes too long.
        """
        with self._waiting():
            while not ready():
                self.check()
                pause()
        self.check()

    def asked(self, key: Hashable) -> None:
        """Of work that others do, or this process beside them: what is done for the first time may take long."""
        if key not in self._known:
            self._new.add(key)

    def settled(self) -> None:
        """All that was asked for has been done: asked again, it may not take long."""
        self._known |= self._new
        self._new.clear()
        self._keeper.silent_s = self.deadline_s  # compilers that let nobody else run have run

    def check(self) -> None:
        """
        Raises:
            PolicyLost: see ``lost``.
        """
        if (lost := self.lost) is not None:
            raise lost

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around what may wait for the others wherever it asks the device: each sign of progress gives it as much time
        again."""
        with self._limited(None):
            yield

    @contextmanager
    def _limited(self, limit_s: float | None) -> Iterator[None]:
        self._limits.append(limit_s)
        self._expect()
        try:
            yield
        finally:
            self._limits.pop()
            self._expect()

    def _expect(self) -> None:
        if not self._limits:
            self._keeper.expect(None)
            return
        self._keeper.expect(self._limits[-1] or (max(FIRST_S, self.deadline_s) if self._new else self.deadline_s))

    @contextmanager
    def _waiting(self, limit_s: float | None = None) -> Iterator[None]:
        try:
            with self._limited(limit_s):
                yield
        except RuntimeError as error:
            # A connection breaks a moment before it is known that the process behind it has ended.
            self._keeper.join(1.0)
            # If none has, they no longer agree on what comes next.
            self._keeper.lose(f"cannot be exchanged with: {str(error).splitlines()[0]}")
            lost = self.lost
            assert lost is not None
            raise lost from error


def devices_of(count: int, first: torch.device) -> list[str]:
    """``first`` and the GPUs that follow it; a CPU is the same for all.

    Raises:
        ConfigError: there are not so many.
    """
    if first.type != "cuda":
        return [str(first)] * count
    index = first.index or 0
    seen = torch.cuda.device_count()
    if index + count > seen:
        raise ConfigError(
            f"gpus: {count} from {first} on",
            got=f"{seen} GPUs that PyTorch sees",
            remedy="set gpus to what is there",
        )
    return [f"cuda:{index + i}" for i in range(count)]


def _end(keeper: Keeper, met: list[bool]) -> None:
    """Also by the collector, in whatever thread that runs, and when the interpreter ends."""
    keeper.end()
    if threading.current_thread() is not keeper:
        keeper.join(LEAVE_S)
    if met:
        disconnect(LEAVE_S)
