"""A process that serves sessions in the deterministic tier and prints what each of them got.

    python -m test.engine.determinism_process '[["a", 0], ["b", 0], ["a", 1], ...]' [busy]

Once with the plain step and once with the fused one. Entries are session and call; a session's observations and seed
follow from its name. ``busy``: other threads use PyTorch meanwhile, and memory was used and given back before.
``WAM_TEST_DEVICE=cuda`` runs both on a GPU, in bf16 and with graphs.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import zlib
from dataclasses import replace
from typing import Any

import torch

from test.engine.tiny_policy import look, make_network, make_policy
from wam_policy_ros.engine.config import EngineConfig

DEVICE = torch.device(os.environ.get("WAM_TEST_DEVICE", "cpu"))
FRAMES = (1, 4, 4, 4, 4, 4)


def serve(step: Any, order: list[tuple[str, int]]) -> dict[str, list[str]]:
    """Session -> a digest per call, of actions and predicted video."""
    network, gpu = make_network(), DEVICE.type == "cuda"
    if gpu:
        network = network.to(DEVICE, torch.bfloat16)
    config = EngineConfig(evaluations=5, step=step, graphs=gpu and step == "fused", deterministic=True)
    policy = make_policy(config, network=network)
    policy.prepare()
    sessions: dict[str, Any] = {}
    out: dict[str, list[str]] = {}
    for name, call in order:
        number = zlib.crc32(name.encode())
        if name not in sessions:
            sessions[name] = policy.open(name, seed=None if name == "a" else number)
        seen = look(policy.spec, number + call, frames=FRAMES[call])
        chunk = policy.infer(sessions[name], replace(seen, want_video=call % 2 == 0))
        digest = hashlib.sha256(chunk.actions.tobytes())
        if chunk.video is not None:
            digest.update(chunk.video.latents.cpu().float().numpy().tobytes())
        out.setdefault(name, []).append(digest.hexdigest())
    return out


def main() -> None:
    order, busy = [(name, call) for name, call in json.loads(sys.argv[1])], len(sys.argv) > 2
    stop = threading.Event()

    def disturb() -> None:
        while not stop.wait(0.001):
            torch.randn(97, 301, device=DEVICE) @ torch.randn(301, 53, device=DEVICE)

    threads = [threading.Thread(target=disturb) for _ in range(2 if busy else 0)]
    if busy:
        torch.manual_seed(99)
        [torch.empty(n, device=DEVICE).normal_() for n in range(1, 20000, 77)]
    for thread in threads:
        thread.start()
    try:
        found = {step: serve(step, order) for step in ("plain", "fused")}
    finally:
        stop.set()
    for thread in threads:
        thread.join()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
