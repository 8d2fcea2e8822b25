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
        estop: pressed.
    """

    def __init__(self, start_service: str = "~/start") -> None:
        self.start_service = start_service
        self.estop = self._hold = False
        self._stopped = self._waits = ""

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
        if self.estop:
            return "e-stop"
        if self._hold:
            return "held by ~/hold; remedy: call it with false"
        if self._waits:
            return self._waits
        return f"{self._stopped}; remedy: call {self.start_service}" if self._stopped else ""

    def check_reset(self) -> None:
        """Raises ConfigError while the e-stop is pressed."""
        if self.estop:
            raise ConfigError("the e-stop is pressed", remedy="release it first: call ~/estop with false, then reset")
