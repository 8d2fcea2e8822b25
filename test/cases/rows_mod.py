"""Rows of area MOD that have no file of their own: a part for each, driven by what its case's JSON says."""

from __future__ import annotations

import json
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from wam_policy_ros.contract.embodiment import get_embodiment
from wam_policy_ros.contract.errors import WamError
from wam_policy_ros.contract.interface import Observation
from wam_policy_ros.contract.normalization import Statistics
from wam_policy_ros.contract.transforms import decode_actions, encode_actions, encode_state

from .case import Case, Outcome

ACCEPTED, REFUSED = frozenset({"accept"}), frozenset({"refuse_start"})


def run(case: Case, data: dict[str, Any]) -> Outcome:
    return _PARTS[data["row"]](case, data)


def _metadata(embodiment: str, **numbers: float) -> dict[str, Any]:
    """Statistics of every field of a robot, with some numbers of all of them changed."""
    pytest.importorskip("torch", reason="needs torch (extra engine)")
    from wam_policy_ros.engine.build import synthetic_metadata

    metadata = synthetic_metadata(get_embodiment(embodiment))
    for group in ("state", "action"):
        for one in metadata[embodiment]["statistics"][group].values():
            one |= {name: [value] * len(one["q01"]) for name, value in numbers.items()}
    return metadata


def _no_key(case: Case, data: dict[str, Any]) -> Outcome:
    """Statistics of several robots, none of which is the one that was asked for."""
    metadata = {tag: {"statistics": {"state": {}, "action": {}}} for tag in data["in_file"]}
    messages = []
    for asked in data["asked"]:
        try:
            Statistics.from_metadata(metadata, asked)
        except WamError as error:
            messages.append(str(error))
        else:
            return Outcome(ACCEPTED, f"{asked!r} was taken for one of {data['in_file']}")
    return Outcome(REFUSED, "\n".join(messages))


def _slots(case: Case, data: dict[str, Any]) -> Outcome:
    """Every joint of a robot with fewer joints than the widest in its own column, and a gripper that reaches its end
    although the data's 99th percentile does not."""
    robot = get_embodiment(data["embodiment"])
    metadata = _metadata(data["embodiment"], q01=0.0, q99=data["gripper_q99"])
    statistics = Statistics.from_metadata(metadata, robot.tag)
    values = {f.name: np.full(f.dim, i + 1.0) + np.arange(f.dim) / 100 for i, f in enumerate(robot.state)}
    column, wrong = 0, []
    vector = encode_state(values, robot.state, statistics, data["width"])
    for f in robot.state:
        for i in range(f.dim):
            alone = {n: v * 0 for n, v in values.items()}
            base = encode_state(alone, robot.state, statistics, data["width"])
            alone[f.name] = np.eye(f.dim)[i] * data["gripper_q99"] / 2
            moved = np.flatnonzero(encode_state(alone, robot.state, statistics, data["width"]) != base)
            if moved.tolist() != [column]:
                wrong.append(f"{f.name}[{i}] moves columns {moved.tolist()}, expected {column}")
            column += 1
    zero = {n: v * 0 for n, v in values.items()}
    wanted = np.tile(np.concatenate([np.full(f.dim, data["gripper"]) for f in robot.action]), (3, 1))
    rows = encode_actions(wanted, robot.action, statistics, zero, data["width"])
    reached = decode_actions(np.asarray(rows, dtype=np.float64), robot.action, statistics, zero)
    facts = {"live_columns": column, "padding_is_zero": not vector[column:].any()}
    facts |= {"gripper_reaches": float(np.round(reached, 9).max())}
    return Outcome(ACCEPTED if not wrong else frozenset(), "; ".join(wrong), facts)


def _padding(case: Case, data: dict[str, Any]) -> Outcome:
    """Live columns by the table of fields: what the others hold does not matter, and padded statistics are refused."""
    robot, metadata = get_embodiment(data["embodiment"]), _metadata(data["embodiment"])
    statistics = Statistics.from_metadata(metadata, robot.tag)
    live = sum(f.dim for f in robot.action)
    rows = np.random.default_rng(0).normal(size=(4, data["width"]))
    state = {f.name: np.zeros(f.dim) for f in robot.state}
    filled = rows.copy()
    filled[:, live:] = data["padding"]
    same = np.array_equal(*(decode_actions(r, robot.action, statistics, state) for r in (rows, filled)))
    one = metadata[robot.tag]["statistics"]["action"][robot.action[0].name]
    one |= {name: [values[0]] * data["width"] for name, values in one.items()}
    try:
        Statistics.from_metadata(metadata, robot.tag)
        message = "statistics of another width were taken"
    except WamError as error:
        message = str(error)
    shape = decode_actions(rows, robot.action, statistics, state).shape
    facts = {"live": live, "shape": list(shape), "padding_does_not_matter": same}
    return Outcome(ACCEPTED, message, facts)


def _attention(case: Case, data: dict[str, Any]) -> Outcome:
    """A start and a step where these packages cannot be imported."""
    pytest.importorskip("torch", reason="needs torch (extra engine)")
    from test.engine.tiny_policy import look, make_policy
    from wam_policy_ros.engine.config import EngineConfig

    with mock.patch.dict(sys.modules, dict.fromkeys(data["absent"])):
        policy = make_policy(EngineConfig(evaluations=5, step="fused"))
        session = policy.open()
        chunk = policy.infer(session, look(policy.spec, 0))
    facts = {"first_step_works": bool(np.isfinite(chunk.actions).all())}
    return Outcome(ACCEPTED, f"attention: {policy.spec.details['attention']}", facts)


def _loading(case: Case, data: dict[str, Any]) -> Outcome:
    """How much of a checkpoint's stored tensors lives at a time while it is loaded, besides the network."""
    pytest.importorskip("torch", reason="needs torch (extra engine)")
    import torch

    from test.tiny_checkpoint import write_checkpoint
    from wam_policy_ros.engine.build import build_policy
    from wam_policy_ros.engine.config import EngineConfig
    from wam_policy_ros.model import checkpoint
    from wam_policy_ros.model.config import DreamZeroConfig
    from wam_policy_ros.model.dreamzero import DreamZero

    alive: list[tuple[weakref.ref[Any], int]] = []
    worst, largest, streamed = 0, 0, checkpoint.stream_tensors

    def watched(*args: Any) -> Any:
        nonlocal worst, largest
        for module, tensor in streamed(*args):
            nbytes = tensor.numel() * tensor.element_size()
            alive.append((weakref.ref(tensor), nbytes))
            largest = max(largest, nbytes)
            worst = max(worst, sum(n for ref, n in alive if ref() is not None))
            yield module, tensor

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(checkpoint, "stream_tensors", watched):
        path = write_checkpoint(Path(folder) / "checkpoint")
        config = EngineConfig(dtype="bfloat16", evaluations=5)
        policy = build_policy(embodiment="oxe_droid", checkpoint=str(path), device="cpu", config=config)
    final = sum(p.numel() * p.element_size() for p in policy.network.parameters())
    assert next(policy.network.parameters()).dtype is torch.bfloat16 and len(alive) > 100
    at_a_time = -(-worst // largest)
    published = [p.numel() for p in DreamZero.on_meta(DreamZeroConfig.dreamzero_14b()).parameters()]
    ratio = 1 + at_a_time * max(published) / sum(published)  # stored as the network is: bfloat16
    message = f"{worst} bytes of stored tensors at a time, the largest has {largest}; the network {final}"
    facts = {"stored_tensors_at_a_time": at_a_time}
    return Outcome(
        ACCEPTED, message, facts, {"peak_over_final_below": lambda e, c, o: None if ratio < e else f"{ratio}"}
    )


def _ranks(case: Case, data: dict[str, Any]) -> Outcome:
    """A policy on several processes, without a seed of anybody's, beside one on one."""
    torch = pytest.importorskip("torch", reason="needs torch (extra engine)")
    if not torch.distributed.is_available():
        pytest.skip("PyTorch was built without torch.distributed")
    from test.engine.several import run as steps
    from test.engine.several import several
    from test.engine.tiny_policy import make_policy, same
    from wam_policy_ros.engine.config import EngineConfig

    with several(EngineConfig(evaluations=5, gpus=data["gpus"])) as policy:
        found = steps(policy, (1,))
    alone = steps(make_policy(EngineConfig(evaluations=5)), (1,))
    return Outcome(ACCEPTED, "", {"one_noise_for_all": same(found[0], alone[0])})


def _doors(case: Case, data: dict[str, Any]) -> Outcome:
    """One observation in process, through a socket, and as ROS messages: what the policy is handed."""
    from types import SimpleNamespace

    from test.serving.harness import KEYS, Client, RememberingPolicy, request, served, small_spec
    from wam_policy_ros.contract.fakes import example_observation
    from wam_policy_ros.ros.messages import ns_to_stamp, rgb_to_image

    from . import robot
    from .stage import START_NS, Stage

    is_open, is_closed = robot.gripper(case.config)
    seen: dict[str, Observation] = {}
    chunks: dict[str, Any] = {}
    policies = {name: RememberingPolicy(small_spec(90, 160)) for name in ("in process", "socket", "ros")}
    for policy in policies.values():
        policy.record = True
    spec = policies["ros"].spec
    base = example_observation(spec, seed=data["seed"], prompt=data["prompt"])
    state = {"joint_position": np.array(data["arm_rad"]), "gripper_position": np.array([data["gripper"]])}
    given = Observation(frames=base.frames, state=state, prompt=data["prompt"])
    policy = policies["in process"]
    chunks["in process"] = policy.infer(policy.open(), given).actions.astype(np.float32)
    pictures = dict(zip(KEYS, (base.frames[c.name][-1] for c in spec.cameras), strict=True))
    asked = request(0, "one", prompt=data["prompt"], o_joint_position=state["joint_position"]) | pictures
    asked["observation/gripper_position"] = state["gripper_position"]
    with served(policies["socket"]) as one, Client(one) as client:
        chunks["socket"] = client.ask(asked)
    finger = is_open + data["gripper"] * (is_closed - is_open)
    stage = Stage(case, policies["ros"], instruction=data["prompt"], latency_s=0.1)
    for k in range(20):
        stage.run.advance(k / 15)
        stamp_ns = stage.run.clock().ros_ns
        assert stamp_ns >= START_NS
        header = SimpleNamespace(stamp=ns_to_stamp(stamp_ns))
        message = SimpleNamespace(header=header, name=robot.names(case.config), position=[*data["arm_rad"], finger])
        stage.run.message(case.config["joint_states_topic"], message)
        for name, camera in robot.CAMERAS.items():
            picture = base.frames[camera][-1]
            stage.run.message(robot.topic(case.config, name), rgb_to_image(picture, stamp_ns=stamp_ns))
    for name, policy in policies.items():
        assert policy.seen, f"{name}: no call; {stage.message}"
        seen[name] = policy.seen[0]
    first = seen["in process"]

    def equal(other: Observation) -> bool:
        frames = all(np.array_equal(other.frames[c.name][-1:], first.frames[c.name][-1:]) for c in spec.cameras)
        states = all(np.array_equal(other.state[f.name], first.state[f.name]) for f in spec.state)
        return frames and states and other.prompt == first.prompt

    unequal = [name for name, observation in seen.items() if not equal(observation)]
    facts = {"inputs_bit_equal": not unequal, "actions_equal": np.array_equal(chunks["socket"], chunks["in process"])}
    return Outcome(ACCEPTED, f"not equal: {unequal}; {json.dumps({n: str(o.state) for n, o in seen.items()})}", facts)


_PARTS = {
    "MOD-06": _no_key,
    "MOD-07": _slots,
    "MOD-08": _padding,
    "MOD-09": _attention,
    "MOD-10": _loading,
    "MOD-11": _ranks,
    "MOD-12": _doors,
}
