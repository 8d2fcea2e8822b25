"""Real rclpy over real DDS, each test run in a domain of its own."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

WITHOUT_ROS = "test_without_ros.py"
"""Runs on every machine."""

HAVE_ROS = importlib.util.find_spec("rclpy") is not None


class _WithoutRos(pytest.Module):
    def collect(self) -> NoReturn:
        pytest.skip("rclpy is not installed: source ROS, or pip install 'wam_policy_ros[ros-kilted]'")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if HAVE_ROS or module_path.name == WITHOUT_ROS else _WithoutRos.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "test/ros/" in str(item.path).replace(os.sep, "/") and item.path.name != WITHOUT_ROS:
            item.add_marker(pytest.mark.ros)
            # Discovery between processes on a busy host can take longer than any patience; a second failure counts, and
            # a rerun is shown in the summary.
            item.add_marker(pytest.mark.flaky(reruns=1))


def wait_for(condition: Callable[[], Any], timeout_s: float = 10.0, what: str = "") -> Any:
    """Poll until the condition gives something true; fails the test with ``what`` after the deadline."""
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > end:
            pytest.fail(f"not within {timeout_s} s: {what or condition}")
        time.sleep(0.005)
    return value
