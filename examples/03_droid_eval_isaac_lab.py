#!/usr/bin/env python3
"""Evaluate a policy server in a DROID scene: the loop of the simulator evaluations, with their arguments.

    python examples/03_droid_eval_isaac_lab.py --host 127.0.0.1 --port 8000 --scene 1 --episodes 10 --headless

runs in Isaac Lab with the package sim-evals installed in Isaac Lab's Python (it registers the environment ``DROID``:
observations ``policy/external_cam``, ``external_cam_2``, ``wrist_cam``, ``arm_joint_pos``, ``gripper_pos``). THAT PART
HAS NOT BEEN RUN by the authors of this file: Isaac Lab was not available. What is tested is the loop itself, with

    python examples/03_droid_eval_isaac_lab.py --stand-in --port 8000 --episodes 2

whose environment is a drawing with a perfect arm; it knows no task, so its success rate means nothing.

The loop: pictures padded to what the server announces, one request every --open-loop-horizon steps at 15 Hz, absolute
joint positions, gripper closed above 0.5, a new session per episode, at most --max-steps steps.

Needs ``pip install 'wam_policy_ros[serve]'``; in Isaac Sim's Python with ``--no-deps``, beside websockets >= 15.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from clips import DROID, FPS, connect, moving_card, state_of

from wam_policy_ros.contract.errors import MissingDependency, WamError
from wam_policy_ros.contract.interface import Observation, PolicySpec

TASKS = {
    1: "put the cube in the bowl",
    2: "pick up the can and put it in the mug",
    3: "put the banana in the bin",
}
CAMERAS = ("external_cam", "external_cam_2", "wrist_cam")


class Environment(Protocol):
    """One simulated DROID station at 15 Hz."""

    def reset(self) -> dict[str, npt.NDArray[Any]]:
        """Cameras uint8 ``[H, W, 3]``, ``arm_joint_pos`` ``[7]`` rad, ``gripper_pos`` ``[1]``, 0 open, 1 closed."""
        ...

    def step(self, action: npt.NDArray[np.float64]) -> tuple[dict[str, npt.NDArray[Any]], bool, bool]:
        """``[8]`` targets -> observation, success, over."""
        ...

    def close(self) -> None: ...


class StandIn:
    """A drawing and an arm that is where it is told to be."""

    def __init__(self, seed: int) -> None:
        self._seed, self._episode = seed, 0
        self.reset()

    def reset(self) -> dict[str, npt.NDArray[Any]]:
        self._step, self._episode = 0, self._episode + 1
        self._joints = np.array([0.0, -0.785, 0.0, -2.356, 0.0, 1.571, 0.785, 0.0])
        return self._look()

    def step(self, action: npt.NDArray[np.float64]) -> tuple[dict[str, npt.NDArray[Any]], bool, bool]:
        self._step += 1
        self._joints = np.clip(action, -3.0, 3.0)
        return self._look(), False, False

    def _look(self) -> dict[str, npt.NDArray[Any]]:
        images = list(moving_card(DROID, seed=self._seed + self._episode)(self._step).values())
        return dict(zip(CAMERAS, images, strict=True)) | {
            "arm_joint_pos": self._joints[:7],
            "gripper_pos": self._joints[7:],
        }

    def close(self) -> None:
        pass


def isaac_lab(args: argparse.Namespace) -> Environment:  # pragma: no cover - needs Isaac Lab
    """The environment ``DROID`` of sim-evals. Not run by the authors, see above."""
    try:
        from isaaclab.app import AppLauncher
    except ModuleNotFoundError as error:
        raise WamError(
            "Isaac Lab is not installed in this Python", got=error, remedy="run it in Isaac Lab's, or give --stand-in"
        ) from error
    app = AppLauncher(headless=args.headless, enable_cameras=True).app
    import gymnasium
    import sim_evals.environments  # noqa: F401  registers DROID
    from isaaclab_tasks.utils import parse_env_cfg

    config = parse_env_cfg("DROID", device="cuda", num_envs=1, use_fabric=True)
    config.set_scene(args.scene)
    config.episode_length_s = args.max_steps / FPS
    env = gymnasium.make("DROID", cfg=config)

    class Wrapped:
        def reset(self) -> dict[str, npt.NDArray[Any]]:
            env.reset()
            seen, _ = env.reset()  # the first frames after a reset are still those of the last episode
            return self._plain(seen)

        def step(self, action: npt.NDArray[np.float64]) -> tuple[dict[str, npt.NDArray[Any]], bool, bool]:
            import torch

            command = torch.tensor(action, dtype=torch.float32)[None]
            seen, _, terminated, truncated, info = env.step(command)
            return self._plain(seen), bool(info.get("success", False)), bool(terminated) or bool(truncated)

        def _plain(self, seen: Any) -> dict[str, npt.NDArray[Any]]:
            values = seen["policy"]
            return {name: values[name][0].cpu().numpy() for name in (*CAMERAS, "arm_joint_pos", "gripper_pos")}

        def close(self) -> None:
            env.close()
            app.close()

    return Wrapped()


def padded(image: npt.NDArray[np.uint8], height: int, width: int) -> npt.NDArray[np.uint8]:
    """Resize with the aspect kept, black bars: bilinear, as the other clients do it."""
    if image.shape[:2] == (height, width):
        return image
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise MissingDependency("pillow", "serve", "resizing pictures") from error
    ratio = max(image.shape[1] / width, image.shape[0] / height)
    small = Image.fromarray(image).resize(
        (int(image.shape[1] / ratio), int(image.shape[0] / ratio)), Image.Resampling.BILINEAR
    )
    out = Image.new("RGB", (width, height))
    out.paste(small, ((width - small.width) // 2, (height - small.height) // 2))
    return np.asarray(out)


def observation(seen: dict[str, npt.NDArray[Any]], spec: PolicySpec, step: int, prompt: str) -> Observation:
    stamp_ns = round(10**9 + step * 1e9 / FPS)
    stamps = np.array([stamp_ns], dtype=np.int64)
    images = {
        c.name: padded(seen[name], c.height, c.width)[None] for c, name in zip(spec.cameras, CAMERAS, strict=True)
    }
    state = np.concatenate([seen["arm_joint_pos"], seen["gripper_pos"]]).astype(np.float64)
    return Observation(images, state_of(state, spec), prompt, stamp_ns, dict.fromkeys(images, stamps))


def play(env: Environment, policy: Any, args: argparse.Namespace) -> dict[str, Any]:
    """One episode."""
    session, seen = policy.open(), env.reset()
    chunk, used, calls = None, 0, []
    try:
        for step in range(args.max_steps):
            if chunk is None or used == args.open_loop_horizon:
                chunk, used = policy.infer(session, observation(seen, policy.spec, step, args.prompt)), 0
                calls.append(chunk.timings_s["total"])
            action, used = chunk.actions[used].copy(), used + 1
            action[7] = float(action[7] > 0.5)
            seen, success, over = env.step(action)
            if success or over:
                break
    finally:
        policy.close(session)
    return {
        "success": success,
        "steps": step + 1,
        "calls": len(calls),
        "call_ms": round(float(np.mean(calls)) * 1e3, 1),
    }


def run(args: argparse.Namespace) -> int:
    args.prompt = args.prompt or TASKS[args.scene]
    policy = connect(f"ws://{args.host}:{args.port}", api_key=args.api_key, wait_s=args.wait)
    env: Environment = StandIn(args.scene) if args.stand_in else isaac_lab(args)
    results = []
    try:
        for number in range(args.episodes):
            results.append(play(env, policy, args))
            print(f"episode {number}: {results[-1]}", flush=True)
    finally:
        env.close()
        policy.disconnect()
    wins = sum(r["success"] for r in results)
    where = "the stand-in, which has no task" if args.stand_in else f"scene {args.scene}"
    print(f"{wins} of {len(results)} episodes succeeded in {where} ({args.prompt!r})")
    if args.output:
        args.output.write_text(
            json.dumps({"scene": where, "weights": policy.spec.weights, "episodes": results}, indent=1)
        )
        print(f"written: {args.output}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--api-key", default="")
    parser.add_argument("--scene", type=int, choices=sorted(TASKS), default=1)
    parser.add_argument("--prompt", help="instead of the scene's task")
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--max-steps", type=int, default=450, help="of 1/15 s")
    parser.add_argument("--open-loop-horizon", type=int, default=8, help="rows executed of each chunk")
    parser.add_argument("--headless", action="store_true")
    parser.add_argument("--stand-in", action="store_true", help="a drawing instead of Isaac Lab: tests the loop")
    parser.add_argument("--wait", type=float, help="give up when the server is not there after so many seconds")
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    try:
        return run(parser.parse_args())
    except WamError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
