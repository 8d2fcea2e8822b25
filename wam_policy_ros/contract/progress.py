"""An owner's progress on the console: a line for every new phase and for every tenth of it."""

from __future__ import annotations

from collections.abc import Callable

from .policy_thread import OwnerStatus, Phase


class ProgressLog:
    """Loading takes minutes and reports every tensor; a person wants to see that it goes on.

    Args:
        log: log function.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._said: tuple[Phase, int] | None = None

    def update(self, status: OwnerStatus) -> None:
        """To be called for every new status; says something only when there is something new to say."""
        said = (status.phase, int(10 * status.fraction + 1e-6))
        if said == self._said or status.phase in (Phase.FAILED, Phase.STOPPED):  # those have lines of their own
            return
        self._said = said
        if status.phase is Phase.READY:
            self._log(f"ready{_warm_up(status.warm_up_s)}")
        else:
            self._log(f"{status.phase.value}: {status.message} ({status.fraction:.0%})")


def _warm_up(calls_s: tuple[float, ...]) -> str:
    if not calls_s:
        return ""
    return ": first call of a session " + ", later ones ".join(f"{s:.2f} s" for s in calls_s)
