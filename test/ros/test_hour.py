"""A follower that behaves as joint_trajectory_controller does tracks chunks for a long time, in virtual time."""

from __future__ import annotations

import numpy as np
import pytest

from .rig import LIMITS, Rig, wander


def inside_the_limits(rig: Rig, *, slack: float = 1.0) -> None:
    assert rig.follower.rejected == 0 and rig.follower.accepted == len(rig.sent) > 0
    watch = rig.watch
    assert watch.speed <= LIMITS["safety.max_velocity"] * (1 + 1e-6)
    assert watch.acceleration <= LIMITS["safety.max_acceleration"] * slack * (1 + 1e-6), watch.acceleration
    assert watch.step <= 1.1 * LIMITS["safety.max_velocity"] * 0.002, "no jump in position"
    assert LIMITS["safety.position_min"] <= watch.low and watch.high <= LIMITS["safety.position_max"]


def test_with_half_a_second_per_step_the_arm_lacks_a_command_less_than_one_percent_of_the_time() -> None:
    rig = Rig(wander(), lambda call: 0.5)
    rig.play(300.0)
    state = rig.control.summary()
    assert state["counters"]["chunks"] > 450 and state["counters"]["refused"] == state["counters"]["late"] == 0
    assert rig.control.pace.running_s > 290
    assert state["stall_share"] < 0.01
    assert not rig.holds
    inside_the_limits(rig)


@pytest.mark.timeout(900)
def test_an_hour_of_delays_drops_and_reorderings() -> None:
    rng = np.random.default_rng(7)

    def latency_s(call: int) -> float:
        kind = rng.random()
        if kind < 0.01:
            return 2.5  # late, and superseded by nothing
        return float(rng.uniform(0.15, 0.9)) if kind < 0.2 else float(rng.normal(0.3, 0.03))

    rig = Rig(wander(), latency_s)
    while rig.now_s < 3600.0:
        rig.play(float(rng.uniform(2.0, 20.0)))
        kind = rng.random()
        if kind < 0.15:
            rig.silent = {str(rng.choice(["/left", "/hand", "/joints"]))}
            rig.play(float(rng.uniform(0.1, 1.5)))
            rig.silent = set()
        elif kind < 0.3:
            rig.lag_s = float(rng.uniform(0.0, 0.15))
        elif kind < 0.4:
            rig.control.set_prompt(f"stir {rng.random()}")
        elif kind < 0.45:
            rig.control.reset()
    counters = rig.control.summary()["counters"]
    assert counters["chunks"] > 6000 and not rig.control.fault
    assert counters["refused"] < 0.01 * counters["chunks"], "of the gate, in the first steps after a hold"
    assert counters["late"] > 5 and counters["sessions"] > 50 and len(rig.holds) > 50, "there were disturbances"
    inside_the_limits(rig)


@pytest.mark.parametrize("absolute", [False, True])
def test_trajectories_that_arrive_late_at_the_controller(absolute: bool) -> None:
    """A plan is made for the moment it is sent. The controller begins it 0 to 3 ms later, as control.jitter_s allows
    for, so from another place of the plan before."""
    rng = np.random.default_rng(1)
    stamp = "absolute" if absolute else "zero"
    rig = Rig(wander(), lambda call: 0.3, lambda: float(rng.uniform(0.0, 0.003)), **{"control.stamp": stamp})
    rig.play(120.0)
    inside_the_limits(rig)
