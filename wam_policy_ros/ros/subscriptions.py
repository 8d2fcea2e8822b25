"""Feeds ``Inputs`` from topics."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from rclpy.event_handler import SubscriptionEventCallbacks
from rclpy.qos import QoSProfile
from sensor_msgs.msg import CompressedImage, Image, JointState

from wam_policy_ros.contract.errors import ConfigError

from .drops import Log
from .inputs import Inputs, is_compressed
from .joint_states import JointStateInput
from .lifecycle import steady_clock
from .parameters import NodeParameters
from .qos import sensor_qos
from .silence import Silence
from .streams import CameraInput, Now

LOOK_S = 1.0
"""How often the types that publishers offer are looked at, for streams from which nothing has come."""

_TYPE_REMEDY = (
    "correct cameras.topics: a topic that ends in /compressed is taken for compressed images, any other for raw ones; "
    "image.compressed means all of them"
)

Guard = Callable[..., Any]
"""Calls a function with arguments and lets no exception through."""


def subscribe(
    node: Any,
    inputs: Inputs,
    params: NodeParameters,
    entities: ExitStack,
    *,
    clock: Callable[[], Now],
    guard: Guard,
    warn: Log,
    after_image: Callable[[], None] = lambda: None,
) -> None:
    """Create the subscriptions of all cameras and of the joints on a node; ``entities`` destroys them.

    Args:
        clock: reads both clocks, at the arrival of a message.
        guard: every callback runs through it.
        warn: log function.
        after_image: called after every image.

    Raises:
        ConfigError: publishers of another type are known on a topic, and none of ours.
    """

    def receive(stream: CameraInput | JointStateInput, msg: Any) -> None:
        stream.on_message(msg, clock())
        if isinstance(stream, CameraInput):
            after_image()

    refused: dict[int, str] = {}

    def one(kind: type, stream: CameraInput | JointStateInput, qos: QoSProfile) -> None:
        def incompatible(event: Any) -> None:
            refused[id(stream)] = (
                f"{event.total_count} publisher(s) with incompatible QoS (policy {event.last_policy_kind}), from which "
                "nothing is received"
            )
            warn(f"{stream.shown}: {refused[id(stream)]}; remedy: image.reliable: false, or a reliable publisher")

        events = SubscriptionEventCallbacks(incompatible_qos=lambda event: guard(incompatible, event))
        received = node.create_subscription(
            kind, stream.topic, lambda msg: guard(receive, stream, msg), qos, event_callbacks=events
        )
        entities.callback(node.destroy_subscription, received)

    streams: list[tuple[type, CameraInput | JointStateInput]] = [
        (CompressedImage if is_compressed(c.topic) else Image, c) for c in inputs.cameras.values()
    ]
    streams.append((JointState, inputs.joint_states))

    silences = {id(stream): Silence(LOOK_S) for _, stream in streams}

    def look(refuse: bool = False) -> None:
        for kind, stream in streams:
            offered = "" if stream.received else _offered(node, stream.topic, kind)
            silent = silences[id(stream)].look(_publishers(node, stream.topic, kind), stream.received)
            stream.offered = offered or refused.get(id(stream), "") or silent
            if offered and refuse:
                raise ConfigError(f"{stream.shown} cannot be received: {stream.offered}", remedy=_TYPE_REMEDY)

    look(refuse=True)  # those that are known already; the others make the node wait and say why
    for kind, stream in streams:
        camera = isinstance(stream, CameraInput)
        one(kind, stream, sensor_qos(5, reliable=params.image_reliable) if camera else sensor_qos(10))
    timer = node.create_timer(LOOK_S, lambda: guard(look), clock=steady_clock())
    entities.callback(node.destroy_timer, timer)


def _publishers(node: Any, topic: str, kind: type) -> int:
    """How many are known of this type."""
    known = node.get_publishers_info_by_topic(node.resolve_topic_name(topic))
    return sum(p.topic_type == _type_name(kind) for p in known)


def _offered(node: Any, topic: str, kind: type) -> str:
    """Why nothing of a type is received although somebody publishes, or empty."""
    wanted = _type_name(kind)
    offered = {p.topic_type for p in node.get_publishers_info_by_topic(node.resolve_topic_name(topic))}
    if offered and wanted not in offered:
        return f"its publishers offer {', '.join(sorted(offered))}, the node is set for {wanted}"
    raw = topic.removesuffix("/compressed")
    if not offered and raw != topic:
        shown = node.resolve_topic_name(raw)
        if beside := {p.topic_type for p in node.get_publishers_info_by_topic(shown)}:
            return f"nobody publishes it, but {', '.join(sorted(beside))} on {shown}; the node is set for {wanted}"
    return ""


def _type_name(kind: type) -> str:
    """``sensor_msgs.msg._image.Image`` -> ``sensor_msgs/msg/Image``."""
    package, folder, *_ = kind.__module__.split(".")
    return f"{package}/{folder}/{kind.__name__}"
