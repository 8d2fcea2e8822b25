"""Pictures for people: what the policy saw, and what it predicts. Made in the worker, only when somebody looks."""

from __future__ import annotations

import traceback
from contextlib import ExitStack
from typing import Any

import numpy as np
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Image

from wam_policy_ros.contract.interface import ActionChunk, Observation, Policy
from wam_policy_ros.contract.predicted import due_steps

from .messages import rgb_to_image, tile

_BURST = 64  # frames of one predicted video are sent at once; a shorter queue would lose most of them


class VideoOutput:
    """Publishers ``~/observed/image_raw`` and ``~/predicted_video/image_raw``; ``entities`` destroys them."""

    def __init__(self, node: Any, entities: ExitStack) -> None:
        self._node = node
        qos = QoSProfile(depth=_BURST, reliability=ReliabilityPolicy.RELIABLE)
        self.observed = node.create_publisher(Image, "~/observed/image_raw", qos)
        entities.callback(node.destroy_publisher, self.observed)
        self.predicted = node.create_publisher(Image, "~/predicted_video/image_raw", qos)
        entities.callback(node.destroy_publisher, self.predicted)
        self._failed = False

    def wanted(self) -> bool:
        """Does somebody look? Called in the worker thread."""
        return self.observed.get_subscription_count() + self.predicted.get_subscription_count() > 0

    def prediction_wanted(self) -> bool:
        """Does somebody look at the predicted video? Called in the worker thread."""
        return self.predicted.get_subscription_count() > 0

    def after_step(self, policy: Policy, chunk: ActionChunk, observation: Observation) -> None:
        """Called in the worker thread after the chunk was handed over. Never raises: a picture is not worth a fault."""
        try:
            self._show(policy, chunk, observation)
        except Exception:
            if not self._failed:
                self._node.get_logger().warning(f"no pictures of this step\n{traceback.format_exc()}")
            self._failed = True

    def _show(self, policy: Policy, chunk: ActionChunk, observation: Observation) -> None:
        stamp_ns = observation.stamp_ns
        assert stamp_ns is not None  # the node stamps every observation
        if self.observed.get_subscription_count() > 0:
            seen = tile([observation.frames[c.name][-1] for c in policy.spec.cameras])
            self.observed.publish(rgb_to_image(seen, stamp_ns=stamp_ns, frame_id="observed"))
        if self.predicted.get_subscription_count() > 0:
            frames = policy.render_video(chunk)
            if frames is None:
                return
            for step, frame in zip(due_steps(policy.spec, len(frames)), np.asarray(frames), strict=True):
                due_ns = stamp_ns + round(step * chunk.dt_s * 1e9)
                self.predicted.publish(rgb_to_image(frame, stamp_ns=due_ns, frame_id="predicted"))
