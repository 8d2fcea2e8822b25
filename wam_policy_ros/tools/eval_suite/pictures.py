"""A video and a plot of an episode: what was executed is played once more, with every picture drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np

from wam_policy_ros.sim.cameras import NAMES
from wam_policy_ros.sim.errors import SimError
from wam_policy_ros.sim.tasks import TASKS
from wam_policy_ros.sim.world import RATE_HZ, Frame, World
from wam_policy_ros.tools.report import Recording, Trajectory, write_plot, write_video

from .episode import Episode
from .predicted import Call, Eye, sheet

JOINTS = (*(f"joint {k}" for k in range(1, 8)), "gripper (finger)")


def draw(
    world: World, episode: Episode, calls: Sequence[Call], folder: Path, weights: str, eye: Eye | None = None
) -> tuple[Path, Path]:
    """Write ``seed_N_TASK.mp4`` (three cameras, and beside them the predicted video) and the plot of the joints; with
    ``eye`` also ``seed_N_TASK_predicted.png``, what was predicted below what then was seen.

    Raises:
        SimError: played again, the episode went another way.
    """
    seen = recording(world, episode, calls)
    stem = f"seed_{episode.seed}_{episode.task}"
    ended = "lifted" if episode.success else "not lifted"
    said = textwrap.shorten(episode.instruction, 80, placeholder=" ..")
    caption = f"seed {episode.seed}: {ended} | {said} | {weights}"
    video, plot = folder / f"{stem}.mp4", folder / f"{stem}.png"
    write_plot(seen, plot, caption)
    write_video(seen, video, caption)
    if eye is not None:
        real = {k: eye.mosaic(dict(zip(NAMES, views, strict=True))) for k, views in enumerate(seen.frames)}
        if (picture := sheet(calls, real, episode.ticks)) is not None:
            cv2.imwrite(str(folder / f"{stem}_predicted.png"), picture[..., ::-1])
    return video, plot


def recording(world: World, episode: Episode, calls: Sequence[Call]) -> Recording:
    """The episode as the demo's report knows it; simulated seconds since its start."""
    frames = [world.reset(episode.seed, TASKS[episode.task])]
    for row in episode.executed:
        frames.append(world.step(row[:7], row[7]))
    outcome = world.outcome
    if outcome.success != episode.success or outcome.moved_m != episode.moved_m:
        raise SimError(
            "played again, the episode went another way",
            got=f"success {outcome.success}, moved {outcome.moved_m}",
            expected=f"success {episode.success}, moved {episode.moved_m}",
        )
    predicted_s, predicted = _predicted(calls)
    return Recording(
        joint_names=JOINTS,
        camera_names=NAMES,
        trajectories=tuple(
            Trajectory(c.tick / RATE_HZ, np.arange(1, len(c.rows) + 1) / RATE_HZ, c.rows) for c in calls
        ),
        joint_s=np.array([f.tick / RATE_HZ for f in frames]),
        joints=np.array([_state(f) for f in frames]),
        frame_s=np.array([f.tick / RATE_HZ for f in frames]),
        frames=np.stack([[f.images[n] for n in NAMES] for f in frames]),
        predicted_s=predicted_s,
        predicted=predicted,
        status_s=np.zeros(0),
        statuses=(),
    )


def _state(frame: Frame) -> np.ndarray:
    return np.append(frame.joint_position, frame.gripper_position)


def _predicted(calls: Sequence[Call]) -> tuple[np.ndarray, np.ndarray]:
    """When each predicted frame is due, and the frames. Those of a later call replace those of an earlier one."""
    times: list[float] = []
    frames: list[np.ndarray] = []
    ends = [c.tick for c in calls[1:]] + [10**9]
    for call, end in zip(calls, ends, strict=True):
        for k, frame in enumerate(call.predicted if call.predicted is not None else ()):
            due = call.tick + call.due[k]
            if due <= end:
                times.append(due / RATE_HZ)
                frames.append(frame)
    shape = (0, 1, 1, 3)
    return np.array(times), np.stack(frames) if frames else np.zeros(shape, np.uint8)
