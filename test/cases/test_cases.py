"""Runs every case of a folder against the product: ``pytest test/cases [--cases DIR]``. See ``README.md``."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from .case import Case, Unavailable, complaints, load

OWN = Path(__file__).parent / "data"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        folder = Path(metafunc.config.getoption("--cases") or OWN)
        cases = load(folder.resolve())
        metafunc.parametrize("case", cases, ids=[c.id for c in cases])


def test_case(case: Case, request: pytest.FixtureRequest) -> None:
    area = area_of(case)
    if getattr(area, "needs_ros", lambda case: False)(case):
        pytest.importorskip("rclpy", reason="needs ROS: source it, or pip install 'wam_policy_ros[ros-kilted]'")
        request.getfixturevalue("ros")
    try:
        outcome = area.run(case)
    except Unavailable as error:
        pytest.skip(str(error))
    if found := complaints(case, outcome):
        pytest.fail(f"{case.id} ({case.scenario}):\n" + "\n".join(f"- {c}" for c in found), pytrace=False)


def area_of(case: Case) -> ModuleType:
    """The module that runs a case: ``area_<area in lower case>.py``, but for requests of clients, whatever their id."""
    name = case.area.lower()
    endpoint = case.kind in ("msgpack", "text") or any(f.endswith(".msgpack") for f in case.files)
    if endpoint or _asks_server(case):
        name = "pro"
    try:
        return importlib.import_module(f"test.cases.area_{name}")
    except ModuleNotFoundError as error:
        if error.name != f"test.cases.area_{name}":
            raise
        pytest.skip(f"no part here runs cases of the area {name.upper()}: test/cases/area_{name}.py is missing")


def _asks_server(case: Case) -> bool:
    """A scenario whose events name requests in ``.msgpack`` files, or a command line with ``--host``."""
    if case.kind != "scenario" or not case.files or not case.files[0].endswith(".json"):
        return False
    data = case.json()
    events = data.get("events", []) if isinstance(data, dict) else data
    return "--host" in data.get("args", []) or any(
        isinstance(e, dict) and str(e.get("file", "")).endswith(".msgpack") for e in events
    )
