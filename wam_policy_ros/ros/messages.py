"""Between ROS messages and arrays: images both ways, trajectories. What an encoding is, ``encodings`` knows.

Messages are read by their fields, so any object that has them will do. Only what makes a message imports its class,
when it is called: everything else here works on a machine without ROS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import numpy.typing as npt

from wam_policy_ros.contract.errors import InvalidImage

from .bridge import Bridge
from .encodings import BY_NAME, READ_ONLY_WHEN_TOLD, SUPPORTED, nearest
from .trajectory_faults import trajectory_faults

if TYPE_CHECKING:
    from builtin_interfaces.msg import Time
    from sensor_msgs.msg import Image
    from trajectory_msgs.msg import JointTrajectory

MIN_SIDE = 8
"""Pixels; the network sees each camera at 176x320 or so. Smaller is no picture, but a message filled wrongly."""

MAX_ASPECT = 3.0
"""No camera meant for the embodiment is that much wider or taller."""

VIEWS = ("whole", "left", "right")

_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
_JPEG_END, _PNG_END = b"\xff\xd9", b"IEND"
_NOT_COLOUR = ("compresseddepth", "16uc1", "32fc1", "mono16")


@dataclass(frozen=True)
class ImageRules:
    """How the messages of one camera are read.

    Attributes:
        encoding: what the bytes are, whatever the messages say; empty: what they say.
        view: ``whole`` picture, or the ``left`` or ``right`` half of a side-by-side one.
        bridge: converts some encodings in our place, see ``bridge.find_bridge``.
    """

    encoding: str = ""
    view: str = "whole"
    bridge: Bridge | None = None

    def label(self, msg: Any) -> str:
        """The encoding of a message, as it is read."""
        return self.encoding or msg.encoding


AS_LABELLED = ImageRules()


def stamp_to_ns(stamp: Any) -> int:
    """builtin_interfaces/Time -> ns."""
    return int(stamp.sec) * 1_000_000_000 + int(stamp.nanosec)


def ns_to_stamp(ns: int) -> Time:
    """ns -> builtin_interfaces/Time."""
    from builtin_interfaces.msg import Time

    return Time(sec=ns // 1_000_000_000, nanosec=ns % 1_000_000_000)


def _invalid(what: str, topic: str, got: object, expected: object, remedy: str | None = None) -> InvalidImage:
    return InvalidImage(what, field=topic, got=f"{got} on {topic}", expected=expected, remedy=remedy)


def _is_compressed(msg: Any) -> bool:
    return not hasattr(msg, "encoding")


def check_image(msg: Any, topic: str = "image", rules: ImageRules = AS_LABELLED) -> None:
    """Cheap validity test of an Image or CompressedImage for a callback; touches no pixel.

    Raises:
        InvalidImage: names the topic, the encoding and what is supported. ``what`` is the same for the same kind of
            fault, so that it can be counted.
    """
    if _is_compressed(msg):
        return _check_compressed(msg, topic)
    label = rules.label(msg)
    encoding = BY_NAME.get(label)
    if encoding is None or (label in READ_ONLY_WHEN_TOLD and not rules.encoding):
        raise _unsupported(label, topic)
    if msg.height == 0 or msg.width == 0:
        raise _invalid("empty image", topic, f"{msg.width}x{msg.height} {label}", "at least one pixel")
    if msg.width % encoding.multiple[0] or msg.height % encoding.multiple[1]:
        raise _invalid(
            "size does not fit the encoding",
            topic,
            f"{msg.width}x{msg.height} {label}",
            f"width and height that are multiples of {encoding.multiple[0]} and {encoding.multiple[1]}",
        )
    if msg.step < encoding.row_bytes(msg.width):
        raise _invalid(
            "row step too small",
            topic,
            f"step {msg.step} for {msg.width} pixels of {label}",
            f"at least {encoding.row_bytes(msg.width)} bytes",
        )
    if (size := encoding.size_bytes(msg.height, msg.step)) > len(msg.data):
        raise _invalid("truncated image", topic, f"{len(msg.data)} bytes of {label}", f"{size} bytes")
    return None


def _unsupported(label: str, topic: str) -> InvalidImage:
    guess = label if label in BY_NAME else nearest(label)
    meant = f", e.g. {guess!r} if that is what the camera sends" if guess else ""
    return _invalid(
        "unsupported encoding",
        topic,
        repr(label),
        f"one of {list(SUPPORTED)}",
        f"set image.encodings to what the bytes are{meant}, or change the camera's driver",
    )


def _check_compressed(msg: Any, topic: str) -> None:
    if any(word in msg.format.lower() for word in _NOT_COLOUR):
        raise _invalid("unsupported compressed format", topic, repr(msg.format), "a colour image as jpeg or png")
    head = bytes(msg.data[:8])
    if not head.startswith(_JPEG) and head != _PNG:
        raise _invalid("not a jpeg or png", topic, f"format {msg.format!r}, first bytes {head.hex()}", "jpeg or png")
    # A decoder makes a picture of half a jpeg, too, grey from there on. Its end cannot occur earlier but in the header,
    # and some cameras put bytes of their own after it.
    if (_JPEG_END if head.startswith(_JPEG) else _PNG_END) not in bytes(msg.data[len(msg.data) // 2 :]):
        raise _invalid("truncated jpeg or png", topic, f"{len(msg.data)} bytes without an end", "a whole image")


def describe_image(msg: Any, rules: ImageRules = AS_LABELLED) -> str:
    """For people, e.g. ``640x480 bgr8, step 1920``; the message must have passed ``check_image``."""
    if _is_compressed(msg):
        size = _compressed_size(msg.data)
        return f"{f'{size[1]}x{size[0]} ' if size else ''}compressed, format {msg.format!r}"
    told = f" (read as {rules.encoding})" if rules.encoding and rules.encoding != msg.encoding else ""
    return f"{msg.width}x{msg.height} {msg.encoding or 'without encoding'}{told}, step {msg.step}"


def spread(msg: Any, rules: ImageRules = AS_LABELLED) -> float | None:
    """How much a picture varies, see ``Encoding.spread``; 0 for one colour. None for compressed ones, which would have
    to be decoded; the message must have passed ``check_image``."""
    if _is_compressed(msg):
        return None
    flat = np.frombuffer(msg.data, np.uint8)
    return BY_NAME[rules.label(msg)].spread(flat, msg.height, msg.width, msg.step, bool(msg.is_bigendian))


def image_size(msg: Any, rules: ImageRules = AS_LABELLED) -> tuple[int, int] | None:
    """(height, width) of the view without decoding; None for a jpeg whose header does not tell it in the usual way."""
    size = _compressed_size(msg.data) if _is_compressed(msg) else (msg.height, msg.width)
    return size if size is None or rules.view == "whole" else (size[0], size[1] // 2)


def _compressed_size(data: Any) -> tuple[int, int] | None:
    head = bytes(data[:24])
    if head.startswith(_PNG):  # IHDR is the first chunk
        return (int.from_bytes(head[20:24], "big"), int.from_bytes(head[16:20], "big")) if len(head) == 24 else None
    i = 2
    while i + 9 <= len(data) and data[i] == 0xFF:
        marker = data[i + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # start of frame
            return data[i + 5] << 8 | data[i + 6], data[i + 7] << 8 | data[i + 8]
        if marker == 0xFF:  # fill byte
            i += 1
        elif marker == 0x01 or 0xD0 <= marker <= 0xD8:  # without a length
            i += 2
        else:
            i += 2 + (data[i + 2] << 8 | data[i + 3])
    return None


def check_size(got: tuple[int, int], size: tuple[int, int], topic: str) -> None:
    """Is this a picture at all? Sizes are (height, width), ``size`` the embodiment's.

    Raises:
        InvalidImage: a side is shorter than ``MIN_SIDE``, or the aspect is off by more than ``MAX_ASPECT``.
    """
    if min(got) < MIN_SIDE:
        raise _invalid("absurd image size", topic, f"{got[1]}x{got[0]}", f"at least {MIN_SIDE} pixels on each side")
    off = (got[1] / got[0]) / (size[1] / size[0])
    if not 1 / MAX_ASPECT <= off <= MAX_ASPECT:
        raise _invalid(
            "absurd image size",
            topic,
            f"{got[1]}x{got[0]}",
            f"about the aspect of {size[1]}x{size[0]}, within a factor of {MAX_ASPECT:g}",
        )


def image_to_rgb(
    msg: Any, topic: str = "image", rules: ImageRules = AS_LABELLED, *, copy: bool = True
) -> npt.NDArray[np.uint8]:
    """Decode a camera message: uint8 ``[H, W, 3]`` RGB, a fresh array, or without ``copy`` perhaps the message's own.

    Honours ``step`` (padded rows) and ``is_bigendian``. Grey is repeated over the three channels, alpha is dropped,
    16 bits are scaled from their full range to the full range of 8.

    Raises:
        InvalidImage: see ``check_image``; also for a jpeg or png that cannot be decoded.
    """
    check_image(msg, topic, rules)
    rgb = _decode_compressed(msg, topic) if _is_compressed(msg) else _decode(msg, rules, copy)
    if rules.view != "whole":
        half = rgb.shape[1] // 2
        rgb = np.ascontiguousarray(rgb[:, :half] if rules.view == "left" else rgb[:, half : 2 * half])
    return rgb


def _decode_compressed(msg: Any, topic: str) -> npt.NDArray[np.uint8]:
    flags = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
    decoded = cv2.imdecode(np.frombuffer(msg.data, np.uint8), flags)
    if decoded is None:
        raise _invalid("broken jpeg or png", topic, f"{len(msg.data)} bytes, format {msg.format!r}", "an image")
    return np.asarray(cv2.cvtColor(decoded, cv2.COLOR_BGR2RGB), dtype=np.uint8)


def _decode(msg: Any, rules: ImageRules, copy: bool) -> npt.NDArray[np.uint8]:
    label = rules.label(msg)
    if rules.bridge is not None and label == msg.encoding and label in rules.bridge.encodings:
        return rules.bridge.to_rgb(msg)
    flat = np.frombuffer(msg.data, np.uint8)
    rgb = BY_NAME[label].to_rgb(flat, msg.height, msg.width, msg.step, bool(msg.is_bigendian))
    return rgb.copy() if copy and np.shares_memory(rgb, flat) else rgb


def fit(rgb: npt.NDArray[np.uint8], height: int, width: int, mode: str) -> npt.NDArray[np.uint8]:
    """Bring an image to the embodiment's raw size.

    Args:
        rgb: uint8 ``[h, w, 3]``.
        height, width: wanted size.
        mode: ``pad`` keeps the aspect and fills with black bars, image centred; ``stretch`` fills.

    Returns:
        uint8 ``[height, width, 3]``; the input itself when it fits already.
    """
    h, w = rgb.shape[:2]
    if (h, w) == (height, width):
        return rgb
    scale = min(height / h, width / w)
    new_h, new_w = (height, width) if mode == "stretch" else (max(1, round(h * scale)), max(1, round(w * scale)))
    shrinks = new_h * new_w < h * w
    resized = cv2.resize(rgb, (new_w, new_h), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)
    if (new_h, new_w) == (height, width):
        return np.asarray(resized, dtype=np.uint8)
    out = np.zeros((height, width, 3), np.uint8)
    top, left = (height - new_h) // 2, (width - new_w) // 2
    out[top : top + new_h, left : left + new_w] = resized
    return out


def rgb_to_image(rgb: npt.NDArray[np.uint8], *, stamp_ns: int = 0, frame_id: str = "") -> Image:
    """uint8 ``[H, W, 3]`` RGB -> rgb8 Image. Assigns bytes: an ndarray would be checked element by element."""
    from sensor_msgs.msg import Image

    msg = Image()
    msg.header.stamp = ns_to_stamp(stamp_ns)
    msg.header.frame_id = frame_id
    msg.height, msg.width = int(rgb.shape[0]), int(rgb.shape[1])
    msg.encoding, msg.is_bigendian, msg.step = "rgb8", 0, int(rgb.shape[1]) * 3
    msg.data = np.ascontiguousarray(rgb, dtype=np.uint8).tobytes()
    return msg


def tile(images: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8]:
    """Images side by side, the lower ones filled up with black at the bottom: uint8 ``[max H, sum W, 3]``."""
    height = max(i.shape[0] for i in images)
    return np.concatenate([np.pad(i, ((0, height - i.shape[0]), (0, 0), (0, 0))) for i in images], axis=1)


@dataclass(frozen=True)
class Trajectory:
    """What a JointTrajectory says, in arrays; it starts when the controller receives it.

    Attributes:
        names: joints, in column order.
        positions: ``[M, J]`` joint units.
        times_s: ``[M]``, time_from_start.
        velocities: ``[M, J]`` or None for positions only.
        stamp_ns: the node's clock at the moment from which the times count.

    Raises:
        ValueError: a controller would reject or misread it (sizes, order of times, non-finite values).
    """

    names: tuple[str, ...]
    positions: npt.NDArray[np.float64]
    times_s: npt.NDArray[np.float64]
    velocities: npt.NDArray[np.float64] | None = None
    stamp_ns: int = 0

    def __post_init__(self) -> None:
        names, positions, velocities, ns = self.names, self.positions, self.velocities, self.times_ns
        if positions.ndim != 2 or positions.shape != (len(ns), len(names)) or len(ns) == 0:
            raise ValueError(f"positions {positions.shape} for {len(ns)} times and {len(names)} joints")
        if velocities is not None and velocities.shape != positions.shape:
            raise ValueError(f"velocities {velocities.shape} beside positions {positions.shape}")
        if not (np.isfinite(ns).all() and ns[0] > 0 and (np.diff(ns) > 0).all()):
            raise ValueError(f"time_from_start must be positive and strictly increasing: {self.times_s}")
        if not np.isfinite(positions).all() or (velocities is not None and not np.isfinite(velocities).all()):
            raise ValueError("positions and velocities must be finite")
        if len(set(names)) != len(names):
            raise ValueError(f"a joint is named twice: {list(names)}")

    @property
    def times_ns(self) -> npt.NDArray[np.float64]:
        """``[M]``, as a message carries them: whole ns, still as float64."""
        return np.rint(np.asarray(self.times_s, dtype=np.float64) * 1e9)

    def only(self, joints: npt.NDArray[np.bool_]) -> Trajectory:
        """The same for some joints; bool ``[J]``."""
        names = tuple(n for n, keep in zip(self.names, joints, strict=True) if keep)
        v = None if self.velocities is None else self.velocities[:, joints]
        return Trajectory(names, self.positions[:, joints], self.times_s, v, self.stamp_ns)


def trajectory_to_msg(plan: Trajectory, *, absolute: bool = False) -> JointTrajectory:
    """Trajectory -> trajectory_msgs/JointTrajectory with a zero header stamp, or with its own when ``absolute``.

    Raises:
        ValueError: a controller would not execute it as meant, see ``trajectory_faults``.
    """
    from builtin_interfaces.msg import Duration
    from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

    msg = JointTrajectory(joint_names=list(plan.names))
    if absolute:
        msg.header.stamp = ns_to_stamp(plan.stamp_ns)
    for k, t in enumerate(plan.times_ns):
        point = JointTrajectoryPoint(positions=plan.positions[k].tolist())
        if plan.velocities is not None:
            point.velocities = plan.velocities[k].tolist()
        point.time_from_start = Duration(sec=int(t) // 1_000_000_000, nanosec=int(t) % 1_000_000_000)
        msg.points.append(point)
    if found := trajectory_faults(msg, absolute=absolute):
        raise ValueError(f"a controller would not execute this trajectory: {'; '.join(found)}")
    return msg
