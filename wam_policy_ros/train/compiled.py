"""The layers of the DiT's training, compiled: most of a step are small operations on wide tensors, which this joins.

Compiling takes about a minute and no simulator's core but its own, so it is done while demonstrations are made, on
numbers of the shapes to come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from wam_policy_ros.model.dreamzero import DreamZero

from .fit import cross_keys
from .forward import run_layer, window_forward
from .preset import BLOCK, Preset


def compiled_layer(preset: Preset, batch: int, device: torch.device) -> Callable[..., Any]:
    """``forward.run_layer`` for batches of so many windows, compiled; what the compiler cannot do runs as it is."""
    import torch._dynamo

    torch._dynamo.config.suppress_errors = True
    layer = torch.compile(run_layer, dynamic=False)
    network = DreamZero(preset.network()).to(device).train().requires_grad_(True)
    for p in network.parameters():
        torch.nn.init.normal_(p, std=0.02)
    z, height, width = network.config.vae.z_dim, 2 * preset.view_height // 8, 2 * preset.view_width // 8
    blocks = preset.blocks

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(batch, *shape, device=device)

    ids = torch.ones(2, preset.text_len, dtype=torch.int64, device=device)
    prompt = torch.zeros(batch, dtype=torch.int64, device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        cross = cross_keys(network, ids, ids, prompt, draw(3, 2 * preset.view_height, 2 * preset.view_width))
        flows = window_forward(
            network.model,
            draw(z, 1 + BLOCK * (blocks - 1), height, width),
            draw(4 + z, 1 + BLOCK, height, width),
            cross,
            draw(blocks, z, BLOCK, height, width),
            draw(blocks, preset.horizon, 8),
            draw(blocks, 1, 8),
            torch.full((batch, blocks), 500, device=device),
            layer=layer,
        )
        loss = flows.video.float().square().mean() + flows.action.float().square().mean()
    loss.backward()
    return layer  # type: ignore[no-any-return]
