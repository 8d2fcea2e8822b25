"""A copied window: it and its origin go on alike, bit for bit, and neither notices the other."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from test.engine.tiny_policy import look, make_policy, same
from wam_policy_ros.contract.errors import Overloaded
from wam_policy_ros.engine import window_slots
from wam_policy_ros.engine.config import EngineConfig

PLAIN = EngineConfig(evaluations=5)
FUSED = replace(PLAIN, step="fused")
WAYS = {"plain": PLAIN, "fused": FUSED, "apart": replace(FUSED, branches="apart")}
PLAN = (1, 4)


def no_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("out of memory")


def pools(policy):
    path = policy.path
    return [p.pool for p in (path, getattr(path, "local", None), getattr(getattr(path, "far", None), "path", None))
            if hasattr(p, "pool")]  # fmt: skip


def begun(policy):
    session = policy.open()
    for i, frames in enumerate(PLAN):
        policy.infer(session, look(policy.spec, i, frames=frames))
    return session


def copied(policy, session):
    """A session that goes on from where another one is."""
    other = policy.open()
    other.history, other.step = session.history.copy(), session.step
    other.window = policy.path.cloned(session.window)
    return other


def after(policy, session, seed):
    """Until the window was full and has restarted."""
    return [policy.infer(session, look(policy.spec, seed + i, frames=4)) for i in range(4)]


@functools.cache
def alone(way, seed):
    """What a session gives that nobody copies."""
    policy = make_policy(WAYS[way])
    return after(policy, begun(policy), seed)


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


@pytest.fixture
def policy(way):
    return make_policy(WAYS[way])


def test_both_go_on_alike_and_apart(policy, way):
    expected, others = alone(way, 20), alone(way, 50)
    session = begun(policy)
    twin, third = copied(policy, session), copied(policy, session)
    mixed = []
    for i in range(4):  # in turn: what one writes must not show in another
        for who, seed in ((session, 20), (third, 50), (twin, 20)):
            mixed.append(policy.infer(who, look(policy.spec, seed + i, frames=4)))
    assert all(same(a, b) for a, b in zip(mixed[0::3], expected, strict=True))
    assert all(same(a, b) for a, b in zip(mixed[2::3], expected, strict=True))
    assert all(same(a, b) for a, b in zip(mixed[1::3], others, strict=True))
    assert not same(expected[0], others[0])


def test_a_copy_outlives_its_origin(policy, way):
    expected = alone(way, 20)
    session = begun(policy)
    twin = copied(policy, session)
    policy.close(session)
    other = begun(policy)  # in the memory of the closed one
    assert all(same(a, b) for a, b in zip(after(policy, twin, 20), expected, strict=True))
    policy.close(other)


def test_before_the_first_call_there_is_nothing_to_copy(policy):
    session, plain = policy.open(), policy.open()
    twin = copied(policy, session)
    assert same(policy.infer(twin, look(policy.spec, 0)), policy.infer(plain, look(policy.spec, 0)))


def test_no_memory_for_a_copy_changes_nothing(monkeypatch, policy, way):
    expected = alone(way, 20)
    session = begun(policy)
    held = [(p.made, p.idle) for p in pools(policy)]
    if way == "plain":
        monkeypatch.setattr(torch.Tensor, "clone", no_memory)
    else:
        # The far side, which is asked first, has memory for it where branches are apart.
        monkeypatch.setattr(pools(policy)[0], "acquire", window_slots.SlotPool(pools(policy)[0].layout).acquire)
        monkeypatch.setattr(window_slots, "WindowSlot", no_memory)
    with pytest.raises(Overloaded):
        policy.path.cloned(session.window)
    monkeypatch.undo()
    assert [(p.made, p.idle) for p in pools(policy)] == held
    assert all(same(a, b) for a, b in zip(after(policy, session, 20), expected, strict=True))


def test_a_slot_is_copied_bit_for_bit_and_given_back_when_that_fails(monkeypatch):
    policy = make_policy(FUSED)
    pool, slot = policy.path.pool, begun(policy).window.slot
    with torch.inference_mode():
        for i, tensor in enumerate(slot.tensors()):
            tensor.view(torch.uint8).fill_(17 + i)  # whatever it means
    twin = pool.clone(slot)
    assert twin.index != slot.index and twin.loaded == slot.loaded and twin.loaded is not slot.loaded
    for a, b in zip(slot.tensors(), twin.tensors(), strict=True):
        assert a.view(torch.uint8).equal(b.view(torch.uint8)) and a.data_ptr() != b.data_ptr()
    pool.release(twin)
    monkeypatch.setattr(window_slots.WindowSlot, "copy_", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        pool.clone(slot)
    assert (pool.made, pool.idle) == (2, 1)


def test_a_slot_has_no_tensor_that_is_not_copied():
    """A buffer that is added to the slot and not to the list would be shared by nobody and copied by nobody."""
    slot = make_policy(FUSED).path.pool.acquire()
    held = [v for value in vars(slot).values() for v in (value if isinstance(value, tuple) else (value,))]
    assert {id(t) for t in held if isinstance(t, torch.Tensor)} == {id(t) for t in slot.tensors()}
