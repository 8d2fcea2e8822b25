#!/usr/bin/env python3
"""Evaluate N episodes at the same time against one policy server, one connection and one session each.

    python examples/02_parallel_sessions.py --uri ws://127.0.0.1:8000 --sessions 8 --steps 5

Every episode looks at pictures of its own, so its actions must not depend on who else is served. With --check each
episode is afterwards played again, alone, and the two runs are compared: the largest difference is printed, and the
exit status is 1 when it is not 0 (a server that mixes sessions, or whose arithmetic depends on the load).

Needs ``pip install 'wam_policy_ros[serve]'``.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from clips import DROID, connect, moving_card, observe, state_of

from wam_policy_ros.contract.errors import WamError


def episode(args: argparse.Namespace, number: int) -> tuple[npt.NDArray[np.float64], list[float]]:
    """All rows ``[steps, horizon, action_dim]`` and the seconds per call."""
    policy = connect(args.uri, api_key=args.api_key, wait_s=args.wait, quiet=True)
    source, rows, seconds = moving_card(DROID, seed=number), [], []
    state = state_of(np.full(8, 0.01 * number), DROID)
    session = policy.open(f"episode-{number}-{time.monotonic_ns()}")
    try:
        for step in range(args.steps):
            begin = time.perf_counter()
            chunk = policy.infer(session, observe(source, 8 * step, f"{args.prompt} number {number}", state))
            seconds.append(time.perf_counter() - begin)
            rows.append(chunk.actions)
        policy.close(session)
    finally:
        policy.disconnect()
    return np.stack(rows), seconds


def run(args: argparse.Namespace) -> int:
    connect(args.uri, api_key=args.api_key, wait_s=args.wait).disconnect()
    begin = time.perf_counter()
    with ThreadPoolExecutor(args.sessions) as pool:
        results = list(pool.map(lambda number: episode(args, number), range(args.sessions)))
    total_s = time.perf_counter() - begin
    calls = np.concatenate([seconds for _, seconds in results])
    print(
        f"{args.sessions} sessions, {len(calls)} calls in {total_s:.2f} s: {len(calls) / total_s:.1f} calls/s, "
        f"p50 {np.percentile(calls, 50) * 1e3:.1f} ms, p99 {np.percentile(calls, 99) * 1e3:.1f} ms"
    )
    if not args.check:
        return 0
    differences = [np.abs(rows - episode(args, number)[0]).max() for number, (rows, _) in enumerate(results)]
    print(f"each session again, alone: largest difference {max(differences):.3g}")
    return 0 if max(differences) == 0 else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uri", default="ws://127.0.0.1:8000")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5, help="calls per session")
    parser.add_argument("--prompt", default="pick up the cup")
    parser.add_argument("--check", action="store_true", help="play every session again, alone, and compare")
    parser.add_argument("--wait", type=float, help="give up when the server is not there after so many seconds")
    try:
        return run(parser.parse_args())
    except WamError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
