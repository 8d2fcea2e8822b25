"""Area TRJ: what goes out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from wam_policy_ros.ros.trajectory_faults import trajectory_faults

from . import robot, settings
from .case import Case, Outcome, Unavailable
from .stage import Stage, never_after, scripted

STEP_TOLERANCE = 1e-3
"""A chunk whose latency is a whole number of steps, up to this part of one, is not late by one more."""


def run(case: Case) -> Outcome:
    if case.kind == "npz":
        with np.load(case.path(".npz"), allow_pickle=False) as data:
            arrays = dict(data)
        return _gripper(case, arrays) if "gripper_action" in arrays else _chunk(case, arrays)
    if case.kind == "scenario":
        return _scenario(case)
    data = case.json()
    if "server_metadata" in data:
        return settings.mismatch(case, "action_space", data["server_metadata"]["action_space"])
    if "cases" in data and "dt_s" in data:
        return _skips(case, data)
    if all(isinstance(v, dict) and "points" in v for v in data.values()):
        return _messages(case, data)
    raise Unavailable(f"no part here runs {case.area} cases of kind {case.kind!r} like this one")


def _chunk(case: Case, arrays: dict[str, np.ndarray]) -> Outcome:
    """One chunk for a robot that stands still."""
    measured = arrays.get("q_measured")
    chunk = arrays["chunk"].astype(np.float64)
    is_open, is_closed = robot.gripper(case.config)
    # The finger stands where the chunk begins, so that only the arm is looked at, and so does an arm that is not told.
    if measured is None and chunk.shape[1] == robot.SPEC.action_dim and np.isfinite(chunk[0]).all():
        measured = chunk[0, :-1]
    start = float(np.clip(np.nan_to_num(chunk[0, -1]), 0.0, 1.0)) if chunk.shape[1] == robot.SPEC.action_dim else 0.5
    assert abs(float(arrays.get("dt", robot.SPEC.dt_s)) - robot.SPEC.dt_s) < 1e-3, "another step time than the robot's"
    stage = Stage(
        case,
        scripted(chunk),
        latency_s=never_after(0.1),
        arm_rad=None if measured is None else measured.tolist(),
        finger=is_open + start * (is_closed - is_open),
    )
    stage.play(1.0)
    plans = stage.plans
    refused = not plans and bool(stage.run.control.fault or stage.run.control.reason)
    facts: dict[str, Any] = {"published": len(plans), "trajectories_published": len(plans)}
    if plans:
        facts["points"] = len(plans[0].plan.positions)
        facts["last_tfs_s"] = float(plans[0].plan.times_s[-1])
    outcome = Outcome(frozenset({"accept"} if plans else {"reject_chunk", "hold"} if refused else set()), stage.message)
    outcome.facts = facts
    said = [line for _, level, line in stage.run.journal.log if level in ("warn", "error")]
    outcome.checks |= {
        "published_max_abs_velocity": lambda e, c, o: _too_fast(stage, float(e)),
        "visible_warning": lambda e, c, o: None if bool(said) is bool(e) else f"said: {said}",
        # Both say that nothing of this chunk may move the robot.
        "must_not|never": lambda e, c, o: f"{len(plans)} trajectories were published" if plans else None,
    }
    return outcome


def _too_fast(stage: Stage, limit: float) -> str | None:
    """Between the points of each plan, from where the arm stands to the first, and in the velocities themselves."""
    arm = len(robot.names(stage.case.config)) - 1
    for sent in stage.plans:
        plan = sent.plan
        rows = np.concatenate([np.array(stage.positions)[None], plan.positions])[:, :arm]
        speed = np.abs(np.diff(rows, axis=0) / np.diff(np.concatenate([[0.0], plan.times_s]))[:, None])
        most = max(speed.max(), 0.0 if plan.velocities is None else np.abs(plan.velocities[:, :arm]).max())
        if most > limit * (1 + 1e-6):
            return f"{most:.3f} was published"
    return None


def _gripper(case: Case, arrays: dict[str, np.ndarray]) -> Outcome:
    """Each action of the gripper, as the node turns it into a target of the finger."""
    actions, expected = arrays["gripper_action"], arrays["expected_finger_m"]
    stage = Stage(case)
    rows = np.zeros((len(actions), robot.SPEC.action_dim))
    rows[:, -1] = actions
    found = stage.run.robot.joints.command(rows)[:, -1]
    tolerance = float(case.expect.get("tolerance", 1e-6))
    good = bool(np.abs(found - expected).max() <= tolerance)
    outcome = Outcome(frozenset({"accept"}), "")
    outcome.checks["finger_m"] = lambda e, c, o: None if good else f"{found.tolist()} for {actions.tolist()}"
    return outcome


def _skips(case: Case, data: dict[str, Any]) -> Outcome:
    """How many rows of a chunk are left out for a latency, while the chunk before is executed."""
    dt_s, horizon = float(data["dt_s"]), int(data["horizon"])
    assert abs(dt_s - robot.SPEC.dt_s) < 1e-6 and horizon == robot.SPEC.horizon, "another robot than this node's"
    wrong, found = [], []
    for one in data["cases"]:
        skip = _skip(case, float(one["latency_s"]), dt_s, bool(data.get("running_chunk", True)))
        found.append(skip)
        if skip != one["skip"]:
            wrong.append(f"latency {one['latency_s']} s: {skip} rows, expected {one['skip']}")
    outcome = Outcome(frozenset({"accept"}), "; ".join(wrong), {"skips": found})
    outcome.checks["skip"] = lambda e, c, o: "; ".join(wrong) or None
    return outcome


def _skip(case: Case, latency_s: float, dt_s: float, running: bool) -> int | None:
    """The cases count whole steps: the next chunk takes over at a step that has not begun. In this node that is a lead
    of one step, less the tolerance."""
    chunk = np.tile(np.array([*[0.1] * (robot.SPEC.action_dim - 1), 0.5]), (robot.SPEC.horizon, 1))
    calls = 2 if running else 1
    stage = Stage(
        case,
        scripted(chunk),
        latency_s=lambda call: (0.0 if call == 0 and running else latency_s) if call < calls else float("inf"),
        control__min_lead_s=dt_s * (1.0 - STEP_TOLERANCE),
    )
    stage.play(3.0)
    if len(stage.plans) < calls:
        return None
    sent, call = stage.plans[-1], stage.run.worker.calls[calls - 1]
    observed_ns = call.request.observation.stamp_ns
    age_s = stage.run.elapsed_s(sent.at_ns) - (observed_ns - stage.run.clock().ros_ns) * 1e-9 - stage.now_s
    due_s = age_s + sent.plan.times_s  # of each point, from the observation on
    return round(float(due_s[0]) / dt_s) - 1 if running else horizon_left(sent.plan.times_s, dt_s)


def horizon_left(times_s: np.ndarray, dt_s: float) -> int:
    """Rows left out of a first chunk."""
    return robot.SPEC.horizon - round(float(times_s[-1]) / dt_s)


def _messages(case: Case, data: dict[str, Any]) -> Outcome:
    """Trajectories that no controller executes as meant, before the last check of what leaves the node."""
    flagged = {name: trajectory_faults(_message(content)) for name, content in data.items()}
    good = [name for name, faults in flagged.items() if not faults]
    outcome = Outcome(frozenset({"accept"} if good else {"never_published"}), f"{flagged}")

    def all_of(expected: Any, case: Case, outcome: Outcome) -> str | None:
        missing = [name for name in expected if not flagged.get(name)]
        return f"not flagged: {missing}" if missing else None

    def good_shape(expected: Any, case: Case, outcome: Outcome) -> str | None:
        stage = Stage(case)
        stage.play(2.0)
        faults = [_faults(sent.plan) for sent in stage.run.journal.sent]
        return f"{[f for f in faults if f]}" if any(faults) or not faults else None

    outcome.checks |= {"validator_flags_all": all_of, "good_shape": good_shape}
    return outcome


def _message(content: dict[str, Any]) -> Any:
    """JSON -> what has the fields of a JointTrajectory; null is NaN."""

    def numbers(values: Any) -> list[float]:
        return [float("nan") if v is None else float(v) for v in values or []]

    points = []
    for point in content["points"]:
        ns = round(float(point["time_from_start"]) * 1e9)
        points.append(
            SimpleNamespace(
                time_from_start=SimpleNamespace(sec=ns // 10**9, nanosec=ns % 10**9),
                **{k: numbers(point.get(k)) for k in ("positions", "velocities", "accelerations", "effort")},
            )
        )
    stamp = SimpleNamespace(**content.get("header", {}).get("stamp", {"sec": 0, "nanosec": 0}))
    return SimpleNamespace(header=SimpleNamespace(stamp=stamp), joint_names=content["joint_names"], points=points)


def _faults(plan: Any) -> list[str]:
    """Of a trajectory that the node sent, as a message."""
    points = [
        {
            "positions": p.tolist(),
            "velocities": [] if plan.velocities is None else plan.velocities[k].tolist(),
            "time_from_start": float(plan.times_s[k]),
        }
        for k, p in enumerate(plan.positions)
    ]
    return trajectory_faults(_message({"joint_names": list(plan.names), "points": points}))


def _scenario(case: Case) -> Outcome:
    """Chunks, ticks and stops at given times. Every ``chunk`` is an answer of the policy; there are no others."""
    data = case.json()
    events = sorted(data["events"], key=lambda e: e["t"])
    known = {"chunk", "timer_tick", "stop"}
    if unknown := {e["do"] for e in events} - known:
        raise Unavailable(f"no part here plays the events {sorted(unknown)}")
    chunks = sum(e["do"] == "chunk" for e in events)
    arm = data.get("q_measured_at_stop")
    stage = Stage(case, latency_s=never_after(0.0, chunks), arm_rad=arm)
    stage.play(0.5)  # the first chunk comes as soon as the cameras are there
    assert stage.plans, f"the robot never moved: {stage.message}"
    start_s = stage.run.elapsed_s(stage.plans[0].at_ns)
    stopped_s = None
    for event in events:
        stage.play(max(stage.now_s, start_s + event["t"]))
        if event["do"] == "timer_tick":
            stage.run.tick()
        elif event["do"] == "stop":
            stopped_s = stage.now_s
            stage.run.close()
    stage.play(stage.now_s + 1.0)
    verdict = "accept"
    if stopped_s is not None:
        verdict = "hold" if stage.holds else "nothing was sent"
    outcome = Outcome(frozenset({verdict}), stage.message, {"trajectories_published": len(stage.plans)})
    outcome.checks |= {
        "published_after_stop": lambda e, c, o: _after_stop(stage, stopped_s),
        "never": lambda e, c, o: next((str(f) for s in stage.run.journal.sent if (f := _faults(s.plan))), None),
    }
    return outcome


def _after_stop(stage: Stage, stopped_s: float | None) -> str | None:
    """One trajectory of one point, at the measured or commanded position, zero velocity, in the future."""
    assert stopped_s is not None
    sent = [s for s in stage.run.journal.sent if stage.run.elapsed_s(s.at_ns) >= stopped_s - 1e-9]
    if len(sent) != 1 or not sent[0].hold:
        return f"{len(sent)} trajectories after the stop, with {[len(s.plan.positions) for s in sent]} points"
    plan = sent[0].plan
    if plan.times_s[0] <= 0 or (plan.velocities is not None and plan.velocities.any()):
        return f"times {plan.times_s}, velocities {plan.velocities}"
    off = np.abs(plan.positions[0] - np.array(stage.positions)).max()
    return None if off < 0.01 else f"it is {off:.3f} away from where the robot stands: {plan.positions[0]}"
