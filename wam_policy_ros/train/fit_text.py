"""Before the rest is trained, the text encoder learns which thing a sentence is about.

The words that differ between two prompts are a handful among the hundred tokens of the template, and cross-attention,
which at first looks at all of them alike, hands on next to nothing of them: the network then spends its first thousands
of steps on going to the middle of all things. Taught like this, every token of a prompt says what the prompt is about.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from wam_policy_ros.contract.prompts import build_prompt
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.model.tokenizer import Tokenizer
from wam_policy_ros.sim.tasks import TASKS

ENOUGH = 1e-3
"""Nats."""


def prompts_of_all_tasks(template: str) -> tuple[list[str], list[int]]:
    """Every wording of every task in the embodiment's template, and the number of the thing it names."""
    things = sorted({task.target for task in TASKS.values()})
    pairs = [(build_prompt(w, template), things.index(t.target)) for t in TASKS.values() for w in t.instructions]
    return [p for p, _ in pairs], [n for _, n in pairs]


def teach_words(
    network: DreamZero, ids: Tensor, mask: Tensor, things: Sequence[int], *, steps: int, lr: float = 2e-3
) -> dict[str, float]:
    """Train text encoder and text embedding until each token's embedding tells the thing by fixed directions.

    Args:
        steps: at most; it ends when the loss is below ``ENOUGH``.
        ids, mask: int64 ``[P, text_len]`` of all prompts; things: number of the thing each one names.

    Returns:
        ``steps`` made; ``right``: share of the tokens that tell the thing, before (``right_before``) and after;
        ``loss`` in nats.
    """
    device = next(network.parameters()).device
    ids, mask = ids.to(device), mask.to(device)
    embedding = network.model.text_embedding
    parts = [*network.text_encoder.parameters(), *embedding.parameters()]
    for p in parts:
        p.requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    width = network.config.dit.dim
    directions = torch.linalg.qr(torch.randn(width, max(things) + 1, generator=generator))[0].to(device)
    wanted = torch.tensor(things, device=device)[:, None].expand_as(ids)
    real = mask > 0

    def logits() -> Tensor:
        states = network.text_encoder(ids, mask)
        return embedding(states * mask[..., None]) @ directions

    def right() -> float:
        with torch.no_grad():
            return (logits()[real].argmax(-1) == wanted[real]).float().mean().item()

    before = right()
    optimiser = torch.optim.AdamW(parts, lr=lr, weight_decay=0.0)
    value, step = math.inf, 0
    while step < steps and value > ENOUGH:
        loss = F.cross_entropy(logits()[real], wanted[real])
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parts, 1.0)
        optimiser.step()
        value, step = loss.item(), step + 1
    return {"steps": step, "right_before": before, "right": right(), "loss": value}


def encode_prompts(tokenizer: Tokenizer, template: str) -> tuple[Tensor, Tensor, list[int]]:
    """Ids, mask and thing of :func:`prompts_of_all_tasks`."""
    texts, things = prompts_of_all_tasks(template)
    ids, mask = tokenizer(texts)
    return ids, mask, things
