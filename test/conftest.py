"""Settings of every test run, and ROS, which a process can start only once."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before any test imports torch. Thread pools that spin while they wait make everything ten times slower on a busy host.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Before anything imports Triton, which decides then. Without a GPU its kernels are interpreted.
if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

NEEDED = ("rclpy", "torch", "triton", "safetensors", "msgpack", "av", "mujoco")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        metavar="DIR",
        help="folder with an index.json, run by test/cases instead of its own (see its README)",
    )


def pytest_configure() -> None:
    """`make test` sets WAM_TEST_COMPLETE: what is missing is a failure there, and skipped with the reason elsewhere."""
    if os.environ.get("WAM_TEST_COMPLETE") != "1":
        return
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    recordings = Path(__file__).parent / "golden" / "e2e_weights.safetensors"
    missing += [] if recordings.is_file() else ["the recordings in test/golden"]
    if missing:
        raise pytest.UsageError(f"the tests would be skipped for want of {missing}: run make venv")


ISOLATE = """
import os, sys
from rmw_test_fixture_implementation import RMWTestIsolator
with RMWTestIsolator():
    print(os.environ["ROS_DOMAIN_ID"], flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="session")
def ros_domain() -> Iterator[None]:
    """A free domain id, for this process and its children; set before rclpy is initialised."""
    os.environ["ROS_AUTOMATIC_DISCOVERY_RANGE"] = "LOCALHOST"
    os.environ.pop("RMW_IMPLEMENTATION", None)
    if importlib.util.find_spec("rmw_test_fixture_implementation") is None:
        os.environ.setdefault("ROS_DOMAIN_ID", str(1 + os.getpid() % 100))
        yield
        return
    # It keeps the domain to itself until it ends. A process of its own, as it makes a second interpreter: afterwards
    # Python cannot tell who holds its lock, and PyTorch refuses to compute gradients.
    words = [sys.executable, "-c", ISOLATE]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        os.environ["ROS_DOMAIN_ID"] = str(int(holder.stdout.readline()))
        yield
        holder.stdin.close()


@pytest.fixture(scope="session")
def ros(ros_domain: None) -> Iterator[None]:
    """rclpy, initialised once: each initialisation costs discovery time."""
    import rclpy
    from rclpy.signals import SignalHandlerOptions

    rclpy.init(signal_handler_options=SignalHandlerOptions.NO)
    yield
    rclpy.try_shutdown()
