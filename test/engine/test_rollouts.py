"""Rollouts of the network: many at once are what each is alone, and a step that is given up leaves no trace."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import pytest

from test.engine.tiny_policy import look, make_network, make_policy, same
from wam_policy_ros.contract.rollouts import Rollouts
from wam_policy_ros.engine.config import EngineConfig

PLAIN, FUSED = EngineConfig(evaluations=5), EngineConfig(evaluations=5, step="fused", deterministic=True)
FRAMES = (1, 4, 4)


class Held:
    """A policy whose evaluations wait, on demand, until they are told to end."""

    def __init__(self, policy):
        self._policy, self.hold, self.entered = policy, False, threading.Event()

    def __getattr__(self, name):
        return getattr(self._policy, name)

    def infer(self, session, observation, *, cancelled):
        def asked():
            self.entered.set()
            while self.hold and not cancelled():
                time.sleep(0.001)
            return cancelled()

        return self._policy.infer(session, observation, cancelled=asked)


@pytest.mark.parametrize("config", [PLAIN, FUSED], ids=["plain", "fused, deterministic"])
def test_together_is_what_each_is_alone(config):
    policy = make_policy(config, network=make_network() if config.step == "fused" else None)
    looks = [[look(policy.spec, 10 * k + i, frames=n) for i, n in enumerate(FRAMES)] for k in range(3)]
    alone = []
    for k in range(3):
        session = policy.open("s", seed=k)
        alone.append([policy.infer(session, o) for o in looks[k]])
        policy.close(session)
    held = Held(policy)

    async def main():
        async with Rollouts(lambda progress: held) as rollouts:
            episodes = [await rollouts.open(seed=k) for k in range(3)]
            for call in range(2):
                found = await rollouts.step({e: looks[k][call] for k, e in enumerate(episodes)})
                assert all(same(found[e], alone[k][call]) for k, e in enumerate(episodes))
            child = await episodes[0].fork()
            held.hold = True
            held.entered.clear()
            given_up = asyncio.create_task(rollouts.step({e: look(policy.spec, 99) for e in episodes}))
            while not held.entered.is_set():
                await asyncio.sleep(0.001)
            given_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given_up
            held.hold = False
            assert [e.steps for e in episodes] == [2, 2, 2]
            found = await rollouts.step({e: looks[k][2] for k, e in enumerate(episodes)} | {child: looks[0][2]})
            assert all(same(found[e], alone[k][2]) for k, e in enumerate(episodes))
            assert same(found[child], alone[0][2])
            other = await rollouts.open(seed=1)
            await other.step(replace(looks[0][0], prompt="something else"))
            await other.reset()
            assert same(await other.step(looks[1][0]), alone[1][0])

    asyncio.run(main())
    if config is FUSED:
        assert policy.path.pool.made == len(policy.path.pool.free)
    assert policy.details.get("sessions_open", 0) == 0 and not policy.admission.sessions
