#!/usr/bin/env python3
"""Stream three camera clips to a policy server and print what it would do.

Start a server, e.g. ``wam serve --random-weights tiny`` (random weights: a test of the machinery), then

    python examples/01_stream_clip.py --uri ws://127.0.0.1:8000 --clips FOLDER

FOLDER holds one mp4 per camera (``*exterior_image_1_left*.mp4``, ``*exterior_image_2_left*.mp4``,
``*wrist_image_left*.mp4``; 320x180, 15 frames per second). Without --clips a test card is sent. As the published client
does, one chunk of 24 steps is asked for every 24 frames; the joints are those of the chunk before.

Needs ``pip install 'wam_policy_ros[serve]'``, and ``[demo]`` for --clips.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from clips import DROID, clips, connect, moving_card, observe, state_of

from wam_policy_ros.contract.errors import WamError

HOME = np.array([0.0, -0.785, 0.0, -2.356, 0.0, 1.571, 0.785, 0.0])


def run(args: argparse.Namespace) -> int:
    source, length = (moving_card(DROID), 10**9) if args.clips is None else clips(args.clips, DROID)
    policy = connect(args.uri, api_key=args.api_key, wait_s=args.wait)
    session = policy.open()
    joints, rows = HOME, []
    try:
        for number in range(args.chunks):
            step = 0 if number == 0 else 24 * number - 1
            if step >= length:
                break
            chunk = policy.infer(session, observe(source, step, args.prompt, state_of(joints, DROID)))
            rows.append(chunk.actions)
            joints = np.clip(chunk.actions[-1], -3.0, 3.0)
            print(
                f"chunk {number:3}  frame {step:4}  {chunk.timings_s['total'] * 1e3:7.1f} ms  "
                f"{chunk.info['request_bytes'] / 1e6:.2f} MB  last joints " + " ".join(f"{j:+.3f}" for j in joints)
            )
        policy.reset(session)
    finally:
        policy.disconnect()
    if args.save:
        np.savez_compressed(args.save, actions=np.stack(rows))
        print(f"written: {args.save}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uri", default="ws://127.0.0.1:8000")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--clips", type=Path, help="folder with three mp4 files")
    parser.add_argument("--prompt", default="move the pan forward")
    parser.add_argument("--chunks", type=int, default=15)
    parser.add_argument("--wait", type=float, help="give up when the server is not there after so many seconds")
    parser.add_argument("--save", type=Path, metavar="FILE.npz", help="keep all rows")
    try:
        return run(parser.parse_args())
    except WamError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
