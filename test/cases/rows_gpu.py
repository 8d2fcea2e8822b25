"""Rows of area GPU that have no file of their own: a part for each, driven by what its case's JSON says.

What a GPU or its libraries do wrong cannot be had here; what the product does about it can.
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from wam_policy_ros.contract.errors import ConfigError, WamError

from .case import Case, Outcome

ACCEPTED, REFUSED = frozenset({"accept"}), frozenset({"refuse_start"})


def run(case: Case, data: dict[str, Any]) -> Outcome:
    return _PARTS[data["row"]](case, data)


def _sizes(case: Case, data: dict[str, Any]) -> Outcome:
    """Whatever size clients send, the network convolves pictures of one size."""
    from test.engine.faulty_path import make_faulty
    from test.serving.harness import KEYS, Client, request, served
    from wam_policy_ros.engine.config import EngineConfig

    policy, path = make_faulty(EngineConfig(evaluations=5, step="fused"))
    sizes: set[tuple[int, ...]] = set()
    for name in ("encode_clip", "encode_first"):
        inner = getattr(path.inner, name)
        setattr(path, name, lambda x, inner=inner: (sizes.add(tuple(x.shape[-2:])), inner(x))[1])
    with served(policy, errors="keep_open", resize="pad") as one, Client(one) as client:
        for i, (height, width) in enumerate(data["sizes_hw"]):
            picture = np.full((height, width, 3), 40 * i, np.uint8)
            answer = client.ask(request(i, "one") | dict.fromkeys(KEYS, picture))
            assert isinstance(answer, np.ndarray), answer
    return Outcome(ACCEPTED, f"{sorted(sizes)}", {"sizes_convolved": len(sizes)})


def _timing(case: Case, data: dict[str, Any]) -> Outcome:
    """Whether cuDNN (MIOpen) is let time its algorithms in a call, and what is left of the process's own switch."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from test.engine.tiny_policy import look, make_policy
    from wam_policy_ros.engine.config import EngineConfig

    timed: list[bool] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "conv" in str(function):
                timed.append(torch.backends.cudnn.benchmark)
            return function(*args, **(kwargs or {}))

    policy = make_policy(EngineConfig(evaluations=5, step="fused", deterministic=True))
    before = torch.backends.cudnn.benchmark
    with Watch():
        policy.infer(policy.open(), look(policy.spec, 0))
    facts = {"timed_in_a_call": any(timed), "process_switch_kept": torch.backends.cudnn.benchmark == before}
    return Outcome(ACCEPTED, f"{len(timed)} convolutions", facts)


def _told(case: Case, data: dict[str, Any]) -> Outcome:
    """What a start says of this environment on a such a machine. A folder named ``read-only`` cannot be written."""
    import torch

    from wam_policy_ros.engine.config import EngineConfig
    from wam_policy_ros.engine.preflight import Platform, refuse_impossible, warnings_of
    from wam_policy_ros.model.config import DiTConfig

    with tempfile.TemporaryDirectory() as folder:
        taken = Path(folder) / "file"
        taken.write_text("")
        places = {"read-only": str(taken / "below"), "own": str(Path(folder) / "own")}
        environment = {k: places.get(v, v) for k, v in data["environment"].items()}
        backend, architecture = data["machine"]
        architecture = tuple(architecture) if isinstance(architecture, list) else architecture
        machine = Platform(backend, architecture, environment, Path(places.get(data["home"], data["home"])))
        config = EngineConfig(step="fused", attention="torch")
        try:
            refuse_impossible(config, machine, DiTConfig(), torch.bfloat16)
        except ConfigError as error:
            return Outcome(REFUSED, str(error))
        lines = warnings_of(config, machine)
    return Outcome(ACCEPTED, "\n".join(lines), {"warnings": len(lines)})


def _products(case: Case, data: dict[str, Any]) -> Outcome:
    """A machine on which 8-bit products take so long, compared with native ones."""
    import torch

    from wam_policy_ros.engine import preflight
    from wam_policy_ros.engine.fp8 import E4M3FN
    from wam_policy_ros.engine.quantize import Fp8Linear

    layer = Fp8Linear.from_weight(torch.randn(32, 48), None, E4M3FN)
    said = []
    for eight_ms, native_ms in data["measured_ms"]:
        with mock.patch.object(preflight, "median_ms", mock.Mock(side_effect=[eight_ms, native_ms])):
            said.append(preflight.slow_products(layer, 8))
    return Outcome(ACCEPTED, "\n".join(line for lines in said for line in lines), {"said": [len(x) for x in said]})


def _latency(case: Case, data: dict[str, Any]) -> Outcome:
    """A policy whose warm-up took so long, on a robot that is to move without pauses."""
    from . import robot
    from .stage import Stage

    messages = []
    for seconds in data["warm_up_s"]:
        stage = Stage(case, control__mode=data["mode"])
        pace = stage.run.control.pace
        pace.mean_s = None
        try:
            pace.activate(robot.SPEC, 0.05, (seconds, seconds))
        except WamError as error:
            messages.append(str(error))
    refused = len(messages) == len(data["warm_up_s"])
    return Outcome(REFUSED if refused else ACCEPTED, "\n".join(messages), {"refused": len(messages)})


def _threads(case: Case, data: dict[str, Any]) -> Outcome:
    """Requests, each from a thread and a connection of its own."""
    from test.serving.harness import Client, request, served

    with served() as one:
        during: list[int] = []

        def ask(number: int) -> None:
            with Client(one) as client:
                assert not isinstance(client.ask(request(0, f"s{number}")), str)
            during.append(sum(not t.name.startswith(("ask", "MainThread")) for t in threading.enumerate()))

        for number in range(data["requests"]):
            thread = threading.Thread(target=ask, args=(number,), name=f"ask {number}")
            thread.start()
            thread.join(20)
        workers = set(one.policy.threads)
    facts = {"answered": len(during), "threads_that_compute": len(workers)}
    # One that reads for the client whose request it is, in this process, is the client's own.
    grown = max(during) - min(during)
    checks = {"threads_grow_by_at_most": lambda e, c, o: None if grown <= e else f"{grown}"}
    return Outcome(ACCEPTED, f"{sorted(workers)}", facts, checks)


_PARTS = {
    "GPU-06": _sizes,
    "GPU-07": _timing,
    "GPU-08": _told,
    "GPU-09": _products,
    "GPU-10": _told,
    "GPU-11": _told,
    "GPU-12": _latency,
    "GPU-13": _threads,
}
