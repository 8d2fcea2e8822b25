"""The engine's fingerprint changes with each ingredient, travels with every chunk, and is complete at the first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from test.engine.tiny_policy import WordTokenizer, look, make_policy, shared_network
from test.tiny_checkpoint import write_checkpoint
from wam_policy_ros.contract.embodiment import get_embodiment
from wam_policy_ros.contract.normalization import Statistics
from wam_policy_ros.engine import build as build_module
from wam_policy_ros.engine import fingerprint as module
from wam_policy_ros.engine.build import build_policy, synthetic_metadata
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.fingerprint import device, fingerprint_of
from wam_policy_ros.engine.policy import with_config
from wam_policy_ros.model.fingerprint import full_hash
from wam_policy_ros.model.tokenizer import ByteTokenizer

ROBOT = get_embodiment("oxe_droid")
STATISTICS = Statistics.from_metadata(synthetic_metadata(ROBOT), ROBOT.tag)


def make(network=None, config=EngineConfig(), robot=ROBOT, statistics=STATISTICS, tokenizer=None, weights="sha256:1"):
    return fingerprint_of(network or shared_network(), config, robot, statistics, tokenizer or WordTokenizer(), weights)


def other_statistics():
    raw = synthetic_metadata(ROBOT)
    raw[ROBOT.tag]["statistics"]["action"]["joint_position"]["q99"][3] += 1e-12
    return Statistics.from_metadata(raw, ROBOT.tag)


@pytest.mark.parametrize(
    ("changes", "section"),
    [
        ({"weights": "sha256:2"}, "weights.hash"),
        ({"config": EngineConfig(evaluations=5)}, "config.evaluations"),
        ({"config": EngineConfig(seed=7)}, "config.seed"),
        ({"config": EngineConfig(deterministic=True)}, "config.deterministic"),
        ({"config": EngineConfig(step="fused")}, "config.step"),
        ({"robot": replace(ROBOT, crop_scale=0.94)}, "inputs.robot"),
        ({"robot": replace(ROBOT, prompt_template="do {p}")}, "inputs.robot"),
        ({"statistics": other_statistics()}, "inputs.statistics"),
        ({"tokenizer": ByteTokenizer(256)}, "inputs.tokenizer"),
    ],
    ids=str,
)
def test_it_changes_with_each_ingredient(changes, section):
    one, other = make(), make(**changes)
    assert one.id != other.id
    assert [line.partition(":")[0] for line in one.differences(other)] == [section]


def test_it_changes_with_the_dtype_and_with_the_shape_of_the_network():
    from test.tiny_checkpoint import tiny_network

    lines = make().differences(make(tiny_network(text_len=256, ffn_dim=64)))
    assert [line.partition(":")[0] for line in lines] == ["inputs.network"]
    lines = make().differences(make(tiny_network(text_len=256).to(torch.bfloat16)))
    assert lines == ["config.dtype: float32, bfloat16"]


@pytest.mark.parametrize(
    ("name", "value", "section"),
    [
        ("code", lambda: {"version": "0.1.0", "source": "0" * 32, "commit": None}, "code."),
        ("libraries", lambda: {**module.libraries(), "torch": "9.9"}, "libraries.torch"),
        ("device", lambda where: {"type": "cuda", "name": "NVIDIA H200"}, "device."),
    ],
)
def test_it_changes_with_code_device_and_libraries(monkeypatch, name, value, section):
    one = make()
    found = value() if name != "device" else value(None)
    monkeypatch.setattr(module, name, lambda *args: found)
    lines = one.differences(make())
    assert lines and all(line.startswith(section) for line in lines)


def test_threads_of_a_cpu_count():
    before = torch.get_num_threads()
    first = device(torch.device("cpu"))
    try:
        torch.set_num_threads(before + 1)
        assert device(torch.device("cpu"))["threads"] == first["threads"] + 1
    finally:
        torch.set_num_threads(before)
    assert set(first) == {"type", "name", "architecture", "instructions", "threads"}


def test_it_travels_with_every_chunk():
    policy = make_policy()
    chunk = policy.infer(policy.open(), look(policy.spec, 0))
    assert policy.spec.fingerprint is not None
    assert chunk.fingerprint == policy.spec.fingerprint.id and chunk.fingerprint.startswith("wam1-")
    other = with_config(policy, seed=3)
    assert other.spec.fingerprint is not None and other.spec.fingerprint.id != chunk.fingerprint


def test_a_checkpoint_in_the_deterministic_tier_is_hashed_whole(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "checkpoint")
    shards = sorted(folder.glob("*.safetensors"))

    def build(**options):
        return build_policy(embodiment="oxe_droid", checkpoint=str(folder), device="cpu", **options)

    quick = build()
    assert quick.spec.details["weights_hash"].startswith("sampled-sha256:")
    policy = build(config=EngineConfig(deterministic=True))
    assert policy.spec.details["weights_hash"] == full_hash(shards)
    assert with_config(policy, seed=3).spec.details["weights_hash"] == full_hash(shards)
    # From now on it is known, and anybody may say it.
    monkeypatch.setattr(build_module, "FullHash", None)
    assert build().spec.details["weights_hash"] == full_hash(shards)
    monkeypatch.undo()
    raw = bytearray(shards[0].read_bytes())
    raw[-1] ^= 1
    shards[0].write_bytes(raw)
    changed = build(hash_all=True)
    assert changed.spec.details["weights_hash"] == full_hash(shards) != policy.spec.details["weights_hash"]
    assert changed.spec.fingerprint.id != policy.spec.fingerprint.id


def test_random_weights_have_a_name_of_their_own():
    a, b = (build_policy(embodiment="oxe_droid", random_weights="tiny", device="cpu") for _ in range(2))
    assert a.spec.details["weights_hash"].startswith("sha256:") and a.spec.fingerprint.id == b.spec.fingerprint.id
    assert np.array_equal(*(next(iter(p.network.state_dict().values())).numpy() for p in (a, b)))
