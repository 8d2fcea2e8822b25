"""A record is played back bit for bit; what differs is found, with the first stage that does."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from test.engine.tiny_policy import look as tiny_look
from test.engine.tiny_policy import make_network, make_policy
from test.serving.harness import RememberingPolicy, small_spec
from wam_policy_ros.contract.errors import EngineError
from wam_policy_ros.contract.fakes import ScriptedPolicy
from wam_policy_ros.contract.fingerprint import Fingerprint
from wam_policy_ros.contract.interface import Forks, interleaves
from wam_policy_ros.contract.places import Placed, place_of
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.policy import with_config
from wam_policy_ros.engine.stages import StageHashes, checksum
from wam_policy_ros.records.events import CHUNK, CLOSE, FORK, OBSERVATION, OPEN, RESET
from wam_policy_ros.records.files import record_files
from wam_policy_ros.records.policy import recorded
from wam_policy_ros.records.read import open_records
from wam_policy_ros.records.recorder import Recorder
from wam_policy_ros.records.verify import first_difference, verify

from .tools import Lines, episode, events, flip, look, record, rewrite


def check(folder, policy=None):
    (found,) = open_records(folder)
    return verify(found, policy or RememberingPolicy())


def several(p, spec):
    """Two sessions side by side with a reset, a failed call and another instruction."""
    a, b = p.open("a", seed=5), p.open("b")
    for i in range(3):
        p.infer(a, look(spec, i, frames=4))
        p.infer(b, look(spec, 10 + i, prompt="x" if i else "y"))
    p.reset(a)
    p.infer(a, look(spec, 20))
    p._policy.error = EngineError("once")
    with pytest.raises(EngineError):
        p.infer(b, look(spec, 21))
    p._policy.error = None
    p.infer(b, look(spec, 22))
    p.close(a)
    p.infer(p.open("a"), look(spec, 23))


def test_a_sound_record_is_proven_and_leaves_no_session(tmp_path):
    record(tmp_path, several)
    policy = RememberingPolicy()
    report = check(tmp_path, policy)
    assert report.proven and (report.calls, report.same, report.refused, report.skipped) == (9, 9, 1, 0)
    assert report.sessions == 4 and not policy.sessions
    assert report.as_dict()["proven"] is True


class Nesting(RememberingPolicy):
    """Asks at least once in every step that has a ``cancelled``."""

    interleaves = True

    def infer(self, session, observation, *, cancelled=None):
        assert cancelled is None or not cancelled()
        return super().infer(session, observation)


def test_a_step_inside_another_one_is_played_back(tmp_path):
    def nested(p, spec):
        assert interleaves(p)
        a, b = p.open("a"), p.open("b")
        p.infer(a, look(spec, 1), cancelled=lambda: p.infer(b, look(spec, 2)) is None)
        p.infer(b, look(spec, 3), cancelled=lambda: p.close(a))
        p.close(b)

    record(tmp_path, nested, Nesting())
    found = events(tmp_path)
    assert [e.values["session"] for e in found if e.topic in (OBSERVATION, CHUNK)] == [1, 2, 2, 1, 2, 2]
    assert all(e.values["observation_digest"] for e in found if e.topic == CHUNK)
    report = check(tmp_path)
    assert report.proven and (report.calls, report.changed) == (3, [])


def test_a_policy_in_several_places_is_recorded_in_each(tmp_path):
    """Two threads, one record; played back by one policy."""

    class Several(RememberingPolicy):
        def __init__(self):
            super().__init__()
            self.places = [RememberingPolicy(), RememberingPolicy()]
            for i, place in enumerate(self.places):
                place.place, place.sessions = i, self.sessions

    recorder = Recorder(tmp_path, log=Lines())
    policy = recorded(Several(), recorder, stages=True, how={})
    assert isinstance(policy, Placed) and [place_of(p) for p in policy.places] == [0, 1]

    def work(place):
        for n in range(5):
            session = place.open(f"{place.place}-{n}", seed=n)
            for i in range(4):
                place.infer(session, look(place.spec, 10 * n + i))
            policy.places[1 - place.place].close(session)  # at the end anybody may

    threads = [threading.Thread(target=work, args=(place,)) for place in policy.places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    policy.disconnect()
    report = check(tmp_path)
    assert report.proven and (report.calls, report.sessions) == (40, 10)


def test_the_name_and_the_seed_of_a_session_are_played_back(tmp_path):
    record(tmp_path, episode(2, seed=7))
    assert check(tmp_path).proven

    def other(event):
        return replace(event, values={**event.values, "seed": 8}) if event.topic == OPEN else event

    rewrite(tmp_path, other)
    report = check(tmp_path)
    assert [(d.step, d.stage) for d in report.differences] == [(0, "actions")] and not report.proven


def counting():
    """A row tells how many steps its session and those it was forked from have made."""
    return ScriptedPolicy(lambda o, step: np.full((24, 8), step + o.state["joint_position"][0]))


def forking(p, spec):
    assert isinstance(p, Forks)
    parent = p.open("parent", seed=4)
    early = p.fork(parent, "early")
    p.infer(parent, look(spec, 0))
    child = p.fork(parent, "child", seed=5)
    grandchild = p.fork(child)
    for i, session in enumerate((child, parent, early, child)):
        p.infer(session, look(spec, 1 + i))
    p.close(parent)
    p.infer(grandchild, look(spec, 9))


def test_forks_are_played_back(tmp_path):
    record(tmp_path, forking, counting())
    report = check(tmp_path, counting())
    assert report.proven and (report.calls, report.sessions) == (6, 4)
    told = [(e.values["parent"], e.values["session_id"], e.values["seed"]) for e in events(tmp_path) if e.topic == FORK]
    assert told[:2] == [(1, "early", None), (1, "child", 5)] and told[2][0] == 3
    # Without forks a replay judges what it can: the parent, and who was forked before its first call.
    assert not isinstance(recorded(RememberingPolicy(), Recorder(tmp_path / "x", log=print), how={}), Forks)
    policy = counting()
    without = SimpleNamespace(spec=policy.spec, open=policy.open, infer=policy.infer, close=policy.close)
    report = check(tmp_path, without)
    assert not report.proven and (report.same, report.skipped) == (3, 3)


def test_a_fork_of_what_is_not_known_is_not_judged(tmp_path):
    record(tmp_path, forking, counting())
    rewrite(tmp_path, lambda e: None if e.topic == OBSERVATION and e.values["call"] == 1 else e)
    report = check(tmp_path, counting())
    assert not report.proven and (report.calls, report.skipped) == (0, 6)


def test_a_difference_is_told_once_per_session_and_the_others_go_on(tmp_path):
    record(tmp_path, several)
    # The second observation of session a.
    rewrite(
        tmp_path,
        lambda e: flip(e, "frames/wrist_image_left", 5) if e.topic == OBSERVATION and e.values["call"] == 3 else e,
    )
    report = check(tmp_path)
    assert len(report.differences) == 0 and report.changed == [3]  # that policy looks at the newest frame only
    rewrite(
        tmp_path,
        lambda e: flip(e, "state/joint_position", 0) if e.topic == OBSERVATION and e.values["call"] == 3 else e,
    )
    report = check(tmp_path)
    (found,) = report.differences
    assert (found.session_id, found.call, found.step, found.stage, found.observation_changed) == (
        "a",
        3,
        1,
        "actions",
        True,
    )
    assert "of 192 values" in found.what
    # The third call of "a" is its consequence; after the reset it is compared again.
    assert (report.calls, report.same, report.skipped) == (8, 7, 1) and report.changed == [3]


@pytest.mark.parametrize(
    ("change", "stage"),
    [
        (lambda e: flip(e, "actions", 100), "actions"),
        (lambda e: replace(e, values={**e.values, "reset": "WINDOW_FULL"}), "reset"),
        (lambda e: replace(e, values={**e.values, "step": 4}), "reset"),
    ],
    ids=["one bit of an action", "reset", "step"],
)
def test_one_bit_of_what_came_out_is_found(tmp_path, change, stage):
    record(tmp_path, episode(3))
    rewrite(tmp_path, lambda e: change(e) if e.topic == CHUNK and e.values["call"] == 2 else e)
    (found,) = check(tmp_path).differences
    assert (found.call, found.stage, found.observation_changed) == (2, stage, False)


def test_the_sign_of_zero_counts():
    policy = RememberingPolicy()
    chunk = policy.infer(policy.open(), look(policy.spec, 0))
    zeros = replace(chunk, actions=np.zeros((2, 2)))
    other = replace(chunk, actions=np.array([[0.0, -0.0], [0.0, 0.0]]))
    assert first_difference(zeros, zeros) is None
    assert first_difference(zeros, other) == ("actions", "1 of 4 values, by up to 0")
    assert first_difference(zeros, replace(zeros, actions=np.zeros((2, 2), np.float32)))[0] == "actions"


def test_a_policy_that_fails_differs(tmp_path):
    record(tmp_path, episode(2))
    policy = RememberingPolicy()
    policy.error = EngineError("no memory today")
    (found,) = check(tmp_path, policy).differences
    assert found.stage == "error" and "no memory today" in found.what


def test_an_observation_that_cannot_be_read_differs(tmp_path):
    record(tmp_path, episode(2))

    def drop(event):
        if event.topic != OBSERVATION:
            return event
        return replace(event, arrays={n: a for n, a in event.arrays.items() if "wrist" not in n})

    rewrite(tmp_path, drop)
    report = check(tmp_path)
    assert [d.stage for d in report.differences] == ["error"] and report.changed == [1, 2]


@pytest.mark.parametrize(
    ("lost", "same", "skipped"),
    [
        # "a": calls 1 to 3, reset, call 4, close; then "c": calls 5 to 7. What was lost may have been of anybody.
        (lambda e: e.topic == OBSERVATION and e.values["call"] == 2, 5, 2),
        (lambda e: e.topic == CHUNK and e.values["call"] == 2, 5, 1),
        (lambda e: e.topic == OPEN and e.values["session"] == 1, 3, 4),
        (lambda e: e.topic == RESET, 6, 1),
        (lambda e: e.topic == CLOSE and e.values["session"] == 1, 7, 0),
    ],
    ids=["observation", "chunk", "open", "reset", "close"],
)
def test_what_follows_a_lost_event_is_not_judged_until_its_session_begins_anew(tmp_path, lost, same, skipped):
    def script(p, spec):
        a = p.open("a")
        for i in range(3):
            p.infer(a, look(spec, i))
        p.reset(a)
        p.infer(a, look(spec, 9))
        p.close(a)
        episode(3, "c", 1)(p, spec)

    record(tmp_path, script)
    rewrite(tmp_path, lambda e: None if lost(e) else e)
    report = check(tmp_path)
    assert "1 event(s) before number" in report.faults[0] and not report.complete and not report.proven
    assert not report.differences and (report.same, report.calls, report.skipped) == (same, same, skipped)


def test_an_incomplete_record_is_never_proven(tmp_path):
    record(tmp_path, episode(3))
    (path,) = record_files(tmp_path)
    path.write_bytes(path.read_bytes()[:-2000])
    report = check(tmp_path)
    assert report.same == report.calls > 0 and not report.complete and not report.proven
    assert any("ends in the middle" in f for f in report.faults)


def test_another_fingerprint_is_told(tmp_path):
    def policy(torch_version):
        libraries = {"torch": torch_version}
        return RememberingPolicy(small_spec(fingerprint=Fingerprint.of(libraries=libraries)))

    record(tmp_path, episode(1), policy("2.11"))
    assert check(tmp_path, policy("2.11")).elsewhere == []
    report = check(tmp_path, policy("2.12"))
    assert report.elsewhere == ["libraries.torch: 2.11, 2.12"] and report.proven


# -- stages of the engine -----------------------------------------------------------------------------------------


CONFIG = EngineConfig(evaluations=5, deterministic=True)


@pytest.fixture(scope="module", params=["plain", "fused"])
def run(request, tmp_path_factory):
    """A recorded run of the tiny network with stages: a folder, and a policy to verify it with."""
    folder = tmp_path_factory.mktemp(request.param)
    policy = make_policy(replace(CONFIG, step=request.param), network=make_network())

    def script(p, spec):
        session = p.open("a", seed=3)
        for i, frames in enumerate((1, 4, 4)):
            p.infer(session, tiny_look(spec, i, frames=frames))
        p.close(session)

    record(folder, script, policy, stages=True)
    return folder, policy


def fresh(run, tmp_path):
    """The record again, to be damaged."""
    for path in record_files(run[0]):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path, with_config(run[1])


def test_another_process_object_gives_the_same_stages(run):
    (found,) = open_records(run[0])
    report = verify(found, make_policy(run[1].config, network=make_network()))
    assert report.proven and report.stages and report.deterministic and report.calls == 3
    chunks = [e.values["stages"] for e in found.events() if e.topic == CHUNK]
    names = list(chunks[0])
    assert names[:7] == ["preprocess", "text", "image", "latents", "prefill", "noise", "evaluation 0"]
    assert names[-2:] == ["actions", "decoded actions"] and "solver step 15" in names and "evaluation 12" in names
    assert [n for n in names if n.startswith("evaluation")] == [f"evaluation {i}" for i in (0, 1, 2, 7, 12)]
    assert "image" not in chunks[1] and chunks[0]["noise"] == chunks[1]["noise"]


@pytest.mark.parametrize(
    ("array", "index", "bit"), [("frames/wrist_image_left", 100_001, 5), ("state/joint_position", 6, 7)]
)
def test_one_bit_of_a_recorded_observation_is_found_and_its_stage_named(run, tmp_path, array, index, bit):
    folder, policy = fresh(run, tmp_path)
    rewrite(folder, lambda e: flip(e, array, index, bit) if e.topic == OBSERVATION and e.values["call"] == 2 else e)
    (found,) = check(folder, policy).differences
    assert (found.call, found.step, found.stage, found.observation_changed) == (2, 1, "preprocess", True)


def test_another_instruction_or_seed_differs_at_its_stage(run, tmp_path):
    folder, policy = fresh(run, tmp_path)

    def ask_otherwise(event):
        return replace(event, values={**event.values, "prompt": "drop it"}) if event.topic == OBSERVATION else event

    rewrite(folder, ask_otherwise)
    assert [d.stage for d in check(folder, policy).differences] == ["text"]
    folder, policy = fresh(run, tmp_path)
    rewrite(folder, lambda e: replace(e, values={**e.values, "seed": 4}) if e.topic == OPEN else e)
    assert [d.stage for d in check(folder, policy).differences] == ["noise"]


@pytest.mark.parametrize(
    ("part", "stage"),
    [
        ("text_encoder.norm.weight", "text"),
        ("image_encoder.model.visual.pre_norm.bias", "image"),
        ("vae.model.encoder.head.2.bias", "latents"),
        ("model.blocks.0.self_attn.v.bias", "prefill"),
        ("model.head.head.bias", "evaluation 0"),
        ("model.action_decoder.layer2.b", "evaluation 0"),
    ],
)
def test_one_changed_weight_differs_at_the_stage_it_belongs_to(run, part, stage):
    network = make_network()
    with torch.no_grad():
        state = dict(network.named_parameters())
        assert part in state, sorted(n for n in state if part.split(".")[0] in n)[:60]
        state[part].view(-1)[0] += 0.125
    (found,) = open_records(run[0])
    report = verify(found, make_policy(run[1].config, network=network))
    assert report.differences[0].stage == stage and report.differences[0].call == 1


def test_another_number_of_evaluations_differs_where_it_begins(run):
    (found,) = open_records(run[0])
    report = verify(found, with_config(run[1], evaluations=6))
    assert report.differences[0].stage == "evaluation 2" and "did not run" in report.differences[0].what
    assert report.elsewhere == ["config.evaluations: 5, 6"]


def test_stages_change_nothing_and_cost_nothing_when_nobody_asks(run):
    policy = with_config(run[1])
    assert policy.stage_hashes is False
    session = policy.open("a", seed=3)
    plain = policy.infer(session, tiny_look(policy.spec, 0))
    policy.reset(session)
    policy.stage_hashes = True
    told = policy.infer(session, tiny_look(policy.spec, 0))
    assert np.array_equal(plain.actions, told.actions) and not plain.stages and told.stages
    seen = []
    policy.infer(policy.open(), tiny_look(policy.spec, 0), probe=lambda name, value: seen.append(name))
    assert {"mosaic", "noise.video"} <= set(seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64])
def test_a_checksum_sees_every_bit_and_every_place(dtype):
    torch.manual_seed(0)
    x = torch.randint(0, 100, (3, 7, 11)).to(dtype)
    known = {checksum(x)}
    for i in range(0, x.numel(), 13):
        for bit in range(8 * x.element_size()):
            y = x.clone()
            y.view(-1).view(torch.uint8)[i * x.element_size() + bit // 8] ^= 1 << (bit % 8)
            known.add(checksum(y))
    assert len(known) == 1 + len(range(0, x.numel(), 13)) * 8 * x.element_size()
    assert checksum(x.flip(0)) not in known and checksum(x[:, ::2]) == checksum(x[:, ::2].clone())
    assert checksum(torch.zeros(3)) != checksum(torch.zeros(4)) and 0 <= checksum(x) < 2**64


def test_a_checksum_of_many_pieces_is_that_of_one(monkeypatch):
    from wam_policy_ros.engine import stages

    x = torch.randn(10_007)
    whole = checksum(x)
    monkeypatch.setattr(stages, "_PIECE", 100)
    assert checksum(x) == whole
    probe = StageHashes()
    probe("mosaic", x)
    probe("vae_encode0.out", x)  # depends on when frames were encoded
    assert list(probe.result()) == ["preprocess"]
