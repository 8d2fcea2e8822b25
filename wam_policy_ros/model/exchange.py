"""The seam of sequence parallelism: how the video tokens of one call are split over ranks, and what ranks swap.

Ulysses (Jacobs et al. 2023, arXiv:2309.14509) with replicated tokens behind the split ones: a rank holds a run of the
video tokens and all action and state tokens, with all heads, for everything that works token by token; for
self-attention it holds all tokens with its own heads. ``ALONE`` is one rank that holds everything, at no cost.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Exchange(Protocol):
    """N video tokens are cut into ``ranks`` runs of ``ceil(N / ranks)``; what is missing at the end is filled with
    copies of the last token, so that every rank works on the same shapes and replicated tokens get the same bits on
    all of them. Fillers are never attended to and never returned. Shapes: L own tokens, video first; T all tokens.
    """

    @property
    def ranks(self) -> int: ...

    def run_length(self, video_tokens: int) -> int:
        """Video tokens of each rank, fillers included."""
        ...

    def own(self, x: Tensor, video_tokens: int, dim: int = 1) -> Tensor:
        """This rank's part of a tensor with T tokens along ``dim``: its run, and all tokens behind the video."""
        ...

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor, video_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Own tokens of all heads ``[B, L, H, Dh]`` -> all tokens of own heads ``[B, T, H / ranks, Dh]``."""
        ...

    def scatter(self, qkv: Tensor, video_tokens: int, into: tuple[Tensor, Tensor, Tensor]) -> None:
        """``to_heads`` of q, k, v ``[3, B, L, H, Dh]``, written to three tensors ``[B, T, H / ranks, Dh]``."""
        ...

    def to_tokens(self, x: Tensor, video_tokens: int) -> Tensor:
        """All tokens of own heads ``[B, T, H / ranks, Dh]`` -> own tokens of all heads ``[B, L, H, Dh]``."""
        ...

    def whole(self, x: Tensor, video_tokens: int) -> Tensor:
        """Every rank's run of the video ``[B, run, ...]`` -> ``[B, N, ...]``, the same bits on every rank."""
        ...


class Alone:
    """One rank: nothing is split, nothing is swapped, every tensor is handed back as it came."""

    ranks = 1

    def run_length(self, video_tokens: int) -> int:
        return video_tokens

    def own(self, x: Tensor, video_tokens: int, dim: int = 1) -> Tensor:
        return x

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor, video_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        return q, k, v

    def scatter(self, qkv: Tensor, video_tokens: int, into: tuple[Tensor, Tensor, Tensor]) -> None:
        for part, target in zip(qkv, into, strict=True):
            target.copy_(part)

    def to_tokens(self, x: Tensor, video_tokens: int) -> Tensor:
        return x

    def whole(self, x: Tensor, video_tokens: int) -> Tensor:
        return x


ALONE = Alone()
