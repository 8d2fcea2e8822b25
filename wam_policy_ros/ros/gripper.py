"""Grippers that are not part of the arm's trajectory: when to send them what. Knows no rclpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .messages import Trajectory

Command = Callable[[], None]
"""Something encoded and checked, ready to be sent."""


def open_or_closed(fractions: np.ndarray, closed: bool | None, *, threshold: float, hysteresis: float) -> np.ndarray:
    """Policy values ``[N]`` as 0 (open) or 1 (closed). Inside the dead band the value before stays; at the very start
    the threshold alone decides.

    Args:
        closed: what was commanded before, None when nothing was.
        threshold, hysteresis: middle and width of the dead band.
    """
    out, state = np.empty(len(fractions)), closed
    for k, f in enumerate(fractions):
        half = 0.0 if state is None else hysteresis / 2
        if f > threshold + half:
            state = True
        elif f <= threshold - half or state is None:
            state = False
        out[k] = float(state)
    return out


class GripperSwitch:
    """A gripper that is told single positions, on change only and not too often (actions, Float64).

    Args:
        send: hands a position in joint units to the gripper.
        ends: its two end positions, joint units: reaching one is always worth a command.
        least: smaller changes (joint units) are not sent.
        min_interval_s: between two commands.
    """

    def __init__(
        self, send: Callable[[float], None], *, ends: tuple[float, float], least: float, min_interval_s: float
    ) -> None:
        self._send, self._ends, self._least, self._min_interval_s = send, ends, least, min_interval_s
        self._times_ns: np.ndarray = np.zeros(0, dtype=np.int64)
        self._positions: np.ndarray = np.zeros(0)
        self._sent: float | None = None
        self._sent_ns = 0

    def prepare(self, times_ns: np.ndarray, positions: np.ndarray) -> Command:
        """Rows ``[M]`` of a new plan; they replace those of the one before when the command is called."""

        def take() -> None:
            self._times_ns, self._positions = times_ns, positions

        return take

    def clear(self) -> None:
        """Nothing more of the plan is sent: the gripper stays where it was told to be."""
        self._times_ns, self._positions = np.zeros(0, dtype=np.int64), np.zeros(0)

    def on_tick(self, now_ns: int) -> None:
        """Send what is due, if it differs from what was sent and the last time was long enough ago."""
        due = int(np.searchsorted(self._times_ns, now_ns, side="right"))
        if not due:
            return
        wanted = float(self._positions[due - 1])
        if self._sent is not None:
            if wanted == self._sent or (abs(wanted - self._sent) < self._least and wanted not in self._ends):
                return
            # A clock that was set back does not silence the gripper.
            if 0 <= now_ns - self._sent_ns < self._min_interval_s * 1e9:
                return
        self._sent, self._sent_ns = wanted, now_ns
        self._send(wanted)


@dataclass
class Outputs:
    """Everything a trajectory of all commanded joints is handed to: the arm, and grippers of their own.

    All of it is encoded before any of it is sent, so that a fault in one part leaves nothing half sent.

    Attributes:
        grippers: bool ``[J]``, which columns are grippers.
        arm: encodes the arm's part, or all joints when ``whole``.
        gripper_trajectories: per gripper joint, encodes its part. May be empty.
        switches: per gripper joint. May be empty.
        whole: the grippers stay in the arm's trajectory.
        watch: told of every trajectory that was sent.
    """

    grippers: np.ndarray
    arm: Callable[[Trajectory], Command]
    gripper_trajectories: list[Callable[[Trajectory], Command]] = field(default_factory=list)
    switches: list[GripperSwitch] = field(default_factory=list)
    whole: bool = True
    watch: Callable[[Trajectory], None] = lambda trajectory: None

    def __call__(self, trajectory: Trajectory) -> None:
        columns = np.flatnonzero(self.grippers)
        commands = [self.arm(trajectory if self.whole else trajectory.only(~self.grippers))]
        for column, encode in zip(columns, self.gripper_trajectories, strict=False):
            commands.append(encode(trajectory.only(np.arange(len(self.grippers)) == column)))
        hold = len(trajectory.positions) == 1
        for column, switch in zip(columns, self.switches, strict=False):
            times_ns = trajectory.stamp_ns + trajectory.times_ns.astype(np.int64)
            commands.append(switch.clear if hold else switch.prepare(times_ns, trajectory.positions[:, column]))
        for command in commands:
            command()
        self.watch(trajectory)

    def on_tick(self, now_ns: int) -> None:
        for switch in self.switches:
            switch.on_tick(now_ns)
