"""Tiny policies on several processes of this host, as ``build_policy`` makes them."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from test.engine.tiny_policy import TEXT_LEN, WordTokenizer, look, shared_network
from test.tiny_checkpoint import config_json
from wam_policy_ros.contract.embodiment import get_embodiment
from wam_policy_ros.contract.normalization import Statistics
from wam_policy_ros.engine.build import synthetic_metadata
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.parallel.ranks import Ranks
from wam_policy_ros.engine.policy import DreamZeroPolicy, picture_hw
from wam_policy_ros.engine.weights import WeightSource
from wam_policy_ros.model.config import DreamZeroConfig
from wam_policy_ros.model.dreamzero import DreamZero

PLAN = (1, 4, 4, 4, 4, 4)  # frames per call: a first call, a full window, and a restart


def nothing_is_left() -> Iterator[None]:
    """A fixture: a test leaves no process groups and no thread that watches ranks."""
    yield
    gc.collect()
    assert not dist.is_initialized()
    assert [t.name for t in threading.enumerate() if t.name.startswith("wam_ranks")] == []


def make_several(
    config: EngineConfig,
    *,
    raw: dict[str, Any] | None = None,
    network: DreamZero | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> DreamZeroPolicy:
    """
    Args:
        raw: ``config.json`` of the network; network: with the weights that it and seed 0 give, for rank 0.
        options: of ``Ranks``.
    """
    numbers = DreamZeroConfig.from_config_json(raw or config_json(text_len=TEXT_LEN))
    robot = get_embodiment("oxe_droid")
    source, where = WeightSource(random=numbers), torch.device(device)
    ranks = Ranks(config, source, device=where, dtype=dtype, picture_hw=picture_hw(numbers, robot), **options)
    try:
        if network is None:
            network = source.load(config, where, dtype, lambda text, fraction: None) if raw else shared_network()
        policy = DreamZeroPolicy(
            network,
            robot,
            Statistics.from_metadata(synthetic_metadata(robot), robot.tag),
            WordTokenizer(),
            config,
            weights="random, for tests",
            random_weights=True,
            ranks=ranks,
        )
        policy.prepare()
        return policy
    except BaseException:
        ranks.end()
        raise


@contextmanager
def several(config: EngineConfig, **options: Any) -> Iterator[DreamZeroPolicy]:
    """``make_several`` for a while; afterwards no process is left."""
    policy = make_several(config, **options)
    pids = ranks_of(policy).pids
    try:
        yield policy
    finally:
        policy.disconnect()
    assert not any(map(alive, pids))


def ranks_of(policy: DreamZeroPolicy) -> Ranks:
    return policy.path.far.ranks  # type: ignore[attr-defined]


def run(policy: DreamZeroPolicy, plan: tuple[int, ...] = PLAN, seed: int = 0, **changes: Any) -> list[Any]:
    session, chunks = policy.open(), []
    for i, frames in enumerate(plan):
        seen = look(policy.spec, 100 * seed + i, frames=frames)
        chunks.append(policy.infer(session, replace(seen, **changes)))
    policy.close(session)
    return chunks


def alive(pid: int) -> bool:
    """Runs, or is stopped; a process that has ended and was not asked for its code does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_for(true: Callable[[], bool], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.01)
