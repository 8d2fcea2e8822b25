"""The seam between the algorithm of a call (``closed_loop``) and the ways of running the network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from wam_policy_ros.contract.interface import ResetReason

from .encode import FirstFrame, Prompt, PromptEncoder
from .inpaint import Committed
from .sampler import Noise, Probe
from .session import WindowState


@dataclass(frozen=True)
class Denoised:
    """What denoising gives.

    Attributes:
        video: latents ``[B, z, F, h, w]``, None when nobody wanted them.
        action: normalised rows ``[B, N, action_dim]``.
        evaluated: indices of the solver steps that evaluated the network.
    """

    video: Tensor | None
    action: Tensor
    evaluated: list[int]


class StepPath(Protocol):
    """One way to run the network. Holds no session: what a session remembers is in its ``WindowState``.

    A call works on a *draft*, which may share memory with the state it was made from, but never changes what that state
    can see. Afterwards exactly one of the two is let go.
    """

    @property
    def prompts(self) -> PromptEncoder: ...

    def encode_clip(self, clip: Tensor) -> Tensor:
        """Latents ``[B, z, block, h, w]`` of the observed frames from ``[B, 3, T, H, W]`` in [-1, 1]."""
        ...

    def encode_first(self, frame: Tensor) -> FirstFrame:
        """Conditioning of a window from its first frame ``[B, 3, 1, H, W]``."""
        ...

    def restarted(
        self, state: WindowState, first: FirstFrame, prompt: Prompt, negative: Prompt | None, reason: ResetReason
    ) -> WindowState:
        """A draft with an empty window."""
        ...

    def continued(self, state: WindowState, prompt: Prompt, negative: Prompt | None) -> WindowState:
        """A draft that goes on where ``state`` ended."""
        ...

    def cloned(self, state: WindowState) -> WindowState:
        """The same contents in memory of its own: both go on, independently and bit for bit alike. Takes as much memory
        as ``state`` has, and is let go of like any other.

        Raises:
            Overloaded: there is none; nothing was changed.
        """
        ...

    def prefill(self, draft: WindowState, latents: Tensor, start_frame: int, probe: Probe | None) -> WindowState:
        """Append the K/V of observed latents ``[B, z, F, h, w]``."""
        ...

    def draw_noise(self, seed: int, latents: Tensor) -> Noise:
        """Starting noise of a call whose latents look like these."""
        ...

    def denoise(
        self,
        draft: WindowState,
        noise: Noise,
        proprio: Tensor,
        *,
        want_video: bool,
        committed: Committed | None,
        cancelled: Callable[[], bool] | None,
        probe: Probe | None,
    ) -> Denoised:
        """Denoise video and action jointly; the window is not changed.

        Raises:
            Cancelled: ``cancelled()`` was true before an evaluation.
        """
        ...

    def let_go(self, unwanted: WindowState, kept: WindowState) -> None:
        """``unwanted`` is over: give back what ``kept`` does not use."""
        ...

    def wait(self) -> None:
        """Before results are read: until other processes have done their part.

        Raises:
            PolicyLost: they never will.
        """
        ...

    def close(self) -> None:
        """No call is made again: end what does not end by itself."""
        ...
