"""The example in docs/simulator.md is run as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from wam_policy_ros.sim.world import World

TEXT = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text(encoding="utf-8")


def test_the_example_runs(seeing: World, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    exec(compile(code, "docs/simulator.md", "exec"), {})
    out = capsys.readouterr().out
    assert "'wrist_image_left': (180, 320, 3)" in out and "success=True" in out


def test_tasks_and_pictures_it_names_are_there() -> None:
    from wam_policy_ros.sim.tasks import TASKS

    assert set(re.findall(r"lift_\w+", TEXT)) == set(TASKS)
    for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", TEXT):
        assert (Path(__file__).parents[2] / "docs" / name).stat().st_size < 300_000
