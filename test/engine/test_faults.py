"""Every kind of fault at every point of a call: a typed error, and nobody's memory is changed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from test.engine.faulty_path import ERRORS, POINTS, Fault, make_faulty
from test.engine.tiny_policy import look, make_policy, same
from wam_policy_ros.contract.errors import EngineError, NotDeterministic, Overloaded, PolicyLost
from wam_policy_ros.engine.config import EngineConfig

FUSED = EngineConfig(evaluations=5, step="fused")
PATHS = {"fused": FUSED, "plain": EngineConfig(evaluations=5, deterministic=True)}
"""The deterministic tier audits a call until one has succeeded, which takes time: on one path."""
FRAMES = (1, 4, 4, 4, 4)
"""Of a session's calls: the window begins, goes on, is full at the fourth later call, begins again."""

WANTED = {"memory": Overloaded, "library memory": Overloaded, "undetermined": NotDeterministic, "nan": EngineError}
"""Kind -> error; any other is an error of whatever the path raised."""

KINDS = {"no memory": ["memory", "library memory"], "others": ["kernel", "undetermined", "nan"]}
assert {k for kinds in KINDS.values() for k in kinds} == {*ERRORS, "nan"} - {"sticky"}
NANS = [Fault("evaluate", "nan", 1), Fault("evaluate", "nan", 5), Fault("video", "nan", 16), Fault("video", "nan", 3)]
NANS += [Fault("prefill", "nan"), Fault("text", "nan", 1), Fault("text", "nan", 2)]


def script(spec, session):
    """What a session of this number sees."""
    return [look(spec, 100 * session + i, frames=f, prompt=f"task {session}") for i, f in enumerate(FRAMES)]


@pytest.fixture(scope="module", params=list(PATHS))
def world(request):
    """The configuration, and what two sessions get when nothing fails."""
    policy = make_policy(PATHS[request.param])
    alone = []
    for number in range(2):
        session = policy.open()
        alone.append([policy.infer(session, o) for o in script(policy.spec, number)])
    return PATHS[request.param], alone


def faults(kinds):
    for kind in kinds:
        # Where these are told from others is one place.
        told = {"library memory": ("evaluate",), "undetermined": ("evaluate",), "nan": ()}
        points = told.get(kind, POINTS)
        yield from (Fault(p, kind, n) for p in points for n in ((1, 3) if p == "evaluate" else (1,)))
        yield from NANS if kind == "nan" else ()


@pytest.mark.parametrize("at", [0, 2], ids=["its first call", "later"])
@pytest.mark.parametrize("world", ["fused"], indirect=True)
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_a_call_that_fails_changes_nothing_for_anybody(world, kinds, at):
    """Bits are those of a run without faults, of its own session and of the other, wherever it failed."""
    changes_nothing(*world, kinds, at)


@pytest.mark.parametrize("world", ["plain"], indirect=True)
def test_nor_on_the_plain_path(world):
    changes_nothing(*world, ["kernel", "nan"], 2)


def changes_nothing(config, alone, kinds, at):
    policy, path = make_faulty(config)
    sessions = [policy.open(), policy.open()]
    for i in range(len(FRAMES)):
        for number, session in enumerate(sessions):
            seen = script(policy.spec, number)[i]
            for fault in faults(kinds) if (number, i) == (0, at) else ():
                if fault.point == ("encode" if at == 0 else "first frame"):
                    continue  # not on the way of this call
                path.arm(fault)
                with pytest.raises(WANTED.get(fault.kind, RuntimeError)) as caught:
                    policy.infer(session, seen)
                    pytest.fail(f"{fault} did not show")
                assert path.struck[-1] == fault and session.step == at
                assert fault.kind != "nan" or "is not finite; the session is unchanged" in str(caught.value)
            assert same(policy.infer(session, seen), alone[number][i]), (number, i)
    assert policy.lost is None and path.device.asked == len(path.struck), "the device was asked after each"
    for session in sessions:
        policy.close(session)
    pool = getattr(path.inner, "pool", None)
    assert pool is None or pool.made == pool.idle


def test_rows_of_a_step_that_was_given_up_are_never_read(world):
    """The fused window is written in place: everything behind what the session has seen is made NaN."""
    config, alone = world
    policy = make_policy(config)
    session = policy.open()
    for i, seen in enumerate(script(policy.spec, 0)):
        slot = session.window.slot
        with torch.inference_mode():
            for rows in (*slot.k, *slot.v) if slot is not None else ():
                rows[:, session.window.cached :].fill_(float("nan"))
        assert same(policy.infer(session, seen), alone[0][i])


def test_a_full_window_that_could_not_begin_again_begins_again(world):
    """It is written over at once, so the call that failed there has left nothing of the old one: nor is it read."""
    config, alone = world
    policy, path = make_faulty(config)
    session = policy.open()
    seen = script(policy.spec, 0)
    for i, observation in enumerate(seen):
        if i == len(seen) - 1:
            for fault in (Fault("prefill", "nan"), Fault("evaluate", "kernel", 2), Fault("evaluate", "memory")):
                path.arm(fault)
                with pytest.raises((RuntimeError, EngineError, Overloaded)):
                    policy.infer(session, observation)
        assert same(policy.infer(session, observation), alone[0][i])
    assert alone[0][-1].reset is not None, "the script is long enough for a full window"


@pytest.mark.parametrize("point", POINTS)
def test_a_device_that_is_lost_is_said_at_once_and_asked_nothing_more(point):
    policy, path = make_faulty(FUSED)
    session = policy.open()
    for i in range(2):
        policy.infer(session, script(policy.spec, 0)[i])
    path.arm(Fault(point, "sticky"))
    seen = replace(script(policy.spec, 0)[2], prompt="another" if point == "first frame" else "task 0")
    assert policy.lost is None
    with pytest.raises(PolicyLost, match=r"illegal memory access.*remedy: restart the process"):
        policy.infer(session, seen)
    asked = path.device.asked
    assert asked == 1 and isinstance(policy.lost, PolicyLost)
    with pytest.raises(PolicyLost):
        policy.infer(policy.open(), script(policy.spec, 1)[0])
    assert path.device.asked == asked, "no call is made on it, and it is not asked again and again"
    policy.close(session)


def test_the_text_decides_nothing():
    """The same words from a device that answers are an error of one call."""
    policy, path = make_faulty(FUSED)
    session, seen = policy.open(), script(policy.spec, 0)[0]
    path.device.sticks = False
    path.arm(Fault("prefill", "sticky"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        policy.infer(session, seen)
    assert policy.lost is None and policy.infer(session, seen).step == 0
