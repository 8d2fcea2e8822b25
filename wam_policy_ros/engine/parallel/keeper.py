"""Starts the other processes of a policy, listens to them, and ends them. Knows nothing of what they do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import wam_policy_ros

TICK_S = 0.1


class Keeper(threading.Thread):
    """A thread for as long as there are processes: the kernel ends them when it ends (see ``start.end_with``).

    A process is lost when it ends unasked, when nothing is heard of it for ``silent_s``, or when it does not do within
    a limit what somebody waits for (``expect``). With one of them lost all are killed, and the keeper stays to say why.

    Args:
        count: processes.
        environment: of theirs, on top of this one's.
        silent_s: each says several times a second that it runs.
        kept_open: descriptors that they have, too, under the same numbers.

    Attributes:
        fault: why the processes are lost; None while they are not.
        answers: per process, what it answered.
        said: per process, the newest line about its progress and the fraction.
    """

    def __init__(
        self, count: int, environment: Mapping[str, str], silent_s: float, kept_open: Sequence[int] = ()
    ) -> None:
        super().__init__(name="wam_ranks", daemon=True)
        self.fault: str | None = None
        self.answers: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(count)]
        self.said: list[tuple[str, float]] = [("starting", 0.0)] * count
        self.silent_s = silent_s
        self._environment, self._kept_open = environment, kept_open
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._spawned = threading.Event()
        self._ending = False
        self._lock = threading.Lock()
        self._left_s: float | None = None
        self._at_fault: list[Callable[[], None]] = []

    # -- any thread ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the processes.

        Raises:
            OSError: one of them cannot be started.
        """
        self.start()
        self._spawned.wait()
        if self.fault is not None:
            raise OSError(self.fault)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def send(self, index: int, message: Any) -> None:
        """Does nothing when that process is gone: ``fault`` says so."""
        try:
            self._pipes[index].send(message)
        except OSError:
            self._lose(index, _ending_of(self._processes[index]))

    def expect(self, limit_s: float | None) -> None:
        """From now on something has to come within ``limit_s``; None: nothing is waited for."""
        with self._lock:
            self._left_s = limit_s

    def at_fault(self, hook: Callable[[], None]) -> None:
        """Have ``hook`` called, in a thread of its own, when the processes are lost."""
        self._at_fault.append(hook)

    def lose(self, why: str) -> None:
        """Give the processes up, unless they are lost already."""
        self._lose(None, why)

    def end(self) -> None:
        """Kill what still runs. Idempotent, returns at once."""
        self._ending = True
        self._kill()

    # -- the thread ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            for _ in self.answers:
                self._start_one()
        except OSError as error:
            self.fault = f"a process cannot be started: {error}"
        finally:
            self._spawned.set()
        silence_s = [0.0] * len(self._processes)
        open_pipes = dict(enumerate(self._pipes))
        before_s = time.monotonic()
        while not self._ending and self.fault is None:
            ready = wait(list(open_pipes.values()), TICK_S)
            now_s = time.monotonic()
            # Not more than a few ticks at once: when this process was stopped for a while, it is nobody else's fault.
            passed_s, before_s = min(now_s - before_s, 5 * TICK_S), now_s
            for index, pipe in open_pipes.items():
                silence_s[index] = 0.0 if pipe in ready else silence_s[index] + passed_s
                if pipe in ready:
                    self._listen(index, pipe)
                elif silence_s[index] > self.silent_s:
                    self._lose(index, f"has not been heard of for {silence_s[index]:.1f} s")
            self._count_down(passed_s)
        self._kill()
        for process in self._processes:
            process.wait()
        for pipe in self._pipes:
            pipe.close()

    def _start_one(self) -> None:
        mine, theirs = Pipe()
        environment = {**os.environ, **{k: v for k, v in self._environment.items() if k not in os.environ}}
        # What this process can import, that one can, too.
        paths = [str(Path(wam_policy_ros.__file__).parents[1]), *(p for p in sys.path if p)]
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
        process = subprocess.Popen(
            [sys.executable, "-m", "wam_policy_ros.engine.parallel.start", str(theirs.fileno()), str(os.getpid())],
            env=environment,
            pass_fds=[theirs.fileno(), *self._kept_open],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what this process writes to its own is its answer to somebody
            start_new_session=True,  # signals of the terminal are for this process
        )
        theirs.close()
        self._pipes.append(mine)
        self._processes.append(process)

    def _listen(self, index: int, pipe: Connection) -> None:
        try:
            kind, *content = pipe.recv()
        except (EOFError, OSError):
            self._lose(index, _ending_of(self._processes[index]))
            return
        if kind == "answer":
            self.answers[index].put(content[0])
        elif kind == "progress":
            self.said[index] = (content[0], content[1])
        elif kind == "failed":
            self._lose(index, f"failed: {content[0]}")

    def _count_down(self, passed_s: float) -> None:
        with self._lock:
            if self._left_s is None:
                return
            self._left_s -= passed_s
            late = self._left_s < 0
        if late:
            self._lose(None, "did not answer in time")

    def _lose(self, index: int | None, why: str) -> None:
        with self._lock:
            if self._ending or self.fault is not None:
                return
            who = "another GPU's process" if index is None else f"the process of rank {index + 1}"
            self.fault = f"{who} (pid {self.pids if index is None else self.pids[index]}) {why}"
        self._kill()
        for hook in self._at_fault:
            threading.Thread(target=hook, name="wam_ranks_lost", daemon=True).start()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()  # also one that is stopped


def _ending_of(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return "hung up"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
