"""A server on a free port of loopback, policies that remember what they saw, and the requests of known clients."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from websockets.sync.client import ClientConnection, connect

from wam_policy_ros.contract.errors import Cancelled, SessionError
from wam_policy_ros.contract.fakes import spec_of
from wam_policy_ros.contract.interface import ActionChunk, CameraSpec, Observation, PolicySpec, ResetReason
from wam_policy_ros.contract.policy_thread import OwnerLimits, Phase, PolicyThread
from wam_policy_ros.serving.codec import Codec, pack, unpack
from wam_policy_ros.serving.config import ServerConfig
from wam_policy_ros.serving.server import OpenPIServer

HEIGHT, WIDTH = 6, 8
KEYS = ("observation/exterior_image_0_left", "observation/exterior_image_1_left", "observation/wrist_image_left")


def wait_for(true: Callable[[], Any], timeout_s: float = 5.0, what: str = "it") -> None:
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, f"{what} did not happen"
        time.sleep(0.002)


def small_spec(height: int = HEIGHT, width: int = WIDTH, **changes: Any) -> PolicySpec:
    spec = spec_of("oxe_droid", weights="fake, remembers what it saw")
    cameras = tuple(CameraSpec(c.name, c.topic, height, width) for c in spec.cameras)
    return replace(spec, cameras=cameras, **changes)


class Memory:
    """A session of the remembering policy; counts how many are alive."""

    def __init__(self, session_id: str, seed: int | None) -> None:
        self.session_id, self.seed = session_id, seed
        self.step, self.prompt, self.closed = 0, None, False
        self.digest = hashlib.sha256()


class RememberingPolicy:
    """Rows that depend on everything the session has seen, as a model with a history does. Transactional like one.

    Attributes:
        gate: closed, every step waits (and asks ``cancelled``); entered: a step has begun.
        error: raised by every step.
        threads: who called.
    """

    def __init__(self, spec: PolicySpec | None = None) -> None:
        self.spec = spec or small_spec()
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.broken = False
        self.sessions: dict[int, Memory] = {}
        self.opened = self.closed = self.cancelled = 0
        self.seen: list[Observation] = []
        self.record = False
        self.threads: set[str] = set()

    def open(self, session_id: str | None = None, *, seed: int | None = None) -> Memory:
        memory = Memory(session_id or f"own-{self.opened}", seed)
        self.opened += 1
        self.sessions[id(memory)] = memory
        return memory

    def infer(
        self, session: Memory, observation: Observation, *, cancelled: Callable[[], bool] | None = None
    ) -> ActionChunk:
        if session.closed:
            raise SessionError("closed")
        self.threads.add(threading.current_thread().name)
        self.entered.set()
        while not self.gate.wait(0.001):
            if cancelled is not None and cancelled():
                self.cancelled += 1
                raise Cancelled("between two evaluations")
        if self.error is not None:
            raise self.error
        if self.record:
            self.seen.append(observation)
        changed = session.prompt is not None and session.prompt != observation.prompt
        digest = hashlib.sha256() if changed or session.step == 0 else session.digest.copy()
        for camera in self.spec.cameras:
            digest.update(observation.frames[camera.name][-1:].tobytes())
        for field in self.spec.state:
            digest.update(observation.state[field.name].tobytes())
        digest.update(observation.prompt.encode() + str(session.seed).encode())
        session.digest, session.prompt = digest, observation.prompt
        step, session.step = session.step, session.step + 1
        seed = int.from_bytes(digest.digest()[:8], "little")
        rows = np.random.default_rng(seed).normal(size=(self.spec.horizon, self.spec.action_dim))
        if self.broken:
            rows[3, 3] = np.nan
        reset = ResetReason.FIRST_CALL if step == 0 else ResetReason.PROMPT_CHANGED if changed else None
        return ActionChunk(
            rows, self.spec.dt_s, None, session.session_id, step, reset, {"total": 0.001, "text": 0.0005}
        )

    def reset(self, session: Memory) -> None:
        session.step = 0

    def close(self, session: Memory) -> None:
        if not session.closed:
            session.closed = True
            self.closed += 1
            del self.sessions[id(session)]

    def render_video(self, chunk: ActionChunk) -> None:
        return None


class Served:
    """A running server with its policy."""

    def __init__(
        self, policy: Any = None, limits: OwnerLimits | None = None, factory: Any = None, **config: Any
    ) -> None:
        settings = ServerConfig.from_dict({"port": 0} | config)
        self.policy = policy or RememberingPolicy()
        self.lines: list[str] = []
        self.owner = PolicyThread(factory or (lambda progress: self.policy), log=self.log, limits=limits, warm_up=False)
        self.owner.start()
        if factory is None:
            wait_for(lambda: self.owner.status.phase is Phase.READY)
        self.server = OpenPIServer(settings, self.owner, log=self.log)

    def log(self, level: str, line: str) -> None:
        self.lines.append(f"{level}: {line}")

    def url(self, path: str = "/") -> str:
        return f"ws://127.0.0.1:{self.server.port}{path}"

    def http(self, path: str, **headers: str) -> tuple[int, str, Any]:
        import urllib.error
        import urllib.request

        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(f"http://127.0.0.1:{self.server.port}{path}", headers=headers)
        try:
            with opener.open(request, timeout=5) as reply:
                return reply.status, reply.read().decode(), reply.headers
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(), error.headers


@contextmanager
def served(policy: Any = None, limits: OwnerLimits | None = None, **config: Any) -> Iterator[Served]:
    one = Served(policy, limits, **config)
    try:
        one.server.start()
        yield one
    finally:
        if isinstance(one.policy, RememberingPolicy):
            one.policy.gate.set()
        assert one.server.stop(5), "the server's thread ends"
        assert one.owner.stop(5), "the policy's thread ends"


class Client:
    """A client of the plain protocol, with either codec. ``ask`` raises what a real client would stumble over."""

    def __init__(self, one: Served, path: str = "/", codec: Codec = "openpi", **options: Any) -> None:
        options = {"compression": None, "max_size": None, "proxy": None, "open_timeout": 5} | options
        self.socket: ClientConnection = connect(one.url(path), **options).__enter__()
        self.codec: Codec = codec
        first = self.socket.recv(timeout=5)
        assert isinstance(first, bytes)
        self.metadata = unpack(first)

    def send(self, message: Any) -> None:
        self.socket.send(message if isinstance(message, bytes | str) else pack(message, self.codec))

    def receive(self, timeout_s: float = 5.0) -> Any:
        frame = self.socket.recv(timeout=timeout_s)
        return frame if isinstance(frame, str) else unpack(frame)

    def ask(self, message: Any) -> Any:
        self.send(message)
        return self.receive()

    def drop(self) -> None:
        """As if the host had died: no close frame."""
        self.socket.socket.shutdown(2)
        self.socket.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def request(
    number: int = 0, session: str | None = "s", *, frames: int = 0, prompt: Any = "pick up the cup", **changes: Any
) -> dict[str, Any]:
    """A DreamZero request; every ``number`` looks different. A change to None removes the key."""
    rng = np.random.default_rng(number)
    shape = (frames, HEIGHT, WIDTH, 3) if frames else (HEIGHT, WIDTH, 3)
    out: dict[str, Any] = {key: rng.integers(0, 256, shape, dtype=np.uint8) for key in KEYS}
    out |= {
        "observation/joint_position": rng.normal(size=7).astype(np.float32),
        "observation/cartesian_position": np.zeros(6, np.float32),
        "observation/gripper_position": np.full(1, 0.25, np.float32),
        "prompt": prompt,
        "session_id": session,
        "endpoint": "infer",
    }
    out |= {(k if k in out or not k.startswith("o_") else f"observation/{k[2:]}"): v for k, v in changes.items()}
    return {k: v for k, v in out.items() if v is not None}


def alone(*requests: dict[str, Any]) -> list[Any]:
    """What these requests are answered with when nobody else is there."""
    with served() as one, Client(one) as client:
        return [client.ask(r) for r in requests]
