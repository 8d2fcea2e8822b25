"""Rates and durations over the last seconds or values. Knows no rclpy; clocks are handed in."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

WINDOW = 256
"""So many values a percentile is taken over."""

SPAN_S = 5.0
"""So long a time a rate is taken over."""


class Rate:
    """Events per second over the last ``span_s``, from a counter that somebody else keeps.

    Args:
        span_s: length of the time.
    """

    def __init__(self, span_s: float = SPAN_S) -> None:
        self._span_s = span_s
        self._seen: deque[tuple[float, int]] = deque()

    def update(self, now_s: float, count: int) -> float | None:
        """Tell the counter's value on the steady clock. A counter that went back has started again.

        Returns:
            events per second; None before the second call.
        """
        seen = self._seen
        if seen and count < seen[-1][1]:
            seen.clear()
        seen.append((now_s, count))
        while len(seen) > 2 and seen[1][0] <= now_s - self._span_s:
            seen.popleft()
        elapsed_s = now_s - seen[0][0]
        return (count - seen[0][1]) / elapsed_s if elapsed_s > 0 else None


class Durations:
    """The newest durations of each kind."""

    def __init__(self) -> None:
        self._values: dict[str, deque[float]] = {}

    def add(self, name: str, seconds: float) -> None:
        self._values.setdefault(name, deque(maxlen=WINDOW)).append(seconds)

    def add_all(self, seconds: Mapping[str, float]) -> None:
        for name, value in seconds.items():
            self.add(name, value)

    def summary(self) -> dict[str, dict[str, float]]:
        """Name -> p50, p99, max (seconds) and n, over the newest values of each."""
        return {name: percentiles(values) for name, values in self._values.items()}


class Ticks:
    """How regularly something is called.

    Attributes:
        count: calls so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._last_s: float | None = None
        self._gaps: deque[float] = deque(maxlen=WINDOW)

    def tick(self, now_s: float) -> None:
        self.count += 1
        if self._last_s is not None:
            self._gaps.append(now_s - self._last_s)
        self._last_s = now_s

    def pause(self) -> None:
        """The time until the next call is no gap."""
        self._last_s = None

    def longest_gap_s(self) -> float | None:
        """Of the newest calls; None before the second."""
        return max(self._gaps) if self._gaps else None


def percentiles(values: Any) -> dict[str, float]:
    """p50, p99, max and n of at least one value."""
    array = np.fromiter(values, dtype=np.float64)
    p50, p99 = np.percentile(array, (50, 99))
    return {"p50": float(p50), "p99": float(p99), "max": float(array.max()), "n": len(array)}
