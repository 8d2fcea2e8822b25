"""A digest of what every stage of a call gave, so that two runs can be compared stage by stage."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch
from torch import Tensor

from .sampler import Probe

# Probe -> stage, in the order of a call. What is not named here depends on when a frame was encoded, not on what.
_STAGES: tuple[tuple[str, str], ...] = (
    (r"mosaic|proprio|committed\.\w+", "preprocess"),
    (r"prompt_emb\d", "text"),
    (r"clip_feas", "image"),
    (r"ys|prefill0\.x", "latents"),
    (r"prefill0\.[kv]", "prefill"),
    (r"noise\.\w+", "noise"),
    (r"step(\d+)\..*", "evaluation {}"),
    (r"after_step(\d+)\..*", "solver step {}"),
    (r"normalised", "actions"),
    (r"rows", "decoded actions"),
)

# Wide ones in two halves: the highest of 64 bits times any odd number is the same.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_PIECE = 1 << 22
# The odd constants of splitmix64, as signed numbers.
_STEP, _MIX = -7046029254386353131, -4658895280553007687


def checksum(x: Tensor) -> int:
    """64 bits that follow from every bit of a tensor and its place, computed where the tensor is.

    ``sum((v_i + 1) * m_i) mod 2**64`` over the elements as integers with odd ``m_i``: integer sums are the same in any
    order, and a change of one element never goes unseen, as an odd factor times a difference is not zero.
    """
    flat = x.detach().contiguous().view(-1)
    flat = flat.view(_INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for begin in range(0, len(flat), _PIECE):
        values = flat[begin : begin + _PIECE].to(torch.int64)
        index = torch.arange(begin + 1, begin + 1 + len(values), device=x.device) * _STEP
        total += ((values + 1) * (((index ^ (index >> 31)) * _MIX) | 1)).sum()
    return int(total) & (2**64 - 1)


class StageHashes:
    """Collects digests during one call; a ``Probe``. It waits for the device at every tensor.

    Args:
        also: another probe to be called.
    """

    def __init__(self, also: Probe | None = None) -> None:
        self._also = also
        self._digests: dict[str, Any] = {}

    def __call__(self, name: str, value: Tensor) -> None:
        if self._also is not None:
            self._also(name, value)
        for pattern, stage in _STAGES:
            if (found := re.fullmatch(pattern, name)) is not None:
                digest = self._digests.setdefault(stage.format(*found.groups()), hashlib.sha256())
                digest.update(f"{name} {value.dtype} {tuple(value.shape)} {checksum(value):016x}\n".encode())
                return

    def result(self) -> dict[str, str]:
        """Stage -> 16 hexadecimal digits, in the order in which the stages ran."""
        return {stage: digest.hexdigest()[:16] for stage, digest in self._digests.items()}
