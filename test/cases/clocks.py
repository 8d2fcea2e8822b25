"""Scenarios about clocks: one that is set, one that stands still while the policy works."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from wam_policy_ros.contract.fakes import HoldPolicy
from wam_policy_ros.ros.assembly import assemble
from wam_policy_ros.ros.messages import ns_to_stamp, rgb_to_image
from wam_policy_ros.ros.streams import Now
from wam_policy_ros.ros.worker import InferenceWorker, Phase

from . import nodes, robot
from .case import Case, Outcome, Unavailable
from .stage import FRAME, START_NS, Stage

RATE_HZ = 10.0


def run(case: Case) -> Outcome:
    events = case.json()["events"]
    done = {e["do"] for e in events}
    if "set_system_clock" in done:
        return _clock_is_set(case, events)
    if "infer" in done:
        return _policy_in_frozen_time(case, next(e for e in events if e["do"] == "infer"))
    raise Unavailable(f"no part here plays the events {sorted(done)}")


def _clock_is_set(case: Case, events: list[dict[str, Any]]) -> Outcome:
    stage, set_s = Stage(case, rate_hz=RATE_HZ), []
    for event in sorted(events, key=lambda e: e["t"]):
        if event["t"] > stage.now_s:
            stage.play(event["t"])
        if event["do"] == "set_system_clock":
            stage.run.clock.set_by(round(event["delta_s"] * 1e9))
            set_s.append(stage.now_s)
        elif event["do"] == "keep_publishing":
            stage.play(stage.now_s + event["seconds"])
        elif event["do"] != "run":
            raise Unavailable(f"no part here plays the event {event['do']!r}")
    ticks = np.diff(stage.run.journal.ticks) * 1e-9
    asked_s = [stage.run.elapsed_s(c.at_ns) for c in stage.run.worker.calls]
    after = [t for t in asked_s if t > set_s[0]]
    gaps = np.diff([set_s[0], *after]) if after else np.array([np.inf])
    running = stage.run.control.substate.value == "running"
    on_steady = nodes.timers_are_steady(case)
    facts = {
        "inferences_continue": bool(len(after) > 5 and gaps.max() < 1.0),
        "control_loop_gap_s": float(ticks.max()),
    }
    message = "; ".join(line for _, _, line in stage.run.journal.log)
    outcome = Outcome(frozenset({"accept"} if running and on_steady else {"hold"}), message, facts)

    def gap(expected: Any, case: Case, outcome: Outcome) -> str | None:
        found = facts["control_loop_gap_s"]
        if not on_steady:
            return "the node's control timer does not run on the steady clock"
        return None if found <= expected else f"{found:.3f} s between two ticks"

    outcome.checks["control_loop_gap_s_max"] = gap
    return outcome


def _policy_in_frozen_time(case: Case, event: dict[str, Any]) -> Outcome:
    """The real worker thread, while the node's clock stands still."""
    frozen_ns = START_NS
    worker = InferenceWorker(
        lambda progress: HoldPolicy(latency_s=event["wall_latency_s"]),
        notify=lambda: None,
        log=lambda level, text: None,
        after_step=lambda policy, chunk, seen: None,
        after_step_wanted=lambda: False,
    )
    sent: list[Any] = []
    made = assemble(
        robot.parameters(case),
        worker=worker,
        send=sent.append,
        clock=lambda: Now(frozen_ns, time.monotonic_ns()),
        simulated=True,
        changed=lambda: None,
        log=lambda level, line: None,
    )
    worker.start()
    try:
        _until(lambda: worker.status.phase is Phase.READY)
        made.activate(robot.SPEC)
        now = Now(frozen_ns, time.monotonic_ns())
        for camera in made.inputs.cameras.values():
            camera.on_message(rgb_to_image(FRAME, stamp_ns=frozen_ns), now)
        header = SimpleNamespace(stamp=ns_to_stamp(frozen_ns))
        made.inputs.joint_states.on_message(
            SimpleNamespace(header=header, name=robot.names(case.config), position=[0.02] * 8), now
        )
        made.control.on_tick()
        _until(lambda: (made.control.on_worker(), made.control.latency_s)[1] is not None)
        latency_s = made.control.latency_s
    finally:
        worker.stop(5.0)
    facts = {"measured_latency_s": latency_s, "clock": "steady"}
    return Outcome(frozenset({"accept"} if sent else {"hold"}), f"{made.control.reason}", facts)


def _until(condition: Any, timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.002)
