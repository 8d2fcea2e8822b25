"""cv_bridge, where a sound one is installed.

Installed ones can be wrong without a word (padded rows sheared, 16 bits read as 8) or end the process (built for
another NumPy). So each is tried once, in a process of its own, against our own conversions of pictures that show such
faults; it then serves the encodings for which it gave the same bits, and none when it fails at the basics. Results are
therefore the same with it and without it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .encodings import BY_NAME, READ_ONLY_WHEN_TOLD

PROBE_S = 5.0
"""Importing NumPy and OpenCV takes a second, on a busy host some; a transition waits for it."""


@dataclass(frozen=True)
class Bridge:
    """A cv_bridge that was tried.

    Attributes:
        encodings: those for which it gave what we give.
        convert: image message -> RGB array, ``CvBridge().imgmsg_to_cv2(msg, "rgb8")``.
    """

    encodings: frozenset[str]
    convert: Callable[[Any], Any]

    def to_rgb(self, msg: Any) -> npt.NDArray[np.uint8]:
        """uint8 ``[H, W, 3]`` RGB, a fresh array."""
        return np.array(self.convert(msg), dtype=np.uint8)


class Found(NamedTuple):
    """The bridge, or None, and a line about it for the log; the line is empty when none is installed."""

    bridge: Bridge | None
    text: str


def find_bridge(timeout_s: float = PROBE_S) -> Found:
    """Look for cv_bridge and try it. Takes a second where one is installed, nothing where there is none."""
    if importlib.util.find_spec("cv_bridge") is None:
        return Found(None, "")
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__], capture_output=True, text=True, timeout=timeout_s, check=False
        )
        encodings = frozenset(json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else frozenset()
        fault = done.stderr.strip().splitlines()[-1:] or [f"its trial ended with code {done.returncode}"]
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        encodings, fault = frozenset(), [f"{type(error).__name__}: {error}"]
    if not encodings:
        return Found(None, f"cv_bridge is installed, but not used: {fault[0]}; images are converted without it")
    try:
        convert = _converter()
    except Exception as error:
        return Found(None, f"cv_bridge is not used: {type(error).__name__}: {error}; images are converted without it")
    return Found(Bridge(encodings, convert), f"cv_bridge is used for {', '.join(sorted(encodings))}")


def _converter() -> Callable[[Any], Any]:
    bridge = importlib.import_module("cv_bridge").CvBridge()
    return lambda msg: bridge.imgmsg_to_cv2(msg, "rgb8")


def _message(encoding: str, height: int, width: int, row_bytes: int, rows: int, pad: int) -> Any:
    """A picture without any symmetry, whose rows end in padding of another value."""
    rng = np.random.default_rng(7)
    data = np.full((rows, row_bytes + pad), 0xEE, np.uint8)
    data[:, :row_bytes] = rng.integers(0, 256, (rows, row_bytes), dtype=np.uint8)
    fields = {"encoding": encoding, "height": height, "width": width, "step": row_bytes + pad, "is_bigendian": 0}
    try:
        message = importlib.import_module("sensor_msgs.msg").Image(**fields)
        message.data = data.tobytes()
    except ImportError:  # a machine without ROS
        message = SimpleNamespace(**fields, data=data.tobytes(), header=SimpleNamespace(frame_id=""))
    return message


def _try_out() -> frozenset[str]:
    """Encodings that the installed cv_bridge converts as we do.

    Raises:
        ValueError: it gets 16-bit pictures or padded rows wrong: nothing of it is to be trusted.
    """
    bridge = importlib.import_module("cv_bridge").CvBridge()
    depth = _message("16UC1", 6, 10, 20, 6, 4)
    got = np.asarray(bridge.imgmsg_to_cv2(depth, "passthrough"))
    want = np.frombuffer(bytes(depth.data), np.uint8).reshape(6, 24)[:, :20].copy().view("<u2")
    if got.dtype != np.uint16 or not np.array_equal(got.reshape(-1), want.reshape(-1)):
        raise ValueError(f"it reads 16UC1 with padded rows as {got.dtype} {got.shape}, or with other values")
    good = []
    for name, encoding in BY_NAME.items():
        if name in READ_ONLY_WHEN_TOLD:
            continue
        msg = _message(name, 6, 10, encoding.row_bytes(10), round(6 * encoding.rows_per_height), 6)
        flat = np.frombuffer(bytes(msg.data), np.uint8)
        try:
            same = np.array_equal(bridge.imgmsg_to_cv2(msg, "rgb8"), encoding.to_rgb(flat, 6, 10, msg.step, False))
        except Exception:
            continue
        if same:
            good.append(name)
        elif name == "rgb8":
            raise ValueError("it gets rgb8 with padded rows wrong")
    if "rgb8" not in good:
        raise ValueError("it cannot convert rgb8 with padded rows")
    return frozenset(good)


if __name__ == "__main__":
    print(json.dumps(sorted(_try_out())))
