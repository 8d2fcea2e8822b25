"""The door ``ros``: a simulator and a policy node that run already. ``ros/sim_episodes`` counts, in its own process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from wam_policy_ros.contract.errors import MissingDependency

from .episode import Episode
from .plan import Plan

ABOUT = {"weights": "of a running ROS system", "random_weights": None, "execute": None, "fingerprint": None}


def play_ros(plan: Plan, seeds: range, tell: Callable[[Episode], None]) -> tuple[list[Episode], list[str]]:
    """Episodes, in order, and why it ended before the last one. The simulator says the first wording of a task.

    Raises:
        MissingDependency: no rclpy.
    """
    if importlib.util.find_spec("rclpy") is None:
        raise MissingDependency("rclpy", "ros-kilted", "the door ros")
    episodes = json.dumps([[seed, plan.chosen(seed)[0].name] for seed in seeds])
    command = [sys.executable, "-m", "wam_policy_ros.ros.sim_episodes", "--episodes", episodes]
    command += ["--max-ticks", str(plan.max_ticks)]
    found: list[Episode] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            for line in process.stdout:
                found.append(episode_of(json.loads(line)))
                tell(found[-1])
            words = process.stderr.read().strip().splitlines()
        except BaseException:
            process.kill()
            raise
    return found, [] if process.returncode == 0 else [words[-1] if words else f"exit status {process.returncode}"]


def episode_of(said: Mapping[str, Any]) -> Episode:
    """From a line of ``ros/sim_episodes``. What only the simulator's process knows is left open."""
    return Episode(
        seed=said["seed"], task=said["task"], instruction=said["instruction"], success=said["success"],
        ticks=said["tick"], highest_m=said["highest_m"], moved_m=said["moved_m"], taken=None, actions_sha256=None,
        calls_s=(), policy=dict(ABOUT), executed=np.zeros((0, 8)),
    )  # fmt: skip
