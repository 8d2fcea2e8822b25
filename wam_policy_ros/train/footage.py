"""Frames of many episodes on the training device, as the network will see them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from wam_policy_ros.contract.embodiment import Embodiment
from wam_policy_ros.engine.encode import expand_observation
from wam_policy_ros.engine.preprocess import lay_out_mosaic, to_model_video

from .episodes import Episode
from .errors import DataError
from .preset import BLOCK, OBSERVED, Preset


def mosaic_video(views: Tensor, page: Embodiment) -> Tensor:
    """The network's video: uint8 ``[B, T, 3, h, w, 3]`` -> float32 ``[B, 3, T, 2h, 2w]`` in [-1, 1]."""
    batch, frames = views.shape[:2]
    flat = views.flatten(0, 1)
    picture = lay_out_mosaic([flat[:, k] for k in range(3)], page)
    return to_model_video(picture, torch.float32)[0].unflatten(1, (batch, frames)).transpose(0, 1).contiguous()


class Footage:
    """Grows as episodes come in.

    Attributes:
        episodes: without their pictures, in order of arrival.
        first: number of each episode's first frame; frame k of episode e is ``first[e] + k``.
    """

    def __init__(self, preset: Preset, device: torch.device) -> None:
        self.preset, self.device = preset, device
        self.episodes: list[Episode] = []
        self.first: list[int] = []
        self.frames = 0
        self._buffer = torch.empty(0)

    def add(self, episodes: Sequence[Episode]) -> None:
        """
        Raises:
            DataError: their pictures have another size.
        """
        size = (3, self.preset.view_height, self.preset.view_width, 3)
        if other := {e.views.shape[1:] for e in episodes} - {size}:
            raise DataError(
                f"episodes of another preset than {self.preset.name}", got=f"views {sorted(other)}", expected=str(size)
            )
        new = sum(len(e.views) for e in episodes)
        if self.frames + new > len(self._buffer):
            shape = (max(2 * len(self._buffer), self.frames + new, 1024), *size)
            grown = torch.empty(shape, dtype=torch.uint8, device=self.device)
            if self.frames:
                grown[: self.frames] = self._buffer[: self.frames]
            self._buffer = grown
        for e in episodes:
            count = len(e.views)
            self._buffer[self.frames : self.frames + count] = torch.from_numpy(np.ascontiguousarray(e.views)).to(
                self.device
            )
            self.episodes.append(Episode(**{**vars(e), "views": np.empty((count, 0), np.uint8)}))
            self.first.append(self.frames)
            self.frames += count

    def keep_first(self, episodes: int) -> None:
        """Forget all episodes after so many."""
        if episodes < len(self.episodes):
            self.frames = self.first[episodes]
            del self.episodes[episodes:], self.first[episodes:]

    def video(self, frames: Tensor) -> Tensor:
        """int64 ``[B, T]`` frame numbers -> ``[B, 3, T, H, W]``."""
        views = self._buffer[frames.to(self.device)]
        return mosaic_video(views, self.preset.embodiment)

    def observed_clip(self, newest: Tensor) -> Tensor:
        """The clip the VAE encodes in a call whose newest frame is ``newest`` ``[B]``: ``[B, 3, 9, H, W]``."""
        back = torch.arange(1 - OBSERVED, 1, device=newest.device)
        return expand_observation(self.video(newest[:, None] + back), BLOCK)

    def first_clip(self, frame: Tensor) -> Tensor:
        """The clip of the first call of a window: the frame, then grey. ``[B, 3, 9, H, W]``."""
        still = self.video(frame[:, None])
        grey = still.new_zeros(*still.shape[:2], 4 * BLOCK, *still.shape[3:])
        return torch.cat([still, grey], dim=2)

    def observable(self, start: int = 0) -> Tensor:
        """Numbers of all frames from ``start`` on that have the frames of a call before them in their episode."""
        spans = [range(f + OBSERVED - 1, f + len(e.views)) for f, e in zip(self.first, self.episodes, strict=True)]
        return torch.tensor([n for span in spans for n in span if n >= start], dtype=torch.int64)
