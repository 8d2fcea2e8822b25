from __future__ import annotations

import array

import cv2
import numpy as np
import pytest
from sensor_msgs.msg import CompressedImage, Image

from wam_policy_ros.contract.errors import InvalidImage
from wam_policy_ros.ros.encodings import BY_NAME, SUPPORTED
from wam_policy_ros.ros.messages import (
    ImageRules,
    Trajectory,
    check_image,
    describe_image,
    fit,
    image_to_rgb,
    ns_to_stamp,
    rgb_to_image,
    spread,
    stamp_to_ns,
    tile,
    trajectory_to_msg,
)

RED = (200, 10, 30)


def scene() -> np.ndarray:
    """A red square on a grey ground with a gradient: a swap of channels, rows or columns shows."""
    rgb = np.full((12, 20, 3), 90, np.uint8)
    rgb[..., 2] = np.arange(20)
    rgb[2:6, 3:8] = RED
    return rgb


def message(rgb: np.ndarray, encoding: str = "rgb8", pad: int = 0) -> Image:
    pixels = {
        "rgb8": lambda: rgb,
        "bgr8": lambda: rgb[..., ::-1],
        "rgba8": lambda: np.dstack([rgb, np.full(rgb.shape[:2], 7, np.uint8)]),
        "bgra8": lambda: np.dstack([rgb[..., ::-1], np.full(rgb.shape[:2], 7, np.uint8)]),
        "mono8": lambda: rgb[..., 0],
    }[encoding]()
    rows = np.ascontiguousarray(pixels).reshape(rgb.shape[0], -1)
    rows = np.pad(rows, ((0, 0), (0, pad)), constant_values=0xEE)
    msg = Image(height=rgb.shape[0], width=rgb.shape[1], encoding=encoding, step=rows.shape[1])
    msg.data = rows.tobytes()
    return msg


@pytest.mark.parametrize("pad", [0, 5])
@pytest.mark.parametrize("encoding", ["rgb8", "bgr8", "rgba8", "bgra8"])
def test_every_encoding_gives_the_same_rgb(encoding: str, pad: int) -> None:
    out = image_to_rgb(message(scene(), encoding, pad))
    np.testing.assert_array_equal(out, scene())
    out[0, 0] = 1  # a fresh array, not the message's memory


def test_decoded_image_is_not_the_memory_of_the_message() -> None:
    msg = message(scene())
    image_to_rgb(msg)[:] = 0
    np.testing.assert_array_equal(image_to_rgb(msg), scene())


def solid(encoding: str, rgb: tuple[int, int, int], size: tuple[int, int] = (8, 12), *, big: bool = False) -> Image:
    """A picture of one colour, encoded by the definitions of the encodings, not by the code under test."""
    (h, w), (r, g, b) = size, rgb
    y, u, v = (round(x) for x in (16 + 0.257 * r + 0.504 * g + 0.098 * b, 128 - 0.148 * r - 0.291 * g + 0.439 * b,
                                  128 + 0.439 * r - 0.368 * g - 0.071 * b))  # fmt: skip
    step, rows = w, [b""]
    wide = [int(c).to_bytes(1, "big") * 2 for c in rgb]  # 257 * c, the same in both byte orders
    if encoding.startswith("bayer_"):
        names = dict(zip("rgb", wide, strict=True))
        one = encoding.endswith("16") + 1
        pairs = [encoding[6:8], encoding[8:10]]
        rows = [b"".join(names[c][:one] for c in pairs[i % 2]) * (w // 2) for i in range(h)]
        step = w * one
    elif encoding in ("yuv422", "uyvy", "yuv422_yuy2", "yuyv"):
        rows = [bytes([u, y, v, y] if encoding in ("yuv422", "uyvy") else [y, u, y, v]) * (w // 2)] * h
        step = 2 * w
    elif encoding in ("nv12", "nv21"):
        rows = [bytes([y]) * w] * h + [bytes([u, v] if encoding == "nv12" else [v, u]) * (w // 2)] * (h // 2)
    elif encoding == "nv24":
        rows = [bytes([y]) * w] * h + [bytes([u, v]) * w] * h
    else:
        order = {"rgb": "rgb", "bgr": "bgr", "rgba": "rgba", "bgra": "bgra", "mono": "r"}[encoding.rstrip("0123456789")]
        names = {**dict(zip("rgb", wide, strict=True)), "a": b"\x07\x07"}
        one = encoding.endswith("16") + 1
        rows = [b"".join(names[c][:one] for c in order) * w] * h
        step = w * len(order) * one
    msg = Image(height=h, width=w, encoding=encoding, step=step, is_bigendian=int(big))
    msg.data = b"".join(rows)
    return msg


@pytest.mark.parametrize("encoding", list(BY_NAME))
@pytest.mark.parametrize("rgb", [(220, 30, 40), (20, 200, 60), (10, 40, 210)])
def test_each_colour_survives_each_encoding(encoding: str, rgb: tuple[int, int, int]) -> None:
    msg = solid(encoding, rgb)
    out = image_to_rgb(msg, "t", ImageRules(encoding="mono16" if encoding == "mono16" else ""))
    want = (rgb[0],) * 3 if encoding.startswith("mono") else rgb
    assert out.shape == (8, 12, 3) and out.dtype == np.uint8
    exact = not encoding.startswith(("yuv", "uyvy", "yuyv", "nv"))
    assert np.abs(out.astype(int) - want).max() <= (0 if exact else 3)
    out[:] = 0
    assert bytes(msg.data) == bytes(solid(encoding, rgb).data), "a fresh array"


def test_sixteen_bits_are_scaled_from_either_byte_order() -> None:
    for big in (False, True):
        values = np.array([[0, 256, 32896, 65535]], dtype=">u2" if big else "<u2")
        msg = Image(height=1, width=4, encoding="mono16", step=8, is_bigendian=int(big), data=values.tobytes())
        np.testing.assert_array_equal(image_to_rgb(msg, "t", ImageRules("mono16"))[0, :, 0], [0, 1, 128, 255])


@pytest.mark.parametrize("encoding", ["bayer_rggb8", "yuv422_yuy2", "nv21", "nv24", "rgb16"])
def test_padded_rows_of_every_kind(encoding: str) -> None:
    rng = np.random.default_rng(3)
    tight = solid(encoding, (220, 30, 40))
    rows = rng.integers(0, 256, (len(tight.data) // tight.step, tight.step), dtype=np.uint8)
    tight.data = rows.tobytes()
    padded = solid(encoding, (220, 30, 40))
    wide = np.full((len(rows), tight.step + 10), 0xEE, np.uint8)
    wide[:, : tight.step] = rows
    if encoding == "nv24":  # a row of its second plane is as long as two of the first
        wide = np.full((8 * tight.step + 8 * 10 + 8 * 2 * (tight.step + 10),), 0xEE, np.uint8)
        wide[: 8 * (tight.step + 10)].reshape(8, -1)[:, : tight.step] = rows[:8]
        wide[8 * (tight.step + 10) :].reshape(8, -1)[:, : 2 * tight.step] = rows[8:].reshape(8, -1)
    padded.step, padded.data = tight.step + 10, wide.tobytes()
    np.testing.assert_array_equal(image_to_rgb(padded), image_to_rgb(tight))


def test_the_label_is_overruled_by_what_the_camera_is_known_to_send() -> None:
    wrong = solid("yuv422_yuy2", (220, 30, 40))
    wrong.encoding = "yuv422"  # the driver's mistake
    assert np.abs(image_to_rgb(wrong)[0, 0].astype(int) - (220, 30, 40)).max() > 60
    assert np.abs(image_to_rgb(wrong, "t", ImageRules("yuv422_yuy2"))[0, 0].astype(int) - (220, 30, 40)).max() <= 3
    vendor = solid("bayer_rggb8", (220, 30, 40))
    vendor.encoding = "bayerrg8"
    with pytest.raises(InvalidImage, match=r"'bayerrg8'.*image.encodings.*'bayer_rggb8'"):
        image_to_rgb(vendor)
    np.testing.assert_array_equal(image_to_rgb(vendor, "t", ImageRules("bayer_rggb8"))[4, 4], (220, 30, 40))
    assert "bayerrg8 (read as bayer_rggb8)" in describe_image(vendor, ImageRules("bayer_rggb8"))
    with pytest.raises(InvalidImage, match="row step too small"):
        image_to_rgb(vendor, "t", ImageRules("rgb8"))


def test_half_of_a_side_by_side_picture() -> None:
    both = message(scene())
    np.testing.assert_array_equal(image_to_rgb(both, "t", ImageRules(view="left")), scene()[:, :10])
    np.testing.assert_array_equal(image_to_rgb(both, "t", ImageRules(view="right")), scene()[:, 10:])


@pytest.mark.parametrize("encoding", list(BY_NAME))
@pytest.mark.parametrize("level", [0, 255])
def test_black_and_white_pictures_vary_by_nothing_and_a_scene_does(encoding: str, level: int) -> None:
    rules = ImageRules("mono16" if encoding == "mono16" else "")
    flat = solid(encoding, (level,) * 3, (64, 96))
    assert spread(flat, rules) == 0.0
    data = np.frombuffer(bytes(flat.data), np.uint8).copy()
    data.reshape(-1, flat.step)[20:40, : flat.step // 3] = 90
    flat.data = data.tobytes()
    assert spread(flat, rules) > 8.0


def test_mono8_is_repeated() -> None:
    np.testing.assert_array_equal(image_to_rgb(message(scene(), "mono8", 3)), np.repeat(scene()[..., :1], 3, axis=2))


@pytest.mark.parametrize(
    ("change", "what", "says"),
    [
        ({"encoding": "bayerrg8"}, "unsupported encoding", "bayerrg8"),
        ({"encoding": "8UC3"}, "unsupported encoding", "8UC3"),
        ({"encoding": "mono16"}, "unsupported encoding", "mono16"),
        ({"encoding": "nv21"}, "truncated image", "1080 bytes"),
        ({"height": 0}, "empty image", "20x0"),
        ({"width": 0}, "empty image", "0x12"),
        ({"step": 0}, "row step too small", "step 0"),
        ({"step": 59}, "row step too small", "at least 60"),
        ({"data": array.array("B", bytes(719))}, "truncated image", "719 bytes"),
        ({"data": array.array("B")}, "truncated image", "0 bytes"),
    ],
)
def test_invalid_images_are_named(change: dict[str, object], what: str, says: str) -> None:
    msg = message(scene())
    for key, value in change.items():
        setattr(msg, key, value)
    for call in (check_image, image_to_rgb):
        with pytest.raises(InvalidImage) as error:
            call(msg, "camera_wrist/image_raw")
        assert error.value.what == what
        assert says in str(error.value) and "camera_wrist/image_raw" in str(error.value)


def test_refused_encoding_lists_the_supported_ones() -> None:
    with pytest.raises(InvalidImage) as error:
        check_image(message(scene()).__class__(height=1, width=1, encoding="16UC1", step=2, data=b"ab"), "t")
    assert all(e in str(error.value) for e in SUPPORTED)


@pytest.mark.parametrize("suffix", ["jpeg", "png"])
def test_compressed_is_rgb_not_bgr(suffix: str) -> None:
    big = np.kron(scene(), np.ones((8, 8, 1), np.uint8))
    good, data = cv2.imencode("." + suffix, big[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 95])
    assert good
    out = image_to_rgb(CompressedImage(format=suffix, data=data.tobytes()))
    assert np.abs(out[32, 40].astype(int) - RED).max() <= (12 if suffix == "jpeg" else 0)
    assert out.shape == big.shape


@pytest.mark.parametrize(
    ("fmt", "data", "what"),
    [
        ("16UC1; compressedDepth png", b"\0" * 12 + b"\x89PNG\r\n\x1a\n", "unsupported compressed format"),
        ("jpeg", b"", "not a jpeg or png"),
        ("jpeg", b"GIF89a..", "not a jpeg or png"),
    ],
)
def test_compressed_that_is_no_colour_image_is_refused(fmt: str, data: bytes, what: str) -> None:
    with pytest.raises(InvalidImage) as error:
        check_image(CompressedImage(format=fmt, data=data), "t")
    assert error.value.what == what and fmt in str(error.value)


def test_broken_jpeg_is_an_error_not_none() -> None:
    msg = CompressedImage(format="jpeg", data=b"\xff\xd8\xff" + b"\0" * 40 + b"\xff\xd9")
    check_image(msg, "t")
    with pytest.raises(InvalidImage, match="broken"):
        image_to_rgb(msg, "t")


@pytest.mark.parametrize("suffix", ["jpeg", "png"])
def test_half_a_compressed_image_is_dropped_and_bytes_after_its_end_do_no_harm(suffix: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    data = cv2.imencode(f".{suffix}", noise)[1].tobytes()
    for cut in (len(data) // 3, len(data) // 2, len(data) - 10):
        with pytest.raises(InvalidImage, match="truncated"):
            check_image(CompressedImage(format=suffix, data=data[:cut]), "t")
    for behind in (b"", b"\0" * 100, b"vendor"):
        check_image(CompressedImage(format=suffix, data=data + behind), "t")


def test_pad_keeps_the_aspect_and_centres() -> None:
    white = np.full((100, 100, 3), 255, np.uint8)
    out = fit(white, 180, 320, "pad")
    assert out.shape == (180, 320, 3)
    assert (out[:, 70:250] == 255).all() and (out[:, :70] == 0).all() and (out[:, 250:] == 0).all()


def test_stretch_fills_and_a_fitting_image_is_untouched() -> None:
    white = np.full((100, 100, 3), 255, np.uint8)
    assert (fit(white, 180, 320, "stretch") == 255).all()
    image = np.random.default_rng(0).integers(0, 256, (180, 320, 3), dtype=np.uint8)
    assert fit(image, 180, 320, "pad") is image


def test_same_aspect_is_resized_without_bars() -> None:
    rgb = np.full((360, 640, 3), 77, np.uint8)
    assert (fit(rgb, 180, 320, "pad") == 77).all()


def test_image_message_round_trip_and_stamp() -> None:
    msg = rgb_to_image(scene(), stamp_ns=1_700_000_000_123_456_789, frame_id="wrist")
    np.testing.assert_array_equal(image_to_rgb(msg), scene())
    assert stamp_to_ns(msg.header.stamp) == 1_700_000_000_123_456_789 and msg.header.frame_id == "wrist"
    assert stamp_to_ns(ns_to_stamp(5)) == 5


def test_tile_puts_images_side_by_side() -> None:
    out = tile([np.full((4, 3, 3), 1, np.uint8), np.full((2, 5, 3), 2, np.uint8)])
    assert out.shape == (4, 8, 3) and (out[:2, 3:] == 2).all() and (out[2:, 3:] == 0).all()


def test_trajectory_message_is_one_a_controller_accepts() -> None:
    speeds = np.array([[1.0, 1.0], [0.0, 0.0]])
    plan = Trajectory(("a", "b"), np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([0.04, 1.5]), speeds)
    msg = trajectory_to_msg(plan)
    assert stamp_to_ns(msg.header.stamp) == 0 and list(msg.joint_names) == ["a", "b"]
    assert [list(p.positions) for p in msg.points] == [[1.0, 2.0], [3.0, 4.0]]
    assert [(p.time_from_start.sec, p.time_from_start.nanosec) for p in msg.points] == [
        (0, 40_000_000),
        (1, 500_000_000),
    ]
    still = Trajectory(("a",), np.zeros((1, 1)), np.array([0.1]))
    assert not trajectory_to_msg(still).points[0].velocities


@pytest.mark.parametrize(
    ("names", "positions", "times", "velocities"),
    [
        (["a"], [[0.0]], [0.0], None),
        (["a"], [[0.0], [0.1]], [0.1, 0.1 + 1e-10], None),
        (["a"], np.zeros((0, 1)), [], None),
        (["a", "b"], [[0.0]], [0.1], None),
        (["a", "a"], [[0.0, 0.0]], [0.1], None),
        (["a"], [[np.nan]], [0.1], None),
        (["a"], [[0.0]], [0.1], [[np.inf]]),
        (["a"], [[0.0]], [0.1], [[0.0, 0.0]]),
    ],
)
def test_trajectories_a_controller_would_reject_are_never_built(names, positions, times, velocities) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError):
        Trajectory(
            tuple(names),
            np.asarray(positions),
            np.asarray(times),
            None if velocities is None else np.asarray(velocities),
        )
