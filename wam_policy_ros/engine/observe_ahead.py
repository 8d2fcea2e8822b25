"""The frames of the next call, encoded as they arrive: when the newest one comes, little is left to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wam_policy_ros.contract.errors import ConfigError

from .encode import expand_observation
from .fast_vae import EncodeState, FastVAE

Views = Mapping[str, npt.NDArray[np.uint8]]

# The clip repeats every frame, with the first one once more in front: f0 | f0 f0 f1 f1 f2 f2 f3 f3.
_REPEAT = 2


def can_encode_ahead(num_frames: int, block: int) -> bool:
    """Whether the clip of a call is its frames repeated, as ``ObserveAhead`` has them."""
    return num_frames * _REPEAT == 4 * block


class ObserveAhead:
    """Encodes a call's clip frame by frame. One per session; holds the causal state of one clip at most.

    Tier *exact* against :meth:`FastVAE.encode` of the whole clip: the same passes over the same pieces. Which frames a
    call looks at is only known when it is made, so the pixels it draws are compared with those offered before; if one
    differs the clip is encoded anew.

    Args:
        vae: its pieces set how much is encoded at once.
        to_video: camera views uint8 ``[T, H, W, 3]`` -> ``[1, 3, T, height, width]`` in [-1, 1] on the device; every
            frame for itself.
        num_frames: of a call. block: latent frames of a call.

    Raises:
        ConfigError: the clip does not repeat its frames, or a piece holds no whole number of them.
    """

    def __init__(self, vae: FastVAE, to_video: Callable[[Views], Tensor], *, num_frames: int = 4, block: int = 2):
        if not can_encode_ahead(num_frames, block):
            raise ConfigError("no clip to encode ahead", got=f"{num_frames} frames, block {block}", expected="4 and 2")
        pieces = vae.pieces or num_frames * _REPEAT
        if pieces % _REPEAT:
            raise ConfigError("a piece must hold whole repeated frames", got=pieces, expected="an even number or None")
        self._vae, self._to_video = vae, to_video
        self._num_frames, self._block, self._per_piece = num_frames, block, pieces // _REPEAT
        self.hits = self.misses = 0
        self.clear()

    def clear(self) -> None:
        """Forget the clip."""
        self._offered: list[dict[str, npt.NDArray[np.uint8]]] = []
        self._waiting: list[Tensor] = []
        self._latents: list[Tensor] = []
        self._state: EncodeState | None = None

    @property
    def offered(self) -> int:
        """Frames of the next call known so far."""
        return len(self._offered)

    @property
    def nbytes(self) -> int:
        """Device memory held between calls."""
        return self._state.nbytes if self._state else 0

    @property
    def held(self) -> list[object]:
        """What holds device memory between calls."""
        return [self._state, self._waiting, self._latents]

    def offer(self, slot: int, views: Views) -> bool:
        """Say that the next call will probably see these views as its frame ``slot``, and encode them.

        Args:
            slot: 0 starts a clip anew; otherwise the number of frames offered before.
            views: camera -> uint8 ``[H, W, 3]`` or ``[1, H, W, 3]``; copied.

        Returns:
            False when ``slot`` is out of turn or beyond the last frame: nothing was done.
        """
        if slot == 0:
            self.clear()
        if slot != len(self._offered) or slot >= self._num_frames:
            return False
        copies = {name: np.array(v if v.ndim == 4 else v[None]) for name, v in views.items()}
        try:
            self._push(self._to_video(copies), keep=True)
        except BaseException:
            self.clear()  # half a frame is none
            raise
        self._offered.append(copies)
        return True

    def latents(self, drawn: Views) -> Tensor:
        """Latents of the observed block, ``[1, z, block, h, w]``; the clip is forgotten.

        Args:
            drawn: camera -> uint8 ``[T, H, W, 3]``, the frames that the call looks at.
        """
        try:
            frames = len(next(iter(drawn.values())))
            if frames != self._num_frames:
                clip = expand_observation(self._to_video(drawn), self._block)
                return self._vae.encode(clip)[:, :, -self._block :]
            if self._offered and self._matches(drawn):
                self.hits += 1
            else:
                self.misses += bool(self._offered)
                self.clear()
            done = len(self._offered)
            if done < frames:
                self._push(self._to_video({name: v[done:] for name, v in drawn.items()}), keep=False)
            return torch.cat(self._latents, dim=2)[:, :, -self._block :]
        finally:
            self.clear()

    def _matches(self, drawn: Views) -> bool:
        return all(
            drawn.keys() == old.keys() and all(np.array_equal(v[0], drawn[name][i]) for name, v in old.items())
            for i, old in enumerate(self._offered)
        )

    def _push(self, video: Tensor, *, keep: bool) -> None:
        """Encode every piece that these frames complete. ``keep``: the state outlives this call."""
        if self._state is None:
            self._state, latent = self._vae.begin(video[:, :, :1])
            self._latents.append(latent)
        self._waiting += video.split(1, dim=2)
        while len(self._waiting) >= self._per_piece:
            piece, self._waiting = self._waiting[: self._per_piece], self._waiting[self._per_piece :]
            clip = torch.cat(piece, dim=2).repeat_interleave(_REPEAT, dim=2)
            self._state, latents = self._vae.push(self._state, clip)
            self._latents += [] if latents is None else [latents]
        if keep:
            self._state = self._state.compact()
