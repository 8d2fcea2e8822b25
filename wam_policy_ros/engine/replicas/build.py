"""From options to a policy in this process, or to replicas of it. PyTorch is imported where the policy is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.contract.interface import Policy
from wam_policy_ros.model.packaged import located

from .policy import Replicas

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class EngineFactory:
    """What ``build_policy`` is asked for, in a form that another process can be told; see there.

    Attributes:
        device: for replicas also several with commas between them, one for each.
        preset: of ``EngineConfig.preset``; options: engine options on top of it and of what the checkpoint recommends.
        hash_all: of ``build_policy``. stages: let the policy fill ``ActionChunk.stages``.
    """

    embodiment: str
    checkpoint: str | None = None
    random_weights: str | None = None
    tokenizer: str | None = None
    device: str = "auto"
    preset: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    hash_all: bool = False
    stages: bool = False

    def described(self) -> dict[str, Any]:
        """What makes the same policy again, wherever one is; JSON-serialisable."""
        names = ("embodiment", "random_weights", "device", "preset")
        places = {"checkpoint": self.checkpoint and located(self.checkpoint), "tokenizer": self.tokenizer}
        out: dict[str, Any] = {name: getattr(self, name) for name in names}
        out |= {name: str(Path(place).expanduser().resolve()) if place else None for name, place in places.items()}
        return out | {"options": dict(self.options)}

    def policy(self, progress: Progress) -> Policy:
        """In this process. Raises what ``build_policy`` raises."""
        from wam_policy_ros.engine.build import build_policy, resolve_device
        from wam_policy_ros.engine.config import EngineConfig
        from wam_policy_ros.engine.recommended import recommended

        options = {**recommended(self.checkpoint, self.embodiment).options, **self.options}
        policy = build_policy(
            embodiment=self.embodiment,
            checkpoint=self.checkpoint,
            random_weights=self.random_weights,
            tokenizer=self.tokenizer,
            device=self.device,
            config=EngineConfig.preset(self.preset, resolve_device(self.device), **options),
            hash_all=self.hash_all,
            progress=progress,
        )
        policy.stage_hashes = self.stages
        return policy

    def __call__(self, index: int, progress: Progress) -> Policy:
        """Replica ``index``, on a device of its own."""
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        device = replica_device(self.device, index, gpus, each=int(self.options.get("gpus", 1)))
        return replace(self, device=device).policy(progress)


def replica_device(device: str, index: int, gpus: int, *, each: int = 1) -> str:
    """Where a replica runs: ``auto`` and ``cuda`` give every replica ``each`` GPUs of its own, a list is taken by
    index, ``cpu`` is shared.

    Args:
        gpus: that PyTorch sees.

    Raises:
        ConfigError: there is none for this replica.
    """
    named = [name.strip() for name in device.split(",")]
    if len(named) > 1:
        if index >= len(named):
            raise ConfigError("there are more replicas than devices", got=device, expected="one for each, or auto")
        return named[index]
    if device == "cpu" or (device == "auto" and not gpus):
        return "cpu"
    if device not in ("auto", "cuda"):
        raise ConfigError(
            "replicas cannot share a GPU", got=f"device {device}", expected="auto, cuda, cpu, or e.g. cuda:0,cuda:2"
        )
    first = index * each
    if first + each > gpus:
        raise ConfigError(
            f"no GPU is left for replica {index}",
            got=f"{gpus} GPUs that PyTorch sees, {each} for each replica",
            remedy=f"at most {gpus // each} replicas",
        )
    return f"cuda:{first}"


def make_policies(factory: EngineFactory, replicas: int, progress: Progress) -> Policy:
    """The policy, in this process, or so many replicas of it.

    Raises:
        ConfigError: fewer than one; what ``build_policy`` raises.
    """
    if replicas == 1:
        return factory.policy(progress)
    return Replicas(factory, replicas, progress=progress)
