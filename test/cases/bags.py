"""Cases of kind ``mcap``: a recording through the node's own path, then what came in and what went out."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from wam_policy_ros.contract.errors import InvalidImage
from wam_policy_ros.contract.fakes import HoldPolicy
from wam_policy_ros.ros.messages import image_to_rgb, stamp_to_ns
from wam_policy_ros.ros.streams import CameraInput
from wam_policy_ros.ros.virtual import CLOCK_TOPIC, Arrival, Call, VirtualRun

from . import robot
from .case import Case, Outcome

LATENCY_S = 0.1
TAIL_S = 6.0
"""Beyond the 5 s in which a node must say what is wrong."""


@dataclass
class Played:
    """One recording, played.

    Attributes:
        pictures: name in the cases -> accepted pictures in native size, RGB, in order of arrival.
        sent_ns: name in the cases -> stamps of all pictures in the recording.
        first_ns: joint -> steady time of its first position.
        end_ns: steady time of the last message.
        clock_back_ns: steady time at which /clock went back.
    """

    case: Case
    run: VirtualRun
    pictures: dict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    sent_ns: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    first_ns: dict[str, int] = field(default_factory=dict)
    end_ns: int = 0
    clock_back_ns: int | None = None

    @property
    def arrivals(self) -> list[Arrival]:
        return self.run.journal.arrivals

    @property
    def calls(self) -> list[Call]:
        return [c for c in self.run.worker.calls if c.at_ns <= self.end_ns]

    @property
    def said(self) -> list[Any]:
        """States while the recording was played."""
        return [s for s in self.run.journal.said if s.at_ns <= self.end_ns]

    @property
    def message(self) -> str:
        """All that a person was told, the time after the recording included."""
        journal = self.run.journal
        lines = [f"{s.substate}: {s.reason}" for s in journal.said] + [f"{lv}: {line}" for _, lv, line in journal.log]
        return "\n".join(dict.fromkeys(lines))

    @property
    def drops(self) -> dict[str, list[Arrival]]:
        """Stream -> what was dropped."""
        out: dict[str, list[Arrival]] = defaultdict(list)
        for arrival in self.arrivals:
            if arrival.reason:
                out[arrival.stream].append(arrival)
        return out


def play(case: Case, **changes: Any) -> Played:
    """Play the case's recording to a node with the reference configuration, up to ``changes`` of its parameters."""
    pytest.importorskip("rosbags", reason="reading recordings needs the package rosbags (extra replay)")
    from wam_policy_ros.ros.recording import Recording
    from wam_policy_ros.ros.replay import replay

    extra = case.yaml() if any(f.endswith(".yaml") for f in case.files) else {}
    simulated = bool(extra.get("use_sim_time", case.use_sim_time))
    with Recording(case.path()) as recording:
        topics = _topics(case, recording.contents.topics)
        streams = {where: name for name, where in topics.items()}
        played: list[Played] = []

        def on_message(run: VirtualRun, topic: str, msg: Any) -> None:
            if not played:
                played.append(Played(case, run))
            _note(played[0], streams.get(topic), topic, msg)

        run = replay(
            recording,
            robot.parameters(case, topics, **changes),
            HoldPolicy(),
            simulated=simulated,
            latency_s=lambda call, measured_s: LATENCY_S,
            tail_s=TAIL_S,
            keep_observations=True,
            on_message=on_message,
        )
    return played[0] if played else Played(case, run)


def _topics(case: Case, there: Mapping[str, Any]) -> dict[str, str]:
    """Name in the cases -> topic; compressed where the recording has nothing else."""
    out = {}
    for name in case.config["cameras"]:
        raw = robot.topic(case.config, name)
        out[name] = f"{raw}/compressed" if raw not in there and f"{raw}/compressed" in there else raw
    return out


def _note(played: Played, camera: str | None, topic: str, msg: Any) -> None:
    run = played.run
    played.end_ns = run.clock.steady_ns
    if topic == CLOCK_TOPIC:
        last = played.sent_ns[CLOCK_TOPIC][-1:] or [0]
        if stamp_to_ns(msg.clock) < last[0]:
            played.clock_back_ns = run.clock.steady_ns
        played.sent_ns[CLOCK_TOPIC].append(stamp_to_ns(msg.clock))
    elif camera is not None:
        played.sent_ns[camera].append(stamp_to_ns(msg.header.stamp))
        if not played.arrivals[-1].reason:
            stream = run.topics[topic][0]
            assert isinstance(stream, CameraInput)
            with suppress(InvalidImage):  # the node finds it out when it needs the picture
                played.pictures[camera].append(image_to_rgb(msg, topic, stream.rules))
    elif topic == played.case.config["joint_states_topic"]:
        for name, _ in zip(msg.name, msg.position, strict=False):
            played.first_ns.setdefault(name, run.clock.steady_ns)


def run(case: Case) -> Outcome:
    """Play the recording and judge it."""
    played = play(case)
    facts = {
        "alive": not played.run.control.fault and played.run.control.active,
        "trajectories_published": sum(not s.hold for s in played.run.journal.sent),
        "resets": played.run.control.counters["clock_jumps"],
        "dropped": sum(len(d) for d in played.drops.values()),
    }
    if len(played.drops) == 1:
        stream = next(iter(played.drops))
        facts["accepted"] = sum(a.stream == stream and not a.reason for a in played.arrivals)
    from .bag_checks import checks

    _sane(played)
    return Outcome(verdicts(played), played.message, facts, checks(played))


def verdicts(played: Played) -> frozenset[str]:
    said, out = played.said, set()
    if played.drops:
        out.add("drop_sample")
    if played.run.control.counters["clock_jumps"]:
        out.add("reset_episode")
    waited = said[-1].substate == "waiting" and not played.calls
    if any(s.substate == "holding" for s in said) or waited:
        out.add("hold")
    running = said[-1].substate == "running" or (said[-1].substate == "waiting" and bool(played.calls))
    if running and not played.drops and all(_explained(played, s) for s in said if s.substate == "holding"):
        out.add("accept")
    return frozenset(out)


def _explained(played: Played, said: Any) -> bool:
    """Whether something had not come for longer than it may, when the node held."""
    limits = played.case.config["timing"]
    last: dict[str, int] = {}
    for arrival in played.arrivals:
        if arrival.at_ns <= said.at_ns and not arrival.reason:
            last[arrival.stream] = arrival.at_ns
    for stream, at_ns in last.items():
        joint = stream == played.case.config["joint_states_topic"]
        if (said.at_ns - at_ns) * 1e-9 >= limits["joint_stale_after_s" if joint else "image_stale_after_s"] - 1e-3:
            return True
    return said.reason.startswith("the node's clock jumped")


def _sane(played: Played) -> None:
    """What holds for every recording: nothing is made up, and no age is absurd."""
    for number in re.findall(r"(-?\d+(?:\.\d+)?) s (?:ago|ahead)", played.message):
        assert 0 <= float(number) < 1e8, f"an age of {number} s: {played.message}"
    for call in played.calls:
        assert call.observation is not None, call.result.error
        for name, picture in call.observation.frames.items():
            assert picture.shape[1:] == (180, 320, 3) and picture.dtype == np.uint8, name
        for name, value in call.observation.state.items():
            assert np.isfinite(value).all(), name
