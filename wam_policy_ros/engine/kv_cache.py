"""The window of cached keys and values of one guidance branch (DreamZero spec 3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wam_policy_ros.model.attention import KV


class KVWindow:
    """K/V of the observed frames, per layer, in preallocated buffers ``[B, capacity, heads, head_dim]``.

    Only :meth:`append` writes, and only behind ``length``. A :meth:`fork` shares the buffers but has its own length, so
    a step can work on a fork and be abandoned without a trace. Of several forks of one window only one may live on:
    all of them write behind the same ``length``.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._k: list[Tensor] = []
        self._v: list[Tensor] = []

    def append(self, kv: Sequence[KV]) -> None:
        """Add the K/V of newly observed frames; beyond ``capacity`` the oldest tokens fall out."""
        if not self._k:
            self._k = [self._empty(layer.k) for layer in kv]
            self._v = [self._empty(layer.v) for layer in kv]
        kv = [KV(layer.k[:, -self.capacity :], layer.v[:, -self.capacity :]) for layer in kv]
        count = kv[0].k.shape[1]
        overflow = self.length + count - self.capacity
        if overflow > 0:
            # New buffers rather than a shift in place: a fork may still read the old ones.
            keep = self.length - overflow
            for buffers in (self._k, self._v):
                for i, old in enumerate(buffers):
                    fresh = torch.empty_like(old)
                    fresh[:, :keep] = old[:, overflow : overflow + keep]
                    buffers[i] = fresh
            self.length = keep
        for i, layer in enumerate(kv):
            self._k[i][:, self.length : self.length + count] = layer.k
            self._v[i][:, self.length : self.length + count] = layer.v
        self.length += count

    def past(self) -> list[KV] | None:
        """Views of the filled part per layer, or None while empty."""
        if self.length == 0:
            return None
        return [KV(k[:, : self.length], v[:, : self.length]) for k, v in zip(self._k, self._v, strict=True)]

    def fork(self) -> KVWindow:
        """Same buffers, own length."""
        other = KVWindow(self.capacity)
        other._k, other._v, other.length = list(self._k), list(self._v), self.length
        return other

    def emptied(self) -> KVWindow:
        """Same buffers, length zero: for a restart after which the old contents are never read again."""
        other = self.fork()
        other.length = 0
        return other

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self._k, *self._v))

    def _empty(self, like: Tensor) -> Tensor:
        batch, _, heads, dim = like.shape
        return torch.empty(batch, self.capacity, heads, dim, dtype=like.dtype, device=like.device)
