"""What a person has asked for: e-stop, hold, stop. Each keeps the robot still until the same person takes it back."""

from __future__ import annotations

from wam_policy_ros.contract.errors import ConfigError


class Operator:
    """Which of the switches are on.

    An e-stop is a latched fault of the control loop, too: it takes release and reset. This is no safety function: a
    hardware e-stop stays outside.

    Args:
        start_service: its full name, for people.

    Attributes:
        latched: the e-stop was pressed and nobody has called reset since it was released. Outlives configurations, so
            that no lifecycle transition releases an e-stop.
    """

    def __init__(self, start_service: str = "~/start") -> None:
        self.start_service = start_service
        self._pressed = self.latched = self._hold = False
        self._stopped = self._waits = ""

    @property
    def estop(self) -> bool:
        """Pressed."""
        return self._pressed

    def press(self, down: bool) -> None:
        """The e-stop; ``reset`` after its release takes the latch away."""
        self._pressed, self.latched = down, self.latched or down

    def reset(self) -> None:
        """Raises ConfigError while the e-stop is pressed."""
        if self._pressed:
            raise ConfigError("the e-stop is pressed", remedy="release it first: call ~/estop with false, then reset")
        self.latched = False

    def wait(self, why: str) -> None:
        """For something else than a person; empty: no longer."""
        self._waits = why

    def hold(self, on: bool) -> None:
        self._hold = on

    def stop(self, why: str) -> None:
        """Until ``start``."""
        self._stopped = why

    def start(self) -> None:
        self._stopped = ""

    @property
    def reason(self) -> str:
        """Why the robot has to stand still; empty when it does not."""
        if self._pressed:
            return "e-stop"
        if self._hold:
            return "held by ~/hold; remedy: call it with false"
        if self._waits:
            return self._waits
        return f"{self._stopped}; remedy: call {self.start_service}" if self._stopped else ""
