"""A process of a policy on several GPUs that dies or hangs, or whose leader does: told in time, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from test.engine.several import alive, make_several, nothing_is_left, ranks_of, run, several, wait_for
from test.engine.tiny_policy import look, make_policy, same
from wam_policy_ros.contract.errors import NotReady, Overloaded, PolicyLost
from wam_policy_ros.contract.policy_thread import Phase, PolicyThread
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.parallel.keeper import Keeper
from wam_policy_ros.engine.parallel.ranks import Ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="PyTorch was built without torch.distributed")

DEADLINE_S = 2.0
TWO = EngineConfig(evaluations=5, gpus=2, rank_deadline_s=DEADLINE_S)
FUSED = replace(TWO, step="fused")


no_leftovers = pytest.fixture(autouse=True)(nothing_is_left)


def test_a_failure_in_the_midst_of_a_shared_branch_is_a_lost_policy(monkeypatch):
    """The other rank waits in an exchange that nothing ends."""
    policy = make_several(replace(FUSED, guidance_scale=1.0))
    run(policy, (1,))

    def broken(*args, **kwargs):
        raise Overloaded("no memory")

    monkeypatch.setattr(policy.path.local, "evaluate_branch", broken)
    session = policy.open()
    with pytest.raises(Overloaded):
        policy.infer(session, look(policy.spec, 0, frames=1))
    assert "no memory" in str(policy.lost)
    policy.close(session)
    policy.disconnect()


def test_a_rank_that_dies_hangs_or_does_not_answer_is_a_typed_fault_in_time_and_the_next_policy_works():
    """One after the other in this process."""
    dies_before_the_processes_have_met()
    for config, strike in ((TWO, dies_in_mid_step), (FUSED, hangs_in_mid_step), (TWO, runs_but_does_not_answer)):
        with several(config) as policy:
            one = make_policy(replace(config, gpus=1, branches="apart" if config.step == "fused" else "together"))
            assert all(same(a, b) for a, b in zip(run(policy, (1, 4)), run(one, (1, 4)), strict=True))
            strike(policy)
            assert policy.lost is not None


def dies_in_mid_step(policy):
    is_struck_in_mid_step(policy, signal.SIGKILL, "SIGKILL")


def hangs_in_mid_step(policy):
    is_struck_in_mid_step(policy, signal.SIGSTOP, "not")


def is_struck_in_mid_step(policy, number, words):
    """The second time at a place of the window: what is done for the first time may take long."""
    (pid,) = ranks_of(policy).pids
    session = policy.open()
    policy.infer(session, look(policy.spec, 0, frames=1))
    asked = iter(range(100))

    def strike():
        if next(asked) == 2:
            os.kill(pid, number)
        return False

    start_s = time.monotonic()
    with pytest.raises(PolicyLost, match=f"rank 1.*{words}|another GPU.*{words}") as caught:
        policy.infer(session, look(policy.spec, 2, frames=4), cancelled=strike)
    assert time.monotonic() - start_s < 2.5 * DEADLINE_S
    assert "load the policy again" in str(caught.value) and policy.lost is not None
    wait_for(lambda: not alive(pid), 2.0)
    with pytest.raises(PolicyLost):
        policy.infer(session, look(policy.spec, 3, frames=4))
    with pytest.raises(PolicyLost):
        run(policy, (1,))
    policy.close(session)


def dies_before_the_processes_have_met():
    """What waits for it in torch.distributed waits for a day."""
    send = Ranks.send

    def strike(self, name, *content):
        if name == "join":
            os.kill(self.pids[0], signal.SIGKILL)
        send(self, name, *content)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(PolicyLost, match=r"rank 1.*SIGKILL"):
        patch.setattr(Ranks, "send", strike)
        start_s = time.monotonic()
        try:
            make_several(TWO)
        finally:
            assert time.monotonic() - start_s < 30.0


def runs_but_does_not_answer(policy):
    """Lost in time as well. Its threads live, so that it is heard of; nobody asked it, so it says nothing."""
    start_s = time.monotonic()
    with pytest.raises(PolicyLost, match="in time"):
        ranks_of(policy).answers()
    # The limit is counted down by a thread that looks now and then, so it may be over a little early.
    assert 0.7 * DEADLINE_S < time.monotonic() - start_s < 2 * DEADLINE_S


def test_the_owner_of_a_lost_policy_is_not_ready_and_lets_go_of_it():
    """Also when nobody calls it at that moment. Then it can be loaded again."""
    made, lines = [], []

    def factory(progress):
        made.append(make_several(TWO))
        return made[-1]

    owner = PolicyThread(factory, log=lambda level, text: lines.append(text))
    owner.start()
    wait_for(lambda: owner.status.phase is Phase.READY, 60.0)
    (pid,) = ranks_of(made.pop()).pids
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: owner.status.phase is Phase.FAILED, 5 * DEADLINE_S)
    assert "lost a GPU" in (owner.trouble() or "") and "not been heard of" in owner.status.message
    with pytest.raises(NotReady):
        owner.submit(lambda policy, cancelled: None, lane="late")
    wait_for(lambda: not owner.alive and not alive(pid), 5.0)
    assert any("the policy failed" in line for line in lines)


def test_a_job_of_a_policy_that_is_lost_gets_that_error():
    made = []

    def factory(progress):
        made.append(make_several(TWO))
        return made[-1]

    owner = PolicyThread(factory, log=lambda level, text: None, warm_up=False)
    owner.start()
    wait_for(lambda: owner.status.phase is Phase.READY, 60.0)
    (pid,) = ranks_of(made.pop()).pids

    def job(policy, cancelled):
        session = policy.open()
        policy.infer(session, look(policy.spec, 0, frames=1))
        os.kill(pid, signal.SIGKILL)
        policy.infer(session, look(policy.spec, 1, frames=4))

    ticket = owner.submit(job, lane="a")
    with pytest.raises(PolicyLost):
        ticket.result(20.0)
    wait_for(lambda: not owner.alive, 5.0)
    assert owner.status.phase is Phase.FAILED


def test_an_owner_that_stops_ends_the_processes():
    made = []

    def factory(progress):
        made.append(make_several(TWO))
        return made[-1]

    owner = PolicyThread(factory, log=lambda level, text: None)
    owner.start()
    wait_for(lambda: owner.status.phase is Phase.READY, 60.0)
    pids = ranks_of(made.pop()).pids
    assert owner.stop(10.0) and not any(map(alive, pids))


LEADER = """
import sys, time
from test.engine.several import make_several, ranks_of, run
from wam_policy_ros.engine.config import EngineConfig
policy = make_several(EngineConfig(evaluations=5, gpus=2))
print(*ranks_of(policy).pids, flush=True)
run(policy, (1,))
print("ran", flush=True)
{then}
"""


def leader(then):
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    process = subprocess.Popen(
        [sys.executable, "-c", LEADER.format(then=then)], stdout=subprocess.PIPE, text=True, env=environment, cwd=root
    )
    pids = [int(word) for word in process.stdout.readline().split()]
    assert process.stdout.readline() == "ran\n"
    return process, pids


def test_no_process_outlives_a_leader_that_is_killed(tmp_path, monkeypatch):
    """Not even one that is stopped, and cannot notice. No folder is needed, and nothing is left in any."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process, pids = leader("time.sleep(100)")
    assert all(map(alive, pids))
    os.kill(pids[0], signal.SIGSTOP)
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(alive, pids)), 3.0)
    assert list(tmp_path.iterdir()) == []


def test_no_process_outlives_a_leader_that_just_ends():
    """Without closing anything, and with a code that says it went well."""
    process, pids = leader("")
    assert process.wait(20) == 0
    wait_for(lambda: not any(map(alive, pids)), 3.0)


def test_a_message_to_a_process_that_has_just_ended_says_how_it_ended(monkeypatch):
    """Whoever notices it first, the thread that listens or the one that speaks."""
    policy = make_several(TWO)
    ranks = ranks_of(policy)
    (pid,) = ranks.pids
    monkeypatch.setattr(Keeper, "_listen", lambda self, index, pipe: time.sleep(0.05))
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: ranks.send("report", 0) or ranks.lost is not None, 5.0)
    assert "SIGKILL" in str(ranks.lost)
    monkeypatch.undo()
    policy.disconnect()


def test_a_follower_that_cannot_begin_is_told():
    """The folder has gone when it wants to read it; what it says comes through."""
    with pytest.raises(PolicyLost, match=r"rank 1.*needs|rank 1.*failed"):
        make_several(replace(TWO, dtype="float32"), devices=["cpu", "cuda:7"])
    assert not dist.is_initialized()
