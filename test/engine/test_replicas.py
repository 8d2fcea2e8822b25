"""Replicas: processes that serve sessions side by side, die alone, come back, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from test.engine import replica_fakes as fakes
from wam_policy_ros.contract.errors import (
    Cancelled,
    ConfigError,
    EngineError,
    InvalidState,
    PolicyUnavailable,
    ReplicaDied,
    SessionError,
)
from wam_policy_ros.contract.fakes import example_observation
from wam_policy_ros.contract.places import Placed
from wam_policy_ros.contract.policy_thread import Phase, PolicyThread, Priority
from wam_policy_ros.engine.replicas.build import replica_device
from wam_policy_ros.engine.replicas.policy import Replicas
from wam_policy_ros.engine.replicas.replica import Care

QUICK = Care(restart_s=0.05, healthy_s=60.0, max_restarts=3)


def wait_for(true, timeout_s=20.0):
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.005)


def look(policy, prompt="go", **options):
    return replace(example_observation(policy.spec, prompt=prompt, **options), want_video=False)


def process_of(chunk):
    return int(chunk.actions[0, 0])


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture
def pair():
    lines = []
    policy = Replicas(fakes.sleeper, 2, care=QUICK, log=lambda level, line: lines.append(line))
    policy.lines = lines
    yield policy
    policy.disconnect()


class Owned:
    """A policy of replicas with its owner."""

    def __init__(self, factory, count, care=QUICK):
        self.lines = []
        self.policy = None

        def build(progress):
            self.policy = Replicas(factory, count, progress=progress, care=care)
            return self.policy

        self.owner = PolicyThread(build, log=lambda level, line: self.lines.append(line), warm_up=False)
        self.owner.start()
        wait_for(lambda: self.owner.status.phase in (Phase.READY, Phase.FAILED))

    def step(self, session, lane, prompt="go", **options):
        """Submit a step of ``session``, a list with the policy's session or without one yet."""

        def work(policy, cancelled):
            if not session:
                session.append(policy.open(lane))
            return policy.infer(session[0], look(policy, prompt), cancelled=cancelled)

        return self.owner.submit(work, lane=lane, about=lambda: session[0] if session else None, **options)


@pytest.fixture
def owned():
    made = []

    def make(*args, **options):
        made.append(Owned(*args, **options))
        return made[-1]

    yield make
    for one in made:
        assert one.owner.stop(10)


def test_sessions_go_to_the_one_with_the_fewest_and_stay(pair):
    assert isinstance(pair, Placed) and pair.spec.details["replicas"] == 2
    sessions = [pair.open(f"s{i}") for i in range(4)]
    assert [s.place for s in sessions] == [0, 1, 0, 1]
    seen = [[process_of(pair.infer(s, look(pair))) for s in sessions] for _ in range(2)]
    assert seen[0] == seen[1] and len(set(seen[0])) == 2 and os.getpid() not in seen[0]
    pair.close(sessions[0])
    pair.close(sessions[2])
    assert [pair.open().place for _ in range(2)] == [0, 0]


def test_errors_videos_and_cancellation_cross_the_pipe(pair):
    session = pair.open("a-name")
    with pytest.raises(InvalidState) as caught:
        pair.infer(session, look(pair, "bad state"))
    assert (caught.value.field, caught.value.remedy) == ("joint_position", "another one")
    assert "no such state; got: [1.0]; remedy" in str(caught.value)
    with pytest.raises(EngineError, match="ValueError: a bug"):
        pair.infer(session, look(pair, "bug"))
    chunk = pair.infer(session, replace(look(pair), want_video=True))
    assert pair.render_video(chunk).tolist() == np.full((1, 2, 2, 3), len("a-name")).tolist()
    assert pair.infer(session, look(pair)).video is None
    with pytest.raises(SessionError):
        pair.places[1 - session.place].infer(session, look(pair))
    pair.close(session)
    with pytest.raises(SessionError, match="closed"):
        pair.infer(session, look(pair))


def test_a_cancelled_step_ends_early_and_the_next_one_is_sound():
    policy = Replicas(fakes.slow, 1, care=QUICK)
    try:
        session = policy.open()
        asked = []
        with pytest.raises(Cancelled):
            policy.infer(session, look(policy), cancelled=lambda: asked.append(1) or True)
        assert asked and policy.infer(session, look(policy), cancelled=lambda: False).step == 0
    finally:
        policy.disconnect()


def test_two_replicas_do_nearly_twice_as_much_as_one(owned):
    def seconds(count):
        one = owned(fakes.slow, count)
        sessions = [[] for _ in range(4)]
        for i, session in enumerate(sessions):  # opened one after the other, so that each replica has its share
            one.step(session, f"c{i}").result(20)
        begin = time.monotonic()
        tickets = [one.step(s, f"c{i}") for _ in range(4) for i, s in enumerate(sessions)]
        steps = [t.result(30).step for t in tickets]
        assert sorted(steps) == sorted([1, 2, 3, 4] * 4)
        return time.monotonic() - begin

    ratio = seconds(1) / seconds(2)
    assert 1.6 < ratio < 2.1, ratio


def test_the_robot_comes_first_where_its_session_is_and_elsewhere_nobody_notices(owned):
    one = owned(fakes.slow, 2)
    robot, clients = [], [[], [], []]
    one.step(robot, "robot", priority=Priority.ROBOT).result(20)
    for i, client in enumerate(clients):
        one.step(client, f"c{i}").result(20)
    (beside,) = [i for i, c in enumerate(clients) if c[0].place == robot[0].place]  # four sessions on two replicas
    tickets = [one.step(c, f"c{i}", "long") for i, c in enumerate(clients)]
    wait_for(lambda: tickets[beside].started_s is not None)
    mine = one.step(robot, "robot", priority=Priority.ROBOT, newest_wins=True, preempt=True)
    for ticket in (mine, *tickets):
        ticket.result(20)
    assert mine.ended_s < tickets[beside].ended_s
    assert [t.preemptions for t in tickets] == [int(i == beside) for i in range(3)]


def test_kill_9_is_a_fault_of_its_own_sessions_and_it_comes_back(owned):
    one = owned(fakes.slow, 2)
    a, b = [], []
    pids = [process_of(one.step(s, n).result(20)) for s, n in ((a, "a"), (b, "b"))]
    running = one.step(a, "a", "hang"), one.step(b, "b", "long")
    wait_for(lambda: all(t.started_s is not None for t in running))
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(ReplicaDied, match=r"SIGKILL.*new one"):
        running[0].result(20)
    assert isinstance(ReplicaDied("x"), PolicyUnavailable)  # the robot's node goes on with a new session
    assert process_of(running[1].result(20)) == pids[1]
    with pytest.raises(ReplicaDied):
        one.step(a, "a").result(20)
    wait_for(lambda: not one.policy.places[a[0].place].trouble)
    with pytest.raises(ReplicaDied, match="since this session began"):
        one.step(a, "a").result(20)
    fresh = []
    chunk = one.step(fresh, "a").result(20)
    assert fresh[0].place == a[0].place and chunk.step == 0 and process_of(chunk) not in pids
    assert one.step(b, "b").result(20).step == 2
    assert one.owner.trouble() is None and "2 of 2" in one.owner.capacity()
    restarts = {p.index: p.details["restarts"] for p in one.owner.places}
    assert restarts == {a[0].place: 1, b[0].place: 0}


def test_one_that_loses_a_gpu_is_as_dead_as_a_killed_one_and_comes_back(owned):
    one = owned(fakes.sleeper, 2)
    a, b = [], []
    pids = [process_of(one.step(s, n).result(20)) for s, n in ((a, "a"), (b, "b"))]
    with pytest.raises(ReplicaDied, match=r"lost a GPU; got: rank 1.*new one"):
        one.step(a, "a", "lose").result(20)
    assert one.policy.places[a[0].place].trouble
    assert process_of(one.step(b, "b").result(20)) == pids[1]
    wait_for(lambda: not one.policy.places[a[0].place].trouble)
    assert one.owner.trouble() is None and one.owner.capacity() == "2 of 2 replicas"


def test_while_one_is_away_the_other_takes_new_sessions_and_readiness_says_so(owned):
    one = owned(fakes.sleeper, 2, care=replace(QUICK, restart_s=30.0))
    a = []
    pid = process_of(one.step(a, "a").result(20))
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: one.policy.places[a[0].place].trouble)
    assert one.owner.trouble() is None
    assert "1 of 2 replicas" in one.owner.capacity() and "SIGKILL" in one.owner.capacity()
    others = [[] for _ in range(3)]
    assert {process_of(one.step(s, f"n{i}").result(20)) for i, s in enumerate(others)} != {pid}
    assert {s[0].place for s in others} == {1 - a[0].place}
    os.kill(process_of(one.step(others[0], "n0").result(20)), signal.SIGKILL)
    wait_for(lambda: all(p.trouble for p in one.policy.places))
    assert "replica 0" in one.owner.trouble() and "replica 1" in one.owner.trouble()
    with pytest.raises(ReplicaDied):
        one.step([], "late").result(20)


def test_one_that_does_not_come_back_is_left_away_and_said(owned, tmp_path, monkeypatch):
    monkeypatch.setenv("WAM_TEST_FOLDER", str(tmp_path))
    lines = []
    policy = Replicas(fakes.not_again, 2, care=QUICK, log=lambda level, line: lines.append(line))
    try:
        os.kill(policy.places[0].details["pid"], signal.SIGKILL)
        wait_for(lambda: "not started again" in policy.places[0].trouble, 60)
        assert "fallen off the bus" in policy.places[0].trouble and any("not started again" in line for line in lines)
        assert policy.open().place == 1
    finally:
        policy.disconnect()


def test_a_call_that_hangs_costs_its_replica():
    policy = Replicas(fakes.sleeper, 1, care=replace(QUICK, hang_s=0.3))
    try:
        session = policy.open()
        with pytest.raises(ReplicaDied, match="SIGKILL"):
            policy.infer(session, look(policy, "hang"))
        wait_for(lambda: not policy.places[0].trouble)
        assert policy.infer(policy.open(), look(policy)).step == 0
    finally:
        policy.disconnect()


@pytest.mark.parametrize(
    ("factory", "error", "said"),
    [
        (fakes.refuses, ConfigError, "cuda:1"),
        (fakes.dies_loading, EngineError, "code 9 while it was loading"),
        (fakes.differs, ConfigError, "not the same policy"),
    ],
)
def test_what_keeps_one_from_starting_is_said_and_the_others_end(factory, error, said):
    before = children()
    with pytest.raises(error, match=said):
        Replicas(factory, 2, care=QUICK)
    wait_for(lambda: children() == before)


def children():
    me = os.getpid()
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == me and state != "Z":
            found.add(int(stat.parent.name))
    return found


def test_opening_and_closing_leaves_nothing_behind():
    before = children(), len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        policy = Replicas(fakes.sleeper, 2, care=QUICK)
        pids = [p.details["pid"] for p in policy.places]
        for i in range(20):
            session = policy.open(f"s{i}")
            policy.infer(session, look(policy))
            policy.close(session)
            policy.close(session)
        assert [p.sessions for p in policy.places] == [0, 0]
        policy.disconnect()
        policy.disconnect()
        assert all(gone(pid) for pid in pids)
    wait_for(lambda: (children(), len(os.listdir("/proc/self/fd")), threading.active_count()) == before)


PARENT = """
import sys, time
from test.engine import replica_fakes as fakes
from test.engine.test_replicas import look
from wam_policy_ros.engine.replicas.build import replica_device
from wam_policy_ros.engine.replicas.policy import Replicas
if __name__ == "__main__":
    policy = Replicas(fakes.sleeper, 2)
    print(*(p.details["pid"] for p in policy.places), flush=True)
    policy.infer(policy.open(), look(policy, "hang"))
"""


def test_they_end_with_the_process_that_started_them_even_when_it_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(root)}
    ) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2 and not any(gone(pid) for pid in pids)
        parent.kill()
        wait_for(lambda: all(gone(pid) for pid in pids), 5)


def test_bits_are_those_of_one_process():
    torch = pytest.importorskip("torch")
    from test.engine.tiny_policy import make_policy

    torch.set_num_threads(1)
    here = make_policy()
    policy = Replicas(fakes.tiny, 2)
    try:
        mine, theirs = [here.open("a"), here.open("b")], [policy.open("a"), policy.open("b")]
        assert [s.place for s in theirs] == [0, 1]
        for call in range(2):
            for k in (0, 1):
                observation = example_observation(here.spec, frames=1 if call == 0 else 4, seed=10 * call + k)
                got, expected = policy.infer(theirs[k], observation), here.infer(mine[k], observation)
                assert got.actions.tobytes() == expected.actions.tobytes() and got.step == expected.step == call
        assert policy.render_video(got).tobytes() == here.render_video(expected).tobytes()
        # A fork stays in its parent's process.
        twins = here.fork(mine[1], "c", seed=7), policy.fork(theirs[1], "c", seed=7)
        assert twins[1].place == 1 and [p.sessions for p in policy.places] == [1, 2]
        observation = example_observation(here.spec, frames=4, seed=30)
        for ours, other in zip((mine[1], twins[0]), (theirs[1], twins[1]), strict=True):
            expected, got = here.infer(ours, observation), policy.infer(other, observation)
            assert got.actions.tobytes() == expected.actions.tobytes() and got.step == expected.step == 2
    finally:
        policy.disconnect()


@pytest.mark.parametrize(
    ("device", "gpus", "each", "expected"),
    [
        ("auto", 4, 1, ["cuda:0", "cuda:1"]),
        ("cuda", 4, 2, ["cuda:0", "cuda:2"]),
        ("auto", 0, 1, ["cpu", "cpu"]),
        ("cpu", 4, 1, ["cpu", "cpu"]),
        ("cuda:3, cuda:1", 4, 1, ["cuda:3", "cuda:1"]),
    ],
)
def test_every_replica_has_gpus_of_its_own(device, gpus, each, expected):
    assert [replica_device(device, i, gpus, each=each) for i in range(2)] == expected


@pytest.mark.parametrize(
    ("device", "gpus", "each", "said"),
    [
        ("auto", 1, 1, "at most 1"),
        ("cuda", 3, 2, "at most 1"),
        ("cuda:0", 4, 1, "share"),
        ("cuda:0,cuda:1", 4, 1, "more"),
    ],
)
def test_where_there_is_none_left_that_is_said(device, gpus, each, said):
    with pytest.raises(ConfigError, match=said):
        for i in range(3):
            replica_device(device, i, gpus, each=each)
