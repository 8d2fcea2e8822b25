"""A policy's account and capacity: which of its objects hold what ``memory`` counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from wam_policy_ros.model.dreamzero import DreamZero

from . import memory
from .config import EngineConfig
from .encode import Prompt
from .fused_path import FusedPath
from .memory import Account, Capacity, Counter
from .observe_ahead import ObserveAhead
from .parallel.far import LocalFar
from .parallel.split_path import SplitPath
from .plain_path import PlainPath
from .session import WindowState
from .step_path import StepPath

if TYPE_CHECKING:
    from .parallel.ranks import RankReport


def account_of(
    network: DreamZero,
    path: StepPath,
    windows: Iterable[WindowState] = (),
    ahead: Iterable[ObserveAhead] = (),
    others: object = None,
    *,
    before: Account | None = None,
) -> Account:
    """
    Args:
        windows, ahead: of open sessions. others: objects with tensors of fixed size.
        before: an earlier account, whose nouns that calls do not change are not counted again: weights have thousands
            of tensors.
    """
    device = network.device
    count, windows = Counter(device), list(windows)
    parts = local_paths(path)
    count.leave_out(*(cache for part in parts if isinstance(part, FusedPath) for cache in part.caches))
    pools = [part.pool for part in parts if isinstance(part, FusedPath)]
    # In this order: a window holds its instruction, and the path everything that is not a session's.
    found: dict[str, int] = {
        "instructions": count(path.prompts.kept, [_prompts(w) for w in windows]),
        "windows": count([pool.used for pool in pools], windows),
        "idle": count([pool.free for pool in pools]),
        "noise": count([part.kept_noise for part in parts if isinstance(part, FusedPath)]),
        "frames_ahead": count([clip.held for clip in ahead]),
    }
    if before is not None:
        return replace(before, **found)
    found |= {
        "inputs": count([part.inputs for part in parts if isinstance(part, FusedPath)], others),
        "weights": count(network, path),
        "recordings": memory.recorded_on(device),
    }
    host = 0
    if device.type != "cpu":
        host = Counter(torch.device("cpu"))([part.text for part in parts if isinstance(part, FusedPath)])
    return Account(**found, beside=memory.beside_on(device, sum(found.values())), host=host)


def capacity_of(
    network: DreamZero, config: EngineConfig, path: StepPath, account: Account, *, elsewhere: int | None = None
) -> Capacity:
    """
    Args:
        elsewhere: windows that fit on the fullest of the other GPUs.
    """
    # The parameters' number, not their bytes: a step's activations are no smaller where weights have 8 bits.
    parameters = sum(p.numel() for p in network.parameters())
    return Capacity.of(
        account,
        window_bytes=window_bytes(path),
        prompt_bytes=memory.prompt_bytes(network.config.dit, network.dtype),
        reserve_bytes=memory.step_bytes(parameters, config.step),
        budget_bytes=round(config.memory_budget_gib * 2**30) or None,
        free_bytes=memory.free_on(network.device),
        elsewhere=elsewhere,
    )


def window_bytes(path: StepPath) -> int:
    """Of a session's window on this process's device."""
    parts = local_paths(path)
    features = [memory.features_bytes(part.network.config, part.network.dtype) for part in parts[:1]]  # in common
    return sum(features) + sum(part.window_bytes for part in parts)


def fullest(reports: Iterable[RankReport]) -> int | None:
    """Windows that fit on every one of these ranks; None when none of them knows of a bound."""
    known = [report.fit for report in reports if report.fit is not None]
    return min(known, default=None)


def local_paths(path: StepPath) -> list[PlainPath | FusedPath]:
    """The paths that run here. Of one that is not known nothing is counted but what can be reached from it."""
    if isinstance(path, SplitPath):
        far = [path.far.path] if isinstance(path.far, LocalFar) else []
        return [part for one in (path.local, *far) for part in local_paths(one)]
    return [path] if isinstance(path, PlainPath | FusedPath) else []


def _prompts(window: WindowState) -> list[Prompt | None]:
    far = window.far if isinstance(window.far, WindowState) else WindowState()
    return [window.prompt, window.negative, far.prompt, far.negative]
