"""``examples/05_operate.py``: the operator's orders, from a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from wam_policy_ros.contract.fakes import HoldPolicy

from .conftest import wait_for
from .harness import System

EXAMPLE = Path(__file__).parents[2] / "examples" / "05_operate.py"


@pytest.fixture
def system(ros: None) -> Iterator[System]:
    system = System(HoldPolicy())
    yield system
    system.close()


def order(system: System, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), "--node", system.node.get_fully_qualified_name(), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_orders_are_carried_out_and_refusals_are_told(system: System) -> None:
    wait_for(lambda: system.node.control is not None and system.node.control.counters["chunks"], what="a chunk")
    done = order(system, "status")
    assert done.returncode == 0 and "prompt      'stir the pot'" in done.stdout, done.stdout + done.stderr
    done = order(system, "prompt", "sweep")
    assert done.returncode == 0 and "active prompt: 'sweep'" in done.stdout, done.stdout + done.stderr
    assert order(system, "call", "estop", "true").returncode == 0
    assert system.on_node(lambda: system.node.control.fault) == "e-stop"  # type: ignore[union-attr]
    done = order(system, "call", "reset")
    assert done.returncode == 1 and "refused: the e-stop is pressed" in done.stdout, done.stdout + done.stderr
    assert order(system, "call", "estop", "false").returncode == 0
    assert order(system, "call", "reset").returncode == 0
    assert system.on_node(lambda: system.node.control.fault) == ""  # type: ignore[union-attr]


def test_a_node_that_is_not_there_and_a_missing_argument(system: System) -> None:
    done = order(system, "--node", "/nobody", "--timeout", "0.5", "status")
    assert done.returncode == 1 and "/nobody did not answer" in done.stderr
    assert "true or false" in order(system, "call", "estop").stderr
