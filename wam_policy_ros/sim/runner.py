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
from wam_policy_ros.contract.executed import Rows, carried

from .drive import Drive, Next
from .errors import SimError
from .tasks import LIFT_M, Outcome, Task
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


LONGEST = 36_000
"""Ticks of an episode whose commands are kept: 40 minutes."""


@dataclass(frozen=True)
class Asked:
    """An episode.

    Attributes:
        seed: of the scene; task: None: nothing counts as success.
        instruction: what is said, empty: the first wording of the task.
        max_ticks: the episode is over after so many, or with the task's success; 0: it never is. The world goes on, but
            what is counted stays as it was then.
    """

    seed: int
    task: Task | None
    instruction: str = ""
    max_ticks: int = 0

    @property
    def said(self) -> str:
        return self.instruction or (self.task.instructions[0] if self.task else "")


@dataclass(frozen=True)
class Status:
    """How the episode stands.

    Attributes:
        episode: number of resets before, counted from 0.
        tick: of the world; once the episode is over, its last one.
        stamp_ns: of the newest frame.
        highest_m: of the task's thing above where it lay, at most; taken: things other than the task's that were lifted
            as high as counts as lifted.
        idle_ticks: frames in which the clock went on without the world.
        waits: in lock-step, for a command; rests: nothing is under way.
        over: see ``Asked.max_ticks``.
    """

    episode: int
    asked: Asked
    tick: int
    stamp_ns: int
    outcome: Outcome
    highest_m: float
    taken: tuple[str, ...]
    limited: tuple[int, ...]
    idle_ticks: int
    waits: bool
    rests: bool
    over: bool
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
        self._rested = False
        self._episode, self._idle_ticks, self._refused, self._refusal = -1, 0, 0, ""
        self._asked, self._over_tick, self._over_outcome = Asked(0, None), 0, Outcome(False, 0, 0.0, {})
        self._over, self._highest_m, self._taken, self._rows = False, 0.0, set[str](), list[Rows]()
        self._limited: tuple[int, ...] = ()
        self._draws = False

    def start(self, asked: Asked) -> None:
        """Make the world and begin an episode.

        Raises:
            WamError: it cannot be made.
        """
        first: Future[Status] = Future()
        self._orders.put((lambda: self._reset(asked), first))
        self._thread.start()
        first.result()

    def close(self, timeout_s: float = 5.0) -> bool:
        """End the thread. True when it has ended."""
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- orders: from any thread --------------------------------------------------------------------------------

    def reset(self, asked: Asked, timeout_s: float = 30.0) -> Status:
        """A new episode. Raises WamError; TimeoutError."""
        status: Status = self._ask(lambda: self._reset(asked), timeout_s)
        return status

    def executed(self, timeout_s: float = 30.0) -> tuple[int, Rows]:
        """Number of the episode and what the arm was told at each of its ticks, ``[ticks, 8]``, of the first
        ``LONGEST`` ones, until it was over. Raises WamError; TimeoutError."""
        told: tuple[int, Rows] = self._ask(lambda: (self._episode, np.array(self._rows).reshape(-1, 8)), timeout_s)
        return told

    def step(self, timeout_s: float = 30.0) -> Status:
        """One tick with what is commanded now, in lock-step without waiting for more. Raises WamError; TimeoutError."""
        status: Status = self._ask(self._step, timeout_s)
        return status

    def on_trajectory(self, msg: Any) -> None:
        self._orders.put((lambda: self._drive.on_trajectory(msg, self._clock_ns), None))

    def on_joint_command(self, msg: Any) -> None:
        self._orders.put(
            (lambda: self._drive.on_joint_command(list(msg.name), list(msg.position), self._clock_ns), None)
        )

    def on_gripper(self, closed: float) -> None:
        self._orders.put((lambda: self._drive.on_gripper(closed), None))

    def _ask(self, order: Callable[[], Any], timeout_s: float) -> Any:
        answer: Future[Any] = Future()
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
        what = self._drive.next(self._clock_ns)
        if (what is Next.REST) != self._rested:
            self._rested = what is Next.REST
            self._out.status(self._status())
        what = what if pacing.lockstep else Next.GO
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

    def _reset(self, asked: Asked) -> Status:
        self._world.reset(asked.seed, asked.task, images=False)
        self._asked = asked
        self._over, self._highest_m, self._taken, self._rows = False, 0.0, set(), []
        self._clock_ns += GAP_NS if self._episode >= 0 else 0
        self._episode, self._idle_ticks, self._limited = self._episode + 1, 0, ()
        self._drive.begin(self._world.target_rad, self._clock_ns)
        self._rested = True
        self._held_since_s, self._not_before_s = None, time.monotonic() + SETTLE_S
        self._last_s = 0.0
        self._out.clock(self._clock_ns)
        self._out.status(status := self._status())
        return status

    def _step(self) -> Status:
        joints, gripper = self._drive.target(self._clock_ns + DT_NS)
        row = carried(np.append(joints, gripper))
        frame = self._world.step(row[:7], row[7], images=False)
        self._clock_ns += DT_NS
        if not self._over:
            self._count(row, frame.tick)
        return self._publish(frame)

    def _count(self, row: Rows, tick: int) -> None:
        if len(self._rows) < LONGEST:
            self._rows.append(row)
        target = self._asked.task.target if self._asked.task else ""
        self._taken |= {n for n, z in self._world.raised_m.items() if z > LIFT_M and n != target}
        outcome = self._world.outcome
        self._highest_m = max(self._highest_m, outcome.lifted_m)
        if self._asked.max_ticks and (outcome.success or tick >= self._asked.max_ticks):
            self._over, self._over_tick, self._over_outcome = True, tick, outcome

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
        return Status(
            episode=self._episode,
            asked=self._asked,
            tick=self._over_tick if self._over else self._world.observe(images=False).tick,
            stamp_ns=self._clock_ns,
            outcome=self._over_outcome if self._over else self._world.outcome,
            highest_m=self._highest_m,
            taken=tuple(sorted(self._taken)),
            limited=self._limited,
            idle_ticks=self._idle_ticks,
            waits=waits,
            rests=self._rested,
            over=self._over,
            refused=self._refused,
            refusal=self._refusal,
        )
