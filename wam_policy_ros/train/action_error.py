"""How far a policy's rows are from the expert's, in radians, on windows of recorded frames: a look before it is played.

Rows are sampled from noise as at inference, by Euler steps along the shifted schedule. Beside them stand two policies
that see nothing: one that stays where it is and one that always does what is done on average.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from wam_policy_ros.model.dreamzero import DreamZero

from .fit import SHIFT, Sources, cross_keys, given
from .forward import window_forward


@torch.no_grad()
def sampled_rows(network: DreamZero, sources: Sources, anchor: Tensor, *, steps: int = 5, seed: int = 0) -> Tensor:
    """Rows of all blocks of the windows at ``anchor [B]``, normalised: float32 ``[B, K, N, 8]``."""
    batch = sources.windows.batch(anchor)
    device = anchor.device
    generator = torch.Generator(device).manual_seed(seed)
    ys, observed = given(sources, batch)
    like = sources.latents.block[batch.following]
    video = torch.randn(like.shape, generator=generator, device=device)
    rows = torch.randn(batch.rows.shape, generator=generator, device=device)
    at = torch.linspace(1, 0, steps + 1)
    levels = (SHIFT * at / (1 + (SHIFT - 1) * at)).clamp(max=0.9998).tolist()
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        picture = sources.footage.video(anchor[:, None])[:, :, 0]
        cross = cross_keys(network, sources.windows.ids, sources.windows.mask, batch.prompt, picture)
        for level, following in itertools.pairwise(levels):
            time = torch.full(batch.observed.shape, int(1000 * level), device=device)
            flows = window_forward(network.model, observed, ys, cross, video, rows, batch.state, time)
            video = video + (following - level) * flows.video.float()
            rows = rows + (following - level) * flows.action.float()
    return rows


@torch.no_grad()
def action_error(network: DreamZero, sources: Sources, average: Tensor, *, count: int = 64) -> dict[str, float]:
    """Errors of the rows that would be executed, over all blocks with labels of ``count`` windows.

    Args:
        average: normalised rows a policy that sees nothing would send, ``[N, 8]``.

    Returns:
        ``rad`` and ``rad_95``: mean and 95th percentile of the joints' error; ``hold_rad``, ``hold_rad_95``,
        ``mean_rad``, ``mean_rad_95``: of the two that see nothing; ``gripper``: share of rows with the gripper on the
        wrong side of one half.
    """
    windows = sources.windows
    anchors = windows.anchors
    pick = torch.linspace(0, len(anchors) - 1, min(count, len(anchors))).long().to(anchors.device)
    batch = windows.batch(anchors[pick])
    wanted = batch.rows[batch.has_rows]  # [M, N, 8]
    executed = windows.preset.steps
    still = -windows.row_middle / windows.row_half  # joints are relative: zero, in normalised numbers
    guesses = {
        "": sampled_rows(network, sources, anchors[pick])[batch.has_rows],
        "hold_": still.expand_as(wanted),
        "mean_": average.expand_as(wanted),
    }
    out: dict[str, float] = {}
    for name, rows in guesses.items():
        off = ((rows - wanted) * windows.row_half).abs()[:, :executed, :7].flatten()
        out[f"{name}rad"], out[f"{name}rad_95"] = off.mean().item(), off[:4_000_000].quantile(0.95).item()
    closed = [(r[:, :executed, 7] > 0.0) for r in (guesses[""], wanted)]
    return out | {"gripper": (closed[0] != closed[1]).float().mean().item()}
