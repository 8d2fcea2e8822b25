"""What each process of ``test_sequence_processes`` does: closed-loop calls shared with others over gloo."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from test.engine.tiny_policy import TEXT_LEN, look, make_policy
from test.tiny_checkpoint import tiny_network
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.paths import make_path
from wam_policy_ros.engine.sequence_parallel import SequenceExchange, sequence_exchange
from wam_policy_ros.engine.sequence_traffic import evaluation_bytes, prefill_bytes
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.model.exchange import ALONE, Exchange

PLAN = (1, 4)  # frames per call
EVALUATIONS = 5
HEADS = 4
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fused": {"step": "fused"},
    "eight bits": {"step": "fused", "linears": "fp8", "attention": "fp8"},
}
FLOWS = ("step0.video_flow_cond", "step0.video_flow_neg", "step0.action_flow_cond")
REPEATED = "fused"
PATIENCE = timedelta(seconds=180)


@functools.cache
def shared_network() -> DreamZero:
    return tiny_network(text_len=TEXT_LEN, num_heads=HEADS)


def chunks(mode: str, exchange: Exchange = ALONE) -> dict[str, torch.Tensor]:
    """The first flows of each call of a short episode, its actions and video latents. What was sent has to be what was
    foreseen."""
    config = EngineConfig(evaluations=EVALUATIONS, **MODES[mode])
    # 8-bit layers take the weights over.
    network = tiny_network(text_len=TEXT_LEN, num_heads=HEADS) if config.linears == "fp8" else shared_network()
    policy = make_policy(network=network)
    policy.path = make_path(network, config, (16, 32), exchange=exchange)
    session, out = policy.open(), {}
    for i, frames in enumerate(PLAN):
        before = sent_bytes(exchange)
        seen: dict[str, torch.Tensor] = {}
        chunk = policy.infer(session, look(policy.spec, i, frames=frames), probe=seen.__setitem__)
        out |= {f"flow {name} {i}": seen[name] for name in FLOWS}
        out |= {f"actions {i}": torch.from_numpy(chunk.actions), f"video {i}": chunk.video.latents}
        dit, size = network.config.dit, exchange.ranks
        how = {"branches": 2, "itemsize": 4, "kv_itemsize": 1 if mode == "eight bits" else 4}
        observed = dit.num_frame_per_block if i else 1
        foreseen = prefill_bytes(dit, size, observed, **how, plain=mode == "plain")
        foreseen += EVALUATIONS * evaluation_bytes(dit, size, **how, plain=mode == "plain")
        assert sent_bytes(exchange) - before == foreseen, (mode, i)
    policy.close(session)
    return out


def sent_bytes(exchange: Exchange) -> int:
    return exchange.traffic.sent_bytes if isinstance(exchange, SequenceExchange) else 0


def work(rank: int, ranks: int, folder: str) -> None:
    """Every mode with all ranks, one of them twice, and in pairs, which repeat each other."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=PATIENCE)
    try:
        pairs = [dist.new_group([first, first + 1], timeout=PATIENCE) for first in range(0, ranks, 2)]
        groups = {ranks: dist.group.WORLD, 2: pairs[rank // 2]}
        found = {}
        for size, group in groups.items():
            for mode in MODES:
                exchange = sequence_exchange(group, HEADS, torch.device("cpu"))
                found[size, mode] = [
                    chunks(mode, exchange) for _ in range(2 if (size, mode) == (ranks, REPEATED) else 1)
                ]
        torch.save(found, Path(folder) / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
