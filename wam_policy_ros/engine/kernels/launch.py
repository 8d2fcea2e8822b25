"""What a kernel launch is made of, and the limits of the machine that decide block sizes and warps.

Kernels are sized by capability (threads per warp, shared memory), never by a GPU's name.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

_noted: ContextVar[dict[Any, Launch] | None] = ContextVar("launches noted instead of carried out", default=None)


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
        if (noted := _noted.get()) is not None:
            noted.setdefault(self.key(), self._without_memory())
            return
        self.kernel[self.grid](**self.arguments, num_warps=self.num_warps, num_stages=self.num_stages, **self.options)

    def compile(self) -> None:
        """Only compile, for this device; several threads may at a time."""
        how = {"num_warps": self.num_warps, "num_stages": self.num_stages, **self.options}
        self.kernel.warmup(grid=self.grid, **self.arguments, **how)

    def key(self) -> tuple[Any, ...]:
        """Equal for launches that are compiled to the same: Triton compiles anew for other dtypes and constants, and
        for numbers that are 1, or multiples of 16, where others were not."""
        known = [self._kind(p, self.arguments.get(p.name)) for p in self.kernel.params]
        return (self.kernel, *known, self.num_warps, self.num_stages, *sorted(self.options.items()))

    @staticmethod
    def _kind(parameter: Any, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        if parameter.is_constexpr or value is None:
            return repr(value)
        if isinstance(value, float) or parameter.do_not_specialize:
            return type(value)
        return value == 1, value % 16 == 0

    def _without_memory(self) -> Launch:
        """To be compiled only."""
        arguments = {n: Pointer.like(v) if isinstance(v, Tensor) else v for n, v in self.arguments.items()}
        return replace(self, arguments=arguments)


@dataclass(frozen=True)
class Pointer:
    """What the compiler asks of a tensor, without its memory."""

    dtype: torch.dtype
    address: int
    bytes: int

    @classmethod
    def like(cls, tensor: Tensor) -> Pointer:
        return cls(tensor.dtype, tensor.data_ptr(), tensor.untyped_storage().nbytes())

    def data_ptr(self) -> int:
        return self.address

    def ptr_range(self) -> int:
        """How far it reaches: kernels for AMD GPUs address less than 2 GiB in another way."""
        return self.bytes


@contextmanager
def collecting() -> Iterator[dict[Any, Launch]]:
    """What the block would launch, in this thread, is noted instead: one launch of each kernel that is compiled for
    itself, by its ``key``. The kernels' results are whatever memory holds."""
    noted: dict[Any, Launch] = {}
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def compile_together(launches: Mapping[Any, Launch], device: torch.device) -> int:
    """Compile kernels for ``device`` in as many threads as there are processors: the compiler spends most of its time
    where Python does not hold it up.

    A kernel that does not compile is left for its first launch, which says so.

    Args:
        launches: of :func:`collecting`.

    Returns:
        How many were compiled.
    """

    def build(launch: Launch) -> bool:
        try:
            # Each thread has a current device of its own.
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                launch.compile()
        except Exception:
            return False
        return True

    with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="triton") as threads:
        return sum(threads.map(build, launches.values()))


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
