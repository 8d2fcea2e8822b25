"""Settings of every test run."""

import importlib.util
import os
from pathlib import Path

import pytest

# Before any test imports torch. Thread pools that spin while they wait make everything ten times slower on a busy host.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Before anything imports Triton, which decides then. Without a GPU its kernels are interpreted.
if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

NEEDED = ("rclpy", "torch", "triton", "safetensors", "msgpack", "av")


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
