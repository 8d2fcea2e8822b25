"""The layers of the DiT's training, compiled: most of a step are small operations on wide tensors, which this joins.

Compiling takes long (97 s beside an H200 on 16 cores that were busy with demonstrations), so it is done while these
are made, on numbers of the shapes to come. Validation runs the layers as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wam_policy_ros.model.attention import KV, CrossKV
from wam_policy_ros.model.dit import Block
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.model.rope import Rotary

from .fit import cross_keys
from .forward import Segment, run_layer, window_forward
from .preset import BLOCK, Preset


class Unlike(Exception):
    """What was compiled computes something else."""


def compiled_layer(
    preset: Preset, batch: int, device: torch.device, say: Callable[[str], None]
) -> Callable[..., tuple[Segment, Segment]]:
    """``forward.run_layer`` for batches of so many windows, compiled; itself, and why, where that does not work."""
    network = DreamZero(preset.network()).to(device).train().requires_grad_(True)
    generator = torch.Generator(device).manual_seed(0)
    for p in network.parameters():
        torch.nn.init.normal_(p, std=0.05, generator=generator)
    layer = through(torch.compile(_flat, dynamic=False))
    try:
        wanted, found = (_try(network, preset, batch, device, run) for run in (run_layer, layer))
        for w, f in zip(wanted, found, strict=True):
            if not torch.allclose(w, f, atol=0.05 * float(w.abs().max()), rtol=0.05):
                raise Unlike(f"off by {(w - f).abs().max():.3g} of {w.abs().max():.3g}")
    except Exception as error:  # whatever a compiler may say
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        say(f"layers as they are, not compiled: {text}")
        return run_layer
    return layer


def through(flat: Callable[..., tuple[Tensor | None, Tensor]]) -> Callable[..., tuple[Segment, Segment]]:
    """``run_layer`` by way of a function of plain tensors, as ``_flat``."""

    def layer(
        block: Block, past: Segment, now: Segment, cross: CrossKV, starts: list[int], frames: int, tokens: int, *,
        last: bool,
    ) -> tuple[Segment, Segment]:  # fmt: skip
        text, image = cross
        keys = (text.k, text.v, image.k, image.v)
        tensors = (*(t for s in (past, now) for t in (s.x, s.e6, s.table.cos, s.table.sin)), *keys)
        new_past, new_now = flat(block, tensors, starts, frames, tokens, last)
        kept = past if new_past is None else Segment(new_past, past.e6, past.table)
        return kept, Segment(new_now, now.e6, now.table)

    return layer


def _try(
    network: DreamZero, preset: Preset, batch: int, device: torch.device, layer: Callable[..., Any]
) -> tuple[Tensor, ...]:
    """Flows of random numbers and some gradients."""
    z, height, width = network.config.vae.z_dim, 2 * preset.view_height // 8, 2 * preset.view_width // 8
    blocks = preset.blocks
    generator = torch.Generator(device).manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, device=device, generator=generator)

    ids = torch.ones(2, preset.text_len, dtype=torch.int64, device=device)
    prompt = torch.zeros(batch, dtype=torch.int64, device=device)
    network.zero_grad(set_to_none=True)
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
    first = next(iter(network.model.blocks))
    gradients = [p.grad for p in first.parameters() if p.grad is not None and p.ndim == 2]
    return (flows.video.detach().float(), flows.action.detach().float(), *gradients)


def _flat(
    block: Block, tensors: tuple[Tensor, ...], starts: list[int], frames: int, tokens: int, last: bool
) -> tuple[Tensor | None, Tensor]:
    """``run_layer`` of plain tensors: the compiler of PyTorch 2.11 returns named tuples with numbers missing."""
    past, now = (Segment(t[0], t[1], Rotary(t[2], t[3])) for t in (tensors[:4], tensors[4:8]))
    text, image = KV(tensors[8], tensors[9]), KV(tensors[10], tensors[11])
    kept, new = run_layer(block, past, now, CrossKV(text, image), starts, frames, tokens, last=last)
    return (None if last else kept.x), new.x
