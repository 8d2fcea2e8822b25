"""The OpenPI server inside the node's process: clients and the robot share one policy, the robot goes first."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed

from wam_policy_ros.contract.errors import ConfigError, EngineError, Overloaded, PolicyUnavailable, RemoteError
from wam_policy_ros.contract.fakes import ScriptedPolicy, example_observation
from wam_policy_ros.contract.interface import Observation
from wam_policy_ros.ros.backend import _dialects
from wam_policy_ros.ros.parameters import NodeParameters
from wam_policy_ros.serving.client import ClientConfig, RemotePolicy, connect_policy
from wam_policy_ros.serving.client_link import LinkConfig

from .conftest import wait_for
from .harness import CAMERAS, SPEC, System

pytestmark = pytest.mark.usefixtures("ros")
Make = Callable[..., System]
ROBOT = "stir the pot"


@pytest.fixture
def make(ros: None) -> Iterator[Make]:
    systems: list[System] = []

    def start(policy: Any, **params: Any) -> System:
        systems.append(System(policy, **{"openpi.enabled": True, "openpi.port": 0, **params}))
        return systems[-1]

    yield start
    for system in systems:
        system.close()
    names = [t.name for t in threading.enumerate()]
    assert "wam_policy_owner" not in names and "wam_openpi_server" not in names


def stand(observation: Observation, step: int) -> np.ndarray:
    return np.tile(np.concatenate(list(observation.state.values())), (24, 1))


def uri(system: System) -> str:
    return str(wait_for(lambda: system.robot.state.get("openpi", {}).get("addresses"))[0])


def client(address: str, **changes: Any) -> RemotePolicy:
    link = LinkConfig(address, api_key=changes.pop("api_key", ""), open_timeout_s=2.0)
    return connect_policy(ClientConfig(link, **{"timeout_s": 10.0, **changes}), wait_s=5.0)


def look(seed: int = 0, prompt: str = "a client's task") -> Observation:
    return example_observation(SPEC, seed=seed, prompt=prompt)


def test_clients_and_the_robot_share_one_policy_and_no_session(make: Make) -> None:
    policy = ScriptedPolicy(stand, latency_s=0.02, record=True)
    system = make(policy)
    system.robot.wait_state(substate="running")
    remote = client(uri(system))
    session = remote.open("episode")
    for seed in range(3):
        observation = look(seed)
        chunk = remote.infer(session, observation)
        np.testing.assert_allclose(chunk.actions[0, :7], observation.state["joint_position"], atol=1e-6)
    plans = len(system.robot.plans())
    wait_for(lambda: len(system.robot.plans()) >= plans + 3, what="the robot goes on")
    assert system.robot.state["openpi"]["sessions"] == 1 and system.robot.state["openpi"]["trouble"] == ""
    remote.close(session)
    by_prompt = {s.session_id: {o.prompt for o in s.seen} for s in policy.sessions if s.seen}
    assert all(len(prompts) == 1 for prompts in by_prompt.values()), "no session saw both"
    episode = next(s for s in policy.sessions if s.session_id == "episode")
    assert episode.closed and not system.robot.holds()
    remote.disconnect()


def test_nobody_is_greeted_before_the_policy_is_ready(make: Make) -> None:
    ready = threading.Event()

    def factory(params: Any, progress: Any) -> Any:
        while not ready.wait(0.01):
            progress("loading weights", 0.5)
        return ScriptedPolicy(stand)

    system = make(factory)
    address = uri(system)
    assert "loading" in system.robot.state["openpi"]["trouble"]
    threading.Timer(0.3, ready.set).start()
    start = time.monotonic()
    remote = client(address)
    assert time.monotonic() - start > 0.2 and ready.is_set(), "connected at once, greeted when it was ready"
    remote.infer(remote.open(), look())
    remote.disconnect()


def test_a_step_of_a_client_gives_way_to_the_robot(make: Make) -> None:
    starts: list[str] = []

    class Slow(ScriptedPolicy):
        """Two seconds for a client, asked for its end every 10 ms; at once for the robot."""

        def infer(self, session: Any, observation: Observation, *, cancelled: Any = None) -> Any:
            starts.append(observation.prompt)
            self._latency_s = 2.0 if observation.prompt == "slow" and starts.count("slow") <= 6 else 0.0
            return super().infer(session, observation, cancelled=cancelled)

    system = make(Slow(stand), **{"openpi.max_sessions": 2})
    system.robot.wait_state(substate="running")
    remote = client(uri(system))
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(remote.infer(remote.open(), look(prompt="slow"))))
    before = len(system.robot.plans())
    thread.start()
    wait_for(lambda: starts.count("slow") >= 3, what="the client's step was interrupted and started again")
    wait_for(lambda: len(system.robot.plans()) >= before + 3)
    state = system.robot.wait_state(substate="running")
    assert state["latency_s"] < 0.5 and state["counters"]["late"] == 0 and not system.robot.holds()
    thread.join(10)
    assert got and got[0].step == 0
    remote.disconnect()


def test_a_hold_does_not_wait_for_a_clients_step(make: Make) -> None:
    gate = threading.Event()

    def rows(observation: Observation, step: int) -> np.ndarray:
        if observation.prompt == "deaf":
            gate.wait(10)  # cannot be interrupted
        return stand(observation, step)

    system = make(ScriptedPolicy(rows), **{"sync.max_age_s": 0.3, "safety.deadline_s": 30.0})
    system.robot.wait_state(substate="running")
    remote = client(uri(system))
    thread = threading.Thread(target=lambda: remote.infer(remote.open(), look(prompt="deaf")))
    thread.start()
    wait_for(lambda: system.on_node(lambda: system.node._parts.worker.owner.running_s) > 0.1)  # type: ignore[union-attr]
    system.robot.on[CAMERAS[0]] = False
    start = time.monotonic()
    system.robot.wait_state(substate="holding")
    assert time.monotonic() - start < 1.0
    gate.set()
    thread.join(5)
    remote.disconnect()


def test_what_a_client_does_wrong_is_no_fault_of_the_robot(make: Make) -> None:
    def rows(observation: Observation, step: int) -> np.ndarray:
        if observation.prompt == "break":
            raise EngineError("a step for this client failed")
        return stand(observation, step) * (np.nan if observation.prompt == "nan" else 1.0)

    system = make(ScriptedPolicy(rows))
    system.robot.wait_state(substate="running")
    for prompt, text in [("break", "a step for this client failed"), ("nan", "not finite")]:
        remote = client(uri(system))
        with pytest.raises(RemoteError, match=text):
            remote.infer(remote.open(), look(prompt=prompt))
        remote.disconnect()
    plans = len(system.robot.plans())
    wait_for(lambda: len(system.robot.plans()) >= plans + 2)
    state = system.robot.wait_state(substate="running")
    assert not state["fault"] and not system.robot.holds() and state["counters"]["refused"] == 0


def test_memory_that_clients_took_while_the_robot_stood_still_comes_back(make: Make) -> None:
    class Small(ScriptedPolicy):
        """Has memory for one session, taken at its first step."""

        def infer(self, session: Any, observation: Observation, *, cancelled: Any = None) -> Any:
            others = [s for s in self.sessions if s is not session and s.step and not s.closed]
            if session.step == 0 and others:
                raise Overloaded("no window is free")
            return super().infer(session, observation, cancelled=cancelled)

    policy = Small(stand, latency_s=0.01, record=True)
    system = make(policy)
    system.robot.wait_state(substate="running")
    remote = client(uri(system))
    with pytest.raises(PolicyUnavailable, match="no window is free"):
        remote.infer(remote.open(), look())
    change(system, "deactivate")
    system.robot.wait_state(lifecycle="inactive")
    remote = client(uri(system))
    wait_for(lambda: all(s.closed for s in policy.sessions if s.step), what="the end of the robot's session")
    session = remote.open()
    remote.infer(session, look())
    change(system, "activate")
    state = system.robot.wait_state(substate="running")
    assert not state["fault"]
    with pytest.raises(RemoteError, match="the robot needed its memory"):
        remote.infer(session, look(1))
    assert not system.robot.state["fault"]
    remote.disconnect()


def change(system: System, transition: int) -> None:
    done = system.on_node(lambda: getattr(system.node, f"trigger_{transition}")())
    assert done is not None


def test_clients_go_on_while_the_robot_holds_and_end_with_the_configuration(make: Make) -> None:
    system = make(ScriptedPolicy(stand, latency_s=0.01))
    system.robot.wait_state(substate="running")
    address = uri(system)
    remote, idle = client(address), client(address)
    session = remote.open()
    remote.infer(session, look())
    change(system, "deactivate")
    system.robot.wait_state(lifecycle="inactive")
    assert remote.infer(session, look(1)).step == 1
    start = time.monotonic()
    change(system, "cleanup")
    assert time.monotonic() - start < 2.5, "a transition blocks every callback"
    system.robot.wait_state(lifecycle="unconfigured")
    link = idle._link
    assert link is not None
    with pytest.raises(ConnectionClosed) as closed:
        link._ws.recv(timeout=2)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1])), 1).close()
    change(system, "configure")
    system.robot.wait_state(lifecycle="inactive")
    again = client(uri(system))
    again.infer(again.open(), look())
    for one in (remote, idle, again):
        one.disconnect()


def test_cleanup_with_a_client_that_is_in_the_middle_of_a_step(make: Make) -> None:
    system = make(ScriptedPolicy(stand, latency_s=0.0), autostart=True)
    system.robot.wait_state(substate="running")
    change(system, "deactivate")
    owner = system.node._parts.worker.owner  # type: ignore[union-attr]
    remote = client(uri(system))
    policy_busy = threading.Event()

    def long(policy: Any, cancelled: Any) -> None:
        policy_busy.set()
        while not cancelled():
            time.sleep(0.01)

    owner.submit(long, lane="somebody")
    policy_busy.wait(5)
    thread = threading.Thread(target=lambda: _quiet(remote))
    thread.start()
    wait_for(lambda: owner.waiting == 1)
    start = time.monotonic()
    change(system, "cleanup")
    assert time.monotonic() - start < 2.5
    thread.join(5)
    assert not thread.is_alive(), "the client was told"
    wait_for(lambda: not owner.alive)
    remote.disconnect()


def _quiet(remote: RemotePolicy) -> None:
    with pytest.raises(EngineError):
        remote.infer(remote.open(), look())


def test_a_port_that_is_taken_refuses_configure_with_the_reason(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        system = make(ScriptedPolicy(stand), **{"openpi.port": port})
        state = system.robot.wait_state(lifecycle="unconfigured")
        wait_for(lambda: str(port) in system.robot.state["refused"], what=f"the port in {state}")
    change(system, "configure")
    system.robot.wait_state(lifecycle="inactive")
    remote = client(uri(system))
    remote.infer(remote.open(), look())
    remote.disconnect()


def test_a_key_and_an_open_network(make: Make) -> None:
    system = make(ScriptedPolicy(stand), **{"openpi.api_key": "k", "openpi.host": "0.0.0.0"})
    address = uri(system).replace("0.0.0.0", "127.0.0.1")
    with pytest.raises(ConfigError, match="401"):
        client(address)
    client(address, api_key="k").disconnect()
    assert not [line for line in system.lines if "without a key" in line]
    other = make(ScriptedPolicy(stand), **{"openpi.host": "0.0.0.0"})
    wait_for(lambda: [line for line in other.lines if "without a key" in line])


def test_dialects_by_port(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    system = make(ScriptedPolicy(stand), **{"openpi.dialects": ["dreamzero", f"openpi:{port}"]})
    assert client(uri(system)).spec.weights == "scripted, no network", "told over HTTP; the greeting has no room"
    remote = client(f"ws://127.0.0.1:{port}", dialect="openpi")
    assert remote.spec.weights == "scripted, no network"
    chunk = remote.infer(remote.open(), look())
    assert chunk.timings_s["server"] >= 0


@pytest.mark.parametrize("dialects", [[], ["a", "b"], ["a:8001"], ["a", "b:x"], ["a", "b:8001", "c:8001"]])
def test_dialects_are_checked(dialects: list[str]) -> None:
    params = NodeParameters.from_values({"backend": "hold", "openpi.dialects": dialects})
    with pytest.raises(ConfigError, match=r"openpi\.dialects"):
        _dialects(params)
