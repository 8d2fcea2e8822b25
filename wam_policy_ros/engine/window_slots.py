"""Memory of a session for the fused step: fixed addresses, so that CUDA graphs can be replayed on them.

A slot holds both guidance branches. What the plain path keeps as lists of tensors per branch (``KVWindow``, text and
image keys) lies here in one allocation each, written in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor

from wam_policy_ros.contract.errors import Overloaded
from wam_policy_ros.model.config import DiTConfig


@dataclass(frozen=True)
class SlotLayout:
    """Sizes of a slot.

    Attributes:
        branches: 2 with guidance, 1 without.
        rows: key/value rows per branch: the cached video tokens and, behind them, the tokens of the running call.
        latent: ``(channels, frames, h, w)`` of the conditioning tensor.
        dtype: of text and image keys; kv_dtype: of the window, fp8 when attention runs in fp8.
        ranks: over which the heads of the window are spread; text and image keys are whole on each.
        image_tokens: of the image encoder, class token included.
        first_shared: the branches have the first layer's keys and values in common.
    """

    dit: DiTConfig
    branches: int
    rows: int
    latent: tuple[int, int, int, int]
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    ranks: int = 1
    first_shared: bool = True
    image_tokens: int = 257

    @classmethod
    def of(
        cls,
        dit: DiTConfig,
        *,
        branches: int,
        latent_frames: int,
        latent_hw: tuple[int, int],
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
        ranks: int = 1,
        first_shared: bool = True,
        image_tokens: int = 257,
    ) -> SlotLayout:
        cached = (dit.local_attn_size - dit.num_frame_per_block) * dit.frame_seqlen
        current = dit.num_frame_per_block * dit.frame_seqlen + dit.num_action_per_block + dit.num_state_per_block
        latent = (dit.in_dim - dit.out_dim, latent_frames, *latent_hw)
        return cls(dit, branches, cached + current, latent, dtype, kv_dtype, device, ranks, first_shared, image_tokens)

    @property
    def windows(self) -> tuple[int, ...]:
        """How many branches' keys each layer holds."""
        return (1 if self.first_shared else self.branches,) + (self.branches,) * (self.dit.num_layers - 1)

    @property
    def nbytes(self) -> int:
        """Bytes of one slot."""
        wide = torch.empty((), dtype=self.dtype).element_size()
        narrow = torch.empty((), dtype=self.kv_dtype).element_size()
        d = self.dit
        window = 2 * sum(self.windows) * self.rows * (d.dim // self.ranks) * narrow
        cross = 2 * d.num_layers * (self.branches * d.text_len + self.image_tokens) * d.dim * wide
        channels, frames, height, width = self.latent
        scales = 4 * (
            d.num_layers * (self.scaled_rows + self.branches + 2) + 2 * self.branches
        )  # peaks and rows as well
        return window + cross + channels * frames * height * width * wide + scales

    @property
    def scaled_rows(self) -> int:
        """At least the rows of any call, over all branches; a multiple of what matrix products want aligned."""
        return -(-self.branches * self.rows // 64) * 64


class WindowSlot:
    """Buffers of one session.

    Attributes:
        index: number of the slot within its pool; graphs are kept per index.
        k, v: per layer ``[branches, rows, heads / ranks, head_dim]``, keys after rotation; see ``layout.first_shared``.
        text_k, text_v: ``[layers, branches, heads, text_len, head_dim]``, keys folded (``tensors.folded_keys``); only
            ``text_rows`` of them are valid.
        text_rows: int32 ``[branches]``; text_padding: float32 ``[branches]``, how often the last valid row counts.
        image_k, image_v: ``[layers, 1, heads, image_tokens, head_dim]``, the same for both branches; keys folded.
        text_peak: float32 ``[branches, layers]``, largest magnitude of a prompt's values; image_peak: ``[layers]``, of
            the picture's.
        cross_scale: float32 ``[layers, 1]``, by which outputs of cross-attention are multiplied before they are rounded
            to 8 bits; cross_unscale: ``[layers, scaled_rows]``, its inverse once per row, as matrix products take it.
        ys: conditioning of the window ``[1, channels, frames, h, w]``.
        loaded: per branch the prompt whose keys lie in the text buffers.
    """

    def __init__(self, layout: SlotLayout, index: int) -> None:
        self.layout, self.index = layout, index
        dit, device = layout.dit, layout.device

        def buffer(*shape: int) -> Tensor:
            # Attention never reads a row that was not written, but fp8 GEMMs and tests may look at all of them.
            return torch.zeros(dit.num_layers, *shape, dit.head_dim, dtype=layout.dtype, device=device)

        def window() -> tuple[Tensor, ...]:
            heads = (dit.num_heads // layout.ranks, dit.head_dim)
            whole = torch.zeros(sum(layout.windows), layout.rows, *heads, dtype=layout.kv_dtype, device=device)
            return whole.split(layout.windows)

        self.k, self.v = window(), window()
        self.text_k, self.text_v = (buffer(layout.branches, dit.num_heads, dit.text_len) for _ in range(2))
        self.image_k, self.image_v = (buffer(1, dit.num_heads, layout.image_tokens) for _ in range(2))
        self.text_rows = torch.zeros(layout.branches, dtype=torch.int32, device=device)
        self.text_padding = torch.zeros(layout.branches, dtype=torch.float32, device=device)
        self.text_peak, self.image_peak, self.cross_scale, self.cross_unscale = (
            torch.zeros(shape, dtype=torch.float32, device=device)
            for shape in (
                (layout.branches, dit.num_layers), (dit.num_layers,), (dit.num_layers, 1),
                (dit.num_layers, layout.scaled_rows),
            )
        )  # fmt: skip
        self.ys = torch.zeros(1, *layout.latent, dtype=layout.dtype, device=device)
        self.loaded: list[object] = [None] * layout.branches

    def tensors(self) -> list[Tensor]:
        """All that a session's contents lie in, in an order that is the same for all slots of a layout."""
        cross = (self.text_k, self.text_v, self.text_rows, self.text_padding, self.text_peak)
        picture = (self.image_k, self.image_v, self.image_peak, self.ys)
        return [*self.k, *self.v, *cross, *picture, self.cross_scale, self.cross_unscale]

    def copy_(self, other: WindowSlot) -> None:
        """Take over what another slot of the same layout holds."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine.copy_(theirs)
        self.loaded = list(other.loaded)

    def set_cross_scale(self, top: float) -> None:
        """From the peaks: the largest power of two for which no output of cross-attention exceeds ``top``.

        The output is a sum of two means of value rows, so no larger than both peaks together; 1 % is for weights of the
        softmax that were rounded up. With a power of two the scale has no part in how a value is rounded: what another
        branch holds does not show.
        """
        bound = self.image_peak
        prompts = [peak for peak, keys in zip(self.text_peak, self.loaded, strict=True) if keys is not None]
        if prompts:
            bound = bound + torch.stack(prompts).amax(0)
        scale = top / (1.01 * bound).clamp_min(1e-6)
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)  # the exponent alone
        self.cross_scale.copy_(scale.unsqueeze(1))
        self.cross_unscale.copy_((1 / scale).unsqueeze(1).expand_as(self.cross_unscale))


class SlotPool:
    """Slots are made when they are needed and used again when they are free.

    Args:
        layout: of every slot.

    Attributes:
        made: slots so far. most: that may exist at a time; None: as many as the device has memory for.
    """

    def __init__(self, layout: SlotLayout) -> None:
        self.layout = layout
        self.most: int | None = None
        self._free: list[WindowSlot] = []
        # Weakly: the slot of a session that was dropped without being closed goes with it.
        self._all: WeakSet[WindowSlot] = WeakSet()
        self.made = 0

    def acquire(self) -> WindowSlot:
        """
        Raises:
            Overloaded: no slot is free, and there is no memory for another one.
        """
        if self._free:
            slot = min(self._free, key=lambda free: free.index)  # the first ones are prepared
            self._free.remove(slot)
            return slot
        return self._another()

    def _another(self) -> WindowSlot:
        if self.most is not None and len(self._all) >= self.most:
            raise Overloaded(
                "the memory budget has no room for another window",
                got=f"{len(self._all)} of {self.most} windows of {self.layout.nbytes / 2**30:.2f} GiB exist",
                remedy="reset the session before its instruction changes, close another one, or raise "
                "memory_budget_gib",
            )
        made = self._made()
        if made is None:
            raise Overloaded(
                "no memory for another session's window",
                got=f"{len(self._all)} windows of {self.layout.nbytes / 2**30:.2f} GiB exist",
                remedy="close a session",
            )
        return made

    def _made(self) -> WindowSlot | None:
        """None: no memory. The error goes no further: its traceback would keep the buffers that there was room for."""
        try:
            made = WindowSlot(self.layout, self.made)
        except torch.OutOfMemoryError:
            return None
        self.made += 1
        self._all.add(made)
        return made

    @torch.inference_mode()
    def provide(self, windows: int) -> None:
        """See that so many slots exist, used ones included.

        Raises:
            Overloaded: the device has no memory for one of them.
        """
        while len(self._all) < windows:
            self.release(self._another())

    @torch.inference_mode()
    def clone(self, slot: WindowSlot) -> WindowSlot:
        """Another slot with the same contents, bit for bit; both go on, independently.

        Raises:
            Overloaded: see ``acquire``.
        """
        other = self.acquire()
        try:
            other.copy_(slot)
        except BaseException:
            self.release(other)
            raise
        return other

    def release(self, slot: WindowSlot) -> None:
        """Take a slot back. Its contents are void."""
        slot.loaded = [None] * self.layout.branches
        self._free.append(slot)

    @property
    def idle(self) -> int:
        """Slots that belong to no session."""
        return len(self._free)

    @property
    def free(self) -> list[WindowSlot]:
        return list(self._free)

    @property
    def used(self) -> list[WindowSlot]:
        """Slots of sessions and of steps under way."""
        return [slot for slot in self._all if slot not in self._free]

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, free ones included."""
        return len(self._all) * self.layout.nbytes
