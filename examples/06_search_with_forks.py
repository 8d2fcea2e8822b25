#!/usr/bin/env python3
"""Look before you leap: at every call try several noises from the same point of the episode and go on with one of them.

    python examples/06_search_with_forks.py --checkpoint /data/DreamZero-DROID --tries 4
    python examples/06_search_with_forks.py --network tiny --chunks 2       # random weights: a test only

Each try is a fork of the episode with a seed of its own; that with the smoothest rows (least change of speed) lives on,
the others are closed. A simulator's user would run each try in a copy of the world and keep what went best: replace
``cost``. The cameras show a test card here.

Needs ``pip install 'wam_policy_ros[engine]'``.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import numpy as np
from clips import moving_card, observe, state_of

from wam_policy_ros.contract.errors import MissingDependency, WamError
from wam_policy_ros.contract.interface import ActionChunk
from wam_policy_ros.contract.rollouts import Rollouts

HOME = np.array([0.0, -0.785, 0.0, -2.356, 0.0, 1.571, 0.785, 0.0])


def cost(chunk: ActionChunk) -> float:
    """Root of the mean squared second difference of the arm's rows, rad."""
    return float(np.sqrt(np.mean(np.diff(chunk.actions[:, :7], n=2, axis=0) ** 2)))


async def search(args: argparse.Namespace) -> None:
    try:
        from wam_policy_ros.engine.build import build_policy
    except ModuleNotFoundError as error:
        raise MissingDependency(str(error.name), "engine", "the network") from error
    network = {"checkpoint": args.checkpoint} if args.checkpoint else {"random_weights": args.network}
    factory = lambda progress: build_policy(  # noqa: E731
        embodiment="oxe_droid", tokenizer=args.tokenizer, device=args.device, progress=progress, **network
    )
    async with Rollouts(factory) as rollouts:
        spec = rollouts.spec
        if spec.random_weights:
            print(f"RANDOM WEIGHTS, not a policy: {spec.weights}")
        card, joints, episode = moving_card(spec), HOME, await rollouts.open()
        for call in range(args.chunks):
            seen = observe(card, spec.horizon * call, args.prompt, state_of(joints, spec))
            tries = [await episode.fork(seed=args.tries * call + k) for k in range(args.tries)]
            found = await rollouts.step(dict.fromkeys(tries, seen))
            chunks = {one: chunk for one, chunk in found.items() if isinstance(chunk, ActionChunk)}
            if not chunks:
                raise next(error for error in found.values() if isinstance(error, WamError))
            best = min(chunks, key=lambda one: cost(chunks[one]))
            costs = " ".join(f"{cost(chunk):.4f}" for chunk in chunks.values())
            print(f"call {call}  costs {costs}  goes on with seed {best.seed}")
            for other in {episode, *tries} - {best}:
                await other.close()
            episode, joints = best, chunks[best].actions[-1]
        print(f"{rollouts.sessions} session is open, of {1 + args.chunks * args.tries} that were")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--checkpoint", help="folder")
    source.add_argument("--network", choices=["tiny"], default="tiny", help="random weights")
    parser.add_argument("--tokenizer", help="folder with tokenizer.json, if the checkpoint has none")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--tries", type=int, default=3, help="per call; with the episode itself, so many windows and one"
    )
    parser.add_argument("--chunks", type=int, default=3)
    parser.add_argument("--prompt", default="pick up the cup")
    try:
        asyncio.run(search(parser.parse_args()))
    except WamError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
