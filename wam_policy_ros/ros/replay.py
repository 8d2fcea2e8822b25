"""Feeds a recording through the node's own path in virtual time, and says what it would have done. ``wam replay``.

Needs no ROS: the recording is a rosbag2 folder, mcap or sqlite3.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from wam_policy_ros.contract.errors import ConfigError, WamError
from wam_policy_ros.contract.fakes import example_observation
from wam_policy_ros.contract.interface import Policy

from .backend import make_policy
from .parameters import NodeParameters
from .params_files import read_values
from .recording import COMPRESSED, IMAGE, JOINTS, Contents, Recording
from .virtual import CLOCK_TOPIC, STEADY_0_NS, Arrival, VirtualRun

_GROWING = re.compile(r"\d+(\.\d+)?(?= s\b| messages?\b| x )")

TAIL_S = 1.0
"""So long the node goes on after the last message: it must be seen to hold."""


def replay(
    recording: Recording,
    params: NodeParameters,
    policy: Policy,
    *,
    namespace: str = "",
    simulated: bool | None = None,
    latency_s: Callable[[int, float], float] = lambda call, measured_s: measured_s,
    warm_up_s: tuple[float, ...] = (),
    tail_s: float = TAIL_S,
    tick_phase_s: float = 0.0,
    keep_observations: bool = False,
    on_message: Callable[[VirtualRun, str, Any], None] = lambda run, topic, msg: None,
) -> VirtualRun:
    """Run a node on a recording.

    Args:
        namespace: of the node, for its relative topics.
        simulated: the node's clock is /clock; None: when the recording has one.
        latency_s, warm_up_s: how long each step takes, see ``VirtualWorker``.
        tail_s: how long the node goes on after the last message.
        tick_phase_s: when the first control tick comes, after the first message.
        keep_observations: keep what the policy saw.
        on_message: called after every message.

    Returns:
        The run, with its journal; the node is still active, so that a caller can go on.
    """
    contents = recording.contents
    if simulated is None:
        simulated = CLOCK_TOPIC in contents.topics
    where = full_name("robot_description", namespace)
    urdf = recording.text(where)
    run = VirtualRun(
        params,
        policy,
        description=None if urdf is None else (urdf, where),
        start_ns=contents.start_ns,
        simulated=simulated,
        latency_s=latency_s,
        warm_up_s=warm_up_s,
        tick_phase_s=tick_phase_s,
        resolve=lambda topic: full_name(topic, namespace),
    )
    run.worker.keep_observations = keep_observations
    wanted = [*run.topics, *([CLOCK_TOPIC] if simulated else [])]
    for at_ns, topic, msg in recording.messages(wanted):
        run.advance((at_ns - contents.start_ns) * 1e-9)
        run.message(topic, msg)
        on_message(run, topic, msg)
    run.advance(contents.duration_s + tail_s)
    return run


def warm_up(policy: Policy) -> tuple[float, ...]:
    """Duration of a first and of a later call, in a throwaway session, as the node makes them before it is active."""
    spec, session, out = policy.spec, policy.open(), []
    step_ns = 1e9 / spec.control_rate_hz
    try:
        for call, frames in enumerate((1, len(spec.frame_offsets))):
            stamp_ns = 10**9 - round(min(spec.frame_offsets) * step_ns) * (call + 1)
            observation = example_observation(spec, frames=frames, stamp_ns=stamp_ns)
            start_s = time.perf_counter()
            policy.infer(session, observation, cancelled=lambda: False)
            out.append(time.perf_counter() - start_s)
    finally:
        policy.close(session)
    return tuple(out)


def full_name(topic: str, namespace: str) -> str:
    """As ROS resolves a topic's name; without remappings."""
    if topic.startswith("/"):
        return topic
    prefix = f"/{namespace.strip('/')}" if namespace.strip("/") else ""
    return f"{prefix}/wam_policy/{topic[2:]}" if topic.startswith("~/") else f"{prefix}/{topic}"


def report(run: VirtualRun, contents: Contents, policy: Policy) -> dict[str, Any]:
    """What happened, JSON-serialisable. Times in s since the first message of the recording."""
    journal, spec = run.journal, policy.spec
    plans = [s for s in journal.sent if not s.hold]
    answered = [c for c in run.worker.calls if c.latency_s != float("inf")]
    latencies = [c.latency_s for c in answered]
    end_ns = run.clock.steady_ns
    return {
        "recording": {
            "duration_s": round(contents.duration_s, 3),
            "topics": {t: {"type": kind, "messages": n} for t, (kind, n) in sorted(contents.topics.items())},
            "not_in_it": sorted(t for t in run.topics if t not in contents.topics),
        },
        "policy": {"weights": spec.weights, "random_weights": spec.random_weights, "embodiment": spec.embodiment},
        "streams": {
            topic: _stream(topic, [a for a in journal.arrivals if a.stream in _names(streams)], contents)
            for topic, streams in run.topics.items()
        },
        "states": _states(run),
        "share_of_time": _shares(run, end_ns),
        "policy_calls": {
            "made": len(run.worker.calls),
            "refused": sum(c.result.error is not None for c in run.worker.calls),
            "latency_s": _quantiles(latencies),
        },
        "published": {
            "trajectories": len(plans),
            "holds": len(journal.sent) - len(plans),
            "rows": sum(len(p.plan.positions) for p in plans),
            "first_s": round(run.elapsed_s(plans[0].at_ns), 3) if plans else None,
            "last_s": round(run.elapsed_s(plans[-1].at_ns), 3) if plans else None,
            "highest_speed": _highest_speed([p.plan for p in plans]),
        },
        "fault": run.control.fault,
        "counters": {k: v for k, v in run.control.summary()["counters"].items() if k != "streams"},
        "log": [{"t_s": round(run.elapsed_s(t), 3), "level": level, "line": line} for t, level, line in journal.log],
    }


def _names(streams: Sequence[Any]) -> set[str]:
    return {getattr(s, "name", s.topic) for s in streams}


def _stream(topic: str, arrivals: Sequence[Arrival], contents: Contents) -> dict[str, Any]:
    good_s = np.array([a.at_ns for a in arrivals if not a.reason]) * 1e-9
    gaps = np.diff(good_s)
    return {
        "type": contents.topics.get(topic, ("not in the recording", 0))[0],
        "received": len(arrivals),
        "accepted": len(good_s),
        "dropped": dict(Counter(a.reason for a in arrivals if a.reason)),
        "rate_hz": round(float(1 / np.median(gaps)), 2) if len(gaps) and np.median(gaps) > 0 else None,
        "longest_gap_s": round(float(gaps.max()), 3) if len(gaps) else None,
    }


def _states(run: VirtualRun) -> list[dict[str, Any]]:
    """Each state with the reason it began with; that a count or an age in the reason has grown is no new state."""
    out: list[dict[str, Any]] = []
    last: tuple[str, str] | None = None
    for said in run.journal.said:
        key = (said.substate, _GROWING.sub("#", said.reason))
        if key != last:
            last = key
            t_s = round(run.elapsed_s(said.at_ns), 3)
            out.append({"t_s": t_s, "for_s": 0.0, "substate": said.substate, "reason": said.reason})
    for one, end_s in zip(out, [*(o["t_s"] for o in out[1:]), run.elapsed_s(run.clock.steady_ns)], strict=True):
        one["for_s"] = round(end_s - one["t_s"], 3)
    return out


def _shares(run: VirtualRun, end_ns: int) -> dict[str, float]:
    shares: Counter[str] = Counter()
    said = run.journal.said
    for one, following in zip(said, [*said[1:], None], strict=True):
        shares[one.substate] += (end_ns if following is None else following.at_ns) - one.at_ns
    total = max(1, end_ns - STEADY_0_NS)
    return {k: round(v / total, 4) for k, v in shares.items()}


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p99, most = np.quantile(values, [0.5, 0.99, 1.0])
    return {"p50": round(float(p50), 4), "p99": round(float(p99), 4), "max": round(float(most), 4)}


def _highest_speed(plans: Sequence[Any]) -> dict[str, float]:
    """Joint -> between the rows of a plan, joint units per s."""
    out: dict[str, float] = {}
    for plan in plans:
        if len(plan.times_s) < 2:
            continue
        speed = np.abs(np.diff(plan.positions, axis=0) / np.diff(plan.times_s)[:, None]).max(axis=0)
        for name, value in zip(plan.names, speed, strict=True):
            out[name] = max(out.get(name, 0.0), round(float(value), 4))
    return out


def text(data: dict[str, Any]) -> str:
    """The report for people."""
    recording, published, calls = data["recording"], data["published"], data["policy_calls"]
    lines = [f"recording   {recording['duration_s']} s, {len(recording['topics'])} topics"]
    weights = "RANDOM WEIGHTS: not a policy" if data["policy"]["random_weights"] else data["policy"]["weights"]
    lines.append(f"policy      {weights}, embodiment {data['policy']['embodiment']}")
    for topic in recording["not_in_it"]:
        there = sorted(t for t, of in recording["topics"].items() if of["type"] in (IMAGE, COMPRESSED, JOINTS))
        lines.append(f"MISSING     {topic} is not in the recording; it has {', '.join(there) or 'no such topics'}")
    lines.append("streams")
    for topic, stream in data["streams"].items():
        dropped = ", ".join(f"{n} x {reason}" for reason, n in stream["dropped"].items())
        lines.append(
            f"  {topic}: {stream['received']} received, {stream['accepted']} accepted"
            + (f", dropped: {dropped}" if dropped else "")
            + (f"; {stream['rate_hz']} Hz" if stream["rate_hz"] else "")
            + (f", longest gap {stream['longest_gap_s']} s" if stream["longest_gap_s"] else "")
        )
    lines.append("states")
    end_s = recording["duration_s"]
    for state in data["states"]:
        if end_s is not None and state["t_s"] > end_s:
            lines.append(f"  {end_s:8.3f} s  the recording ends")
            end_s = None
        why = f": {state['reason']}" if state["reason"] else ""
        lines.append(f"  {state['t_s']:8.3f} s  {state['substate']} for {state['for_s']} s{why}")
    lines.append(f"  shares of the time: {', '.join(f'{k} {v:.1%}' for k, v in data['share_of_time'].items())}")
    latency = calls["latency_s"]
    timing = f", latency p50 {latency['p50']} s, p99 {latency['p99']} s" if latency else ""
    lines.append(f"policy calls {calls['made']}, refused {calls['refused']}{timing}")
    lines.append(
        f"published   {published['trajectories']} trajectories, {published['rows']} rows, {published['holds']} holds"
        + (f", from {published['first_s']} s to {published['last_s']} s" if published["trajectories"] else "")
    )
    if data["fault"]:
        lines.append(f"FAULT       {data['fault']}")
    lines.append("log")
    lines += [f"  {e['t_s']:8.3f} s  {e['level']}: {e['line']}" for e in data["log"]]
    return "\n".join(lines)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the command; ``wam replay`` has the same."""
    parser.add_argument("recording", type=Path, help="rosbag2 folder, mcap or sqlite3")
    parser.add_argument("--params-file", type=Path, action="append", default=[], help="parameters of the node")
    parser.add_argument("-p", dest="given", action="append", default=[], metavar="NAME:=VALUE", help="one parameter")
    parser.add_argument("--namespace", default="", help="of the node, for relative topics")
    parser.add_argument("--latency", default="measured", help="seconds a step takes, or measured on this machine")
    parser.add_argument("--sim-time", choices=["auto", "yes", "no"], default="auto", help="use /clock")
    parser.add_argument("--json", type=Path, help="write the report here, too")


def run(args: argparse.Namespace) -> int:
    values = parameter_values(args.params_file, args.given)
    simulated = {"auto": None, "yes": True, "no": False}[args.sim_time]
    if simulated is None and isinstance(values.get("use_sim_time"), bool):
        simulated = values["use_sim_time"]
    params = NodeParameters.from_values(values)
    fixed_s = None if args.latency == "measured" else _seconds(args.latency)
    with Recording(args.recording) as recording:
        contents = recording.contents
        start_s = time.monotonic()
        policy = make_policy(params, lambda line, fraction: print(f"{fraction:4.0%}  {line}", file=sys.stderr))
        print(f"the policy is there after {time.monotonic() - start_s:.1f} s", file=sys.stderr)
        done = replay(
            recording,
            params,
            policy,
            namespace=args.namespace,
            simulated=simulated,
            latency_s=lambda call, measured_s: measured_s if fixed_s is None else fixed_s,
            warm_up_s=warm_up(policy) if fixed_s is None else (fixed_s, fixed_s),
        )
        data = report(done, contents, policy)
        done.close()
    data["recording"] = {"folder": str(args.recording), **data["recording"]}
    data["latency"] = args.latency
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(text(data))
    return 0


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < 3600.0:
        raise ConfigError("--latency is no duration", got=repr(value), expected="seconds, or measured")
    return seconds


def parameter_values(files: Sequence[Path], given: Sequence[str]) -> dict[str, Any]:
    """Name -> value, as ``--ros-args`` would give them to the node: files in order, then single ones.

    Raises:
        ConfigError: a file cannot be read, or a single one is not NAME:=VALUE.
    """
    values: dict[str, Any] = {}
    for path in files:
        values |= read_values(path, "/wam_policy")
    for one in given:
        name, separator, value = one.partition(":=")
        if not separator:
            raise ConfigError("-p is not NAME:=VALUE", got=repr(one))
        values[name] = yaml.safe_load(value)
    return values


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m wam_policy_ros.ros.replay``."""
    parser = argparse.ArgumentParser(prog="wam replay", description=__doc__)
    arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except WamError as error:
        print(f"wam replay: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
