"""Buffers of what the robot sends: one per camera, one for all joints. Callbacks keep references and return."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wam_policy_ros.contract.errors import InvalidImage, MissingInput, StaleInput

from .drops import Drops, Log, SinceGood
from .messages import check_image, check_size, image_size, stamp_to_ns

RESTART_NS = 500_000_000
"""A stream whose stamps step back by this much has started over; less is late delivery."""

RECENT_NS = 300_000_000
"""Every frame of so short a time is kept; older ones are thinned."""

PLAUSIBLE = 100.0
"""No joint of a robot is that far from zero, in rad or in m: it is in degrees, or not initialised."""

MAX_SIZE_WARNINGS = 10
"""Two publishers of different sizes on one topic would warn with every frame."""

_ZERO_STAMP = "set sync.stamp_source: receive, or let the sender stamp its messages"


class Now(NamedTuple):
    """One moment on both clocks."""

    ros_ns: int
    steady_ns: int


class Limits(NamedTuple):
    """How old, how far in the future, and whose clock."""

    max_age_s: float
    future_tolerance_s: float
    stamp_source: str


def check_age(
    what: str,
    field: str,
    limits: Limits,
    *,
    stamp_ns: int,
    arrived_ns: int,
    now: Now,
    dropped: SinceGood,
    hint: str | None = None,
) -> None:
    """Arrival on the steady clock, stamp on the node's clock.

    Args:
        dropped: since the message of ``arrived_ns``.
        hint: what may help when nothing arrives.

    Raises:
        StaleInput: names the stream, its age, the limit, and what was dropped meanwhile.
    """
    quiet_s = (now.steady_ns - arrived_ns) * 1e-9
    age_s = (now.ros_ns - stamp_ns) * 1e-9
    limit = f"at most {limits.max_age_s} s"
    lost = f", since then {text}" if (text := dropped.text()) else ""
    if quiet_s > limits.max_age_s:
        raise StaleInput(
            f"{what}: nothing {'usable ' if lost else ''}arrives",
            field=field,
            got=f"last {'usable ' if lost else ''}message {quiet_s:.3f} s ago{lost}",
            expected=limit,
            remedy=dropped.remedy if lost else hint,
        )
    if limits.stamp_source == "receive":
        return
    remedy = "check the sender's clock, or set sync.stamp_source to receive"
    if age_s > limits.max_age_s:
        raise StaleInput(
            f"{what}: stamp too old",
            field=field,
            got=f"stamped {age_s:.3f} s ago{lost}",
            expected=limit,
            remedy=remedy,
        )
    if -age_s > limits.future_tolerance_s:
        raise StaleInput(
            f"{what}: stamp in the future",
            field=field,
            got=f"{-age_s:.3f} s ahead of the node's clock{lost}",
            expected=f"at most {limits.future_tolerance_s} s",
            remedy=remedy,
        )


class Frame(NamedTuple):
    """A camera message as it arrived, at ``arrived_ns`` on the steady clock."""

    stamp_ns: int
    msg: Any
    arrived_ns: int = 0


class CameraInput:
    """Ring buffer of one camera, in stamp time.

    Args:
        name: camera of the embodiment.
        topic: as subscribed.
        limits: age rules.
        size: raw (height, width) of the embodiment; another aspect is warned of, an absurd size dropped.
        keep_s: length of the buffer.
        spacing_s: of frames older than 0.3 s those closer than this to the one before are dropped; 0 keeps all.
        warn: log function.
        shown: the topic's full name, for people.
        hint: what may help when nothing arrives.
        first_size: called once, when ``got_size`` has become known.

    Attributes:
        got_size: (height, width) of the newest image whose size is known, None before.
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
        shown: str = "",
        hint: Callable[[], str | None] = lambda: None,
        first_size: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.topic, self.shown = name, topic, shown or topic
        self.what = f"camera {name!r} ({self.shown})"
        self.frames: deque[Frame] = deque()
        self.drops, self.dropped = Drops(warn), SinceGood()
        self.got_size: tuple[int, int] | None = None
        self.received = 0
        self._hint, self._first_size = hint, first_size
        self._out = False  # an outage was reported
        self._size_changes = 0
        self.restarts = 0
        self._arrived_ns = 0
        self._thinned = 0  # so many of the oldest frames are final
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
            check_image(msg, self.shown)
            if (size := image_size(msg)) is not None:
                self.saw_size(size)
        except InvalidImage as error:
            self._drop(error.what, str(error.got), str(error))
            return
        stamp_ns = now.ros_ns
        if self._limits.stamp_source == "header" and (stamp_ns := stamp_to_ns(msg.header.stamp)) == 0:
            self._drop("zero stamp", "", f"zero header stamp; remedy: {_ZERO_STAMP}", _ZERO_STAMP)
            return
        if self.frames and stamp_ns <= self.frames[-1].stamp_ns:
            back_ns = self.frames[-1].stamp_ns - stamp_ns
            if back_ns < RESTART_NS:
                text = f"stamp {back_ns * 1e-9:.3f} s before the newest"
                self._drop("out of order", text, text)
                return
            self.restarts += 1
            self.clear()
        self.frames.append(Frame(stamp_ns, msg, now.steady_ns))
        self._arrived_ns = now.steady_ns
        self.dropped.clear()
        if self._out:
            self._out = False
            self.drops.rearm()
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

    def _drop(self, reason: str, detail: str, message: str, remedy: str | None = None) -> None:
        self.dropped.add(reason, detail, remedy)
        self.drops.add(reason, f"{self.what}: {message}")

    def missing(self) -> MissingInput | None:
        """An error when there is no usable frame at all."""
        if self.frames:
            return None
        self._out = True
        lost = f", {text}" if (text := self.dropped.text()) else ""
        return MissingInput(
            f"no usable image from camera {self.name!r}",
            field=self.name,
            got=f"{self.received} messages on {self.shown}{lost}",
            remedy=self.dropped.remedy or self._hint() or "check the publisher, cameras.topics or the remapping",
        )

    def check(self, now: Now) -> None:
        """Raises MissingInput or StaleInput."""
        if (missing := self.missing()) is not None:
            raise missing
        stamp_ns, arrived_ns, hint = self.frames[-1].stamp_ns, self._arrived_ns, self._hint()
        try:
            check_age(
                self.what,
                self.name,
                self._limits,
                stamp_ns=stamp_ns,
                arrived_ns=arrived_ns,
                now=now,
                dropped=self.dropped,
                hint=hint,
            )
        except StaleInput:
            self._out = True
            raise

    @property
    def arrived_ns(self) -> int:
        """When the newest usable frame arrived, on the steady clock."""
        return self._arrived_ns

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
        """Judge (height, width) of an image; warn of every new size. In the worker, too, for sizes that only decoding
        tells.

        Raises:
            InvalidImage: absurd, see ``messages.check_size``.
        """
        old = self.got_size
        if got == old:
            return
        check_size(got, self._size, self.shown)
        self.got_size = got
        text = f"image is {got[1]}x{got[0]}, the embodiment's camera {self._size[1]}x{self._size[0]}"
        if abs((got[1] / got[0]) / (self._size[1] / self._size[0]) - 1.0) > 0.1:
            text += ": the aspect differs, see image.resize"
        elif old is None:
            text = ""
        if old is not None:
            self._size_changes += 1
            text = f"the size changed from {old[1]}x{old[0]} in mid-stream: {text}"
            text += " (further changes are not logged)" * (self._size_changes == MAX_SIZE_WARNINGS)
        if text and self._size_changes <= MAX_SIZE_WARNINGS:
            self._warn(f"{self.what}: {text}")
        if old is None:
            self._first_size()


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
    ) -> None:
        self.names, self.topic, self.shown = tuple(names), topic, shown or topic
        self.drops = Drops(warn)
        self.dropped = [SinceGood() for _ in names]
        self.received = 0
        self._out = False  # an outage was reported
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
        ours = [self._index[n] for n in names if n in self._index]
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
            self._drop(ours, "zero stamp", "", f"zero header stamp; remedy: {_ZERO_STAMP}", _ZERO_STAMP)
            return
        late = [i for i, position in found if not self._append(i, stamp_ns, position, now.steady_ns)]
        if late:
            text = "stamp not newer than the last one of the same joint"
            self._drop(late, "out of order", text, text)
        elif self._out and found:
            self._out = False
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
        self._out = True
        dropped = self.dropped[missing[0]]
        lost = f", {text}" if (text := dropped.text()) else ""
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
            self._out = True
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
