"""``~/status``: one screen of text that says what the node does, why it waits or holds, and what to do. No rclpy."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from .diagnostics import State, drops_text

WIDTH = 110
_INDENT = 12


def status_text(state: State) -> str:
    """From what ``~/state`` says.

    Returns:
        at most about 40 lines of at most ``WIDTH`` characters; topics are never cut.
    """
    lines = [*_head(state), *_why(state), *_policy(state), *_loop(state)]
    if streams := state.get("streams"):
        lines += ["", *_streams(streams)]
        if (skew_s := state.get("skew_s")) is not None:
            lines.append(f"  cameras {skew_s * 1e3:.0f} ms apart")
    return "\n".join(lines) + "\n"


def _field(name: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=name.ljust(_INDENT), subsequent_indent=" " * _INDENT, break_long_words=False
    ) or [name]


def _head(state: State) -> list[str]:
    lifecycle, substate = state.get("lifecycle", ""), state.get("substate", "")
    does = {
        "running": "the robot follows the policy",
        "holding": "HOLDING: the robot stands still",
        "waiting": "WAITING: nothing is sent to the robot yet",
    }.get(substate, "nothing is sent to the robot")
    if state.get("fault"):
        does = "FAULT, latched: the robot stands still"
    since = f" (for {state['since_s']:.0f} s)" if state.get("since_s") is not None else ""
    return [*_field("node", str(state.get("node", ""))), *_field("state", f"{lifecycle}: {does}{since}")]


def _why(state: State) -> list[str]:
    reason = state.get("fault") or state.get("refused") or state.get("reason") or ""
    if not reason:
        return []
    text, _, remedy = reason.partition("remedy: ")
    out = _field("why", text.rstrip("; "))
    if remedy:
        out += _field("remedy", remedy)
    if state.get("fault"):
        out += _field("then", "remove the cause, then call ~/reset")
    return out


def _policy(state: State) -> list[str]:
    loading = state.get("loading")
    if loading is None:
        return []
    spec = state.get("policy") or {}
    phase = loading["phase"]
    progress = "" if phase == "ready" else f" {loading['message']} ({loading['fraction']:.0%})"
    out = _field("policy", f"{phase}{progress}; {spec['weights']}" if spec else f"{phase}{progress}")
    out += _field("prompt", repr(state.get("prompt", "")))
    if state.get("session"):
        out += _field("session", f"{state['session'][:8]}, step {state.get('step')}")
    if server := state.get("openpi"):
        clients = f"{server['connections']} connections, {server['sessions']} sessions"
        trouble = f"; {server['trouble']}" if server.get("trouble") else ""
        out += _field("server", f"{', '.join(server['addresses'])}: {clients}{trouble}")
    return out


def _loop(state: State) -> list[str]:
    out = _field("warning", state["masters"]) if state.get("masters") else []
    rate, counters = state.get("control_rate_hz") or {}, state.get("counters") or {}
    if rate.get("achieved") is not None:
        text = f"{rate['achieved']:.1f} of {rate['nominal']:g} control ticks per second"
        if (stalls := state.get("stall_share")) is not None:
            text += f", robot without a command {stalls:.1%} of the time"
        out += _field("loop", text)
    if "chunks" in counters:
        text = f"{counters['chunks']} published, {counters.get('late', 0)} late, {counters.get('refused', 0)} refused"
        if refusals := state.get("refusals"):
            text += f" ({drops_text(refusals)})"
        out += _field("chunks", text)
    durations: Mapping[str, Any] = state.get("durations_s") or {}
    names = {"latency": "step", "frame_to_step": "frame to step", "step_to_publish": "step to publish"}
    shown = [
        f"{text} {durations[n]['p50'] * 1e3:.0f} / {durations[n]['p99'] * 1e3:.0f} ms"
        for n, text in names.items()
        if n in durations
    ]
    return out + (_field("p50 / p99", ", ".join(shown)) if shown else [])


def _streams(streams: Iterable[Mapping[str, Any]]) -> list[str]:
    rows = [("topic", "Hz", "age s", "received", "dropped", "")]
    notes: list[str] = []
    for s in streams:
        age = s["stamp_age_s"] if s["stamp_age_s"] is not None else s["arrival_age_s"]
        rate = "-" if s.get("rate_hz") is None else f"{s['rate_hz']:.1f}"
        age_text = "never" if age is None else f"{age:.3f}"
        verdict = "BAD" if s["problem"] else "ok"
        rows.append(
            (
                s["topic"],
                rate,
                age_text,
                str(s["received"]),
                str(sum(s["dropped"].values())),
                f"{verdict} {s['detail']}",
            )
        )
        if s["dropped"]:
            notes += _note(f"{s['topic']} dropped {drops_text(s['dropped'])}")
        if s["problem"]:
            remedy = f"; remedy: {s['remedy']}" if s["remedy"] else ""
            notes += _note(f"{s['problem']}{remedy}")
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    table = [
        "  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in range(1, 5)), row[5]]).rstrip()
        for row in rows
    ]
    return table + notes


def _note(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
