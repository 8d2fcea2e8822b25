"""Shortly before a request the policy is told of its older frames; a wrong guess costs nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from wam_policy_ros.contract.fakes import HoldPolicy
from wam_policy_ros.ros.messages import ns_to_stamp, rgb_to_image
from wam_policy_ros.ros.worker import InferenceWorker, Phase, Request

from .harness import NAMES, wait_for
from .test_control import SPEC, Desk
from .test_inputs import joints

MS = 1_000_000


class Film(Desk):
    """Three cameras at a rate of their own, slightly out of step, told to the loop as the node does."""

    def __init__(self, hz: float, jitter_ms: float = 0.0) -> None:
        super().__init__()
        self.period_ns, self._rng = round(1e9 / hz), np.random.default_rng(1)
        self.jitter_ns = round(jitter_ms * MS)
        self.next_ns, self.tick_ns, self.answer_ns = self.ros_ns, self.ros_ns, 0

    def play(self, seconds: float) -> None:
        end = self.ros_ns + round(seconds * 1e9)
        while self.ros_ns < end:
            step = min(self.next_ns, self.tick_ns, self.answer_ns or self.tick_ns) - self.ros_ns
            self.ros_ns += max(step, 0)
            self.steady_ns += max(step, 0)
            if self.ros_ns >= self.next_ns:
                self._set()
                self.next_ns += self.period_ns
            if self.ros_ns >= self.tick_ns:
                self.loop.on_tick()
                self.tick_ns += round(1e9 / 15)
            if self.worker.requests and self.worker.requests[-1] is self.loop._in_flight:
                # Not a whole number of frames, so that it is never a matter of nanoseconds which set a request gets.
                self.answer_ns = self.answer_ns or self.ros_ns + 212 * MS
                if self.ros_ns >= self.answer_ns:
                    self.answer_ns = 0
                    self.answer(latency_s=0.0)

    def _set(self) -> None:
        state = joints(0, dict.fromkeys(NAMES, 0.0))
        state.header.stamp = ns_to_stamp(self.ros_ns)
        self.inputs.joint_states.on_message(state, self.now())
        for camera in self.inputs.cameras.values():
            off = round(self._rng.uniform(-1, 1) * self.jitter_ns)
            camera.on_message(
                rgb_to_image(np.zeros((18, 32, 3), np.uint8), stamp_ns=self.ros_ns - 5 * MS + off), self.now()
            )
            self.loop.on_image()


@pytest.mark.parametrize(("hz", "jitter_ms"), [(15.0, 0.0), (30.0, 0.0), (30.0, 2.0), (60.0, 1.0)])
def test_the_guess_is_what_the_request_looks_at(hz: float, jitter_ms: float) -> None:
    film = Film(hz, jitter_ms)
    film.play(8.0)
    later = [r for r in film.worker.requests if not r.observation.padded and not r.observation.off_schedule]
    assert len(later) >= 8
    right = 0
    for request in later:
        wanted = {n: f[:-1] for n, f in request.observation.frames.items()}
        right += any(all(g.frames[n] == wanted[n] for n in wanted) for g in film.worker.foreseen)
    # With stamps that jitter, another frame is often the nearest in the end, or the request gets another set.
    assert right >= (0.4 if jitter_ms else 0.9) * len(later), f"{right} of {len(later)}"
    assert len(film.worker.foreseen) <= len(film.worker.requests), "one guess per request at most"


def test_no_guess_before_the_robot_runs_and_none_that_looks_too_far_back() -> None:
    film = Film(30.0)
    film.play(1.0)
    assert len(film.worker.requests) >= 2 and not film.worker.foreseen


class Policy(HoldPolicy):
    """Notes what it is told."""

    def __init__(self, fail: bool = False) -> None:
        super().__init__()
        self.told: list[tuple[str, int, list[str]]] = []
        self._fail = fail

    def observe(self, session: Any, slot: int, frames: Any) -> bool:
        if self._fail:
            raise ValueError("a defect")
        self.told.append((session.session_id, slot, sorted(frames)))
        assert all(f.shape == (180, 320, 3) for f in frames.values())
        return True


@pytest.mark.parametrize("fail", [False, True])
def test_the_worker_tells_the_policy_in_the_session_of_the_generation(fail: bool) -> None:
    policy = Policy(fail)
    worker = InferenceWorker(
        lambda progress: policy, notify=lambda: None, log=lambda *a: None, after_step=lambda *a: None
    )
    worker.start()
    try:
        wait_for(lambda: worker.status.phase is Phase.READY)
        film = Film(30.0)
        film.play(4.0)
        foreseen, observation = film.worker.foreseen[-1], film.worker.requests[-1].observation
        worker.new_generation(1)
        worker.foresee(1, foreseen)  # before the session's first call: there is no session yet
        for number in (0, 1):
            worker.submit(Request(1, "s", observation, 0.0))
            wait_for(lambda: (result := worker.take_result()) is not None and result.error is None)
            if number == 0:
                worker.foresee(7, foreseen)  # of another generation
                worker.foresee(1, foreseen)
                wait_for(lambda: fail or len(policy.told) == 3)
        cameras = sorted(c.name for c in SPEC.cameras)
        assert policy.told == ([] if fail else [("s", slot, cameras) for slot in range(3)])
        assert worker.status.phase is Phase.READY
    finally:
        assert worker.stop(5.0)
