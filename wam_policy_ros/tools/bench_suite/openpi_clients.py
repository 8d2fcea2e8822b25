"""Many clients at once for ``wam bench openpi``: DreamZero's request, each with its own pictures and its own number."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from websockets.asyncio.client import ClientConnection, connect

from wam_policy_ros.contract.fakes import example_observation, spec_of
from wam_policy_ros.serving.client_wire import infer_request
from wam_policy_ros.serving.codec import pack, unpack

MARKER = np.linspace(0.1234567, 0.7654321, 7)  # found again in the packed request


@dataclass
class Load:
    """What the clients saw.

    Attributes:
        latencies_s: one per answered request, in the order of the answers.
        late_s: how late each was sent: when this is large the load generator itself was the bottleneck.
        mixed: answers that were somebody else's, or of another step.
        errors: texts of error frames and lost connections.
    """

    latencies_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    mixed: int = 0
    errors: list[str] = field(default_factory=list)


class Asker:
    """One client with one session."""

    def __init__(self, number: int, tag: str) -> None:
        spec = spec_of("oxe_droid", weights="")
        observation = example_observation(spec, seed=number)
        state = {**observation.state, "joint_position": MARKER}
        request = infer_request(observation.frames, observation, spec, f"{tag}-{number}")
        request["observation/joint_position"] = state["joint_position"]
        message = bytearray(pack(request))
        self._at = message.find(MARKER.tobytes())
        self.number, self.message, self.asked = number, message, 0

    def next_request(self) -> bytes:
        """The request with the client's number and the request's in its joints; packing is not what is measured."""
        joints = MARKER.copy()
        joints[:2] = self.number / 1000, self.asked / 1e6
        self.message[self._at : self._at + joints.nbytes] = joints.tobytes()
        return bytes(self.message)

    def is_mine(self, rows: npt.NDArray[np.float32]) -> bool:
        wanted = np.array([self.number / 1000, self.asked / 1e6, self.asked], np.float32)
        return rows.shape == (24, 8) and bool((rows[:, :3] == wanted).all())


async def _converse(
    asker: Asker, socket: ClientConnection, load: Load, start_s: float, end_s: float, period_s: float | None
) -> None:
    due_s = start_s
    while (now := time.perf_counter()) < end_s:
        if period_s is not None:
            if due_s >= end_s:
                break
            await asyncio.sleep(max(0.0, due_s - now))
        message = asker.next_request()
        begin = time.perf_counter()
        await socket.send(message)
        reply = await socket.recv()
        done = time.perf_counter()
        if isinstance(reply, str):
            load.errors.append(reply[:200])
            return
        load.latencies_s.append(done - begin)
        if period_s is not None:
            load.late_s.append(begin - due_s)
            due_s += period_s
        rows: Any = unpack(reply)
        load.mixed += not (isinstance(rows, np.ndarray) and asker.is_mine(rows))
        asker.asked += 1


async def run_load(uri: str, *, clients: int, seconds: float, rate_hz: float | None, tag: str) -> Load:
    """Ask for ``seconds``.

    Args:
        clients: connections, one session each.
        rate_hz: requests per second of each client, the clients evenly staggered; None: each as fast as it is answered.
        tag: of the session ids, new for each run against one server.
    """
    load = Load()
    askers = [Asker(i, tag) for i in range(clients)]
    sockets: list[ClientConnection] = []
    try:
        for _ in askers:
            socket = await connect(uri, compression=None, max_size=None, proxy=None, ping_interval=None)
            await socket.recv()
            sockets.append(socket)
        begin = time.perf_counter() + 0.05
        period_s = None if rate_hz is None else 1 / rate_hz
        tasks = [
            _converse(a, s, load, begin + (i / clients) * (period_s or 0.0), begin + seconds, period_s)
            for i, (a, s) in enumerate(zip(askers, sockets, strict=True))
        ]
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        load.errors += [f"{type(e).__name__}: {e}" for e in ended if isinstance(e, BaseException)]
    finally:
        await asyncio.gather(*(s.close() for s in sockets), return_exceptions=True)
    return load
