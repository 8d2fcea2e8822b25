"""What each saving of the engine is called on the command line, and which options it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.engine.build import resolve_device
from wam_policy_ros.engine.config import NUM_STEPS
from wam_policy_ros.engine.recommended import recommended
from wam_policy_ros.engine.step_schedule import STATIC_MASKS, fixed_steps

from .doors import EMBODIMENT
from .plan import Plan

GUIDANCE, FP8, DYNAMIC, DETERMINISTIC = "guidance-part", "fp8", "dynamic", "deterministic"
BEST = "4"
EMULATED = {"step": "fused", "linears": "fp8", "attention": "fp8", "graphs": False}
"""What the preset ``fp8`` rounds, by the kernels' plain twins."""
TIERS = {
    **{str(n): f"{n} of {NUM_STEPS} evaluations" for n in (NUM_STEPS, *sorted(STATIC_MASKS, reverse=True))},
    BEST: "the 4 evaluations of the dynamic rule when it skips as much as it can",
    DYNAMIC: "the dynamic rule",
    GUIDANCE: "guidance in the first half of the evaluations only, its difference reused behind",
    FP8: "8-bit weights and attention; on a CPU their numbers in plain PyTorch, which saves no time",
    DETERMINISTIC: "the same bits in every process",
}


def tier_names(text: str) -> list[str]:
    """Of ``--tiers``. Raises ConfigError for an unknown one, a repeated one, or fewer than two."""
    names = [n.strip() for n in text.split(",")]
    unknown = [n for n in names if n not in TIERS]
    if unknown or len(set(names)) != len(names) or len(names) < 2:
        raise ConfigError("tiers", got=text, expected=f"at least two different ones of {', '.join(TIERS)}")
    return names


def with_tier(plan: Plan, name: str) -> Plan:
    """The plan run so.

    Raises:
        ConfigError: this policy has nothing to save there.
    """
    if plan.door == "ros":
        raise ConfigError("tiers are options of the engine; the node that runs has its own", got="door ros")
    if plan.url:
        raise ConfigError("tiers are options of the engine; a server that runs already has its own", got=plan.url)
    options: dict[str, Any] = dict(plan.options)
    if name == FP8:
        if resolve_device(plan.device).type != "cpu":
            return replace(plan, preset="fp8")
        options |= EMULATED
    elif name == BEST:
        options |= {"schedule": "dynamic_best"}
    elif name == DYNAMIC:
        options |= {"schedule": "dynamic"}
    elif name == DETERMINISTIC:
        options |= {"deterministic": True}
    elif name == GUIDANCE:
        options |= {"guidance_steps": _first_half(plan, options)}
    else:
        options |= {"schedule": "static", "evaluations": int(name)}
    return replace(plan, options=tuple(options.items()))


def _first_half(plan: Plan, options: dict[str, Any]) -> tuple[int, ...]:
    known = recommended(plan.checkpoint, EMBODIMENT).options | options
    if known.get("guidance_scale") == 1.0:
        raise ConfigError("this policy runs without guidance: there is no part of it to leave out")
    schedule, evaluations = known.get("schedule", "static"), known.get("evaluations", 8)
    steps = fixed_steps(schedule, evaluations, NUM_STEPS)
    run = sorted(steps) if steps is not None else list(range(NUM_STEPS))
    return tuple(run[: (len(run) + 1) // 2])
