"""How streams and control loop are at one moment, for ``~/state``, ``~/status`` and ``/diagnostics``.

Knows no rclpy. Reads the inputs, changes nothing in them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from wam_policy_ros.contract.errors import ObservationError

from .inputs import Inputs
from .joint_states import JointStateInput
from .meters import Rate, Ticks
from .streams import CameraInput, Now


@dataclass(frozen=True)
class StreamReport:
    """One topic.

    Attributes:
        name: camera, or ``joints``.
        topic: its full name.
        detail: size of the images, or the joint that is oldest.
        received: messages so far, dropped ones included.
        dropped: reason -> number so far.
        arrival_age_s: since the last usable message arrived, on the steady clock; None when none ever came.
        stamp_age_s: since its stamp, on the node's clock.
        problem: why the stream is not usable now; empty when it is.
        remedy: what to do about it; empty when there is no problem.
    """

    name: str
    topic: str
    detail: str
    received: int
    dropped: dict[str, int]
    arrival_age_s: float | None
    stamp_age_s: float | None
    problem: str = ""
    remedy: str = ""


class Monitor:
    """Watches one configuration.

    Args:
        inputs: its streams.
        nominal_hz: control rate of the policy.

    Attributes:
        ticks: to be told of every control tick.
    """

    def __init__(self, inputs: Inputs, nominal_hz: float) -> None:
        self.ticks = Ticks()
        self._inputs, self._nominal_hz = inputs, nominal_hz
        self._tick_rate = Rate()
        self._stream_rates: dict[str, Rate] = {}

    def summary(self, now: Now) -> dict[str, Any]:
        """Its part of ``~/state``: ``streams`` with rates, ``skew_s``, ``control_rate_hz``; JSON-serialisable."""
        now_s = now.steady_ns * 1e-9
        streams = report(self._inputs, now)
        for stream in streams:
            rate = self._stream_rates.setdefault(stream["name"], Rate())
            stream["rate_hz"] = rate.update(now_s, stream["received"])
        complete = all(camera.frames for camera in self._inputs.cameras.values())
        return {
            "streams": streams,
            "skew_s": self._inputs.skew()[0] if complete else None,
            "control_rate_hz": {
                "nominal": self._nominal_hz,
                "achieved": self._tick_rate.update(now_s, self.ticks.count),
                "longest_gap_s": self.ticks.longest_gap_s(),
            },
        }


def report(inputs: Inputs, now: Now) -> list[dict[str, Any]]:
    """Every stream, cameras first; JSON-serialisable."""
    streams: list[CameraInput | JointStateInput] = [*inputs.cameras.values(), inputs.joint_states]
    return [asdict(_one(stream, now)) for stream in streams]


def _one(stream: CameraInput | JointStateInput, now: Now) -> StreamReport:
    newest, detail = None, ""
    if isinstance(stream, CameraInput):
        name = stream.name
        if stream.frames:
            newest = stream.frames[-1].stamp_ns, stream.arrived_ns
        if (size := stream.got_size) is not None:
            detail = f"{size[1]}x{size[0]}"
    else:
        name = "joints"
        if (oldest := stream.oldest()) is not None:
            newest, detail = oldest[1:], f"oldest {oldest[0]}"
    problem = remedy = ""
    try:
        stream.check(now)
    except ObservationError as error:
        problem = str(error).removesuffix(f"; remedy: {error.remedy}")
        remedy = error.remedy or "look at what is published on this topic, and with which settings"
    return StreamReport(
        name=name,
        topic=stream.shown,
        detail=detail,
        received=stream.received,
        dropped=dict(stream.drops.by_reason),
        arrival_age_s=None if newest is None else (now.steady_ns - newest[1]) * 1e-9,
        stamp_age_s=None if newest is None else (now.ros_ns - newest[0]) * 1e-9,
        problem=problem,
        remedy=remedy,
    )
