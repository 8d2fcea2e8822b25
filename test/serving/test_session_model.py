"""Clients in any order against a model of the rules: who has which session, and what it has seen."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from wam_policy_ros.serving.codec import pack
from wam_policy_ros.serving.wire import InferRequest, RequestReader, WireRules

from .harness import Client, RememberingPolicy, Served, request, wait_for

NAMES = ("a", "b", "c", None)


class Sessions(RuleBasedStateMachine):
    """``mine`` holds, for every session that should exist, its twin in a policy of the test's own."""

    clients = Bundle("clients")

    @initialize()
    def start(self) -> None:
        self.one = Served(errors="keep_open")
        self.one.server.start()
        self.twin = RememberingPolicy()
        self.reader = RequestReader(self.twin.spec, WireRules())
        self.mine: dict[Any, Any] = {}  # name, or the client of a session without a name -> twin
        self.holder: dict[Any, Client | None] = {}
        self.current: dict[Client, Any] = {}
        self.open: set[Client] = set()

    def teardown(self) -> None:
        if hasattr(self, "one"):
            for client in self.open:
                client.socket.close()
            assert self.one.server.stop(5) and self.one.owner.stop(5)
            assert not self.one.policy.sessions, "nothing is left behind"

    @rule(target=clients)
    def connect(self) -> Client:
        client = Client(self.one)
        self.open.add(client)
        return client

    @rule(client=clients, name=st.sampled_from(NAMES), number=st.integers(0, 3), prompt=st.sampled_from(["x", "y"]))
    def infer(self, client: Client, name: str | None, number: int, prompt: str) -> None:
        message = request(number, name, prompt=prompt)
        answer = client.ask(message)
        key = client if name is None else name
        if self.holder.get(key, client) not in (client, None):
            assert "in use by another connection" in answer
            return
        read = self.reader.read(pack(message))
        assert isinstance(read, InferRequest)
        twin = self.mine.setdefault(key, self.twin.open(name))
        expected = self.twin.infer(twin, read.observation).actions.astype(np.float32)
        assert not isinstance(answer, str), answer
        assert np.array_equal(answer, expected), "it remembers exactly its own steps"
        self.holder[key], self.current[client] = client, key

    @rule(client=clients, name=st.sampled_from(NAMES), what=st.sampled_from(["request", "policy", "trailing"]))
    def fail(self, client: Client, name: str | None, what: str) -> None:
        key = client if name is None else name
        foreign = self.holder.get(key, client) not in (client, None)
        if what == "policy":
            self.one.policy.error = RuntimeError("broken")
            answer = client.ask(request(9, name))
            self.one.policy.error = None
            if not foreign:  # its step failed, so it took what was waiting for its client, and nothing more
                self.current[client] = key
                if key in self.mine:
                    self.holder[key] = client
        else:
            answer = client.ask(pack(request(9, name)) + b"\0" if what == "trailing" else request(9, name, seed=-1))
        assert isinstance(answer, str) and "Error" in answer

    @rule(client=clients, names=st.lists(st.sampled_from(NAMES[:3]), max_size=3))
    def reset_named(self, client: Client, names: list[str]) -> None:
        answer = client.ask({"endpoint": "reset", "session_ids": names})
        if any(self.holder.get(name) not in (client, None) for name in names):
            assert "in use by another connection" in answer
        else:
            assert answer == "reset successful"
            self.forget(names)

    @rule(client=clients, every=st.booleans())
    def reset(self, client: Client, every: bool) -> None:
        message: dict[str, Any] = {"endpoint": "reset"}
        assert client.ask(message | {"session_ids": None} if every else message) == "reset successful"
        here = [key for key, holder in self.holder.items() if holder is client]
        self.forget(here if every else [key for key in here if key == self.current.get(client)])

    @rule(client=consumes(clients), goodbye=st.booleans())
    def leave(self, client: Client, goodbye: bool) -> None:
        self.open.discard(client)
        if goodbye:
            client.socket.close()
        else:
            client.drop()
        wait_for(lambda: len(self.one.server.connections) == len(self.open))
        here = [key for key, holder in self.holder.items() if holder is client]
        self.forget([key for key in here if goodbye or key is client])
        for key in here:
            if key in self.holder:
                self.holder[key] = None

    def forget(self, keys: list[Any]) -> None:
        for key in keys:
            self.mine.pop(key, None)
            self.holder.pop(key, None)

    @invariant()
    def as_many_as_there_should_be(self) -> None:
        if hasattr(self, "one"):
            wait_for(lambda: len(self.one.policy.sessions) == len(self.mine), what="the end of what was left")
            assert len(self.one.server.table) == len(self.mine)


TestSessions = Sessions.TestCase
TestSessions.settings = settings(
    max_examples=12, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
