"""The demo's report: an MP4 with what was seen beside what was predicted, and a plot of the published trajectory."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import cv2
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt

from .joint_strip import JointStrip

Pixels = npt.NDArray[np.uint8]

VIDEO_HZ = 15
PANEL_W, PANEL_H = 640, 352  # one mosaic
BAR_H = 64  # caption under the panels
_FONT = (cv2.FONT_HERSHEY_SIMPLEX, 0.55, 1)


@dataclass(frozen=True)
class Trajectory:
    """One received JointTrajectory: arrival [s], time_from_start [s] ``[N]``, positions ``[N, joints]``."""

    arrival_s: float
    time_s: npt.NDArray[np.float64]
    positions: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Recording:
    """What ``wam_clip_robot --record`` wrote. Times in seconds since its start.

    Attributes:
        frames: uint8 ``[T, cameras, h, w, 3]``, at ``frame_s``.
        predicted: uint8 ``[P, h, w, 3]``, each due at ``predicted_s``.
        statuses: texts of ``~/status``, received at ``status_s``.
    """

    joint_names: tuple[str, ...]
    camera_names: tuple[str, ...]
    trajectories: tuple[Trajectory, ...]
    joint_s: npt.NDArray[np.float64]
    joints: npt.NDArray[np.float64]
    frame_s: npt.NDArray[np.float64]
    frames: Pixels
    predicted_s: npt.NDArray[np.float64]
    predicted: Pixels
    status_s: npt.NDArray[np.float64]
    statuses: tuple[str, ...]

    @classmethod
    def load(cls, path: Path) -> Recording:
        with np.load(path) as data:
            arrivals = data["trajectory_arrival_s"]
            trajectories = tuple(
                Trajectory(
                    float(t), data[f"trajectory_{i:04d}_time_from_start_s"], data[f"trajectory_{i:04d}_positions"]
                )
                for i, t in enumerate(arrivals)
            )
            offset_ns = int(data["start_stamp_ns"])
            return cls(
                joint_names=tuple(map(str, data["joint_names"])),
                camera_names=tuple(map(str, data["camera_names"])),
                trajectories=trajectories,
                joint_s=data["joint_time_s"],
                joints=data["joint_positions"],
                frame_s=data["frame_time_s"],
                frames=data["frames"],
                predicted_s=(data["predicted_stamp_ns"] - offset_ns) * 1e-9,
                predicted=data["predicted_images"],
                status_s=data["status_arrival_s"],
                statuses=tuple(map(str, data["status_texts"])),
            )


def write_video(recording: Recording, path: Path, caption: str) -> int:
    """Observed mosaic on the left, the frame predicted for the same moment on the right, the joints below. Returns the
    frames written.

    Raises:
        ValueError: no camera frames were recorded.
    """
    if not len(recording.frames):
        raise ValueError("no camera frames were recorded; nothing to draw")
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=VIDEO_HZ)
        strip = JointStrip(recording, 2 * PANEL_W)
        stream.width, stream.height = 2 * PANEL_W, PANEL_H + BAR_H + strip.height
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "23", "preset": "veryfast"}
        order = np.argsort(recording.predicted_s, kind="stable")
        for t_s, views in zip(recording.frame_s, recording.frames, strict=True):
            page = _page(recording, float(t_s), views, order, caption)
            picture = np.concatenate([page, strip.at(float(t_s))])
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return len(recording.frames)


def _page(recording: Recording, t_s: float, views: Pixels, order: npt.NDArray[np.int64], caption: str) -> Pixels:
    left = cv2.resize(mosaic(views), (PANEL_W, PANEL_H), interpolation=cv2.INTER_LINEAR)
    position = int(np.searchsorted(recording.predicted_s[order], t_s, side="right")) - 1
    right = np.full((PANEL_H, PANEL_W, 3), 40, np.uint8)
    note = "no prediction for this moment"
    if position >= 0 and t_s - recording.predicted_s[order[position]] < 1.0:
        right = cv2.resize(recording.predicted[order[position]], (PANEL_W, PANEL_H), interpolation=cv2.INTER_NEAREST)
        note = "predicted for this moment"
    page = np.full((PANEL_H + BAR_H, 2 * PANEL_W, 3), 16, np.uint8)
    page[:PANEL_H, :PANEL_W], page[:PANEL_H, PANEL_W:] = left, right
    chunks = sum(1 for t in recording.trajectories if t.arrival_s <= t_s and len(t.positions) > 1)
    _text(page, f"observed   {t_s:6.2f} s   chunk {chunks}", (12, PANEL_H + 24))
    _text(page, note, (PANEL_W + 12, PANEL_H + 24))
    _text(page, _fitting(caption, 2 * PANEL_W - 24), (12, PANEL_H + 50), colour=(255, 190, 60))
    return page


def mosaic(views: Pixels) -> Pixels:
    """Tile views ``[3, h, w, 3]`` as DROID's network sees them: the third stretched on top, the first two below.

    Any other number of views is put side by side.
    """
    if len(views) != 3:
        return np.concatenate(list(views), axis=1)
    top = np.repeat(views[2], 2, axis=1)
    return np.concatenate([top, np.concatenate([views[0], views[1]], axis=1)], axis=0)


def _fitting(text: str, width: int) -> str:
    """What of a caption fits into so many pixels, whole words; what matters must stand first."""
    for room in range(len(text), 0, -1):
        short = textwrap.shorten(text, room, placeholder=" ..")
        if cv2.getTextSize(short, *_FONT)[0][0] <= width:
            return short
    return ""


def _text(page: Pixels, text: str, at: tuple[int, int], colour: tuple[int, int, int] = (230, 230, 230)) -> None:
    font, scale, thick = _FONT
    cv2.putText(page, text, at, font, scale, colour, thick, cv2.LINE_AA)


def write_plot(recording: Recording, path: Path, title: str) -> None:
    """Each joint: what the follower did (line), what was published (dots at the times the rows are due)."""
    count = len(recording.joint_names)
    columns = 2 if count > 1 else 1
    rows = (count + columns - 1) // columns
    figure, axes = plt.subplots(rows, columns, figsize=(13, 2.1 * rows), sharex=True, squeeze=False)
    chunks = [t for t in recording.trajectories if len(t.positions) > 1]
    for index, name in enumerate(recording.joint_names):
        axis = axes[index // columns][index % columns]
        for number, chunk in enumerate(chunks):
            colour = f"C{number % 8}"
            axis.plot(chunk.arrival_s + chunk.time_s, chunk.positions[:, index], ".", ms=3, color=colour, alpha=0.7)
            axis.axvline(chunk.arrival_s, color="0.85", lw=0.8, zorder=0)
        if len(recording.joints):
            axis.plot(recording.joint_s, recording.joints[:, index], color="black", lw=1.1)
        unit = "joint unit" if "finger" in name or "gripper" in name else "rad"
        axis.set_ylabel(f"{name}\n[{unit}]", fontsize=8)
        axis.tick_params(labelsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("s since start")
    legend = "black: joints of the simulated follower; dots: published rows, one colour per chunk"
    figure.suptitle(textwrap.fill(title, 130) + "\n" + legend)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
