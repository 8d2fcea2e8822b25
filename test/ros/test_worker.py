from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from test.engine import replica_fakes
from wam_policy_ros.contract import policy_thread
from wam_policy_ros.contract.errors import (
    Cancelled,
    CheckpointError,
    ConfigError,
    EngineError,
    InvalidState,
    PolicyUnavailable,
)
from wam_policy_ros.contract.fakes import HoldPolicy, ScriptedPolicy, example_observation
from wam_policy_ros.contract.interface import Observation
from wam_policy_ros.contract.progress import ProgressLog
from wam_policy_ros.engine.replicas.policy import Replicas
from wam_policy_ros.engine.replicas.replica import Care
from wam_policy_ros.ros.worker import InferenceWorker, Phase, Request, Result, WorkerStatus

from .conftest import wait_for


class Pending:
    """Stands for a PendingObservation; remembers how it was asked for."""

    def __init__(self, spec: Any, number: float) -> None:
        self.spec, self.number = spec, number
        self.first: bool | None = None

    def materialise(self, cameras: Any, *, first_call: bool) -> Observation:
        self.first = first_call
        observation = example_observation(self.spec, frames=1 if first_call else 4)
        state = {**observation.state, "joint_position": np.full(7, self.number)}
        return Observation(observation.frames, state, "p", stamp_ns=1)


class Bench:
    """A worker with a policy that waits for ``gate`` in every step after the warm-up."""

    def __init__(self) -> None:
        self.gate, self.entered = threading.Event(), threading.Event()
        self.policy = ScriptedPolicy(self.rows, record=True)
        self.woken = 0
        self.lines: list[str] = []
        self.after: list[Any] = []
        self.error: Exception | None = None
        self.deaf = False
        self.worker = InferenceWorker(
            lambda progress: self.policy, notify=self.wake, log=self.log, after_step=self.after_step
        )

    def wake(self) -> None:
        self.woken += 1

    def log(self, level: str, line: str) -> None:
        self.lines.append(f"{level}: {line}")

    def after_step(self, policy: Any, chunk: Any, observation: Any) -> None:
        self.after.append((policy, chunk, observation))

    def rows(self, observation: Observation, step: int) -> np.ndarray:
        if observation.prompt == "p":
            self.entered.set()
            while not self.gate.wait(0.005):
                if not self.deaf and self.cancelled():
                    raise Cancelled("cancelled")
            if self.error is not None:
                raise self.error
        return np.tile(np.concatenate(list(observation.state.values())), (24, 1))

    def cancelled(self) -> bool:
        return self._cancelled()

    def start(self) -> None:
        infer = self.policy.infer

        def remember(session: Any, observation: Any, *, cancelled: Any = None) -> Any:
            self._cancelled = cancelled
            return infer(session, observation, cancelled=cancelled)

        self.policy.infer = remember  # type: ignore[method-assign]
        self.worker.start()
        wait_for(lambda: self.worker.status.phase is Phase.READY)

    def ask(self, generation: int, number: float = 0.0) -> Pending:
        pending = Pending(self.policy.spec, number)
        self.worker.submit(Request(generation, f"session {generation}", pending, time.monotonic()))  # type: ignore[arg-type]
        return pending

    def answer(self) -> Result:
        found = []

        def take() -> bool:
            result = self.worker.take_result()
            if result is not None:
                found.append(result)
            return bool(found)

        wait_for(take, what="a result")
        return found[0]


def idle_worker(factory: Any) -> InferenceWorker:
    return InferenceWorker(factory, notify=lambda: None, log=lambda *_: None, after_step=lambda *_: None)


class Activations:
    """Stands for what a step holds on the device."""


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What dies here dies because nothing refers to it any more."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.gate.set()
    assert bench.worker.stop(5.0), "the worker thread ends"


def test_warm_up_makes_a_first_and_a_later_call_in_a_session_of_its_own(bench: Bench) -> None:
    bench.gate.set()
    bench.start()
    (session,) = bench.policy.sessions
    assert session.closed and session.step == 2
    assert len(bench.worker.status.warm_up_s) == 2 and bench.worker.status.spec is bench.policy.spec
    bench.worker.new_generation(1)
    bench.ask(1)
    assert bench.answer().chunk.session_id == "session 1"  # type: ignore[union-attr]


def test_newest_request_wins_and_the_superseded_one_is_counted(bench: Bench) -> None:
    bench.start()
    bench.worker.new_generation(1)
    bench.ask(1, 1.0)
    bench.entered.wait(5)
    bench.ask(1, 2.0), bench.ask(1, 3.0)
    assert bench.worker.superseded == 1
    bench.gate.set()
    wait_for(lambda: bench.after)
    assert [o.state["joint_position"][0] for o in bench.policy.sessions[1].seen] == [1.0, 3.0]
    assert bench.answer().chunk.actions[0, 0] == 3.0  # type: ignore[union-attr]


def test_first_call_of_a_session_takes_one_frame_later_ones_all(bench: Bench) -> None:
    bench.gate.set()
    bench.start()
    seen = []
    for generation in (1, 1, 2):
        bench.worker.new_generation(generation)
        pending = bench.ask(generation)
        bench.answer()
        seen.append(pending.first)
    assert seen == [True, False, True]
    assert [s.closed for s in bench.policy.sessions] == [True, True, False]


def test_new_generation_cancels_the_running_step_and_its_result_is_lost(bench: Bench) -> None:
    bench.start()
    bench.worker.new_generation(1)
    bench.ask(1, 1.0)
    bench.entered.wait(5)
    bench.worker.new_generation(2)
    wait_for(lambda: bench.policy.sessions[1].closed, what="the old session is closed, without a new request")
    assert bench.worker.take_result() is None
    bench.gate.set()
    bench.ask(2, 2.0)
    result = bench.answer()
    assert result.request.generation == 2 and result.chunk is not None and result.chunk.session_id == "session 2"


def test_a_result_that_waits_in_the_mailbox_is_void_after_a_new_generation(bench: Bench) -> None:
    bench.gate.set()
    bench.start()
    bench.worker.new_generation(1)
    bench.ask(1)
    wait_for(lambda: bench.after)
    bench.worker.new_generation(2)
    assert bench.worker.take_result() is None


@pytest.mark.parametrize(
    ("raised", "given"),
    [(InvalidState("x", field="j"), InvalidState), (EngineError("y"), EngineError), (KeyError("z"), EngineError)],
)
def test_errors_arrive_as_results_without_a_chunk(bench: Bench, raised: Exception, given: type) -> None:
    bench.gate.set()
    bench.start()
    bench.error = raised
    bench.worker.new_generation(1)
    pending = bench.ask(1)
    result = bench.answer()
    assert result.chunk is None and type(result.error) is given and not bench.after
    bench.error = None
    pending = bench.ask(1)
    assert bench.answer().chunk is not None and pending.first, "the session is as it was: still a first call"


def test_after_step_runs_in_the_worker_after_the_hand_over(bench: Bench) -> None:
    bench.gate.set()
    bench.start()
    order: list[str] = []
    bench.worker._after_step = lambda *_: (time.sleep(0.1), order.append("after"))  # type: ignore[assignment]
    bench.worker.new_generation(1)
    bench.ask(1)
    bench.answer()
    order.append("result")
    wait_for(lambda: len(order) == 2)
    assert order == ["result", "after"]


def test_stop_cancels_a_step(bench: Bench) -> None:
    bench.start()
    bench.worker.new_generation(1)
    bench.ask(1)
    bench.entered.wait(5)
    start = time.monotonic()
    assert bench.worker.stop(2.0) and time.monotonic() - start < 1.0
    assert not bench.worker.hung and bench.worker.status.phase is Phase.STOPPED
    assert all(s.closed for s in bench.policy.sessions)


def test_a_step_that_cannot_be_cancelled_is_reported_as_hung(bench: Bench) -> None:
    bench.start()
    bench.deaf = True
    bench.worker.new_generation(1)
    bench.ask(1)
    bench.entered.wait(5)
    assert not bench.worker.stop(0.05)
    assert bench.worker.hung
    bench.gate.set()
    wait_for(lambda: not bench.worker.alive)
    assert not bench.worker.hung


def test_stop_while_loading_raises_in_the_progress_callback() -> None:
    steps = []

    def factory(progress: Any) -> Any:
        while True:
            progress("shard", 0.1)
            steps.append(1)
            time.sleep(0.005)

    worker = idle_worker(factory)
    worker.start()
    wait_for(lambda: steps)
    assert worker.status.message == "shard" and worker.status.phase is Phase.LOADING
    assert worker.stop(2.0) and worker.status.phase is Phase.STOPPED


def test_failure_to_load_is_a_status() -> None:
    def factory(progress: Any) -> Any:
        raise FileNotFoundError("no such checkpoint")

    worker = idle_worker(factory)
    worker.start()
    wait_for(lambda: worker.status.phase is Phase.FAILED)
    assert worker.status.message == "FileNotFoundError: no such checkpoint"
    assert worker.stop(2.0)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError("no such device", got="'cuda'"), "the policy cannot be loaded: no such device; got: 'cuda'"),
        (
            CheckpointError("cannot be used", problems=["shard 7 is missing", "no metadata.json"]),
            "the policy cannot be loaded: cannot be used\n  - shard 7 is missing\n  - no metadata.json",
        ),
    ],
)
def test_what_a_person_can_cure_is_logged_as_its_own_text(error: Exception, line: str) -> None:
    lines: list[tuple[str, str]] = []

    def factory(progress: Any) -> Any:
        try:
            raise ValueError("inner")
        except ValueError as cause:
            raise error from cause

    worker = InferenceWorker(factory, notify=lambda: None, log=lambda *a: lines.append(a), after_step=lambda *_: None)
    worker.start()
    wait_for(lambda: worker.status.phase is Phase.FAILED)
    assert lines == [("error", line)] and worker.status.message == str(error)


def test_what_nobody_expected_is_logged_with_its_traceback() -> None:
    lines: list[str] = []
    policy = HoldPolicy()

    def infer(session: Any, observation: Any, *, cancelled: Any = None) -> Any:
        raise KeyError("q")

    policy.infer = infer  # type: ignore[method-assign,assignment]
    worker = InferenceWorker(
        lambda progress: policy, notify=lambda: None, log=lambda *a: lines.append(a[1]), after_step=lambda *_: None
    )
    worker.start()
    wait_for(lambda: worker.status.phase is Phase.FAILED)
    assert len(lines) == 1 and lines[0].startswith("the policy failed in its warm-up\nTraceback") and "'q'" in lines[0]


def test_progress_is_a_line_for_every_phase_and_every_tenth() -> None:
    lines: list[str] = []
    progress = ProgressLog(lines.append)
    for k in range(1001):  # tensors
        progress.update(WorkerStatus(message="loading weights", fraction=k / 1000))
    assert len(lines) == 11 and lines[3] == "loading: loading weights (30%)"
    for status in (
        WorkerStatus(Phase.WARMING_UP, "warming up", 0.0),
        WorkerStatus(Phase.WARMING_UP, "warm-up call 2 of 2", 0.5),
        *[WorkerStatus(Phase.READY, "ready", 1.0, warm_up_s=(1.0, 0.25))] * 3,
        WorkerStatus(Phase.STOPPED, "stopped"),
        WorkerStatus(Phase.FAILED, "has a line of its own"),
    ):
        progress.update(status)
    assert lines[11:] == [
        "warming up: warming up (0%)",
        "warming up: warm-up call 2 of 2 (50%)",
        "ready: first call of a session 1.00 s, later ones 0.25 s",
    ]


def test_a_policy_that_goes_away_in_its_warm_up_is_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_thread, "RELOAD_S", 0.01)
    lines: list[str] = []
    gone, left = [True, True], []

    def factory(progress: Any) -> Any:
        def rows(observation: Observation, step: int) -> np.ndarray:
            if gone:
                raise PolicyUnavailable(f"server down {len(gone)}")
            return np.zeros((24, 8))

        gone.pop()
        policy = ScriptedPolicy(rows)
        policy.disconnect = lambda: left.append(policy)  # type: ignore[attr-defined]
        return policy

    worker = InferenceWorker(
        factory, notify=lambda: lines.append(worker.status.message), log=lambda *a: None, after_step=lambda *_: None
    )
    worker.start()
    wait_for(lambda: worker.status.phase is Phase.READY)
    assert "server down 1" in lines and worker.status.message == "ready"
    assert worker.stop(2) and len(left) == 2  # the one that went away, too: its link and its processes


def test_an_unavailable_policy_is_a_result_and_trouble_but_no_traceback(bench: Bench) -> None:
    bench.gate.set()
    bench.start()
    bench.error = PolicyUnavailable("server down")
    bench.worker.new_generation(1)
    bench.ask(1)
    assert type(bench.answer().error) is PolicyUnavailable and not bench.lines
    assert "server down" in str(bench.worker.owner.trouble())
    bench.error = None
    bench.worker.new_generation(2)
    bench.ask(2)
    assert bench.answer().chunk is not None and bench.worker.owner.trouble() is None


def test_a_clients_step_gives_way_to_the_robot_and_starts_again(bench: Bench) -> None:
    bench.gate.set()
    bench.start()
    bench.worker.new_generation(1)
    starts: list[float] = []
    robot_asked = threading.Event()

    def long(policy: Any, cancelled: Any) -> str:
        starts.append(time.monotonic())
        while len(starts) == 1:
            if cancelled():
                raise Cancelled("interrupted")
            time.sleep(0.002)
        assert robot_asked.is_set()
        return "done"

    ticket = bench.worker.owner.submit(long, lane="client")
    wait_for(lambda: starts)
    robot_asked.set()
    bench.ask(1)
    assert bench.answer().chunk is not None
    assert ticket.result(2) == "done" and len(starts) == 2


def test_stop_before_start_is_harmless() -> None:
    assert idle_worker(lambda progress: HoldPolicy()).stop(0.1)


@pytest.mark.parametrize("kind", [EngineError, RuntimeError])
def test_a_failed_step_keeps_nothing_of_its_frames_alive(bench: Bench, no_collector: None, kind: type) -> None:
    alive: list[weakref.ref[Activations]] = []

    def rows(observation: Observation, step: int) -> np.ndarray:
        activations = Activations()
        if observation.prompt != "p":
            return np.zeros((24, 8))
        alive.append(weakref.ref(activations))
        try:
            raise ValueError("the device is out of memory")
        except ValueError as cause:
            raise (EngineError("no step", got=activations) if kind is EngineError else kind("no step")) from cause

    bench.policy._rows = rows
    bench.start()
    bench.worker.new_generation(1)
    bench.ask(1)
    result = bench.answer()
    assert type(result.error) is EngineError and "no step" in str(result.error)
    wait_for(lambda: alive[0]() is None, 2, "the frames of the failed step are gone")
    error = result.error
    assert error.__traceback__ is error.__cause__ is error.__context__ is None
    (line,) = bench.lines
    assert "Traceback" in line and "the device is out of memory" in line, "the log has it all"


def test_an_error_says_its_cause_in_words(bench: Bench) -> None:
    bench.gate.set()
    bench.start()
    bench.error = EngineError("no step")
    bench.error.__cause__ = ValueError("out of memory")
    bench.worker.new_generation(1)
    bench.ask(1)
    error = bench.answer().error
    assert error is not None and error.__notes__ == ["caused by ValueError: out of memory"]


def test_nothing_of_a_step_waits_in_the_worker_for_the_next_one(bench: Bench, no_collector: None) -> None:
    bench.gate.set()
    bench.policy._record = False
    bench.worker._after_step_wanted = lambda: False
    observations: list[weakref.ref[Observation]] = []
    bench.start()
    infer = bench.policy.infer
    bench.policy.infer = lambda s, o, **kw: (observations.append(weakref.ref(o)), infer(s, o, **kw))[1]  # type: ignore[method-assign]
    bench.worker.new_generation(1)
    pending = weakref.ref(bench.ask(1))
    chunk = weakref.ref(bench.answer().chunk)  # type: ignore[arg-type]
    del bench._cancelled  # the question belongs to the call, and this policy kept it
    for what in (pending, chunk, observations[0]):
        wait_for(lambda what=what: what() is None, 2, f"{what} is gone")
    assert not bench.after


def test_a_policy_that_fails_in_its_warm_up_is_freed(no_collector: None) -> None:
    policies: list[weakref.ref[ScriptedPolicy]] = []

    def factory(progress: Any) -> Any:
        def rows(observation: Observation, step: int) -> np.ndarray:
            raise RuntimeError("no kernel for this device")

        policy = ScriptedPolicy(rows)
        policies.append(weakref.ref(policy))
        return policy

    worker = idle_worker(factory)
    worker.start()
    wait_for(lambda: worker.status.phase is Phase.FAILED)
    wait_for(lambda: policies[0]() is None, 2, "the weights are gone while the status is kept")
    assert "no kernel" in worker.status.message


def test_work_after_a_step_gives_way_to_the_next_request(bench: Bench) -> None:
    bench.gate.set()
    done: list[float] = []

    def after(policy: Any, chunk: Any, observation: Observation) -> None:
        time.sleep(0.03)
        done.append(observation.state["joint_position"][0])

    bench.worker._after_step = after
    bench.start()
    bench.worker.new_generation(1)
    for number in (1.0, 2.0, 3.0):  # within a control step, as it is when the policy is the slower one
        bench.ask(1, number)
        bench.answer()
    wait_for(lambda: len(done) == 2, what="the third step, after which nothing was asked")
    assert done == [1.0, 3.0] and bench.worker.after_step_skipped == 1


def test_work_after_a_step_is_not_put_off_for_ever(bench: Bench) -> None:
    bench.gate.set()
    bench.worker._after_step = lambda *_: (time.sleep(0.01), bench.after.append(1))  # type: ignore[assignment]
    bench.start()
    bench.worker.new_generation(1)
    start = time.monotonic()
    while len(bench.after) < 4:
        bench.ask(1)
        bench.answer()
        assert time.monotonic() - start < 10
    assert bench.worker.after_step_skipped > 0
    assert time.monotonic() - start > 3 * 0.1, "a tenth of the time"


def test_the_robot_goes_on_with_a_new_session_when_its_replica_dies() -> None:
    """As with a policy server that went away: the call tells it, the next session is on a replica that lives."""
    made: list[Replicas] = []

    def factory(progress: Any) -> Any:
        made.append(Replicas(replica_fakes.sleeper, 2, progress=progress, care=Care(restart_s=30.0)))
        return made[0]

    worker = idle_worker(factory)
    worker.start()
    wait_for(lambda: worker.status.phase is Phase.READY, 30)
    spec = made[0].spec

    def ask(generation: int) -> Result:
        worker.submit(Request(generation, f"s{generation}", Pending(spec, 0.1), time.monotonic()))  # type: ignore[arg-type]
        found: list[Result] = []
        wait_for(lambda: bool(found.extend(r for r in [worker.take_result()] if r) or found))
        return found[0]

    worker.new_generation(1)
    first, second = ask(1), ask(1)
    assert first.chunk is not None and second.chunk is not None and second.chunk.step == 1
    pid = int(first.chunk.actions[0, 0])
    assert int(second.chunk.actions[0, 0]) == pid != os.getpid()
    os.kill(pid, signal.SIGKILL)
    assert isinstance(ask(1).error, PolicyUnavailable)
    worker.new_generation(2)
    later = ask(2)
    assert later.chunk is not None and later.chunk.step == 0 and int(later.chunk.actions[0, 0]) != pid
    assert worker.stop(10)
