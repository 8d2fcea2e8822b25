"""Servers that ``wam bench openpi`` loads, each in a process of its own: ours, and a plain one beside it.

The plain server is what a straightforward reading of the protocol gives: one event loop that unpacks, infers and packs
inline, with numpy views on the message, no checks and no sessions but a dictionary. It is there to be compared with.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import threading
import time
from collections import Counter
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
from websockets.asyncio.server import ServerConnection, serve

from wam_policy_ros.contract.fakes import ScriptedPolicy
from wam_policy_ros.contract.interface import Observation
from wam_policy_ros.contract.policy_thread import OwnerLimits, PolicyThread
from wam_policy_ros.serving.codec import pack
from wam_policy_ros.serving.config import ServerConfig
from wam_policy_ros.serving.dialects import get_dialect, metadata
from wam_policy_ros.serving.server import OpenPIServer
from wam_policy_ros.tools.serve import quiet_process

READY = "listening on port"


def answer(joints: npt.NDArray[np.float64], step: int) -> npt.NDArray[np.float64]:
    """Rows ``[24, 8]`` that say whose request they answer: its joints, and how many the session had before."""
    row = np.zeros(8)
    row[:2], row[2] = joints[:2], step
    return np.tile(row, (24, 1))


def echo_policy(policy_s: float) -> ScriptedPolicy:
    """Takes ``policy_s``, in which, as with a GPU, this process has the processor for other things."""

    def rows(observation: Observation, step: int) -> npt.NDArray[np.float64]:
        if policy_s:
            time.sleep(policy_s)
        return answer(observation.state["joint_position"], step)

    return ScriptedPolicy(rows, weights="answers with its question, no network")


def _say(port: int) -> None:
    print(f"{READY} {port}", flush=True)


def run_ours(policy_s: float, connections: int) -> None:
    def log(level: str, line: str) -> None:
        if level in ("warning", "error"):
            print(f"{level}: {line}", file=sys.stderr, flush=True)

    owner = PolicyThread(
        lambda progress: echo_policy(policy_s), log=log, limits=OwnerLimits(max_queued=4 * connections)
    )
    limits = {"max_connections": connections + 8, "max_sessions": connections + 8}
    server = OpenPIServer(ServerConfig.from_dict({"port": 0, "dialect": "dreamzero", **limits}), owner, log=log)
    end = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: end.set())
    owner.start()
    server.start()
    quiet_process()  # as wam serve does
    _say(server.port)
    end.wait()
    server.stop()
    owner.stop(2.0)


def run_plain(policy_s: float) -> None:
    policy = echo_policy(policy_s)
    greeting = pack(metadata(get_dialect("dreamzero"), policy.spec, {}))
    steps: Counter[str] = Counter()

    def arrays(item: dict[Any, Any]) -> Any:
        if b"__ndarray__" in item:
            return np.ndarray(buffer=item[b"data"], dtype=np.dtype(item[b"dtype"]), shape=item[b"shape"])
        return item

    async def handle(socket: ServerConnection) -> None:
        await socket.send(greeting)
        async for message in socket:
            request = msgpack.unpackb(message, object_hook=arrays)
            session = request["session_id"]
            if policy_s:
                time.sleep(policy_s)
            rows = answer(request["observation/joint_position"], steps[session]).astype(np.float32)
            steps[session] += 1
            await socket.send(pack(rows))

    async def main() -> None:
        async with serve(handle, "127.0.0.1", 0, compression=None, max_size=None) as server:
            end = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end.set)
            _say(next(iter(server.sockets)).getsockname()[1])
            await end.wait()

    asyncio.run(main())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["ours", "plain"])
    parser.add_argument("--policy-s", type=float, default=0.0)
    parser.add_argument("--connections", type=int, default=64)
    args = parser.parse_args()
    if args.kind == "ours":
        run_ours(args.policy_s, args.connections)
    else:
        run_plain(args.policy_s)


if __name__ == "__main__":
    main()
