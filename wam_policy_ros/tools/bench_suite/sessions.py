"""``wam bench sessions``: several sessions of one policy: steps per second, waiting, memory, and what a fork costs.

Every session asks again as soon as it is answered, through ``contract.rollouts`` as environments beside a policy do.
Steps are made one after the other, so the rate of all together is that of one, less what taking turns costs.

Each row begins with a window of every session that is not part of its rates: ``first_window_s`` says what it took.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wam_policy_ros.contract.errors import ConfigError, Overloaded
from wam_policy_ros.contract.fakes import example_observation
from wam_policy_ros.contract.interface import Observation, PolicySpec
from wam_policy_ros.contract.policy_thread import PolicyThread, Work
from wam_policy_ros.contract.rollouts import Episode, Rollouts
from wam_policy_ros.tools.provenance import provenance

from .configurations import CONFIGURATIONS, engine_config, parse_changes
from .network import add_network_arguments, build, on_a_gpu
from .records import write_json

CALLS = 4
"""Of a window: the fifth begins anew."""
FORKS = 5
COLOUR = "#2a6f97"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_network_arguments(parser)
    parser.add_argument("--config", choices=list(CONFIGURATIONS), help="default: fp8 on a GPU, plain on a CPU")
    parser.add_argument("--evaluations", type=int, default=8, help="of 16 solver steps: 16,8,7,6,5 or 4")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="engine option on top")
    parser.add_argument("--sessions", default="1,2,4,8", metavar="N,...", help="how many at once; default 1,2,4,8")
    parser.add_argument("--windows", type=int, default=4, help="at most so many windows of each session in a row")
    parser.add_argument("--row-seconds", type=float, default=10.0, help="no window of a row starts after this")
    parser.add_argument("--video", action="store_true", help="steps whose predicted video somebody looks at")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="write rates, waiting and memory as PNG")


def run(args: argparse.Namespace) -> int:
    counts = _counts(args.sessions)
    gpu = on_a_gpu(args.device)
    name = args.config or ("fp8" if gpu else "plain")
    # All that the largest row uses; a fork needs a second one.
    changes = {"prepared_windows": max(2, *counts)} | parse_changes(args.set)
    config = engine_config(name, args.evaluations, gpu=gpu, changes=changes)
    begin_s = time.perf_counter()
    policy = build(args, config)
    print(f"\r  ready after {time.perf_counter() - begin_s:.1f} s          ", file=sys.stderr, flush=True)
    report: dict[str, Any] = {
        "complete": False,
        "ready_s": time.perf_counter() - begin_s,
        "network": args.checkpoint or f"random {args.network}",
        "configuration": name,
        "evaluations": args.evaluations,
        "video": args.video,
        "spec": dict(policy.spec.details) | {"weights": policy.spec.weights},
        "window_bytes": policy.capacity.window_bytes,
        "session_bytes": policy.capacity.session_bytes,
        "capacity": policy.capacity.sessions,
        "provenance": provenance(policy.network.device),
        "rows": [],
    }
    owner = PolicyThread(lambda progress: policy, log=lambda level, line: print(line, file=sys.stderr), warm_up=False)
    owner.start()
    try:
        asyncio.run(measure(owner, counts, args, report))
        report["complete"] = True
    except KeyboardInterrupt:
        print("  interrupted: what follows is what was measured until then", file=sys.stderr)
    finally:
        owner.stop(30.0)
    print(table(report))
    if args.json:
        write_json(report, args.json)
        print(f"written: {args.json}")
    if args.chart:
        write_chart(report, args.chart)
        print(f"written: {args.chart}")
    return 0 if report["complete"] and any("steps_per_s" in row for row in report["rows"]) else 1


def _counts(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise ConfigError("numbers of sessions", got=text, expected="e.g. 1,2,4,8")
    return sorted({int(word) for word in words})


async def measure(owner: PolicyThread, counts: list[int], args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Rows and the cost of a fork, into ``report``, which is written after each."""
    async with Rollouts(owner) as rollouts:
        looks = _Looks(rollouts.spec, want_video=args.video)
        rows = report["rows"]
        for count in counts:
            print(f"  {count} session{'s' * (count > 1)} ...", file=sys.stderr, flush=True)
            rows.append(await _row(owner, rollouts, looks, count, args))
            if args.json:
                write_json(report, args.json)
            if "refused" in rows[-1]:
                break
        print("  forks ...", file=sys.stderr, flush=True)
        report["fork"] = await _forks(owner, rollouts, looks)


class _Looks:
    """Pictures made beforehand: of a first call, and of later ones."""

    def __init__(self, spec: PolicySpec, *, want_video: bool) -> None:
        later = len(spec.frame_offsets)
        made = [example_observation(spec, frames=later if k else 1, seed=k) for k in range(1 + CALLS)]
        self.first, *self.later = (replace(one, want_video=want_video) for one in made)

    def __call__(self, number: int, call: int) -> Observation:
        return self.later[(number + call) % CALLS] if call else self.first


async def _row(
    owner: PolicyThread, rollouts: Rollouts, looks: _Looks, count: int, args: argparse.Namespace
) -> dict[str, Any]:
    episodes: list[Episode] = []
    try:
        for number in range(count):
            episodes.append(await rollouts.open(seed=number))
        recorded = await _job(owner, _recordings)
        # A whole window of each before the clock starts.
        first = await asyncio.gather(*(_play(e, looks, n, 0, CALLS) for n, e in enumerate(episodes)))
        before = await _job(owner, _recordings)
        stop_s = time.perf_counter() + args.row_seconds
        begin_s = time.perf_counter()

        async def windows(number: int, episode: Episode) -> list[float]:
            took: list[float] = []
            for window in range(args.windows):
                if window and time.perf_counter() > stop_s:
                    break
                took += await _play(episode, looks, number, CALLS * (1 + window), CALLS)
            return took

        took = await asyncio.gather(*(windows(n, e) for n, e in enumerate(episodes)))
        wall_s = time.perf_counter() - begin_s
        after = await _job(owner, _recordings)
        memory = await _job(owner, lambda policy, cancelled: policy.account.by_noun())  # type: ignore[attr-defined]
    except Overloaded as error:
        return {"sessions": count, "refused": str(error)}
    finally:
        await asyncio.gather(*(episode.close() for episode in episodes))
    all_of_them, medians = np.concatenate(took), [float(np.median(one)) for one in took]
    return {
        "sessions": count,
        "steps": len(all_of_them),
        "steps_per_s": len(all_of_them) / wall_s,
        "latency_s": {f"p{p}": float(np.percentile(all_of_them, p)) for p in (50, 90, 99)},
        "session_p50_s": medians,
        "max_s": float(all_of_them.max()),
        "first_window_s": {"first_call_max": max(s[0] for s in first), "max": max(max(s) for s in first)},
        "recordings": {"prepared": recorded, "first_window": before - recorded, "measured": after - before},
        "memory_bytes": memory,
    }


async def _play(episode: Episode, looks: _Looks, number: int, call: int, calls: int) -> list[float]:
    """Seconds of each call, waiting included."""
    took = []
    for index in range(call, call + calls):
        begin_s = time.perf_counter()
        await episode.step(looks(number, index))
        took.append(time.perf_counter() - begin_s)
    return took


async def _forks(owner: PolicyThread, rollouts: Rollouts, looks: _Looks) -> dict[str, Any]:
    """Of a session in the middle of its window."""
    took: list[float] = []
    episode = await rollouts.open()
    try:
        steps = (await _play(episode, looks, 0, 0, 3))[1:]
        await _job(owner, _synchronize)
        for _ in range(FORKS):
            begin_s = time.perf_counter()
            child = await episode.fork()
            await _job(owner, _synchronize)
            took.append(time.perf_counter() - begin_s)
            await child.close()
    except Overloaded as error:
        return {"refused": str(error)}
    finally:
        await episode.close()
    return {"fork_s": float(np.median(took)), "first_s": took[0], "step_s": float(np.median(steps)), "n": len(took)}


def _synchronize(policy: Any, cancelled: Any) -> None:
    if policy.network.device.type == "cuda":
        torch.cuda.synchronize(policy.network.device)


def _recordings(policy: Any, cancelled: Any) -> int:
    """CUDA graphs so far; 0 where there are none."""
    return sum(len(cache) for cache in getattr(policy.path, "caches", ()))


async def _job(owner: PolicyThread, work: Work[Any]) -> Any:
    return await asyncio.wrap_future(owner.submit(work, lane="bench").future)


def table(report: dict[str, Any]) -> str:
    """For people."""
    where = report["provenance"]
    machine = where["gpu"]["name"] if where["gpu"] else f"{where['cpu']}, {where['cpu_cores']} cores"
    bound = report["capacity"]
    lines = [
        f"{report['network']}, {report['configuration']}, {report['evaluations']} evaluations, {machine}",
        f"{'sessions':>8} {'steps/s':>9} {'of one':>7} {'p50 ms':>9} {'p99 ms':>9} {'most/least':>11} "
        f"{'windows MB':>11} {'n':>5} {'max of the first window':>24}",
    ]
    first = next((row for row in report["rows"] if "steps_per_s" in row), None)
    for row in report["rows"]:
        if "refused" in row:
            lines.append(f"{row['sessions']:8d} refused: {row['refused']}")
            continue
        assert first is not None
        late, medians = row["latency_s"], row["session_p50_s"]
        lines.append(
            f"{row['sessions']:8d} {row['steps_per_s']:9.3f} {row['steps_per_s'] / first['steps_per_s']:7.2f} "
            f"{late['p50'] * 1e3:9.1f} {late['p99'] * 1e3:9.1f} {max(medians) / min(medians):11.2f} "
            f"{row['memory_bytes']['windows'] / 1e6:11.1f} {row['steps']:5d} "
            f"{row['first_window_s']['max'] * 1e3:21.1f} ms"
        )
    lines.append(
        f"each session takes {report['session_bytes'] / 1e6:.1f} MB, its instruction included; there is room for "
        f"{'any number (host memory)' if bound is None else bound}"
    )
    fork = report.get("fork")
    if fork is None:
        lines.append("interrupted before forks were measured")
    elif "refused" in fork:
        lines.append(f"a fork was refused: {fork['refused']}")
    else:
        lines.append(
            f"a fork takes {fork['fork_s'] * 1e3:.1f} ms ({fork['fork_s'] / fork['step_s']:.1%} of a step; the first "
            f"{fork['first_s'] * 1e3:.1f} ms) and a window of {report['window_bytes'] / 1e6:.1f} MB"
        )
    return "\n".join(lines)


def write_chart(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in report["rows"] if "steps_per_s" in row]
    names, places = [str(row["sessions"]) for row in rows], range(len(rows))
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.8))
    left.bar(places, [row["steps_per_s"] for row in rows], color=COLOUR)
    left.set_ylabel("steps per second, all sessions")
    middle.bar(places, [row["latency_s"]["p50"] * 1e3 for row in rows], color=COLOUR, label="p50")
    middle.plot(places, [row["latency_s"]["p99"] * 1e3 for row in rows], "k_", markersize=18, label="p99")
    middle.set_ylabel("ms from observation to chunk")
    middle.legend(fontsize=8)
    windows = [row["memory_bytes"]["windows"] for row in rows]
    unit, name = (1e9, "GB") if max(windows) > 1e9 else (1e6, "MB")
    right.bar(places, [size / unit for size in windows], color=COLOUR)
    right.set_ylabel(f"{name} of windows")
    for axes in (left, middle, right):
        axes.set_xticks(places, names)
        axes.set_xlabel("sessions at once")
    figure.suptitle(table(report).splitlines()[0], fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
