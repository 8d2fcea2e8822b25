"""What ships and what it says: versions, manifests, entry points, forbidden words."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import wam_policy_ros
from wam_policy_ros.model.packaged import WEIGHTS, packaged

ROOT = Path(__file__).resolve().parents[1]
SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")


def test_one_version() -> None:
    manifest = ET.parse(ROOT / "package.xml").getroot()
    in_setup = re.search(r'version="([^"]+)"', SETUP)
    assert in_setup is not None
    assert manifest.findtext("version") == in_setup[1] == wam_policy_ros.__version__
    assert manifest.findtext("license") == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_package_xml_names_every_ros_package_that_is_imported() -> None:
    declared = {e.text for e in ET.parse(ROOT / "package.xml").getroot().iter("exec_depend")}
    imported = set()
    for path in (ROOT / "wam_policy_ros").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                imported.add(node.module.split(".")[0])
            elif isinstance(node, ast.Import):
                imported.update(a.name.split(".")[0] for a in node.names)
    ours = {m for m in imported if m == "rclpy" or m.endswith(("_msgs", "_srvs", "_interfaces"))}
    assert {"rclpy", "sensor_msgs", "trajectory_msgs"} <= ours <= declared


@pytest.mark.parametrize("entry", re.findall(r'"(\w+) = ([\w.]+):(\w+)"', SETUP), ids=lambda e: e[0])
def test_entry_points_exist_and_need_no_ros_to_be_imported(entry: tuple[str, str, str]) -> None:
    name, module, function = entry
    assert callable(getattr(importlib.import_module(module), function)), name


def test_scripts_for_ros2_run_match_the_entry_points() -> None:
    """pip puts console scripts where `ros2 run` does not look; scripts/ goes to lib/<package>."""
    for path in (ROOT / "scripts").iterdir():
        module = re.search(r"from ([\w.]+) import main", path.read_text(encoding="utf-8"))
        assert module is not None and f'"{path.name} = {module[1]}:main"' in SETUP
        assert path.stat().st_mode & 0o111, f"{path.name} is not executable"


def test_pins_admit_what_setup_asks_for() -> None:
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"
    )
    assert pins["torch"] == "2.13.0"
    for name in ("numpy", "opencv-python-headless", "ros-kilted-rclpy", "pytest", "ruff", "mypy"):
        assert name in pins
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["files"] == ["wam_policy_ros"]


def test_nothing_of_a_machine_ships() -> None:
    """No registry hosts, no absolute paths of a development machine."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    # The machine is this one, wherever that is; hosts are those of the manifest's schema and of the licence.
    everywhere = {Path(p) for p in ("/", "/tmp", "/opt", "/srv", "/data", "/home")}
    paths = [f"{p}/" for p in (ROOT, ROOT.parent, Path.home()) if p not in everywhere]
    known_hosts = {"127.0.0.1", "download.ros.org", "www.w3.org", "www.apache.org", "www.eprosima.com"}
    faults = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if name.startswith("test/golden/") or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        faults += [f"{name}: {p}" for p in paths if p in text]
        faults += [f"{name}: {host}" for host in re.findall(r"https?://([\w.-]+)", text) if host not in known_hosts]
        faults += [f"{name}: {word}" for word in re.findall(r"--(?:extra-)?index-url|PIP_\w*INDEX\w*", text)]
    assert faults == []


def test_packaged_checkpoints_stay_small_and_say_what_they_are() -> None:
    assert sum(p.stat().st_size for p in WEIGHTS.rglob("*") if p.is_file()) <= 25_000_000
    for folder in WEIGHTS.glob("*"):
        assert folder.name in packaged() and folder.name not in ("dreamzero", "droid"), folder
        assert "toy, not DreamZero's weights" in json.loads((folder / "about.json").read_text())["what"]
        assert "**not** DreamZero weights" in (folder / "README.md").read_text(encoding="utf-8")
        assert list(folder.rglob("tokenizer.json")), "no tokenizer need be given"


def test_recordings_stay_small() -> None:
    size = sum(p.stat().st_size for p in (ROOT / "test" / "golden").rglob("*") if p.is_file())
    assert 1_000_000 < size <= 10_000_000
