"""What the node's services do. Each gives success and a message for whoever called. Knows no rclpy."""

from __future__ import annotations

from collections.abc import Callable

from wam_policy_ros.contract.errors import WamError

from .control import ControlLoop

Answer = tuple[bool, str]


class Commands:
    """Orders from people to one control loop.

    Args:
        loop: whose orders they are.
        reset_simulator: asks a simulator to start over; None without one. The loop stands still until its answer is
            given to ``simulator_was_reset``.
    """

    def __init__(self, loop: ControlLoop, reset_simulator: Callable[[], None] | None = None) -> None:
        self._loop, self._reset_simulator = loop, reset_simulator

    def estop(self, pressed: bool) -> Answer:
        """Latch. Release takes ``estop(False)`` and a reset: nobody moves a robot by letting a button go."""
        self._loop.operator.press(pressed)
        if pressed:
            if self._loop.active:
                self._loop.latch("e-stop")
            return True, "e-stop: holding"
        latched = self._loop.fault or self._loop.operator.latched
        return True, "e-stop released; still latched until reset" if latched else "e-stop released"

    def hold(self, on: bool) -> Answer:
        """Pause and go on."""
        self._loop.operator.hold(on)
        if on:
            self._loop.stand_still(self._loop.operator.reason)
        return True, "holding" if on else self._state()

    def stop(self) -> Answer:
        """Until ``start``."""
        self._loop.operator.stop("stopped by ~/stop")
        self._loop.stand_still(self._loop.operator.reason)
        return True, "stopped"

    def start(self) -> Answer:
        """After ``stop`` and ``home``."""
        if not self._loop.active:
            return False, "not active: configure and activate first"
        self._loop.operator.start()
        return not (self._loop.fault or self._loop.operator.reason), self._state()

    def home(self) -> Answer:
        """Go to the home pose and stay there until ``start``."""
        loop = self._loop
        if not loop.active:
            return False, "not active: configure and activate first"
        if loop.fault:
            return False, f"latched: {loop.fault}"
        if (measured := loop.measured()) is None:
            return False, "the joints' positions are not known"
        loop.operator.stop("stopped by ~/home")
        loop.stand_still(loop.operator.reason)
        try:
            seconds = loop.go_home(measured)
        except WamError as error:
            loop.operator.stop(f"stopped by ~/home, which was refused: {error.what}")
            return False, f"{error}; the robot stands still until ~/start"
        loop.operator.stop("at home or on the way there")
        return True, f"on the way home for {seconds:.1f} s"

    def reset(self) -> Answer:
        """Clear a latched fault, start a new session, and a simulator over."""
        try:
            self._loop.reset()
        except WamError as error:
            return False, str(error)
        if self._reset_simulator is not None:
            self._loop.operator.wait("the simulator is being reset")
            self._loop.stand_still(self._loop.operator.reason)
            self._reset_simulator()
        return True, f"session {self._loop.session_id}" if self._loop.active else "not active; fault cleared"

    def simulator_was_reset(self, problem: str) -> None:
        """The simulator's answer; ``problem`` is empty when it did."""
        self._loop.operator.wait("")
        if problem and self._loop.active:
            self._loop.latch(f"the simulator was not reset: {problem}")

    def _state(self) -> str:
        loop = self._loop
        if loop.fault:
            return f"still latched: {loop.fault}"
        return loop.operator.reason or "going on"
