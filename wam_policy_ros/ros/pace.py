"""How long steps take, when to ask next, and how often the robot lacked a command. Knows no rclpy."""

from __future__ import annotations

from wam_policy_ros.contract.chunking import next_request_due, stops_between_chunks
from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.contract.interface import PolicySpec

from .parameters import NodeParameters

LATENCY_WEIGHT = 0.3
"""Of the newest value in the running mean."""


class Pace:
    """Of one policy on one robot.

    Args:
        params: ``control.*``.

    Attributes:
        mean_s: expected duration of a request, None before anything was measured.
        running_s, stalled_s: seconds in which the robot should have had a command, and those of them without.
    """

    def __init__(self, params: NodeParameters) -> None:
        self._params = params
        self._spec: PolicySpec | None = None
        self._min_lead_s = 0.0
        self.mean_s: float | None = None
        self.running_s = self.stalled_s = 0.0
        self._last_ns: int | None = None

    def activate(self, spec: PolicySpec, min_lead_s: float, warm_up_s: tuple[float, ...]) -> None:
        """Take over what the warm-up measured.

        Raises:
            ConfigError: a step outlasts a chunk and ``control.mode`` does not provide for that.
        """
        self._spec, self._min_lead_s = spec, min_lead_s
        if self.mean_s is None and warm_up_s:
            self.mean_s = warm_up_s[-1]
        if self._too_slow() and self._params.control_mode == "receding":
            raise ConfigError(
                "the policy is slower than its chunks last, so every chunk would come too late",
                got=f"a step takes {self.mean_s:.2f} s",
                expected=f"less than {self.longest_s:.2f} s of the {spec.horizon * spec.dt_s:.2f} s a chunk lasts",
                remedy="a faster schedule or GPU, or control.mode: stop_and_go (the robot executes a whole chunk, then "
                "stands still until the next one is there)",
            )

    @property
    def longest_s(self) -> float:
        """A step may take so long that its chunk is still of use to a robot in motion."""
        assert self._spec is not None
        # A request goes out with a frame that is up to a step old.
        lead_s = self._min_lead_s + self._spec.dt_s
        return (self._spec.horizon - 3) * self._spec.dt_s - lead_s

    def _too_slow(self) -> bool:
        assert self._spec is not None
        return stops_between_chunks(
            latency_s=self.mean_s,
            horizon=self._spec.horizon,
            dt_s=self._spec.dt_s,
            min_lead_s=self._min_lead_s + self._spec.dt_s,
        )

    @property
    def stops(self) -> bool:
        """The robot executes whole chunks and stands still in between."""
        mode = self._params.control_mode
        return mode == "stop_and_go" or (mode == "auto" and self._too_slow())

    def took(self, latency_s: float) -> None:
        """A step like those to come took so long."""
        mean = self.mean_s
        self.mean_s = latency_s if mean is None else mean + LATENCY_WEIGHT * (latency_s - mean)

    def was_late(self, age_s: float) -> None:
        """A chunk came too late, so long after its observation. The mean alone would learn of a policy that has become
        slower only after many more late chunks."""
        self.mean_s = max(self.mean_s or 0.0, age_s)

    def next_due_ns(self, origin_ns: int, plan_end_ns: int) -> int:
        """When to ask again, see ``contract.chunking.next_request_due``."""
        assert self._spec is not None
        return next_request_due(
            origin_ns,
            execute_steps=self._params.control_execute_steps,
            dt_s=self._spec.dt_s,
            latency_s=self.mean_s,
            plan_end_ns=plan_end_ns,
            stops=self.stops,
        )

    def tick(self, now_ns: int, plan_end_ns: int | None) -> None:
        """Count the time since the last tick; to be called at every tick while the robot is run by the policy.

        Args:
            now_ns: a clock that the plan's end is on; time that goes back is not counted.
            plan_end_ns: until when the robot has a command; None while it is not to have one.
        """
        last, self._last_ns = self._last_ns, now_ns if plan_end_ns is not None else None
        if last is None or plan_end_ns is None or now_ns <= last:
            return
        self.running_s += (now_ns - last) * 1e-9
        self.stalled_s += max(0, now_ns - max(last, plan_end_ns)) * 1e-9

    def shift_clock(self, by_ns: int) -> None:
        """The clock of ``tick`` was set."""
        if self._last_ns is not None:
            self._last_ns += by_ns

    @property
    def stall_share(self) -> float | None:
        """Part of the running time in which the robot lacked a command; None before it ran."""
        return self.stalled_s / self.running_s if self.running_s else None
