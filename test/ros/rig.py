"""The whole node in virtual time, with a robot whose controller is a strict follower, watched at 500 Hz."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from wam_policy_ros.contract.fakes import ScriptedPolicy
from wam_policy_ros.contract.interface import Observation, Policy
from wam_policy_ros.ros.follower import Follower
from wam_policy_ros.ros.messages import Trajectory, ns_to_stamp, trajectory_to_msg
from wam_policy_ros.ros.parameters import NodeParameters
from wam_policy_ros.ros.virtual import VirtualRun

NAMES = [f"j{i}" for i in range(7)] + ["finger"]
CAMERAS = ["/left", "/right", "/hand"]
DT = 1 / 15
START_NS = 1_750_000_000_000_000_000
PICTURE = {"height": 9, "width": 16, "encoding": "rgb8", "is_bigendian": 0, "step": 48, "data": bytes(range(216)) * 2}
LIMITS = {
    "safety.position_min": -2.9,
    "safety.position_max": 2.9,
    "safety.max_velocity": 2.0,
    "safety.max_acceleration": 10.0,
}
VALUES = {
    **LIMITS,
    "backend": "hold",
    "cameras.topics": CAMERAS,
    "joints.topic": "/joints",
    "joints.names": NAMES,
    "gripper.open": 0.04,
    "gripper.closed": 0.0,
    "instruction": "stir",
}


class Watch:
    """What the arm's joints do, at 500 Hz, over all seams between trajectories."""

    def __init__(self) -> None:
        self.speed = self.acceleration = self.step = 0.0
        self.low, self.high = np.inf, -np.inf
        self._last: tuple[np.ndarray, np.ndarray] | None = None

    def look(self, q: np.ndarray, v: np.ndarray) -> None:
        """``[N, 7]`` positions and velocities, 2 ms apart, following those of the last call."""
        if self._last is not None:
            q, v = np.concatenate([self._last[0], q]), np.concatenate([self._last[1], v])
        self._last = q[-1:], v[-1:]
        if len(q) < 2:
            return
        self.step = max(self.step, float(np.abs(np.diff(q, axis=0)).max()))
        self.speed = max(self.speed, float(np.abs(v).max()))
        self.acceleration = max(self.acceleration, float(np.abs(np.diff(v, axis=0)).max()) / 0.002)
        self.low, self.high = min(self.low, float(q.min())), max(self.high, float(q.max()))


class Rig:
    """One robot.

    Args:
        policy: drives it.
        latency_s: of each call.
        transport_s: until a trajectory is at the controller; asked for every one.
        params: of the node.

    Attributes:
        lag_s: age of the images at delivery.
        silent: topics that deliver nothing.
        log: what the node said, with its time in s.
    """

    def __init__(
        self,
        policy: Policy,
        latency_s: Callable[[int], float] = lambda call: 0.2,
        transport_s: Callable[[], float] = lambda: 0.0,
        **params: Any,
    ) -> None:
        self.follower = Follower(NAMES, [0.0] * 7 + [0.04], partial=False)
        self.watch, self.now_s = Watch(), 0.0
        self.absolute = params.get("control.stamp") == "absolute"
        self.lag_s, self.silent = 0.0, set[str]()
        self.sent: list[tuple[float, Trajectory]] = []
        self._transport_s = transport_s
        self._on_the_way: list[tuple[float, Trajectory]] = []
        self._looked_at = 0  # samples
        self.run = VirtualRun(
            NodeParameters.from_values({**VALUES, **params}),
            policy,
            start_ns=START_NS,
            latency_s=lambda call, measured_s: latency_s(call),
        )
        assemble_send = self.run._on_sent

        def send(trajectory: Trajectory) -> None:
            assemble_send(trajectory)
            now_s = self.clock_s
            self.sent.append((now_s, trajectory))
            self._on_the_way.append((now_s + self._transport_s(), trajectory))

        self.run.robot.output._send = send

    @property
    def control(self) -> Any:
        return self.run.control

    @property
    def clock_s(self) -> float:
        return self.run.elapsed_s(self.run.clock.steady_ns)

    @property
    def plans(self) -> list[tuple[float, Trajectory]]:
        return [(t, m) for t, m in self.sent if len(m.positions) > 1]

    @property
    def holds(self) -> list[tuple[float, Trajectory]]:
        return [(t, m) for t, m in self.sent if len(m.positions) == 1]

    @property
    def reasons(self) -> list[str]:
        return [f"{s.substate}: {s.reason}" for s in self.run.journal.said]

    def play(self, seconds: float) -> None:
        """Cameras every second call of 1/30 s, joints every one; the controller at the times of arrival."""
        end_s = self.now_s + seconds
        while self.now_s < end_s - 1e-9:
            self.now_s = round((self.now_s + DT / 2) * 30) / 30
            self._advance(self.now_s)
            stamp_ns = self.run.clock().ros_ns - round(self.lag_s * 1e9)
            if "/joints" not in self.silent:
                joints = SimpleNamespace(
                    header=SimpleNamespace(stamp=ns_to_stamp(self.run.clock().ros_ns)),
                    name=NAMES,
                    position=self.follower.at(max(self.now_s - 0.03, self.follower._times_s[0])).tolist(),
                )
                self.run.message("/joints", joints)
            if round(self.now_s * 30) % 2 == 0:
                image = SimpleNamespace(**PICTURE, header=SimpleNamespace(stamp=ns_to_stamp(stamp_ns), frame_id=""))
                for topic in CAMERAS:
                    if topic not in self.silent:
                        self.run.message(topic, image)
            self._deliver(self.now_s)

    def _advance(self, to_s: float) -> None:
        self.run.advance(to_s)
        self._deliver(to_s)

    def _deliver(self, now_s: float) -> None:
        while self._on_the_way and self._on_the_way[0][0] <= now_s:
            at_s, trajectory = self._on_the_way.pop(0)
            self._look(at_s)
            msg = trajectory_to_msg(trajectory)
            if self.absolute:
                msg.header.stamp = ns_to_stamp(trajectory.stamp_ns - START_NS)  # the controller's clock starts at zero
            self.follower.on_trajectory(msg, at_s)
        if now_s > self._looked_at / 500 + 0.5:
            self._look(now_s)

    def _look(self, until_s: float) -> None:
        last = int(np.floor(until_s * 500 + 1e-9))
        if last > self._looked_at:
            q, v = self.follower.sample(np.arange(self._looked_at + 1, last + 1) / 500)
            self.watch.look(q[:, :7], v[:, :7])
            self._looked_at = last


def wander(*, disagreement_rad: float = 0.01, seed: int = 0) -> ScriptedPolicy:
    """A policy that leads each joint along its own slow wave from wherever it is, at up to 1 rad/s, and opens and
    closes the gripper. Each chunk is off by a random constant, as the views of a network on one moment differ."""
    rng = np.random.default_rng(seed)
    phase, rate = rng.uniform(0, 6, 7), rng.uniform(0.7, 1.1, 7)

    def wave(t: np.ndarray) -> np.ndarray:
        return np.asarray(0.9 * np.sin(rate * t[:, None] + phase))

    def rows(observation: Observation, step: int) -> np.ndarray:
        assert observation.stamp_ns is not None
        t0 = (observation.stamp_ns - START_NS) * 1e-9
        q = observation.state["joint_position"]
        ahead = np.arange(0, 25) * DT
        way = wave(t0 + ahead)
        # It begins at the state it sees and comes back to its wave within about two seconds.
        gap = (q - way[0]) * np.exp(-ahead / 1.0)[:, None]
        arm = way + gap + (0.0 if step == 0 else rng.normal(0.0, disagreement_rad, 7))
        arm[0] = q
        gripper = np.full(24, float(np.sin(0.8 * t0) > 0))
        return np.column_stack([arm[1:], gripper])

    policy = ScriptedPolicy(rows)
    # As small as the pictures that are sent: nobody looks at them.
    policy.spec = replace(policy.spec, cameras=tuple(replace(c, height=9, width=16) for c in policy.spec.cameras))
    return policy
