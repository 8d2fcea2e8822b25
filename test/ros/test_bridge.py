"""cv_bridge is used where it does what we do, and nowhere else."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from wam_policy_ros.ros.bridge import Found, find_bridge
from wam_policy_ros.ros.encodings import BY_NAME
from wam_policy_ros.ros.messages import ImageRules, image_to_rgb

from .test_messages import message, scene

SOUND = """
import cv2, numpy as np

class CvBridge:
    calls = 0

    def imgmsg_to_cv2(self, msg, desired):
        CvBridge.calls += 1
        flat = np.frombuffer(bytes(msg.data), np.uint8)
        if msg.encoding == "16UC1":
            return flat.reshape(msg.height, msg.step)[:, : 2 * msg.width].copy().view(np.uint16)
        channels = {"rgb8": 3, "bgr8": 3, "mono8": 1}[msg.encoding]
        rows = flat.reshape(msg.height, msg.step)[:, : msg.width * channels]
        pixels = np.ascontiguousarray(rows).reshape(msg.height, msg.width, channels)
        if msg.encoding == "mono8":
            return cv2.cvtColor(pixels, cv2.COLOR_GRAY2RGB)
        return pixels[..., ::-1] if msg.encoding == "bgr8" else pixels
"""
FAULTS = {
    # as the package of this name on PyPI does
    "16 bits as 8": ("copy().view(np.uint16)", "copy()"),
    "shears padded rows": (
        "flat.reshape(msg.height, msg.step)[:, : msg.width * channels]",
        "flat[: msg.height * msg.width * channels]",
    ),
    # as one compiled for another NumPy does
    "raises on import": ("import cv2, numpy as np", "raise ImportError('compiled for NumPy 1')"),
    "ends the process": ("class CvBridge:", "import os; os._exit(139)\nclass CvBridge:"),
    "hangs": ("class CvBridge:", "import time; time.sleep(60)\nclass CvBridge:"),
}


def install(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch, timeout_s: float = 20.0) -> Found:
    """Put a cv_bridge on the path of this process and its children, and look for it."""
    (folder / "cv_bridge.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(folder), str(Path(__file__).parents[2])]))
    monkeypatch.delitem(sys.modules, "cv_bridge", raising=False)
    return find_bridge(timeout_s)


def test_a_sound_one_serves_what_it_converts_as_we_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge, text = install(tmp_path, SOUND, monkeypatch)
    assert bridge is not None and bridge.encodings == {"rgb8", "bgr8", "mono8"}
    assert text == "cv_bridge is used for bgr8, mono8, rgb8"
    calls = sys.modules["cv_bridge"].CvBridge
    for encoding in ("rgb8", "bgr8", "mono8", "rgba8"):
        before = calls.calls
        msg = message(scene(), encoding, 5)
        np.testing.assert_array_equal(image_to_rgb(msg, "t", ImageRules(bridge=bridge)), image_to_rgb(msg))
        assert calls.calls - before == (encoding in bridge.encodings)
    told = message(scene(), "bgr8")
    told.encoding = "vendor"  # not cv_bridge's business
    np.testing.assert_array_equal(image_to_rgb(told, "t", ImageRules("bgr8", bridge=bridge)), scene())


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_broken_one_is_not_used_and_the_log_says_why(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = FAULTS[fault]
    assert old in SOUND
    bridge, text = install(tmp_path, SOUND.replace(old, new), monkeypatch, 2.0 if fault == "hangs" else 20.0)
    assert bridge is None and text.startswith("cv_bridge is installed, but not used: ")
    says = {"16 bits as 8": "16UC1", "shears padded rows": "padded rows", "raises on import": "NumPy 1",
            "ends the process": "139", "hangs": "TimeoutExpired"}  # fmt: skip
    assert says[fault] in text


def test_one_wrong_encoding_is_left_to_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge, _ = install(
        tmp_path, SOUND.replace('pixels[..., ::-1] if msg.encoding == "bgr8" else pixels', "pixels"), monkeypatch
    )
    assert bridge is not None and bridge.encodings == {"rgb8", "mono8"} < set(BY_NAME)


def test_without_one_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert find_bridge() == (None, "")
