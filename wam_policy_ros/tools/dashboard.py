"""One picture of a run: what the cameras saw, what the policy predicted, the plan of the joints, the node's status.

Drawn with OpenCV from the topics that ``wam_clip_robot --record`` wrote down. It is no screenshot of Foxglove or RViz.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt

from .report import Pixels, Recording, Trajectory, mosaic

WIDTH, HEIGHT = 1200, 780
_GAP, _TITLE = 10, 22
_BACK, _PANEL, _INK, _DIM, _WARN = (24, 24, 28), (38, 38, 44), (225, 225, 225), (150, 150, 155), (255, 190, 60)
_CHAR_W, _LINE_H = 7, 16
_DRAWN = "drawn by wam demo from the topics of a real run, not a screenshot"
PLOT_S = 6.0
"""So many seconds of motion are drawn, the plan that is still to come included."""


def write_dashboard(recording: Recording, path: Path, caption: str, *, at_s: float | None = None) -> None:
    """A PNG of the run at one moment.

    Args:
        caption: where the policy came from; shown as it is.
        at_s: seconds since the start; None: when the last but one chunk was published.

    Raises:
        ValueError: no camera frames, or no chunk was recorded.
    """
    chunks = [t for t in recording.trajectories if len(t.positions) > 1]
    if not chunks or not len(recording.frames):
        raise ValueError("nothing to draw: no camera frames or no chunk was recorded")
    now_s = at_s if at_s is not None else chunks[max(0, len(chunks) - 2)].arrival_s + 0.3
    page = np.full((HEIGHT, WIDTH, 3), _BACK, np.uint8)
    half, tall = (WIDTH - 3 * _GAP) // 2, 340
    views = recording.frames[max(0, int(np.searchsorted(recording.frame_s, now_s, side="right")) - 1)]
    _place(page, mosaic(views), (_GAP, _GAP, half, tall), "cameras (observed)")
    predicted, note = _predicted(recording, now_s)
    _place(page, predicted, (half + 2 * _GAP, _GAP, half, tall), note)
    top = tall + 2 * _GAP
    rest = HEIGHT - top - 2 * _GAP - 2 * _LINE_H
    plot = _plot(recording, chunks, now_s, (rest - _TITLE, 500))
    _place(page, plot, (_GAP, top, 500, rest), "joints: followed (line) and published (dots), the last plan in colour")
    _text_panel(page, _status(recording, now_s), (500 + 2 * _GAP, top, WIDTH - 500 - 3 * _GAP, rest), "~/status")
    below = (textwrap.shorten(caption, (WIDTH - 2 * _GAP) // _CHAR_W, placeholder=" .."), _DRAWN)
    for i, line in enumerate(below):
        _write(page, line, (_GAP, HEIGHT - _GAP - (1 - i) * _LINE_H), _WARN)
    path.parent.mkdir(parents=True, exist_ok=True)
    bgr = cv2.cvtColor(page, cv2.COLOR_RGB2BGR)
    cv2.imwrite(str(path), bgr, [cv2.IMWRITE_PNG_COMPRESSION, 9])


def _predicted(recording: Recording, now_s: float) -> tuple[Pixels, str]:
    order = np.argsort(recording.predicted_s, kind="stable")
    position = int(np.searchsorted(recording.predicted_s[order], now_s, side="right")) - 1
    if position < 0 or now_s - recording.predicted_s[order[position]] > 1.0:
        return np.full((180, 320, 3), 60, np.uint8), "predicted video: none for this moment"
    small = cv2.resize(recording.predicted[order[position]], (320, 176), interpolation=cv2.INTER_AREA)
    return np.asarray(small, dtype=np.uint8), "predicted video, for the same moment"


def _status(recording: Recording, now_s: float) -> str:
    index = int(np.searchsorted(recording.status_s, now_s, side="right")) - 1
    return recording.statuses[index] if index >= 0 else "no status was received"


def _plot(recording: Recording, chunks: list[Trajectory], now_s: float, size: tuple[int, int]) -> Pixels:
    """Rows of the joints, one below the other, ``now`` as a vertical line. Returns uint8 ``[*size, 3]``."""
    height, width = size
    page = np.full((height, width, 3), _PANEL, np.uint8)
    start_s, count = now_s - 0.6 * PLOT_S, len(recording.joint_names)
    row_h = height / count
    name_h = _LINE_H if row_h >= 2 * _LINE_H else 0  # above the curve, where there is room for both
    x_of = lambda t: (np.asarray(t) - start_s) / PLOT_S * width  # noqa: E731
    shown = [c for c in chunks if start_s - 2.0 < c.arrival_s <= now_s]
    for j, name in enumerate(recording.joint_names):
        values = [recording.joints[:, j]] + [c.positions[:, j] for c in shown]
        low, high = float(min(v.min() for v in values)), float(max(v.max() for v in values))
        span = max(high - low, 0.05)
        base, room = (j + 1) * row_h - 4, row_h - 8 - name_h

        def points(times: npt.NDArray[np.float64], v: npt.NDArray[np.float64]) -> npt.NDArray[np.int32]:
            y = base - (v - low) / span * room  # noqa: B023
            return np.stack([x_of(times), y], axis=1).round().astype(np.int32)

        for chunk in shown:
            colour = (90, 200, 255) if chunk is shown[-1] else _DIM
            for x, y in points(chunk.arrival_s + chunk.time_s, chunk.positions[:, j]):
                cv2.circle(page, (int(x), int(y)), 1, colour, -1)
        past = recording.joint_s <= now_s
        cv2.polylines(page, [points(recording.joint_s[past], recording.joints[past, j])], False, _INK, 1, cv2.LINE_AA)
        _write(page, name, (4, int(j * row_h) + 12), _DIM)
        cv2.line(page, (0, int((j + 1) * row_h)), (width, int((j + 1) * row_h)), _BACK, 1)
    x = int(x_of(now_s))
    cv2.line(page, (x, 0), (x, height), _WARN, 1)
    return page


def _place(page: Pixels, picture: Pixels, box: tuple[int, int, int, int], title: str) -> None:
    x, y, width, height = box
    room_h = height - _TITLE
    scale = min(width / picture.shape[1], room_h / picture.shape[0])
    w, h = round(picture.shape[1] * scale), round(picture.shape[0] * scale)
    page[y : y + height, x : x + width] = _PANEL
    left, top = x + (width - w) // 2, y + _TITLE + (room_h - h) // 2
    page[top : top + h, left : left + w] = cv2.resize(picture, (w, h), interpolation=cv2.INTER_NEAREST)
    _write(page, title, (x + 6, y + 15), _INK)


def _text_panel(page: Pixels, text: str, box: tuple[int, int, int, int], title: str) -> None:
    x, y, width, height = box
    page[y : y + height, x : x + width] = _PANEL
    _write(page, title, (x + 6, y + 15), _INK)
    fits, lines = (width - 12) // _CHAR_W, (height - _TITLE) // _LINE_H
    rows = _wrapped(text, fits)
    if len(rows) > lines:
        rows = [*rows[: lines - 1], ".."]
    for i, row in enumerate(rows):
        _write(page, row, (x + 6, y + _TITLE + 12 + i * _LINE_H), _INK)


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of at most ``width`` characters, broken between words; what goes on is set in a little more."""
    rows = []
    for line in text.splitlines():
        further = " " * min(len(line) - len(line.lstrip()) + 2, width // 2)
        found = textwrap.wrap(line, width, subsequent_indent=further, replace_whitespace=False, break_on_hyphens=False)
        rows += found or [""]
    return rows


def _write(page: Pixels, text: str, at: tuple[int, int], colour: tuple[int, int, int]) -> None:
    """Every character in a cell of its own: tables stay tables in fonts that are not of one width."""
    font, scale = cv2.FONT_HERSHEY_PLAIN, 0.75
    for i, character in enumerate(text):
        if character != " ":
            wide = cv2.getTextSize(character, font, scale, 1)[0][0]
            at_i = (at[0] + i * _CHAR_W + (_CHAR_W - wide) // 2, at[1])
            cv2.putText(page, character, at_i, font, scale, colour, 1, cv2.LINE_AA)
