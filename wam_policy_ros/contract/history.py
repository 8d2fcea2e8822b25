"""Which camera frames a call looks at: the frames of one session, and the rule that picks from them.

With stamps the frames are picked by time, at the offsets the network was trained with; without, by order of arrival
as the published server does (DreamZero spec 1.1).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import InvalidImage, MissingInput, ObservationError, StaleInput
from .interface import CameraSpec, Observation, PolicySpec


class Selection(NamedTuple):
    """Frames picked by time.

    Attributes:
        indices: one frame per offset, into the given stamps.
        off_schedule: offsets whose nearest frame is further away than half a control step.
        padded: offsets that lie before the oldest frame, which stands in for them; not counted as off schedule.
    """

    indices: tuple[int, ...]
    off_schedule: int
    padded: int


def select_frames(
    stamps_ns: Sequence[int] | npt.NDArray[np.int64],
    reference_ns: int,
    offsets_steps: Sequence[int],
    control_rate_hz: float,
) -> Selection:
    """For each offset the frame nearest in time to ``reference + offset / rate``; of two equally near, the newer.

    Args:
        stamps_ns: ascending, at least one.
        offsets_steps: in control steps, e.g. (-23, -16, -8, 0).

    Raises:
        ValueError: no stamps, or not ascending.
    """
    stamps = [int(s) for s in stamps_ns]
    if not stamps or any(b < a for a, b in pairwise(stamps)):
        raise ValueError(f"stamps must be ascending and at least one, got {stamps[:8]}")
    half_step_ns = 0.5e9 / control_rate_hz
    indices, off_schedule, padded = [], 0, 0
    for offset in offsets_steps:
        target = reference_ns + step_ns(offset, control_rate_hz)
        index = _nearest(stamps, target)
        indices.append(index)
        if target < stamps[0]:
            padded += 1
        elif abs(stamps[index] - target) > half_step_ns:
            off_schedule += 1
    return Selection(tuple(indices), off_schedule, padded)


def _nearest(stamps: Sequence[int], target: int) -> int:
    after = bisect_right(stamps, target)
    if after == 0 or (after < len(stamps) and stamps[after] - target <= target - stamps[after - 1]):
        return after
    return after - 1


def step_ns(steps: int, control_rate_hz: float) -> int:
    """Control steps in ns, rounded to the nearest."""
    return round(steps * 1e9 / control_rate_hz)


class _Frame(NamedTuple):
    stamp: int  # ns; without a clock the order of arrival
    image: npt.NDArray[np.uint8]
    owned: bool = True  # False: the image still belongs to the observation it came with


@dataclass(frozen=True)
class DrawnFrames:
    """What one call looks at.

    Attributes:
        images: camera -> T times uint8 ``[H, W, 3]``, oldest first; T is 1 or the number of the spec's frame offsets.
        reference_ns: the time the offsets count from; None without stamps.
        stamps_ns: camera -> stamps of the frames taken; None without stamps.
        off_schedule, padded: summed over cameras, see ``Selection``; without stamps only ``padded`` counts.
    """

    images: Mapping[str, Sequence[npt.NDArray[np.uint8]]]
    reference_ns: int | None
    stamps_ns: Mapping[str, tuple[int, ...]] | None
    off_schedule: int
    padded: int

    @cached_property
    def frames(self) -> Mapping[str, npt.NDArray[np.uint8]]:
        """camera -> uint8 ``[T, H, W, 3]``, a copy."""
        return {name: np.stack(images) for name, images in self.images.items()}

    @property
    def info(self) -> dict[str, Any]:
        """JSON-serialisable summary."""
        count = len(next(iter(self.images.values())))
        out: dict[str, Any] = {"frames": count, "off_schedule": self.off_schedule, "padded": self.padded}
        if self.stamps_ns is not None:
            out |= {"reference_ns": self.reference_ns, "stamps_ns": {k: list(v) for k, v in self.stamps_ns.items()}}
        return out


class FrameHistory:
    """The frames of ONE session. Not thread-safe.

    A step works on ``copy()`` and the session adopts the copy when the step has succeeded; the copy shares images.
    ``add`` itself either takes the whole observation or, raising, nothing.

    Memory: with stamps, the span of the offsets plus ``margin_s`` counted from the camera's own newest frame, and at
    most ``max_frames`` per camera; without, as many frames as there are offsets.

    Args:
        spec: cameras, control rate and offsets.
        margin_s: how far the cameras' newest frames may lie apart before the earliest offset is lost.
        max_frames: bound per camera; the oldest go first.
    """

    def __init__(self, spec: PolicySpec, *, margin_s: float = 1.0, max_frames: int = 256) -> None:
        self._spec, self._margin_ns, self._max_frames = spec, round(margin_s * 1e9), max_frames
        self._stamped: bool | None = None
        self._buffers: dict[str, list[_Frame]] = {c.name: [] for c in spec.cameras}

    def __len__(self) -> int:
        """Frames held by the fullest camera."""
        return max(len(b) for b in self._buffers.values())

    def copy(self) -> FrameHistory:
        """An independent history that shares the images."""
        other = FrameHistory(self._spec, max_frames=self._max_frames)
        other._margin_ns, other._stamped = self._margin_ns, self._stamped
        other._buffers = self._buffers  # shared safely: add puts new lists in place, it never changes one
        return other

    def settle(self) -> None:
        """Copy the images that were only borrowed, see ``add``."""
        self._buffers = {
            name: [f if f.owned else _Frame(f.stamp, f.image.copy()) for f in frames]
            for name, frames in self._buffers.items()
        }

    def add(self, observation: Observation, *, borrow: bool = False) -> None:
        """Take the new frames of an observation; images are copied, or, with ``borrow``, when ``settle`` is called:
        before the observation is given back, and when there is time for it.

        With stamps, frames are merged by stamp; known stamps and frames older than ``session_start_ns`` are ignored.
        Without stamps every frame is new, and ``session_start_ns`` says nothing.

        Raises:
            MissingInput: a camera of the spec is absent, or has no frame since the session's start.
            InvalidImage: not uint8, not the camera's raw size, or stamped cameras with different numbers of frames.
                Without stamps each camera's frames are appended, however many (DreamZero spec 1.1).
            StaleInput: a camera's newest frame is older than everything still held of it (a clock was set back).
            ObservationError: stamps do not fit the frames, or a session mixes frames with and without stamps.
        """
        stamped = observation.frame_stamps_ns is not None
        _check_images(observation, self._spec.cameras, equal_counts=stamped)
        if self._stamped is not None and stamped != self._stamped:
            names = {True: "with stamps", False: "without stamps"}
            raise ObservationError(
                "one session cannot mix frames with and without stamps",
                field="frame_stamps_ns",
                got=names[stamped],
                expected=names[self._stamped],
                remedy="start a new session",
            )
        merged = self._merge_stamped(observation) if stamped else self._append_unstamped(observation)
        self._buffers, self._stamped = merged, stamped
        if not borrow:
            self.settle()

    def draw(self, first_call: bool) -> DrawnFrames:
        """The frames of this call; changes nothing.

        First call: the newest frame of each camera alone. Later, with stamps: nearest in time to the spec's offsets
        from the newest moment every camera has reached. Later, without: the newest ``len(frame_offsets)`` frames,
        the oldest one held repeated in front while there are fewer.

        Raises:
            MissingInput: nothing was added yet.
        """
        for name, frames in self._buffers.items():
            if not frames:
                raise MissingInput(f"camera {name!r} has no frames", field=name, expected="at least one frame")
        offsets = self._spec.frame_offsets
        reference = min(frames[-1].stamp for frames in self._buffers.values()) if self._stamped else None
        picked: dict[str, list[_Frame]] = {}
        off_schedule = padded = 0
        for name, frames in self._buffers.items():
            if first_call:
                picked[name] = frames[-1:]
            elif reference is not None:
                chosen = select_frames([f.stamp for f in frames], reference, offsets, self._spec.control_rate_hz)
                picked[name] = [frames[i] for i in chosen.indices]
                off_schedule, padded = off_schedule + chosen.off_schedule, padded + chosen.padded
            else:
                last = frames[-len(offsets) :]
                missing = len(offsets) - len(last)
                picked[name] = [frames[0]] * missing + last
                padded += missing
        stamps_ns = None
        if reference is not None:
            stamps_ns = {name: tuple(f.stamp for f in frames) for name, frames in picked.items()}
        images = {name: [f.image for f in frames] for name, frames in picked.items()}
        return DrawnFrames(images, reference, stamps_ns, off_schedule, padded)

    def _append_unstamped(self, observation: Observation) -> dict[str, list[_Frame]]:
        keep = len(self._spec.frame_offsets)
        out = {}
        for name, frames in self._buffers.items():
            arrival = frames[-1].stamp + 1 if frames else 0
            # Copied: a view would keep the message it came from alive, and its owner may write into it.
            new = [_Frame(arrival + i, image, False) for i, image in enumerate(observation.frames[name])]
            out[name] = (frames + new)[-keep:]
        return out

    def _merge_stamped(self, observation: Observation) -> dict[str, list[_Frame]]:
        start = observation.session_start_ns
        merged: dict[str, list[_Frame]] = {}
        for name, held in self._buffers.items():
            stamps = _checked_stamps(observation, name)
            if held and stamps[-1] < held[0].stamp:
                raise StaleInput(
                    f"camera {name!r}: the observation is older than everything the session still holds",
                    field=name,
                    got=f"newest stamp {stamps[-1]} ns",
                    expected=f"at least {held[0].stamp} ns",
                    remedy="the clock was set back or observations arrive out of order: start a new session",
                )
            by_stamp = {f.stamp: f for f in held}
            for stamp, image in zip(stamps, observation.frames[name], strict=True):
                if stamp not in by_stamp:
                    by_stamp[stamp] = _Frame(stamp, image, False)
            merged[name] = [by_stamp[s] for s in sorted(by_stamp) if start is None or s >= start]
            if not merged[name]:
                raise MissingInput(
                    f"camera {name!r} has no frame since the session started",
                    field=name,
                    got=f"newest stamp {stamps[-1]} ns",
                    expected=f"at least {start} ns",
                    remedy="wait for the camera, or check its clock",
                )
        return self._pruned(merged)

    def _pruned(self, buffers: dict[str, list[_Frame]]) -> dict[str, list[_Frame]]:
        """Drop what no later call can pick: before the last frame at or before the earliest offset of now."""
        reach = step_ns(min(self._spec.frame_offsets), self._spec.control_rate_hz)
        reference = min(frames[-1].stamp for frames in buffers.values())
        out = {}
        for name, frames in buffers.items():
            # The second bound holds when another camera's clock is far behind: memory must not grow with the gap.
            earliest = max(reference + reach, frames[-1].stamp + reach - self._margin_ns)
            first = max(bisect_right([f.stamp for f in frames], earliest) - 1, 0)
            out[name] = frames[first:][-self._max_frames :]
        return out


def _check_images(observation: Observation, cameras: Sequence[CameraSpec], *, equal_counts: bool) -> None:
    if not isinstance(observation.frames, Mapping):
        raise ObservationError(
            "the frames are not a mapping",
            field="frames",
            got=type(observation.frames).__name__,
            expected=f"cameras {[c.name for c in cameras]} -> uint8 [T, H, W, 3]",
        )
    counts = {}
    for camera in cameras:
        name = camera.name
        if name not in observation.frames:
            raise MissingInput(
                f"camera {name!r} is missing",
                field=name,
                got=f"cameras {sorted(map(str, observation.frames))}",
                expected=f"cameras {[c.name for c in cameras]}",
                remedy="check the camera's topic or the request's key; an image is never made up",
            )
        image = observation.frames[name]
        wanted = f"uint8 [T, {camera.height}, {camera.width}, 3], RGB, T >= 1"
        got = f"{image.dtype} {list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
        if not isinstance(image, np.ndarray) or image.dtype != np.uint8:
            raise InvalidImage(f"camera {name!r}: images must be uint8 arrays", field=name, got=got, expected=wanted)
        if image.shape[1:] != (camera.height, camera.width, 3) or not len(image):
            raise InvalidImage(
                f"camera {name!r}: wrong image shape",
                field=name,
                got=got,
                expected=wanted,
                remedy="height before width, three channels last, frames first; resize before sending",
            )
        counts[name] = len(image)
    if equal_counts and len(set(counts.values())) > 1:
        raise InvalidImage(
            "cameras carry different numbers of frames",
            field=", ".join(counts),
            got=counts,
            expected="the same number for every camera",
        )


def _checked_stamps(observation: Observation, name: str) -> list[int]:
    assert observation.frame_stamps_ns is not None
    field = f"frame_stamps_ns[{name}]"
    if name not in observation.frame_stamps_ns:
        raise ObservationError(
            f"camera {name!r} has no stamps", field=field, got=sorted(map(str, observation.frame_stamps_ns))
        )
    stamps = np.asarray(observation.frame_stamps_ns[name])
    count = len(observation.frames[name])
    if stamps.dtype.kind not in "iu" or stamps.shape != (count,):
        raise ObservationError(
            f"camera {name!r}: one integer stamp per frame is needed",
            field=field,
            got=f"{stamps.dtype} {list(stamps.shape)}",
            expected=f"int64 [{count}] in ns",
        )
    out = [int(s) for s in stamps]
    if any(b <= a for a, b in pairwise(out)):
        raise ObservationError(
            f"camera {name!r}: stamps must strictly increase", field=field, got=out[:8], expected="oldest first"
        )
    return out
