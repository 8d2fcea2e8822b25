"""Numbers of the networks that no checkpoint stores, as tensors."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def constant(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """1-D tensor of ``values``, made once per device and dtype; do not write to it.

    Not a module buffer: a network built on the meta device and filled by assignment would keep it there. Made once,
    so that a captured CUDA graph holds no copy from host memory.
    """
    # The tensor outlives the call; made in inference mode it could never be used in training.
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)
