"""A served policy that hears what a case sends: real sockets, the real server, the tiny engine with random weights."""

from __future__ import annotations

import functools
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from websockets.exceptions import ConnectionClosed

from test.serving.harness import Client, RememberingPolicy, Served, small_spec, wait_for
from wam_policy_ros.contract.policy_thread import Phase
from wam_policy_ros.serving.codec import pack

from .case import Case, Unavailable

REPLY_S = 60.0
KEYS = (
    *(f"observation/{camera}" for camera in ("exterior_image_0_left", "exterior_image_1_left", "wrist_image_left")),
    *("observation/joint_position", "observation/gripper_position", "prompt", "session_id", "endpoint"),
)


class Counted:
    """A policy that counts the sessions it opened; everything else is the policy's."""

    def __init__(self, policy: Any) -> None:
        self._policy, self.opened = policy, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def open(self, session_id: str | None = None, *, seed: int | None = None) -> Any:
        self.opened += 1
        return self._policy.open(session_id, seed=seed)


@functools.cache
def engine() -> Any:
    try:
        from test.engine.tiny_policy import make_policy
    except ModuleNotFoundError as error:
        raise Unavailable(f"needs the engine: {error.name} is not installed") from error
    return make_policy()


@contextmanager
def server(config: Mapping[str, Any], policy: Any = None, **options: Any) -> Iterator[Served]:
    """A server with the rules of the reference configuration: other picture sizes are padded, errors as decided."""
    policy = Counted(policy or engine())
    size = list(config["model_image_hw"])
    expected = {"image_hw": size, "horizon": config["policy"]["horizon"], "action_dim": config["policy"]["action_dim"]}
    spec = policy.spec
    found = {"image_hw": [spec.cameras[0].height, spec.cameras[0].width], "horizon": spec.horizon}
    if found | {"action_dim": spec.action_dim} != expected:
        raise Unavailable(f"the policy of these tests has {found}, the case wants {expected}")
    one = Served(policy, **({"resize": "pad"} | options))
    one.server.start()
    try:
        yield one
    finally:
        one.server.stop(5), one.owner.stop(5)


def remembering(config: Mapping[str, Any]) -> RememberingPolicy:
    return RememberingPolicy(small_spec(*config["model_image_hw"]))


def valid_request(config: Mapping[str, Any], session: str = "another session") -> dict[str, Any]:
    height, width = config["model_image_hw"]
    keys = config.get("server", {}).get("keys") or KEYS
    picture = np.full((height, width, 3), 127, np.uint8)
    values = {"observation/joint_position": np.zeros(7), "observation/gripper_position": np.zeros(1)}
    values |= {"prompt": "pick up the cup", "session_id": session, "endpoint": "infer"}
    return {key: values.get(key, picture) for key in keys}


class Talk:
    """Connections by name, what was sent on them and what came back. A closed connection is opened again."""

    def __init__(self, one: Served) -> None:
        self.one = one
        self.clients: dict[str, Client] = {}
        self.sent: list[tuple[str, Any]] = []
        self.replies: list[Any] = []

    def client(self, name: str) -> Client:
        if name not in self.clients:
            self.clients[name] = Client(self.one, max_size=None)
        return self.clients[name]

    def send(self, name: str, message: Any) -> None:
        self.sent.append((name, message))
        self.client(name).send(message)

    def receive(self, name: str) -> Any:
        reply = self.client(name).receive(REPLY_S)
        self.replies.append(reply)
        if isinstance(reply, str) and reply != "reset successful":
            with_code = self.clients.pop(name)  # one text frame, then 1011
            try:
                with_code.socket.recv(timeout=5)
            except ConnectionClosed as closed:
                assert closed.rcvd is not None and closed.rcvd.code == 1011, closed
            else:
                raise AssertionError("a second frame after an error")
        return reply

    def ask(self, name: str, message: Any) -> Any:
        self.send(name, message)
        return self.receive(name)

    def close(self) -> None:
        for client in self.clients.values():
            client.socket.close()

    @property
    def refusals(self) -> list[str]:
        return [r for r in self.replies if isinstance(r, str) and r != "reset successful"]


@contextmanager
def talk(config: Mapping[str, Any], policy: Any = None, **options: Any) -> Iterator[Talk]:
    with server(config, policy, **options) as one:
        conversation = Talk(one)
        try:
            yield conversation
        finally:
            conversation.close()


def alone(config: Mapping[str, Any], messages: list[Any]) -> list[Any]:
    """What these messages are answered with on a server of their own."""
    with talk(config) as fresh:
        return [fresh.ask("alone", m) for m in messages]


def message_of(case: Case, event: Mapping[str, Any]) -> Any:
    """What an event sends: a file's bytes, text, or a map."""
    if "send_dict" in event:
        return pack(dict(event["send_dict"]))
    if "send_text" in event:
        return str(event["send_text"])
    name = event.get("send", event.get("file"))
    if not isinstance(name, str):
        raise AssertionError(f"the runner does not know the event {dict(event)}")
    path = case.folder / name
    return path.read_text(encoding="utf-8") if path.suffix == ".txt" else path.read_bytes()


@contextmanager
def nothing_unpickled() -> Iterator[list[str]]:
    """Names of pickle functions that were called meanwhile."""
    called: list[str] = []

    def note(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return real(*args, **kwargs)

        return wrapped

    names = ("loads", "load", "Unpickler")
    patches = [mock.patch.object(pickle, n, note(n, getattr(pickle, n))) for n in names]
    for patch in patches:
        patch.start()
    try:
        yield called
    finally:
        for patch in patches:
            patch.stop()


class SlowStart:
    """A server whose policy takes its time to load; how it ends is told by ``load``."""

    def __init__(self, config: Mapping[str, Any], load_s: float, error: Exception | None = None) -> None:
        def load(progress: Callable[[str, float], None]) -> Any:
            progress("loading", 0.5)
            self.go.wait(load_s)
            if error is not None:
                raise error
            return remembering(config)

        self.go = threading.Event()
        self.start_s = time.monotonic()
        self.one = Served(factory=load)
        self.one.server.start()

    def wait_ready(self) -> None:
        wait_for(lambda: self.one.owner.status.phase in (Phase.READY, Phase.FAILED), 30)

    def stop(self) -> None:
        self.go.set()
        self.one.server.stop(5), self.one.owner.stop(5)
