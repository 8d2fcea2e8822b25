#!/usr/bin/env python3
"""Write what DreamZero predicts will happen: one mp4 with the cameras and, beside them, the predicted video.

    python examples/04_save_predicted_video.py --checkpoint /data/DreamZero-DROID --clips FOLDER --output predicted.mp4
    python examples/04_save_predicted_video.py --network tiny --chunks 2       # random weights: noise, a test only

The policy runs in this process: predicted video does not travel over OpenPI, whose replies stay small. FOLDER as in
01_stream_clip.py; without it a test card is shown to the network.

Needs ``pip install 'wam_policy_ros[demo]'``.
"""

from __future__ import annotations

import argparse
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt
from clips import FPS, clips, moving_card, observe, state_of

from wam_policy_ros.contract.errors import ConfigError, MissingDependency, WamError

HOME = np.array([0.0, -0.785, 0.0, -2.356, 0.0, 1.571, 0.785, 0.0])
OUT_FPS = 5


def beside(seen: list[npt.NDArray[np.uint8]], predicted: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The cameras in a column, repeated to the height of the prediction, left of it."""
    left = np.concatenate(seen, axis=0)
    rows = np.linspace(0, len(left) - 1, predicted.shape[0]).astype(int)
    columns = np.linspace(0, left.shape[1] - 1, max(2, predicted.shape[0] * left.shape[1] // len(left))).astype(int)
    page = np.concatenate([left[rows][:, columns], predicted], axis=1)
    return page[: page.shape[0] // 2 * 2, : page.shape[1] // 2 * 2]  # H.264 wants even sizes


def run(args: argparse.Namespace) -> int:
    try:
        import av
    except ModuleNotFoundError as error:
        raise MissingDependency("av", "demo", "writing a video") from error
    try:
        from wam_policy_ros.engine.build import build_policy
    except ModuleNotFoundError as error:
        raise MissingDependency(str(error.name), "engine", "the network") from error
    policy = build_policy(
        embodiment="oxe_droid",
        checkpoint=args.checkpoint,
        random_weights=None if args.checkpoint else args.network,
        tokenizer=args.tokenizer,
        device=args.device,
        progress=lambda line, fraction: print(f"\r{line} {fraction:.0%}   ", end="", file=sys.stderr),
    )
    print(file=sys.stderr)
    if policy.spec.random_weights:
        print(f"RANDOM WEIGHTS, not a policy: {policy.spec.weights}")
    source, length = (moving_card(policy.spec), 10**9) if args.clips is None else clips(args.clips, policy.spec)
    session, joints, written = policy.open(), HOME, 0
    with av.open(str(args.output), "w") as container:
        stream = None
        for number in range(args.chunks):
            step = 0 if number == 0 else 24 * number - 1
            if step >= length:
                break
            chunk = policy.infer(session, observe(source, step, args.prompt, state_of(joints, policy.spec)))
            joints = np.clip(chunk.actions[-1], -3.0, 3.0)
            video = policy.render_video(chunk)
            if video is None:
                raise ConfigError("this policy predicts no video")
            for i, predicted in enumerate(video):
                ahead = round((i + 1) * len(chunk.actions) / len(video))
                page = beside([*source(min(step + ahead, length - 1)).values()], predicted)
                if stream is None:
                    stream = container.add_stream("libx264", rate=Fraction(OUT_FPS))
                    stream.height, stream.width, stream.pix_fmt = page.shape[0], page.shape[1], "yuv420p"
                container.mux(stream.encode(av.VideoFrame.from_ndarray(page, format="rgb24")))
                written += 1
            print(f"chunk {number}: {len(video)} frames for {len(chunk.actions) / FPS:.2f} s")
        if stream is not None:
            container.mux(stream.encode(None))
    policy.close(session)
    print(f"written: {args.output} ({written} frames)")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--checkpoint", help="checkpoint folder")
    source.add_argument("--network", choices=["tiny", "14b"], help="random weights of this size: a test, not a policy")
    parser.add_argument("--tokenizer", help="folder with tokenizer.json")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--clips", type=Path, help="folder with three mp4 files")
    parser.add_argument("--prompt", default="move the pan forward")
    parser.add_argument("--chunks", type=int, default=15)
    parser.add_argument("--output", type=Path, default=Path("predicted.mp4"))
    try:
        return run(parser.parse_args())
    except WamError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
