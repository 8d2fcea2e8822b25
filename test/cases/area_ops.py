"""Area OPS: settings, signals."""

from __future__ import annotations

import tempfile
from pathlib import Path

from . import nodes, rows_ops, settings
from .case import Case, Outcome, Unavailable


def needs_ros(case: Case) -> bool:
    return case.kind == "scenario"


def run(case: Case) -> Outcome:
    if case.kind == "json" and "row" in case.json():
        return rows_ops.run(case, case.json())
    if case.kind == "yaml":
        return settings.run(case)
    if case.kind == "scenario" and any(str(e.get("do", "")).startswith("SIG") for e in case.json().get("events", [])):
        with tempfile.TemporaryDirectory() as folder:
            return nodes.signalled(case, Path(folder))
    raise Unavailable(f"no part here runs {case.area} cases of kind {case.kind!r} like this one")
