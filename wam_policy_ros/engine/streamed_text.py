"""The text encoder off the GPU: its weights wait in host memory and pass through block by block.

*Exact*: the same operations on the same numbers. An instruction is encoded once, so between instructions the 11 GB of
the published encoder would only take the place of windows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from wam_policy_ros.model.text_encoder import TextEncoder, position_buckets


class StreamedTextEncoder:
    """Takes a ``TextEncoder`` over: its weights move to (pinned) host memory, the module keeps none.

    Args:
        encoder: with weights, on any device.
        device: where it shall compute.
    """

    def __init__(self, encoder: TextEncoder, device: torch.device) -> None:
        self._device = device
        self._heads = encoder.config
        blocks: list[nn.Module] = list(encoder.blocks)
        self._pin = device.type == "cuda"
        # Rows of the embedding are looked up on the host: 512 of 256384 are needed.
        self._embedding = encoder.token_embedding.weight.detach().to("cpu")
        self._weights = [{n: self._to_host(p) for n, p in block.state_dict().items()} for block in blocks]
        self._norm = encoder.norm
        encoder.token_embedding.to("meta")
        self._blocks = [block.to("meta") for block in blocks]
        self.nbytes = sum(t.numel() * t.element_size() for w in self._weights for t in w.values())

    def _to_host(self, weight: Tensor) -> Tensor:
        host = torch.empty(weight.shape, dtype=weight.dtype, device="cpu", pin_memory=self._pin)
        return host.copy_(weight)

    @torch.inference_mode()
    def __call__(self, ids: Tensor, mask: Tensor) -> Tensor:
        """As ``TextEncoder.forward``."""
        ids, mask = ids.to(self._device), mask.to(self._device)
        buckets = position_buckets(ids.shape[1], self._heads.num_buckets, self._device)
        padding = (mask == 0)[:, None, None, :]
        x = F.embedding(ids.cpu(), self._embedding).to(self._device)
        for block, weights in zip(self._blocks, self._weights, strict=True):
            there = {name: w.to(self._device, non_blocking=True) for name, w in weights.items()}
            x = functional_call(block, there, (x, buckets, padding))
        return self._norm(x)
