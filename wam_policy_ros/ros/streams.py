"""The buffer of a camera, and what holds for every stream. Callbacks keep references and return."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from wam_policy_ros.contract.errors import InvalidImage, MissingInput, StaleInput

from .drops import Drops, Log, SinceGood
from .frames import Frame
from .messages import (
    AS_LABELLED,
    ImageRules,
    check_image,
    check_size,
    describe_image,
    image_size,
    image_to_rgb,
    spread,
    stamp_to_ns,
)

RESTART_NS = 500_000_000
"""A stream whose stamps step back by this much has started over; less is late delivery."""

RECENT_NS = 300_000_000
"""Every frame of so short a time is kept; older ones are thinned."""

MAX_WARNINGS = 10
"""Two publishers of different sizes on one topic would warn with every frame, and a flickering picture, too."""

UNIFORM_STD = 1.0
"""A picture that varies less than this, of 0 to 255, is of one colour: a renderer that is not warm, a covered lens."""

LOOK_NS = 1_000_000_000
"""So often a camera that has shown a picture is looked at whether it still does."""

SIDE_BY_SIDE = 2.2
"""No single camera is that much wider than high: two pictures beside each other may be."""

ZERO_STAMP = "set sync.stamp_source: receive, or let the sender stamp its messages"


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
    # A stamp is older than its arrival. Of a stream that fell silent it is too old a little earlier, and no clock is
    # wrong.
    too_old = limits.stamp_source == "header" and age_s > limits.max_age_s
    if quiet_s > limits.max_age_s or (too_old and age_s < 2 * quiet_s):
        stamped = f", stamped {age_s:.3f} s ago" if too_old and age_s < 2 * quiet_s else ""
        raise StaleInput(
            f"{what}: nothing {'usable ' if lost else ''}arrives",
            field=field,
            got=f"last {'usable ' if lost else ''}message {quiet_s:.3f} s ago{stamped}{lost}",
            expected=limit,
            remedy=dropped.remedy if lost else hint,
        )
    if limits.stamp_source == "receive":
        return
    remedy = "check the sender's clock, or set sync.stamp_source to receive"
    if too_old:
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
        rules: how its messages are read.
        min_std: a session begins with the first picture that varies at least this much (0 to 255); 0: with any.
        tell: log function for what is worth knowing, but no warning.
        settled: called for each frame that will not be thinned out any more.

    Attributes:
        got_size: (height, width) of the newest image whose size is known, None before.
        offered: why nothing can be received although there are publishers, empty when there is no reason.
        uniform: pictures of one colour that were seen; not every picture is looked at.
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
        rules: ImageRules = AS_LABELLED,
        min_std: float = 0.0,
        tell: Log = lambda line: None,
        settled: Callable[[Frame], None] = lambda frame: None,
    ) -> None:
        self._settled = settled
        self.name, self.topic, self.shown = name, topic, shown or topic
        self.rules, self.offered, self.uniform = rules, "", 0
        self._min_std, self._tell = min_std, tell
        self._described = ""
        self._is_uniform, self._looked_ns, self._uniform_warnings = False, 0, 0
        self._spreads: dict[int, float] = {}
        self.what = f"camera {name!r} ({self.shown})"
        self.frames: deque[Frame] = deque()
        self.drops, self.dropped = Drops(warn), SinceGood()
        self.got_size: tuple[int, int] | None = None
        self.received = 0
        self._hint, self._first_size = hint, first_size
        self._out = False  # an outage was reported
        self._size_changes = 0
        self.restarts = 0
        self._arrived_ns, self._arrived_before = 0, False
        self._thinned = 0  # so many of the oldest frames are final
        self._limits, self._size, self._warn = limits, size, warn
        self._keep_ns, self._spacing_ns = round(keep_s * 1e9), round(spacing_s * 1e9)

    def clear(self) -> None:
        """Forget every frame."""
        self.frames.clear()
        self._spreads.clear()
        self._thinned = 0

    def on_message(self, msg: Any, now: Now) -> None:
        """Keep a reference, or count why not."""
        self.received += 1
        try:
            check_image(msg, self.shown, self.rules)
            if (size := image_size(msg, self.rules)) is not None:
                self.saw_size(size)
        except InvalidImage as error:
            self._drop(error.what, str(error.got), str(error), error.remedy)
            return
        self._describe(msg)
        stamp_ns = now.ros_ns
        if self._limits.stamp_source == "header" and (stamp_ns := stamp_to_ns(msg.header.stamp)) == 0:
            self._drop("zero stamp", "", f"zero header stamp; remedy: {ZERO_STAMP}", ZERO_STAMP)
            return
        if self.frames and stamp_ns <= self.frames[-1].stamp_ns:
            back_ns = self.frames[-1].stamp_ns - stamp_ns
            if back_ns < RESTART_NS:
                text = f"stamp {back_ns * 1e-9:.3f} s before the newest"
                self._drop("out of order", text, text)
                return
            self.restarts += 1
            self.clear()
        self._look(msg, now.steady_ns)
        self.frames.append(Frame(stamp_ns, msg, now.steady_ns))
        quiet_s, self._arrived_ns = (now.steady_ns - self._arrived_ns) * 1e-9, now.steady_ns
        self.dropped.clear()
        if self._out:
            self._out = False
            if self._arrived_before:  # what came before the first usable image was told already
                self.drops.rearm()
            if self._arrived_before and quiet_s > self._limits.max_age_s:
                self._tell(f"{self.what}: back after {quiet_s:.2f} s without a usable image")
        self._arrived_before = True
        while self.frames[0].stamp_ns < stamp_ns - self._keep_ns:
            self._spreads.pop(self.frames.popleft().stamp_ns, None)
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
                self._settled(frames[i])

    def _drop(self, reason: str, detail: str, message: str, remedy: str | None = None) -> None:
        self.dropped.add(reason, detail, remedy)
        self.drops.add(reason, f"{self.what}: {message}")

    def missing(self) -> MissingInput | None:
        """An error when there is no usable frame at all."""
        if self.frames:
            return None
        self._out = True
        lost = f", {text}" if (text := self.dropped.text()) else ""
        offered = f"; {self.offered}" if self.offered and not self.received else ""
        return MissingInput(
            f"no usable image from camera {self.name!r}",
            field=self.name,
            got=f"{self.received} messages on {self.shown}{lost}{offered}",
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

    def varied(self, frames: Sequence[Frame]) -> list[Frame]:
        """The frames from the first on that shows a picture, see ``min_std``. Compressed ones are decoded for that.

        Raises:
            InvalidImage: one cannot be decoded.
        """
        if not self._min_std:
            return list(frames)
        for i, frame in enumerate(frames):
            if (value := self._spreads.get(frame.stamp_ns)) is None:
                value = self._spreads[frame.stamp_ns] = self._spread_of(frame.msg)
            if value >= self._min_std:
                return list(frames[i:])
        return []

    def _spread_of(self, msg: Any) -> float:
        if msg is None:  # a request has used it, so it comes after the first picture
            return float("inf")
        value = spread(msg, self.rules)
        return value if value is not None else float(image_to_rgb(msg, self.shown, self.rules).std(axis=(0, 1)).max())

    def saw_spread(self, value: float) -> None:
        """Warn when a picture that showed something is of one colour now, see ``UNIFORM_STD``. In the worker, too, for
        pictures that only decoding shows."""
        was, self._is_uniform = self._is_uniform, value < UNIFORM_STD
        self.uniform += self._is_uniform
        if self._is_uniform and not was and self._uniform_warnings < MAX_WARNINGS:
            self._uniform_warnings += 1
            self._warn(
                f"uniform image on {self.what}: every pixel has nearly the same value (not dropped, see image.min_std)"
            )

    def _look(self, msg: Any, steady_ns: int) -> None:
        if self.frames and not self._is_uniform and steady_ns - self._looked_ns < LOOK_NS:
            return
        self._looked_ns = steady_ns
        if (value := spread(msg, self.rules)) is not None:
            self.saw_spread(value)

    def _describe(self, msg: Any) -> None:
        """The first image is described in the log, so that a person can compare it with the camera."""
        if not self._described:
            self._described = describe_image(msg, self.rules)
            self._tell(f"{self.what}: first image {self._described}")

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
            if got[1] / got[0] >= SIDE_BY_SIDE and self.rules.view == "whole":
                text += "; if these are two pictures side by side, set image.views"
        elif old is None:
            text = ""
        if old is not None:
            self._size_changes += 1
            text = f"the size changed from {old[1]}x{old[0]} in mid-stream: {text}"
            text += " (further changes are not logged)" * (self._size_changes == MAX_WARNINGS)
        if text and self._size_changes <= MAX_WARNINGS:
            self._warn(f"{self.what}: {text}")
        if old is None:
            self._first_size()
