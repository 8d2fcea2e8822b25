"""What a kernel launch is made of, and the limits of the machine that decide block sizes and warps.

Kernels are sized by capability (threads per warp, shared memory), never by a GPU's name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Machine:
    """What of a GPU matters here: threads that run in step, and bytes of shared memory one program may take."""

    backend: str
    arch: int | str
    warp_size: int
    shared_bytes: int

    @property
    def saturates(self) -> bool:
        """Whether rounding to 8-bit floats makes its largest value of what is larger by itself, and NaN of NaN only."""
        return self.backend == "cuda"

    def warps(self, threads: int) -> int:
        """Warps of a program of this many threads; a power of two where ``threads`` is one."""
        return max(1, threads // self.warp_size)


# The architectures that the package is compiled for in its tests, without a GPU.
MACHINES = {
    "sm_90": Machine("cuda", 90, 32, 232448),
    "gfx942": Machine("hip", "gfx942", 64, 65536),
    "gfx950": Machine("hip", "gfx950", 64, 163840),
}


@functools.cache
def machine_for(device: torch.device) -> Machine:
    """Limits of the GPU that holds a tensor. A CPU, which interprets kernels in tests, counts as the smallest."""
    if device.type == "cpu":
        return MACHINES["gfx942"]
    found = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Machine("hip", found.gcnArchName.split(":")[0], found.warp_size, found.shared_memory_per_block)
    # What a program may ask for; the other figure is what it gets without asking.
    shared = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
    return Machine("cuda", found.major * 10 + found.minor, found.warp_size, shared)


@dataclass(frozen=True)
class Launch:
    """One kernel with everything it is called with; planned apart from running so that tests can compile it."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    num_warps: int
    num_stages: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments, num_warps=self.num_warps, num_stages=self.num_stages, **self.options)

    def compile(self) -> None:
        """Only compile, for this device; several threads may at a time."""
        how = {"num_warps": self.num_warps, "num_stages": self.num_stages, **self.options}
        self.kernel.warmup(grid=self.grid, **self.arguments, **how)


# 16 bytes of bf16: the widest access of one thread.
VECTOR = 8


def chunking(width: int) -> tuple[int, int]:
    """Split a row into equal power-of-two chunks held in registers: (elements of a chunk, chunks).

    A row is rarely a power of two; padding it to one would idle up to half of the threads.
    """
    for chunk in (2048, 1024, 512):
        count = -(-width // chunk)
        if count * chunk - width <= width // 16:
            return chunk, count
    if width <= 1024:
        return max(16, 1 << (width - 1).bit_length()), 1
    return 512, -(-width // 512)
