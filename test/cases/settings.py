"""Cases of kind ``yaml``: settings that the product must take, or refuse by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from wam_policy_ros.contract.errors import WamError
from wam_policy_ros.ros.assembly import assemble
from wam_policy_ros.ros.parameters import NodeParameters

from . import robot
from .case import Case, Outcome

NAMES = {
    "control_hz": "control.rate_hz",
    "image_stale_after_s": "sync.max_age_s",
    "joint_stale_after_s": "sync.joint_max_age_s",
    "future_tolerance_s": "sync.future_tolerance_s",
    "arm_vmax_rad_s": "safety.max_velocity",
}
"""Name in the cases -> parameter of the node. Others go in as they are, and the node does not know them."""


def run(case: Case) -> Outcome:
    given = case.yaml()
    facts: dict[str, Any] = {}
    try:
        params = NodeParameters.from_values(_values(case, given, facts))
        _configure(params)
    except WamError as error:
        return Outcome(frozenset({"refuse_start"}), str(error))
    names = NodeParameters.names()
    found = {n: getattr(params, names[p].name) for n, p in NAMES.items() if p in names}
    return Outcome(frozenset({"accept"}), "", {n: list(v) if isinstance(v, tuple) else v for n, v in found.items()})


def _values(case: Case, given: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """The node's parameters, as the file of the case changes them."""
    values = robot.values(case)
    for section, content in given.items():
        if section == "cameras":
            topics = {name: camera["topic"] for name, camera in content.items()}
            values["cameras.topics"] = robot.values(case, topics)["cameras.topics"]
        elif isinstance(content, dict) and "ros__parameters" in content:
            values |= _renamed(content["ros__parameters"], case)
        elif section == "policy":
            # A period is the inverse of a rate; the rest are options of the engine.
            values |= {
                "control.rate_hz" if k == "dt_s" else f"engine.{k}": 1.0 / v if k == "dt_s" else v
                for k, v in content.items()
            }
        elif section != "checkpoint_dt_s":
            values |= _renamed({section: content}, case)
    if (dt_s := given.get("checkpoint_dt_s")) is not None:
        assert abs(dt_s - robot.SPEC.dt_s) < 1e-4, f"no embodiment here has a period of {dt_s} s"
    return values


def _renamed(given: dict[str, Any], case: Case) -> dict[str, Any]:
    known = NodeParameters.names()
    out = {}
    for name, value in given.items():
        full = NAMES.get(name, name)
        # One value of the cases is one for each joint here.
        if full in known and isinstance(known[full].default, tuple) and not isinstance(value, list):
            value = [value] * len(robot.names(case.config))
        out[full] = value
    return out


def _configure(params: NodeParameters) -> None:
    """As a node does, up to the topics."""
    worker: Any = None
    nothing: Callable[..., None] = lambda *args: None  # noqa: E731
    assemble(params, worker=worker, send=nothing, clock=lambda: None, simulated=False, changed=nothing, log=nothing)  # type: ignore[arg-type,return-value]


def mismatch(case: Case, key: str, value: Any) -> Outcome:
    """A policy that says something else of itself than the node was set for."""
    params = robot.parameters(case)
    worker: Any = None
    nothing: Callable[..., None] = lambda *args: None  # noqa: E731
    made = assemble(
        params,
        worker=worker,
        send=nothing,
        clock=lambda: None,
        simulated=False,
        changed=nothing,
        log=nothing,  # type: ignore[arg-type,return-value]
    )
    try:
        made.check(replace(robot.SPEC, **{key: value}))
    except WamError as error:
        return Outcome(frozenset({"refuse_start"}), str(error))
    return Outcome(frozenset({"accept"}), "")
