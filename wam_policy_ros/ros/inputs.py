"""What the policy gets to see: the soundness of all streams, and the observation of one moment.

Knows no rclpy: ``subscriptions`` feeds the streams from topics, a replay feeds them from a recording.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from wam_policy_ros.contract.errors import ConfigError, MissingInput, StaleInput
from wam_policy_ros.contract.history import Selection, select_frames
from wam_policy_ros.contract.interface import CameraSpec, PolicySpec

from .bridge import Bridge
from .drops import Log
from .encodings import BY_NAME
from .frames import DecodeLater, Frame, Make
from .joint_states import JointStateInput
from .joints import JointMap
from .messages import VIEWS, ImageRules
from .observations import Foreseen, PendingObservation, picture_maker
from .parameters import NodeParameters
from .streams import CameraInput, Limits, Now

__all__ = ["CameraInput", "Inputs", "JointStateInput", "Now"]

THIN_STEPS = 0.45
"""Old frames closer than this part of a control step are dropped. Not 0.5: of a camera with twice the control rate
(30 Hz) jitter would then drop every other frame or none, and what the policy sees would be off by half a step."""

LOSSY_BYTES = 600_000
"""So much raw image data at one moment overflows the shared-memory segment that Fast DDS has by default (0.5 MB): with
best effort most frames of larger bursts are lost (ROS spec 1.3). Three cameras of 320x180 (0.52 MB) were measured to
lose nothing."""


class Inputs:
    """All streams of one robot.

    Args:
        params: topics, ages.
        spec: cameras, frame schedule, rate.
        joints: names and mapping of the joints.
        warn: log function.
        resolve: topic -> its full name, for people.
        tell: log function for what is worth knowing, but no warning.
        bridge: see ``bridge.find_bridge``.
        decode_ahead: makes pictures of frames that are kept before a request needs them; returns at once.
    """

    def __init__(
        self,
        params: NodeParameters,
        spec: PolicySpec,
        joints: JointMap,
        *,
        warn: Log,
        resolve: Callable[[str], str] = lambda topic: topic,
        tell: Log = lambda line: None,
        bridge: Bridge | None = None,
        decode_ahead: DecodeLater | None = None,
    ) -> None:
        self._decode_ahead, self._makers = decode_ahead, dict[str, Make]()
        self._params, self._spec, self._joints, self._warn = params, spec, joints, warn
        self._burst_said = False
        tolerance, source = params.sync_future_tolerance_s, params.sync_stamp_source
        limits = Limits(params.sync_max_age_s, tolerance, source)
        # What a request can look at: back from the newest moment of the slowest camera, which may be one age old.
        reach_s = -min(spec.frame_offsets) / spec.control_rate_hz + params.sync_max_age_s + params.sync_max_skew_s
        rules = image_rules(params, spec.cameras, bridge)
        self.cameras = {
            c.name: CameraInput(
                c.name,
                topic,
                limits,
                size=(c.height, c.width),
                keep_s=reach_s + 2.0 / spec.control_rate_hz,
                spacing_s=THIN_STEPS / spec.control_rate_hz,
                warn=warn,
                shown=resolve(topic),
                hint=self._lossy_hint,
                first_size=self._warn_of_burst,
                rules=rules[c.name],
                min_std=params.image_min_std,
                tell=tell,
                settled=partial(self._ahead, c.name),
            )
            for c, topic in zip(spec.cameras, camera_topics(params, spec.cameras), strict=True)
        }
        joint_limits = Limits(params.sync_joint_max_age_s, tolerance, source)
        self.joint_states = JointStateInput(
            joints.names, params.joints_topic, joint_limits, warn=warn, shown=resolve(params.joints_topic), tell=tell
        )

    def decode_for(self, cameras: Sequence[CameraSpec]) -> None:
        """From now on make pictures ahead, in the raw sizes of the policy, which are known when it is loaded."""
        if self._params.image_min_std == 0:  # a spread is read off the messages
            for c in cameras:
                stream = self.cameras[c.name]
                self._makers[c.name] = picture_maker(c, stream.shown, stream.rules, self._params.image_resize)

    def decode_newest(self) -> None:
        """A request is due with a frame that is still missing: make pictures of the others of its set meanwhile."""
        if self._params.image_compressed or (common_ns := self.newest_common_ns()) is None:
            return  # of compressed ones the request looks at size and spread when it decodes them
        for name, camera in self.cameras.items():
            if camera.frames[-1].stamp_ns > common_ns:
                self._ahead(name, camera.frames[-1], urgent=True)

    def _ahead(self, camera: str, frame: Frame, *, urgent: bool = False) -> None:
        if self._decode_ahead is not None and camera in self._makers:
            self._decode_ahead(frame, self._makers[camera], urgent)

    def _lossy_hint(self) -> str | None:
        """What to do about lost frames when the images are raw, large, and sent with best effort; else None."""
        raw = [c for c in self.cameras.values() if not is_compressed(c.topic)]
        sizes = [c.got_size for c in raw if c.got_size is not None]
        if self._params.image_reliable or not sizes:
            return None
        # A camera that has never come is taken to be like the others.
        burst = 3 * sum(h * w for h, w in sizes) * len(raw) // len(sizes)
        if burst <= LOSSY_BYTES:
            return None
        return (
            f"{burst / 1e6:.1f} MB of raw images at a time may get lost with best effort: set image.reliable: true or "
            "image.compressed: true, or start the cameras with FASTDDS_DEFAULT_PROFILES_FILE set "
            "to config/fastdds.xml of this package"
        )

    def _warn_of_burst(self) -> None:
        if not self._burst_said and (hint := self._lossy_hint()) is not None:
            self._burst_said = True
            self._warn(hint)

    def clear(self) -> None:
        """Forget everything received, e.g. after a jump of the clock."""
        for camera in self.cameras.values():
            camera.clear()
        self.joint_states.clear()

    def check(self, now: Now) -> None:
        """Are all streams sound at this moment? To be asked at every control tick.

        Raises:
            MissingInput, StaleInput: the first stream that is not; names topic, age and limit.
        """
        streams: list[CameraInput | JointStateInput] = [*self.cameras.values(), self.joint_states]
        if missing := [error for stream in streams if (error := stream.missing()) is not None]:
            raise _all_of(missing)
        for stream in streams:
            stream.check(now)
        skew_s, earliest = self.skew()
        if skew_s > self._params.sync_max_skew_s:
            hint = self._lossy_hint()
            raise StaleInput(
                "the cameras are not synchronous",
                field=earliest,
                got=f"stamps {skew_s:.3f} s apart at the same moment, earliest {earliest}",
                expected=f"at most {self._params.sync_max_skew_s} s",
                remedy="synchronise the cameras, or raise sync.max_skew_s" + (f"; {hint}" if hint else ""),
            )

    def skew(self) -> tuple[float, str]:
        """How far the cameras' stamps are apart at ``reference_ns`` [s], and the topic of the earliest.

        Every camera must have a frame.
        """
        reference = self.reference_ns()
        nearest = {c.shown: c.nearest(reference) for c in self.cameras.values()}
        earliest = min(nearest, key=nearest.__getitem__)
        return (max(nearest.values()) - nearest[earliest]) * 1e-9, earliest

    def newest_common_ns(self) -> int | None:
        """As ``reference_ns``, or None when a camera has no frame."""
        return self.reference_ns() if all(c.frames for c in self.cameras.values()) else None

    def newest_arrival_s(self, now: Now) -> float:
        """How long ago the newest frame of any camera arrived, on the steady clock."""
        return (now.steady_ns - max(c.arrived_ns for c in self.cameras.values())) * 1e-9

    def reference_ns(self) -> int:
        """The newest moment that every camera has reached; after ``check``."""
        return min(c.frames[-1].stamp_ns for c in self.cameras.values())

    def snapshot(self, now: Now, session_start_ns: int, prompt: str) -> PendingObservation:
        """Choose the frames and the state of one moment.

        Args:
            now: both clocks.
            session_start_ns: older frames are not used.
            prompt: the instruction.

        Raises:
            MissingInput: a stream is missing, or has nothing since the session's start.
            StaleInput: see ``check``.
        """
        self.check(now)
        reference = self.reference_ns()
        usable = {name: camera.since(session_start_ns) for name, camera in self.cameras.items()}
        for name, frames in usable.items():
            if not frames or reference < session_start_ns:
                late = name if not frames else min(self.cameras.values(), key=lambda c: c.frames[-1].stamp_ns).name
                raise MissingInput(f"camera {late!r}: no frame of this session yet", field=late)
        if self._params.image_min_std:
            usable = self._from_first_picture(usable, reference)
        picks: dict[str, Selection] = {}
        newest: dict[str, Frame] = {}
        for name, frames in usable.items():
            stamps = [f.stamp_ns for f in frames]
            rate = self._spec.control_rate_hz
            picks[name] = select_frames(stamps, reference, self._spec.frame_offsets, rate)
            newest[name] = frames[select_frames(stamps, reference, (0,), rate).indices[0]]
        return PendingObservation(
            frames=_same_number(usable, {n: sorted(set(p.indices)) for n, p in picks.items()}),
            newest=newest,
            topics={n: c.shown for n, c in self.cameras.items()},
            state=self._joints.state_fields(self.joint_states.at(reference)),
            prompt=prompt,
            stamp_ns=reference,
            session_start_ns=session_start_ns,
            resize=self._params.image_resize,
            saw_size=lambda name, size: self.cameras[name].saw_size(size),
            saw_spread=lambda name, value: self.cameras[name].saw_spread(value),
            rules={n: c.rules for n, c in self.cameras.items()},
            off_schedule=sum(p.off_schedule for p in picks.values()),
            padded=sum(p.padded for p in picks.values()),
            arrived_ns=max(f.arrived_ns for f in newest.values()),
        )

    def follow(self, spec: PolicySpec) -> None:
        """Look at the moments that this policy looks at. Frames are kept for those of the embodiment, which must reach
        as far back (``checks.check_fit``)."""
        self._spec = replace(self._spec, frame_offsets=spec.frame_offsets)

    def period_ns(self, count: int = 8) -> int | None:
        """Between sets of frames: the slowest camera's mean over its last frames; None while there are too few."""
        streams = [camera.frames for camera in self.cameras.values()]
        if any(len(frames) < count for frames in streams):
            return None
        span_ns = max(frames[-1].stamp_ns - frames[-count].stamp_ns for frames in streams)
        return span_ns // (count - 1) if span_ns > 0 else None

    def foresee(self, reference_ns: int, session_start_ns: int) -> Foreseen | None:
        """What a request whose newest frames are of ``reference_ns``, a moment not yet reached, will look at.

        None when it will not look as far back as the policy wants to.
        """
        offsets, rate = self._spec.frame_offsets[:-1], self._spec.control_rate_hz
        picked: dict[str, tuple[Frame, ...]] = {}
        for name, camera in self.cameras.items():
            frames = camera.since(session_start_ns)
            if not offsets or not frames:
                return None
            found = select_frames([f.stamp_ns for f in frames], reference_ns, offsets, rate)
            if found.padded or len(set(found.indices)) != len(offsets):
                return None
            picked[name] = tuple(frames[i] for i in found.indices)
        makers = {
            c.name: picture_maker(c, self.cameras[c.name].shown, self.cameras[c.name].rules, self._params.image_resize)
            for c in self._spec.cameras
        }
        return Foreseen(picked, makers)

    def _from_first_picture(self, usable: Mapping[str, list[Frame]], reference_ns: int) -> dict[str, list[Frame]]:
        """Leave out what was seen before every camera showed a picture, see ``image.min_std``."""
        shown = {name: self.cameras[name].varied(frames) for name, frames in usable.items()}
        for name, frames in shown.items():
            if not frames or reference_ns < frames[0].stamp_ns:
                raise MissingInput(
                    f"camera {name!r}: uniform image, no picture of this session yet",
                    field=name,
                    got=f"{len(usable[name]) - len(frames)} frames of one colour on {self.cameras[name].shown}",
                    expected=f"a standard deviation of at least {self._params.image_min_std:g} (image.min_std)",
                )
        start_ns = max(f[0].stamp_ns for f in shown.values()) - round(self._params.sync_max_skew_s * 1e9)
        return {name: [f for f in frames if f.stamp_ns >= start_ns] for name, frames in shown.items()}

    def counters(self) -> dict[str, Any]:
        """Received and dropped messages per stream; JSON-serialisable."""
        streams: dict[str, CameraInput | JointStateInput] = {**self.cameras, self.joint_states.topic: self.joint_states}
        out: dict[str, Any] = {
            n: {"received": s.received, "dropped": dict(s.drops.by_reason)} for n, s in streams.items()
        }
        for name, camera in self.cameras.items():
            out[name]["uniform"] = camera.uniform
        return out


def _all_of(missing: Sequence[MissingInput]) -> MissingInput:
    if len(missing) == 1:
        return missing[0]
    return MissingInput(
        "; ".join(f"{error.what} ({error.got})" for error in missing),
        field=", ".join(error.field for error in missing),
        remedy="check the publishers, cameras.topics, joints.topic and joints.names, and the remappings",
    )


def _same_number(usable: Mapping[str, list[Frame]], picks: Mapping[str, list[int]]) -> dict[str, tuple[Frame, ...]]:
    """Every camera the same number of different frames: at the start of a session a camera that runs out of step can
    have one pick less; its oldest other frame is added, or the others' oldest pick is left out."""
    count = min(max(len(p) for p in picks.values()), *(len(f) for f in usable.values()))
    out = {}
    for name, frames in usable.items():
        chosen = list(picks[name])[-count:]
        spare = [i for i in range(len(frames)) if i not in chosen]
        chosen = sorted(chosen + spare[: count - len(chosen)])
        out[name] = tuple(frames[i] for i in chosen)
    return out


def camera_topics(params: NodeParameters, cameras: Sequence[CameraSpec]) -> tuple[str, ...]:
    """Topics in camera order.

    Raises:
        ConfigError: the wrong number of topics was configured, or a topic for a camera that the embodiment has not.
    """
    given, names = params.cameras_topics, [c.name for c in cameras]
    topics = given or tuple(f"{c.topic}/image_raw" for c in cameras)
    if named := [t for t in given if ":=" in t]:
        pairs = dict(t.split(":=", 1) for t in named)
        if len(named) != len(given) or len(pairs) != len(named) or set(pairs) != set(names):
            raise ConfigError(
                "cameras.topics does not name the embodiment's cameras",
                got=list(given),
                expected=f"CAMERA:=TOPIC once for each of the cameras {names}, or topics alone in this order",
            )
        topics = tuple(pairs[name] for name in names)
    shared = len(set(topics)) != len(topics) and set(_views(params, cameras)) == {"whole"}
    if len(topics) != len(cameras) or shared or "" in topics:
        raise ConfigError(
            "cameras.topics does not fit the embodiment",
            got=list(topics),
            expected=f"{len(cameras)} different topics, for the cameras {names} in this order",
        )
    if not params.image_compressed:
        return topics
    return tuple(t if t.endswith("/compressed") else f"{t}/compressed" for t in topics)


def is_compressed(topic: str) -> bool:
    """Whether the images of a topic, as subscribed, are ``CompressedImage``: image_transport names them so."""
    return topic.endswith("/compressed")


def image_rules(
    params: NodeParameters, cameras: Sequence[CameraSpec], bridge: Bridge | None = None
) -> dict[str, ImageRules]:
    """How the messages of each camera are read.

    Raises:
        ConfigError: ``image.encodings`` or ``image.views`` has the wrong length or an unknown entry, or an encoding is
            told for compressed images.
    """
    encodings = _one_each("image.encodings", params.image_encodings, cameras, ("auto", *BY_NAME), "auto")
    for topic, encoding in zip(camera_topics(params, cameras), encodings, strict=True):
        if is_compressed(topic) and encoding != "auto":
            raise ConfigError(
                "image.encodings cannot be used with compressed images, which say themselves what they are",
                got=f"{encoding} for {topic}",
                remedy="put auto in its place, or subscribe the raw images",
            )
    views = _views(params, cameras)
    return {
        c.name: ImageRules("" if e == "auto" else e, v, bridge)
        for c, e, v in zip(cameras, encodings, views, strict=True)
    }


def _views(params: NodeParameters, cameras: Sequence[CameraSpec]) -> tuple[str, ...]:
    return _one_each("image.views", params.image_views, cameras, VIEWS, "whole")


def _one_each(
    name: str, given: tuple[str, ...], cameras: Sequence[CameraSpec], known: Sequence[str], default: str
) -> tuple[str, ...]:
    values = given or (default,) * len(cameras)
    if len(values) != len(cameras) or not set(values) <= set(known):
        raise ConfigError(
            f"{name} does not fit",
            got=list(values),
            expected=f"for each of the cameras {[c.name for c in cameras]}, in this order, one of {list(known)}",
        )
    return values
