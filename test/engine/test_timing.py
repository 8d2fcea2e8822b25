"""Seconds per stage: on the host's clock, and between device events without a wait inside the step."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from wam_policy_ros.engine import timing
from wam_policy_ros.engine.timing import StageTimer


def test_host_stages_add_up():
    timer = StageTimer(torch.device("cpu"))
    for name in ("a", "b", "a"):
        with timer.stage(name):
            until = time.perf_counter() + 0.005
            while time.perf_counter() < until:
                pass
    seconds = timer.finish()
    assert list(seconds) == ["a", "b", "total"]
    assert seconds["a"] >= 0.01 and seconds["b"] >= 0.005
    assert seconds["total"] >= seconds["a"] + seconds["b"]


class Device:
    """A device whose clock the test moves; events are stamped when they are recorded."""

    def __init__(self):
        self.now_ms, self.log = 0.0, []
        device = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self, stream):
                self.at_ms = device.now_ms
                device.log.append("record")

            def synchronize(self):
                device.log.append("wait")

            def elapsed_time(self, other):
                return other.at_ms - self.at_ms

        self.cuda = SimpleNamespace(Event=Event, current_stream=lambda d: "stream")


@pytest.fixture
def device(monkeypatch):
    fake = Device()
    monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=fake.cuda))
    return fake


def test_device_stages_are_spans_between_events_and_nobody_waits_in_between(device):
    timer = StageTimer(torch.device("cuda"))
    for name, ms in (("vae", 5.0), ("denoise", 40.0), ("denoise", 2.0)):
        with timer.stage(name):
            device.now_ms += ms
        device.now_ms += 100.0  # belongs to no stage
    with timer.stage("decode", host=True):
        pass
    assert device.log == ["record"] * 6
    seconds = timer.finish()
    assert seconds["vae"] == pytest.approx(0.005) and seconds["denoise"] == pytest.approx(0.042)
    assert list(seconds) == ["vae", "denoise", "decode", "total", "outside_gpu"]
    assert 0 <= seconds["decode"] < 0.005
    assert seconds["outside_gpu"] == pytest.approx(seconds["total"] - 0.047)
    assert device.log.count("wait") == 2  # one per stage name, after the step


def test_a_stage_that_fails_is_still_closed(device):
    timer = StageTimer(torch.device("cuda"))
    with pytest.raises(RuntimeError), timer.stage("denoise"):
        device.now_ms += 3.0
        raise RuntimeError
    assert timer.finish()["denoise"] == pytest.approx(0.003)
