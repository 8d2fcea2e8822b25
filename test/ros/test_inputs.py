from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
from sensor_msgs.msg import CompressedImage, Image, JointState

from wam_policy_ros.contract.embodiment import get_embodiment
from wam_policy_ros.contract.errors import ConfigError, InvalidImage, MissingInput, StaleInput
from wam_policy_ros.contract.fakes import spec_of
from wam_policy_ros.contract.history import select_frames
from wam_policy_ros.ros.inputs import Inputs, camera_topics
from wam_policy_ros.ros.joint_states import JointStateInput
from wam_policy_ros.ros.joints import JointMap
from wam_policy_ros.ros.messages import fit, ns_to_stamp, rgb_to_image
from wam_policy_ros.ros.observations import PendingObservation
from wam_policy_ros.ros.parameters import NodeParameters
from wam_policy_ros.ros.streams import CameraInput, Limits, Now
from wam_policy_ros.ros.subscriptions import subscribe

SPEC = spec_of("oxe_droid", weights="none")
NAMES = [f"j{i}" for i in range(7)] + ["finger"]
CAMERAS = [c.name for c in SPEC.cameras]
T0 = 1_800_000_000_000_000_000
FRAME_NS = round(1e9 / 15)


def ms(n: float) -> int:
    return round(n * 1e6)


def at(t_ns: int, steady_ns: int | None = None) -> Now:
    """A moment on both clocks, which run in step unless told otherwise."""
    return Now(T0 + t_ns, 5_000_000_000 + (t_ns if steady_ns is None else steady_ns))


def image(t_ns: int, value: int = 0, shape: tuple[int, int] = (18, 32)) -> Image:
    rgb = np.full((*shape, 3), value % 256, np.uint8)
    rgb[-shape[0] // 4 :, -shape[1] // 4 :] = (value + 100) % 256  # a picture of one colour would be warned of
    return rgb_to_image(rgb, stamp_ns=T0 + t_ns)


def joints(t_ns: int, positions: dict[str, float]) -> JointState:
    msg = JointState(name=list(positions), position=list(positions.values()))
    msg.header.stamp = ns_to_stamp(T0 + t_ns)
    return msg


class Rig:
    """Inputs of a DROID without ROS, fed by hand."""

    def __init__(self, **params: object) -> None:
        e = get_embodiment("oxe_droid")
        self.log: list[str] = []
        self.params = NodeParameters.from_values({"backend": "hold", **params})
        mapping = JointMap.build(e.state, e.action, names=NAMES, gripper_open=0.0, gripper_closed=1.0)
        self.told: list[str] = []
        self.inputs = Inputs(self.params, SPEC, mapping, warn=self.log.append, tell=self.told.append)

    def camera(self, index: int, t_ns: int, value: int = 0, arrival: int | None = None) -> None:
        self.inputs.cameras[CAMERAS[index]].on_message(image(t_ns, value), at(t_ns, arrival))

    def all_cameras(self, t_ns: int, value: int = 0) -> None:
        for i in range(3):
            self.camera(i, t_ns, value)

    def all_joints(self, t_ns: int, position: float = 0.0) -> None:
        self.inputs.joint_states.on_message(joints(t_ns, dict.fromkeys(NAMES, position)), at(t_ns))

    def episode(self, frames: int) -> int:
        """Frames 0 .. n-1 with value = number; joints at 60 Hz with position = time in s. Returns the last time."""
        for k in range(frames):
            self.all_cameras(k * FRAME_NS, k)
        end = (frames - 1) * FRAME_NS
        for t in range(0, end + 1, ms(16)):
            self.all_joints(t, t * 1e-9)
        self.all_joints(end + 1, (end + 1) * 1e-9)
        return end


def test_callback_costs_less_than_a_tenth_of_a_millisecond() -> None:
    camera = CameraInput("c", "t", Limits(0.2, 0.02, "header"), size=(180, 320), warn=print)
    messages = [image(k * FRAME_NS, k, (480, 640)) for k in range(50)]
    start = time.perf_counter()
    for k, msg in enumerate(messages):
        camera.on_message(msg, at(k * FRAME_NS))
    assert (time.perf_counter() - start) / 50 < 1e-4
    assert len(camera.frames) in (45, 46), "three seconds"


def test_first_request_sees_one_frame_and_later_ones_the_schedule() -> None:
    rig = Rig()
    end = rig.episode(40)
    pending = rig.inputs.snapshot(at(end + ms(20)), T0, "p")
    first = pending.materialise(SPEC.cameras, first_call=True)
    later = pending.materialise(SPEC.cameras, first_call=False)
    assert first.frames[CAMERAS[0]].shape == (1, 180, 320, 3)
    for name in CAMERAS:
        assert first.frames[name][0, 90, 160, 0] == 39
        np.testing.assert_array_equal(later.frames[name][:, 90, 160, 0], [16, 23, 31, 39])
        assert later.frame_stamps_ns is not None
        np.testing.assert_array_equal(later.frame_stamps_ns[name], [T0 + k * FRAME_NS for k in (16, 23, 31, 39)])
    assert later.stamp_ns == T0 + end and later.session_start_ns == T0
    assert (pending.off_schedule, pending.padded) == (0, 0)


def test_state_is_interpolated_at_the_time_of_the_images() -> None:
    rig = Rig()
    end = rig.episode(10)
    rig.all_joints(end + ms(30), 99.0)
    state = rig.inputs.snapshot(at(end + ms(31)), T0, "p").state
    np.testing.assert_allclose(state["joint_position"], np.full(7, end * 1e-9), atol=1e-6)


def test_frames_before_the_session_are_not_used() -> None:
    rig = Rig()
    end = rig.episode(40)
    pending = rig.inputs.snapshot(at(end), T0 + 30 * FRAME_NS, "p")
    later = pending.materialise(SPEC.cameras, first_call=False)
    np.testing.assert_array_equal(later.frames[CAMERAS[0]][:, 0, 0, 0], [30, 31, 39])
    assert pending.padded == 6, "two offsets of each camera lie before the session"
    with pytest.raises(MissingInput, match="no frame of this session"):
        rig.inputs.snapshot(at(end), T0 + end + 1, "p")


def test_cameras_out_of_step_still_give_the_same_number_of_frames() -> None:
    rig = Rig()
    for k in range(13):
        rig.camera(0, k * FRAME_NS, k)
        rig.camera(1, k * FRAME_NS + ms(30), k)
        rig.camera(2, k * FRAME_NS + ms(20), k)
    rig.all_joints(12 * FRAME_NS)
    pending = rig.inputs.snapshot(at(12 * FRAME_NS + ms(30)), T0 + 4 * FRAME_NS + ms(10), "p")
    assert len({len(f) for f in pending.frames.values()}) == 1
    for frames in pending.frames.values():
        stamps = [f.stamp_ns for f in frames]
        assert stamps == sorted(set(stamps)) and stamps[0] >= T0 + 4 * FRAME_NS + ms(10)


def test_a_camera_that_never_publishes_is_named_with_its_topic() -> None:
    rig = Rig()
    rig.camera(0, 0), rig.camera(1, 0), rig.all_joints(0)
    with pytest.raises(MissingInput) as error:
        rig.inputs.check(at(0))
    assert "wrist_image_left" in str(error.value) and "camera_wrist/image_raw" in str(error.value)


def test_a_camera_with_the_wrong_encoding_is_missing_and_says_why() -> None:
    rig = Rig()
    rig.camera(0, 0), rig.camera(1, 0), rig.all_joints(0)
    for k in range(5):
        msg = image(k)
        msg.encoding = "bayerrg8"
        rig.inputs.cameras[CAMERAS[2]].on_message(msg, at(k))
    with pytest.raises(MissingInput, match=r"no usable image from camera 'wrist.*5 x unsupported encoding.*'bayerrg8'"):
        rig.inputs.check(at(4))
    assert len(rig.log) == 1 and "bayerrg8" in rig.log[0] and "rgb8" in rig.log[0], "logged once"


@pytest.mark.parametrize(("late_ms", "sound"), [(199, True), (201, False)])
def test_a_camera_that_stops_is_stale_after_the_limit(late_ms: int, sound: bool) -> None:
    rig = Rig()
    rig.all_cameras(0)
    rig.camera(0, ms(late_ms)), rig.camera(1, ms(late_ms)), rig.all_joints(ms(late_ms))
    if sound:
        rig.inputs.check(at(ms(late_ms)))  # the others' frames of the same moment are still there
    else:
        with pytest.raises(StaleInput, match=r"wrist_image_left.*0\.201 s ago; expected: at most 0\.2 s"):
            rig.inputs.check(at(ms(late_ms)))


@pytest.mark.parametrize(("apart_ms", "sound"), [(50, True), (51, False)])
def test_cameras_that_never_see_the_same_moment_are_not_synchronous(apart_ms: int, sound: bool) -> None:
    rig = Rig()
    rig.camera(0, ms(apart_ms)), rig.camera(1, ms(apart_ms)), rig.camera(2, 0), rig.all_joints(ms(apart_ms))
    if sound:
        rig.inputs.check(at(ms(apart_ms)))
    else:
        with pytest.raises(StaleInput, match=r"not synchronous.*0\.051 s apart.*camera_wrist"):
            rig.inputs.check(at(ms(apart_ms)))


def test_arrival_counts_on_the_steady_clock_even_when_the_stamps_look_fresh() -> None:
    rig = Rig()
    rig.all_cameras(0), rig.all_joints(0)
    rig.inputs.check(at(0))
    with pytest.raises(StaleInput, match="nothing arrives"):
        rig.inputs.check(at(0, steady_ns=ms(250)))  # the node's clock stands still


def test_a_camera_clock_hours_behind_says_how_far_and_what_helps() -> None:
    rig = Rig()
    rig.camera(0, 0), rig.camera(1, 0), rig.all_joints(0)
    rig.camera(2, -11_777_000_000_000, arrival=0)
    with pytest.raises(StaleInput, match=r"wrist_image_left.*11777\.\d+ s ago.*sync\.stamp_source"):
        rig.inputs.check(at(0))
    rig = Rig(**{"sync.stamp_source": "receive"})
    rig.camera(0, 0), rig.camera(1, 0), rig.all_joints(0)
    rig.inputs.cameras[CAMERAS[2]].on_message(image(-11_777_000_000_000), at(0))
    rig.inputs.check(at(0))


def test_a_stamp_in_the_future_is_refused_beyond_the_tolerance() -> None:
    rig = Rig()
    rig.all_cameras(ms(100)), rig.all_joints(ms(80))
    rig.inputs.check(at(ms(81)))
    with pytest.raises(StaleInput, match="stamp in the future"):
        rig.inputs.check(at(ms(79)))


def test_zero_stamps_are_dropped_with_header_and_used_with_receive() -> None:
    msg = image(0)
    msg.header.stamp = ns_to_stamp(0)
    rig = Rig()
    for _ in range(3):
        rig.inputs.cameras[CAMERAS[0]].on_message(msg, at(0))
    assert rig.inputs.counters()[CAMERAS[0]] == {"received": 3, "dropped": {"zero stamp": 3}, "uniform": 0}
    assert len(rig.log) == 1
    rig = Rig(**{"sync.stamp_source": "receive"})
    rig.inputs.cameras[CAMERAS[0]].on_message(msg, at(ms(7)))
    assert rig.inputs.cameras[CAMERAS[0]].frames[-1].stamp_ns == T0 + ms(7)


def test_late_frames_are_dropped_and_a_restarted_stream_starts_over() -> None:
    rig = Rig()
    camera = rig.inputs.cameras[CAMERAS[0]]
    for t in (0, 66, 133, 100, 133):
        camera.on_message(image(ms(t)), at(ms(133)))
    assert [f.stamp_ns - T0 for f in camera.frames] == [0, ms(66), ms(133)]
    assert camera.drops.by_reason["out of order"] == 2
    camera.on_message(image(ms(-400)), at(ms(140)))
    assert [f.stamp_ns - T0 for f in camera.frames] == [ms(-400)] and camera.restarts == 1


def test_invalid_frames_do_not_refresh_the_age() -> None:
    rig = Rig()
    rig.all_cameras(0), rig.all_joints(ms(250))
    short = image(ms(200))
    short.data = short.data[:250]
    for name in CAMERAS:
        rig.inputs.cameras[name].on_message(short, at(ms(200)))
    with pytest.raises(StaleInput):
        rig.inputs.check(at(ms(250)))


def test_a_jpeg_that_cannot_be_decoded_is_found_in_the_worker() -> None:
    rig = Rig()
    end = rig.episode(3)
    pending = rig.inputs.snapshot(at(end), T0, "p")
    next(iter(pending.newest.values())).msg.encoding = "nv12"
    with pytest.raises(InvalidImage, match="nv12"):
        pending.materialise(SPEC.cameras, first_call=True)
    assert isinstance(pending, PendingObservation)


def test_another_aspect_warns_once() -> None:
    rig = Rig()
    for k in range(3):
        rig.inputs.cameras[CAMERAS[0]].on_message(image(k, shape=(48, 64)), at(k))
    assert len(rig.log) == 1 and "aspect" in rig.log[0] and "64x48" in rig.log[0]


def test_another_aspect_of_a_compressed_camera_warns_once() -> None:
    rig = Rig(**{"image.compressed": True})
    for k in range(3):
        for name in CAMERAS:
            shape = (48, 64, 3) if name == CAMERAS[1] else (18, 32, 3)
            msg = CompressedImage(format="png", data=cv2.imencode(".png", textured(shape))[1].tobytes())
            msg.header.stamp = ns_to_stamp(T0 + k * FRAME_NS)
            rig.inputs.cameras[name].on_message(msg, at(k * FRAME_NS))
        rig.all_joints(k * FRAME_NS)
        rig.inputs.snapshot(at(k * FRAME_NS), T0, "p").materialise(SPEC.cameras, first_call=k == 0)
    assert len(rig.log) == 1 and "aspect" in rig.log[0] and "64x48" in rig.log[0] and CAMERAS[1] in rig.log[0]


REACH_S = 23 / 15 + 0.2 + 0.05
"""What a request can look at: the earliest offset, back from a moment that is one age and one skew old."""


def textured(shape: tuple[int, ...]) -> np.ndarray:
    return (np.arange(np.prod(shape)) % 251).astype(np.uint8).reshape(shape)


def feed(rate_hz: float, jitter_s: float = 0.0, seconds: float = 6.0) -> tuple[CameraInput, list[int]]:
    """A camera of the node at a rate, and the stamps it sent in the time that a request can look at."""
    camera = Rig().inputs.cameras[CAMERAS[0]]
    rng = np.random.default_rng(5)
    times_s = np.arange(round(seconds * rate_hz)) / rate_hz
    stamps = [T0 + round(t * 1e9) for t in times_s + rng.uniform(-jitter_s, jitter_s, len(times_s))]
    for stamp in stamps:
        msg = SimpleNamespace(encoding="mono8", height=18, width=32, step=32, data=bytes(18 * 32), is_bigendian=0)
        msg.header = SimpleNamespace(stamp=ns_to_stamp(stamp))
        camera.on_message(msg, at(stamp - T0))
    return camera, [s for s in stamps if s >= stamps[-1] - REACH_S * 1e9]


@pytest.mark.parametrize(("rate_hz", "jitter_s"), [(60, 0.001), (90, 0.003), (200, 0.0), (41, 0.0)])
def test_a_fast_camera_is_thinned_without_moving_what_the_policy_sees(rate_hz: float, jitter_s: float) -> None:
    camera, sent = feed(rate_hz, jitter_s)
    kept = [f.stamp_ns for f in camera.frames]
    assert len(kept) < (REACH_S + 2 / 15 - 0.3) / 0.030 + 0.3 * rate_hz + 3
    assert [s for s in sent if s >= sent[-1] - 300_000_000] == [s for s in kept if s >= sent[-1] - 300_000_000]
    for reference in (s for s in sent if s >= sent[-1] - 200_000_000):  # one age
        now = [sent[i] for i in select_frames(sent, reference, SPEC.frame_offsets, 15.0).indices]
        pick = select_frames(kept, reference, SPEC.frame_offsets, 15.0)
        assert np.abs(np.subtract(now, [kept[i] for i in pick.indices])).max() <= 0.5e9 / 15
        assert pick.off_schedule == pick.padded == 0


@pytest.mark.parametrize("rate_hz", [15, 30])
def test_cameras_of_up_to_twice_the_control_rate_lose_nothing(rate_hz: float) -> None:
    camera, sent = feed(rate_hz, 0.001)
    kept = [f.stamp_ns for f in camera.frames]
    assert kept[-len(sent) :] == sent
    assert len(kept) - len(sent) <= round(rate_hz * 2 / 15) + 1, "and nothing is kept for nothing"


@pytest.mark.parametrize(
    ("values", "topics"),
    [
        ({}, ("camera_exterior_1/image_raw", "camera_exterior_2/image_raw", "camera_wrist/image_raw")),
        ({"cameras.topics": ["a", "b", "c"]}, ("a", "b", "c")),
        ({"cameras.topics": ["a", "b/compressed", "c"], "image.compressed": True},
         ("a/compressed", "b/compressed", "c/compressed")),
    ],
)  # fmt: skip
def test_topics(values: dict[str, object], topics: tuple[str, ...]) -> None:
    assert camera_topics(NodeParameters.from_values({"backend": "hold", **values}), SPEC.cameras) == topics


def test_a_wrong_number_of_topics_names_the_cameras() -> None:
    with pytest.raises(ConfigError, match="wrist_image_left"):
        camera_topics(NodeParameters.from_values({"backend": "hold", "cameras.topics": ["a", "b"]}), SPEC.cameras)


def test_topics_by_name_of_the_camera() -> None:
    def topics(*given: str) -> tuple[str, ...]:
        return camera_topics(
            NodeParameters.from_values({"backend": "hold", "cameras.topics": list(given)}), SPEC.cameras
        )

    pairs = [f"{name}:=/{name[:5]}/{i}" for i, name in enumerate(CAMERAS)]
    assert topics(*reversed(pairs)) == ("/exter/0", "/exter/1", "/wrist/2")
    for wrong in ([*pairs[:2], "wrist_0:=/w"], pairs[:2], [*pairs[:2], "/w"], [*pairs, "extra:=/e"]):
        with pytest.raises(ConfigError, match=r"got: .*; expected: .*'wrist_image_left'"):
            topics(*wrong)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"image.encodings": ["auto", "auto"]}, "image.encodings does not fit"),
        ({"image.encodings": ["auto", "auto", "bayerrg8"]}, "bayer_rggb8"),
        ({"image.encodings": ["rgb8"] * 3, "image.compressed": True}, "compressed"),
        ({"image.views": ["top", "whole", "whole"]}, "image.views does not fit"),
        ({"cameras.topics": ["a", "a", "b"]}, "3 different topics"),
    ],
)
def test_rules_that_do_not_fit_are_refused(values: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Rig(**values)


def test_two_cameras_may_share_a_side_by_side_picture() -> None:
    rig = Rig(**{"cameras.topics": ["a", "a", "b"], "image.views": ["left", "right", "whole"]})
    rgb = textured((18, 64, 3))
    for index in (0, 1):
        rig.inputs.cameras[CAMERAS[index]].on_message(rgb_to_image(rgb, stamp_ns=T0), at(0))
    rig.camera(2, 0), rig.all_joints(0)
    seen = rig.inputs.snapshot(at(0), T0, "p").materialise(SPEC.cameras, first_call=True).frames
    for camera, half in ((CAMERAS[0], rgb[:, :32]), (CAMERAS[1], rgb[:, 32:])):
        np.testing.assert_array_equal(seen[camera][0], fit(np.ascontiguousarray(half), 180, 320, "pad"))


def test_a_side_by_side_picture_is_warned_of_with_its_remedy() -> None:
    rig = Rig()
    rig.inputs.cameras[CAMERAS[0]].on_message(image(0, shape=(48, 128)), at(0))
    assert "side by side" in rig.log[0] and "image.views" in rig.log[0]


def test_the_first_image_is_described() -> None:
    rig = Rig(**{"image.encodings": ["auto", "bgr8", "auto"]})
    rig.all_cameras(0), rig.all_cameras(FRAME_NS)
    assert len(rig.told) == 3
    assert f"{CAMERAS[0]!r} (camera_exterior_1/image_raw): first image 32x18 rgb8, step 96" in rig.told[0]
    assert "rgb8 (read as bgr8)" in rig.told[1]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("gate", [0.0, 2.0])
def test_uniform_pictures_are_warned_of_and_delay_the_session_when_told_to(gate: float, compressed: bool) -> None:
    rig = Rig(**{"image.min_std": gate, "image.compressed": compressed})
    used: list[int] = []
    for k in range(6):
        for i, name in enumerate(CAMERAS):
            black = k < (3 if i else 2)
            rgb = np.zeros((18, 32, 3), np.uint8) if black else textured((18, 32, 3))
            if compressed:
                msg = CompressedImage(format="png", data=cv2.imencode(".png", rgb)[1].tobytes())
                msg.header.stamp = ns_to_stamp(T0 + k * FRAME_NS)
            else:
                msg = rgb_to_image(rgb, stamp_ns=T0 + k * FRAME_NS)
            rig.inputs.cameras[name].on_message(msg, at(k * FRAME_NS))
        rig.all_joints(k * FRAME_NS)
        try:
            pending = rig.inputs.snapshot(at(k * FRAME_NS), T0, "p")
        except MissingInput as error:
            assert gate and k < 3 and "uniform image" in str(error) and "image.min_std" in str(error)
            continue
        seen = pending.materialise(SPEC.cameras, first_call=not used)
        used.append(k)
        if gate:
            stamps = seen.frame_stamps_ns
            assert stamps is not None and min(int(s.min()) for s in stamps.values()) >= T0 + 3 * FRAME_NS
    assert used == ([3, 4, 5] if gate else list(range(6)))
    warned = [line for line in rig.log if "uniform image on camera" in line]
    assert len(warned) == (0 if gate and compressed else 3), "once for each camera"


def test_a_gated_session_goes_on_when_its_frames_have_become_pictures() -> None:
    rig = Rig(**{"image.min_std": 2.0})
    for k in range(60):
        rig.all_cameras(k * FRAME_NS, k), rig.all_joints(k * FRAME_NS)
        pending = rig.inputs.snapshot(at(k * FRAME_NS), T0, "p")
        pending.materialise(SPEC.cameras, first_call=k == 0)
    assert len(rig.inputs.cameras[CAMERAS[0]]._spreads) < 40


def test_a_camera_that_goes_dark_is_warned_of_again() -> None:
    rig = Rig()
    camera = rig.inputs.cameras[CAMERAS[0]]
    for k in range(60):
        dark = 20 <= k < 40
        rgb = np.zeros((18, 32, 3), np.uint8) if dark else textured((18, 32, 3))
        camera.on_message(rgb_to_image(rgb, stamp_ns=T0 + k * FRAME_NS), at(k * FRAME_NS))
    assert len(rig.log) == 1 and 0 < camera.uniform <= 20 and len(camera.frames) > 20, "within a second, and used"


def test_the_length_of_a_gap_is_told_once_it_is_over() -> None:
    rig = Rig()
    rig.all_cameras(0), rig.all_joints(0)
    for t in range(100, 10_000, 100):
        rig.all_joints(ms(t)), rig.camera(0, ms(t)), rig.camera(1, ms(t))
        if t > 200:
            with pytest.raises(StaleInput):
                rig.inputs.check(at(ms(t)))
    rig.all_cameras(ms(10_000)), rig.all_joints(ms(10_000))
    rig.inputs.check(at(ms(10_000)))
    gaps = [line for line in rig.told if "back after" in line]
    assert len(gaps) == 1 and "wrist_image_left" in gaps[0] and "10.00 s" in gaps[0]


def test_the_length_of_a_gap_in_the_joint_states_is_told() -> None:
    rig = Rig()
    rig.all_cameras(0), rig.all_joints(0)
    for t in (150, 250):
        rig.inputs.joint_states.on_message(joints(ms(t), dict.fromkeys(NAMES[:7], 0.0)), at(ms(t)))
        with pytest.raises(StaleInput, match="finger"):
            rig.inputs.joint_states.check(at(ms(t)))
    assert not any("back after" in line for line in rig.told), "the finger is still silent"
    rig.inputs.joint_states.on_message(joints(ms(300), {"finger": 0.1}), at(ms(300)))
    assert [line for line in rig.told if "joints" in line and "back after 0.30 s" in line]


class TestJointStates:
    def make(self) -> JointStateInput:
        self.log: list[str] = []
        return JointStateInput(NAMES, "joint_states", Limits(0.1, 0.02, "header"), warn=self.log.append)

    def test_names_not_places(self) -> None:
        stream = self.make()
        order = np.random.default_rng(3).permutation(8)
        positions = {"foreign": 9.0, **{NAMES[i]: i / 10 for i in order}, "other": 8.0}
        msg = joints(0, positions)
        msg.velocity = [float("nan")] * len(positions)
        stream.on_message(msg, at(0))
        np.testing.assert_array_equal(stream.at(T0), np.arange(8) / 10)

    def test_names_that_do_not_match_are_told(self) -> None:
        stream = self.make()
        stream.on_message(joints(0, dict.fromkeys([f"arm_{i}" for i in range(40)], 1.0)), at(0))
        with pytest.raises(MissingInput, match=r"1 messages on joint_states, which name \['arm_0', .*'arm_15'\]"):
            stream.check(at(0))
        stream.on_message(joints(5, dict.fromkeys(NAMES, 1.0)), at(5))
        stream.check(at(5))

    def test_two_publishers_with_a_part_each(self) -> None:
        stream = self.make()
        stream.on_message(joints(0, dict.fromkeys(NAMES[:7], 1.0)), at(0))
        with pytest.raises(MissingInput, match="finger"):
            stream.check(at(0))
        stream.on_message(joints(ms(50), {"finger": 0.5}), at(ms(50)))
        stream.check(at(ms(50)))
        with pytest.raises(StaleInput, match=r"'j0'.*0\.110 s ago"):
            stream.check(at(ms(110)))
        stream.on_message(joints(ms(105), dict.fromkeys(NAMES[:7], 1.0)), at(ms(105)))
        stream.check(at(ms(110)))

    def test_a_message_without_positions_refreshes_nothing(self) -> None:
        stream = self.make()
        stream.on_message(joints(0, dict.fromkeys(NAMES, 0.3)), at(0))
        for t in (40, 80, 120):
            empty = JointState(name=NAMES, velocity=[0.0] * 8)
            empty.header.stamp = ns_to_stamp(T0 + ms(t))
            stream.on_message(empty, at(ms(t)))
        with pytest.raises(StaleInput):
            stream.check(at(ms(120)))
        np.testing.assert_array_equal(stream.at(T0), np.full(8, 0.3))
        assert stream.drops.by_reason["no positions"] == 3

    def test_a_position_that_is_not_finite_rejects_the_message(self) -> None:
        stream = self.make()
        stream.on_message(joints(0, dict.fromkeys(NAMES, 0.3)), at(0))
        stream.on_message(joints(ms(10), {**dict.fromkeys(NAMES, 0.9), "j3": float("nan")}), at(ms(10)))
        stream.on_message(joints(ms(10), {**dict.fromkeys(NAMES, 0.4), "foreign": float("nan")}), at(ms(10)))
        np.testing.assert_array_equal(stream.at(T0 + ms(10)), np.full(8, 0.4))
        assert stream.drops.by_reason["not finite"] == 1 and "j3" in self.log[0]

    def test_names_and_positions_of_different_length_are_dropped(self) -> None:
        stream = self.make()
        msg = joints(0, dict.fromkeys(NAMES, 0.3))
        msg.position = msg.position[:6]
        stream.on_message(msg, at(0))
        with pytest.raises(MissingInput):
            stream.check(at(0))

    def test_nearest_sample_outside_the_history(self) -> None:
        stream = self.make()
        stream.on_message(joints(0, dict.fromkeys(NAMES, 0.3)), at(0))
        assert stream.at(T0 - ms(90))[0] == stream.at(T0 + ms(90))[0] == 0.3
        with pytest.raises(StaleInput, match="time of the images"):
            stream.at(T0 - ms(110))


def test_every_callback_of_a_subscription_runs_through_the_guard() -> None:
    made: list[tuple[Any, Any]] = []
    guarded: list[Exception] = []

    def guard(step: Callable[..., Any], *args: Any) -> None:
        try:
            step(*args)
        except RuntimeError as error:
            guarded.append(error)

    def broken(*args: Any) -> Any:
        raise RuntimeError("defect")

    node = SimpleNamespace(
        create_subscription=lambda kind, topic, callback, qos, *, event_callbacks: made.append(
            (callback, event_callbacks.incompatible_qos)
        ),
        destroy_subscription=lambda subscription: None,
        get_publishers_info_by_topic=lambda topic: [],
        resolve_topic_name=lambda topic: topic,
        create_timer=lambda period_s, callback, *, clock: None,
        destroy_timer=lambda timer: None,
    )
    rig = Rig()
    with ExitStack() as entities:
        subscribe(node, rig.inputs, rig.params, entities, clock=broken, guard=guard, warn=broken)
    assert len(made) == 4
    for on_message, on_event in made:
        on_message(image(0))
        on_event(SimpleNamespace(total_count=1, last_policy_kind="reliability"))
    assert len(guarded) == 8
