"""Feeds ``Inputs`` from topics."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from rclpy.event_handler import SubscriptionEventCallbacks
from rclpy.qos import QoSProfile
from sensor_msgs.msg import CompressedImage, Image, JointState

from .drops import Log
from .inputs import Inputs
from .parameters import NodeParameters
from .qos import sensor_qos
from .streams import CameraInput, JointStateInput, Now

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
    """

    def receive(stream: CameraInput | JointStateInput, msg: Any) -> None:
        stream.on_message(msg, clock())
        if isinstance(stream, CameraInput):
            after_image()

    def one(kind: type, stream: CameraInput | JointStateInput, qos: QoSProfile) -> None:
        def incompatible(event: Any) -> None:
            warn(
                f"{stream.shown}: {event.total_count} publisher(s) with incompatible QoS (policy "
                f"{event.last_policy_kind}), from which nothing is received; remedy: "
                "image.reliable: false, or a reliable publisher"
            )

        events = SubscriptionEventCallbacks(incompatible_qos=lambda event: guard(incompatible, event))
        received = node.create_subscription(
            kind, stream.topic, lambda msg: guard(receive, stream, msg), qos, event_callbacks=events
        )
        entities.callback(node.destroy_subscription, received)

    image_kind = CompressedImage if params.image_compressed else Image
    for camera in inputs.cameras.values():
        one(image_kind, camera, sensor_qos(5, reliable=params.image_reliable))
    one(JointState, inputs.joint_states, sensor_qos(10))
