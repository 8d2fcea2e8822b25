"""The rows of ``wam bench step``: which engine options a configuration and a number of evaluations mean."""

from __future__ import annotations

import json
from typing import Any

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.engine.config import PRESETS, EngineConfig
from wam_policy_ros.engine.step_schedule import STATIC_MASKS

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": PRESETS["reference"],
    "bf16": PRESETS["bf16"],
    "fp8": PRESETS["fp8"],
}
"""In the order in which they can share one network: FP8 takes the weights over."""

# What needs a GPU is left out on a CPU, where the same code runs its plain twins.
_ON_A_CPU = {"graphs": False}


def engine_config(name: str, evaluations: int, *, gpu: bool, changes: dict[str, Any] | None = None) -> EngineConfig:
    """
    Args:
        evaluations: 16, 8 (upstream's default), 7, 6, 5, or 4: the best case of upstream's dynamic rule.
        changes: engine options on top.

    Raises:
        ConfigError: no such configuration or number of evaluations, or this version has no such option.
    """
    if name not in CONFIGURATIONS:
        raise ConfigError("unknown configuration", got=name, expected=f"some of {list(CONFIGURATIONS)}")
    options = dict(CONFIGURATIONS[name])
    if options and not gpu:
        options |= _ON_A_CPU | ({"attention": "torch"} if options.get("attention") == "cudnn" else {})
    return EngineConfig.from_dict(options | schedule_options(evaluations) | (changes or {}))


def schedule_options(evaluations: int) -> dict[str, Any]:
    """
    Raises:
        ConfigError: no schedule has this number.
    """
    if evaluations == 4:
        return {"schedule": "dynamic_best"}
    if evaluations not in (*STATIC_MASKS, 16):
        raise ConfigError("no schedule with this number of evaluations", got=evaluations,
                          expected=f"some of {[4, *STATIC_MASKS, 16]}")  # fmt: skip
    return {"schedule": "static", "evaluations": evaluations}


def parse_changes(words: list[str]) -> dict[str, Any]:
    """``["attention=torch", "guidance_steps=[0, 6]"]`` to engine options; values are JSON where they can be.

    Raises:
        ConfigError: a word without ``=``.
    """
    out: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigError("an engine option must be OPTION=VALUE", got=word)
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        out[name] = tuple(value) if isinstance(value, list) else value
    return out
