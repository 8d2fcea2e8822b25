"""``wam bench openpi``: what the OpenPI server costs per request, beside a plain server in the same run.

Both servers run in a process of their own with the same policy, which answers with its question, so that every answer
can be checked to be the right one's. Three loads: one client that asks again as soon as it is answered (the cost of one
request), many clients at a steady rate, evenly staggered (what a lab does), and as many requests as there will fit. The
overhead is the time a client waits less the time the bare policy takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from wam_policy_ros.contract.errors import EngineError
from wam_policy_ros.contract.fakes import example_observation
from wam_policy_ros.tools.provenance import host

from .openpi_clients import Asker, run_load
from .openpi_servers import READY, echo_policy

TARGET_MS = 2.0
COLOURS = {"ours": "#2a6f97", "plain": "#bc6c25"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1.0, metavar="HZ", help="of each client; default 1")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the steady load; the others are shorter")
    parser.add_argument("--policy-ms", type=float, default=0.0, help="time the policy takes, without using the CPU")
    parser.add_argument("--no-plain", action="store_true", help="leave the plain server out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="write latencies and memory as PNG")


def run(args: argparse.Namespace) -> int:
    bare = bare_policy_s(args.policy_ms / 1e3)
    report: dict[str, Any] = {
        "clients": args.clients,
        "rate_hz": args.rate,
        "policy_ms": args.policy_ms,
        "request_bytes": len(Asker(0, "size").message),
        "bare_policy_ms": _percentiles(np.array(bare) * 1e3),
        "target_overhead_p99_ms": TARGET_MS,
        "host": host(),
        "servers": {},
    }
    for kind in ("ours",) if args.no_plain else ("ours", "plain"):
        print(f"  {kind}: {args.seconds:.0f} s steady ...", file=sys.stderr, flush=True)
        report["servers"][kind] = measure(kind, args, report["bare_policy_ms"]["p50"])
    print(summary(report))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
        print(f"written: {args.json}")
    if args.chart:
        write_chart(report, args.chart)
        print(f"written: {args.chart}")
    loads = [load for server in report["servers"].values() for load in server["loads"].values()]
    return 1 if any(load["mixed"] or load["errors"] for load in loads) else 0


def bare_policy_s(policy_s: float, calls: int = 300) -> list[float]:
    """Seconds per call of the policy alone, in this process."""
    policy = echo_policy(policy_s)
    session, observation = policy.open(), example_observation(policy.spec)
    out = []
    for _ in range(calls):
        begin = time.perf_counter()
        policy.infer(session, observation)
        out.append(time.perf_counter() - begin)
    return out


def measure(kind: str, args: argparse.Namespace, bare_ms: float) -> dict[str, Any]:
    """All loads against one server."""
    plan = {
        "one client": (1, min(5.0, args.seconds), None),
        "steady": (args.clients, args.seconds, args.rate),
        "full": (args.clients, min(5.0, args.seconds), None),
    }
    with server_process(kind, args) as (process, uri), Watch(process.pid) as watch:
        loads = {}
        for name, (clients, seconds, rate_hz) in plan.items():
            # Not counted: imports, first buffers, and the processor's own warming up.
            asyncio.run(run_load(uri, clients=clients, seconds=0.5, rate_hz=rate_hz, tag=f"{name} warm-up"))
            begin, cpu_s = time.perf_counter(), watch.cpu_s()
            load = asyncio.run(run_load(uri, clients=clients, seconds=seconds, rate_hz=rate_hz, tag=name))
            used_s, wall_s = watch.cpu_s() - cpu_s, time.perf_counter() - begin
            ms = np.array(load.latencies_s) * 1e3
            loads[name] = {
                "clients": clients,
                "rate_hz": rate_hz,
                "latency_ms": _percentiles(ms),
                "overhead_ms": _percentiles(ms - bare_ms),
                "sent_late_ms": _percentiles(np.array(load.late_s) * 1e3),
                "requests_per_s": len(ms) / wall_s,
                "server_cpu_ms_per_request": used_s / max(1, len(ms)) * 1e3,
                "mixed": load.mixed,
                "errors": load.errors[:20],
            }
        return {"loads": loads, "rss_mb": watch.samples}


@contextmanager
def server_process(kind: str, args: argparse.Namespace) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its address."""
    words = ["--policy-s", str(args.policy_ms / 1e3), "--connections", str(args.clients)]
    module = "wam_policy_ros.tools.bench_suite.openpi_servers"
    process = subprocess.Popen([sys.executable, "-m", module, kind, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if READY not in line:
            raise EngineError(f"the {kind} server did not start", got=line.strip() or f"exit {process.wait(5)}")
        yield process, f"ws://127.0.0.1:{int(line.split()[-1])}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Watch:
    """Memory and processor time of another process, from /proc."""

    def __init__(self, pid: int, period_s: float = 0.5) -> None:
        self._proc, self._period_s = Path(f"/proc/{pid}"), period_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._start_s = time.perf_counter()
        self.samples: list[tuple[float, float]] = []

    def cpu_s(self) -> float:
        words = (self._proc / "stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def rss_mb(self) -> float:
        return int((self._proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    def _run(self) -> None:
        while not self._end.wait(self._period_s):
            try:
                self.samples.append((round(time.perf_counter() - self._start_s, 2), round(self.rss_mb(), 1)))
            except OSError:
                return

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(2)


def _percentiles(values: Any) -> dict[str, float]:
    if not len(values):
        return {}
    out = {f"p{p}": round(float(np.percentile(values, p)), 3) for p in (50, 90, 99)}
    return out | {"max": round(float(np.max(values)), 3), "n": len(values)}


def summary(report: dict[str, Any]) -> str:
    """A table for people."""
    lines = [
        f"{report['clients']} clients, requests of {report['request_bytes'] / 1e3:.0f} kB, bare policy "
        f"p50 {report['bare_policy_ms']['p50']:.3f} ms p99 {report['bare_policy_ms']['p99']:.3f} ms; "
        f"{report['host']['cpu']}, {report['host']['cpu_cores']} cores, clients on the same machine",
        f"{'overhead per request, ms':34}{'p50':>8}{'p90':>8}{'p99':>8}{'max':>9}{'n':>8}{'req/s':>8}{'CPU ms':>8}"
        f"{'mixed':>7}{'errors':>7}",
    ]
    for name in ("one client", "steady", "full"):
        for kind, server in report["servers"].items():
            load = server["loads"][name]
            o = load["overhead_ms"]
            if not o:
                lines.append(f"{name}, {kind}: no answers; {load['errors'][:1]}")
                continue
            rate = f" ({load['rate_hz']:g} Hz each)" if load["rate_hz"] else ""
            label = f"{name}{rate}, {kind}"
            lines.append(
                f"{label:34}{o['p50']:8.2f}{o['p90']:8.2f}{o['p99']:8.2f}{o['max']:9.2f}{o['n']:8}"
                f"{load['requests_per_s']:8.0f}{load['server_cpu_ms_per_request']:8.2f}{load['mixed']:7}"
                f"{len(load['errors']):7}"
            )
    for kind, server in report["servers"].items():
        if rss := [mb for _, mb in server["rss_mb"]]:
            half = rss[len(rss) // 2 :]
            lines.append(f"memory of {kind}: {rss[0]:.0f} MB at first, {min(half):.0f} to {max(half):.0f} MB later")
    ours = report["servers"]["ours"]["loads"]["steady"]["overhead_ms"]
    if ours:
        verdict = "met" if ours["p99"] <= TARGET_MS else "NOT met"
        lines.append(f"target: p99 of the steady load at most {TARGET_MS:g} ms more than the bare policy: {verdict}")
    return "\n".join(lines)


def write_chart(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    names = ("one client", "steady")
    for offset, (kind, server) in enumerate(report["servers"].items()):
        for place, name in enumerate(names):
            o = server["loads"][name]["overhead_ms"]
            if o:
                x = place + (offset - 0.5) * 0.3
                left.bar(x, o["p50"], 0.28, color=COLOURS[kind], label=f"{kind}, p50" if not place else None)
                left.plot([x], [o["p99"]], "k_", markersize=18, label="p99" if not place and not offset else None)
        if server["rss_mb"]:
            right.plot(*zip(*server["rss_mb"], strict=True), color=COLOURS[kind], label=kind)
    left.axhline(TARGET_MS, color="grey", linestyle=":", label="target for p99")
    left.set_xticks(range(len(names)), names)
    left.set_ylabel("ms more than the bare policy")
    left.set_title(f"{report['request_bytes'] / 1e3:.0f} kB requests, {report['clients']} clients")
    right.set_xlabel("s")
    right.set_ylabel("resident memory of the server, MB")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
