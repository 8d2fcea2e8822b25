"""The text encoder off the GPU: its weights wait in host memory and pass through block by block.

*Exact*: the same operations on the same numbers. An instruction is encoded once, so between instructions the 11 GB of
the published encoder would only take the place of windows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from wam_policy_ros.model.text_encoder import TextEncoder, position_buckets

BETWEEN = 4

_CHUNK_BYTES = 1 << 28
_ALIGNED = 256
"""Pinned memory comes in powers of two: the published layers fill such chunks to 97 %, each of its own to 70."""


class StreamedTextEncoder:
    """Takes a ``TextEncoder`` over: its weights move to (pinned) host memory, the module keeps none.

    They move in the background, block by block, while other things are prepared; instructions can be encoded before the
    last has gone.

    Args:
        encoder: with weights, on any device.
        device: where it shall compute.
    """

    def __init__(self, encoder: TextEncoder, device: torch.device) -> None:
        self._device = device
        self._heads = encoder.config
        blocks: list[nn.Module] = list(encoder.blocks)
        # Rows of the embedding are looked up where they are: 512 of 256384 are needed.
        self._embedding = encoder.token_embedding.weight.detach()
        self._weights: list[Mapping[str, Tensor]] = [block.state_dict() for block in blocks]
        self._norm = encoder.norm
        encoder.token_embedding.to("meta")
        self._blocks = [block.to("meta") for block in blocks]
        self.nbytes = sum(t.numel() * t.element_size() for w in self._weights for t in w.values())
        self._failure: BaseException | None = None
        self._mover = threading.Thread(target=self._move, name="text encoder to the host", daemon=True)
        self._mover.start()

    def settle(self) -> None:
        """Wait until all weights are in host memory.

        Raises:
            RuntimeError, MemoryError: the host has no room for them.
        """
        self._mover.join()
        if self._failure is not None:
            raise self._failure

    def _move(self) -> None:
        try:
            with torch.inference_mode():
                if self._device.type == "cuda":
                    with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream()):
                        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                        self._move_all(pinned=True)
                else:
                    self._move_all(pinned=False)
        except BaseException as error:  # told to who waits
            self._failure = error

    def _move_all(self, *, pinned: bool) -> None:
        room = _Room(pinned=pinned)
        for i, weights in enumerate(self._weights):
            # One after the other: what has gone is free for others.
            self._weights[i] = room.take(weights)
        self._embedding = self._embedding.to("cpu")

    @torch.inference_mode()
    def __call__(self, ids: Tensor, mask: Tensor, between: Callable[[], None] | None = None) -> Tensor:
        """As ``TextEncoder.forward``. ``between`` is called before every ``BETWEEN`` blocks and may raise: to bring all
        of them takes as long as several evaluations of the network."""
        ids, mask = ids.to(self._device), mask.to(self._device)
        buckets = position_buckets(ids.shape[1], self._heads.num_buckets, self._device)
        padding = (mask == 0)[:, None, None, :]
        table = self._embedding
        x = F.embedding(ids.to(table.device), table).to(self._device)
        for i, block in enumerate(self._blocks):
            if between is not None and i % BETWEEN == 0:
                between()
            there = {name: w.to(self._device, non_blocking=True) for name, w in self._weights[i].items()}
            x = functional_call(block, there, (x, buckets, padding))
        return self._norm(x)


class _Room:
    """Host memory in large chunks that tensors share."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._open: list[tuple[Tensor, int]] = []  # chunks and the bytes they are filled with

    def take(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies here, complete when this returns."""
        # Large ones first: the small ones fill what is left.
        names = sorted(weights, key=lambda name: -weights[name].nbytes)
        out = {name: self._place(weights[name]).copy_(weights[name], non_blocking=self._pinned) for name in names}
        if self._pinned:
            torch.cuda.current_stream().synchronize()
        return {name: out[name] for name in weights}

    def _place(self, like: Tensor) -> Tensor:
        size = -(-like.nbytes // _ALIGNED) * _ALIGNED
        for i, (chunk, filled) in enumerate(self._open):
            if filled + size <= len(chunk):
                self._open[i] = (chunk, filled + size)
                return _shaped(chunk[filled : filled + like.nbytes], like)
        chunk = torch.empty(max(size, _CHUNK_BYTES), dtype=torch.uint8, pin_memory=self._pinned)
        self._open = [*self._open, (chunk, size)][-4:]  # older ones are as good as full
        return _shaped(chunk[: like.nbytes], like)


def _shaped(memory: Tensor, like: Tensor) -> Tensor:
    return memory.view(like.dtype).view(like.shape)
