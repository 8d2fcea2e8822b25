"""The real process: signals, exit codes, what it says when ROS is not usable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from wam_policy_ros.ros.main import find_problem
from wam_policy_ros.ros.parameters import NodeParameters
from wam_policy_ros.ros.params_files import find_fault, unused

from .conftest import wait_for
from .harness import Robot, Spinner

pytestmark = pytest.mark.usefixtures("ros")

# The node with a policy whose steps take long and can be cancelled, or (deaf) cannot.
CHILD = """
import signal, sys, time
import rclpy
from rclpy.signals import SignalHandlerOptions
from wam_policy_ros.contract.fakes import ScriptedPolicy, HoldPolicy
from wam_policy_ros.ros import main
from wam_policy_ros.ros.policy_node import PolicyNode
import numpy as np

kind = sys.argv.pop(1)
policy = HoldPolicy()
infer = policy.infer
def slow(session, observation, *, cancelled=None):
    if observation.prompt == "stir the pot" and session.step >= 1:
        print("STEP", flush=True)
        end = time.monotonic() + 30
        while time.monotonic() < end and not (kind == "slow" and cancelled()):
            time.sleep(0.01)
    return infer(session, observation, cancelled=cancelled)
policy.infer = slow
main.JOIN_S = 1.0
rclpy.init(args=sys.argv, signal_handler_options=SignalHandlerOptions.NO)
node = PolicyNode(lambda params, progress: policy)
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
def explode():
    if asked:
        raise RuntimeError("an unguarded callback")
node.create_timer(0.05, explode)
sys.exit(main.run(node, main.StopSignals(), executor=str(node.get_parameter("executor").value)))
"""
CONFIG = Path(__file__).parents[2] / "config"
PARAMS = ["--params-file", CONFIG / "dreamzero.yaml", "--params-file", CONFIG / "droid.yaml", "-p", "backend:=hold"]
AGES = ["-p", "sync.max_age_s:=1.0", "-p", "sync.joint_max_age_s:=1.0", "-p", "instruction:=stir the pot"]


@pytest.fixture
def start(request: pytest.FixtureRequest, ros: None, tmp_path: Path) -> Iterator[Any]:
    namespace = f"/p{abs(hash(request.node.name)) % 10**8}"
    robot = Robot(namespace)
    spinner = Spinner(robot)
    children: list[subprocess.Popen[str]] = []

    def run(command: list[str], *more: str) -> tuple[subprocess.Popen[str], Robot, Path]:
        log = tmp_path / "log"
        args = [sys.executable, *command, "--ros-args", "-r", f"__ns:={namespace}", *map(str, PARAMS), *AGES, *more]
        with log.open("w") as out:
            env = {**os.environ, "ROS_LOG_DIR": str(tmp_path)}
            children.append(subprocess.Popen(args, stdout=out, stderr=subprocess.STDOUT, text=True, env=env))
        return children[-1], robot, log

    yield run
    for child in children:
        child.kill()
        child.wait()
    spinner.close()


@pytest.mark.parametrize(("executor", "number"), [("single", signal.SIGTERM), ("events", signal.SIGINT)])
def test_a_signal_in_mid_step_ends_with_a_hold_and_exit_code_0(start: Any, executor: str, number: int) -> None:
    child, robot, log = start(["-c", CHILD, "slow"], "-p", f"executor:={executor}")
    robot.wait_state(20, substate="running")
    wait_for(lambda: "STEP" in log.read_text(), what="a step under way")
    sent = time.monotonic()
    child.send_signal(number)
    while child.poll() is None and time.monotonic() < sent + 5:
        time.sleep(0.02)
        child.send_signal(number)  # Ctrl-C under ros2 launch arrives more than once
    assert child.wait(5) == 0, log.read_text()
    assert time.monotonic() - sent < 2.0
    wait_for(robot.holds, what="a hold before the end")
    assert len(robot.trajectories[-1][1].points) == 1, "and nothing after it"
    assert "Traceback" not in log.read_text()


def test_a_step_that_cannot_be_stopped_does_not_keep_the_process(start: Any) -> None:
    child, robot, log = start(["-c", CHILD, "deaf"])
    robot.wait_state(20, substate="running")
    wait_for(lambda: "STEP" in log.read_text())
    child.send_signal(signal.SIGTERM)
    assert child.wait(8) == 1, "not 0: the worker was not joined; not 134: no abort"
    assert "worker thread still runs" in log.read_text()
    wait_for(robot.holds)


def test_an_exception_that_ends_the_executor_ends_with_a_hold_and_exit_code_1(start: Any) -> None:
    child, robot, log = start(["-c", CHILD, "slow"])
    robot.wait_state(20, substate="running")
    wait_for(lambda: robot.plans() and "STEP" in log.read_text())
    child.send_signal(signal.SIGUSR1)
    assert child.wait(5) == 1, "not 134: no abort; not 0"
    wait_for(robot.holds, what="a hold before the end")
    assert "an unguarded callback" in log.read_text() and "Traceback" in log.read_text()


def test_the_console_entry_runs_from_the_packaged_yaml_files(start: Any) -> None:
    child, robot, log = start(["-m", "wam_policy_ros.ros.main"])
    state = robot.wait_state(20, lifecycle="active")
    assert state["policy"]["weights"] == "hold policy, no network"
    child.send_signal(signal.SIGTERM)
    assert child.wait(5) == 0, log.read_text()


def test_an_rmw_that_the_wheels_lack_is_a_readable_error(ros_domain: None) -> None:
    import rclpy

    if not (Path(rclpy.__file__).parents[1] / "ros_wheels_bootstrapper").exists():
        pytest.skip("rclpy does not come from the wheels")
    env = {**os.environ, "RMW_IMPLEMENTATION": "rmw_cyclonedds_cpp"}
    done = subprocess.run(
        [sys.executable, "-m", "wam_policy_ros.ros.main"], env=env, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 2 and "unset RMW_IMPLEMENTATION" in done.stderr and "Traceback" not in done.stderr


def test_missing_rclpy_names_both_ways_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    problem = find_problem()
    assert problem is not None and "ros-kilted" in problem and "setup.bash" in problem


def run_node(tmp_path: Path, *args: str, yaml: str | None = None) -> subprocess.CompletedProcess[str]:
    """The entry point, which must end by itself; with a parameter file of this text."""
    command = [sys.executable, "-m", "wam_policy_ros.ros.main", *args]
    if yaml is not None:
        (tmp_path / "mine.yaml").write_text(yaml)
        command += ["--ros-args", "--params-file", str(tmp_path / "mine.yaml")]
    env = {**os.environ, "ROS_LOG_DIR": str(tmp_path)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_says_what_it_is_and_how_to_give_parameters(tmp_path: Path, option: str) -> None:
    done = run_node(tmp_path, option)
    assert done.returncode == 0 and not done.stderr
    assert "World Action Model" in done.stdout and "--params-file" in done.stdout and "/**/wam_policy:" in done.stdout
    for name, f in NodeParameters.names().items():
        assert f"  {name} (" in done.stdout and f.metadata["doc"] in done.stdout


def test_an_argument_that_is_no_ros_argument_is_refused(tmp_path: Path) -> None:
    done = run_node(tmp_path, "--checkpoint", "/c")
    assert done.returncode == 2 and "'--checkpoint'" in done.stderr and "--help" in done.stderr


@pytest.mark.parametrize(
    ("yaml", "says"),
    [
        ("backend: hold\n", "`/**/wam_policy:` and, indented below it, `ros__parameters:`; got 'backend' outside"),
        ("/**/wam_policy:\n  backend: hold\n", "got 'backend' outside of ros__parameters"),
        ("a: [1,\n b", "is not valid YAML"),
    ],
)
def test_a_parameter_file_that_ros_rejects_is_one_readable_line(
    ros_domain: None, tmp_path: Path, yaml: str, says: str
) -> None:
    done = run_node(tmp_path, yaml=yaml)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("wam_policy: ")]
    assert done.returncode == 2 and says in line and "mine.yaml" in line and "Traceback" not in done.stderr


def test_a_parameter_file_for_another_node_is_named_and_a_refused_start_ends_with_1(
    ros_domain: None, tmp_path: Path
) -> None:
    text = "/robot/wam_policy:\n  ros__parameters:\n    backend: hold\nwam_polcy:\n  ros__parameters: {device: cpu}\n"
    more = tmp_path / "more.yaml"
    more.write_text("/**:\n  ros__parameters: {exit_on_failure: true}\n")
    args = ["--ros-args", "--params-file", str(more), "--"]
    done = run_node(tmp_path, *args, yaml=text)
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "sets nothing for this node" in line]
    assert "mine.yaml" in line and "/wam_policy: it has parameters for /robot/wam_policy, /wam_polcy;" in line
    assert "autostart gave up: configure was refused; the process ends" in done.stderr


@pytest.mark.parametrize(
    ("pattern", "node", "same"),
    [
        ("/**", "/a/b/wam_policy", True),
        ("/**/wam_policy", "/wam_policy", True),
        ("/**/wam_policy", "/a/b/wam_policy", True),
        ("/*/wam_policy", "/a/wam_policy", True),
        ("/*/wam_policy", "/a/b/wam_policy", False),
        ("wam_policy", "/wam_policy", True),
        ("wam_policy", "/a/wam_policy", False),
        ("/**/wam_policy", "/my_wam_policy", False),
    ],
)
def test_names_in_parameter_files_are_matched_as_ros_does(tmp_path: Path, pattern: str, node: str, same: bool) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(f"{pattern}:\n  ros__parameters: {{backend: hold}}\n")
    assert (unused(path, node) is None) == same


def test_names_in_parameter_files_may_be_nested(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("/a:\n  b:\n    wam_policy:\n      ros__parameters: {backend: hold}\n")
    assert unused(path, "/a/b/wam_policy") is None and find_fault(path) is None
    assert "/a/b/wam_policy" in (unused(path, "/wam_policy") or "")
