"""One replica as the serving process has it: a policy whose calls run in a process of its own, which is started again
when it ends. No PyTorch here."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import wam_policy_ros
from wam_policy_ros.contract.errors import EngineError, PolicyLost, ReplicaDied, SessionError, WamError
from wam_policy_ros.contract.interface import ActionChunk, Observation, PolicySpec

POLL_S = 0.01
END_S = 5.0
RemoteFactory = Callable[[int, Callable[[str, float], None]], Any]
"""``factory(index, progress)`` makes the policy of replica ``index`` in its process; has to be picklable."""


@dataclass(frozen=True)
class Care:
    """How replicas are looked after.

    Attributes:
        hang_s: a call that takes longer is taken for hung, and its process is ended; 0: never.
        restart_s: pause before a process is started again; doubles with every one that did not live for ``healthy_s``.
        max_restarts: of processes in a row that did not; then it stays away.
    """

    hang_s: float = 120.0
    restart_s: float = 1.0
    healthy_s: float = 300.0
    max_restarts: int = 5


@dataclass(eq=False)
class ReplicaSession:
    """A session of a replica. ``life``: of its process; ``key``: its name there."""

    session_id: str
    place: int
    life: int
    key: int
    replica: Replica
    closed: bool = False


class _Life:
    """One process, from its start to its end."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._numbers = 0
        mine, theirs = Pipe()
        # What this process can import, that one can, too.
        paths = [str(Path(wam_policy_ros.__file__).parents[1]), *(p for p in sys.path if p)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "wam_policy_ros.engine.replicas.worker", str(theirs.fileno()), str(os.getpid())],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what this process writes to its own is its answer to somebody
            start_new_session=True,  # signals of the terminal are for this process
        )
        theirs.close()
        self._pipe: Connection = mine

    def send(self, *message: Any) -> None:
        self._pipe.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def receive(self, timeout_s: float) -> Any:
        """None: nothing came. Raises EOFError or OSError when nothing will."""
        return pickle.loads(self._pipe.recv_bytes()) if self._pipe.poll(timeout_s) else None

    def begin(self, *call: Any) -> int:
        """Ask; the number of the question."""
        self._numbers += 1
        self.send(self._numbers, *call)
        return self._numbers

    def ending(self) -> str:
        try:
            code = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        self.kill()
        self.process.wait()
        self._pipe.close()


def same_policy(a: PolicySpec, b: PolicySpec) -> bool:
    """Whether clients cannot tell them apart, bits aside: another GPU has another fingerprint."""
    return replace(a, details={}, fingerprint=None) == replace(b, details={}, fingerprint=None)


class Replica:
    """A policy in a process. Implements ``contract.places.Place``: one thread calls it; properties may be read by any.

    Its own thread starts the process, waits for its end, and starts another one.

    Args:
        factory: see ``RemoteFactory``.
        place: number of the replica.
        progress: told what the process says while it loads; any thread.
        log: told with a level and a line what happened to the process.
    """

    def __init__(
        self,
        factory: RemoteFactory,
        place: int,
        *,
        care: Care,
        progress: Callable[[int, str, float], None],
        log: Callable[[str, str], None],
    ) -> None:
        self.place, self._factory, self._care = place, factory, care
        self._told, self._log = progress, log
        self._calling = threading.Lock()
        self._life: _Life | None = None  # while it is ready
        self._starting: _Life | None = None
        self._lives = self._open = self._failures = 0
        self._trouble = "starting"
        self._said: dict[str, Any] = {}  # of its memory
        self._spec: PolicySpec | None = None
        self.failed: WamError | None = None  # it never came about
        self._ready, self._ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._look_after, name=f"wam_replica_{place}", daemon=True)

    # -- any thread -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> bool:
        """False: not yet. True: ready, or ``failed`` says why it never will be."""
        return self._ready.wait(timeout_s)

    def end(self, timeout_s: float = END_S) -> None:
        """End the process. Idempotent."""
        self._ending.set()
        for life in (self._life, self._starting):
            if life is not None:
                life.kill()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    @property
    def spec(self) -> PolicySpec:
        assert self._spec is not None, "not ready"
        return self._spec

    @property
    def trouble(self) -> str:
        return self._trouble

    @property
    def sessions(self) -> int:
        return self._open

    @property
    def details(self) -> dict[str, Any]:
        life = self._life
        spec = self._spec
        return {
            "pid": None if life is None else life.process.pid,
            "restarts": max(0, self._lives - 1),
            "device": None if spec is None else spec.details.get("device"),
            **({} if life is None else self._said),
        }

    # -- contract.interface.Policy ----------------------------------------------------------------------------------

    def open(self, session_id: str | None = None, *, seed: int | None = None) -> ReplicaSession:
        """Raises ReplicaDied when there is no process to open it in."""
        name = session_id or uuid.uuid4().hex
        life, key = self._ask(None, "open", name, seed)
        self._open += 1
        return ReplicaSession(name, self.place, life, key, self)

    def fork(self, session: Any, session_id: str | None = None, *, seed: int | None = None) -> ReplicaSession:
        """In the same process; see ``contract.interface.Forks``."""
        name = session_id or uuid.uuid4().hex
        life, key = self._ask(self._own(session), "fork", session.key, name, seed)
        self._open += 1
        return ReplicaSession(name, self.place, life, key, self)

    def reserve(self) -> ReplicaSession | None:
        """See ``contract.interface.Reserves``."""
        return None if self.spec.details.get("sessions_capacity") is None else self.open("reserved")

    def infer(
        self, session: Any, observation: Observation, *, cancelled: Callable[[], bool] | None = None
    ) -> ActionChunk:
        """As in ``Policy.infer``; ReplicaDied when the process ended or hung, before or in this call."""
        chunk: ActionChunk = self._ask(self._own(session), "infer", session.key, observation, cancelled=cancelled)[1]
        return chunk

    def observe(self, session: Any, slot: int, frames: Mapping[str, npt.NDArray[np.uint8]]) -> bool:
        return bool(self._ask(self._own(session), "observe", session.key, slot, dict(frames))[1])

    def reset(self, session: Any) -> None:
        self._ask(self._own(session), "reset", session.key)

    def close(self, session: Any) -> None:
        """Whichever replica it is of: at the end one closes what is left of all."""
        if not isinstance(session, ReplicaSession):
            raise SessionError("not a session of this policy", got=type(session).__name__, remedy="use policy.open()")
        if session.closed:
            return
        session.closed = True
        replica = session.replica
        life = replica._life
        if life is not None and life.number == session.life:
            replica._open -= 1
            with suppress(ReplicaDied):  # and its memory with it
                replica._ask(session.life, "close", session.key)

    def render_video(self, chunk: ActionChunk) -> npt.NDArray[np.uint8] | None:
        """Of a chunk of any replica: what it carries is whole."""
        if not isinstance(chunk.video, bytes):
            return None
        pixels: npt.NDArray[np.uint8] | None = self._ask(None, "render", replace(chunk, info={}))[1]
        return pixels

    # -- details ----------------------------------------------------------------------------------------------------

    def _own(self, session: Any) -> int:
        if not isinstance(session, ReplicaSession) or session.replica is not self:
            raise SessionError("not a session of this replica", got=type(session).__name__)
        if session.closed:
            raise SessionError("the session is closed", got=session.session_id)
        return session.life

    def _ask(self, life_number: int | None, *call: Any, cancelled: Callable[[], bool] | None = None) -> tuple[int, Any]:
        """The number of the process that answered, and its answer."""
        with self._calling:
            life = self._life
            if life is None or life_number not in (None, life.number):
                raise ReplicaDied(
                    f"replica {self.place} " + ("has ended since this session began" if life else self._trouble),
                    remedy="go on with a new session",
                )
            try:
                answer = self._converse(life, call, cancelled)
            except (EOFError, OSError):
                self._trouble = self._trouble or "has ended"  # from now on; its thread may notice later
                raise ReplicaDied(
                    f"the process of replica {self.place} {life.ending()}",
                    remedy="its sessions are lost; go on with a new one",
                ) from None
        if isinstance(answer, PolicyLost):  # a part of it: what is left of it is about to end, and comes back whole
            self._trouble = self._trouble or "has lost a part of its policy"
            remedy = "its sessions are lost; go on with a new one"
            raise ReplicaDied(f"replica {self.place}: {answer.what}", got=answer.got, remedy=remedy)
        if isinstance(answer, WamError):
            raise answer
        return life.number, answer

    def _converse(self, life: _Life, call: tuple[Any, ...], cancelled: Callable[[], bool] | None) -> Any:
        number = life.begin(*call)
        begin_s, told, hung = time.monotonic(), False, False
        while (message := self._answer_of(life)) is None:
            if cancelled is not None and not told and cancelled():
                told = True
                life.send(number)
            if not hung and self._care.hang_s and time.monotonic() - begin_s > self._care.hang_s:
                hung = True
                self._log("error", f"replica {self.place}: a call has been running for {self._care.hang_s:.0f} s; "
                          "its process is ended")  # fmt: skip
                life.kill()
        kind, answered, answer = message
        assert (kind, answered) == ("answer", number)
        return answer

    def _answer_of(self, life: _Life) -> Any:
        """None: not yet. What the process says of itself beside it is noted."""
        message = life.receive(POLL_S)
        if message is not None and message[0] == "details":
            self._said = message[2]
            return None
        return message

    # -- the thread -------------------------------------------------------------------------------------------------

    def _look_after(self) -> None:
        while not self._ending.is_set():
            began_s = time.monotonic()
            life = self._begun()
            if life is not None:
                self._up(life)
                life.process.wait()
                self._down(life)
                with self._calling:  # who waits for an answer finds the end of the pipe first
                    life.close()
            if self.failed is not None or self._ending.is_set():
                break
            if time.monotonic() - began_s > self._care.healthy_s:
                self._failures = 0
            self._failures += 1
            if self._failures > self._care.max_restarts:
                self._trouble = f"ended {self._failures} times in a row and is not started again; {self._trouble}"
                self._log("error", f"replica {self.place} {self._trouble}")
                break
            self._ending.wait(self._care.restart_s * 2 ** (self._failures - 1))
        self._ready.set()

    def _begun(self) -> _Life | None:
        """A process that is ready to be called; None: it failed, and said why."""
        self._lives += 1
        try:
            life = self._starting = _Life(self._lives)
        except OSError as error:
            self._gave_up(EngineError(f"the process of replica {self.place} cannot be started", got=str(error)))
            return None
        why: WamError | None = None
        try:
            # What follows the first process has to be as warm as it was.
            life.send(self._factory, self.place, self._lives > 1)
            while True:
                message = life.receive(1.0)
                if message is None:
                    if self._ending.is_set():
                        life.kill()
                    continue
                kind, *content = message
                if kind == "ready":
                    self._check(content[0])
                    return life
                if kind == "failed":
                    why = content[0]
                    break
                self._told(self.place, *content)
        except (EOFError, OSError):
            why = EngineError(f"the process of replica {self.place} {life.ending()} while it was loading")
        except WamError as error:
            why = error
        finally:
            self._starting = None
        life.close()
        assert why is not None
        self._gave_up(why)
        return None

    def _check(self, spec: PolicySpec) -> None:
        first = self._spec
        if first is not None and not same_policy(first, spec):
            raise EngineError(f"replica {self.place} came back as another policy", got=spec, expected=first)
        self._spec = spec

    def _gave_up(self, error: WamError) -> None:
        if self._ready.is_set():  # it was there once, so it may be there again
            self._trouble = f"cannot be started again: {error}"
            self._log("error", f"replica {self.place} {self._trouble}")
        else:
            self.failed = error

    def _up(self, life: _Life) -> None:
        self._life, self._open, self._trouble, self._said = life, 0, "", {}
        if self._lives > 1:
            self._log("warn", f"replica {self.place} is back, process {life.process.pid}")
        self._ready.set()

    def _down(self, life: _Life) -> None:
        lost, self._life, self._open = self._open, None, 0
        self._trouble = f"{life.ending()} and is being started again"
        if not self._ending.is_set():
            self._log("error", f"replica {self.place}, process {life.process.pid}, {self._trouble}; "
                      f"{lost} session(s) are lost")  # fmt: skip
