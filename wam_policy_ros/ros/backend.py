"""Where the policy comes from. The only file of this room that knows the engine and the OpenPI client."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from wam_policy_ros.contract.errors import ConfigError, MissingDependency
from wam_policy_ros.contract.fakes import HoldPolicy
from wam_policy_ros.contract.interface import Policy

from .parameters import NodeParameters


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
    try:
        # Imported here: torch takes seconds, and a dry run or a test with a fake policy needs none of it.
        from wam_policy_ros.engine.build import build_policy
        from wam_policy_ros.engine.config import EngineConfig
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "wam_policy_ros":
            raise
        raise MissingDependency(package, "engine", "the in-process engine") from error
    return build_policy(
        embodiment=params.embodiment,
        checkpoint=params.checkpoint or None,
        random_weights=params.random_weights or None,
        tokenizer=params.tokenizer or None,
        device=params.device,
        config=EngineConfig.from_dict(
            {
                "schedule": params.engine_schedule,
                "evaluations": params.engine_evaluations,
                "guidance_scale": params.engine_guidance_scale,
                "seed": params.engine_seed,
                "dtype": params.engine_dtype,
            }
        ),
        progress=progress,
    )


def _remote(params: NodeParameters, progress: Callable[[str, float], None]) -> Policy:
    """A policy server's policy; waits for the server as long as ``progress`` lets it."""
    try:
        # Imported here: who runs the network in this process needs no websockets.
        from wam_policy_ros.serving.client import ClientConfig, connect_policy
        from wam_policy_ros.serving.client_link import LinkConfig
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "wam_policy_ros":
            raise
        raise MissingDependency(package, "serve", "backend openpi") from error
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
