"""A robot in virtual time that a scenario directs: cameras, joints, and a policy whose chunks the case gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from wam_policy_ros.contract.fakes import HoldPolicy, ScriptedPolicy
from wam_policy_ros.contract.interface import Policy
from wam_policy_ros.ros.messages import ns_to_stamp, rgb_to_image
from wam_policy_ros.ros.virtual import Sent, VirtualRun

from . import robot
from .case import Case

START_NS = 1_700_000_000_000_000_000
FRAME = np.random.default_rng(1).integers(0, 256, (9, 16, 3), dtype=np.uint8)


class Stage:
    """Cameras and joints with the node's clock, in step with the control rate unless told otherwise.

    Args:
        policy: drives the robot.
        latency_s: of each call; a function of its number, or one for all.
        arm_rad, finger: where the joints stand.
        rate_hz: of the cameras; joints come twice as often.
        changes: of the parameters, dots written as ``__``.
    """

    def __init__(
        self,
        case: Case,
        policy: Policy | None = None,
        *,
        latency_s: float | Callable[[int], float] = 0.1,
        arm_rad: Sequence[float] | None = None,
        finger: float | None = None,
        rate_hz: float = 15.0,
        **changes: Any,
    ) -> None:
        self.case, self.rate_hz, self.now_s = case, rate_hz, 0.0
        given = latency_s if callable(latency_s) else lambda call: latency_s
        self.run = VirtualRun(
            robot.parameters(case, **changes),
            policy or HoldPolicy(),
            start_ns=START_NS,
            latency_s=lambda call, measured_s: given(call),
        )
        is_open, is_closed = robot.gripper(case.config)
        arm = list(arm_rad) if arm_rad is not None else [0.1] * (len(robot.names(case.config)) - 1)
        self.positions = [*arm, (is_open + is_closed) / 2 if finger is None else finger]

    def play(self, until_s: float) -> None:
        """Publish until then."""
        period_s = 0.5 / self.rate_hz
        k = round(self.now_s / period_s)
        while k * period_s < until_s - 1e-9:
            self.run.advance(k * period_s)
            self._publish(images=k % 2 == 0)
            k += 1
        self.run.advance(until_s)
        self.now_s = until_s

    def _publish(self, *, images: bool) -> None:
        stamp_ns = self.run.clock().ros_ns
        state = SimpleNamespace(
            header=SimpleNamespace(stamp=ns_to_stamp(stamp_ns)),
            name=robot.names(self.case.config),
            position=list(self.positions),
        )
        self.run.message(self.case.config["joint_states_topic"], state)
        for name in self.case.config["cameras"] if images else ():
            self.run.message(robot.topic(self.case.config, name), rgb_to_image(FRAME, stamp_ns=stamp_ns))

    @property
    def plans(self) -> list[Sent]:
        return [s for s in self.run.journal.sent if not s.hold]

    @property
    def holds(self) -> list[Sent]:
        return [s for s in self.run.journal.sent if s.hold]

    @property
    def message(self) -> str:
        lines = [f"{s.substate}: {s.reason}" for s in self.run.journal.said]
        lines += [f"{level}: {line}" for _, level, line in self.run.journal.log]
        return "\n".join(dict.fromkeys(lines))


def never_after(first_s: float, calls: int = 1) -> Callable[[int], float]:
    """Latency of a policy that answers the first calls only."""
    return lambda call: first_s if call < calls else float("inf")


def scripted(chunk: np.ndarray) -> ScriptedPolicy:
    """A policy that gives one chunk, whatever it sees."""
    return ScriptedPolicy(lambda observation, step: chunk)
