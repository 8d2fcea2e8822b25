"""What memory is spent on, counted to the byte, and how many sessions may be open. No GPU: a budget of host memory."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from test.engine.tiny_policy import look, make_policy, same
from wam_policy_ros.contract.errors import ConfigError, Overloaded
from wam_policy_ros.engine import account, window_slots
from wam_policy_ros.engine.account import account_of, fullest, window_bytes
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.memory import PROMPTS_KEPT, Account, Capacity, Counter, prompt_bytes, sessions_of, shown
from wam_policy_ros.engine.parallel.ranks import RankReport
from wam_policy_ros.engine.policy import with_config, with_schedule

PLAIN = EngineConfig(evaluations=5)
FUSED = replace(PLAIN, step="fused")
WAYS = {
    "plain": PLAIN,
    "fused": FUSED,
    "apart": replace(FUSED, branches="apart"),
    "one branch": replace(PLAIN, guidance_scale=1.0),
}
GIB = 2**30
AROUND = {"window_bytes": 10 * GIB, "prompt_bytes": GIB, "reserve_bytes": 4 * GIB}


# -- arithmetic -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("windows", "sessions", "spare"), [(0, 0, 0), (1, 1, 0), (2, 1, 1), (3, 1, 1), (4, 2, 2), (5, 3, 2), (40, 38, 2)]
)
def test_windows_are_kept_free_for_steps_under_way(windows, sessions, spare):
    assert sessions_of(windows) == (sessions, spare) and sessions + spare <= max(windows, 0)


def test_a_gpu_is_divided_into_sessions():
    """140 GiB: 30 of weights, 2 of libraries, 4 of instructions for nobody, 4 for a step: 100 are 9 windows of 11."""
    taken = Account(
        weights=30 * GIB, beside=2 * GIB, windows=10 * GIB, idle=10 * GIB, instructions=2 * GIB, host=11 * GIB
    )
    assert taken.taken == 54 * GIB and taken.own == 52 * GIB
    found = Capacity.of(taken, **AROUND, budget_bytes=None, free_bytes=86 * GIB)
    assert (found.windows, found.sessions, found.spare, found.budget_bytes) == (9, 7, 2, 140 * GIB)
    assert found.fixed_bytes == (30 + 2 + PROMPTS_KEPT) * GIB and found.session_bytes == 11 * GIB
    assert found.text == (
        "this GPU holds 7 sessions (11.0 GiB each, 2 more for steps under way; 36.0 GiB of 140 GiB taken by weights "
        "30.0 GiB, instructions kept 4.0 GiB, libraries and others 2.0 GiB; 4.0 GiB left for a step)"
    )


def test_what_is_idle_or_used_does_not_change_the_capacity():
    """Windows that exist are room for sessions as much as windows that could be made."""
    free = 86 * GIB
    found = set()
    for windows, idle, prompts in ((10, 10, 2), (20, 0, 0), (0, 0, 0), (40, 40, 3)):
        taken = Account(weights=30 * GIB, windows=windows * GIB, idle=idle * GIB, instructions=prompts * GIB)
        left = free + (22 - windows - idle - prompts) * GIB
        capacity = Capacity.of(taken, **AROUND, budget_bytes=None, free_bytes=left)
        found.add((capacity.sessions, capacity.fixed_bytes, capacity.budget_bytes))
    assert len(found) == 1


def test_the_smaller_of_budget_and_device_counts():
    taken = Account(weights=30 * GIB, beside=50 * GIB)
    of = lambda budget, free: Capacity.of(taken, **AROUND, budget_bytes=budget, free_bytes=free)  # noqa: E731
    assert (of(60 * GIB, 60 * GIB).where, of(60 * GIB, 60 * GIB).windows) == ("this budget", 2)  # 60 - 30 - 4 - 4
    assert (of(600 * GIB, 60 * GIB).where, of(600 * GIB, 60 * GIB).windows) == ("this GPU", 4)  # 60 - 4 - 4
    assert of(60 * GIB, 60 * GIB).budget_bytes == 60 * GIB, "what others take is not this policy's"
    assert of(None, None).sessions is None and "bounds no sessions" in of(None, None).text


def test_the_fullest_gpu_decides():
    reports = [RankReport(i, 0, 0, 0, 0, fit) for i, fit in enumerate((7, None, 4))]
    assert fullest(reports) == 4 and fullest(reports[1:2]) is None
    few = Capacity.of(Account(), **AROUND, budget_bytes=None, free_bytes=1000 * GIB, elsewhere=4)
    assert (few.sessions, few.spare) == (2, 2)


def test_a_window_that_exists_is_one_session():
    """The reserve is an estimate, the window is there."""
    tight = {**AROUND, "budget_bytes": None, "free_bytes": GIB}
    assert Capacity.of(Account(weights=70 * GIB, idle=10 * GIB), **tight).sessions == 1
    none = Capacity.of(Account(weights=70 * GIB), **tight)
    with pytest.raises(ConfigError, match=r"this GPU holds no session.*got: 71.0 GiB.*expected: 89.0 GiB.*preset fp8"):
        none.refuse_none()


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0.0 KiB"), (2000, "2.0 KiB"), (3 << 20, "3.0 MiB"), (GIB // 5, "0.2 GiB"), (139.8 * GIB, "140 GiB")],
)
def test_sizes_for_people(nbytes, text):
    assert shown(nbytes) == text


# -- exactness ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=WAYS)
def policy(request):
    return make_policy(WAYS[request.param])


def test_a_window_takes_what_was_computed(policy):
    """Beside it a session has nothing but its instruction, however often it is called."""
    plan = (1, 4, 4, 4, 4, 4)  # until the window was full and has restarted
    first = policy.open()
    for i, frames in enumerate(plan):  # some tables are made when they are needed
        policy.infer(first, look(policy.spec, i, frames=frames))
    policy.close(first)
    fixed = policy.account
    sessions = [policy.open() for _ in range(2)]
    for i, frames in enumerate(plan):
        for number, session in enumerate(sessions):
            policy.infer(session, look(policy.spec, i, frames=frames, prompt=f"task {number}"))
        now = policy.account
        assert now.windows == 2 * window_bytes(policy.path)
        assert (now.weights, now.inputs, now.noise) == (fixed.weights, fixed.inputs, fixed.noise)
    network = policy.network
    most = prompt_bytes(network.config.dit, network.dtype) + 8 * network.config.dit.text_len  # ids are on the host
    assert now.instructions <= 3 * most and now.idle <= 2 * window_bytes(policy.path)
    if policy.config.step == "plain":
        assert now.instructions == 3 * most  # the negative one is encoded in any case
    for session in sessions:
        policy.close(session)
    assert policy.account.windows == 0 and policy.account.own - policy.account.idle <= now.own - now.windows - now.idle


def test_all_that_is_alive_is_in_the_account(monkeypatch):
    """What the garbage collector finds and the account does not know would be a leak, or a noun that is missing."""
    gc.collect()
    before = storages()
    policy = make_policy(FUSED)
    session = policy.open()
    for i, frames in enumerate((1, 4)):
        policy.infer(session, look(policy.spec, i, frames=frames))
    policy.observe(session, 0, {name: f[0] for name, f in look(policy.spec, 5, frames=4).frames.items()})
    gc.collect()
    new = {key: n for key, n in storages().items() if key not in before}
    counters = []
    monkeypatch.setattr(account, "Counter", lambda device: counters.append(Counter(device)) or counters[-1])
    assert policy.account.frames_ahead >= session.ahead.nbytes > 0
    unknown = sum(n for key, n in new.items() if key not in counters[0].seen)
    # Token ids of the two texts in two forms, and constants that all policies share.
    assert unknown < 5000 < 0.01 * sum(new.values())


def storages():
    found = {}
    for x in gc.get_objects():
        if type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == "cpu":
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return found


def test_a_tensor_is_counted_once_and_on_its_device():
    count, x = Counter(torch.device("cpu")), torch.zeros(100)
    assert count([x, x[:10], {"again": (x.view(10, 10),)}]) == 400 and count(x) == 0
    assert Counter(torch.device("cpu"))(torch.zeros(5, device="meta")) == 0
    count = Counter(torch.device("cpu"))
    count.leave_out(x)
    assert count([x]) == 0


# -- admission ------------------------------------------------------------------------------------------------------


def bounded(config, sessions):
    """A policy whose budget holds just so many sessions."""
    free = make_policy(config)
    free.prepare()
    has = free.capacity
    windows = sessions if sessions < 2 else sessions + 2
    needed = has.taken.own - has.taken.idle - has.taken.instructions
    one = prompt_bytes(free.network.config.dit, free.network.dtype)
    reserve = round(
        (8 if config.step == "plain" else 4) * GIB * sum(p.numel() for p in free.network.parameters()) / 22.92e9
    )
    bytes_ = needed + PROMPTS_KEPT * one + reserve + windows * has.session_bytes
    made = make_policy(replace(config, memory_budget_gib=(bytes_ + has.session_bytes // 2) / GIB))
    made.prepare()
    return made


@pytest.mark.parametrize("way", ["plain", "fused", "apart"])
def test_one_session_too_many_is_refused_and_nothing_else_happens(way):
    policy = bounded(WAYS[way], 2)
    assert policy.capacity.sessions == 2 and policy.spec.details["sessions_capacity"] == 2
    assert policy.spec.details["memory"] == policy.capacity.text
    sessions = [policy.open() for _ in range(2)]
    with pytest.raises(
        Overloaded, match=r"this budget has memory for no other session; got: 2 of 2 open.*remedy: close one"
    ):
        policy.open()
    chunks = [policy.infer(s, look(policy.spec, i)) for i, s in enumerate(sessions)]
    with pytest.raises(Overloaded):
        policy.open()
    policy.reset(sessions[0])
    with pytest.raises(Overloaded):
        policy.open(), "a session that was reset keeps its place"
    policy.close(sessions[0])
    again = policy.open()
    assert same(policy.infer(again, look(policy.spec, 0)), chunks[0])
    del again
    gc.collect()
    assert policy.open().session_id, "one that was dropped without being closed has no place"


def test_who_was_admitted_has_a_window_and_restarts_have_theirs(monkeypatch):
    """Nothing is allocated for windows after the last session was admitted."""
    policy = bounded(FUSED, 2)
    sessions = [policy.open() for _ in range(2)]
    assert len(policy.path.pool.free) == 2
    policy.path.pool.provide(4)

    def none(*args):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(window_slots, "WindowSlot", none)
    for i in range(3):
        for number, session in enumerate(sessions):
            policy.infer(session, look(policy.spec, i, prompt=f"task {i} {number}"))


def test_a_window_that_cannot_be_made_is_refused_at_once(monkeypatch):
    """Not in the first step: who opened a session is promised one."""
    policy = bounded(FUSED, 2)

    def none(*args):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(window_slots, "WindowSlot", none)
    with pytest.raises(Overloaded, match="window"):
        policy.open()
    monkeypatch.undo()
    assert policy.details["sessions_open"] == 0 and len([policy.open() for _ in range(2)]) == 2


def test_a_fork_takes_a_place():
    policy = bounded(FUSED, 2)
    session = policy.open()
    policy.infer(session, look(policy.spec, 0))
    twin = policy.fork(session)
    features = session.window.clip_features.nbytes  # never written, so both have the same
    with pytest.raises(Overloaded, match="2 of 2 open"):
        policy.fork(session)
    assert policy.details["memory_bytes"]["windows"] == 2 * window_bytes(policy.path) - features
    policy.close(session)
    again = policy.fork(twin)
    assert same(policy.infer(twin, look(policy.spec, 1, frames=4)), policy.infer(again, look(policy.spec, 1, frames=4)))


def test_a_reserved_place_is_nobody_elses():
    policy = bounded(FUSED, 2)
    seat, client = policy.reserve(), policy.open()
    with pytest.raises(Overloaded):
        policy.open()
    policy.close(seat)
    robot = policy.open()
    policy.close(robot)
    assert policy.reserve() is not None and make_policy(FUSED).reserve() is None
    policy.close(client)


@pytest.mark.parametrize("way", ["plain", "fused"])
def test_a_budget_for_no_session_is_refused_at_the_start(way):
    policy = make_policy(replace(WAYS[way], memory_budget_gib=1e-4))
    with pytest.raises(
        ConfigError, match=r"this budget holds no session; got: .*expected: .* or more; remedy: raise memory"
    ):
        policy.prepare()


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), True, "8"])
def test_a_budget_that_is_none(value):
    with pytest.raises(ConfigError, match="memory_budget_gib"):
        EngineConfig(memory_budget_gib=value)


def test_details_follow_what_happens_and_the_bits_do_not_know_the_budget():
    policy = bounded(FUSED, 3)
    run = policy.open()
    policy.infer(run, look(policy.spec, 0))  # inputs have their places from now on
    policy.close(run)
    policy.prepare()
    assert policy.details["sessions_open"] == 0
    session = policy.open()
    before = policy.details["memory_bytes"]
    chunk = policy.infer(session, look(policy.spec, 1))
    told = policy.details
    assert told["sessions_open"] == 1 and told["sessions_capacity"] == 3
    assert told["memory_bytes"]["windows"] == window_bytes(policy.path) > before["windows"] == 0
    assert told["memory_bytes"] == policy.account.by_noun()
    free = make_policy(FUSED)
    assert same(chunk, free.infer(free.open(), look(free.spec, 1)))
    assert free.spec.fingerprint == policy.spec.fingerprint


def test_the_same_windows_with_another_schedule_have_the_same_places():
    policy = bounded(FUSED, 1)
    other = with_schedule(policy, evaluations=6)
    session = other.open()
    with pytest.raises(Overloaded):
        policy.open()
    other.close(session)
    assert policy.open() and with_config(policy, seed=3).open(), "windows of its own are another matter"


def test_an_account_without_sessions_is_that_of_the_path():
    policy = make_policy(FUSED)
    assert account_of(policy.network, policy.path).weights > 0
