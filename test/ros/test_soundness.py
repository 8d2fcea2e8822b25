"""What is said about streams that arrive but cannot be used, about lost frames, and about sizes that change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
from sensor_msgs.msg import CompressedImage, JointState

from wam_policy_ros.contract.errors import InvalidImage, MissingInput, StaleInput
from wam_policy_ros.ros.messages import image_size, ns_to_stamp
from wam_policy_ros.ros.streams import MAX_WARNINGS

from .test_inputs import CAMERAS, NAMES, T0, Rig, at, image, joints, ms


def feed(rig: Rig, t_ns: int, *, camera: Any = None, state: JointState | None = None) -> None:
    """All streams once; the first camera's image and the joint state can be replaced."""
    for i, name in enumerate(CAMERAS):
        msg = camera if camera is not None and i == 0 else image(t_ns)
        rig.inputs.cameras[name].on_message(msg, at(t_ns))
    state = joints(t_ns, dict.fromkeys(NAMES, 0.3)) if state is None else state
    rig.inputs.joint_states.on_message(state, at(t_ns))


def bayer(t_ns: int) -> Any:
    msg = image(t_ns)
    msg.encoding = "bayerrg8"
    return msg


def unstamped(t_ns: int) -> Any:
    msg = image(t_ns)
    msg.header.stamp = ns_to_stamp(0)
    return msg


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (bayer, r"4 x unsupported encoding, the last: 'bayerrg8'"),
        (unstamped, r"4 x zero stamp.*remedy: set sync\.stamp_source: receive"),
        (lambda t: image(-ms(10)), r"4 x out of order, the last: stamp 0\.010 s before the newest"),
        (lambda t: image(t, shape=(8, 640)), r"4 x absurd image size, the last: 640x8"),
    ],
)
def test_a_hold_for_a_camera_whose_images_are_dropped_says_what_is_dropped(bad: Any, says: str) -> None:
    rig = Rig()
    feed(rig, 0)
    for k in range(1, 5):
        feed(rig, k * ms(60), camera=bad(k * ms(60)))
    with pytest.raises(StaleInput, match="nothing usable arrives.*since then dropped: " + says):
        rig.inputs.check(at(ms(240)))
    feed(rig, ms(300))
    rig.inputs.check(at(ms(300)))
    with pytest.raises(StaleInput) as error:
        rig.inputs.check(at(ms(301), steady_ns=ms(600)))
    assert "dropped" not in str(error.value) and "nothing arrives" in str(error.value), "a good one has come since"


def velocities_only(t_ns: int) -> JointState:
    msg = JointState(name=NAMES, velocity=[0.0] * 8)
    msg.header.stamp = ns_to_stamp(T0 + t_ns)
    return msg


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (velocities_only, "2 x no positions, the last: velocities or efforts only"),
        (lambda t: joints(t, {**dict.fromkeys(NAMES, 0.3), "j3": float("nan")}), "2 x not finite.*: {'j3': nan}"),
        (lambda t: joints(t, {**dict.fromkeys(NAMES, 0.3), "j3": 1e308}), r"2 x implausible.*'j3': 1e\+308.*rad or m"),
        (lambda t: joints(t, {**dict.fromkeys(NAMES, 0.3), "j3": -100.5}), "2 x implausible.*beyond 100"),
        (lambda t: joints(-1, dict.fromkeys(NAMES, 0.3)), "2 x out of order"),
    ],
)
def test_a_hold_for_joints_whose_positions_are_dropped_says_what_is_dropped(bad: Any, says: str) -> None:
    rig = Rig()
    feed(rig, 0)
    for t in (ms(60), ms(120)):
        feed(rig, t, state=bad(t))
    with pytest.raises(StaleInput, match=r"joint 'j0' \(joint_states\): nothing usable arrives.*" + says):
        rig.inputs.check(at(ms(120)))


def test_drops_before_the_last_good_position_are_not_its_fault() -> None:
    rig = Rig()
    feed(rig, 0, state=velocities_only(0))
    feed(rig, ms(10))
    with pytest.raises(StaleInput, match="nothing arrives") as error:
        rig.inputs.check(at(ms(120)))
    assert "dropped" not in str(error.value)


def test_drops_of_one_joint_are_not_hidden_by_good_positions_of_the_others() -> None:
    rig = Rig()
    feed(rig, 0)
    for t in (ms(60), ms(120)):
        feed(rig, t, state=joints(t, dict.fromkeys(NAMES[:7], 0.3)))
        rig.inputs.joint_states.on_message(joints(t, {"finger": float("inf")}), at(t))
    with pytest.raises(StaleInput, match=r"'finger'.*2 x not finite"):
        rig.inputs.check(at(ms(120)))


def test_a_position_of_one_hundred_is_kept() -> None:
    rig = Rig()
    feed(rig, 0, state=joints(0, dict.fromkeys(NAMES, -100.0)))
    rig.inputs.check(at(0))


def test_every_outage_is_logged_again_and_within_one_each_reason_once() -> None:
    rig = Rig()
    said = []
    for outage in range(3):
        start = outage * ms(1000)
        feed(rig, start)
        rig.inputs.check(at(start))
        for k in range(1, 5):
            feed(rig, start + k * ms(60), camera=bayer(0))
        with pytest.raises(StaleInput):
            rig.inputs.check(at(start + ms(240)))
        said.append(len([line for line in rig.log if "bayerrg8" in line]))
    assert said == [1, 2, 3]
    assert rig.inputs.counters()[CAMERAS[0]]["dropped"] == {"unsupported encoding": 12}


def test_all_that_is_missing_is_said_in_one_reason() -> None:
    rig = Rig()
    rig.camera(1, 0)
    with pytest.raises(MissingInput) as error:
        rig.inputs.check(at(0))
    text = str(error.value)
    assert CAMERAS[0] in text and CAMERAS[2] in text and CAMERAS[1] not in text and "'finger'" in text
    assert "camera_wrist/image_raw" in text and "joint_states" in text and "waiting" not in text


BIG = (480, 640)


@pytest.mark.parametrize(
    ("params", "shape", "warns"),
    [
        ({}, BIG, True),
        ({}, (180, 320), False),
        ({}, (160, 240), False),
        ({"image.reliable": True}, BIG, False),
    ],
)
def test_large_raw_images_with_best_effort_are_warned_of_once(
    params: dict[str, Any], shape: tuple[int, int], warns: bool
) -> None:
    rig = Rig(**params)
    for k in range(3):
        for name in CAMERAS:
            rig.inputs.cameras[name].on_message(image(k * ms(60), shape=shape), at(k * ms(60)))
    rig.all_joints(ms(120))
    lines = [line for line in rig.log if "best effort" in line]
    assert len(lines) == warns
    for name in CAMERAS[1:]:
        rig.inputs.cameras[name].on_message(image(ms(400), shape=shape), at(ms(400)))
    rig.all_joints(ms(400))
    with pytest.raises(StaleInput, match="nothing arrives") as error:
        rig.inputs.check(at(ms(400)))
    hints = ("image.reliable", "image.compressed", "config/fastdds.xml")
    assert all(hint in str(error.value) for hint in hints) == warns
    if warns:
        assert all(hint in lines[0] for hint in hints)


def test_a_camera_that_never_comes_beside_large_ones_gets_the_hint_too() -> None:
    rig = Rig()
    for name in CAMERAS[:2]:
        rig.inputs.cameras[name].on_message(image(0, shape=BIG), at(0))
    rig.all_joints(0)
    with pytest.raises(MissingInput, match=r"2\.8 MB.*image\.reliable"):
        rig.inputs.check(at(0))


def encoded(kind: str, shape: tuple[int, int], t_ns: int = 0) -> CompressedImage:
    data = cv2.imencode(kind, np.zeros((*shape, 3), np.uint8))[1].tobytes()
    msg = CompressedImage(format=kind[1:], data=data)
    msg.header.stamp = ns_to_stamp(T0 + t_ns)
    return msg


@pytest.mark.parametrize("compressed", [False, True])
def test_every_change_of_size_is_warned_of(compressed: bool) -> None:
    rig = Rig(**{"image.compressed": compressed})
    camera = rig.inputs.cameras[CAMERAS[0]]
    shapes = [(36, 64), (36, 64), (18, 32), (48, 64), (48, 64), (36, 64)]
    for k, shape in enumerate(shapes):
        t = k * ms(60)
        camera.on_message(encoded(".png", shape, t) if compressed else image(t, shape=shape), at(t))
    changes = [("64x36", "32x18"), ("32x18", "64x48"), ("64x48", "64x36")]
    for (old, new), line in zip(changes, rig.log, strict=True):
        assert f"changed from {old} in mid-stream: image is {new}" in line
    assert ["aspect" in line for line in rig.log] == [False, True, False]
    assert len(camera.frames) == 6, "used all the same"


def test_two_sizes_on_one_topic_do_not_fill_the_log() -> None:
    rig = Rig()
    for k in range(100):
        shape = (18, 32) if k % 2 else (36, 64)
        rig.inputs.cameras[CAMERAS[0]].on_message(image(k * ms(30), shape=shape), at(k * ms(30)))
    assert len(rig.log) == MAX_WARNINGS and "not logged" in rig.log[-1]


@pytest.mark.parametrize(
    ("shape", "good"),
    [
        ((8, 14), True),
        ((7, 13), False),
        ((180, 320 * 3), True),
        ((180, 320 * 3 + 2), False),
        ((540, 320), True),
        ((542, 320), False),
        ((1, 1), False),
    ],
)
@pytest.mark.parametrize("kind", ["raw", ".png", ".jpg"])
def test_absurd_images_are_dropped(shape: tuple[int, int], good: bool, kind: str) -> None:
    rig = Rig(**{"image.compressed": kind != "raw"})
    camera = rig.inputs.cameras[CAMERAS[0]]
    camera.on_message(image(0, shape=shape) if kind == "raw" else encoded(kind, shape), at(0))
    assert len(camera.frames) == good and camera.drops.by_reason["absurd image size"] == (not good)


def test_the_size_of_compressed_images_is_read_without_decoding() -> None:
    for kind in (".png", ".jpg"):
        assert image_size(encoded(kind, (37, 61))) == (37, 61)
    progressive = cv2.imencode(".jpg", np.zeros((37, 61, 3), np.uint8), [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])[1].tobytes()
    assert image_size(SimpleNamespace(data=progressive)) == (37, 61)
    for data in (b"\xff\xd8\xff", progressive[:20], b"\xff\xd8" + b"\xff\xe0\x00\x00" * 50, b"\x89PNG\r\n\x1a\n"):
        assert image_size(SimpleNamespace(data=data)) is None


def test_an_absurd_size_that_only_decoding_tells_is_refused_in_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("streams", "observations"):
        monkeypatch.setattr(f"wam_policy_ros.ros.{module}.image_size", lambda msg, rules: None)
    rig = Rig(**{"image.compressed": True})
    for name in CAMERAS:
        rig.inputs.cameras[name].on_message(encoded(".jpg", (7, 7) if name == CAMERAS[1] else (18, 32)), at(0))
    rig.all_joints(0)
    pending = rig.inputs.snapshot(at(0), T0, "p")
    with pytest.raises(InvalidImage, match=r"absurd image size.*7x7"):
        pending.materialise(rig.inputs._spec.cameras, first_call=True)
