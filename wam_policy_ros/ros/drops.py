"""What was dropped, why, and since when: for counters, for the log, and for the reason of a hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

Log = Callable[[str], None]


class Drops:
    """Counts the dropped messages of a stream by reason, and logs each reason once per outage.

    Args:
        log: log function.
    """

    def __init__(self, log: Log) -> None:
        self.by_reason: Counter[str] = Counter()
        self._log, self._logged = log, set[str]()

    def add(self, reason: str, message: str) -> None:
        """Count one; the message of the first of its reason is logged."""
        self.by_reason[reason] += 1
        if reason not in self._logged:
            self._logged.add(reason)
            self._log(f"{message} (dropped; further ones are only counted)")

    def rearm(self) -> None:
        """An outage is over: in the next one every reason is logged again."""
        self._logged.clear()


class SinceGood:
    """What was dropped since the last good message of one camera or joint.

    Attributes:
        remedy: against the last drop, None when unknown.
    """

    def __init__(self) -> None:
        self.remedy: str | None = None
        self._by_reason: Counter[str] = Counter()
        self._last = ""

    def add(self, reason: str, detail: str, remedy: str | None = None) -> None:
        """Count one. ``detail`` is what was wrong with this one."""
        self._by_reason[reason] += 1
        self._last, self.remedy = detail, remedy

    def clear(self) -> None:
        """A good message has come."""
        if self._by_reason:
            self._by_reason.clear()
            self._last, self.remedy = "", None

    def text(self) -> str:
        """Empty, or e.g. ``dropped: 3 x not finite, the last: position of ['j3']``."""
        if not self._by_reason:
            return ""
        reasons = ", ".join(f"{n} x {reason}" for reason, n in self._by_reason.items())
        return f"dropped: {reasons}" + (f", the last: {self._last}" if self._last else "")
