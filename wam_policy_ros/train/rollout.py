"""A policy in the simulator, in lock-step: the engine's own policy, called as a robot's node calls it.

Every call gets the frames of its ``frame_offsets`` (the first one frame only) and the state of now; the first rows of
the chunk are executed, then it is called again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from wam_policy_ros.contract.executed import GRIPPER_THRESHOLD, carried
from wam_policy_ros.contract.interface import ActionChunk, Observation, Policy
from wam_policy_ros.sim.cameras import NAMES
from wam_policy_ros.sim.tasks import Task
from wam_policy_ros.sim.world import Frame, World


@dataclass
class Outcome:
    """How a rollout went.

    Attributes:
        ticks: until success or the end; lifted_m: highest the thing was; calls_s: seconds of every call.
        states, actions: per tick, as in ``Episode``.
    """

    seed: int
    task: str
    instruction: str
    success: bool = False
    ticks: int = 0
    lifted_m: float = 0.0
    moved: list[str] = field(default_factory=list)
    calls_s: list[float] = field(default_factory=list)


def _is_seen(tick: int, next_call: int, execute: int, offsets: tuple[int, ...]) -> bool:
    """Whether the next call or one after it looks at the frame of this tick."""
    calls = range(next_call, tick - min(offsets) + 1, execute)
    return tick == next_call or any(tick - call in offsets for call in calls)


def roll_out(
    world: World,
    policy: Policy,
    seed: int,
    task: Task,
    instruction: str,
    *,
    execute: int,
    max_ticks: int = 160,
    on_call: Callable[[Frame, ActionChunk], None] = lambda frame, chunk: None,
    on_tick: Callable[[Frame, npt.NDArray[np.float64]], None] = lambda frame, row: None,
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda frames: frames,
    look_at: tuple[int, ...] = (),
    on_seen: Callable[[Frame], None] = lambda frame: None,
) -> Outcome:
    """One episode, until the task is done or the ticks are over.

    Args:
        execute: rows of every chunk that are executed.
        on_call: told the newest frame and the chunk of every call, before any row runs; the world stands there.
        on_tick: told the frame before every tick and the row that is executed, rounded to float32.
        change: of the camera frames of a call, for controls (blanked cameras).
        look_at: ticks behind every call at which pictures are made, too; on_seen: told every frame that has pictures.
    """
    offsets = policy.spec.frame_offsets
    out = Outcome(seed, task.name, instruction)
    frame = world.reset(seed, task)
    recent: dict[int, Frame] = {0: frame}
    on_seen(frame)
    session = policy.open()
    try:
        tick = 0
        while tick < max_ticks and not out.success:
            wanted = [0] if tick == 0 else [tick + o for o in offsets]
            frames = {n: np.stack([recent[max(t, 0)].images[n] for t in wanted]) for n in NAMES}
            observation = Observation(
                frames=change(frames),
                state={
                    "joint_position": frame.joint_position,
                    "gripper_position": np.array([frame.gripper_position]),
                },
                prompt=instruction,
                want_video=False,
            )
            begin = time.perf_counter()
            chunk = policy.infer(session, observation)
            out.calls_s.append(time.perf_counter() - begin)
            on_call(frame, chunk)
            called, next_call = tick, tick + execute
            for row in carried(chunk.actions[:execute]):
                on_tick(frame, row)
                tick += 1
                seen = _is_seen(tick, next_call, execute, offsets)
                drawn = seen or tick - called in look_at
                frame = world.step(row[:7], float(row[7] > GRIPPER_THRESHOLD), images=drawn)
                if drawn:
                    on_seen(frame)
                if seen:
                    recent[tick] = frame
                state = world.outcome
                out.lifted_m = max(out.lifted_m, state.lifted_m)
                if state.success or tick >= max_ticks:
                    break
            recent = {t: f for t, f in recent.items() if t >= tick + min(offsets)} | {tick: frame}
            out.success, out.ticks = world.outcome.success, tick
            out.moved = sorted(world.outcome.moved_m)
    finally:
        policy.close(session)
    return out
