"""``wam bench WHAT``: one module per measurement, with ``add_arguments(parser)`` and ``run(args) -> exit status``."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from .lazy import LazyParser


class Bench(NamedTuple):
    """``module`` is relative to ``wam_policy_ros.tools``; it is imported when it is asked for."""

    module: str
    text: str


BENCHES: dict[str, Bench] = {
    "step": Bench("bench_suite.step", "time a closed-loop step: stages, ceilings, memory, cold and warm"),
    "sessions": Bench(
        "bench_suite.sessions", "1, 2, 4 and 8 sessions of one policy: steps per second, waiting, memory, forks"
    ),
    "tiers": Bench("bench_suite.tiers", "how far the actions move with fewer evaluations, less guidance, fewer bits"),
    "accuracy": Bench(
        "bench_suite.accuracy", "error of each configuration against float32: per layer, flow and action"
    ),
    "load": Bench("bench_suite.load", "weights from the page cache to the device, and networks with them"),
    "priority": Bench("bench_suite.priority", "a robot's step alone and beside busy clients, with its priority or not"),
    "predict": Bench("bench_suite.predict", "a step on 2, 4 and 8 GPUs, predicted from a report of one"),
    "table": Bench("bench_suite.markdown", "the README's table, or the chart, from a report of wam bench step"),
    "vae": Bench("bench_suite.vae", "the VAE's encoder, plain and fast; convolutions checked and timed; preprocessing"),
    "kernels": Bench("bench_suite.kernels", "each fused operation against its twin and the memory bandwidth"),
    "node": Bench("bench_suite.node", "what the node costs around the step: three cameras over real DDS, no GPU"),
    "openpi": Bench("bench_suite.openpi", "what the OpenPI server costs per request, beside a plain server"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="what", metavar="WHAT", required=True, parser_class=LazyParser)
    for name, bench in BENCHES.items():
        benches.add_parser(name, help=bench.text, description=bench.text, module=bench.module)


def run(args: argparse.Namespace) -> int:
    return int(args.module.run(args))
