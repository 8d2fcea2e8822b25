from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from wam_policy_ros.contract.errors import InvalidImage
from wam_policy_ros.ros.frames import DecodeAhead, Frame
from wam_policy_ros.ros.inputs import Inputs

from .conftest import wait_for
from .test_inputs import CAMERAS, FRAME_NS, SPEC, T0, Rig, at, image, ms


def test_a_frame_becomes_a_picture_once_and_lets_go_of_its_message() -> None:
    made: list[Any] = []

    def make(msg: Any) -> np.ndarray:
        made.append(msg)
        return np.zeros((2, 2, 3), np.uint8)

    frame = Frame(1, "message", 2)
    assert frame.msg == "message" and frame.picture(make) is frame.picture(make)
    assert made == ["message"] and frame.msg is None


def test_a_frame_that_cannot_be_decoded_stays_for_the_request_that_needs_it() -> None:
    def make(msg: Any) -> np.ndarray:
        raise InvalidImage("broken jpeg", field="c")

    frame, ahead = Frame(1, "message"), DecodeAhead()
    good = Frame(2, "good")
    ahead.add(frame, make)
    ahead.add(good, lambda msg: np.zeros((1, 1, 3), np.uint8))
    wait_for(lambda: good.msg is None)
    assert frame.msg == "message"
    with pytest.raises(InvalidImage):
        frame.picture(make)
    ahead.stop()
    assert not [t for t in threading.enumerate() if t.name == "wam_decode"]


def test_two_threads_may_ask_for_one_picture() -> None:
    start, got = threading.Barrier(2), []

    def make(msg: Any) -> np.ndarray:
        assert msg is not None
        time.sleep(1e-4)
        return np.full((1, 1, 3), 7, np.uint8)

    def ask(frames: list[Frame]) -> None:
        start.wait()
        got.extend(int(f.picture(make)[0, 0, 0]) for f in frames)

    frames = [Frame(k, object()) for k in range(200)]
    threads = [threading.Thread(target=ask, args=(frames,)) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == [7] * 400


def test_a_request_decodes_only_what_is_new_and_sees_the_same_pictures() -> None:
    """Frames that are kept are pictures before a request needs them; what the policy sees does not depend on it."""
    seen = []
    for decode_ahead in (lambda frame, make, urgent: frame.picture(make), None):
        rig = Rig()
        rig.inputs = Inputs(rig.params, SPEC, rig.inputs._joints, warn=rig.log.append, decode_ahead=decode_ahead)
        rig.inputs.decode_for(SPEC.cameras)
        rng = np.random.default_rng(0)
        for k in range(40):
            for i in range(3):
                msg = image(k * FRAME_NS, k, (48, 64))
                msg.data = rng.integers(0, 256, 48 * 64 * 3, dtype=np.uint8).tobytes()
                rig.inputs.cameras[CAMERAS[i]].on_message(msg, at(k * FRAME_NS))
        end = 39 * FRAME_NS
        rig.all_joints(end)
        pending = rig.inputs.snapshot(at(end + ms(5)), T0, "p")
        left = [f for frames in pending.frames.values() for f in frames if f.msg is not None]
        assert len(left) == (3 if decode_ahead else 12)
        seen.append(pending.materialise(SPEC.cameras, first_call=False))
    for name in CAMERAS:
        assert seen[0].frames[name].shape == (4, 180, 320, 3)
        np.testing.assert_array_equal(seen[0].frames[name], seen[1].frames[name])
