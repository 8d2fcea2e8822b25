"""Observations and instructions to latents and embeddings. Each result is reused for exactly as long as it is valid."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from wam_policy_ros.model.attention import KV
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.model.text_encoder import zero_padding

from .memory import PROMPTS_KEPT, Counter, prompt_bytes
from .streamed_text import StreamedTextEncoder


@dataclass(frozen=True)
class Prompt:
    """An instruction as the DiT sees it: valid for as long as its token ids are.

    Attributes:
        ids: int64 ``[B, text_len]``, on the host, where every call compares them.
        embedding: text states ``[B, text_len, text_dim]``, padding rows zero.
        keys: cross-attention K/V, in the form of the path that runs the network: per layer (plain), or ``TextKeys``.
        of: the prompt as it was encoded, where this is another form of it.
    """

    ids: Tensor
    embedding: Tensor
    keys: Any
    of: Prompt | None = None

    @property
    def text_kv(self) -> list[KV]:
        """The plain path's K/V per layer."""
        return self.keys


class PromptEncoder:
    """Encodes prompts, remembering them by their token ids (exact: the encoder has no other input): those that a
    session uses, however many, and of the others the last few.

    Args:
        network: text encoder and text embedding.
        keys: makes ``Prompt.keys`` from text states ``[B, text_len, text_dim]`` and the length of the text in tokens;
            None for the plain path's.
        max_bytes: of prompts that are remembered for nobody; None: ``memory.PROMPTS_KEPT`` of full length.
        encode: runs the text encoder in place of the network's own, which then may have no weights.
    """

    def __init__(
        self,
        network: DreamZero,
        keys: Callable[[Tensor, int], Any] | None = None,
        *,
        max_bytes: int | None = None,
        encode: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self._network = network
        self._encode = encode or network.text_encoder
        self._keys = keys or (lambda states, length: network.model.text_kv(states))
        kept = PROMPTS_KEPT * prompt_bytes(network.config.dit, network.dtype)
        self._max_bytes = kept if max_bytes is None else max_bytes
        self._known: OrderedDict[bytes, Prompt] = OrderedDict()
        self._used: WeakValueDictionary[bytes, Prompt] = WeakValueDictionary()

    def __call__(self, ids: Tensor, mask: Tensor, between: Callable[[], None] | None = None) -> Prompt:
        """``between``: called after a prompt was encoded, and now and then while one is that takes long; may raise."""
        key = ids.cpu().numpy().tobytes() + mask.cpu().numpy().tobytes()
        if (known := self._used.get(key)) is not None:
            if key in self._known:
                self._known.move_to_end(key)
            else:
                self._remember(key, known)
            return known
        network, length = self._network, int(mask.sum(dim=1).min())
        ids, mask = ids.to(network.device), mask.to(network.device)
        asks = between is not None and isinstance(self._encode, StreamedTextEncoder)
        states = self._encode(ids, mask, between) if asks else self._encode(ids, mask)  # type: ignore[call-arg]
        embedding = zero_padding(states, mask)
        prompt = Prompt(ids.cpu(), embedding, self._keys(embedding, length))
        self._used[key] = prompt
        self._remember(key, prompt)
        if between is not None:  # pictures are encoded next, which takes as long
            between()
        return prompt

    @property
    def kept(self) -> list[Prompt]:
        """All that are remembered, those in use included."""
        return list(self._used.values())

    def forget(self) -> None:
        """Encode every prompt anew when it is asked for: the bits are the same, unless they were wrong."""
        self._known.clear()
        self._used.clear()

    def _remember(self, key: bytes, prompt: Prompt) -> None:
        self._known[key] = prompt
        count = Counter(self._network.device)
        sizes = {name: count(self._known[name]) for name in reversed(self._known)}  # newest first
        room = self._max_bytes - sizes.pop(key)  # which is kept in any case: this call uses it
        for name, size in sizes.items():
            room -= size
            if room < 0:
                del self._known[name]


@dataclass(frozen=True)
class FirstFrame:
    """Conditioning of a window, computed from its first frame.

    Attributes:
        clip_features: ``[B, 257, clip_dim]``.
        ys: ``[B, 4 + z, latent_frames, h, w]``: mask (one on frame 0) and latents of the frame followed by grey.
        latent: ``[B, z, 1, h, w]``.
    """

    clip_features: Tensor
    ys: Tensor
    latent: Tensor


def encode_first_frame(network: DreamZero, frame: Tensor) -> FirstFrame:
    """Encode the first frame of a window, ``[B, 3, 1, H, W]`` in [-1, 1] (DreamZero spec 5.2, 5.4).

    All ``num_frames`` frames are encoded: the latents of the grey continuation depend on the image.
    """
    batch, channels, _, height, width = frame.shape
    with _autocast(network):
        features = network.image_encoder(frame.transpose(1, 2)).to(network.dtype)
        grey = frame.new_zeros(batch, channels, network.config.num_frames - 1, height, width)
        latents = network.vae.encode(torch.cat([frame, grey], dim=2)).to(network.dtype)
    mask = latents.new_zeros(batch, 4, *latents.shape[2:])
    mask[:, :, 0] = 1
    return FirstFrame(features, torch.cat([mask, latents], dim=1), latents[:, :, :1])


def expand_observation(video: Tensor, block: int) -> Tensor:
    """Frames of a later call to the clip the VAE encodes (DreamZero spec 3.3 d).

    ``[B, 3, T, H, W]`` with T = 4 becomes f0 f0 f0 f1 f1 f2 f2 f3 f3 for ``block`` = 2, T = 8 gets its first frame
    once more in front, T = 9 to 12 stays as it is (the VAE drops what fills no latent).

    Raises:
        ValueError: T gives no whole number of repetitions. Upstream divides by zero at 2 and 3 frames and loses the
            newest ones at 5 to 7 (DreamZero spec 10, item 41).
    """
    frames = video.shape[2]
    if (frames - 1) // 4 == block:
        return video
    groups, rest = divmod(frames, 4)
    if rest or groups == 0 or groups > block or block % groups:
        defined = [4 * g for g in range(1, block + 1) if block % g == 0]
        raise ValueError(
            f"an observation of {frames} frames cannot be encoded; expected {defined} frames, or "
            f"{4 * block + 1} to {4 * block + 4}"
        )
    if groups != block:
        video = video.repeat_interleave(block // groups, dim=2)
    return torch.cat([video[:, :, :1], video], dim=2)


def _autocast(network: DreamZero) -> torch.autocast:
    """The reference encodes the first frame under bf16 autocast, later frames without (DreamZero spec 10, item 21)."""
    return torch.autocast(network.device.type, torch.bfloat16, enabled=network.dtype == torch.bfloat16)
