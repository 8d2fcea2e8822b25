"""Where the policy comes from, and who else may use it. The only file of this room that knows engine and serving."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wam_policy_ros.contract.errors import ConfigError, MissingDependency
from wam_policy_ros.contract.fakes import HoldPolicy
from wam_policy_ros.contract.interface import Policy
from wam_policy_ros.contract.policy_thread import PolicyThread

from .parameters import NodeParameters

if TYPE_CHECKING:
    from wam_policy_ros.engine.replicas.build import EngineFactory
    from wam_policy_ros.records.recorder import Recorder
    from wam_policy_ros.serving.server import OpenPIServer

SERVER_GRACE_S = 0.4
"""A lifecycle transition waits for it, and with it every callback; the robot is held before."""

MOST_PREPARED = 16
"""Windows of the fused step that are recorded at the start, unless a parameter says more: each takes seconds."""


@contextmanager
def _needs(extra: str, what: str) -> Iterator[None]:
    """Around an import: a package that is missing belongs to this extra, and is needed for ``what``."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "wam_policy_ros":
            raise
        raise MissingDependency(package, extra, what) from error


def make_policy(params: NodeParameters, progress: Callable[[str, float], None]) -> Policy:
    """Build the configured policy. Takes minutes for a large checkpoint; called in the worker thread.

    Args:
        params: what to build (``backend``, ``embodiment``, ``checkpoint``, ...) and how to run it (``engine.*``).
        progress: called with a line and a fraction 0 to 1; may raise ``Cancelled`` to give up.

    Raises:
        CheckpointError, ConfigError, MissingDependency: from the engine or the client; the message says what to do.
    """
    if params.backend == "openpi":
        return _remote(params, progress)
    if params.backend == "hold":
        progress("hold policy, no network", 1.0)
        return HoldPolicy(embodiment=params.embodiment)
    if importlib.util.find_spec("torch") is None:  # replicas would find out in their processes
        raise MissingDependency("torch", "engine", "the engine")
    # Imported here: a node with another backend needs nothing of the engine.
    from wam_policy_ros.engine.replicas.build import make_policies

    with _needs("engine", "the engine"):
        return make_policies(_engine_factory(params), params.replicas, progress)


def _engine_factory(params: NodeParameters) -> EngineFactory:
    from wam_policy_ros.engine.replicas.build import EngineFactory

    options = {
        "schedule": params.engine_schedule,
        "seed": params.engine_seed,
        "dtype": params.engine_dtype,
        "deterministic": params.engine_deterministic,
        "gpus": params.engine_gpus,
        "memory_budget_gib": params.engine_memory_budget_gib,
        "prepared_windows": params.engine_prepared_windows or _admitted_windows(params),
    }
    asked = {"evaluations": params.engine_evaluations, "guidance_scale": params.engine_guidance_scale}
    options |= {k: v for k, v in asked.items() if v}  # 0: as the checkpoint recommends
    chosen = {"attention": params.engine_attention, "text": params.engine_text}
    return EngineFactory(
        embodiment=params.embodiment,
        checkpoint=params.checkpoint or None,
        random_weights=params.random_weights or None,
        tokenizer=params.tokenizer or None,
        device=params.device,
        preset=params.engine_preset,
        options=options | {k: v for k, v in chosen.items() if v != "auto"},
        hash_all=bool(params.record_folder),
        stages=params.record_stages,
    )


def _admitted_windows(params: NodeParameters) -> int:
    """Of the robot, of as many clients as may be there, and those of steps that begin a window anew: as
    ``engine.memory.windows_of``, whose import brings PyTorch along."""
    sessions = 1 + (params.openpi_max_sessions if params.openpi_enabled else 0)
    return min(sessions + min(sessions, 2), MOST_PREPARED)


def make_recorder(params: NodeParameters, log: Callable[[str, str], None]) -> Recorder | None:
    """The recorder of the policy, not begun; None when nothing is to be recorded.

    Args:
        params: ``record.*``.
        log: called with a level and a line from any thread.

    Raises:
        ConfigError: nothing can be written there.
        MissingDependency: the extra ``record`` is not installed.
    """
    if not params.record_folder:
        return None
    with _needs("record", "record.folder"):
        from wam_policy_ros.records.recorder import Recorder, RecordLimits
    limits = RecordLimits(file_bytes=round(params.record_max_file_mb * 2**20))
    say = lambda level, line: log("warn" if level == "warning" else level, line)  # noqa: E731
    return Recorder(Path(params.record_folder).expanduser(), log=say, limits=limits)


def record_policy(policy: Policy, recorder: Recorder | None, params: NodeParameters) -> Policy:
    """The policy as it is, or as one that is recorded.

    Raises:
        ConfigError: it has no stages, and ``record.stages`` is set.
    """
    if recorder is None:
        return policy
    from wam_policy_ros.records.policy import recorded

    how: dict[str, Any] = {"policy": params.backend, "embodiment": params.embodiment}
    if params.backend == "engine":
        how |= _engine_factory(params).described()
    return recorded(policy, recorder, stages=params.record_stages, how=how)


def record_summary(recorder: Recorder) -> dict[str, Any]:
    """What ``~/state`` says about the record; JSON-serialisable."""
    return asdict(recorder.status)


def _remote(params: NodeParameters, progress: Callable[[str, float], None]) -> Policy:
    """A policy server's policy; waits for the server as long as ``progress`` lets it."""
    with _needs("serve", "backend openpi"):
        # Imported here: who runs the network in this process needs no websockets.
        from wam_policy_ros.serving.client import ClientConfig, connect_policy
        from wam_policy_ros.serving.client_link import LinkConfig
    config = ClientConfig(
        link=LinkConfig(params.server_uri, api_key=secret(params.server_api_key)),
        embodiment=params.embodiment,
        dialect=params.server_dialect,
        codec=params.server_codec,
        timeout_s=params.server_timeout_s,
        action_space=params.server_action_space,
    )
    return connect_policy(config, progress)


def secret(value: str) -> str:
    """A key that is given as it is, or as ``file:PATH``. Raises ConfigError when there is no key in the file."""
    if not value.startswith("file:"):
        return value
    path = Path(value.removeprefix("file:")).expanduser()
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the file with the key cannot be read", got=f"{path}: {error}") from error
    if not key:
        raise ConfigError("the file with the key is empty", got=path)
    return key


def make_server(
    params: NodeParameters, owner: PolicyThread, log: Callable[[str, str], None], recorder: Recorder | None = None
) -> OpenPIServer | None:
    """The OpenPI server beside the robot, not started; None when it is not wanted.

    Args:
        params: ``openpi.*``.
        owner: of the policy; the robot's calls go first there, and interrupt a client's.
        log: called with a level and a line from any thread.
        recorder: of the policy, for the metrics.

    Raises:
        ConfigError: options that do not fit together.
        MissingDependency: the extra ``serve`` is not installed.
    """
    if not params.openpi_enabled:
        return None
    with _needs("serve", "the OpenPI server"):
        from wam_policy_ros.serving.config import ServerConfig
        from wam_policy_ros.serving.server import OpenPIServer
    main, ports = _dialects(params)
    key = secret(params.openpi_api_key)
    if params.openpi_host not in ("127.0.0.1", "localhost", "::1") and not key:
        log(
            "warn",
            f"the OpenPI server listens on {params.openpi_host} without a key (openpi.api_key): anybody may use it",
        )
    config = ServerConfig.from_dict(
        {
            "host": params.openpi_host,
            "port": params.openpi_port,
            "dialect": main,
            "ports": ports,
            "api_key": key,
            "errors": params.openpi_errors,
            "instruction": params.openpi_instruction,
            "resize": params.openpi_resize,
            "single_exterior": params.openpi_single_exterior,
            "blind_positions": params.openpi_blind_positions,
            "max_message_bytes": round(params.openpi_max_message_mb * 2**20),
            "max_connections": params.openpi_max_connections,
            "max_sessions": params.openpi_max_sessions,
            "session_idle_s": params.openpi_session_idle_s,
            "resume_s": params.openpi_resume_s,
            "deadline_s": params.openpi_deadline_s,
            "grace_s": SERVER_GRACE_S,
        }
    )
    levels = {"debug": None, "warning": "warn"}

    def say(level: str, line: str) -> None:
        if (shown := levels.get(level, level)) is not None:
            log(shown, f"openpi: {line}")

    return OpenPIServer(config, owner, log=say, gauges=recorder.gauges() if recorder else {}, reserved=1)


def _dialects(params: NodeParameters) -> tuple[str, dict[int, str]]:
    """The dialect of ``openpi.port``, and those of further ports. Raises ConfigError."""
    main = [entry for entry in params.openpi_dialects if ":" not in entry]
    ports: dict[int, str] = {}
    for entry in params.openpi_dialects:
        name, colon, port = entry.partition(":")
        if colon and (not port.isdecimal() or int(port) in (params.openpi_port, *ports)):
            raise ConfigError("openpi.dialects: each entry with a port needs one of its own", got=entry)
        if colon:
            ports[int(port)] = name
    if len(main) != 1:
        raise ConfigError(
            "openpi.dialects needs exactly one entry without a port, for openpi.port",
            got=list(params.openpi_dialects),
            expected="e.g. ['dreamzero', 'openpi:8001']",
        )
    return main[0], ports


def server_summary(server: Any) -> dict[str, Any]:
    """What ``~/state`` says about the server; JSON-serialisable."""
    return {
        "addresses": [f"ws://{host}:{port}" for host, port in server.addresses],
        "connections": len(server.connections),
        "sessions": len(server.table),
        "trouble": server.trouble() or "",
    }
