"""A request either fits or is refused by the name of its key; before anything else hears of it."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from test.serving.harness import HEIGHT, KEYS, WIDTH, request, small_spec
from test.serving.test_codec import _recorded
from wam_policy_ros.contract.errors import WamError
from wam_policy_ros.serving.codec import pack
from wam_policy_ros.serving.wire import InferRequest, RequestReader, ResetRequest, WireRules

SPEC = small_spec()


def read(message: Any, **rules: Any) -> InferRequest | ResetRequest:
    return RequestReader(SPEC, WireRules(**rules)).read(pack(message))


def infer(message: Any, **rules: Any) -> InferRequest:
    found = read(message, **rules)
    assert isinstance(found, InferRequest)
    return found


def test_a_recorded_request_is_read_as_the_published_server_reads_it():
    raw, message = _recorded("01_infer_request")
    found = RequestReader(SPEC, WireRules()).read(raw)
    assert isinstance(found, InferRequest) and found.session_id == "session-1-é"
    for camera, key in zip(SPEC.cameras, KEYS, strict=True):
        np.testing.assert_array_equal(found.observation.frames[camera.name], message[key][None])
    assert found.observation.state["joint_position"].dtype == np.float64
    np.testing.assert_array_equal(found.observation.state["joint_position"], message["observation/joint_position"])


def test_a_recorded_request_with_four_frames_of_one_camera():
    raw, _ = _recorded("03_infer_request_4frames")
    found = RequestReader(SPEC, WireRules()).read(raw)
    assert isinstance(found, InferRequest)
    assert [len(found.observation.frames[c.name]) for c in SPEC.cameras] == [4, 1, 1]


def renamed(*names: str) -> dict[str, Any]:
    base = request()
    pictures = [base.pop(key) for key in KEYS[:2]]
    return {f"observation/exterior_image_{n}_left": p for n, p in zip(names, pictures, strict=False)} | base


@pytest.mark.parametrize("names", ["01", "12"])
def test_exterior_cameras_count_from_zero_or_one(names):
    found = infer(renamed(*names))
    np.testing.assert_array_equal(found.observation.frames["exterior_image_1_left"][0], request()[KEYS[0]])
    np.testing.assert_array_equal(found.observation.frames["exterior_image_2_left"][0], request()[KEYS[1]])


@pytest.mark.parametrize("names", ["02", "2", "3", "13"])
def test_a_mixture_that_fits_neither_is_refused(names):
    with pytest.raises(WamError, match="fit neither"):
        read(renamed(*names), single_exterior="dropped_view")


@pytest.mark.parametrize("name", "01")
def test_one_exterior_camera_only_where_it_is_allowed(name):
    with pytest.raises(WamError, match="only one exterior camera") as e:
        read(renamed(name))
    assert getattr(e.value, "field", "") == f"observation/exterior_image_{int(name) + 1}_left"
    found = infer(renamed(name), single_exterior="dropped_view")
    assert not found.observation.frames["exterior_image_2_left"].any()
    assert found.observation.frames["exterior_image_1_left"].any() and found.cameras[1] == ""
    without_wrist = {k: v for k, v in renamed(name).items() if "wrist" not in k}
    with pytest.raises(WamError, match="observation/wrist_image_left is missing"):
        read(without_wrist, single_exterior="dropped_view")


def picture(*shape: int, dtype: Any = np.uint8) -> np.ndarray:
    return np.zeros(shape, dtype)


WRIST = "observation/wrist_image_left"
JOINTS = "observation/joint_position"


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({WRIST: picture(3, HEIGHT, WIDTH)}, WRIST, ["HWC", "channels first"]),
        ({WRIST: picture(HEIGHT, WIDTH, 4)}, WRIST, ["channels", "alpha"]),
        ({WRIST: picture(0, WIDTH, 3)}, WRIST, ["[0, 8, 3]"]),
        ({WRIST: picture(0, HEIGHT, WIDTH, 3)}, WRIST, ["[0, 6, 8, 3]"]),
        ({WRIST: picture(1, 1, HEIGHT, WIDTH, 3)}, WRIST, ["batch"]),
        ({WRIST: picture(HEIGHT, WIDTH, 3, dtype=np.float32)}, WRIST, ["float32", "uint8"]),
        ({WRIST: picture(HEIGHT, WIDTH)}, WRIST, ["HWC"]),
        ({WRIST: picture(9, 16, 3)}, WRIST, ["9x16", "6x8", "resize"]),
        ({WRIST: picture(33, HEIGHT, WIDTH, 3)}, WRIST, ["T <= 32"]),
        ({WRIST: "png"}, WRIST, ["str"]),
        ({WRIST: [[1, 2], [3, 4]]}, WRIST, ["list"]),
        ({WRIST: None}, WRIST, ["is missing", "keys ["]),
        ({JOINTS: np.zeros(6)}, JOINTS, ["7", "6"]),
        ({JOINTS: np.zeros((1, 7))}, JOINTS, ["[1, 7]"]),
        ({JOINTS: np.array([0, 0, np.nan, 0, 0, 0, 0])}, JOINTS, ["not finite"]),
        ({JOINTS: np.full(7, np.inf)}, JOINTS, ["not finite"]),
        ({JOINTS: np.full(7, 1e38)}, JOINTS, ["far beyond", "1e+06"]),
        ({JOINTS: np.zeros(7, bool)}, JOINTS, ["bool"]),
        ({JOINTS: ["a"] * 7}, JOINTS, ["not numbers"]),
        ({JOINTS: True}, JOINTS, ["not numbers"]),
        ({JOINTS: None}, JOINTS, ["is missing"]),
        ({"observation/gripper_position": np.zeros(2)}, "observation/gripper_position", ["[2]"]),
        ({"prompt": ""}, "prompt", ["no instruction"]),
        ({"prompt": " \n"}, "prompt", ["no instruction"]),
        ({"prompt": None}, "prompt", ["no instruction"]),
        ({"prompt": ["pick"]}, "prompt", ["not text", "list"]),
        ({"prompt": "[]"}, "prompt", ["empty list"]),
        ({"prompt": "x" * 4097}, "prompt", ["4097", "not cut"]),
        ({"prompt": b"\xff"}, "prompt", ["UTF-8"]),
        ({"prompt": 3}, "prompt", ["int"]),
        ({"session_id": ""}, "session_id", ["1 to 256"]),
        ({"session_id": "x" * 257}, "session_id", ["1 to 256"]),
        ({"session_id": "\0connection-0"}, "session_id", ["NUL"]),
        ({"session_id": b"a"}, "session_id", ["bytes"]),
        ({"session_id": {}}, "session_id", ["dict"]),
        ({"prompt": {"a": "b"}}, "prompt", ["dict"]),
        ({"endpoint": {"reset": 1}}, "endpoint", ["dict"]),
        ({"seed": -1}, "seed", ["2**63"]),
        ({"seed": 1.5}, "seed", ["2**63"]),
        ({"seed": True}, "seed", ["2**63"]),
        ({"deadline_ms": 0}, "deadline_ms", ["unusable"]),
        ({"deadline_ms": float("nan")}, "deadline_ms", ["unusable"]),
        ({"newest_wins": 1}, "newest_wins", ["true or false"]),
        ({"endpoint": "get_action"}, "endpoint", ["'infer' or 'reset'"]),
        ({"endpoint": "reset", "session_ids": "a"}, "session_ids", ["list of str"]),
        ({"endpoint": "reset", "session_ids": [1]}, "session_ids[0]", ["int"]),
    ],
)  # fmt: skip
def test_refused_by_key_with_what_was_got_and_expected(changes, field, words):
    message = {k: v for k, v in {**request(), **changes}.items() if v is not None}
    with pytest.raises(WamError) as e:
        read(message)
    assert getattr(e.value, "field", None) == field
    assert all(word in str(e.value) for word in words), str(e.value)


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"observation/gripper_position": 0.25}, 0.25),
        ({"observation/gripper_position": np.float32(0.25)}, 0.25),
        ({"observation/gripper_position": np.array(0.25)}, 0.25),
        ({"observation/gripper_position": [0.25]}, 0.25),
        ({"observation/gripper_position": np.array([1], np.int64)}, 1.0),
        ({"observation/cartesian_position": None, "unknown key": 3}, 0.25),
    ],
)
def test_what_clients_send_in_different_ways(changes, state):
    found = infer({k: v for k, v in {**request(), **changes}.items() if v is not None})
    assert found.observation.state["gripper_position"].tolist() == [state]


def test_nested_maps_are_the_same_as_flat_keys():
    flat = request()
    nested: dict[str, Any] = {k: v for k, v in flat.items() if not k.startswith("observation/")}
    nested["observation"] = {k.removeprefix("observation/"): v for k, v in flat.items() if k.startswith("observation/")}
    a, b = infer(flat), infer(nested)
    assert all(np.array_equal(a.observation.frames[c], b.observation.frames[c]) for c in a.observation.frames)
    with pytest.raises(WamError, match="twice"):
        read(nested | {"observation/joint_position": flat["observation/joint_position"]})


def test_prompts():
    assert infer(request(prompt="naïve 杯 🤖 שלום")).observation.prompt == "naïve 杯 🤖 שלום"
    assert infer(request(prompt=b"pick")).observation.prompt == "pick"
    for blank in ("", "  ", None):
        message = {k: v for k, v in {**request(), "prompt": blank}.items() if v is not None}
        assert infer(message, instruction="stay").observation.prompt == "stay"


def test_resets():
    assert read({"endpoint": "reset"}) == ResetRequest(None, every=False)
    assert read({"endpoint": "reset", "session_id": "a"}) == ResetRequest(("a",), every=False)
    assert read({"endpoint": "reset", "session_ids": ["a", "b"]}) == ResetRequest(("a", "b"), every=False)
    assert read({"endpoint": "reset", "session_ids": None}) == ResetRequest(None, every=True)


@pytest.mark.parametrize(("how", "box"), [("pad", (slice(1, 5), slice(0, 8))), ("stretch", (slice(0, 6), slice(0, 8)))])
def test_other_sizes_where_it_is_allowed(how, box):
    white = np.full((2, 9, 16, 3), 255, np.uint8)
    found = infer({**request(frames=2), **dict.fromkeys(KEYS, white)}, resize=how)
    image = found.observation.frames["wrist_image_left"]
    assert image.shape == (2, HEIGHT, WIDTH, 3) and (image[:, *box] == 255).all()
    rest = image.copy()
    rest[:, *box] = 0
    assert not rest.any()


def test_text_lists_and_numbers_are_no_requests():
    reader = RequestReader(SPEC, WireRules())
    for frame, words in (("hello", "text frame"), (pack([1]), "not a map"), (pack(7), "not a map"), (b"", "msgpack")):
        with pytest.raises(WamError, match=words):
            reader.read(frame)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=6)
    | st.binary(max_size=6)
    | st.sampled_from(
        [picture(HEIGHT, WIDTH, 3), picture(2, HEIGHT, WIDTH, 3), np.zeros(7), np.float32(1), np.zeros(0)]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
NAMES = [
    *request(),
    "session_ids",
    "seed",
    "deadline_ms",
    "newest_wins",
    "observation/exterior_image_2_left",
    "observation",
]


@settings(deadline=None, max_examples=150)
@given(
    changes=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4),
    gone=st.sets(st.sampled_from(NAMES), max_size=2),
)
def test_any_request_is_read_or_refused(changes, gone):
    """Whatever is accepted has the shapes and the finite numbers that a policy relies on."""
    message = {k: v for k, v in {**request(), **changes}.items() if k not in gone}
    try:
        frame = pack(message)
    except WamError:  # lone surrogates
        return
    try:
        found = RequestReader(SPEC, WireRules(single_exterior="dropped_view")).read(frame)
    except WamError:
        return
    if isinstance(found, InferRequest):
        for camera in SPEC.cameras:
            image = found.observation.frames[camera.name]
            assert image.dtype == np.uint8 and image.shape[1:] == (HEIGHT, WIDTH, 3) and 1 <= len(image) <= 32
        for field in SPEC.state:
            vector = found.observation.state[field.name]
            assert vector.shape == (field.dim,) and vector.dtype == np.float64 and np.isfinite(vector).all()
        assert found.observation.prompt.strip()


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_damaged_requests_never_crash(data):
    raw = bytearray(pack(request(frames=1), data.draw(st.sampled_from(["openpi", "msgpack_numpy"]))))
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WamError):
        RequestReader(SPEC, WireRules()).read(bytes(raw[: data.draw(st.integers(0, len(raw)))]))
