"""Buffers of what the robot sends: one per camera, one for all joints. Callbacks keep references and return."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wam_policy_ros.contract.errors import InvalidImage, MissingInput, StaleInput

from .messages import check_image, image_size, stamp_to_ns

RESTART_NS = 500_000_000
"""A stream whose stamps step back by this much has started over; less is late delivery."""

RECENT_NS = 300_000_000
"""Every frame of so short a time is kept; older ones are thinned."""

Log = Callable[[str], None]


class Now(NamedTuple):
    """One moment on both clocks."""

    ros_ns: int
    steady_ns: int


class Limits(NamedTuple):
    """How old, how far in the future, and whose clock."""

    max_age_s: float
    future_tolerance_s: float
    stamp_source: str


class Drops:
    """Counts dropped messages by reason and logs each reason once."""

    def __init__(self, log: Log) -> None:
        self.by_reason: Counter[str] = Counter()
        self._log = log

    def add(self, reason: str, message: str) -> None:
        self.by_reason[reason] += 1
        if self.by_reason[reason] == 1:
            self._log(f"{message} (dropped; further ones are only counted)")

    def summary(self) -> str:
        """For messages: empty, or e.g. ``, dropped: 3 x unsupported encoding``."""
        reasons = ", ".join(f"{n} x {reason}" for reason, n in self.by_reason.items())
        return f", dropped: {reasons}" if reasons else ""


def check_age(what: str, field: str, limits: Limits, *, stamp_ns: int, arrived_ns: int, now: Now) -> None:
    """Arrival on the steady clock, stamp on the node's clock.

    Raises:
        StaleInput: names the stream, its age and the limit.
    """
    quiet_s = (now.steady_ns - arrived_ns) * 1e-9
    age_s = (now.ros_ns - stamp_ns) * 1e-9
    limit = f"at most {limits.max_age_s} s"
    if quiet_s > limits.max_age_s:
        got = f"last message {quiet_s:.3f} s ago"
        raise StaleInput(f"{what}: nothing arrives", field=field, got=got, expected=limit)
    if limits.stamp_source == "receive":
        return
    remedy = "check the sender's clock, or set sync.stamp_source to receive"
    if age_s > limits.max_age_s:
        raise StaleInput(
            f"{what}: stamp too old", field=field, got=f"stamped {age_s:.3f} s ago", expected=limit, remedy=remedy
        )
    if -age_s > limits.future_tolerance_s:
        raise StaleInput(
            f"{what}: stamp in the future",
            field=field,
            got=f"{-age_s:.3f} s ahead of the node's clock",
            expected=f"at most {limits.future_tolerance_s} s",
            remedy=remedy,
        )


class Frame(NamedTuple):
    """A camera message as it arrived."""

    stamp_ns: int
    msg: Any


class CameraInput:
    """Ring buffer of one camera, in stamp time.

    Args:
        name: camera of the embodiment.
        topic: as subscribed.
        limits: age rules.
        size: raw (height, width) of the embodiment; another aspect is warned of.
        keep_s: length of the buffer.
        spacing_s: of frames older than 0.3 s those closer than this to the one before are dropped; 0 keeps all.
        warn: log function.
    """

    def __init__(
        self,
        name: str,
        topic: str,
        limits: Limits,
        *,
        size: tuple[int, int],
        keep_s: float = 3.0,
        spacing_s: float = 0.0,
        warn: Log,
    ) -> None:
        self.name, self.topic = name, topic
        self.what = f"camera {name!r} ({topic})"
        self.frames: deque[Frame] = deque()
        self.drops = Drops(warn)
        self.received = 0
        self.restarts = 0
        self._arrived_ns = 0
        self._thinned = 0  # so many of the oldest frames are final
        self._size_seen = False
        self._limits, self._size, self._warn = limits, size, warn
        self._keep_ns, self._spacing_ns = round(keep_s * 1e9), round(spacing_s * 1e9)

    def clear(self) -> None:
        """Forget every frame."""
        self.frames.clear()
        self._thinned = 0

    def on_message(self, msg: Any, now: Now) -> None:
        """Keep a reference, or count why not."""
        self.received += 1
        try:
            check_image(msg, self.topic)
        except InvalidImage as error:
            self.drops.add(error.what, f"{self.what}: {error}")
            return
        stamp_ns = now.ros_ns
        if self._limits.stamp_source == "header" and (stamp_ns := stamp_to_ns(msg.header.stamp)) == 0:
            self.drops.add("zero stamp", f"{self.what}: zero header stamp; remedy: sync.stamp_source: receive")
            return
        if self.frames and stamp_ns <= self.frames[-1].stamp_ns:
            back_ns = self.frames[-1].stamp_ns - stamp_ns
            if back_ns < RESTART_NS:
                self.drops.add("out of order", f"{self.what}: stamp {back_ns * 1e-9:.3f} s before the newest")
                return
            self.restarts += 1
            self.clear()
        if not self._size_seen and (size := image_size(msg)) is not None:
            self.saw_size(size)
        self.frames.append(Frame(stamp_ns, msg))
        self._arrived_ns = now.steady_ns
        while self.frames[0].stamp_ns < stamp_ns - self._keep_ns:
            self.frames.popleft()
            self._thinned = max(0, self._thinned - 1)
        self._thin(stamp_ns - RECENT_NS)

    def _thin(self, before_ns: int) -> None:
        """Fast cameras would fill the memory with frames between the moments that a policy looks at."""
        frames = self.frames
        while (i := self._thinned) < len(frames) and frames[i].stamp_ns < before_ns:
            if i > 0 and frames[i].stamp_ns - frames[i - 1].stamp_ns < self._spacing_ns:
                del frames[i]
            else:
                self._thinned += 1

    def check(self, now: Now) -> None:
        """Raises MissingInput or StaleInput."""
        if not self.frames:
            raise MissingInput(
                f"waiting for camera {self.name!r}",
                field=self.name,
                got=f"no usable image on {self.topic} ({self.received} messages{self.drops.summary()})",
                remedy="check the publisher, cameras.topics or the remapping",
            )
        newest = self.frames[-1]
        check_age(self.what, self.name, self._limits, stamp_ns=newest.stamp_ns, arrived_ns=self._arrived_ns, now=now)

    def nearest(self, reference_ns: int) -> int:
        """Stamp of the frame nearest to a time; the buffer must not be empty."""
        best = self.frames[-1].stamp_ns
        for frame in reversed(self.frames):
            if abs(frame.stamp_ns - reference_ns) > abs(best - reference_ns):
                break
            best = frame.stamp_ns
        return best

    def since(self, start_ns: int) -> list[Frame]:
        """Frames not older than a time, oldest first."""
        return [f for f in self.frames if f.stamp_ns >= start_ns]

    def saw_size(self, got: tuple[int, int]) -> None:
        """Warn once if (height, width) is far from the contract's aspect. Also called after decoding, in the worker."""
        if self._size_seen:
            return
        self._size_seen = True
        if abs((got[1] / got[0]) / (self._size[1] / self._size[0]) - 1.0) > 0.1:
            self._warn(
                f"{self.what}: image is {got[1]}x{got[0]}, the embodiment's camera {self._size[1]}x{self._size[0]}: "
                "the aspect differs, see image.resize"
            )


class JointStateInput:
    """Positions of the configured joints, merged by name over any number of publishers; one age per joint."""

    def __init__(self, names: Sequence[str], topic: str, limits: Limits, *, keep_s: float = 1.0, warn: Log) -> None:
        self.names, self.topic = tuple(names), topic
        self.drops = Drops(warn)
        self.received = 0
        self._index = {name: i for i, name in enumerate(names)}
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
        if not positions:
            self.drops.by_reason["no positions"] += 1
            return
        if len(names) != len(positions):
            self.drops.add(
                "names and positions differ", f"{self.topic}: {len(names)} names, {len(positions)} positions"
            )
            return
        found = [(self._index[n], p) for n, p in zip(names, positions, strict=True) if n in self._index]
        if not all(np.isfinite(p) for _, p in found):
            bad = [self.names[i] for i, p in found if not np.isfinite(p)]
            self.drops.add("not finite", f"{self.topic}: position of {bad} is not finite")
            return
        stamp_ns = now.ros_ns
        if self._limits.stamp_source == "header" and (stamp_ns := stamp_to_ns(msg.header.stamp)) == 0:
            self.drops.add("zero stamp", f"{self.topic}: zero header stamp; remedy: sync.stamp_source: receive")
            return
        kept = [self._append(i, stamp_ns, position, now.steady_ns) for i, position in found]
        if not all(kept):
            self.drops.add("out of order", f"{self.topic}: stamp not newer than the last one of the same joint")

    def _append(self, i: int, stamp_ns: int, position: float, arrived_ns: int) -> bool:
        samples = self._samples[i]
        if samples and stamp_ns <= samples[-1][0]:
            if samples[-1][0] - stamp_ns < RESTART_NS:
                return False
            samples.clear()
        samples.append((stamp_ns, position))
        self._arrived_ns[i] = arrived_ns
        while samples[0][0] < stamp_ns - self._keep_ns:
            samples.popleft()
        return True

    def check(self, now: Now) -> None:
        """Raises MissingInput or StaleInput, naming the joint."""
        if missing := [n for n, s in zip(self.names, self._samples, strict=True) if not s]:
            raise MissingInput(
                f"waiting for joints {missing}",
                field=self.topic,
                got=f"no position on {self.topic} ({self.received} messages{self.drops.summary()})",
                remedy="check joints.names against the names in the messages",
            )
        for name, samples, arrived_ns in zip(self.names, self._samples, self._arrived_ns, strict=True):
            what = f"joint {name!r} ({self.topic})"
            check_age(what, self.topic, self._limits, stamp_ns=samples[-1][0], arrived_ns=arrived_ns, now=now)

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
                f"joint {self.names[i]!r} ({self.topic}): no position at the time of the images",
                field=self.topic,
                got=f"nearest {away_s:.3f} s away",
                expected=f"at most {self._limits.max_age_s} s",
            )
        return sample[1]
