"""The process groups of torch.distributed that ranks exchange tensors through: NCCL (RCCL) on GPUs, gloo on CPUs."""

from __future__ import annotations

import functools
import itertools
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from wam_policy_ros.contract.errors import ConfigError

from .grid import Grid

ENVIRONMENT: Mapping[str, str] = {
    # A program that uses NVLink multicast can put the GPUs of a host out of service when it ends badly, and what
    # crosses here is too small to gain by it.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    # PyTorch would end the process, and the robot's node with it; the keeper gives up the groups instead.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
LOOPBACK: Mapping[str, str] = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
"""One host: ranks find each other there, and nothing listens outside."""


def environment() -> dict[str, str]:
    """Variables of the libraries that every rank has where they are not set already."""
    try:
        with socket.create_server(("127.0.0.1", 0)):
            return {**ENVIRONMENT, **LOOPBACK}
    except OSError:  # a machine that never started it: the libraries look for another one
        return dict(ENVIRONMENT)


NEVER = timedelta(days=1)
"""The keeper of the ranks gives up, not the libraries: they know neither how long a step may take nor what follows."""


@dataclass(frozen=True)
class Place:
    """Where ranks find each other: a file that is in memory only, so that no folder has to be writable and nothing is
    left behind however a process ends.

    Attributes:
        descriptor: of the file, the same number in every rank.
        name: whoever else has ever met in this file has another one.
    """

    descriptor: int
    name: str

    def store(self, ranks: int) -> dist.Store:
        return dist.PrefixStore(self.name, dist.FileStore(f"/proc/self/fd/{self.descriptor}", ranks))


@functools.cache
def _file() -> int:
    # One for the life of the process, and never closed: PyTorch writes to that path when it lets go of a store, and it
    # may hold one for long after a fault. The number must not be another file's by then.
    return os.memfd_create("wam_ranks")


_MEETINGS = itertools.count()


def place_to_meet() -> Place:
    """
    Raises:
        ConfigError: this system has no such files.
    """
    try:
        return Place(_file(), f"{next(_MEETINGS)}/")
    except (AttributeError, OSError) as error:
        raise ConfigError("several GPUs need files in memory", got=str(error), expected="Linux") from error


@dataclass(frozen=True)
class Groups:
    """Who talks to whom.

    Attributes:
        device: of this rank's tensors.
        world: all ranks.
        heads: the first rank of each guidance branch; None for other ranks.
        sequence: the ranks that share this rank's branch.
    """

    grid: Grid
    rank: int
    device: torch.device
    world: dist.ProcessGroup
    heads: dist.ProcessGroup | None
    sequence: dist.ProcessGroup

    def from_leader(self, x: Tensor) -> Tensor:
        """``x`` of rank 0 into ``x`` of all others. Every rank calls this."""
        dist.broadcast(_bytes(x), src=0, group=self.world)
        return x

    def from_branch(self, branch: int, x: Tensor) -> Tensor:
        """``x`` of a branch's first rank into ``x`` of the other's. Both call this."""
        dist.broadcast(_bytes(x), src=self.grid.heads[branch], group=self.heads)
        return x

    def agree(self, here: bool) -> bool:
        """Whether it is so on all ranks that share this one's branch. All of them call this."""
        answer = torch.tensor([int(here)], device=self.device)
        dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=self.sequence)
        return bool(answer.item())

    def all(self) -> list[dist.ProcessGroup]:
        """Every group of this rank once, in the order in which all ranks have them."""
        out: list[dist.ProcessGroup] = []
        for group in (self.world, self.heads, self.sequence):
            if group is not None and group not in out:
                out.append(group)
        return out

    def give_up(self) -> None:
        """Whatever waits for a rank that does not answer, soon waits no more. Returns at once: to give a group up may
        itself take until the CUDA graphs that hold its exchanges are destroyed."""
        for group in self.all():
            # One waits until the others have begun: each in a thread of its own.
            threading.Thread(target=_abort, args=(group,), name="wam_group_abort", daemon=True).start()


def refuse_groups() -> None:
    """
    Raises:
        ConfigError: this process cannot ``connect``: it has process groups already, or PyTorch cannot make any.
    """
    if not dist.is_available():
        raise ConfigError("this PyTorch was built without torch.distributed", remedy="set gpus: 1")
    if dist.is_initialized():
        raise ConfigError(
            "this process has a policy on several GPUs already, or uses torch.distributed otherwise",
            remedy="disconnect that policy first; if it was lost, start the process again",
        )


def connect(grid: Grid, rank: int, device: torch.device, place: Place, backend: str = "auto") -> Groups:
    """Meet the other ranks. Returns when all of them have called this.

    Args:
        place: the same in all of them.
        backend: of torch.distributed; ``auto``: NCCL on GPUs, gloo on CPUs.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    # Groups are found by numbers that count what this process ever made, also when that failed; a new process has 0.
    dist.distributed_c10d._world.group_count = 0
    dist.init_process_group(
        backend,
        store=place.store(grid.size),
        rank=rank,
        world_size=grid.size,
        timeout=NEVER,
        device_id=device if backend == "nccl" else None,
    )
    world = dist.group.WORLD
    assert world is not None
    heads, sequence = world, world
    if grid.guidance > 1 and grid.sequence > 1:  # else heads, or the row, are all ranks
        # Every rank makes every group, in the same order.
        made = [dist.new_group(ranks, timeout=NEVER) for ranks in (grid.heads, grid.row(0), grid.row(1))]
        heads, sequence = made[0], made[1 + grid.branch(rank)]
    groups = Groups(grid, rank, device, world, heads if rank in grid.heads else None, sequence)
    # The first exchange of each kind connects GPUs, which takes seconds. Sooner here than in a robot's step.
    first = torch.ones(1, device=device)
    groups.from_leader(first)
    if groups.heads is not None and grid.guidance > 1:
        groups.from_branch(1, first)
    groups.agree(True)
    first.cpu()
    return groups


def disconnect(timeout_s: float) -> bool:
    """Leave without the others, who may be gone. False: it does not end, and this process can make no groups again."""

    def leave() -> None:
        with suppress(RuntimeError, ValueError, AssertionError):  # they may be gone already
            if dist.get_backend() == dist.Backend.NCCL:
                # Unlike destroying them, this waits for nobody.
                dist.distributed_c10d._abort_process_group()
            else:
                dist.destroy_process_group()

    if not dist.is_initialized():
        return True
    thread = threading.Thread(target=leave, name="wam_groups_end", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


def _abort(group: dist.ProcessGroup) -> None:
    with suppress(RuntimeError):  # gloo cannot; there, a connection ends with the process behind it
        group.abort()


def _bytes(x: Tensor) -> Tensor:
    """Not every back end knows every dtype."""
    return x.view(-1).view(torch.uint8)
