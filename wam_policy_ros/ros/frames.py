"""A camera message that becomes a picture once, and the thread that makes pictures before they are asked for.

A request looks at twelve images of three cameras. Decoding and resizing them when the request is made costs 15 ms and
more for 640x480; those from before the newest moment are there already, and can be pictures by then. They are also
much smaller than messages.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Make = Callable[[Any], Pixels]
"""From a message to the picture that the policy gets."""

DecodeLater = Callable[["Frame", Make, bool], None]
"""Makes the picture of a frame soon, and returns at once; True: before all others."""

WAITING = 128
"""So many frames wait for the thread at most; beyond that the oldest is left to whoever asks for it."""


class Frame:
    """A camera message as it arrived, or the picture made of it.

    Args:
        stamp_ns: of the message, or its arrival.
        msg: the message.
        arrived_ns: on the steady clock.
    """

    __slots__ = ("_lock", "_msg", "_picture", "arrived_ns", "stamp_ns")

    def __init__(self, stamp_ns: int, msg: Any, arrived_ns: int = 0) -> None:
        self.stamp_ns, self.arrived_ns = stamp_ns, arrived_ns
        self._lock = threading.Lock()
        self._msg: Any = msg
        self._picture: Pixels | None = None

    @property
    def msg(self) -> Any:
        """The message; None once there is a picture instead."""
        return self._msg

    def picture(self, make: Make) -> Pixels:
        """The picture, made now unless it is there. Of several threads one makes it and the others wait.

        Raises:
            InvalidImage: from ``make``; the message stays.
        """
        with self._lock:
            if self._picture is None:
                self._picture = make(self._msg)
                self._msg = None
            return self._picture


class DecodeAhead:
    """One thread that makes pictures of the frames it is given, in order."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Frame, Make]] = deque(maxlen=WAITING)
        self._cond = threading.Condition()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="wam_decode", daemon=True)
        self._thread.start()

    def add(self, frame: Frame, make: Make, urgent: bool = False) -> None:
        """Returns at once. ``urgent``: before all others."""
        with self._cond:
            (self._waiting.appendleft if urgent else self._waiting.append)((frame, make))
            self._cond.notify()

    def stop(self, timeout_s: float = 1.0) -> None:
        """End the thread; what waits is left alone."""
        with self._cond:
            self._stop = True
            self._cond.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._cond:
                while not self._stop and not self._waiting:
                    self._cond.wait()
                if self._stop:
                    return
                frame, make = self._waiting.popleft()
            # The request that needs this frame meets the error itself, with somebody to tell it to.
            with contextlib.suppress(Exception):
                frame.picture(make)
            del frame, make
