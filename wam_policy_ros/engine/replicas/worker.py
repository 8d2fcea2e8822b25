"""The process of a replica: ``python -m wam_policy_ros.engine.replicas.worker DESCRIPTOR PARENT``.

Not for people: ``Replica`` starts it. It makes a policy and does what the pipe says, one call after the other. Nothing
large is imported before it is sure that this process ends with the one that started it.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

LOOK_S = 0.25
_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Have the kernel end this process with the thread that started it, however that ends, and whatever this one
    does then."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)  # too late


class Line:
    """This process's end of the pipe. Calls are taken in order; a cancellation is noticed during its call."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._pipe = Connection(descriptor)
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._cancelled: set[int] = set()

    def first(self) -> Any:
        """Before ``listen``: what to be."""
        return self._receive()

    def listen(self) -> None:
        """From now on in a thread of its own, which ends this process when nobody is at the other end."""

        def run() -> None:
            while True:
                number, *call = self._receive()
                if call:
                    self._calls.put((number, *call))
                else:
                    self._cancelled.add(number)

        threading.Thread(target=run, name="wam_replica_line", daemon=True).start()

    def next(self, timeout_s: float) -> Any:
        """The next call: its number, verb and arguments; None: there was none."""
        try:
            return self._calls.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def cancelled(self, number: int) -> bool:
        return number in self._cancelled

    def say(self, kind: str, *content: Any) -> None:
        try:
            # Not ``send``: PyTorch teaches that one to pass tensors by descriptor.
            self._pipe.send_bytes(pickle.dumps((kind, *content), protocol=pickle.HIGHEST_PROTOCOL))
        except OSError:
            os._exit(0)

    def answer(self, number: int, value: Any) -> None:
        self._cancelled.discard(number)
        self.say("answer", number, value)

    def _receive(self) -> Any:
        try:
            return pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)


class Worker:
    """Runs a policy's methods; sessions have numbers here."""

    def __init__(self, line: Line, policy: Any) -> None:
        self._line, self._policy = line, policy
        self._sessions: dict[int, Any] = {}
        self._numbers = itertools.count()

    def run(self) -> None:
        """Until this process ends, or the policy cannot go on."""
        from wam_policy_ros.contract.errors import EngineError, WamError, bare

        verbs: dict[str, Callable[..., Any]] = {
            "open": self._open, "fork": self._fork, "infer": self._infer, "observe": self._observe,
            "reset": self._reset, "close": self._close, "render": self._render,
        }  # fmt: skip
        told: dict[str, Any] = {}
        while getattr(self._policy, "lost", None) is None:
            if (call := self._line.next(LOOK_S)) is None:
                continue
            number, verb, *args = call
            try:
                value = verbs[verb](number, *args) if verb == "infer" else verbs[verb](*args)
            except WamError as error:
                value = bare(error)
            except Exception as error:
                traceback.print_exc()
                value = EngineError(f"the policy raised {type(error).__name__}: {error}")
            if (details := getattr(self._policy, "details", {})) != told:
                self._line.say("details", number, details)
                told = details
            self._line.answer(number, value)
            del value, args, call
        os._exit(1)  # a part of it is gone for good; a new process has all of it again

    def _open(self, session_id: str, seed: int | None) -> int:
        key = next(self._numbers)
        self._sessions[key] = self._policy.open(session_id, seed=seed)
        return key

    def _fork(self, parent: int, session_id: str, seed: int | None) -> int:
        from wam_policy_ros.contract.errors import SessionError
        from wam_policy_ros.contract.interface import Forks

        if not isinstance(self._policy, Forks):
            raise SessionError("sessions of this policy cannot be forked", got=type(self._policy).__name__)
        key = next(self._numbers)
        self._sessions[key] = self._policy.fork(self._sessions[parent], session_id, seed=seed)
        return key

    def _infer(self, number: int, key: int, observation: Any) -> Any:
        chunk = self._policy.infer(self._sessions[key], observation, cancelled=lambda: self._line.cancelled(number))
        # As bytes: who asked needs no PyTorch to keep them, and another process has not this GPU.
        return chunk if chunk.video is None else replace(chunk, video=pickle.dumps(chunk.video))

    def _observe(self, key: int, slot: int, frames: Any) -> bool:
        observe = getattr(self._policy, "observe", None)
        return bool(observe is not None and observe(self._sessions[key], slot, frames))

    def _reset(self, key: int) -> None:
        self._policy.reset(self._sessions[key])

    def _close(self, key: int) -> None:
        session = self._sessions.pop(key, None)
        if session is not None:
            self._policy.close(session)

    def _render(self, chunk: Any) -> Any:
        return self._policy.render_video(replace(chunk, video=pickle.loads(chunk.video)))


def work(line: Line) -> None:
    """Make the policy, then serve it."""
    from wam_policy_ros.contract.errors import EngineError, WamError, bare
    from wam_policy_ros.contract.warm_up import warm_up

    factory, index, warm = line.first()
    line.listen()

    def progress(text: str, fraction: float) -> None:
        line.say("progress", text, fraction)

    try:
        policy = factory(index, progress)
        for _ in warm_up(policy, progress) if warm else ():
            pass
    except WamError as error:
        line.say("failed", bare(error))
        os._exit(1)
    except Exception as error:
        traceback.print_exc()
        line.say("failed", EngineError(f"the policy cannot be loaded: {type(error).__name__}: {error}"))
        os._exit(1)
    line.say("ready", policy.spec)
    Worker(line, policy).run()


def main() -> None:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    work(Line(descriptor))


if __name__ == "__main__":
    main()
