"""Events on the disk: what is written, what is dropped, what a killed process leaves, and that nobody waits."""

from __future__ import annotations

import errno
import json
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

from test.serving.harness import RememberingPolicy, small_spec, wait_for
from wam_policy_ros.contract.errors import Cancelled, ConfigError, EngineError
from wam_policy_ros.contract.fakes import HoldPolicy
from wam_policy_ros.contract.fingerprint import Fingerprint
from wam_policy_ros.contract.interface import CommittedRows, EncodesAhead
from wam_policy_ros.records import files as files_module
from wam_policy_ros.records import recorder as module
from wam_policy_ros.records.events import (
    CHUNK,
    CLOSE,
    END,
    ERROR,
    OBSERVATION,
    OPEN,
    RESET,
    START,
    Event,
    of_observation,
    to_chunk,
    to_observation,
)  # fmt: skip
from wam_policy_ros.records.files import EventFile, Reading, is_record, read_events, record_files
from wam_policy_ros.records.policy import recorded
from wam_policy_ros.records.read import open_records
from wam_policy_ros.records.recorder import Recorder, RecordLimits

from .tools import Lines, episode, events, look, record


def topics(found):
    return [e.topic for e in found]


# -- events -----------------------------------------------------------------------------------------------------


def test_an_observation_comes_back_bit_for_bit():
    spec = replace(small_spec(), inpainting=True)
    plain = look(spec, 3, frames=4, prompt="pick up the “red” cup")
    stamped = look(spec, 4, frames=4, stamp_ns=10**18 + 7)
    rows = CommittedRows(np.random.default_rng(0).normal(size=(5, spec.action_dim)), np.array([1.0, 1, 0.3, 0.1, 0]))
    for o in (plain, replace(stamped, session_start_ns=5, committed=rows, want_video=False)):
        event = of_observation(o, 2, 9)
        found = to_observation(Event.decode(OBSERVATION, replace(event, number=7).encode()))
        for a, b in ((o.frames, found.frames), (o.state, found.state), (o.frame_stamps_ns, found.frame_stamps_ns)):
            assert (a is None) == (b is None)
            for name in a or ():
                assert a[name].dtype == b[name].dtype and np.array_equal(a[name], b[name])
        assert (o.prompt, o.stamp_ns, o.session_start_ns, o.want_video) == (
            found.prompt, found.stamp_ns, found.session_start_ns, found.want_video,
        )  # fmt: skip
        if o.committed is not None:
            assert np.array_equal(found.committed.rows, rows.rows)
            assert np.array_equal(found.committed.weights, rows.weights)


def test_bytes_that_are_no_event_are_refused():
    for data in (b"", b"12345678", b"{}", os.urandom(300)):
        with pytest.raises((ValueError, KeyError)):
            Event.decode(CHUNK, data)


# -- what is written --------------------------------------------------------------------------------------------


def test_everything_a_policy_gets_and_gives_is_there(tmp_path):
    spec = small_spec(fingerprint=Fingerprint.of(weights={"hash": "sha256:1"}), details={"deterministic": True})
    policy = RememberingPolicy(spec)
    given = []

    def script(p, spec):
        a, b = p.open("a", seed=5), p.open()
        given.append(p.infer(a, look(spec, 1)))
        given.append(p.infer(b, look(spec, 2)))
        p.reset(a)
        given.append(p.infer(a, look(spec, 3, prompt="another")))
        policy.error = EngineError("no such luck")
        with pytest.raises(EngineError):
            p.infer(b, look(spec, 4))
        policy.error = None
        p.close(b)
        p.close(a)

    recorder = record(tmp_path, script, policy, how={"checkpoint": "/x"})
    found = events(tmp_path)
    assert topics(found) == [
        START, OPEN, OPEN, OBSERVATION, CHUNK, OBSERVATION, CHUNK, RESET, OBSERVATION, CHUNK, OBSERVATION, ERROR, CLOSE,
        CLOSE, END,
    ]  # fmt: skip
    assert [e.number for e in found] == [0, *range(1, 15)]
    start, end = found[0].values, found[-1].values
    assert start["fingerprint"]["id"] == spec.fingerprint.id and start["how"] == {"checkpoint": "/x"}
    assert (start["deterministic"], start["file"], start["format"]) == (True, 0, 1)
    assert end == {"written": 13, "dropped": 0, "trouble": ""}
    assert found[1].values == {"session": 1, "session_id": "a", "seed": 5} and found[2].values["seed"] is None
    for chunk, event in zip(given, [e for e in found if e.topic == CHUNK], strict=True):
        back = to_chunk(event)
        assert np.array_equal(back.actions, chunk.actions) and back.actions.dtype == np.float64
        assert (back.reset, back.step, back.session_id, back.timings_s) == (
            chunk.reset, chunk.step, chunk.session_id, chunk.timings_s,
        )  # fmt: skip
        assert event.values["took_s"] > 0 and abs(event.time_ns - time.time_ns()) < 60e9
    error = next(e for e in found if e.topic == ERROR).values
    assert error["error"] == "EngineError" and "no such luck" in error["text"]
    assert recorder.status.written == 13 and recorder.status.nbytes == sum(p.stat().st_size for p in tmp_path.iterdir())


def test_any_reader_of_mcap_and_safetensors_can_read_it(tmp_path):
    from mcap.reader import make_reader
    from safetensors.numpy import load

    record(tmp_path, episode(2))
    (path,) = record_files(tmp_path)
    with path.open("rb") as file:
        messages = list(make_reader(file).iter_messages())
    encodings = {channel.topic: channel.message_encoding for _, channel, _ in messages}
    assert encodings[OPEN] == "json" and encodings[OBSERVATION] == "safetensors"
    data = next(m.data for _, c, m in messages if c.topic == CHUNK)
    assert load(data)["actions"].shape == (24, 8)
    assert json.loads(next(m.data for _, c, m in messages if c.topic == OPEN))["session_id"] == "a"


def test_the_callers_arrays_may_change_after_the_call(tmp_path):
    seen = look(small_spec(), 1)
    before = {n: f.copy() for n, f in seen.frames.items()}

    def script(p, spec):
        p.infer(p.open("a"), seen)
        for f in seen.frames.values():
            f[:] = 0

    record(tmp_path, script)
    found = to_observation(next(e for e in events(tmp_path) if e.topic == OBSERVATION))
    assert all(np.array_equal(found.frames[n], before[n]) for n in before)


def test_the_wrapper_is_the_policy_to_whoever_has_it(tmp_path):
    class Ahead(RememberingPolicy):
        asked = 0

        def observe(self, session, slot, frames):
            self.asked += 1
            return True

        def disconnect(self):
            self.left = True

    inner = Ahead()
    recorder = Recorder(tmp_path, log=Lines())
    policy = recorded(inner, recorder, how={})
    assert isinstance(policy, EncodesAhead) and policy.observe(None, 0, {}) and inner.asked == 1
    assert policy.sessions is inner.sessions and policy.spec is inner.spec and policy.render_video(None) is None
    policy.disconnect()
    assert inner.left and topics(events(tmp_path)) == [START, END]
    with pytest.raises(ConfigError, match="no stages"):
        recorded(HoldPolicy(), Recorder(tmp_path, log=Lines()), stages=True, how={})
    other = recorded(HoldPolicy(), Recorder(tmp_path, log=Lines()), how={})
    assert not isinstance(other, EncodesAhead)
    other.disconnect()


def test_a_cancelled_call_is_recorded_as_such(tmp_path):
    policy = RememberingPolicy()

    def script(p, spec):
        policy.gate.clear()
        with pytest.raises(Cancelled):
            p.infer(p.open("a"), look(spec, 1), cancelled=lambda: True)

    record(tmp_path, script, policy)
    assert [e.values["error"] for e in events(tmp_path) if e.topic == ERROR] == ["Cancelled"]


# -- files ------------------------------------------------------------------------------------------------------


def test_files_follow_each_other_by_size_and_each_says_whose_it_is(tmp_path):
    recorder = record(tmp_path, episode(40, frames=4), file_bytes=2**16)
    paths = record_files(tmp_path)
    assert len(paths) == recorder.status.files > 2
    assert all(p.stat().st_size < 2**16 + 30_000 for p in paths)
    starts = [e for e in events(tmp_path) if e.topic == START]
    assert [e.values["file"] for e in starts] == list(range(len(paths)))
    assert {e.values["record"] for e in starts} == {recorder.record_id}
    (found,) = open_records(tmp_path)
    assert len(list(found.events())) == 82 and found.faults == [] and found.files == paths
    assert open_records(paths[2])[0].files == paths
    paths[1].unlink()
    (found,) = open_records(tmp_path)
    assert len(list(found.events())) < 82
    assert "1 file(s) before" in found.faults[0] and "event(s) before number" in found.faults[1]


def test_records_of_one_folder_are_kept_apart(tmp_path):
    record(tmp_path, episode(1))
    record(tmp_path, episode(2))
    (tmp_path / "notes.mcap").write_bytes(b"no record")
    assert sorted(len(list(r.events())) for r in open_records(tmp_path)) == [4, 6]


def test_what_is_no_record_is_refused(tmp_path):
    assert not is_record(tmp_path)
    with pytest.raises(ConfigError, match="no record of a policy"):
        open_records(tmp_path)
    from mcap.writer import Writer

    other = tmp_path / "ros2.mcap"
    with other.open("wb") as file:
        writer = Writer(file)
        writer.start(profile="ros2", library="x")
        writer.finish()
    assert not is_record(other) and not is_record(tmp_path)
    with pytest.raises(ConfigError, match="profile 'ros2'"):
        list(read_events(other, Reading(other)))
    (tmp_path / "junk.mcap").write_bytes(os.urandom(100))
    with pytest.raises(ConfigError, match="no mcap file"):
        list(read_events(tmp_path / "junk.mcap", Reading(tmp_path / "junk.mcap")))


def test_a_format_of_tomorrow_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FORMAT", 2)
    record(tmp_path, episode(1))
    with pytest.raises(ConfigError, match="format 2"):
        open_records(tmp_path)


def test_a_truncated_file_is_read_to_its_last_complete_event(tmp_path):
    record(tmp_path, episode(6, frames=4))
    (path,) = record_files(tmp_path)
    whole, full = path.read_bytes(), events(tmp_path)
    seen = set()
    for size in sorted({*range(len(whole) // 10, len(whole) - 1, len(whole) // 37), len(whole) - 3}):
        path.write_bytes(whole[:size])
        reading = Reading(path)
        found = list(read_events(path, reading))
        assert not reading.whole and topics(found) == topics(full)[: len(found)]
        seen.add(len(found))
        if found[-1].topic == END:
            continue
        (part,) = open_records(path)
        rest = list(part.events())
        assert len(rest) == len(found) - 1
        assert any("ends in the middle" in f for f in part.faults) and "no end was written" in part.faults[-1]
    assert len(seen) > 8


def test_a_damaged_event_is_left_out_and_told(tmp_path):
    record(tmp_path, episode(5, frames=4))
    (path,) = record_files(tmp_path)
    full, raw = events(tmp_path), bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)
    (found,) = open_records(tmp_path)
    rest = list(found.events())
    assert len(rest) == len(full) - 3  # without start, end, and the damaged one
    assert any("is damaged, at byte" in f for f in found.faults) and any("are missing" in f for f in found.faults)


KILLED = """
import sys
from pathlib import Path
from test.records.tools import record, look
from test.serving.harness import RememberingPolicy
def script(p, spec):
    s = p.open("a")
    for i in range(10**6):
        p.infer(s, look(spec, i, frames=4))
        if i == 30:
            print("running", flush=True)
record(Path(sys.argv[1]), script)
"""


def test_a_killed_process_leaves_what_it_had_written(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "running\n"
    wait_for(lambda: sum(p.stat().st_size for p in record_files(tmp_path)) > 100_000, 20)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    (found,) = open_records(tmp_path)
    rest = list(found.events())
    assert len(rest) > 20 and [e.number for e in rest] == list(range(1, len(rest) + 1))
    assert "no end was written" in found.faults[-1]


# -- disks ------------------------------------------------------------------------------------------------------


class Disk:
    """What the recorder's writes meet.

    Attributes:
        free: bytes until the disk is full; gate: closed, every write waits.
    """

    def __init__(self, monkeypatch):
        self.free, self.gate = 10**12, threading.Event()
        self.gate.set()
        original = EventFile.write
        disk = self

        def write(file, event):
            disk.gate.wait()
            if file.nbytes > disk.free:
                file._file.write(b"half an event")
                file._file.flush()
                raise OSError(errno.ENOSPC, "No space left on device")
            original(file, event)

        monkeypatch.setattr(EventFile, "write", write)


@pytest.fixture
def disk(monkeypatch):
    one = Disk(monkeypatch)
    yield one
    one.gate.set()


def test_a_slow_disk_delays_nobody_and_costs_events(tmp_path, disk):
    recorder = Recorder(tmp_path, log=(lines := Lines()), limits=RecordLimits(queue_bytes=2**16))
    policy = recorded(RememberingPolicy(), recorder, how={})
    session = policy.open("a")
    disk.gate.clear()
    longest = 0.0
    for i in range(300):
        seen = look(policy.spec, i, frames=4)
        start = time.perf_counter()
        policy.infer(session, seen)
        longest = max(longest, time.perf_counter() - start)
    assert longest < 0.5, "a step waited for the disk"
    dropped = recorder.status.dropped
    assert dropped > 100 and recorder.status.trouble == "the disk is too slow"
    assert [line for line in lines if "incomplete" in line] == lines and len(lines) == 1
    disk.gate.set()
    wait_for(lambda: recorder.status.written + recorder.status.dropped == 601, 10)
    policy.close(session)
    policy.disconnect()
    (found,) = open_records(tmp_path)
    kept = list(found.events())
    assert len(kept) == 602 - dropped and kept[-1].topic == CLOSE
    assert any("event(s) before number" in f for f in found.faults)
    assert f"{dropped} event(s) dropped: the disk is too slow" in found.faults


def test_a_full_disk_stops_the_record_and_not_the_policy(tmp_path, disk, monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 0.2)
    recorder = Recorder(tmp_path, log=(lines := Lines()))
    policy = recorded(RememberingPolicy(), recorder, how={})
    session = policy.open("a")
    policy.infer(session, look(policy.spec, 0, frames=4))
    wait_for(lambda: recorder.status.written == 3)
    disk.free = -1
    policy.infer(session, look(policy.spec, 1, frames=4))
    wait_for(lambda: recorder.status.dropped == 2)
    assert "No space left" in recorder.status.trouble and len(lines) == 1 and "the policy goes on" in lines[0]
    (path,) = record_files(tmp_path)
    assert topics(events(tmp_path)) == [START, OPEN, OBSERVATION, CHUNK]  # nothing half written behind them
    disk.free = 10**12
    time.sleep(0.3)  # somebody has made room
    policy.infer(session, look(policy.spec, 2, frames=4))
    policy.close(session)
    policy.disconnect()
    assert len(record_files(tmp_path)) == 2 and record_files(tmp_path)[0] == path
    (found,) = open_records(tmp_path)
    assert topics(found.events()) == [OPEN, OBSERVATION, CHUNK, OBSERVATION, CHUNK, CLOSE]
    assert any("2 event(s) before number 6 are missing" in f for f in found.faults)
    assert any("2 event(s) dropped: the disk refuses" in f for f in found.faults)


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="no record can be written"):
        Recorder(tmp_path / "file" / "below", log=Lines())
    assert not record_files(tmp_path)
    with pytest.raises(ConfigError, match="queue_bytes is too small"):
        RecordLimits(queue_bytes=10)


def test_the_end_does_not_wait_for_a_disk_that_hangs(tmp_path, disk):
    recorder = Recorder(tmp_path, log=Lines())
    policy = recorded(RememberingPolicy(), recorder, how={})
    wait_for(lambda: recorder.status.files == 1)
    session = policy.open("a")
    disk.gate.clear()
    for i in range(20):
        policy.infer(session, look(policy.spec, i))
    start = time.monotonic()
    policy.disconnect()
    assert time.monotonic() - start < 1.5 and recorder._thread.is_alive()
    disk.gate.set()
    recorder._thread.join(5)
    assert recorder.status.dropped >= 38 and "the process ended" in recorder.status.trouble
    (found,) = open_records(tmp_path)
    assert len(list(found.events())) <= 3 and "dropped: the process ended" in " ".join(found.faults)


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mcap.writer", None)
    with pytest.raises(ConfigError, match=r"wam_policy_ros\[record\]"):
        Recorder(tmp_path, log=Lines())
    monkeypatch.setitem(sys.modules, "mcap.records", None)
    path = Path(tmp_path / "x.mcap")
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"wam_policy_ros\[record\]"):
        list(read_events(path, Reading(path)))
    assert files_module.PROFILE == "wam_policy"
