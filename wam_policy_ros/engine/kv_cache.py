"""The window of cached keys and values of one guidance branch (DreamZero spec 3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wam_policy_ros.contract.errors import EngineError
from wam_policy_ros.model.attention import KV


class _Writes:
    """Of buffers that several windows see: what of it was written since a window looked.

    Attributes:
        count: of all writes. starts: ``(count, first token)``, both rising: an older write that begins no earlier than
            a newer one says nothing that the newer one does not.
    """

    def __init__(self) -> None:
        self.count = 0
        self.starts: list[tuple[int, int]] = []

    def note(self, start: int) -> int:
        """A write from token ``start`` on; its number."""
        while self.starts and self.starts[-1][1] >= start:
            self.starts.pop()
        self.count += 1
        self.starts.append((self.count, start))
        return self.count

    def since(self, seen: int, length: int) -> bool:
        """Whether a write after number ``seen`` touched the first ``length`` tokens."""
        return any(number > seen and start < length for number, start in self.starts)


class KVWindow:
    """K/V of the observed frames, per layer, in preallocated buffers ``[B, capacity, heads, head_dim]``.

    Only :meth:`append` writes, and only behind ``length``. A :meth:`fork` shares the buffers but has its own length, so
    a step can work on a fork and be abandoned without a trace. Of several forks of one window only one may live on:
    all of them write behind the same ``length``. The others are void from then on, and say so when they are read; who
    wants two windows that go on takes a :meth:`clone`.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._k: list[Tensor] = []
        self._v: list[Tensor] = []
        self._writes = _Writes()
        self._seen = 0

    def append(self, kv: Sequence[KV]) -> None:
        """Add the K/V of newly observed frames; beyond ``capacity`` the oldest tokens fall out.

        Raises:
            EngineError: another fork has overwritten what this one holds.
        """
        self._check()
        if not self._k:
            self._k = [self._empty(layer.k) for layer in kv]
            self._v = [self._empty(layer.v) for layer in kv]
            self._writes, self._seen = _Writes(), 0
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
            self._writes = _Writes()  # nobody else has these
        self._seen = self._writes.note(self.length)
        for i, layer in enumerate(kv):
            self._k[i][:, self.length : self.length + count] = layer.k
            self._v[i][:, self.length : self.length + count] = layer.v
        self.length += count

    def past(self) -> list[KV] | None:
        """Views of the filled part per layer, or None while empty.

        Raises:
            EngineError: another fork has overwritten what this one holds.
        """
        self._check()
        if self.length == 0:
            return None
        return [KV(k[:, : self.length], v[:, : self.length]) for k, v in zip(self._k, self._v, strict=True)]

    def fork(self) -> KVWindow:
        """Same buffers, own length."""
        other = KVWindow(self.capacity)
        other._k, other._v, other.length = list(self._k), list(self._v), self.length
        other._writes, other._seen = self._writes, self._seen
        return other

    def clone(self) -> KVWindow:
        """The same contents in buffers of its own: both go on, independently. What another fork has overwritten is gone
        for the clone as well, which says so when it is read: a full window whose restart was given up can be cloned and
        restarted again.
        """
        other = KVWindow(self.capacity)
        other.length = self.length
        if self._void:
            other._writes.note(0)
        else:
            other._k, other._v = [k.clone() for k in self._k], [v.clone() for v in self._v]
        return other

    def emptied(self) -> KVWindow:
        """Same buffers, length zero: for a restart after which the old contents are never read again."""
        other = self.fork()
        other.length = 0
        return other

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self._k, *self._v))

    @property
    def _void(self) -> bool:
        return self._writes.since(self._seen, self.length)

    def _check(self) -> None:
        if self._void:
            raise EngineError(
                "the window's keys and values were overwritten by another fork of it",
                got=f"{self.length} tokens",
                remedy="let one fork live on, or clone the window",
            )

    def _empty(self, like: Tensor) -> Tensor:
        batch, _, heads, dim = like.shape
        return torch.empty(batch, self.capacity, heads, dim, dtype=like.dtype, device=like.device)
