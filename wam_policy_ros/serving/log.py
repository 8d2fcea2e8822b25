"""What the server says: one line each, free of control characters, and not more than a disk can take."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

Log = Callable[[str, str], None]
LINES, WINDOW_S = 200, 10.0


class ServerLog:
    """Passes lines on. Clients can provoke as many as they like, so beyond ``LINES`` in ``WINDOW_S`` the rest is
    counted; errors of the server itself are always told.

    Args:
        log: called with a level (``info``, ``warning``, ``error``) and text; only an error may have several lines.
        clock: for tests.
    """

    def __init__(self, log: Log, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._window_s, self._lines = float("-inf"), 0

    def __call__(self, level: str, text: str) -> None:
        now_s = self._clock()
        if now_s - self._window_s >= WINDOW_S:
            left_out, self._lines, self._window_s = self._lines - LINES, 0, now_s
            if left_out > 0:
                self._log("warning", f"{left_out} lines about clients were left out")
        self._lines += level != "error"
        if level == "error" or self._lines <= LINES:
            self._log(level, printable(text, keep="\n" if level == "error" else ""))


def printable(text: str, keep: str = "") -> str:
    """Control characters, lone surrogates and the like as escapes: a client's text must not write lines of its own."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


class LibraryHandler(logging.Handler):
    """The WebSocket library's own messages: broken handshakes and the like. Tracebacks help nobody there."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        cause = record.exc_info[1] if record.exc_info else None
        while cause is not None and cause.__cause__ is not None:
            cause = cause.__cause__
        text = record.getMessage() + (f": {type(cause).__name__}: {cause}" if cause is not None else "")
        self._log("warning", f"websocket: {text[:300]}")


def library_logger(log: Log) -> logging.Logger:
    """A logger for the WebSocket library that ends in ``log``."""
    logger = logging.Logger("wam_policy_ros.websockets", logging.WARNING)
    logger.addHandler(LibraryHandler(log))
    return logger
