"""A policy that looks back at other moments than its embodiment's: the checkpoint says so, the node follows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from test.ros.rig import DT, Rig, wander
from wam_policy_ros.contract.errors import ConfigError


def other(*offsets: int):
    policy = wander()
    policy.spec = replace(policy.spec, frame_offsets=offsets)
    return policy


def test_frames_are_taken_where_the_policy_looks():
    rig = Rig(other(-6, -4, -2, 0))
    rig.play(4.0)
    inputs = rig.run.robot.inputs
    pending = inputs.snapshot(rig.run.clock(), 0, "stir")
    for frames in pending.frames.values():
        steps = [round((f.stamp_ns - pending.stamp_ns) / (DT * 1e9)) for f in frames]
        assert steps == [-6, -4, -2, 0]
    assert rig.plans and not pending.padded


def test_a_policy_that_looks_further_back_than_frames_are_kept_is_refused():
    with pytest.raises(ConfigError, match="further back"):
        Rig(other(-40, 0))
