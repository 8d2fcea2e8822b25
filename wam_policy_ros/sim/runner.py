"""The world in time: one thread that owns it, paces it or waits for commands, and hands out what the robot sees.

Knows no ROS. Whoever has something for the world puts an order into the mailbox; the thread carries it out between
two ticks.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from wam_policy_ros.contract.errors import WamError

from .drive import Drive, Next
from .errors import SimError
from .tasks import Outcome, Task
from .world import RATE_HZ, Frame, World

DT_NS = -(-1_000_000_000 // round(RATE_HZ))
"""Simulated time of a tick on the clock. Rounded up: n ticks are never a nanosecond less than n / rate, which whoever
counts in seconds may be waiting for."""
START_NS = 1_000_000_000
GAP_NS = 10_000_000_000
"""By so much the clock jumps forward at a reset: no plan or frame of the last episode reaches into the new one, and a
policy node begins a new session, as after every jump of more than 1 s."""
LEAST_S = 0.01
"""Real time between two frames that a policy looks at, at least: it takes one that is younger than 5 ms for new enough
whatever the clock says."""
SETTLE_S = 0.2
"""Real time between the jump and the first frame, so that who looks at the clock 15 times a second has seen it."""


@dataclass(frozen=True)
class Pacing:
    """How simulated time goes on.

    Attributes:
        lockstep: a tick begins only when a command for it is there; see ``Drive.next``.
        real_time_factor: simulated seconds per second, at most; 0: as fast as it can.
        idle_s: in lock-step, while nothing is under way: the world stands still and the clock and the frames go on by a
            tick every so often, so that a policy that needs a newer frame gets one.
        patience_s: in lock-step, in the middle of a trajectory: when no new one came for so long, it is run to its end.
    """

    lockstep: bool = True
    real_time_factor: float = 1.0
    idle_s: float = 1.0
    patience_s: float = 60.0


@dataclass(frozen=True)
class Status:
    """How the episode stands.

    Attributes:
        episode: number of resets before, counted from 0.
        stamp_ns: of the newest frame.
        idle_ticks: frames in which the clock went on without the world.
        waits: in lock-step, for a command.
    """

    episode: int
    seed: int
    task: Task | None
    tick: int
    stamp_ns: int
    outcome: Outcome
    limited: tuple[int, ...]
    idle_ticks: int
    waits: bool
    refused: int
    refusal: str


@dataclass(frozen=True)
class Hand:
    """``positions``, ``velocities``: of each finger, m and m/s; ``closing``: the gripper's 0..1 per second."""

    positions: tuple[float, ...]
    velocities: tuple[float, ...]
    closing: float


class Outlet(Protocol):
    """Where it goes. Called in the world's thread, in this order at every tick.

    A request leaves with the picture that completes a set, if it is due on the clock. So the joints go before pictures
    are made, which takes the longest, and the clock and the pictures at once when they are there: a policy node would
    take the frame before for the newest while the clock says that a request is due.
    """

    def joints(self, frame: Frame, hand: Hand, stamp_ns: int) -> None: ...
    def clock(self, stamp_ns: int) -> None: ...
    def pictures(self, frame: Frame, stamp_ns: int) -> None: ...
    def status(self, status: Status) -> None: ...


class Runner:
    """One world and its thread.

    Args:
        make_world: called in the thread, which then owns it.
        make_drive: for this world; gives the drive.
        outlet: where everything goes.
        pacing: how time goes on.
        warn: says a line.

    Attributes:
        failure: why the thread has ended, if not by ``close``.
    """

    def __init__(
        self,
        make_world: Callable[[], World],
        make_drive: Callable[[World], Drive],
        outlet: Outlet,
        pacing: Pacing,
        *,
        warn: Callable[[str], None],
    ) -> None:
        self._make_world, self._make_drive, self._out, self._pacing = make_world, make_drive, outlet, pacing
        self._warn = warn
        self._orders: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any] | None]] = queue.SimpleQueue()
        self._end = threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="wam_sim_world", daemon=True)
        self._world: World
        self._drive: Drive
        self._clock_ns, self._last_s, self._not_before_s = START_NS, 0.0, 0.0
        self._held_since_s: float | None = None
        self._episode, self._idle_ticks, self._refused, self._refusal = -1, 0, 0, ""
        self._limited: tuple[int, ...] = ()
        self._draws = False

    def start(self, seed: int, task: Task | None) -> None:
        """Make the world and begin an episode.

        Raises:
            WamError: it cannot be made.
        """
        first: Future[Status] = Future()
        self._orders.put((lambda: self._reset(seed, task), first))
        self._thread.start()
        first.result()

    def close(self, timeout_s: float = 5.0) -> bool:
        """End the thread. True when it has ended."""
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- orders: from any thread --------------------------------------------------------------------------------

    def reset(self, seed: int, task: Task | None, timeout_s: float = 30.0) -> Status:
        """A new episode. Raises WamError; TimeoutError."""
        return self._ask(lambda: self._reset(seed, task), timeout_s)

    def step(self, timeout_s: float = 30.0) -> Status:
        """One tick with what is commanded now, in lock-step without waiting for more. Raises WamError; TimeoutError."""
        return self._ask(self._step, timeout_s)

    def on_trajectory(self, msg: Any) -> None:
        self._orders.put((lambda: self._drive.on_trajectory(msg, self._clock_ns), None))

    def on_joint_command(self, msg: Any) -> None:
        self._orders.put(
            (lambda: self._drive.on_joint_command(list(msg.name), list(msg.position), self._clock_ns), None)
        )

    def on_gripper(self, closed: float) -> None:
        self._orders.put((lambda: self._drive.on_gripper(closed), None))

    def _ask(self, order: Callable[[], Status], timeout_s: float) -> Status:
        answer: Future[Status] = Future()
        self._orders.put((order, answer))
        return answer.result(timeout_s)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._world = self._make_world()
            try:
                self._drive = self._make_drive(self._world)
                self._draws = bool(self._world.reset(0).images)
                self._take(None)  # the first episode
                while not self._end.is_set():
                    self._turn()
            finally:
                self._world.close()
        except BaseException as error:
            self.failure = error
        finally:
            while not self._orders.empty():
                if (answer := self._orders.get()[1]) is not None:
                    answer.set_exception(self.failure or SimError("the simulator has ended"))

    def _turn(self) -> None:
        """Carry out an order, or make a tick that is due, or wait a little for either."""
        pacing, now_s = self._pacing, time.monotonic()
        period_s = DT_NS * 1e-9 / pacing.real_time_factor if pacing.real_time_factor else 0.0
        period_s = max(period_s, LEAST_S if self._draws else 0.0)
        what = self._drive.next(self._clock_ns) if pacing.lockstep else Next.GO
        if what is Next.WAIT:
            self._wait(now_s)
            self._take(0.05)
            return
        self._held_since_s = None
        due_s = max(self._last_s + (period_s if what is Next.GO else pacing.idle_s), self._not_before_s)
        if self._take(min(max(due_s - now_s, 0.0), 0.05)) or time.monotonic() < due_s:
            return
        # A tick that came late is not caught up with.
        self._last_s = due_s if now_s - due_s < period_s else time.monotonic()
        if what is Next.GO:
            self._step()
        else:
            self._idle_ticks += 1
            self._clock_ns += DT_NS
            self._publish(self._world.observe(images=False))

    def _wait(self, now_s: float) -> None:
        if self._held_since_s is None:
            self._held_since_s = now_s
            self._out.status(self._status(waits=True))
        elif now_s - self._held_since_s > self._pacing.patience_s:
            self._warn(
                f"no command for {self._pacing.patience_s:.0f} s in lock-step: the arm goes on to its last target"
            )
            self._drive.give_up(self._clock_ns)

    def _take(self, timeout_s: float | None) -> bool:
        """Carry out one order, if one comes in time."""
        try:
            order, answer = self._orders.get(timeout=timeout_s) if timeout_s != 0.0 else self._orders.get_nowait()
        except queue.Empty:
            return False
        try:
            result = order()
        except Exception as error:
            if answer is not None:
                answer.set_exception(error)
            elif isinstance(error, WamError):
                self._refused, self._refusal = self._refused + 1, str(error)
                self._warn(f"refused: {error}")
            else:
                raise
        else:
            if answer is not None:
                answer.set_result(result)
        return True

    def _reset(self, seed: int, task: Task | None) -> Status:
        self._world.reset(seed, task, images=False)
        self._clock_ns += GAP_NS if self._episode >= 0 else 0
        self._episode, self._idle_ticks, self._limited = self._episode + 1, 0, ()
        self._drive.begin(self._world.target_rad, self._clock_ns)
        self._held_since_s, self._not_before_s = None, time.monotonic() + SETTLE_S
        self._last_s = 0.0
        self._out.clock(self._clock_ns)
        self._out.status(status := self._status())
        return status

    def _step(self) -> Status:
        joints, gripper = self._drive.target(self._clock_ns + DT_NS)
        frame = self._world.step(joints, gripper, images=False)
        self._clock_ns += DT_NS
        return self._publish(frame)

    def _publish(self, frame: Frame) -> Status:
        self._limited = frame.limited
        self._out.joints(frame, self._hand(), self._clock_ns)
        seen = self._world.observe()
        self._out.clock(self._clock_ns)
        if seen.images:
            self._out.pictures(seen, self._clock_ns)
        self._out.status(status := self._status())
        return status

    def _hand(self) -> Hand:
        world, names = self._world, [self._world.arm.prefix + n for n in self._world.arm.fingers]
        joints = [world.model.joint(n) for n in names]
        positions = tuple(float(world.data.qpos[j.qposadr[0]]) for j in joints)
        velocities = tuple(float(world.data.qvel[j.dofadr[0]]) for j in joints)
        return Hand(positions, velocities, -float(np.mean(velocities)) / world.arm.finger_open)

    def _status(self, *, waits: bool = False) -> Status:
        layout = self._world.layout
        assert layout is not None
        return Status(
            episode=self._episode,
            seed=layout.seed,
            task=self._world.task,
            tick=self._world.observe(images=False).tick,
            stamp_ns=self._clock_ns,
            outcome=self._world.outcome,
            limited=self._limited,
            idle_ticks=self._idle_ticks,
            waits=waits,
            refused=self._refused,
            refusal=self._refusal,
        )
