"""Watches the executor from a thread of its own: a node whose callbacks stand still sees no camera die. No rclpy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class StallWatch:
    """Holds the robot while the control loop is not called.

    Args:
        limit_s: so long a time between two ticks is a stall.
        ticked_ns: steady time of the last tick, 0 while there is nothing to watch.
        hold: stops the robot; called in the watch's thread, once per stall. It may not wait for the executor.
    """

    def __init__(self, limit_s: float, ticked_ns: Callable[[], int], hold: Callable[[], object]) -> None:
        self._limit_s, self._ticked_ns, self._hold = limit_s, ticked_ns, hold
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wam_stall_watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended."""
        self._end.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        held_ns = 0
        while not self._end.wait(self._limit_s / 5):
            last_ns = self._ticked_ns()
            if last_ns and last_ns != held_ns and time.monotonic_ns() - last_ns > self._limit_s * 1e9:
                held_ns = last_ns
                self._hold()
