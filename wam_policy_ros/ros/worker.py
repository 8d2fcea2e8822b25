"""The one thread that owns the policy: loads it, warms it up, then answers requests. Knows nothing of ROS."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from wam_policy_ros.contract.errors import Cancelled, EngineError, ObservationError, WamError
from wam_policy_ros.contract.fakes import example_observation
from wam_policy_ros.contract.interface import ActionChunk, Observation, Policy, PolicySpec

from .inputs import PendingObservation

Progress = Callable[[str, float], None]
PolicyFactory = Callable[[Progress], Policy]
AfterStep = Callable[[Policy, ActionChunk, Observation], None]
Log = Callable[[str, str], None]

IDLE_STEPS = 1.5
"""``after_step`` waits this many control steps for the next request, which comes first. A request that is due at once
is submitted at the next control tick, so within one step."""


class Phase(str, Enum):
    """Where the worker is."""

    LOADING = "loading"
    WARMING_UP = "warming up"
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


_FAILED = {
    Phase.LOADING: "the policy cannot be loaded",
    Phase.WARMING_UP: "the policy failed in its warm-up",
    Phase.READY: "the policy failed",
}


@dataclass(frozen=True)
class WorkerStatus:
    """What the worker is doing.

    Attributes:
        phase: see ``Phase``.
        message, fraction: progress of the phase; fraction 0 to 1.
        spec: the policy's spec once it is loaded.
        warm_up_s: duration of the first and of a later call, measured in the warm-up.
    """

    phase: Phase = Phase.LOADING
    message: str = "not started"
    fraction: float = 0.0
    spec: PolicySpec | None = None
    warm_up_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Request:
    """One call to make. ``generation`` changes with every new session; ``submitted_s`` is ``time.monotonic``."""

    generation: int
    session_id: str
    observation: PendingObservation
    submitted_s: float


@dataclass(frozen=True)
class Result:
    """The answer to a request: a chunk or an error, never both.

    Attributes:
        request: as submitted.
        chunk: None when there is an error.
        error: a ``WamError`` without traceback or cause; anything else becomes an ``EngineError`` with its text.
        latency_s: submission to answer on the steady clock.
        started_s, ended_s: of the call itself, ``time.monotonic``; None when it was never made.
    """

    request: Request
    chunk: ActionChunk | None
    error: WamError | None
    latency_s: float
    started_s: float | None = None
    ended_s: float | None = None


class InferenceWorker:
    """One thread, a 1-slot inbox (newest wins), a 1-slot mailbox for the result.

    Args:
        factory: makes the policy; called in the thread with a progress callback, which raises ``Cancelled`` when the
            worker is asked to stop.
        notify: called from the thread when a result or a new status is there; must be thread-safe and quick.
        log: called from the thread with a level (``error``) and text, tracebacks included.
        after_step: called in the thread after a chunk was handed over, for work that may not delay the next request
            by more than ``after_step_share`` of the time: beyond that it is left out, and counted in
            ``after_step_skipped``, when a request comes within ``IDLE_STEPS``.
        after_step_share: more than 0: requests without a pause, as a policy gets that is slower than
            ``control.execute_steps``, would put ``after_step`` off for ever.
        after_step_wanted: asked before each; while it says no, nothing is kept for ``after_step``.
    """

    def __init__(
        self,
        factory: PolicyFactory,
        *,
        notify: Callable[[], None],
        log: Log,
        after_step: AfterStep,
        after_step_wanted: Callable[[], bool] = lambda: True,
        after_step_share: float = 0.1,
    ) -> None:
        self._factory, self._notify, self._log = factory, notify, log
        self._after_step, self._after_step_wanted = after_step, after_step_wanted
        self._after_step_share = after_step_share
        self._cond = threading.Condition()
        self._stop = False
        self._generation = 0
        self._inbox: Request | None = None
        self._mailbox: Result | None = None
        self._status = WorkerStatus()
        self.superseded = self.after_step_skipped = 0
        self._after_step_due_s = 0.0
        self._thread = threading.Thread(target=self._run, name="wam_inference", daemon=True)

    def start(self) -> None:
        """Begin loading."""
        self._thread.start()

    @property
    def status(self) -> WorkerStatus:
        return self._status

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def hung(self) -> bool:
        """Asked to stop, but still running."""
        return self._stop and self.alive

    def new_generation(self, generation: int) -> None:
        """Everything of older generations is void: a running step is cancelled, its session closed, its result lost."""
        with self._cond:
            self._generation = generation
            self._mailbox = None
            if self._inbox is not None and self._inbox.generation != generation:
                self._inbox = None
            self._cond.notify_all()

    def submit(self, request: Request) -> None:
        """Put a request into the inbox; one that still lies there is superseded and counted."""
        with self._cond:
            if self._inbox is not None:
                self.superseded += 1
            self._inbox = request
            self._cond.notify_all()

    def take_result(self) -> Result | None:
        """Empty the mailbox."""
        with self._cond:
            result, self._mailbox = self._mailbox, None
            return result

    def stop(self, timeout_s: float) -> bool:
        """Cancel and join. False when the thread is still running after ``timeout_s`` (see ``hung``)."""
        with self._cond:
            self._stop = True
            self._inbox = self._mailbox = None
            self._cond.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self.alive

    def _set(self, **changes: Any) -> None:
        self._status = replace(self._status, **changes)
        self._notify()

    def _progress(self, message: str, fraction: float) -> None:
        if self._stop:
            raise Cancelled("stopped while loading")
        self._set(message=message, fraction=float(fraction))

    def _run(self) -> None:
        try:
            self._set(message="loading the policy")
            policy = self._factory(self._progress)
            self._set(phase=Phase.WARMING_UP, message="warming up", fraction=0.0, spec=policy.spec)
            self._warm_up(policy)
            self._set(phase=Phase.READY, message="ready", fraction=1.0)
            self._serve(policy)
            self._set(phase=Phase.STOPPED, message="stopped")
        except Cancelled:
            self._set(phase=Phase.STOPPED, message="stopped")
        except WamError as error:
            # A person can cure it, and its text says how.
            self._log("error", f"{_FAILED[self._status.phase]}: {error}")
            self._set(phase=Phase.FAILED, message=str(error))
        except Exception as error:
            # As text: the traceback's frames hold the policy, all its weights included.
            self._log("error", f"{_FAILED[self._status.phase]}\n{traceback.format_exc()}")
            self._set(phase=Phase.FAILED, message=f"{type(error).__name__}: {error}")

    def _warm_up(self, policy: Policy) -> None:
        """A first and a later call in a throwaway session, so that no robot waits for kernels to be built."""
        spec, session = policy.spec, policy.open()
        step_ns = 1e9 / spec.control_rate_hz
        later = len(spec.frame_offsets)
        try:
            for call, frames in enumerate((1, later)):
                self._progress(f"warm-up call {call + 1} of 2", call / 2)
                stamp_ns = 10**9 - round(min(spec.frame_offsets) * step_ns) * (call + 1)
                observation = example_observation(spec, frames=frames, stamp_ns=stamp_ns)
                start = time.monotonic()
                policy.infer(session, observation, cancelled=lambda: self._stop)
                self._set(warm_up_s=(*self._status.warm_up_s, time.monotonic() - start))
        finally:
            policy.close(session)

    def _serve(self, policy: Policy) -> None:
        session: Any = None
        generation, calls = -1, 0
        while True:
            with self._cond:
                while not self._stop and self._inbox is None and (session is None or generation == self._generation):
                    self._cond.wait()
                request, self._inbox = self._inbox, None
                stop, current = self._stop, self._generation
            if session is not None and (stop or generation != current):
                policy.close(session)
                session = None
            if stop:
                return
            if request is not None and request.generation == current:
                if session is None:
                    session, generation, calls = policy.open(request.session_id), request.generation, 0
                calls += self._answer(policy, session, request, first_call=calls == 0)
            del request  # what is not needed may not wait here for the next request

    def _answer(self, policy: Policy, session: Any, request: Request, *, first_call: bool) -> bool:
        """Make the call and hand the result over. True when there was a chunk."""
        observation: Observation | None = None
        chunk: ActionChunk | None = None
        error: WamError | None = None
        generation, started_s = request.generation, None
        try:
            observation = request.observation.materialise(policy.spec.cameras, first_call=first_call)
            started_s = time.monotonic()
            chunk = policy.infer(session, observation, cancelled=lambda: self._void(generation))
        except WamError as e:
            if not isinstance(e, (ObservationError, Cancelled)):
                self._log("error", f"the policy refused a step\n{traceback.format_exc()}")
            error = _bare(e)
        except Exception as e:
            self._log("error", f"the policy raised\n{traceback.format_exc()}")
            error = EngineError(f"the policy raised {type(e).__name__}: {e}")
        ended_s = time.monotonic()
        self._hand_over(Result(request, chunk, error, ended_s - request.submitted_s, started_s, ended_s))
        if chunk is None or observation is None:
            return False
        if self._after_step_wanted():
            start = time.monotonic()
            if start >= self._after_step_due_s or self._stays_idle(generation, IDLE_STEPS * policy.spec.dt_s):
                start = time.monotonic()
                self._after_step(policy, chunk, observation)
                end = time.monotonic()
                self._after_step_due_s = end + (end - start) * (1 / self._after_step_share - 1)
            else:
                self.after_step_skipped += 1
        return True

    def _stays_idle(self, generation: int, timeout_s: float) -> bool:
        with self._cond:
            return not self._cond.wait_for(lambda: self._inbox is not None or self._void(generation), timeout_s)

    def _void(self, generation: int) -> bool:
        return self._stop or generation != self._generation

    def _hand_over(self, result: Result) -> None:
        with self._cond:
            if result.request.generation == self._generation:
                self._mailbox = result
        self._notify()


def _bare(error: WamError) -> WamError:
    """Only the text of an error. It lives on in results and states, and its traceback would keep the frames of the
    failed step alive: activations and key/value windows, in a cycle that only the garbage collector ends."""
    if error.__cause__ is not None:
        error.add_note(f"caused by {type(error.__cause__).__name__}: {error.__cause__}")
    for name in ("got", "expected"):
        value = getattr(error, name)
        setattr(error, name, None if value is None else str(value))
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
