"""What the control loop says of itself: substate, reason, fault, counters. Knows no rclpy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Any

from .meters import Durations

COUNTED = (
    *("chunks", "late", "refused", "clamped", "discarded", "off_schedule", "padded", "sessions", "clock_jumps"),
    *("stop_and_go", "policy_lost", "executor_stalls", "controller_rejections"),
)


class Substate(str, Enum):
    """What an active node does. ``holding``: it stopped and says why; ``waiting``: not started yet, and says why."""

    INACTIVE = "inactive"
    WAITING = "waiting"
    HOLDING = "holding"
    RUNNING = "running"


class Standing:
    """The part of the control loop that people see.

    Args:
        prompt: the instruction at the start.
        changed: called after a change of substate, reason, session or prompt.
        log: called with a level (``info``, ``warn``, ``error``) and a line.

    Attributes:
        substate, reason: what it does, and why it does not run.
        fault: why it is latched, or empty.
        session_id, step: of the session under way; number of answers in it.
        latency_s, timings_s: of the newest answer.
        counters, refusals: numbers since configure; refused chunks by reason.
        durations: of steps and of what lies around them.
    """

    def __init__(self, prompt: str, changed: Callable[[], None], log: Callable[[str, str], None]) -> None:
        self._changed, self._log = changed, log
        self.substate, self.reason, self.fault = Substate.INACTIVE, "", ""
        self.prompt, self.session_id, self.step = prompt, "", 0
        self.latency_s: float | None = None
        self.timings_s: dict[str, float] = {}
        self.counters: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.durations = Durations()
        self._said: tuple[Substate, str] = (Substate.INACTIVE, "")

    @property
    def active(self) -> bool:
        return self.substate is not Substate.INACTIVE

    def warn(self, line: str) -> None:
        """To the node's log."""
        self._log("warn", line)

    def _say(self, substate: Substate, reason: str, key: str | None = None, *, log: bool = True) -> None:
        """Set substate and reason. ``key`` is the part of the reason that does not change from tick to tick; without
        ``log`` only ``~/state`` tells it."""
        self.substate, self.reason = substate, reason
        said = (substate, key if key is not None else reason)
        if said == self._said:
            return
        self._said = said
        if log and substate in (Substate.HOLDING, Substate.WAITING) and not self.fault:
            self._log("warn" if substate is Substate.HOLDING else "info", f"{substate.value}: {reason}")
        self._changed()

    def summary(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return {
            "substate": self.substate.value,
            "reason": self.reason,
            "fault": self.fault,
            "session": self.session_id,
            "step": self.step,
            "prompt": self.prompt,
            "latency_s": self.latency_s,
            "timings_s": self.timings_s,
            "refusals": dict(self.refusals),
            "durations_s": self.durations.summary(),
            "counters": {name: self.counters[name] for name in COUNTED},
        }
