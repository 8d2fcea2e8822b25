"""What the expectations of a recording mean: one check for each key."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import numpy as np
import yaml

from wam_policy_ros.ros.encodings import BY_NAME, SUPPORTED
from wam_policy_ros.ros.parameters import NodeParameters
from wam_policy_ros.ros.virtual import CLOCK_TOPIC

from . import robot
from .bags import LATENCY_S, Played, play, verdicts
from .case import Case, Check, Outcome

BURST_S = 0.02
SHOWN = 3
"""So many supported encodings in a line are a list of them."""


def checks(played: Played) -> dict[str, Check]:
    def states(expected: Any, case: Case, outcome: Outcome, field_name: str) -> str | None:
        rows = [c.observation.state[field_name] for c in played.calls if c.observation is not None]
        tolerance = float(case.expect.get("tolerance", 1e-6))
        wrong = [r.tolist() for r in rows if np.abs(r - np.atleast_1d(expected)).max() > tolerance]
        return f"the policy saw {wrong or 'nothing'}" if wrong or not rows else None

    def log_once(expected: Any, case: Case, outcome: Outcome) -> str | None:
        lines = [line for _, level, line in played.run.journal.log if "(dropped;" in line]
        kinds = {(a.stream, a.reason) for a in played.arrivals if a.reason}
        return None if (len(lines) == len(kinds)) is bool(expected) else f"{len(lines)} lines for {kinds}: {lines}"

    def lists_supported(expected: Any, case: Case, outcome: Outcome) -> str | None:
        listed = max((sum(repr(e) in line for e in SUPPORTED) for _, _, line in played.run.journal.log), default=0)
        return None if (listed >= SHOWN) is bool(expected) else f"{listed} encodings in a line"

    def others_ok(expected: Any, case: Case, outcome: Outcome) -> str | None:
        bad = {robot.CAMERAS[c] for c in case.config["cameras"]} & set(played.drops)
        for name, sent in played.sent_ns.items():
            if name in robot.CAMERAS and robot.CAMERAS[name] not in bad and len(played.pictures[name]) != len(sent):
                return f"{name}: {len(played.pictures[name])} of {len(sent)} accepted" if expected else None
        return None if (len(bad) < len(case.config["cameras"])) is bool(expected) else f"dropped from: {sorted(bad)}"

    def status(expected: Any, case: Case, outcome: Outcome) -> str | None:
        words = str(expected).lower().split()
        held = [s for s in played.said if s.substate in ("waiting", "holding") and words[-1] in s.reason.lower()]
        return None if held else f"never said: {outcome.message[:1000]}"

    def status_names(expected: Any, case: Case, outcome: Outcome) -> str | None:
        words = [expected] if isinstance(expected, str) else expected
        reasons = [s.reason for s in played.run.journal.said if s.substate in ("waiting", "holding")]
        if any(all(w in reason for w in words) for reason in reasons):
            return None
        return f"no reason names {words}: {reasons[-3:]}"

    def within(expected: Any, case: Case, outcome: Outcome) -> str | None:
        words = case.expect.get("status_mentions", case.expect.get("status_names", ""))
        words = [words] if isinstance(words, str) else words
        for s in played.run.journal.said:
            if all(w in s.reason for w in words):
                late_s = played.run.elapsed_s(s.at_ns)
                return None if late_s <= expected else f"said after {late_s:.2f} s"
        return f"{words} never said"

    def age(expected: Any, case: Case, outcome: Outcome) -> str | None:
        ages = [float(n) for s in played.said for n in re.findall(r"(\d+(?:\.\d+)?) s (?:ago|ahead)", s.reason)]
        return None if any(abs(a - expected) <= max(1.0, expected * 1e-3) for a in ages) else f"said {ages}"

    def hold_from(expected: Any, case: Case, outcome: Outcome) -> str | None:
        tolerance = float(case.expect.get("tolerance_s", 0.15))
        at_s = [played.run.elapsed_s(s.at_ns) for s in played.run.journal.said if s.substate == "holding"]
        if not at_s or abs(at_s[0] - expected) > tolerance:
            return f"held from {at_s[:1]}"
        sent = [s for s in played.run.journal.sent if played.run.elapsed_s(s.at_ns) > at_s[0] and not s.hold]
        resumed = any(s.substate == "running" and played.run.elapsed_s(s.at_ns) > at_s[0] for s in played.said)
        return f"{len(sent)} trajectories while holding" if sent and not resumed else None

    def resumes(expected: Any, case: Case, outcome: Outcome) -> str | None:
        held = [s.at_ns for s in played.said if s.substate == "holding"]
        again = [s.at_ns for s in played.said if s.substate == "running" and held and s.at_ns > held[0]]
        if isinstance(expected, bool):
            return None if bool(again) is expected else f"held {len(held)} times, running again {len(again)} times"
        at_s = [played.run.elapsed_s(n) for n in again]
        return None if any(t <= expected for t in at_s) else f"running again at {at_s} s"

    return {
        **{re.escape(key): _picture(played, match) for key in played.case.expect if (match := _PICTURE.fullmatch(key))},
        "no_pixel_equals": _no_pixel(played),
        "equal_to": _equal_to(played),
        "joint_position": lambda e, c, o: states(e, c, o, "joint_position"),
        "gripper_position(_policy)?": lambda e, c, o: states(e, c, o, "gripper_position"),
        "ready_only_after_(both|all)": _ready_after(played),
        "no_zero_fill": _no_zero_fill(played),
        "log_once": log_once,
        "log_lists_supported": lists_supported,
        "other_cameras_ok": others_ok,
        "status": status,
        "status_names": status_names,
        "within_wall_s": within,
        "says_age_about_s": age,
        "hold_from_s": hold_from,
        "resumes|resumes_(by|within|until)_s|resumed_by_s": resumes,
        "warn": _warned(played),
        "warn_once_per_topic": _warned_once(played),
        "option": _option(played),
        "frames_used_when_gated_from": _gated_from(played),
        "each_camera_resized_to": _resized(played),
        "aspect_rule": _bars(played),
        "frame_used_after_burst": _after_burst(played),
        "extra_inferences_from_burst": _extra_calls(played),
        "after_reset_inference_within_s": _after_reset(played),
        "backward_jump_s": lambda e, c, o: None if f"-{e:.3f} s" in o.message else "no such jump in the log",
    }


_PICTURE = re.compile(
    rf"(?P<camera>{'|'.join(robot.CAMERAS)})_(?:frame(?P<index>\d+)_)?"
    "(?P<what>rgb_sha256|first_px|last_px|px_rgb_approx)"
)


def _picture(played: Played, key: re.Match[str]) -> Check:
    """A picture as it was decoded, in native size."""

    def check(expected: Any, case: Case, outcome: Outcome) -> str | None:
        pictures, index, what = played.pictures[key["camera"]], int(key["index"] or 0), key["what"]
        if index >= len(pictures):
            # Refusing the pictures is permitted in so many words, and then there is nothing to compare.
            refused = "drop_sample" in outcome.verdicts and bool(case.expect.get("alternative"))
            return None if refused else f"only {len(pictures)} pictures were accepted"
        rgb = pictures[index]
        if what == "rgb_sha256":
            found = hashlib.sha256(np.ascontiguousarray(rgb).tobytes()).hexdigest()
            return None if found == expected else f"found {found}, first pixel {rgb[0, 0].tolist()}"
        if what == "px_rgb_approx":
            off = int(np.abs(rgb.astype(int) - np.array(expected)).max())
            return None if off <= case.expect.get("tolerance", 0) else f"off by {off}, {rgb[0, 0].tolist()}"
        pixel = rgb[0, 0] if what == "first_px" else rgb[-1, -1]
        return None if pixel.tolist() == list(expected) else f"found {pixel.tolist()}"

    return check


def _no_pixel(played: Played) -> Check:
    def check(expected: Any, case: Case, outcome: Outcome) -> str | None:
        for name, pictures in played.pictures.items():
            for k, rgb in enumerate(pictures):
                if (rgb == np.array(expected)).all(axis=-1).any():
                    return f"{name} frame {k} has such a pixel"
        return None if any(played.pictures.values()) else "no picture was accepted"

    return check


def _equal_to(played: Played) -> Check:
    def check(expected: Any, case: Case, outcome: Outcome) -> str | None:
        match = re.fullmatch(r"(\w+) frame (\d+)", expected)
        if match is None:
            return f"what {expected!r} is, the runner does not know"
        other, index = match.groups()
        named = [k.split("_frame")[0] for k in case.expect if "_frame" in k and k.split("_frame")[0] in robot.CAMERAS]
        camera = next((n for n in named if n != other), "wrist")
        pair = [played.pictures[n][int(index) : int(index) + 1] for n in (camera, other)]
        if not all(pair):
            return "a picture is missing"
        return None if np.array_equal(pair[0][0], pair[1][0]) else f"{camera} and {other} differ"

    return check


def _ready_after(played: Played) -> Check:
    def check(expected: Any, case: Case, outcome: Outcome) -> str | None:
        needed = robot.names(case.config)
        if not set(needed) <= set(played.first_ns):
            return f"never came: {set(needed) - set(played.first_ns)}"
        ready_ns = max(played.first_ns[n] for n in needed)
        first = played.calls[0].at_ns if played.calls else None
        waited = first is not None and first >= ready_ns
        return None if waited is bool(expected) else f"first request {first}, ready {ready_ns}"

    return check


def _no_zero_fill(played: Played) -> Check:
    def check(expected: Any, case: Case, outcome: Outcome) -> str | None:
        for call in played.calls:
            assert call.observation is not None
            if (call.observation.state["joint_position"] == 0.0).any():
                return f"the policy saw {call.observation.state}" if expected else None
        return None if played.calls and expected else f"the policy was asked {len(played.calls)} times"

    return check


def _uniform_first(played: Played) -> list[str]:
    """Cameras whose first picture is of one colour."""
    return [n for n, p in played.pictures.items() if p and np.ptp(p[0].reshape(-1, 3), axis=0).max() == 0]


def _warned(played: Played) -> Check:
    def check(expected: Any, case: Case, outcome: Outcome) -> str | None:
        text = str(expected)
        cameras = _uniform_first(played) if "<camera>" in text else [""]
        words = [w.strip() for w in text.split("<camera>")]
        warnings = [line for _, level, line in played.run.journal.log if level == "warn"]
        for camera in cameras:
            name = robot.CAMERAS.get(camera, "")
            if not any(all(w in line for w in words) and name in line for line in warnings):
                return f"{words!r} not warned of for {name}: {warnings}"
        return None if cameras else "no camera shows it"

    return check


def _warned_once(played: Played) -> Check:
    def check(expected: Any, case: Case, outcome: Outcome) -> str | None:
        for stream in {a.stream for a in played.arrivals}:
            lines = [
                line
                for _, level, line in played.run.journal.log
                if level == "warn" and stream in line and "stamp" in line
            ]
            warned = [line for line in lines if "dropped" in line or "receive" in line]
            if (len([line for line in warned if "(dropped;" in line]) == 1) is not bool(expected):
                return f"{stream}: {lines}"
        return None

    return check


def _option(played: Played) -> Check:
    """The recording is sound with an option that the text names: it is played again with it."""

    def check(expected: Any, case: Case, outcome: Outcome) -> str | None:
        text = str(expected)
        changes: dict[str, Any] = {"image__min_std": 1.0} if "min_std" in text or "min_image_std" in text else {}
        changes = changes or _changes(played, text)
        if not changes:
            return "the runner does not know this option"
        again = play(case, **changes)
        return None if "accept" in verdicts(again) else f"{verdicts(again)} with {changes}: {again.message[:1000]}"

    return check


def _changes(played: Played, text: str) -> dict[str, Any]:
    """Parameters, dots written as ``__``, that a text speaks of: ``stamp_source: receive``, an encoding, a half of a
    side-by-side picture, or the last part of a parameter's name with its value."""
    cameras = [c for c in robot.CAMERAS if c in text] or [c for c, n in robot.CAMERAS.items() if n in played.drops]
    encoding = next((e for e in BY_NAME if re.search(rf"\b{e}\b", text)), None)
    if encoding is not None:
        return {"image__encodings": [encoding if c in (cameras or ["wrist"]) else "auto" for c in robot.CAMERAS]}
    if half := re.search(r"\b(left|right)\b", text):
        return {"image__views": [half[1] if c in (cameras or ["wrist"]) else "whole" for c in robot.CAMERAS]}
    out = {}
    for name, value in re.findall(r"([a-z_]+)\s*[:=]\s*([\w.]+)", text):
        full = next((f for f in NodeParameters.names() if f.rsplit(".", 1)[-1] == name or f == name), None)
        if full is not None:
            out[full.replace(".", "__")] = yaml.safe_load(value)
    return out


def _gated_from(played: Played) -> Check:
    def check(expected: Any, case: Case, outcome: Outcome) -> str | None:
        again = play(case, image__min_std=1.0)
        calls = again.calls
        if not calls:
            return "with the gate the policy was never asked"
        if not 0 <= expected < min(len(n) for name, n in again.sent_ns.items() if name in robot.CAMERAS):
            return "the recording has no such frame"
        start_ns = min(n[expected] for name, n in again.sent_ns.items() if name in robot.CAMERAS)
        for call in calls:
            assert call.observation is not None and call.observation.frame_stamps_ns is not None
            early = [s for stamps in call.observation.frame_stamps_ns.values() for s in stamps if s < start_ns]
            if early:
                return f"frames from {(start_ns - min(early)) * 1e-9:.3f} s before frame {expected} were used"
        if calls[0].observation is not None and calls[0].observation.stamp_ns != start_ns:
            return f"the first request looks at {calls[0].observation.stamp_ns}, not at frame {expected}: {start_ns}"
        return None if "uniform image" in again.message else "the wait gave no reason"

    return check


def _resized(played: Played) -> Check:
    def check(expected: Any, case: Case, outcome: Outcome) -> str | None:
        shapes = {
            n: list(f.shape[1:3])
            for c in played.calls
            if c.observation is not None
            for n, f in c.observation.frames.items()
        }
        return None if shapes and all(s == list(expected) for s in shapes.values()) else f"found {shapes}"

    return check


def _bars(played: Played) -> Check:
    """The documented rule of this node is to keep the aspect: black bars, and the picture in the middle."""

    def check(expected: Any, case: Case, outcome: Outcome) -> str | None:
        assert played.calls and played.calls[0].observation is not None
        for name, native in ((n, p[0]) for n, p in played.pictures.items() if p):
            shown = played.calls[0].observation.frames[robot.CAMERAS[name]][0]
            height, width = native.shape[:2]
            scale = min(180 / height, 320 / width)
            bar = round((320 - width * scale) / 2)
            if bar > 1 and (shown[:, : bar - 1].any() or shown[:, 321 - bar :].any() or not shown[:, 160].any()):
                return f"{name} is not padded with black bars of {bar} pixels"
        return None

    return check


def _burst(played: Played) -> tuple[str, int, int] | None:
    """Stream, first and last steady time of three or more of its messages that came at once."""
    for stream in {a.stream for a in played.arrivals}:
        at = [a.at_ns for a in played.arrivals if a.stream == stream]
        for i in range(len(at) - 2):
            last = max(j for j in range(i, len(at)) if at[j] - at[i] <= BURST_S * 1e9)
            if last - i >= 2:
                return stream, at[i], at[last]
    return None


def _after_burst(played: Played) -> Check:
    def check(expected: Any, case: Case, outcome: Outcome) -> str | None:
        burst = _burst(played)
        if burst is None:
            return "no burst in the recording"
        camera = next(n for n, full in robot.CAMERAS.items() if full == burst[0])
        later = [c for c in played.calls if c.at_ns >= burst[2]]
        if not later or later[0].observation is None or later[0].observation.frame_stamps_ns is None:
            return "no request after the burst"
        used = int(later[0].observation.frame_stamps_ns[burst[0]][-1])
        there = [a.stamp_ns for a in played.arrivals if a.stream == burst[0] and a.at_ns <= later[0].at_ns]
        last = [a.stamp_ns for a in played.arrivals if a.stream == burst[0] and a.at_ns == burst[2]][-1]
        if played.sent_ns[camera].index(last) != expected:
            return f"the burst ends with frame {played.sent_ns[camera].index(last)}"
        index, newest = played.sent_ns[camera].index(used), played.sent_ns[camera].index(max(there))
        # A node that had to hold while nothing came asks a little later, and then with a newer one.
        return None if index == newest >= expected else f"frame {index} was used when {newest} was there"

    return check


def _extra_calls(played: Played) -> Check:
    def check(expected: Any, case: Case, outcome: Outcome) -> str | None:
        burst = _burst(played)
        if burst is None:
            return "no burst in the recording"
        until_ns = burst[2] + round(1e9 * LATENCY_S)
        made = [c for c in played.calls if burst[1] <= c.at_ns <= until_ns]
        return None if len(made) <= 1 + expected else f"{len(made)} requests in {LATENCY_S} s"

    return check


def _after_reset(played: Played) -> Check:
    def check(expected: Any, case: Case, outcome: Outcome) -> str | None:
        if played.clock_back_ns is None:
            return "/clock never went back"
        later = [c for c in played.run.worker.calls if c.at_ns >= played.clock_back_ns]
        if not later:
            return "no request after it"
        gap_s = (later[0].at_ns - played.clock_back_ns) * 1e-9
        assert later[0].observation is not None and later[0].observation.stamp_ns is not None
        newest = max(played.sent_ns[CLOCK_TOPIC])
        if later[0].observation.stamp_ns >= newest:
            return "the request looks at a frame from before"
        return None if gap_s <= expected else f"the first request comes {gap_s:.2f} s after it"

    return check
