"""The predicted video of a policy beside what then was seen: how far it is off, and pictures of both.

Every predicted frame that is due before the next call is compared with the frame of that moment, as the network sees
it, and so is the frame the call was made with: repeating it is what no prediction costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import torch

from wam_policy_ros.contract.predicted import due_steps
from wam_policy_ros.engine.policy import DreamZeroPolicy
from wam_policy_ros.engine.preprocess import mosaic_places, stitch_views, to_model_video

Pixels = npt.NDArray[np.uint8]
Places = Mapping[str, tuple[slice, slice]]

CHANGED = 16
"""A pixel has changed when one of its colours differs by more than this, of 255, from the frame of the call."""
LATENT_FRAMES = 4
SHOWN, CELL_W, TEXT_H = 5, 192, 16


@dataclass(frozen=True)
class Call:
    """One answer of the policy.

    Attributes:
        tick: at which it was asked; rows: ``[N, 8]``.
        predicted: uint8 ``[P, H, W, 3]``; None: no video.
        due: ticks behind this one at which each of them is due.
    """

    tick: int
    rows: npt.NDArray[np.float64]
    predicted: Pixels | None = None
    due: tuple[float, ...] = ()


class Eye:
    """How a network in this process sees the cameras.

    Attributes:
        places: camera -> where it is in the mosaic.
        ticks: behind a call, at which predicted frames are due.
    """

    def __init__(self, policy: Any) -> None:
        assert isinstance(policy, DreamZeroPolicy)
        self._page, config = policy.embodiment, policy.network.config
        self._size = config.target_video_hw or (2 * self._page.view_height, 2 * self._page.view_width)
        self.places = mosaic_places(self._page, *self._size)
        due = due_steps(policy.spec, LATENT_FRAMES * config.dit.num_frame_per_block)
        self.ticks = tuple(sorted({int(d) for d in due if d == int(d)}))

    def mosaic(self, images: Mapping[str, Pixels]) -> Pixels:
        """Views ``[h, w, 3]`` by camera -> the mosaic uint8 ``[H, W, 3]`` of the size of a predicted frame."""
        stitched = stitch_views({name: image[None] for name, image in images.items()}, self._page)
        video = to_model_video(stitched, torch.float32, self._size)[0, :, 0]
        pixels = ((video + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
        return np.asarray(pixels.permute(1, 2, 0).numpy())


@dataclass
class Sums:
    """Of one view: absolute differences, 0 to 255, over all values and over those of pixels that changed."""

    values: int = 0
    changed: int = 0
    predicted: float = 0.0
    repeated: float = 0.0
    changed_predicted: float = 0.0
    changed_repeated: float = 0.0

    def add(self, real: Pixels, predicted: Pixels, repeated: Pixels) -> None:
        wide = real.astype(np.int16)
        off, still = np.abs(predicted.astype(np.int16) - wide), np.abs(repeated.astype(np.int16) - wide)
        moved = (still > CHANGED).any(axis=-1)
        self.values += real.size
        self.changed += 3 * int(moved.sum())
        self.predicted += float(off.sum())
        self.repeated += float(still.sum())
        self.changed_predicted += float(off[moved].sum())
        self.changed_repeated += float(still[moved].sum())

    def __iadd__(self, other: Sums) -> Sums:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    def means(self) -> dict[str, float | None]:
        """Mean absolute differences, 0 to 255."""

        def mean(total: float, count: int) -> float | None:
            return round(total / count, 3) if count else None

        return {
            "predicted": mean(self.predicted, self.values),
            "repeated": mean(self.repeated, self.values),
            "changed_share": round(self.changed / self.values, 4) if self.values else None,
            "changed_predicted": mean(self.changed_predicted, self.changed),
            "changed_repeated": mean(self.changed_repeated, self.changed),
        }


@dataclass
class VideoError:
    """``views``: camera -> sums; ``frames``: predicted frames that were compared."""

    views: dict[str, Sums] = field(default_factory=dict)
    frames: int = 0

    def add(self, places: Places, real: Pixels, predicted: Pixels, repeated: Pixels) -> None:
        self.frames += 1
        for name, place in places.items():
            self.views.setdefault(name, Sums()).add(real[place], predicted[place], repeated[place])

    def __iadd__(self, other: VideoError) -> VideoError:
        self.frames += other.frames
        for name, sums in other.views.items():
            self.views.setdefault(name, Sums()).__iadd__(sums)
        return self

    def summary(self) -> dict[str, Any]:
        """JSON: mean absolute differences, all views together and each."""
        whole = Sums()
        for sums in self.views.values():
            whole += sums
        views = {name: sums.means() for name, sums in self.views.items()}
        return {"frames": self.frames, "all": whole.means(), "views": views}


def video_error(calls: Sequence[Call], seen: Mapping[int, Pixels], places: Places, end_tick: int) -> VideoError:
    """Of one episode.

    Args:
        seen: tick -> mosaic; predicted frames that are due where there is none are left out.
        end_tick: of the episode; what a call predicts for ticks behind the next one is left out, too.
    """
    out = VideoError()
    for call, until in zip(calls, [*(c.tick for c in calls[1:]), end_tick], strict=True):
        for tick, frame in _due(call):
            if tick <= until and tick in seen and call.tick in seen:
                out.add(places, seen[tick], frame, seen[call.tick])
    return out


def _due(call: Call) -> Iterable[tuple[int, Pixels]]:
    """Predicted frames with the tick they are due at, of those due at a tick."""
    for due, frame in zip(call.due, call.predicted if call.predicted is not None else (), strict=True):
        if due == int(due):
            yield call.tick + int(due), frame


def total_error(errors: Iterable[VideoError | None]) -> VideoError | None:
    """Of all episodes; None when none was compared."""
    out = VideoError()
    for error in errors:
        if error is not None:
            out += error
    return out if out.frames else None


def video_table(found: Mapping[str, Any]) -> str:
    """For the terminal."""
    lines = [f"{'predicted video':24} {'off by':>8} {'repeated':>8}   {'changed':>7} {'off by':>8} {'repeated':>8}  "
             f"(mean of 0 to 255, {found['frames']} frames)"]  # fmt: skip
    for name, one in {"all views": found["all"], **found["views"]}.items():
        share = "-" if one["changed_share"] is None else f"{one['changed_share']:.1%}"
        values = [one[n] for n in ("predicted", "repeated", "changed_predicted", "changed_repeated")]
        a, b, c, d = ("-" if v is None else f"{v:.2f}" for v in values)
        lines.append(f"{name:24} {a:>8} {b:>8}   {share:>7} {c:>8} {d:>8}")
    return "\n".join(lines)


def sheet(calls: Sequence[Call], real: Mapping[int, Pixels], end_tick: int) -> Pixels | None:
    """One picture: for the calls behind which most has changed, what then was seen above what had been predicted, the
    frame of the call first. None when nothing was predicted."""
    rows = []
    for call, until in zip(calls, [*(c.tick for c in calls[1:]), end_tick], strict=True):
        frames = {tick: frame for tick, frame in _due(call) if tick <= until and tick in real}
        if frames and call.tick in real:
            last = real[max(frames)].astype(np.int16)
            moved = float((np.abs(last - real[call.tick]) > CHANGED).mean())
            rows.append((moved, call.tick, frames))
    shown = sorted(sorted(rows, key=lambda r: -r[0])[:SHOWN], key=lambda r: r[1])
    if not shown:
        return None
    lines = []
    for _, tick, frames in shown:
        seen = [(tick, "call", real[tick]), *((t, "seen", real[t]) for t in frames)]
        predicted = [(t, "predicted", f) for t, f in frames.items()]
        lines.append(_line(seen))
        lines.append(np.concatenate([np.zeros_like(_cell(*seen[0])), _line(predicted)], axis=1))
    width = max(line.shape[1] for line in lines)
    return np.concatenate([np.pad(line, ((0, 4), (0, width - line.shape[1]), (0, 0))) for line in lines])


def _line(cells: Sequence[tuple[int, str, Pixels]]) -> Pixels:
    return np.concatenate([_cell(*cell) for cell in cells], axis=1)


def _cell(tick: int, word: str, frame: Pixels) -> Pixels:
    height = round(CELL_W * frame.shape[0] / frame.shape[1])
    picture = cv2.resize(frame, (CELL_W, height), interpolation=cv2.INTER_NEAREST)
    page = np.pad(picture, ((TEXT_H, 0), (0, 4), (0, 0)))
    cv2.putText(
        page, f"{tick / 15:.2f} s {word}", (2, 12), cv2.FONT_HERSHEY_SIMPLEX, 0.4, (230, 230, 230), 1, cv2.LINE_AA
    )
    return np.asarray(page, dtype=np.uint8)
