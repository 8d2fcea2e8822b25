"""From what ``~/state`` says to the entries of ``/diagnostics``. Knows no rclpy; ``reporter`` publishes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

STALL_LIMIT = 0.01
"""More of the running time than this without a command for the robot is worth a warning."""

RATE_LIMIT = 0.9
"""A stream or a loop with less than this part of its nominal rate is worth a warning."""

AROUND = ("frame_to_request", "frame_to_step", "step_to_publish")
"""Durations of the node's own, not of the policy's."""

State = Mapping[str, Any]


class Level(IntEnum):
    """As in diagnostic_msgs/DiagnosticStatus."""

    OK = 0
    WARN = 1
    ERROR = 2
    STALE = 3


@dataclass(frozen=True)
class Status:
    """One entry: ``part`` is what follows the node's name."""

    part: str
    level: Level
    message: str
    values: dict[str, str] = field(default_factory=dict)


def diagnose(state: State) -> list[Status]:
    """Four entries, always the same ones: policy, observation, controller, server."""
    parts: tuple[Callable[[State], Status], ...] = (_policy, _observation, _controller, _server)
    return [part(state) for part in parts]


def _policy(state: State) -> Status:
    loading = state.get("loading")
    if loading is None:
        return Status("policy", Level.STALE, state.get("refused") or "not configured")
    spec, phase = state.get("policy") or {}, loading["phase"]
    values = {
        "phase": phase,
        "weights": str(spec.get("weights", "")),
        "fingerprint": str((spec.get("fingerprint") or {}).get("id", "")),
        "weights hash": str((spec.get("details") or {}).get("weights_hash") or ""),
        "memory": str((spec.get("details") or {}).get("memory") or ""),
        "embodiment": str(spec.get("embodiment", "")),
        "session": str(state.get("session", "")),
        "step": str(state.get("step", "")),
        "instruction sha256": str(state.get("prompt_sha256", "")),
        **_record(state),
        **_counts(state, ("chunks", "late", "refused", "discarded", "superseded", "sessions")),
        **_durations(state, but=AROUND),
    }
    if phase == "failed":
        return Status("policy", Level.ERROR, f"failed: {loading['message']}", values)
    if phase != "ready":
        return Status("policy", Level.WARN, f"{phase}: {loading['message']} ({loading['fraction']:.0%})", values)
    if spec.get("random_weights"):
        return Status("policy", Level.WARN, f"ready, but not a policy: {spec['weights']}", values)
    return Status("policy", Level.OK, "ready", values)


def _observation(state: State) -> Status:
    streams = state.get("streams")
    if streams is None:
        return Status("observation", Level.STALE, "not configured")
    values: dict[str, str] = {}
    for stream in streams:
        name = stream["name"]
        values |= {
            f"{name} topic": stream["topic"],
            f"{name} rate [Hz]": _number(stream.get("rate_hz"), 1),
            f"{name} age of stamp [s]": _number(stream["stamp_age_s"], 3),
            f"{name} since arrival [s]": _number(stream["arrival_age_s"], 3),
            f"{name} received": str(stream["received"]),
            f"{name} dropped": drops_text(stream["dropped"]),
        }
    values["skew of the cameras [s]"] = _number(state.get("skew_s"), 3)
    values |= _counts(state, ("off_schedule", "padded"))
    if not any(stream["received"] for stream in streams):
        return Status("observation", Level.STALE, "no message has ever come on any topic", values)
    if problems := [s["problem"] for s in streams if s["problem"]]:
        level = Level.ERROR if state.get("lifecycle") == "active" else Level.WARN
        return Status("observation", level, "; ".join(problems), values)
    if slow := [_slow(s, state) for s in streams if _slow(s, state)]:
        return Status("observation", Level.WARN, "; ".join(slow), values)
    return Status("observation", Level.OK, "all streams are sound", values)


def _slow(stream: Mapping[str, Any], state: State) -> str:
    nominal, rate = (state.get("control_rate_hz") or {}).get("nominal"), stream.get("rate_hz")
    if not nominal or rate is None or rate >= RATE_LIMIT * nominal:
        return ""
    return f"{stream['topic']}: {rate:.1f} Hz, the policy looks at {nominal:g} Hz"


def _controller(state: State) -> Status:
    if "loading" not in state:
        return Status("controller", Level.STALE, "not configured")
    rate = state.get("control_rate_hz") or {}
    values = {
        "state": f"{state.get('lifecycle', '')}, {state.get('substate', '')}",
        "control rate [Hz]": _number(rate.get("achieved"), 2),
        "nominal control rate [Hz]": _number(rate.get("nominal"), 2),
        "longest time between control ticks [s]": _number(rate.get("longest_gap_s"), 4),
        "stall share": _number(state.get("stall_share"), 4),
        **_counts(state, ("late", "refused", "clamped", "holds", "stop_and_go", "clock_jumps")),
        **{f"refused: {k}": str(n) for k, n in (state.get("refusals") or {}).items()},
        **_durations(state, only=AROUND),
    }
    if state.get("fault"):
        return Status("controller", Level.ERROR, f"fault, latched: {state['fault']}", values)
    if state.get("lifecycle") != "active":
        return Status("controller", Level.OK, f"{state.get('lifecycle')}: nothing is sent to the robot", values)
    substate, reason = state.get("substate"), state.get("reason", "")
    if substate != "running":
        return Status("controller", Level.WARN, f"{substate}: {reason}" if reason else str(substate), values)
    if (stalls := state.get("stall_share")) is not None and stalls > STALL_LIMIT:
        return Status("controller", Level.WARN, f"the robot lacked a command {stalls:.1%} of the time", values)
    if masters := state.get("masters"):
        return Status("controller", Level.WARN, masters, values)
    nominal, achieved = rate.get("nominal"), rate.get("achieved")
    if nominal and achieved is not None and achieved < RATE_LIMIT * nominal:
        return Status("controller", Level.WARN, f"only {achieved:.1f} of {nominal:g} control ticks per second", values)
    return Status("controller", Level.OK, "running", values)


def _server(state: State) -> Status:
    server = state.get("openpi")
    if not server:
        return Status("server", Level.OK, "no OpenPI endpoint configured")
    addresses = ", ".join(server["addresses"])
    values = {"addresses": addresses, **{k: str(server[k]) for k in ("connections", "sessions")}}
    if trouble := server.get("trouble"):
        loads = (state.get("loading") or {}).get("phase") in ("loading", "warming up")
        return Status("server", Level.WARN if loads else Level.ERROR, str(trouble), values)
    return Status("server", Level.OK, f"serving on {addresses}", values)


def drops_text(dropped: Mapping[str, int]) -> str:
    """``3 x truncated image, 1 x zero stamp``, or ``0``."""
    return ", ".join(f"{n} x {reason}" for reason, n in dropped.items()) or "0"


def _record(state: State) -> dict[str, str]:
    if not (record := state.get("record")):
        return {}
    lost = f", INCOMPLETE: {record['dropped']} dropped, {record['trouble']}" if record["trouble"] else ""
    return {"record": f"{record['written']} events, {record['nbytes'] / 2**20:.1f} MiB in {record['folder']}{lost}"}


def _counts(state: State, names: tuple[str, ...]) -> dict[str, str]:
    counters = state.get("counters") or {}
    return {name.replace("_", " "): str(counters[name]) for name in names if name in counters}


def _durations(state: State, *, only: tuple[str, ...] = (), but: tuple[str, ...] = ()) -> dict[str, str]:
    out = {}
    for name, values in (state.get("durations_s") or {}).items():
        if name in but or (only and name not in only):
            continue
        for key in ("p50", "p99", "max"):
            out[f"{name.replace('_', ' ')} {key} [ms]"] = f"{values[key] * 1e3:.1f}"
    return out


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
