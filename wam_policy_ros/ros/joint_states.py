"""The buffer of all joints' positions, and their ages."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from wam_policy_ros.contract.errors import MissingInput, StaleInput

from .drops import Drops, Log, SinceGood
from .messages import stamp_to_ns
from .streams import RESTART_NS, ZERO_STAMP, Limits, Now, check_age

PLAUSIBLE = 100.0
"""No joint of a robot is that far from zero, in rad or in m: it is in degrees, or not initialised."""
NAMES_KEPT = 16
"""As many names of other joints are told when one of ours is missing."""


class JointStateInput:
    """Positions of the configured joints, merged by name over any number of publishers; one age per joint."""

    def __init__(
        self,
        names: Sequence[str],
        topic: str,
        limits: Limits,
        *,
        keep_s: float = 1.0,
        warn: Log,
        shown: str = "",
        tell: Log = lambda line: None,
    ) -> None:
        self.names, self.topic, self.shown = tuple(names), topic, shown or topic
        self.drops = Drops(warn)
        self.dropped = [SinceGood() for _ in names]
        self.received = 0
        self.offered = ""  # see CameraInput
        self._tell = tell
        self._out_ns: int | None = None  # an outage was reported; since when, as far as known
        self._index = {name: i for i, name in enumerate(names)}
        self._others: dict[str, None] = {}  # joints of the messages that are not ours, while one of ours is missing
        self._samples: list[deque[tuple[int, float]]] = [deque() for _ in names]
        self._arrived_ns = [0] * len(self.names)
        self._limits, self._keep_ns = limits, round(keep_s * 1e9)

    def clear(self) -> None:
        """Forget every position."""
        for samples in self._samples:
            samples.clear()

    def on_message(self, msg: Any, now: Now) -> None:
        """Keep the positions of our joints; everything else in the message is ignored."""
        self.received += 1
        names, positions = msg.name, msg.position
        ours = [self._index[n] for n in names if n in self._index]
        if len(self._others) < NAMES_KEPT and not all(self._samples):
            self._others |= dict.fromkeys(n for n in names if n not in self._index)
        if not positions:
            # Not logged: velocities of other joints may well come on a topic of their own. A hold says it.
            self._drop(ours, "no positions", "velocities or efforts only")
            return
        if len(names) != len(positions):
            text = f"{len(names)} names, {len(positions)} positions"
            self._drop(ours, "names and positions differ", text, text)
            return
        found = [(self._index[n], p) for n, p in zip(names, positions, strict=True) if n in self._index]
        if bad := {self.names[i]: p for i, p in found if not np.isfinite(p)}:
            self._drop(ours, "not finite", f"{bad}", f"position of {list(bad)} is not finite")
            return
        if bad := {self.names[i]: p for i, p in found if abs(p) > PLAUSIBLE}:
            text = f"{bad}, beyond {PLAUSIBLE:g}"
            remedy = "joint positions must be in rad or m"
            self._drop(ours, "implausible", text, f"position {text}; remedy: {remedy}", remedy)
            return
        stamp_ns = now.ros_ns
        if self._limits.stamp_source == "header" and (stamp_ns := stamp_to_ns(msg.header.stamp)) == 0:
            self._drop(ours, "zero stamp", "", f"zero header stamp; remedy: {ZERO_STAMP}", ZERO_STAMP)
            return
        late = [i for i, position in found if not self._append(i, stamp_ns, position, now.steady_ns)]
        if late:
            text = "stamp not newer than the last one of the same joint"
            self._drop(late, "out of order", text, text)
        elif self._out_ns is not None and found:
            self._back(now)

    def _back(self, now: Now) -> None:
        """An outage is over when no joint that was missing or silent still is."""
        silent = [a for a, s in zip(self._arrived_ns, self._samples, strict=True) if not s or a <= (self._out_ns or 0)]
        if silent or self._out_ns is None:
            return
        if self._out_ns > 0:
            quiet_s = (now.steady_ns - self._out_ns) * 1e-9
            self._tell(f"joints ({self.shown}): back after {quiet_s:.2f} s without all positions")
        self._out_ns = None
        self.drops.rearm()

    def _drop(
        self, joints: Sequence[int], reason: str, detail: str, message: str | None = None, remedy: str | None = None
    ) -> None:
        for i in joints:
            self.dropped[i].add(reason, detail, remedy)
        if message is None:
            self.drops.by_reason[reason] += 1
        else:
            self.drops.add(reason, f"{self.shown}: {message}")

    def _append(self, i: int, stamp_ns: int, position: float, arrived_ns: int) -> bool:
        samples = self._samples[i]
        if samples and stamp_ns <= samples[-1][0]:
            if samples[-1][0] - stamp_ns < RESTART_NS:
                return False
            samples.clear()
        samples.append((stamp_ns, position))
        self._arrived_ns[i] = arrived_ns
        self.dropped[i].clear()
        while samples[0][0] < stamp_ns - self._keep_ns:
            samples.popleft()
        return True

    def oldest(self) -> tuple[str, int, int] | None:
        """Name, stamp and steady time of arrival of the joint heard of longest ago; None when one is missing."""
        if not all(self._samples):
            return None
        i = min(range(len(self.names)), key=self._arrived_ns.__getitem__)
        return self.names[i], self._samples[i][-1][0], self._arrived_ns[i]

    def missing(self) -> MissingInput | None:
        """An error when there is no position of a joint at all; names every such joint."""
        missing = [i for i, samples in enumerate(self._samples) if not samples]
        if not missing:
            return None
        self._out_ns = self._out_ns or 0
        dropped = self.dropped[missing[0]]
        lost = f", {text}" if (text := dropped.text()) else ""
        lost += f"; {self.offered}" if self.offered and not self.received else ""
        lost += f", which name {list(self._others)[:NAMES_KEPT]}" if self._others else ""
        return MissingInput(
            f"no position of joints {[self.names[i] for i in missing]}",
            field=self.topic,
            got=f"{self.received} messages on {self.shown}{lost}",
            remedy=dropped.remedy or "check the publisher, and joints.names against the names in the messages",
        )

    def check(self, now: Now) -> None:
        """Raises MissingInput or StaleInput, naming the joint."""
        if (missing := self.missing()) is not None:
            raise missing
        try:
            for i, name in enumerate(self.names):
                check_age(
                    f"joint {name!r} ({self.shown})",
                    self.topic,
                    self._limits,
                    stamp_ns=self._samples[i][-1][0],
                    arrived_ns=self._arrived_ns[i],
                    now=now,
                    dropped=self.dropped[i],
                )
        except StaleInput:
            self._out_ns = self._out_ns or min(self._arrived_ns)
            raise

    def at(self, reference_ns: int) -> npt.NDArray[np.float64]:
        """``[len(names)]`` positions at a time: linear between samples, else the nearest.

        Raises:
            StaleInput: the nearest sample of a joint is further from the time than the age limit.
        """
        return np.array([self._joint_at(i, reference_ns) for i in range(len(self.names))])

    def _joint_at(self, i: int, reference_ns: int) -> float:
        after: tuple[int, float] | None = None
        for sample in reversed(self._samples[i]):
            if sample[0] <= reference_ns:
                if after is None:
                    return self._near(i, sample, reference_ns)
                share = (reference_ns - sample[0]) / (after[0] - sample[0])
                return sample[1] + share * (after[1] - sample[1])
            after = sample
        assert after is not None, "check() comes first"
        return self._near(i, after, reference_ns)

    def _near(self, i: int, sample: tuple[int, float], reference_ns: int) -> float:
        away_s = abs(reference_ns - sample[0]) * 1e-9
        if away_s > self._limits.max_age_s:
            raise StaleInput(
                f"joint {self.names[i]!r} ({self.shown}): no position at the time of the images",
                field=self.topic,
                got=f"nearest {away_s:.3f} s away",
                expected=f"at most {self._limits.max_age_s} s",
            )
        return sample[1]
