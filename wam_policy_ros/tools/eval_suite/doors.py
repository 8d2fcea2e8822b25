"""From a plan to a policy behind a door, and the server that the door ``openpi`` needs.

Rows are rounded to float32 behind every door, because that is what the protocol carries: so the same policy moves the
arm alike, bit for bit, whichever door it stands behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from wam_policy_ros.contract.errors import ConfigError, MissingDependency, PolicyUnavailable
from wam_policy_ros.contract.executed import carried
from wam_policy_ros.contract.interface import ActionChunk, Observation, Policy
from wam_policy_ros.engine.replicas.build import EngineFactory
from wam_policy_ros.sim.world import World
from wam_policy_ros.tools.ros_processes import stop

from .controls import BLANK, EXECUTE, control_policy
from .plan import Plan

EMBODIMENT = "oxe_droid"
CALL_TIMEOUT_S = 300.0
"""Simulated time stands still meanwhile."""
Say = Callable[[str], None]


class Rounded:
    """A policy as it is heard through a door; otherwise itself. ``want_video``: ask for the predicted video, too;
    ``took_s``: seconds of the last call."""

    def __init__(self, policy: Policy, *, want_video: bool = False) -> None:
        self.policy, self.want_video, self.took_s = policy, want_video, 0.0
        self.spec, self.open, self.reset, self.close = policy.spec, policy.open, policy.reset, policy.close
        self.render_video = policy.render_video

    def infer(self, session: Any, observation: Observation, *, cancelled: Any = None) -> ActionChunk:
        observation = replace(observation, want_video=self.want_video)
        begin_s = time.perf_counter()
        chunk = self.policy.infer(session, observation, cancelled=cancelled)
        self.took_s = time.perf_counter() - begin_s
        return replace(chunk, actions=carried(chunk.actions))


def is_network(plan: Plan) -> bool:
    """The policy is a network in this process."""
    return not plan.url and (not plan.control or plan.control == BLANK)


def engine_factory(plan: Plan) -> EngineFactory:
    return EngineFactory(
        embodiment=EMBODIMENT, checkpoint=plan.checkpoint, random_weights=plan.random_weights,
        tokenizer=plan.tokenizer, device=plan.device, preset=plan.preset, options=dict(plan.options),
    )  # fmt: skip


def open_door(
    plan: Plan, world: World, say: Say = lambda line: None, made: Policy | None = None
) -> tuple[Rounded, int]:
    """The policy, and how many rows of a chunk to execute.

    Args:
        made: the policy behind this door, if it has been made.

    Raises:
        ConfigError, CheckpointError, PolicyUnavailable, ContractMismatch: as whoever makes it.
    """
    if made is not None:
        policy = made
    elif plan.url:
        policy = _connect(plan)
    elif plan.control and plan.control != BLANK:
        policy = control_policy(plan.control, world)
    else:
        policy = engine_factory(plan).policy(lambda text, fraction: say(text))
    rows = plan.execute or recommended_rows(policy)
    if rows > policy.spec.horizon:
        raise ConfigError("more rows than a chunk has", got=rows, expected=f"at most {policy.spec.horizon}")
    return Rounded(policy, want_video=bool(plan.pictures) or plan.video_error), rows


def recommended_rows(policy: Policy) -> int:
    """Rows to execute: as the policy or its server says, else ``EXECUTE``, as DROID's clients do."""
    details = policy.spec.details
    said = details.get("execute_steps") or dict(details.get("server", {})).get("execute_steps")
    return int(said) if said else min(EXECUTE, policy.spec.horizon)


def _connect(plan: Plan) -> Policy:
    try:
        from wam_policy_ros.serving.client import ClientConfig, connect_policy
        from wam_policy_ros.serving.client_link import LinkConfig
    except ModuleNotFoundError as error:
        raise MissingDependency(str(error.name), "serve", "the door openpi") from error
    path = "" if urlsplit(plan.url).path.strip("/") else f"/{plan.dialect}"
    link = LinkConfig(plan.url.rstrip("/") + path)
    config = ClientConfig(
        link, embodiment=EMBODIMENT, dialect=plan.dialect, timeout_s=CALL_TIMEOUT_S, follow_timing=True
    )
    return connect_policy(config, wait_s=30.0)


# -- the server ---------------------------------------------------------------------------------------------------


def serve_words(plan: Plan) -> list[str]:
    """Of ``wam serve``, for the policy of a plan."""
    if plan.control and plan.control != BLANK:
        return ["--fake", plan.control]
    words = [plan.checkpoint] if plan.checkpoint else ["--random-weights", str(plan.random_weights)]
    words += ["--device", plan.device, "--preset", plan.preset]
    words += ["--tokenizer", plan.tokenizer] if plan.tokenizer else []
    for name, value in plan.options:
        words += ["--engine", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return words


@contextlib.contextmanager
def serving(plan: Plan, say: Say = lambda line: None, *, start_s: float = 900.0) -> Iterator[Plan]:
    """The plan of its client: a ``wam serve`` of its own on a free port, unless the plan has one already.

    Raises:
        ConfigError: the server ended instead of listening; its last words are in the message.
        PolicyUnavailable: it does not listen in time.
    """
    if plan.door != "openpi" or plan.url:
        yield plan
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "wam_policy_ros.tools.main", "serve", *serve_words(plan), "--port", str(port)]
    environment = os.environ | {"OMP_NUM_THREADS": str(plan.threads)}  # as the engine's door runs: the same bits
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as sink:
            server = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environment)
        try:
            say(f"starting wam serve on port {port}")
            control = BLANK if plan.control == BLANK else ""  # the others are the server's policy
            served = replace(plan, url=f"ws://127.0.0.1:{port}", checkpoint=None, random_weights=None, control=control)
            _wait(served, server, log, start_s)
            yield served
        finally:
            stop(server)


def _wait(plan: Plan, server: subprocess.Popen[bytes], log: Path, start_s: float) -> None:
    end_s = time.monotonic() + start_s
    while time.monotonic() < end_s:
        if server.poll() is not None:
            words = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-4:]
            raise ConfigError("the policy server did not start", got=" | ".join(words))
        if _answers(plan.url):
            return
        time.sleep(0.1)
    raise PolicyUnavailable("the policy server does not become ready", got=f"not within {start_s:.0f} s")


def _answers(url: str) -> bool:
    """It listens at once; ready it is when ``/readyz`` says so."""
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(url.replace("ws://", "http://") + "/readyz", timeout=1.0) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False
