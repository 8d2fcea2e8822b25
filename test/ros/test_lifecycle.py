"""Transitions: what fails half-way leaves nothing behind, and none takes longer than its bound."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rclpy.parameter import Parameter

from wam_policy_ros.contract.fakes import HoldPolicy
from wam_policy_ros.ros import policy_node
from wam_policy_ros.ros.frames import DecodeAhead
from wam_policy_ros.ros.inputs import Inputs
from wam_policy_ros.ros.policy_node import PolicyNode
from wam_policy_ros.ros.worker import InferenceWorker

from .conftest import wait_for
from .harness import NAMES

pytestmark = pytest.mark.usefixtures("ros")

CREATORS = (
    "create_publisher",
    "create_lifecycle_publisher",
    "create_subscription",
    "create_service",
    "create_client",
    "create_timer",
    "create_guard_condition",
)
PARTS: tuple[tuple[type, str], ...] = ((DecodeAhead, "__init__"), (InferenceWorker, "__init__"), (Inputs, "__init__"))
LISTS = ("publishers", "subscriptions", "services", "clients", "timers", "guards")

TRANSITION_S = 2.0
"""No transition blocks the callbacks of the node longer, on a busy test machine; the worker has 0.5 s of it."""


def make_node(policy: Any = None, **params: Any) -> PolicyNode:
    given = {"backend": "hold", "joints.names": NAMES, "gripper.closed": 0.8, "autostart": False, **params}
    overrides = [Parameter(k, value=v) for k, v in given.items()]
    made = policy or HoldPolicy()
    factory = made if callable(made) else lambda params, progress: made
    return PolicyNode(factory, namespace="/lifecycle", parameter_overrides=overrides)


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "gripper beside joint_command": {"output.mode": "joint_command", "gripper.mode": "float64"},
    "two trajectories": {"gripper.mode": "trajectory", "safety.urdf": "<robot name='r'/>"},
    "endpoint": {"openpi.enabled": True, "openpi.port": 0, "safety.executor_stall_s": 0.0},
    "compressed": {"image.compressed": True},
}


@pytest.fixture
def node(request: pytest.FixtureRequest) -> Iterator[PolicyNode]:
    made = make_node(**getattr(request, "param", {}))
    yield made
    made.close(5.0)
    made.destroy_node()


def belongings(node: PolicyNode) -> dict[str, Any]:
    """Everything a configuration could leave behind."""
    out: dict[str, Any] = {name: len(list(getattr(node, name))) for name in LISTS}
    out["managed"] = len(node._managed_entities)
    out["threads"] = sorted(t.name for t in threading.enumerate())
    return out


class FailAt:
    """The call number ``at`` of all that create something raises; counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, node: PolicyNode) -> None:
        self.calls, self.at, self.where = 0, -1, ""
        for name in CREATORS:
            monkeypatch.setattr(node, name, self._wrap(name, getattr(node, name)))
        for kind, name in PARTS:
            monkeypatch.setattr(kind, name, self._wrap(kind.__name__, getattr(kind, name)))
        for name in (
            "assemble",
            "subscribe",
            "RobotOutputs",
            "serve",
            "watch_description",
            "make_server",
            "StallWatch",
        ):
            monkeypatch.setattr(policy_node, name, self._wrap(name, getattr(policy_node, name)))

    def _wrap(self, name: str, create: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls - 1 == self.at:
                self.where = name
                raise RuntimeError(f"injected in {name}")
            return create(*args, **kwargs)

        return wrapped

    def next(self, at: int) -> None:
        self.calls, self.at = 0, at


@pytest.mark.parametrize("node", CONFIGURATIONS.values(), ids=CONFIGURATIONS, indirect=True)
def test_a_failure_at_any_creation_leaves_nothing_behind(node: PolicyNode, monkeypatch: pytest.MonkeyPatch) -> None:
    before = belongings(node)
    fail = FailAt(monkeypatch, node)
    node.trigger_configure()
    assert node.lifecycle == "inactive", node.refused
    total, whole = fail.calls, belongings(node)
    assert total >= 12 and whole != before, "it is seen what a configuration makes"
    node.trigger_cleanup()
    wait_for(lambda: belongings(node) == before, 5, "cleanup")
    seen = set()
    for at in range(total):
        fail.next(at)
        node.trigger_configure()
        assert node.lifecycle == "unconfigured" and f"injected in {fail.where}" in node.refused, (at, fail.where)
        wait_for(lambda: belongings(node) == before, 5, f"{at} {fail.where}: {belongings(node)}, before {before}")
        seen.add(fail.where)
    assert {"create_subscription", "create_timer", "create_service", "DecodeAhead", "Inputs", "subscribe"} <= seen
    fail.next(-1)
    node.trigger_configure()
    assert node.lifecycle == "inactive", "and it can be configured after all of that"
    assert belongings(node)["publishers"] == whole["publishers"]


def test_refused_parameters_leave_nothing_behind(node: PolicyNode) -> None:
    before = belongings(node)
    for name, value in (("joints.names", ["a"]), ("cameras.topics", ["x"]), ("output.topic", "no spaces please")):
        good = node.get_parameter(name).value
        node.set_parameters([Parameter(name, value=value)])
        node.trigger_configure()
        assert node.lifecycle == "unconfigured" and node.refused, name
        assert belongings(node) == before, name
        node.set_parameters(
            [
                Parameter(name, type_=Parameter.Type.STRING_ARRAY, value=good or [])
                if isinstance(value, list)
                else Parameter(name, value=good)
            ]
        )
    node.trigger_configure()
    assert node.lifecycle == "inactive", node.refused


class Hung(HoldPolicy):
    """A device call that does not return, whoever asks it to."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.hangs, self.release = 0, threading.Event(), threading.Event()

    def infer(self, session: Any, observation: Any, *, cancelled: Any = None, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls > 2:
            self.hangs.set()
            self.release.wait(30)
        return super().infer(session, observation, cancelled=cancelled, **kwargs)


def timed(transition: Callable[[], Any]) -> float:
    start_s = time.monotonic()
    transition()
    return time.monotonic() - start_s


def test_every_transition_is_bounded_even_with_a_policy_that_never_returns() -> None:
    from .harness import System

    policy = Hung()
    system = System(policy)
    try:
        assert policy.hangs.wait(15), "a step is under way"
        node = system.node
        took = {"deactivate": system.on_node(lambda: timed(node.trigger_deactivate))}
        assert node.lifecycle == "inactive"
        took["cleanup"] = system.on_node(lambda: timed(node.trigger_cleanup))
        assert node.lifecycle == "unconfigured"
        took["refused configure"] = system.on_node(lambda: timed(node.trigger_configure))
        assert node.lifecycle == "unconfigured" and "restart the process" in node.refused
        policy.release.set()
        wait_for(lambda: not node._old_worker.alive)  # type: ignore[union-attr]
        took["configure"] = system.on_node(lambda: timed(node.trigger_configure))
        assert node.lifecycle == "inactive"
        took["shutdown"] = system.on_node(lambda: timed(node.trigger_shutdown))
        assert node.lifecycle == "finalized"
        assert max(took.values()) < TRANSITION_S, took
    finally:
        policy.release.set()
        system.close()


def test_transitions_do_not_wait_for_a_policy_that_loads_for_ever() -> None:
    loads, release = threading.Event(), threading.Event()

    def factory(params: Any, progress: Any) -> Any:
        loads.set()
        release.wait(30)
        return HoldPolicy()

    node = make_node(factory)
    try:
        took = {"configure": timed(node.trigger_configure)}
        assert node.lifecycle == "inactive" and loads.wait(5)
        took["refused activate"] = timed(node.trigger_activate)
        assert node.lifecycle == "inactive" and "not ready" in node.refused
        took["cleanup"] = timed(node.trigger_cleanup)
        took["shutdown"] = timed(node.trigger_shutdown)
        assert max(took.values()) < TRANSITION_S, took
    finally:
        release.set()
        node.close(5.0)
        node.destroy_node()
