"""The network a measurement runs on: built once, run in several ways."""

from __future__ import annotations

import argparse
import gc
import sys
from dataclasses import replace

import torch

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.contract.policy_thread import WARNING
from wam_policy_ros.engine.build import build_policy
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.policy import DreamZeroPolicy, with_config, with_schedule

from .configurations import CONFIGURATIONS
from .stages import Stages


def add_network_arguments(parser: argparse.ArgumentParser) -> None:
    """Which network, where."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--checkpoint", help="checkpoint folder")
    source.add_argument("--network", choices=["tiny", "14b"], default="tiny", help="random weights of this size")
    parser.add_argument("--tokenizer", help="folder with tokenizer.json")
    parser.add_argument("--embodiment", default="oxe_droid")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")


def build(args: argparse.Namespace, config: EngineConfig, stages: Stages | None = None) -> DreamZeroPolicy:
    """
    Args:
        stages: told what took how long.
    """
    return build_policy(
        embodiment=args.embodiment,
        checkpoint=args.checkpoint,
        random_weights=None if args.checkpoint else args.network,
        tokenizer=args.tokenizer,
        device=args.device,
        config=config,
        progress=Progress(stages),
    )


class Progress:
    """A line that is written again when the text or the percentage changes.

    Args:
        stages: told what each text took, from its first appearance to the next one's.
    """

    def __init__(self, stages: Stages | None = None) -> None:
        self._shown, self._stages = ("", -1), stages

    def __call__(self, text: str, fraction: float) -> None:
        if text.startswith(WARNING):
            print(f"\n  {text}", file=sys.stderr)
            return
        if text != self._shown[0] and self._stages is not None:
            self._stages.next(text)
        if self._shown != (text, percent := int(100 * fraction)):
            self._shown = (text, percent)
            print(f"\r  {text} {percent}%   ", end="", file=sys.stderr, flush=True)


def reconfigured(policy: DreamZeroPolicy, config: EngineConfig) -> DreamZeroPolicy:
    """The same network run as ``config`` says. Where nothing but the schedule changes, in the same windows, which stay
    prepared; ``policy`` may then have no sessions any more."""
    old = policy.config
    if old == config:
        return policy
    if config.step == "fused" and config == replace(old, schedule=config.schedule, evaluations=config.evaluations):
        return with_schedule(policy, schedule=config.schedule, evaluations=config.evaluations)
    return with_config(policy, **vars(config))


def free_memory(device: torch.device) -> None:
    """What is not referenced any more, windows and recordings of a policy that was replaced above all."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def on_a_gpu(device: str) -> bool:
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def configuration_names(text: str) -> list[str]:
    names = [n.strip() for n in text.split(",") if n.strip()]
    if unknown := [n for n in names if n not in CONFIGURATIONS] or ([] if names else ["nothing"]):
        raise ConfigError("unknown configuration", got=unknown, expected=f"some of {list(CONFIGURATIONS)}")
    return names
