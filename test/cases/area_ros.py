"""Area ROS: what comes in."""

from __future__ import annotations

from . import bags, nodes, settings
from .case import Case, Outcome, Unavailable


def needs_ros(case: Case) -> bool:
    return case.kind == "json" and "publishers" in case.json()


def run(case: Case) -> Outcome:
    if case.kind == "mcap":
        return bags.run(case)
    if case.kind == "yaml":
        return settings.run(case)
    if needs_ros(case):
        return nodes.publishers(case)
    raise Unavailable(f"no part here runs {case.area} cases of kind {case.kind!r} like this one")
