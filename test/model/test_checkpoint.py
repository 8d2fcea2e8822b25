"""Strict loading: a complete folder gives the same tensors, every fault gives one error that names everything."""

from __future__ import annotations

import json
import shutil
import time
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from test.tiny_checkpoint import config_json, edit_json, tiny_network, write_checkpoint
from wam_policy_ros.model import checkpoint as room
from wam_policy_ros.model.checkpoint import INDEX, check_weights, load_weights, read_folder, save_folder
from wam_policy_ros.model.config import DreamZeroConfig
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.model.errors import CheckpointFileError, ModelConfigError
from wam_policy_ros.model.key_maps import checkpoint_name, module_name

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def network():
    return tiny_network()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory, network):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "DreamZero-Tiny", network)


@pytest.fixture
def folder(tmp_path, pristine):
    """A copy to break."""
    return Path(shutil.copytree(pristine, tmp_path / "ckpt"))


def _load(folder, dtype=torch.float32, progress=lambda text, fraction: None):
    return load_weights(read_folder(folder), device=CPU, dtype=dtype, progress=progress)


def _shard(i, n=3):
    return f"model-{i:05d}-of-{n:05d}.safetensors"


def _edit(path, change):
    """Apply ``change(tensors)`` to a safetensors file in place."""
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    save_file(tensors, path)


def _refused(folder) -> CheckpointFileError:
    """The error of loading, after making sure that no weight was read before it."""
    read = []
    original = room.stream_tensors
    room.stream_tensors = lambda *args: (read.append(t) or t for t in original(*args))
    try:
        with pytest.raises(CheckpointFileError) as error:
            _load(folder)
    finally:
        room.stream_tensors = original
    assert not read
    return error.value


# -- complete folders -------------------------------------------------------------------------------------------


def test_round_trip_in_three_shards(pristine, network):
    assert sorted(p.name for p in pristine.glob("*.safetensors")) == [_shard(i) for i in (1, 2, 3)]
    seen = []
    loaded = _load(pristine, progress=lambda text, fraction: seen.append(fraction))
    expected = network.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(v, expected[k]) for k, v in loaded.state_dict().items())
    assert not any(p.requires_grad or p.is_meta for p in loaded.parameters()) and not loaded.training
    assert seen == sorted(seen) and seen[-1] == 1.0 and 0 < seen[0] < 0.5


def test_one_file_without_an_index(tmp_path, network):
    save_folder(network, config_json(), tmp_path, shards=1)
    assert (tmp_path / "model.safetensors").is_file() and not (tmp_path / INDEX).exists()
    assert torch.equal(_load(tmp_path).model.head.modulation, network.model.head.modulation)


def test_headers_metadata_and_conf(pristine):
    folder = read_folder(pristine)
    assert folder.problems == () and folder.skipped == () and folder.lora == 0
    assert "oxe_droid" in folder.metadata and "ConcatTransform" in folder.conf
    assert folder.config == DreamZeroConfig.from_config_json(config_json())
    assert check_weights(folder) == []


def test_float32_on_disk_becomes_bf16(pristine, network):
    assert {e.dtype for e in read_folder(pristine).tensors.values()} == {"F32"}
    loaded = _load(pristine, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    name = "blocks.1.ffn.0.weight"
    assert torch.equal(loaded.model.state_dict()[name], network.model.state_dict()[name].bfloat16())


def test_mixed_stored_dtypes_are_cast(folder):
    def mix(tensors):
        for i, name in enumerate(sorted(tensors)):
            tensors[name] = tensors[name].to((torch.bfloat16, torch.float16, torch.float64)[i % 3])

    _edit(folder / _shard(1), mix)
    assert {p.dtype for p in _load(folder).parameters()} == {torch.float32}


def test_old_lora_saves_carry_base_layer_in_their_names(folder, network):
    name = "action_head.model.blocks.1.self_attn.q.weight"
    old = "action_head.model.blocks.1.self_attn.q.base_layer.weight"
    shard = json.loads((folder / INDEX).read_text())["weight_map"][name]
    _edit(folder / shard, lambda t: t.__setitem__(old, t.pop(name)))
    edit_json(folder / INDEX, lambda i: i["weight_map"].__setitem__(old, i["weight_map"].pop(name)))
    assert torch.equal(_load(folder).state_dict()[module_name(name)], network.state_dict()[module_name(name)])


def test_backbone_tensors_are_left_out(folder):
    _edit(folder / _shard(3), lambda t: t.__setitem__("backbone.dummy.weight", torch.zeros(3)))
    edit_json(folder / INDEX, lambda i: i["weight_map"].__setitem__("backbone.dummy.weight", _shard(3)))
    assert read_folder(folder).skipped == ("backbone.dummy.weight",)
    _load(folder)


def test_weights_are_streamed(pristine, monkeypatch):
    """Loading needs the network and at most two tensors as stored, never a shard, never the whole (MOD-10)."""
    stored, worst = [], 0
    original = room.stream_tensors

    def watched(folder, device, names):
        nonlocal worst
        for module, tensor in original(folder, device, names):
            stored.append(weakref.ref(tensor))
            worst = max(worst, sum(ref() is not None for ref in stored))
            yield module, tensor

    monkeypatch.setattr(room, "stream_tensors", watched)
    _load(pristine, dtype=torch.bfloat16)  # another dtype: a stored tensor and a loaded one are two objects
    assert len(stored) > 100 and worst <= 2


def test_loaded_tensors_do_not_keep_the_files_open(folder, network):
    loaded = _load(folder)
    shutil.rmtree(folder)
    expected = network.state_dict()
    assert all(torch.equal(v, expected[k]) for k, v in loaded.state_dict().items())
    storages = {p.untyped_storage().nbytes() for p in loaded.parameters()}
    assert max(storages) <= max(p.numel() * 4 for p in loaded.parameters())  # none is a view into a whole shard


# -- faults -----------------------------------------------------------------------------------------------------


def test_missing_shard_is_one_line(folder):
    (folder / _shard(2)).unlink()
    error = _refused(folder)
    assert len(error.problems) == 1 and _shard(2) in error.problems[0]
    count = list(json.loads((folder / INDEX).read_text())["weight_map"].values()).count(_shard(2))
    assert f"{count} tensors" in error.problems[0]
    assert "nothing was loaded" in str(error)


def test_every_missing_shard_is_named(folder):
    for i in (1, 3):
        (folder / _shard(i)).unlink()
    error = _refused(folder)
    assert [_shard(1) in p for p in error.problems] == [True, False] and _shard(3) in error.problems[1]


def test_no_shard_at_all(folder):
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert len(_refused(folder).problems) == 3
    (folder / INDEX).unlink()
    (problem,) = _refused(folder).problems
    assert "no weights" in problem and "model.safetensors" in problem


@pytest.mark.parametrize("keep", [0, 4, 100, -10])
def test_truncated_shard(folder, keep):
    path = folder / _shard(2)
    path.write_bytes(path.read_bytes()[:keep])
    (problem,) = _refused(folder).problems
    assert problem.startswith(f"unreadable shard: {_shard(2)}")


def test_renamed_tensor_is_missing_and_unexpected(folder):
    _edit(folder / _shard(1), lambda t: t.__setitem__("action_head.model.typo", t.pop(sorted(t)[0])))
    shard = load_file(folder / _shard(1))
    lost = next(
        n
        for n, s in json.loads((folder / INDEX).read_text())["weight_map"].items()
        if s == _shard(1) and n not in shard
    )
    edit_json(
        folder / INDEX, lambda i: i["weight_map"].__setitem__("action_head.model.typo", i["weight_map"].pop(lost))
    )
    problems = _refused(folder).problems
    assert len(problems) == 2
    assert problems[0].startswith(f"missing tensor: {lost} [")
    assert problems[1].startswith("unexpected tensor: action_head.model.typo [") and _shard(1) in problems[1]


def test_tensor_outside_the_action_head_is_unexpected(folder):
    _edit(folder / _shard(1), lambda t: t.__setitem__("surprise.weight", torch.zeros(2)))
    edit_json(folder / INDEX, lambda i: i["weight_map"].__setitem__("surprise.weight", _shard(1)))
    (problem,) = _refused(folder).problems
    assert problem.startswith("unexpected tensor: surprise.weight [2]")


def test_wrong_shape_and_wrong_dtype_are_reported_together(folder):
    names = sorted(load_file(folder / _shard(1)))

    def spoil(tensors):
        tensors[names[0]] = tensors[names[0]].flatten()[:1].clone()
        tensors[names[1]] = tensors[names[1]].to(torch.int32)

    shape = list(load_file(folder / _shard(1))[names[0]].shape)
    _edit(folder / _shard(1), spoil)
    problems = _refused(folder).problems
    assert set(problems) == {
        f"wrong shape: {names[0]} is [1], expected {shape}",
        f"wrong dtype: {names[1]} is I32, expected one of ['BF16', 'F16', 'F32', 'F64']",
    }


def test_quantised_weights_are_not_taken_for_numbers(folder):
    name = sorted(load_file(folder / _shard(1)))[0]
    _edit(folder / _shard(1), lambda t: t.__setitem__(name, t[name].to(torch.float8_e4m3fn)))
    (problem,) = _refused(folder).problems
    assert problem.startswith(f"wrong dtype: {name} is F8_E4M3")


def test_index_and_shard_disagree(folder):
    name = sorted(load_file(folder / _shard(1)))[0]
    _edit(folder / _shard(1), lambda t: t.pop(name))
    problems = _refused(folder).problems
    assert f"shard {_shard(1)} lacks {name}, which the index places there" in problems
    assert any(p.startswith(f"missing tensor: {name}") for p in problems)


def test_duplicate_tensor(folder):
    name = sorted(load_file(folder / _shard(1)))[0]
    twin = load_file(folder / _shard(1))[name] + 1
    _edit(folder / _shard(2), lambda t: t.__setitem__(name, twin))
    problems = _refused(folder).problems
    assert f"tensor {name} occurs twice: in {_shard(1)} and {_shard(2)}" in problems


def test_adapters_alone_are_explained(folder):
    """DreamZero spec 6.5: ``save_lora_only`` leaves adapters and the heads."""
    names = json.loads((folder / INDEX).read_text())["weight_map"]
    heads = {n: torch.zeros(1) for n in names if "_encoder.layer" in n or "action_decoder" in n}
    base = "action_head.model.base_model.model.blocks.0.self_attn.q"
    adapters = {f"{base}.lora_{x}.default.weight": torch.zeros(2, 2) for x in "AB"}
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    save_file(heads | adapters, folder / "model.safetensors")
    (problem,) = _refused(folder).problems
    assert "LoRA" in problem and "2 tensors" in problem and "merge" in problem


@pytest.mark.parametrize("name", ["config.json", INDEX, "experiment_cfg/metadata.json"])
@pytest.mark.parametrize("content", [b'{"a": 1', b"[1, 2]", b"\xff\xfe", b""])
def test_broken_json_is_named(folder, name, content):
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointFileError, match=Path(name).name):
        read_folder(folder)


@pytest.mark.parametrize("weight_map", [None, {}, [], {"a": 3}, {"a": "../elsewhere.safetensors"}, {"a": "/etc/hosts"}])
def test_strange_index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with pytest.raises(CheckpointFileError, match=INDEX):
        read_folder(folder)


def test_not_a_checkpoint_folder(tmp_path, folder):
    with pytest.raises(CheckpointFileError, match="not found"):
        read_folder(tmp_path / "nowhere")
    with pytest.raises(CheckpointFileError, match="not found"):
        read_folder(folder / "config.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointFileError, match=r"no config\.json"):
        read_folder(tmp_path / "empty")


def test_config_of_another_network(folder):
    def widen(config):
        config["action_head_cfg"]["config"]["diffusion_model_cfg"]["num_layers"] = 3

    edit_json(folder / "config.json", widen)
    problems = _refused(folder).problems
    assert len(problems) == 32 and all("blocks.2." in p and p.startswith("missing tensor") for p in problems)

    edit_json(folder / "config.json", lambda c: c["action_head_cfg"].pop("config"))
    with pytest.raises(ModelConfigError, match="diffusion_model_cfg"):
        _load(folder)


# -- the published network --------------------------------------------------------------------------------------


def test_published_names_shapes_and_counts():
    start = time.perf_counter()
    network = DreamZero.on_meta(DreamZeroConfig.dreamzero_14b())
    shapes = {checkpoint_name(n): list(p.shape) for n, p in network.state_dict().items()}
    assert time.perf_counter() - start < 20
    assert all(p.is_meta for p in network.state_dict().values())

    def count(prefix):
        part = {n: torch.Size(s).numel() for n, s in shapes.items() if n.startswith("action_head." + prefix)}
        return len(part), sum(part.values())

    assert count("") == (2146, 22_924_172_116)
    assert count("model.") == (1317, 16_484_292_448)
    assert count("model.blocks.") == (1280, 16_153_538_560)
    assert count("model.blocks.7.") == (32, 403_838_464)
    assert count("model.blocks.39.cross_attn.") == (15, 157_332_480)
    assert count("text_encoder.") == (242, 5_680_910_336)
    assert count("image_encoder.model.") == (393, 632_076_801)
    assert count("vae.model.") == (194, 126_892_531)
    assert sum(count(p)[0] for p in ("model.", "text_encoder.", "image_encoder.model.", "vae.model.")) == 2146

    expected = {
        "model.state_encoder.layer1.W": [1, 64, 1024],
        "model.action_encoder.W1.W": [1, 32, 5120],
        "model.action_encoder.W2.W": [1, 10240, 5120],
        "model.action_decoder.layer2.b": [1, 32],
        "model.patch_embedding.weight": [5120, 36, 1, 2, 2],
        "model.text_embedding.0.weight": [5120, 4096],
        "model.time_embedding.0.weight": [5120, 256],
        "model.time_projection.1.weight": [30720, 5120],
        "model.img_emb.proj.0.weight": [1280],
        "model.img_emb.proj.3.weight": [5120, 1280],
        "model.img_emb.proj.4.bias": [5120],
        "model.head.modulation": [1, 2, 5120],
        "model.head.head.weight": [64, 5120],
        "model.blocks.0.modulation": [1, 6, 5120],
        "model.blocks.39.self_attn.norm_q.weight": [5120],
        "model.blocks.0.norm3.bias": [5120],
        "model.blocks.0.cross_attn.k_img.weight": [5120, 5120],
        "model.blocks.0.cross_attn.norm_k_img.weight": [5120],
        "model.blocks.12.ffn.0.weight": [13824, 5120],
        "model.blocks.12.ffn.2.bias": [5120],
        "text_encoder.token_embedding.weight": [256384, 4096],
        "text_encoder.blocks.23.pos_embedding.embedding.weight": [32, 64],
        "text_encoder.blocks.0.ffn.gate.0.weight": [10240, 4096],
        "image_encoder.model.log_scale": [],
        "image_encoder.model.visual.pos_embedding": [1, 257, 1280],
        "image_encoder.model.visual.transformer.31.attn.to_qkv.weight": [3840, 1280],
        "vae.model.encoder.downsamples.5.time_conv.weight": [192, 192, 3, 1, 1],
        "vae.model.decoder.upsamples.3.time_conv.weight": [768, 384, 3, 1, 1],
        "vae.model.conv1.weight": [32, 32, 1, 1, 1],
    }
    assert {n: shapes.get("action_head." + n) for n in expected} == expected


def test_names_map_to_modules_and_back():
    assert module_name("action_head.model.head.modulation") == "model.head.modulation"
    assert module_name("action_head.model.blocks.0.self_attn.q.base_layer.bias") == "model.blocks.0.self_attn.q.bias"
    assert module_name("backbone.anything") is None
    assert module_name("model.head.modulation") == "?model.head.modulation"
    assert module_name(checkpoint_name("vae.model.conv1.bias")) == "vae.model.conv1.bias"


def test_random_weights_are_reproducible_and_never_zero():
    one, two, other = tiny_network(3), tiny_network(3), tiny_network(4)
    for (name, a), b, c in zip(one.state_dict().items(), two.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert not torch.equal(a, c) and torch.isfinite(a).all() and bool(a.abs().max() > 0), name
