"""The window of keys and values: what is appended is read back, forks do not disturb their origin."""

from __future__ import annotations

import pytest
import torch

from wam_policy_ros.contract.errors import EngineError
from wam_policy_ros.engine.kv_cache import KVWindow
from wam_policy_ros.model.attention import KV

LAYERS = 2


def _kv(first, count, batch=1):
    """Keys ``first, first + 1, ...`` and values a hundred more, different per layer."""
    token = torch.arange(first, first + count, dtype=torch.float32).view(1, count, 1, 1).expand(batch, count, 2, 3)
    return [KV(token + 1000 * layer, token + 100 + 1000 * layer) for layer in range(LAYERS)]


def _tokens(window):
    past = window.past()
    if past is None:
        return []
    for layer, kv in enumerate(past):
        assert torch.equal(kv.v - kv.k, torch.full_like(kv.k, 100))
        assert torch.equal(kv.k, past[0].k + 1000 * layer)
    return past[0].k[0, :, 0, 0].int().tolist()


def test_starts_empty_and_takes_memory_on_the_first_append():
    window = KVWindow(10)
    assert window.past() is None and window.nbytes == 0
    window.append(_kv(0, 3))
    assert window.nbytes == LAYERS * 2 * 10 * 2 * 3 * 4


def test_append_in_order_without_moving_the_buffers():
    window = KVWindow(10)
    window.append(_kv(0, 3))
    buffer = window.past()[0].k.data_ptr()
    window.append(_kv(3, 4))
    assert _tokens(window) == list(range(7)) and window.length == 7
    window.append(_kv(7, 3))
    assert _tokens(window) == list(range(10))
    assert window.past()[0].k.data_ptr() == buffer


@pytest.mark.parametrize(("before", "count"), [(9, 2), (10, 1), (10, 10), (7, 9), (4, 7)])
def test_overflow_keeps_the_newest(before, count):
    window = KVWindow(10)
    window.append(_kv(0, before))
    window.append(_kv(before, count))
    assert _tokens(window) == list(range(before + count))[-10:]


@pytest.mark.parametrize("before", [0, 1, 10])
@pytest.mark.parametrize("count", [10, 11, 25])
def test_more_than_the_window_holds(before, count):
    window = KVWindow(10)
    if before:
        window.append(_kv(0, before))
    window.append(_kv(before, count))
    assert _tokens(window) == list(range(before + count))[-10:]


def test_a_fork_can_be_abandoned():
    window = KVWindow(10)
    window.append(_kv(0, 4))
    draft = window.fork()
    draft.append(_kv(90, 3))
    assert _tokens(draft) == [0, 1, 2, 3, 90, 91, 92]
    assert _tokens(window) == [0, 1, 2, 3]
    window.append(_kv(4, 3))
    assert _tokens(window) == list(range(7))


def test_a_fork_that_overflows_can_be_abandoned():
    window = KVWindow(10)
    window.append(_kv(0, 9))
    draft = window.fork()
    draft.append(_kv(90, 4))
    assert _tokens(draft) == [3, 4, 5, 6, 7, 8, 90, 91, 92, 93]
    assert _tokens(window) == list(range(9))
    window.append(_kv(9, 4))
    assert _tokens(window) == list(range(3, 13))


def test_a_fork_of_an_empty_window_is_independent():
    window = KVWindow(10)
    draft = window.fork()
    draft.append(_kv(0, 2))
    assert window.past() is None
    window.append(_kv(5, 1))
    assert _tokens(window) == [5] and _tokens(draft) == [0, 1]


def test_emptied_reuses_the_memory():
    window = KVWindow(10)
    window.append(_kv(0, 6))
    memory = window.past()[0].k.data_ptr()
    fresh = window.emptied()
    assert fresh.past() is None and window.length == 6
    fresh.append(_kv(50, 2))
    assert _tokens(fresh) == [50, 51]
    assert fresh.past()[0].k.data_ptr() == memory


def test_dtype_and_batch_follow_the_first_append():
    window = KVWindow(5)
    window.append([KV(kv.k.bfloat16(), kv.v.bfloat16()) for kv in _kv(0, 2, batch=3)])
    past = window.past()
    assert past[0].k.dtype == torch.bfloat16 and past[1].v.shape == (3, 2, 2, 3)


def test_only_one_fork_lives_on():
    window = KVWindow(10)
    window.append(_kv(0, 4))
    a, b, c = window.fork(), window.fork(), window.fork()
    a.append(_kv(10, 3))
    b.append(_kv(20, 2))
    assert _tokens(b) == [0, 1, 2, 3, 20, 21] and _tokens(window) == _tokens(c) == [0, 1, 2, 3]
    for void in (a, a.fork()):
        with pytest.raises(EngineError, match="overwritten by another fork"):
            void.past()
        with pytest.raises(EngineError, match="7 tokens"):
            void.append(_kv(13, 1))
        for copy in (copied := void.clone(), copied.clone()):
            with pytest.raises(EngineError, match="clone the window"):
                copy.past()
            with pytest.raises(EngineError):
                copy.append(_kv(13, 1))
            assert copy.nbytes == 0
            afresh = copy.emptied()
            afresh.append(_kv(40, 2))
            assert _tokens(afresh) == [40, 41]
    c.append(_kv(30, 1))
    with pytest.raises(EngineError):
        b.past()
    assert _tokens(window.emptied()) == []


def test_a_window_that_was_emptied_under_another_is_void():
    window = KVWindow(10)
    window.append(_kv(0, 6))
    window.emptied().append(_kv(50, 2))
    with pytest.raises(EngineError):
        window.past()


def test_what_overflowed_is_its_own():
    """It has other buffers: neither side can spoil the other any more."""
    window = KVWindow(10)
    window.append(_kv(0, 9))
    draft = window.fork()
    draft.append(_kv(9, 3))
    window.append(_kv(50, 1))
    assert _tokens(draft) == list(range(2, 12)) and _tokens(window) == [*range(9), 50]


@pytest.mark.parametrize("held", [0, 4, 10])
def test_a_clone_and_its_origin_both_go_on(held):
    window = KVWindow(10)
    if held:
        window.append(_kv(0, held))
    other = window.clone()
    assert other.nbytes == window.nbytes and other.capacity == window.capacity
    window.append(_kv(100, 5))
    other.append(_kv(200, 5))
    window.append(_kv(105, 2))
    other.append(_kv(205, 2))
    assert _tokens(window) == [*range(held), *range(100, 107)][-10:]
    assert _tokens(other) == [*range(held), *range(200, 207)][-10:]
