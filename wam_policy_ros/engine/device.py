"""Around everything that runs on a device: which one is current, and what it means when its memory is full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from wam_policy_ros.contract.errors import Overloaded


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes ``device`` the current one: Triton and CUDA graphs use that, whichever GPU the tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def no_memory_is_overload(what: str) -> Iterator[None]:
    """
    Raises:
        Overloaded: the device has no memory for ``what``.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise Overloaded(
            f"the device has no memory for {what}; nothing was changed",
            got=str(error).splitlines()[0],
            remedy="close a session, or choose the preset fp8, whose weights and windows take half the memory",
        ) from error
