"""Windows of training: which frames, which rows, which state belong to which call. All the off-by-ones live here.

A window starts at an anchor: control step a, frame a / stride. Its block k is the call at step ``s = a + k * steps``:

    looks at      frame a (k = 0), or the frames at s - 6, s - 4, s - 2, s (k > 0), and everything before in the window
    state         measured at s
    rows          targets sent from s, s + 1, ..: row 0 is reached one control step after the frame
    video         the frames at s + 2, s + 4, s + 6, s + 8, which are those the next call will look at
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wam_policy_ros.contract.normalization import FieldStatistics, Statistics
from wam_policy_ros.contract.prompts import build_prompt
from wam_policy_ros.model.tokenizer import Tokenizer

from .episodes import Episode
from .errors import DataError
from .footage import Footage
from .preset import OBSERVED, Preset

WIDTH = 8
"""Numbers of a state and of a row: seven joints and the gripper."""
STATISTICS_EPISODES = 1000
FAR = 4.0
"""Rows further out than this are cut to it: what the expert does where no demonstration went must not rule the loss."""
MARGIN = 0.1
"""Of a joint's range, beyond what was seen: a policy goes where the expert did not."""


def state_parts(row: npt.NDArray[Any]) -> dict[str, npt.NDArray[np.float64]]:
    """``[8]`` to the contract's fields."""
    wide = np.asarray(row, dtype=np.float64)
    return {"joint_position": wide[:7], "gripper_position": wide[7:]}


def _limits(group: Mapping[str, FieldStatistics], rows: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """q01 and q99 of joints and gripper, ``[rows, 8]`` each."""
    ends = []
    for name in ("q01", "q99"):
        parts = [np.asarray(getattr(group[field], name)) for field in ("joint_position", "gripper_position")]
        ends.append(np.concatenate([np.broadcast_to(p, (rows, p.shape[-1])) for p in parts], axis=1))
    return ends[0], ends[1]


def normalised_states(state: npt.NDArray[Any], statistics: Statistics) -> npt.NDArray[np.float64]:
    """``contract.transforms.encode_state`` of many states ``[M, 8]`` at once."""
    low, high = _limits(statistics.state, 1)
    return np.clip(2 * (state.astype(np.float64) - low) / (high - low) - 1, -1, 1)


def normalised_rows(
    label: npt.NDArray[Any], state: npt.NDArray[Any], statistics: Statistics
) -> npt.NDArray[np.float64]:
    """``contract.transforms.encode_actions`` of many chunks ``[M, N, 8]``; joints count from ``state [M, 8]``."""
    low, high = _limits(statistics.action, label.shape[1])
    value = label.astype(np.float64)
    value[:, :, :7] -= state.astype(np.float64)[:, None, :7]
    return 2 * (value - low) / (high - low) - 1


def statistics_of(episodes: Sequence[Episode]) -> dict[str, Any]:
    """The ``statistics`` block of ``metadata.json``: joints absolute in the state, relative per row in the action."""
    states = np.concatenate([e.state for e in episodes]).astype(np.float64)
    low, high = np.quantile(states[:, :7], [0.01, 0.99], axis=0)
    room = MARGIN * np.maximum(high - low, 0.05)
    parts = []
    for e in episodes[:: max(1, len(episodes) // STATISTICS_EPISODES)]:
        known = np.isfinite(e.label).all((1, 2))
        parts.append(e.label[known, :, :7] - e.state[known, None, :7])
    relative = np.concatenate(parts)
    if not len(relative):
        raise DataError("no step of any episode has a label", got=f"{len(episodes)} episodes")
    q01, q99 = np.quantile(relative.astype(np.float64), [0.01, 0.99], axis=0)
    q99 = np.maximum(q99, q01 + 1e-3)  # a joint that never moves
    gripper = {"q01": [0.0], "q99": [1.0]}
    return {
        "state": {
            "joint_position": {"q01": (low - room).tolist(), "q99": (high + room).tolist()},
            "gripper_position": gripper,
        },
        "action": {"joint_position": {"q01": q01.tolist(), "q99": q99.tolist()}, "gripper_position": gripper},
    }


@dataclass(frozen=True)
class Batch:
    """What a step of training takes; B windows of K blocks. Frame numbers are those of the footage.

    Attributes:
        anchor: int64 ``[B]``; observed: int64 ``[B, K]`` newest frame of the call of every block (that of the anchor
            itself is not observed as a block); following: int64 ``[B, K]`` newest frame of the next call.
        state: float32 ``[B, K, 1, 8]``; rows: float32 ``[B, K, N, 8]``; both normalised.
        has_rows, has_video: bool ``[B, K]``: the block has labels, its next frames were recorded.
        prompt: int64 ``[B]``.
    """

    anchor: Tensor
    observed: Tensor
    following: Tensor
    state: Tensor
    rows: Tensor
    has_rows: Tensor
    has_video: Tensor
    prompt: Tensor


class Windows:
    """All windows of the footage, normalised as the contract's transforms do.

    Args:
        every: an anchor at every so many frames.

    Attributes:
        ids, mask: int64 ``[P, text_len]`` of the different prompts.
        anchors: int64 ``[A]`` frame numbers at which a window may start.
        row_middle, row_half: of the range of a row's numbers, ``[N, 8]``: radians = middle + half * normalised.
    """

    def __init__(
        self, footage: Footage, preset: Preset, statistics: Statistics, tokenizer: Tokenizer, *, every: int = 1
    ) -> None:
        self.preset, self.device = preset, footage.device
        page = preset.embodiment
        texts = sorted({e.instruction for e in footage.episodes})
        ids, mask = tokenizer([build_prompt(t, page.prompt_template) for t in texts])
        self.ids, self.mask = ids.to(self.device), mask.to(self.device)
        number = {t: k for k, t in enumerate(texts)}
        steps = [np.arange(e.views.shape[0]) * preset.stride for e in footage.episodes]
        state = np.concatenate([e.state[s] for e, s in zip(footage.episodes, steps, strict=True)])
        label = np.concatenate([e.label[s] for e, s in zip(footage.episodes, steps, strict=True)])
        has = np.isfinite(label).all(axis=(1, 2))
        counts = np.array([len(s) for s in steps])
        first = np.array(footage.first)
        prompts = np.array([number[e.instruction] for e in footage.episodes])

        def put(x: npt.NDArray[Any], kind: torch.dtype) -> Tensor:
            return torch.from_numpy(x).to(self.device, kind)

        low, high = _limits(statistics.action, label.shape[1])
        self.row_middle, self.row_half = put((high + low) / 2, torch.float32), put((high - low) / 2, torch.float32)
        self._states = put(normalised_states(state, statistics), torch.float32)
        rows = normalised_rows(np.where(has[:, None, None], label, 0.0), state, statistics)
        self._rows = put(np.clip(rows, -FAR, FAR), torch.float32)
        self._has, self._prompts = put(has, torch.bool), put(np.repeat(prompts, counts), torch.int64)
        self._last = put(np.repeat(first + counts - 1, counts), torch.int64)
        self.anchors = put(
            np.concatenate([f + np.arange(0, n, every) for f, n in zip(first, counts, strict=True)]), torch.int64
        )
        # A window whose blocks have no label at all teaches nothing.
        offset = torch.arange(preset.blocks, device=self.device) * OBSERVED
        at = torch.minimum(self.anchors[:, None] + offset, self._last[self.anchors][:, None])
        self.anchors = self.anchors[self._has[at].any(dim=1)]
        if not len(self.anchors):
            raise DataError("no window has a label")

    def average_rows(self) -> Tensor:
        """What is done on average, normalised: ``[N, 8]``."""
        return self._rows[self._has].mean(dim=0)

    def batch(self, anchor: Tensor) -> Batch:
        """``anchor`` ``[B]`` frame numbers of ``anchors``."""
        newest = anchor[:, None] + torch.arange(self.preset.blocks, device=self.device) * OBSERVED
        last = self._last[anchor][:, None]
        inside = newest <= last
        at = torch.minimum(newest, last)
        following = torch.minimum(newest + OBSERVED, last)
        return Batch(
            anchor=anchor,
            observed=at,
            following=following,
            state=self._states[at][:, :, None],
            rows=self._rows[at],
            has_rows=self._has[at] & inside,
            has_video=newest + OBSERVED <= last,
            prompt=self._prompts[anchor],
        )
