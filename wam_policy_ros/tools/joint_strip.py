"""The joints as a strip of a video: what was published and what was done, up to a moment. Drawn with OpenCV."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cv2
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .report import Recording

COLUMNS, CELL_H, MARGIN = 4, 84, 6
_BACK, _INK, _DIM, _PLAN = (24, 24, 28), (235, 235, 235), (140, 140, 145), (255, 190, 60)


class JointStrip:
    """Of one recording.

    Args:
        width: of the strip, pixels.

    Attributes:
        height: of the strip.
    """

    def __init__(self, recording: Recording, width: int) -> None:
        self._of, self._cell_w = recording, width // COLUMNS
        self.height = CELL_H * -(-len(recording.joint_names) // COLUMNS)
        self._blank = np.full((self.height, width, 3), _BACK, np.uint8)
        chunks = [t for t in recording.trajectories if len(t.positions) > 1]
        self._due_s = np.concatenate([c.arrival_s + c.time_s for c in chunks]) if chunks else np.zeros(0)
        self._said_s = np.concatenate([np.full(len(c.time_s), c.arrival_s) for c in chunks]) if chunks else np.zeros(0)
        count = len(recording.joint_names)
        self._rows = np.concatenate([c.positions for c in chunks]) if chunks else np.zeros((0, count))
        everything = np.concatenate([recording.joints.reshape(-1, count), self._rows])
        self._low, self._high = (
            f(everything, axis=0) if len(everything) else np.zeros(count) for f in (np.min, np.max)
        )
        ends = [recording.frame_s.max(initial=0.0), recording.joint_s.max(initial=0.0)]
        self._end_s = max(*ends, 1e-3)

    def at(self, t_s: float) -> npt.NDArray[np.uint8]:
        """uint8 ``[height, width, 3]`` RGB: everything until then, and the published rows still to come."""
        page = self._blank.copy()
        done = int(np.searchsorted(self._of.joint_s, t_s, side="right"))
        said = self._said_s <= t_s
        for k, name in enumerate(self._of.joint_names):
            left, top = (k % COLUMNS) * self._cell_w, (k // COLUMNS) * CELL_H
            for x, y in self._points(k, self._due_s[said], self._rows[said, k], left, top):
                if x < left + self._cell_w:
                    page[y : y + 2, x : x + 2] = _PLAN
            if done > 1:
                line = self._points(k, self._of.joint_s[:done], self._of.joints[:done, k], left, top)
                cv2.polylines(page, [line.reshape(-1, 1, 2)], False, _INK, 1, cv2.LINE_AA)
            cv2.putText(page, name, (left + MARGIN, top + 12), cv2.FONT_HERSHEY_SIMPLEX, 0.38, _DIM, 1, cv2.LINE_AA)
        return page

    def _points(
        self, joint: int, times_s: npt.NDArray[np.float64], values: npt.NDArray[np.float64], left: int, top: int
    ) -> npt.NDArray[np.int32]:
        """``[N, 2]`` x and y in the strip."""
        span = max(float(self._high[joint] - self._low[joint]), 1e-3)
        x = left + MARGIN + times_s / self._end_s * (self._cell_w - 2 * MARGIN)
        y = top + CELL_H - MARGIN - (values - self._low[joint]) / span * (CELL_H - 16 - 2 * MARGIN)
        return np.rint(np.stack([x, y], axis=1)).astype(np.int32)
