"""What a request carries from the streams to the policy: messages that were chosen, and how they become pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from wam_policy_ros.contract.interface import CameraSpec, CommittedRows, Observation

from .frames import Frame, Make
from .messages import AS_LABELLED, ImageRules, fit, image_size, image_to_rgb, spread


@dataclass(frozen=True)
class PendingObservation:
    """An observation whose images are still messages; the worker turns them into arrays.

    Attributes:
        frames: camera -> chosen messages, oldest first, the same number for every camera, no message twice.
        newest: camera -> the message nearest to ``stamp_ns``.
        topics: camera -> topic, for messages.
        state: field -> float64 ``[dim]`` in the policy's units, at ``stamp_ns``.
        stamp_ns: the newest moment that every camera has reached.
        session_start_ns: no frame is older.
        resize: ``pad`` or ``stretch``.
        saw_size: told camera and decoded (height, width) of a newest image that did not tell it before; may raise.
        saw_spread: told camera and standard deviation of a newest image that only decoding shows.
        rules: camera -> how its messages are read.
        committed: rows of the running plan for a policy that takes them into account, see ``Observation.committed``.
        off_schedule, padded: see ``contract.history.Selection``, summed over cameras.
        arrived_ns: when the last of ``newest`` arrived, on the steady clock.
    """

    frames: Mapping[str, tuple[Frame, ...]]
    newest: Mapping[str, Frame]
    topics: Mapping[str, str]
    state: Mapping[str, npt.NDArray[np.float64]]
    prompt: str
    stamp_ns: int
    session_start_ns: int
    resize: str
    saw_size: Callable[[str, tuple[int, int]], None]
    saw_spread: Callable[[str, float], None] = lambda camera, value: None
    rules: Mapping[str, ImageRules] = field(default_factory=dict)
    committed: CommittedRows | None = None
    off_schedule: int = 0
    padded: int = 0
    arrived_ns: int = 0

    def materialise(self, cameras: Sequence[CameraSpec], *, first_call: bool) -> Observation:
        """Decode and resize.

        Args:
            cameras: names and raw sizes.
            first_call: take the newest frame alone.

        Raises:
            InvalidImage: a message cannot be decoded, or its size is absurd.
        """
        images: dict[str, npt.NDArray[np.uint8]] = {}
        stamps: dict[str, npt.NDArray[np.int64]] = {}
        # The camera that came last first: the others' newest images are being decoded ahead at this very moment.
        for camera in sorted(cameras, key=lambda c: -self.newest[c.name].arrived_ns):
            chosen = (self.newest[camera.name],) if first_call else self.frames[camera.name]
            topic, rules = self.topics[camera.name], self.rules.get(camera.name, AS_LABELLED)
            make = picture_maker(camera, topic, rules, self.resize)
            self._look(chosen[-1], camera, topic, rules)
            images[camera.name] = np.stack([f.picture(make) for f in chosen])
            stamps[camera.name] = np.array([f.stamp_ns for f in chosen], dtype=np.int64)
        return Observation(
            frames={c.name: images[c.name] for c in cameras},
            state=self.state,
            prompt=self.prompt,
            stamp_ns=self.stamp_ns,
            frame_stamps_ns=stamps,
            session_start_ns=self.session_start_ns,
            committed=None if first_call else self.committed,
        )

    def _look(self, newest: Frame, camera: CameraSpec, topic: str, rules: ImageRules) -> None:
        """At a newest image of which only decoding tells the size or the spread."""
        msg = newest.msg
        if msg is None:  # looked at before
            return
        sized, seen = image_size(msg, rules) is not None, spread(msg, rules) is not None
        if sized and seen:
            return
        rgb = image_to_rgb(msg, topic, rules)
        if not sized:
            self.saw_size(camera.name, (rgb.shape[0], rgb.shape[1]))
        if not seen:
            self.saw_spread(camera.name, float(rgb[::8, ::8].std(axis=(0, 1)).max()))
        newest.picture(lambda _: fit(rgb, camera.height, camera.width, self.resize))


@dataclass(frozen=True)
class Foreseen:
    """Frames that a call in the near future will look at, but its newest ones, which have not come yet.

    Attributes:
        frames: camera -> one frame per offset of the policy but the last.
        makers: camera -> how its messages become pictures.
    """

    frames: Mapping[str, tuple[Frame, ...]]
    makers: Mapping[str, Make]

    def __len__(self) -> int:
        return min(len(frames) for frames in self.frames.values())

    def views(self, slot: int) -> dict[str, npt.NDArray[np.uint8]]:
        """Pictures of one offset. Raises InvalidImage when a message cannot be decoded."""
        return {name: frames[slot].picture(self.makers[name]) for name, frames in self.frames.items()}


def picture_maker(camera: CameraSpec, topic: str, rules: ImageRules, resize: str) -> Make:
    """From a message to the picture in the camera's raw size; raises InvalidImage."""
    return lambda msg: fit(image_to_rgb(msg, topic, rules, copy=False), camera.height, camera.width, resize)
