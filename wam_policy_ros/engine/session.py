"""What an episode remembers. One session object per episode; nothing is kept on modules."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from wam_policy_ros.contract.errors import SessionBusy, SessionError
from wam_policy_ros.contract.history import FrameHistory
from wam_policy_ros.contract.interface import PolicySpec, ResetReason
from wam_policy_ros.model.attention import KV, CrossKV

from .encode import Prompt
from .kv_cache import KVWindow
from .observe_ahead import ObserveAhead
from .window_slots import WindowSlot


@dataclass(frozen=True)
class WindowState:
    """The network's memory between calls (DreamZero spec 3.1). Replaced as a whole when a step succeeds.

    Attributes:
        current_start_frame: absolute latent frame at which the next block starts.
        prompt: instruction of the last call; negative: the fixed negative prompt.
        clip_features, ys: conditioning from the window's first frame.
        image_kv: cross-attention K/V of the image tokens per layer, the same for both branches.
        cond, uncond: cached K/V of observed frames per guidance branch.
        slot: where the fused step keeps K/V instead of the three fields above; cached: video tokens in it.
        far: what a path keeps elsewhere whose branches are apart, on other GPUs for one: see ``parallel.far``.
    """

    current_start_frame: int = 0
    prompt: Prompt | None = None
    negative: Prompt | None = None
    clip_features: Tensor | None = None
    ys: Tensor | None = None
    image_kv: list[KV] = field(default_factory=list)
    cond: KVWindow | None = None
    uncond: KVWindow | None = None
    slot: WindowSlot | None = None
    cached: int = 0
    far: Any = None

    @property
    def guided(self) -> bool:
        """The window has the second guidance branch."""
        if self.far is not None:
            return self.negative is not None
        return self.uncond is not None or (self.slot is not None and self.slot.layout.branches == 2)

    def branches(self) -> list[tuple[Prompt, KVWindow]]:
        """The guidance branches in order: with the prompt, and with the negative prompt unless guidance is off."""
        pairs = [(self.prompt, self.cond), (self.negative, self.uncond)]
        return [(p, w) for p, w in pairs if p is not None and w is not None]

    def cross(self, prompt: Prompt) -> list[CrossKV]:
        return [CrossKV(t, i) for t, i in zip(prompt.text_kv, self.image_kv, strict=True)]

    def forked(self) -> WindowState:
        """A draft a step may advance; this state stays as it is."""
        return replace(
            self, cond=self.cond.fork() if self.cond else None, uncond=self.uncond.fork() if self.uncond else None
        )

    def cloned(self) -> WindowState:
        """With key/value windows of its own; see ``StepPath.cloned``, which also copies a slot and what is ``far``. The
        rest is never written, so both may hold it."""
        return replace(
            self, cond=self.cond.clone() if self.cond else None, uncond=self.uncond.clone() if self.uncond else None
        )


def reset_reason(state: WindowState, ids: Tensor, frames: int, local_attn_size: int) -> ResetReason | None:
    """Why this call starts from an empty window; the first matching rule wins (DreamZero spec 3.2)."""
    if state.prompt is None:
        return ResetReason.FIRST_CALL
    if state.prompt.ids.shape != ids.shape or not state.prompt.ids.equal(ids.cpu()):
        return ResetReason.PROMPT_CHANGED
    if frames == 1:
        return ResetReason.SINGLE_FRAME
    if state.current_start_frame >= local_attn_size:
        return ResetReason.WINDOW_FULL
    return None


class Session:
    """One episode: its frames and the network's window. Made by ``DreamZeroPolicy.open``."""

    def __init__(
        self, owner: object, spec: PolicySpec, session_id: str | None = None, *, seed: int | None = None
    ) -> None:
        self.session_id = session_id or uuid.uuid4().hex
        self.seed = seed
        self.owner = owner
        self._spec = spec
        self.clear()
        self.closed = self.stepping = False

    def clear(self) -> None:
        """Back to the moment of opening."""
        self.step = 0
        self.history = FrameHistory(self._spec)
        self.window = WindowState()
        self.ahead: ObserveAhead | None = None

    def twin(self, session_id: str | None = None, *, seed: int | None = None) -> Session:
        """Another episode at the same point, with the same seed unless one is given. It has no window yet."""
        other = Session(self.owner, self._spec, session_id, seed=self.seed if seed is None else seed)
        other.step, other.history = self.step, self.history.copy()
        return other

    def close(self) -> None:
        self.clear()
        self.closed = True

    @contextmanager
    def step_begun(self) -> Iterator[None]:
        """Until it has ended nothing else may be done with the session: what runs between the step's evaluations is
        about other sessions."""
        self.stepping = True
        try:
            yield
        finally:
            self.stepping = False

    def check(self, owner: object) -> None:
        """
        Raises:
            SessionError: closed, opened by another policy, or in the middle of a step.
        """
        if self.closed:
            raise SessionError("session is closed", got=self.session_id, remedy="open a new one with policy.open()")
        if self.owner is not owner:
            raise SessionError("session belongs to another policy", got=self.session_id)
        if self.stepping:
            raise SessionBusy("a step of this session has not ended", got=self.session_id)
