"""``wam bench node``: what the node itself costs, from a frame's arrival to the step and from the step to the robot.

Three cameras and joint states come from another process over real DDS; the policy is a step that only waits, with the
GIL released as a GPU step has it. No GPU, no weights.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.tools.provenance import host
from wam_policy_ros.tools.up import packaged_file

TARGET_S = 0.010
PATHS = {
    "frame_to_step": "newest frame's arrival to start of the step",
    "step_to_publish": "end of the step to trajectory published",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=60.0, help="measured time, after a warm-up")
    parser.add_argument("--step", type=float, default=0.15, metavar="S", help="how long the step waits [s]")
    parser.add_argument("--size", default="640x480", metavar="WxH", help="of the raw rgb8 images")
    parser.add_argument("--hz", type=float, default=30.0, help="of each of the three cameras")
    parser.add_argument("--reliable", action="store_true", help="reliable images instead of best effort")
    parser.add_argument("--executor", choices=["single", "events"], default="single")
    parser.add_argument("--no-profile", action="store_true", help="without config/fastdds.xml: Fast DDS as it is")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the distributions")


def run(args: argparse.Namespace) -> int:
    report = summarise(*measure(args), args)
    print(text(report))
    for path, write in ((args.json, _write_json), (args.png, _write_png)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(report, path)
            print(f"written: {path}")
    return 0 if report["ok"] else 1


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run both processes in a DDS domain of their own. Returns what node and robot measured.

    Raises:
        ConfigError: a process failed; with the end of its log.
    """
    width, _, height = args.size.partition("x")
    if not (width.isdigit() and height.isdigit()):
        raise ConfigError("--size is not WIDTHxHEIGHT", got=args.size, expected="for example 640x480")
    environment = {**os.environ, "ROS_DOMAIN_ID": str(101 + os.getpid() % 100)}
    environment["ROS_AUTOMATIC_DISCOVERY_RANGE"] = "LOCALHOST"
    for name in ("FASTDDS_DEFAULT_PROFILES_FILE", "FASTRTPS_DEFAULT_PROFILES_FILE", "RMW_IMPLEMENTATION"):
        environment.pop(name, None)
    if not args.no_profile:
        environment["FASTDDS_DEFAULT_PROFILES_FILE"] = str(packaged_file("fastdds.xml"))
    common = ["--seconds", str(args.seconds), "--step-s", str(args.step), "--width", width, "--height", height]
    common += ["--hz", str(args.hz), "--executor", args.executor, *(["--reliable"] if args.reliable else [])]
    with tempfile.TemporaryDirectory() as folder:
        files = {role: Path(folder) / f"{role}.json" for role in ("node", "robot")}
        logs = {role: Path(folder) / f"{role}.log" for role in files}
        processes = {role: _start(role, files[role], logs[role], common, environment) for role in files}
        try:
            deadline_s = time.monotonic() + args.seconds + 120.0
            while processes["robot"].poll() is None and processes["node"].poll() is None:
                if time.monotonic() > deadline_s:
                    raise ConfigError("the robot of the benchmark does not end", got=_tail(logs["robot"]))
                time.sleep(0.2)
        finally:
            for process in processes.values():
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
            for process in processes.values():
                try:
                    process.wait(20.0)
                except subprocess.TimeoutExpired:
                    process.kill()
        for role, path in files.items():
            if not path.is_file():
                raise ConfigError(f"the {role} of the benchmark measured nothing", got=_tail(logs[role]))
        node, robot = (json.loads(files[role].read_text(encoding="utf-8")) for role in ("node", "robot"))
        if "received" not in node or not node["durations_s"].get("frame_to_step"):
            raise ConfigError("the node made no step", got=_tail(logs["node"]), remedy="a longer --seconds")
    return node, robot


def _start(role: str, out: Path, log: Path, arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "wam_policy_ros.ros.bench_node", role, "--out", str(out), *arguments]
    with open(log, "w", encoding="utf-8") as sink:
        return subprocess.Popen(command, env=environment, stdout=sink, stderr=subprocess.STDOUT, text=True)


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])


def summarise(node: dict[str, Any], robot: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Percentiles, frames lost, and whether all of it is within the targets."""
    paths = {name: _percentiles(node["durations_s"][name]) for name in PATHS}
    lost = {topic: sent - node["received"].get(topic, 0) for topic, sent in robot["sent"].items()}
    return {
        "paths_s": paths,
        "of_which_until_request_s": _percentiles(node["durations_s"]["frame_to_request"]),
        "values_s": {name: node["durations_s"][name] for name in PATHS},
        "frames": {topic: {"sent": sent, "lost": lost[topic]} for topic, sent in robot["sent"].items()},
        "dropped": node.get("dropped", {}),
        "cpu_cores": {"node": node.get("cpu_cores"), "cameras and joints": robot["cpu_cores"]},
        "camera_late_s": robot["late_s"],
        "control_rate_hz": node["control_rate_hz"],
        "stall_share": node.get("stall_share"),
        "counters": node["counters"],
        "target_s": TARGET_S,
        "ok": all(p["p99"] <= TARGET_S for p in paths.values()) and not any(lost.values()),
        "setting": {
            "seconds": args.seconds,
            "step_s": args.step,
            "cameras": len(robot["sent"]),
            "size": args.size,
            "hz": args.hz,
            "qos": "reliable" if args.reliable else "best effort",
            "executor": args.executor,
            "profile": None if args.no_profile else "config/fastdds.xml",
            "cpu_count": os.cpu_count(),
            "load_average": os.getloadavg()[0],
        },
        "provenance": host(),
    }


def _percentiles(values: list[float]) -> dict[str, float]:
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99), "max": max(values), "n": len(values)}


def text(report: dict[str, Any]) -> str:
    """The table for people."""
    setting, where = report["setting"], report["provenance"]
    lines = [
        f"{setting['cameras']} cameras {setting['size']} rgb8 at {setting['hz']:g} Hz, {setting['qos']}, "
        f"Fast DDS profile {setting['profile'] or 'none'}, executor {setting['executor']}",
        f"a step that waits {setting['step_s']:g} s; {setting['seconds']:g} s measured",
        f"{where['cpu']}, {setting['cpu_count']} cores, load average {setting['load_average']:.1f}; commit "
        f"{where['commit'] or 'unknown'}",
        f"{'ms':46}{'p50':>8}{'p90':>8}{'p99':>8}{'max':>8}{'n':>6}",
    ]
    for name, what in PATHS.items():
        v = report["paths_s"][name]
        verdict = "ok" if v["p99"] <= report["target_s"] else f"above {report['target_s'] * 1e3:g}"
        numbers = "".join(f"{v[k] * 1e3:8.2f}" for k in ("p50", "p90", "p99", "max"))
        lines.append(f"{what:46}{numbers}{v['n']:6}  {verdict}")
    for topic, frames in report["frames"].items():
        lines.append(f"{topic}: {frames['sent']} sent, {frames['lost']} lost")
    rate, cpu = report["control_rate_hz"], report["cpu_cores"]
    used = ", ".join(f"{name} {value:.2f} cores" for name, value in cpu.items() if value is not None)
    lines.append(f"CPU: {used}; control ticks {rate['achieved']:.2f} of {rate['nominal']:g} per second")
    return "\n".join(lines)


def _write_json(report: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(report, indent=1), encoding="utf-8")


def _write_png(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(PATHS), figsize=(11, 3.4))
    for axis, (name, what) in zip(axes, PATHS.items(), strict=True):
        values_ms = np.sort(np.array(report["values_s"][name])) * 1e3
        axis.plot(values_ms, np.arange(1, len(values_ms) + 1) / len(values_ms) * 100)
        axis.axvline(report["target_s"] * 1e3, color="C3", lw=1, ls="--", label="target for p99")
        axis.axhline(99, color="0.8", lw=0.8)
        axis.set(
            xlabel=f"{what} [ms]",
            ylabel="% of steps",
            xlim=(0, None),
            title=f"p99 {np.percentile(values_ms, 99):.1f} ms",
        )
        axis.legend(fontsize=8)
    setting = report["setting"]
    figure.suptitle(
        f"{setting['cameras']} cameras {setting['size']} at {setting['hz']:g} Hz, {setting['cpu_count']} cores"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)
