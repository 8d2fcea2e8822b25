"""What the owner of a policy is doing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .interface import PolicySpec


class Phase(str, Enum):
    """Where the owner is."""

    LOADING = "loading"
    WARMING_UP = "warming up"
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True)
class OwnerStatus:
    """What the owner is doing.

    Attributes:
        phase: see ``Phase``.
        message, fraction: progress of the phase; fraction 0 to 1.
        spec: the policy's spec once it is loaded.
        warm_up_s: duration of the first and of a later call, measured in the warm-up.
        failures: jobs in a row that the policy itself failed; 0 after a success.
        last_error: text of the newest of them, empty after a success.
    """

    phase: Phase = Phase.LOADING
    message: str = "not started"
    fraction: float = 0.0
    spec: PolicySpec | None = None
    warm_up_s: tuple[float, ...] = ()
    failures: int = 0
    last_error: str = ""
