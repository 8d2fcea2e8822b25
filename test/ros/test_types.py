"""Publishers of another type, or of another QoS, than the node is set for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CompressedImage, Image, JointState

from wam_policy_ros.contract.fakes import HoldPolicy
from wam_policy_ros.ros.messages import rgb_to_image

from .conftest import wait_for
from .harness import CAMERAS, SPEC, System
from .test_inputs import textured

pytestmark = pytest.mark.usefixtures("ros")
NAMESPACE = "/types"


@pytest.fixture
def stack(ros: None) -> Iterator[ExitStack]:
    with ExitStack() as out:
        yield out


def publishers(stack: ExitStack, kinds: dict[str, tuple[type, QoSProfile]]) -> dict[str, Any]:
    node = Node("robot_of_types", namespace=NAMESPACE)
    stack.callback(node.destroy_node)
    return {topic: node.create_publisher(kind, topic, qos) for topic, (kind, qos) in kinds.items()}


def policy_node(stack: ExitStack, **params: Any) -> System:
    """A node whose robot sends in another namespace, so that the test alone publishes."""
    topics = [f"{NAMESPACE}/{c.topic}" for c in SPEC.cameras]
    system = System(HoldPolicy(), **{"cameras.topics": topics, "joints.topic": f"{NAMESPACE}/joint_states", **params})
    stack.callback(system.close)
    return system


@pytest.mark.parametrize("compressed", [True, False])
def test_a_type_that_nobody_publishes_is_named_with_the_one_that_is(stack: ExitStack, compressed: bool) -> None:
    system = policy_node(stack, **{"image.compressed": compressed})
    # With compressed, the node subscribes <topic>/compressed and finds raw images beside it; without, the wrong type on
    # the topic itself.
    kind = Image if compressed else CompressedImage
    publishers(stack, {camera.topic: (kind, QoSProfile(depth=1)) for camera in SPEC.cameras})
    wanted = f"sensor_msgs/msg/{'CompressedImage' if compressed else 'Image'}"
    offered = f"sensor_msgs/msg/{'Image' if compressed else 'CompressedImage'}"
    says = wait_for(
        lambda: (
            next((s["reason"] for s in system.robot.states if offered in s["reason"]), None)
            or next((line for line in system.lines if offered in line), None)
        ),
        15,
        "the types named",
    )
    assert wanted in says and NAMESPACE in says
    assert not system.robot.trajectories


def test_every_qos_of_a_publisher_is_received(stack: ExitStack) -> None:
    best = QoSProfile(depth=5, reliability=ReliabilityPolicy.BEST_EFFORT)
    latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
    topics = [c.topic for c in SPEC.cameras]
    made = publishers(
        stack,
        {
            topics[0]: (Image, best),
            topics[1]: (Image, QoSProfile(depth=10)),
            topics[2]: (Image, latched),
            "joint_states": (JointState, best),
        },
    )
    system = policy_node(stack)
    wait_for(lambda: system.node.lifecycle == "active", what="active")
    control = system.node.control
    assert control is not None
    inputs = control._inputs
    streams = [*inputs.cameras.values(), inputs.joint_states]

    def received() -> bool:
        for topic, publisher in made.items():
            publisher.publish(
                JointState() if topic == "joint_states" else rgb_to_image(textured((18, 32, 3)), stamp_ns=1)
            )
        return all(s.received for s in streams)

    wait_for(received, 15, f"messages on {CAMERAS} and joint_states")
    assert not [line for line in system.lines if "incompatible" in line]


def test_a_publisher_that_does_not_fit_is_logged_with_its_topic(stack: ExitStack) -> None:
    best = QoSProfile(depth=5, reliability=ReliabilityPolicy.BEST_EFFORT)
    system = policy_node(stack, **{"image.reliable": True})
    publishers(stack, {SPEC.cameras[2].topic: (Image, best)})
    wait_for(lambda: [s for s in system.lines if "incompatible QoS" in s], 15, "the event")
    line = next(s for s in system.lines if "incompatible QoS" in s)
    assert f"{NAMESPACE}/{SPEC.cameras[2].topic}" in line and "image.reliable: false" in line
    wait_for(lambda: "incompatible QoS" in system.robot.state.get("reason", ""), 5, "the reason")
