"""Does the node's clock jump? It is compared with the steady clock, which never does."""

from __future__ import annotations

from .streams import Now

BACKWARD_S, FORWARD_S = 0.5, 1.0

STEP_S = 0.05
"""Smaller steps may only seem so: the two clocks are read one after the other."""


class ClockWatch:
    """Call ``update`` at every tick.

    Args:
        simulated: the node's clock is /clock. It may then pause or run slower than the steady clock without a jump.

    Attributes:
        moved_ns: steady time of the ``update`` that last found another time on the clock.
        step_ns: by how much the clock was set before the last ``update``, if that is no jump; of a simulated clock 0,
            which the robot's controller has, too.
    """

    def __init__(self, *, simulated: bool) -> None:
        self._simulated = simulated
        self._last: Now | None = None
        self.step_ns = 0
        self.moved_ns = 0

    def update(self, now: Now) -> float | None:
        """Size of a jump since the last call in s (back by 0.5 s or more, forward by more than 1 s), else None."""
        last, self._last, self.step_ns = self._last, now, 0
        if last is None or last.ros_ns != now.ros_ns:
            self.moved_ns = now.steady_ns
        if last is None or (self._simulated and last.ros_ns == 0):  # the first /clock is no jump
            return None
        moved_s = (now.ros_ns - last.ros_ns) * 1e-9
        beyond_s = moved_s - (now.steady_ns - last.steady_ns) * 1e-9
        back_s = moved_s if self._simulated else beyond_s
        if back_s <= -BACKWARD_S:
            return back_s
        if beyond_s > FORWARD_S:
            return beyond_s
        if not self._simulated and abs(beyond_s) > STEP_S:
            self.step_ns = round(beyond_s * 1e9)
        return None
