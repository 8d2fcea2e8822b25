"""Area TIM: clocks, ages, latencies."""

from __future__ import annotations

from . import bags, clocks
from .case import Case, Outcome, Unavailable


def needs_ros(case: Case) -> bool:
    return case.kind == "scenario"


def run(case: Case) -> Outcome:
    if case.kind == "mcap":
        return bags.run(case)
    if case.kind == "scenario":
        return clocks.run(case)
    raise Unavailable(f"no part here runs {case.area} cases of kind {case.kind!r}")
