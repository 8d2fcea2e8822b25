"""What training begins with."""

from __future__ import annotations

import torch
from torch import nn

from wam_policy_ros.model.dit import Block
from wam_policy_ros.model.dreamzero import DreamZero


def initialise(network: DreamZero, seed: int) -> None:
    """Starting weights of everything but the VAE: what PyTorch draws, small embeddings, an output near zero."""
    torch.manual_seed(seed)
    for name, module in network.named_modules():
        if name.startswith("vae"):
            continue
        if isinstance(module, nn.Linear | nn.Conv3d | nn.Conv2d):
            module.reset_parameters()
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.5)
    with torch.no_grad():
        for name, p in network.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            if name.startswith("vae"):
                continue
            if "modulation" in name:
                p.normal_(std=p.shape[-1] ** -0.5)
            elif leaf == "W":
                p.normal_(std=p.shape[1] ** -0.5)
            elif leaf == "b" or name.endswith("log_scale"):
                p.zero_()
            elif leaf in ("cls_embedding", "pos_embedding") or name.endswith("visual.head"):
                p.normal_(std=p.shape[-1] ** -0.5)
            elif "norm" in name and leaf == "weight":
                p.fill_(1.0)
        for block in network.model.blocks:
            assert isinstance(block, Block)
            block.self_attn.o.weight.mul_(0.5)
            block.cross_attn.o.weight.mul_(0.2)  # it has no gate
        network.model.time_projection[1].weight.mul_(0.2)  # type: ignore[operator,union-attr]
        network.model.head.head.weight.zero_()
