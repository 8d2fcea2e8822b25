"""What several GPUs tell each other in a step, and how much memory each has in use."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.parallel.grid import Grid
from wam_policy_ros.engine.policy import DreamZeroPolicy
from wam_policy_ros.engine.sequence_traffic import evaluation_bytes, prefill_bytes
from wam_policy_ros.model.config import DreamZeroConfig

from .flops import IMAGE_TOKENS


def leader_bytes(
    cfg: DreamZeroConfig, config: EngineConfig, position: int, evaluations: int, guided: int, *, itemsize: int
) -> int:
    """What the first GPU sends and receives in the call at ``position`` of a window, from shapes alone.

    To the others: the samples of every evaluation in which they take part, the observed latents, and in the first call
    the conditioning of the window. From the other branch: its flow. Within a branch, twice per layer: see
    ``sequence_traffic``.

    Args:
        guided: of the evaluations, those of both branches.
        itemsize: bytes of the network's numbers.
    """
    dit, grid = cfg.dit, Grid.of(config.gpus, guided=config.guidance_scale != 1.0)
    frame = dit.frame_seqlen * 4 * dit.out_dim  # a token is a patch of 2x2 latents
    block, observed = dit.num_frame_per_block, 1 if position == 1 else dit.num_frame_per_block
    samples = block * frame + cfg.action_horizon * dit.action_dim + dit.max_state_dim
    shared = evaluations if grid.sequence > 1 else guided if grid.guidance > 1 else 0
    numbers = shared * samples + observed * frame + (guided * block * frame if grid.guidance > 1 else 0)
    if position == 1:
        conditioning = (dit.in_dim - dit.out_dim) * cfg.latent_frames * dit.frame_seqlen * 4
        numbers += IMAGE_TOKENS * dit.clip_dim + conditioning
    total = numbers * itemsize
    if grid.sequence > 1:
        kv = 1 if config.attention == "fp8" else itemsize
        branches = 1 if grid.guidance == 2 or config.guidance_scale == 1.0 else 2
        each = evaluation_bytes(dit, grid.sequence, branches=branches, itemsize=itemsize, kv_itemsize=kv)
        first = prefill_bytes(dit, grid.sequence, observed, branches=branches, itemsize=itemsize, kv_itemsize=kv)
        total += 2 * (evaluations * each + first)
    return total


def peaks_GiB(policy: DreamZeroPolicy) -> list[float]:
    """Peak of what PyTorch had allocated, per GPU, since it was last asked; empty on one GPU."""
    reports = getattr(policy.path, "reports", None)
    return [] if reports is None else [round(r.memory_bytes / 2**30, 2) for r in reports()]


def seconds_and_share(profile: dict[str, Any], step_s: float) -> dict[str, float]:
    """Of a profiled step: time in exchanges, waiting for the other GPUs included, and their share of the step."""
    taken = float(profile["exchange_s"])
    return {"s": taken, "share": taken / step_s, "kernels": profile["exchange_kernels"]}


def memory_in_use_GiB(count: int) -> list[float]:
    """Of the first ``count`` NVIDIA GPUs of the host, as the driver counts it; empty where it cannot be asked."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    words = [tool, "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", ",".join(map(str, range(count)))]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
        return [round(float(line) / 1024, 2) for line in done.stdout.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
