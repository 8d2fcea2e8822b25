"""The node's own path from messages to trajectories, where nothing of ROS is installed."""

from __future__ import annotations

import subprocess
import sys

CHILD = """
import sys
from importlib.abc import MetaPathFinder
from types import SimpleNamespace as Msg

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("rclpy", "rcl_interfaces", "builtin_interfaces") or "_msgs" in name:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())

import numpy as np
from wam_policy_ros.contract.embodiment import get_embodiment
from wam_policy_ros.contract.fakes import HoldPolicy
from wam_policy_ros.ros import checks, clock_watch, joints, messages, outputs, parameters, streams
from wam_policy_ros.ros.control import ControlLoop
from wam_policy_ros.ros.inputs import Inputs
from wam_policy_ros.ros.streams import Now
from wam_policy_ros.ros.worker import InferenceWorker

e, policy, t0 = get_embodiment("oxe_droid"), HoldPolicy(), 1_800_000_000_000_000_000
names = tuple(f"j{i}" for i in range(8))
params = parameters.NodeParameters.from_values({
    "backend": "hold", "instruction": "go", "joints.names": names, "safety.executor_stall_s": 0,
    "safety.position_min": -1, "safety.position_max": 1, "safety.max_velocity": 1})
mapping = joints.JointMap.build(e.state, e.action, names=names, gripper_open=0.0, gripper_closed=1.0)
inputs = Inputs(params, policy.spec, mapping, warn=print)
clock = [Now(t0, 10**9)]
sent, events = [], []
worker = InferenceWorker(
    lambda progress: policy, notify=lambda: None, log=lambda *a: events.append(a), after_step=lambda *a: None
)
output = outputs.TrajectoryOutput(sent.append, mapping.command_names, with_velocities=True)
loop = ControlLoop(params, mapping, inputs, worker, output, clock=lambda: clock[0], simulated=False,
                   changed=lambda: None, log=lambda *a: events.append(a))
worker.start()
while worker.status.phase.value != "ready":
    assert worker.status.phase.value != "failed", events
loop.activate(policy.spec)
for k in range(1, 200):
    clock[0] = now = Now(t0 + k * 66_666_667, 10**9 + k * 66_666_667)
    header = Msg(stamp=Msg(sec=now.ros_ns // 10**9, nanosec=now.ros_ns % 10**9))
    for camera in inputs.cameras.values():
        msg = Msg(header=header, encoding="rgb8", height=18, width=32, step=96, is_bigendian=0)
        msg.data = bytes(range(216)) * 8
        camera.on_message(msg, now)
    inputs.joint_states.on_message(Msg(header=header, name=names, position=[0.5] * 8), now)
    loop.on_tick()
    while loop._in_flight is not None:
        loop.on_worker()
    if len(sent) > 2:
        break
assert worker.stop(5)
assert sent[0].positions.shape == (24, 8) and (sent[0].positions == 0.5).all() and not loop.fault, (sent, events)
assert not [m for m in sys.modules if m.partition(".")[0] == "rclpy"]
print("chunks", len(sent))
"""


def test_messages_become_trajectories_without_rclpy() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=60)
    assert done.stdout == "chunks 3\n", done.stdout + done.stderr
