"""The first lines of a follower: ``python -m wam_policy_ros.engine.parallel.start DESCRIPTOR PARENT``.

Not for people: the engine starts it. Before anything large is imported it is made sure that this process ends with
the one that started it, however that ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

BEAT_S = 0.25
_PR_SET_PDEATHSIG = 1


class Line:
    """The follower's end of the pipe to its leader."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # compilers this process starts may not keep it open
        self._pipe = Connection(descriptor)
        self._lock = threading.Lock()

    def receive(self) -> Any:
        """The next command. Ends this process when there will be none."""
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            os._exit(0)

    def send(self, kind: str, *content: Any) -> None:
        try:
            with self._lock:
                self._pipe.send((kind, *content))
        except OSError:
            os._exit(0)

    def beat(self) -> None:
        """Say from now on that this process runs, whatever its main thread waits for."""
        pause = threading.Event()

        def run() -> None:
            while not pause.wait(BEAT_S):
                self.send("beat")

        threading.Thread(target=run, name="wam_beat", daemon=True).start()


def end_with(parent: int) -> None:
    """Have the kernel end this process when the one that started it ends: also while it is stopped, or sits in a call
    that does not return."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)  # too late


def main() -> None:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the leader, who ends this one
    line = Line(descriptor)
    line.beat()
    from .follower import follow

    follow(line)


if __name__ == "__main__":
    main()
