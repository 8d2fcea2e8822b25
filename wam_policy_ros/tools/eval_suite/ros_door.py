"""The door ``ros``: ``wam_sim`` and the policy node over DDS, started here or running already.

``ros/sim_episodes`` counts, in a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.contract.executed import sha256_of
from wam_policy_ros.engine.recommended import recommended
from wam_policy_ros.tools.ros_processes import (
    NODE,
    SIMULATOR,
    isolated,
    last_words,
    need_rclpy,
    ros_command,
    running,
)

from .controls import EXECUTE, HOLD
from .doors import EMBODIMENT, Say
from .episode import Episode
from .plan import Plan

ABOUT = {"weights": "of a running ROS system", "random_weights": None, "execute": None, "fingerprint": None}

WIDE: dict[str, Any] = {
    # Rows go to the arm as they are, as behind the other doors: not blended with the plan before, not slowed down.
    # The simulated arm cuts by itself what is beyond its ranges and speeds. A real one goes through the limits.
    "control.blend_steps": 0,
    "control.jitter_s": 0.0,
    "safety.position_min": [-1000.0],
    "safety.position_max": [1000.0],
    "safety.max_velocity": [1e5],
    "safety.max_acceleration": [1e6],
    "safety.max_first_step_rad": 10.0,
    "safety.on_violation": "reject",
    # The gripper opens or closes, without a dead band.
    "gripper.command": "binary",
    "gripper.threshold": 0.5,
    "gripper.hysteresis": 0.0,
    "gripper.ease": False,
}
PATIENT: dict[str, Any] = {
    # Simulated time stands still while the policy works, however long that takes.
    "sync.max_age_s": 60.0,
    "sync.joint_max_age_s": 60.0,
    "safety.executor_stall_s": 0.0,
    "safety.deadline_s": 300.0,
}
IDLE_S = 60.0
"""Of ``wam_sim``: it shows the standing arm once, so there is one first frame, however long a call takes."""
START_S = 900.0


def play_ros(
    plan: Plan, seeds: range, tell: Callable[[Episode], None], minutes: float | None = None
) -> tuple[list[Episode], list[str]]:
    """Episodes, in order, and why it ended before the last one.

    Raises:
        MissingDependency: no rclpy. ConfigError: simulator or node cannot start.
    """
    need_rclpy("the door ros")
    if plan.attach:
        return _play(plan, seeds, tell, minutes, None, "", lambda: None)
    with cell(plan, print) as (environment, namespace, trouble):
        return _play(plan, seeds, tell, minutes, environment, namespace, trouble)


def _play(
    plan: Plan,
    seeds: range,
    tell: Callable[[Episode], None],
    minutes: float | None,
    environment: Mapping[str, str] | None,
    namespace: str,
    trouble: Callable[[], str | None],
) -> tuple[list[Episode], list[str]]:
    chosen = [(seed, *plan.chosen(seed)) for seed in seeds]
    command = [sys.executable, "-m", "wam_policy_ros.ros.sim_episodes"]
    command += ["--episodes", json.dumps([[seed, task.name, words] for seed, task, words in chosen])]
    command += ["--max-ticks", str(plan.max_ticks)]
    command += ["--minutes", str(minutes)] if minutes is not None else []
    if not plan.attach:
        command += ["--start-s", str(START_S), "--ros-args", "-r", f"__ns:=/{namespace}"]
    found: list[Episode] = []
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said,  # a pipe nobody reads fills up
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=said, text=True) as process,
    ):
        assert process.stdout is not None
        watcher = threading.Thread(target=end_with, args=(process, trouble), daemon=True)
        watcher.start()
        try:
            for line in process.stdout:
                found.append(episode_of(json.loads(line)))
                tell(found[-1])
        except BaseException:
            process.kill()
            raise
        process.wait()
        said.seek(0)
        words = said.read().strip().splitlines()
    if process.returncode == 0:
        return found, []
    if not found and (why := trouble()) is not None:
        raise ConfigError("the ROS cell did not start", got=why)
    return found, [trouble() or (words[-1] if words else f"exit status {process.returncode}")]


def end_with(process: subprocess.Popen[str], trouble: Callable[[], str | None]) -> None:
    """Nobody waits for a simulator or a node that has ended."""
    while process.poll() is None:
        if trouble() is not None:
            process.kill()
            return
        time.sleep(0.2)


@contextlib.contextmanager
def cell(
    plan: Plan, say: Say = lambda line: None, logs: Path | None = None, *, more: Mapping[str, Any] = {}
) -> Iterator[tuple[dict[str, str], str, Callable[[], str | None]]]:
    """A simulator and a policy node of their own, in lock-step.

    Args:
        logs: folder for what they say; None: gone afterwards.
        more: parameters of the policy node.

    Yields:
        Environment and namespace for whoever wants to talk to them, and a function that says why one has ended.
    """
    environment, namespace = isolated(), f"wam_eval_{uuid.uuid4().hex[:8]}"
    clock = {"/clock": f"/{namespace}/clock"}  # another simulator may have drawn the same domain
    node = ros_command(NODE, namespace, ("dreamzero", "sim_demo"), node_values(plan) | dict(more), remap=clock)
    ticks = {"lockstep_ticks": executed_rows(plan), "idle_s": IDLE_S, "real_time_factor": 0.0, "patience_s": 600.0}
    simulator = ros_command(SIMULATOR, namespace, ("sim_demo",), ticks, remap=clock)
    with contextlib.ExitStack() as stack:
        folder = logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        threads = {"OMP_NUM_THREADS": str(plan.threads)}  # as the engine's door runs: the same bits
        say(f"starting wam_sim and wam_policy in ROS domain {environment['ROS_DOMAIN_ID']} of this host")
        both: dict[str, tuple[subprocess.Popen[str], Path]] = {}
        for name, command, extra in (("wam_sim", simulator, {}), ("wam_policy", node, threads)):
            log = folder / f"{name}.log"
            sink = stack.enter_context(log.open("w", encoding="utf-8"))
            both[name] = stack.enter_context(running(command, environment | extra, sink)), log

        def trouble() -> str | None:
            for name, (process, log) in both.items():
                if process.poll() is not None:
                    return f"{name} ended with status {process.returncode}: {last_words(log)}"
            return None

        yield environment, namespace, trouble


def executed_rows(plan: Plan) -> int:
    """Of a chunk, as behind the other doors."""
    return plan.execute or recommended(plan.checkpoint, EMBODIMENT).execute_steps or EXECUTE


def node_values(plan: Plan) -> dict[str, Any]:
    """Parameters of the policy node for a plan.

    Raises:
        ConfigError: an option of the engine that is no parameter of the node.
    """
    values: dict[str, Any] = {"use_sim_time": True, "exit_on_failure": True, "sim_reset.service": ""}
    values |= {**WIDE, **PATIENT, "control.execute_steps": executed_rows(plan)}
    if plan.control == HOLD:
        return values | {"backend": "hold", "checkpoint": ""}
    values["checkpoint"] = plan.checkpoint or ""  # sim_demo.yaml names one
    values |= {} if plan.checkpoint else {"random_weights": str(plan.random_weights)}
    values |= {"tokenizer": plan.tokenizer} if plan.tokenizer else {}
    values |= {"device": plan.device, "engine.preset": plan.preset}
    for name, value in plan.options:
        if not isinstance(value, str | int | float | bool):
            raise ConfigError("this option of the engine is no parameter of the node", got=f"{name}={value}")
        values[f"engine.{name}"] = value
    return values


def episode_of(said: Mapping[str, Any]) -> Episode:
    """From a line of ``ros/sim_episodes``."""
    rows = np.array(said["rows"], dtype=np.float64).reshape(-1, 8)
    return Episode(
        seed=said["seed"], task=said["task"], instruction=said["instruction"], success=said["success"],
        ticks=said["tick"], highest_m=said["highest_m"], moved_m=said["moved_m"], taken=tuple(said["others_taken"]),
        actions_sha256=sha256_of(rows) if len(rows) == said["tick"] else None,
        calls_s=(), policy=_about(said["policy"]), executed=rows,
        disturbed=dict((said["policy"] or {}).get("disturbed", {})),
    )  # fmt: skip


def _about(policy: Mapping[str, Any] | None) -> dict[str, Any]:
    """As ``episode.about`` of the other doors."""
    if not policy:
        return dict(ABOUT)
    details = {k: v for k, v in policy["details"].items() if isinstance(v, str | int | float | bool | None)}
    names = ("weights", "random_weights", "horizon", "frame_offsets", "execute")
    return {
        **{n: policy.get(n) for n in names},
        "details": {k: v for k, v in details.items() if k != "uri"},
        "fingerprint": policy.get("fingerprint"),
    }
