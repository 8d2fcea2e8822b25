"""Where the policy comes from. The only file of this room that knows the engine."""

from __future__ import annotations

from collections.abc import Callable

from wam_policy_ros.contract.errors import MissingDependency
from wam_policy_ros.contract.fakes import HoldPolicy
from wam_policy_ros.contract.interface import Policy

from .parameters import NodeParameters


def make_policy(params: NodeParameters, progress: Callable[[str, float], None]) -> Policy:
    """Build the configured policy. Takes minutes for a large checkpoint; called in the worker thread.

    Args:
        params: what to build (``backend``, ``embodiment``, ``checkpoint``, ...) and how to run it (``engine.*``).
        progress: called with a line and a fraction 0 to 1; may raise ``Cancelled`` to give up.

    Raises:
        CheckpointError, ConfigError, MissingDependency: from the engine; the message says what to do.
    """
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
