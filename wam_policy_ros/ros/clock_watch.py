"""Does the node's clock jump? It is compared with the steady clock, which never does."""

from __future__ import annotations

from .streams import Now

BACKWARD_S, FORWARD_S = 0.5, 1.0


class ClockWatch:
    """Call ``update`` at every tick.

    Args:
        simulated: the node's clock is /clock. It may then pause or run slower than the steady clock without a jump.
    """

    def __init__(self, *, simulated: bool) -> None:
        self._simulated = simulated
        self._last: Now | None = None

    def update(self, now: Now) -> float | None:
        """Size of a jump since the last call in s (back by 0.5 s or more, forward by more than 1 s), else None."""
        last, self._last = self._last, now
        if last is None or (self._simulated and last.ros_ns == 0):  # the first /clock is no jump
            return None
        moved_s = (now.ros_ns - last.ros_ns) * 1e-9
        beyond_s = moved_s - (now.steady_ns - last.steady_ns) * 1e-9
        back_s = moved_s if self._simulated else beyond_s
        if back_s <= -BACKWARD_S:
            return back_s
        return beyond_s if beyond_s > FORWARD_S else None
