"""Sequence parallelism inside a guidance branch: the ranks of a process group share every evaluation.

Tier *numeric*: the same algorithm; matrix products over fewer rows may add in another order. The twin is one rank
(``model.exchange.ALONE``). See docs/parallel.md for what is split and how much is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.model.exchange import ALONE, Exchange

from .kernels import ops
from .kernels.tensors import words

Swap = Callable[[Tensor, Tensor], None]
"""``swap(received, sent)``: block i of ``sent [ranks, bytes]`` goes to rank i, whose block for this rank becomes block
i of ``received``. The only thing ranks ever do together."""


def sequence_exchange(group: dist.ProcessGroup | None, heads: int, device: torch.device) -> Exchange:
    """What the paths take as ``exchange``.

    Args:
        group: the ranks that share a guidance branch, in the order in which they hold the video; None: this process
            alone.
        heads: of the network.
        device: of the network.

    Raises:
        ConfigError: the ranks cannot share the heads evenly.
    """
    if group is None or group.size() == 1:
        return ALONE
    check_ranks(group.size(), heads)
    return SequenceExchange(group.rank(), group.size(), GroupSwap(group, device), device)


def check_ranks(ranks: int, heads: int) -> None:
    """
    Raises:
        ConfigError: not every rank would get the same number of attention heads.
    """
    if ranks < 1 or heads % ranks:
        raise ConfigError(
            f"{heads} attention heads cannot be shared evenly in sequence parallelism",
            got=f"{ranks} ranks",
            expected=f"one of {[n for n in range(1, heads + 1) if heads % n == 0]}",
        )


@dataclass
class Traffic:
    """What a rank has sent to other ranks. Replays of a CUDA graph are not counted, only the run it is recorded from.

    Attributes:
        sent_bytes: to all others together. swaps: collective operations.
    """

    sent_bytes: int = 0
    swaps: int = 0

    def clear(self) -> None:
        self.sent_bytes = self.swaps = 0


class SequenceExchange:
    """See ``Exchange``. One collective operation each way and layer, over buffers that stay where they are. For
    inference: gradients do not pass.

    Args:
        rank: number of this rank among ``ranks``.
        swap: sends and receives.
        device: of all tensors.
    """

    def __init__(self, rank: int, ranks: int, swap: Swap, device: torch.device) -> None:
        self.rank, self.ranks, self.traffic = rank, ranks, Traffic()
        self._swap, self._device = swap, device
        self._plain = find_spec("triton") is None  # the plain step does not need it
        self._buffers: list[tuple[Tensor, Tensor]] = []

    # -- how tokens are split -----------------------------------------------------------------------------------

    def run_length(self, video_tokens: int) -> int:
        return -(-video_tokens // self.ranks)

    def own(self, x: Tensor, video_tokens: int, dim: int = 1) -> Tensor:
        run = self.run_length(video_tokens)
        first = self.rank * run
        if first + run <= video_tokens:
            mine = x.narrow(dim, first, run)
        else:
            rows = torch.arange(first, first + run, device=x.device).clamp(max=video_tokens - 1)
            mine = x.index_select(dim, rows)
        rest = x.shape[dim] - video_tokens
        return torch.cat([mine, x.narrow(dim, video_tokens, rest)], dim) if rest else mine

    # -- exchanges ----------------------------------------------------------------------------------------------

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor, video_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, heads, width = q.shape
        tokens = video_tokens + length - self.run_length(video_tokens)
        out = q.new_empty(3, batch, tokens, heads // self.ranks, width)
        into = (out[0], out[1], out[2])
        self.scatter(torch.stack([q, k, v]), video_tokens, into)
        return into

    def scatter(self, qkv: Tensor, video_tokens: int, into: tuple[Tensor, Tensor, Tensor]) -> None:
        parts, batch, _, heads, width = qkv.shape
        run, own = self.run_length(video_tokens), heads // self.ranks
        sent, received = self._pair((self.ranks, parts, batch, run, own, width), qkv.dtype)
        words(sent).copy_(words(qkv[:, :, :run]).unflatten(3, (self.ranks, own)).permute(3, 0, 1, 2, 4, 5))
        self._exchange(sent, received)
        ops.unpack_heads(received, qkv, self.rank, *into, video_tokens, plain=self._plain)

    def to_tokens(self, x: Tensor, video_tokens: int) -> Tensor:
        batch, tokens, own, width = x.shape
        run, rest = self.run_length(video_tokens), tokens - video_tokens
        sent, received = self._pair((self.ranks, batch, run + rest, own, width), x.dtype)
        ops.pack_tokens(x.contiguous(), sent, video_tokens, plain=self._plain)
        self._exchange(sent, received)
        out = x.new_empty(batch, run + rest, self.ranks, own, width)
        words(out).copy_(words(received).permute(1, 2, 0, 3, 4))
        return out.flatten(2, 3)

    def whole(self, x: Tensor, video_tokens: int) -> Tensor:
        sent, received = self._pair((self.ranks, *x.shape), x.dtype)
        sent.copy_(x.expand(self.ranks, *x.shape))
        self._exchange(sent, received)
        return torch.cat(received.unbind(), dim=1)[:, :video_tokens]

    def _exchange(self, sent: Tensor, received: Tensor) -> None:
        flat = sent.view(self.ranks, -1).view(torch.uint8)
        self.traffic.sent_bytes += flat[1:].numel()
        self.traffic.swaps += 1
        self._swap(received.view(self.ranks, -1).view(torch.uint8), flat)

    def _pair(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What is sent and what is received, at the same addresses for the same shape."""
        size = prod(shape) * dtype.itemsize
        fitting = [pair for pair in self._buffers if pair[0].numel() >= size]
        if not fitting:
            # Smaller ones are kept: a recorded graph goes on using them.
            with torch.inference_mode(False):
                new = [torch.zeros(size, dtype=torch.uint8, device=self._device) for _ in range(2)]
            self._buffers.append((new[0], new[1]))
            fitting = self._buffers[-1:]
        sent, received = (t[:size].view(dtype).view(shape) for t in fitting[0])
        return sent, received


class GroupSwap:
    """``Swap`` over a process group of torch.distributed. Bytes are sent, whatever they mean: not every back end knows
    every dtype.

    NCCL (RCCL) can be captured in CUDA graphs. Gloo takes the way through host memory when the tensors are on a GPU:
    slow, for tests of several ranks on one GPU, which NCCL refuses.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        backend = dist.get_backend(group)
        self._through_host = backend == dist.Backend.GLOO and device.type != "cpu"

    def __call__(self, received: Tensor, sent: Tensor) -> None:
        if not self._through_host:
            dist.all_to_all_single(received, sent, group=self.group)
            return
        if torch.cuda.is_current_stream_capturing():
            raise ConfigError("gloo cannot be recorded in a CUDA graph", remedy="use NCCL, or set graphs: false")
        here = sent.cpu()
        there = torch.empty_like(here)
        dist.all_to_all_single(there, here, group=self.group)
        received.copy_(there)
