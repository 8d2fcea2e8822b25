from __future__ import annotations

import gc
import weakref

import numpy as np

from wam_policy_ros.contract.fakes import HoldPolicy, ScriptedPolicy, example_observation
from wam_policy_ros.contract.interface import Observation


def rows(observation: Observation, step: int) -> np.ndarray:
    return np.zeros((24, 8))


def test_the_dry_run_keeps_no_observation_and_no_session() -> None:
    policy = HoldPolicy()
    session = policy.open()
    observation = example_observation(policy.spec)
    seen = weakref.ref(observation)
    policy.infer(session, observation)
    kept = weakref.ref(session)
    gc.disable()
    try:
        del observation
        assert seen() is None, "2 MB a call"
        policy.close(session)
        del session
        assert kept() is None and policy.sessions == []
    finally:
        gc.enable()


def test_a_scripted_policy_records_when_asked() -> None:
    policy = ScriptedPolicy(rows, record=True)
    session = policy.open("s")
    observation = example_observation(policy.spec)
    policy.infer(session, observation)
    assert policy.sessions == [session] and session.seen[0] is observation
