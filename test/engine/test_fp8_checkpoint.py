"""FP8 folders: written once, read strictly, the same bits as quantising while an ordinary folder streams in."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from test.engine.tiny_policy import look, same
from test.tiny_checkpoint import edit_json, tiny_network, write_checkpoint
from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.engine.build import build_policy
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.fp8 import E4M3FN, E4M3FNUZ
from wam_policy_ros.engine.fp8_checkpoint import converted_format, load_network, online, write_fp8_checkpoint
from wam_policy_ros.engine.policy import with_config
from wam_policy_ros.engine.quantize import native_weight
from wam_policy_ros.engine.survey import survey
from wam_policy_ros.model.checkpoint import check_weights, read_folder
from wam_policy_ros.model.config import DreamZeroConfig
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.model.errors import CheckpointFileError
from wam_policy_ros.model.fp8_layout import MANIFEST, is_fp8_weight, scale_shapes
from wam_policy_ros.tools.main import main

CPU = torch.device("cpu")
LAYERS = 2 * 12  # 2 blocks of 4 self-attention, 6 cross-attention and 2 feed-forward layers


@pytest.fixture(scope="module")
def network():
    return tiny_network()


@pytest.fixture(scope="module")
def source(tmp_path_factory, network):
    return write_checkpoint(tmp_path_factory.mktemp("fp8") / "DreamZero-Tiny", network)


@pytest.fixture(scope="module")
def pristine(source):
    write_fp8_checkpoint(read_folder(source), source.parent / "fp8", device=CPU, progress=_quiet, shard_bytes=20_000)
    return source.parent / "fp8"


@pytest.fixture
def folder(tmp_path, pristine):
    return Path(shutil.copytree(pristine, tmp_path / "fp8"))


def _quiet(text, fraction):
    pass


def _load(path, fp8=E4M3FN, dtype=torch.float32):
    return load_network(read_folder(path), fp8=fp8, device=CPU, dtype=dtype, progress=_quiet)


def _holding(folder, name):
    return folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]


def _edit(folder, name, change):
    """``change(tensors)`` in the shard that holds ``name``; the index follows."""
    shard = _holding(folder, name)
    tensors = load_file(shard)
    before = set(tensors)
    change(tensors)
    shard.unlink()
    save_file(tensors, shard)

    def follow(index):
        for lost in before - set(tensors):
            del index["weight_map"][lost]
        index["weight_map"] |= dict.fromkeys(set(tensors) - before, shard.name)

    edit_json(folder / "model.safetensors.index.json", follow)


Q = "action_head.model.blocks.1.self_attn.q.weight"


# -- complete folders -------------------------------------------------------------------------------------------


def test_saved_and_online_give_the_same_bits(source, pristine):
    saved, online = _load(pristine).state_dict(), _load(source).state_dict()
    assert saved.keys() == online.keys()
    assert sum(t.dtype == torch.float8_e4m3fn for t in saved.values()) == LAYERS
    assert all(torch.equal(_bytes(t), _bytes(online[n])) for n, t in saved.items())


def _bytes(t):
    return t.contiguous().view(-1).view(torch.uint8)


def test_layers_are_what_was_quantised_and_the_rest_is_untouched(network, pristine):
    loaded, plain = _load(pristine), network.state_dict()
    for name, tensor in loaded.state_dict().items():
        if name.endswith("weight_scale"):
            assert tensor.dtype == torch.float32 and (tensor > 0).all()
        elif not is_fp8_weight(name):
            assert torch.equal(tensor, plain[name])
    layer = loaded.model.blocks[1].ffn[0]
    original = network.model.blocks[1].ffn[0].weight
    back = native_weight(layer)
    # e4m3 has three fraction bits: half a step is 1/16 of a value, or of the smallest normal number, scaled.
    assert ((back - original).abs() <= original.abs() / 15 + layer.weight_scale[:, None] * 2**-9).all()
    assert native_weight(loaded.model.text_embedding[0]).equal(plain["model.text_embedding.0.weight"])


def test_small_and_complete(source, pristine):
    files = {str(p.relative_to(pristine)) for p in pristine.rglob("*") if p.is_file()}
    assert {"config.json", MANIFEST, "experiment_cfg/conf.yaml", "umt5-xxl/tokenizer.json"} <= files
    assert len([f for f in files if f.endswith("safetensors")]) > 3 and not any("partial" in f for f in files)
    manifest = json.loads((pristine / MANIFEST).read_text())
    assert manifest["layers"] == LAYERS and manifest["format"] == "e4m3fn" and manifest["tier"] == "numeric"
    expected = hashlib.sha256((source / "model-00001-of-00003.safetensors").read_bytes()).hexdigest()
    assert manifest["source_sha256"]["model-00001-of-00003.safetensors"] == expected
    assert manifest["source"] == "DreamZero-Tiny" and len(manifest["source_sha256"]) == 4
    assert survey(read_folder(pristine)).faults() == []


def test_every_byte_means_the_same_on_gfx942():
    """NaN included: a damaged weight must not become a number."""
    name = "model.blocks.0.ffn.0.weight"
    stored = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = converted_format(name, stored)[name]
    scale = converted_format(name + "_scale", torch.ones(1))[name + "_scale"]
    assert weight.dtype == torch.float8_e4m3fnuz
    torch.testing.assert_close(weight.float() * scale, stored.float(), rtol=0, atol=0, equal_nan=True)


def test_fnuz_means_the_same_numbers(pristine, folder):
    """gfx942: the same byte means half as much, the scale doubles, and minus zero must not become NaN."""

    def minus_zero(tensors):
        tensors[Q].view(torch.uint8)[0, :3] = 0x80

    _edit(folder, Q, minus_zero)
    fn, fnuz = _load(folder), _load(folder, fp8=E4M3FNUZ)
    weights = 0
    for name, tensor in fnuz.state_dict().items():
        if is_fp8_weight(name):
            weights += 1
            assert tensor.dtype == torch.float8_e4m3fnuz
            a, b = (n.get_submodule(name.removesuffix(".weight")) for n in (fn, fnuz))
            assert torch.equal(native_weight(a), native_weight(b))
    assert weights == LAYERS


def test_the_published_network_has_400_and_80_such_layers():
    shapes = {n: tuple(p.shape) for n, p in DreamZero.on_meta(DreamZeroConfig.dreamzero_14b()).state_dict().items()}
    scales = scale_shapes(shapes)
    assert len(scales) == 40 * 12
    assert scales["model.blocks.39.ffn.0.weight_scale"] == (13824,)
    eight = sum(torch.Size(s).numel() for n, s in shapes.items() if is_fp8_weight(n))
    assert 16.1e9 < eight < 16.2e9  # of 16.48e9 in the DiT


# -- faults -----------------------------------------------------------------------------------------------------


def _refused(folder):
    with pytest.raises(CheckpointFileError) as error:
        _load(folder)
    return error.value


def test_all_faults_are_named_at_once(folder):
    k, o = Q.replace(".q.", ".k."), Q.replace(".q.", ".o.")
    _edit(folder, Q + "_scale", lambda t: t.pop(Q + "_scale"))
    _edit(folder, k, lambda t: t.update({k: t[k].float().bfloat16()}))
    _edit(folder, o + "_scale", lambda t: t.update({o + "_scale": t[o + "_scale"].bfloat16()}))
    extra = "action_head.text_encoder.norm.weight_scale"
    norm = "action_head.text_encoder.norm.weight"
    _edit(folder, norm, lambda t: t.update({extra: torch.ones(16), norm: t[norm].to(torch.float8_e4m3fn)}))
    assert sorted(p.partition(":")[0] + " " + p.split()[2] for p in _refused(folder).problems) == sorted([
        f"missing tensor {Q}_scale",
        f"wrong dtype {k}",
        f"wrong dtype {o}_scale",
        f"wrong dtype {norm}",
        f"unexpected tensor {extra}",
    ])  # fmt: skip


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_scales_that_are_no_positive_numbers(folder, value):
    def change(tensors):
        tensors[Q + "_scale"][3] = value

    _edit(folder, Q + "_scale", change)
    assert _refused(folder).problems == (f"{Q}_scale holds values that are no positive numbers",)


def test_8_bit_tensors_without_a_manifest_are_a_mixture(folder):
    (folder / MANIFEST).unlink()
    problems = _refused(folder).problems
    assert len(problems) == 2 * LAYERS
    assert sum("F8_E4M3" in p for p in problems) == sum("unexpected" in p for p in problems) == LAYERS


def test_a_manifest_beside_an_ordinary_folder(source, pristine, tmp_path):
    mixed = Path(shutil.copytree(source, tmp_path / "mixed"))
    shutil.copyfile(pristine / MANIFEST, mixed / MANIFEST)
    problems = check_weights(read_folder(mixed))
    assert len(problems) == 2 * LAYERS and sum("is F32, expected one of ['F8_E4M3']" in p for p in problems) == LAYERS


@pytest.mark.parametrize(
    ("key", "value"), [("format", "e5m2"), ("scales", "per tensor"), ("tier", "exact"), ("source_sha256", None)]
)
def test_another_format_is_refused(folder, key, value):
    edit_json(folder / MANIFEST, lambda m: m.update({key: value}))
    assert any(key in p and MANIFEST in p for p in _refused(folder).problems)


def test_a_step_in_native_precision_cannot_use_it(pristine):
    with pytest.raises(ConfigError, match=r"8-bit.*DreamZero-Tiny.*linears: fp8"):
        _load(pristine, fp8=None)


# -- a policy ---------------------------------------------------------------------------------------------------


def _policy(path, **options):
    return build_policy(embodiment="oxe_droid", checkpoint=str(path), device="cpu", config=EngineConfig(**options))


@pytest.mark.parametrize("attention", ["torch", "fp8"])
def test_policies_from_both_folders_act_alike(source, pristine, attention):
    chunks = []
    for path in (source, pristine):
        policy = _policy(path, step="fused", linears="fp8", attention=attention, evaluations=5)
        session = policy.open()
        chunks.append([policy.infer(session, look(policy.spec, i)) for i in range(2)])
    assert all(same(a, b) for a, b in zip(*chunks, strict=True))
    native = _policy(source, step="fused", evaluations=5)
    chunk, eight = native.infer(native.open(), look(native.spec, 0)), chunks[0][0]
    assert not same(chunk, eight)
    assert (abs(chunk.actions - eight.actions).max(0) < 0.3 * chunk.actions.std(0)).all()


def test_a_random_network_is_quantised_while_it_is_drawn():
    """The same values as drawing all and quantising then, and never whole in native precision."""
    options = {"embodiment": "oxe_droid", "random_weights": "tiny", "device": "cpu"}
    config = EngineConfig(step="fused", linears="fp8", evaluations=5)
    eight = build_policy(config=config, **options)
    drawn = DreamZero.with_random_weights(DreamZeroConfig.tiny(), dtype=torch.float32)
    layer = eight.path.dit.blocks[1].up
    expected = online(E4M3FN)("model.blocks.1.ffn.0.weight", drawn.model.blocks[1].ffn[0].weight)
    assert torch.equal(_bytes(layer.weight), _bytes(expected["model.blocks.1.ffn.0.weight"]))
    assert layer.scale.equal(expected["model.blocks.1.ffn.0.weight_scale"])


def test_the_plain_step_cannot_run_8_bit_layers(source, pristine):
    with pytest.raises(ConfigError, match="8-bit"):
        _policy(pristine)
    policy = _policy(pristine, step="fused", linears="fp8")
    with pytest.raises(ConfigError, match=r"8-bit.*step: plain"):
        with_config(policy, step="plain", linears="native")
    assert with_config(policy, evaluations=6).config.evaluations == 6


# -- wam quantize -----------------------------------------------------------------------------------------------


def test_command(source, pristine, tmp_path, capsys):
    assert main(["quantize", str(source), str(tmp_path / "out"), "--device", "cpu"]) == 0
    assert "numeric" in capsys.readouterr().out
    ours, other = _load(tmp_path / "out").state_dict(), _load(pristine).state_dict()
    assert all(torch.equal(_bytes(t), _bytes(other[n])) for n, t in ours.items())
    assert main(["quantize", str(source), str(tmp_path / "out")]) == 1
    assert "exists already" in capsys.readouterr().err
    assert main(["quantize", str(pristine), str(tmp_path / "again")]) == 1
    assert "FP8 checkpoint already" in capsys.readouterr().err and not (tmp_path / "again").exists()


def test_an_incomplete_source_leaves_nothing_behind(source, tmp_path, capsys):
    broken = Path(shutil.copytree(source, tmp_path / "broken"))
    (broken / "model-00002-of-00003.safetensors").unlink()
    assert main(["quantize", str(broken), str(tmp_path / "out")]) == 1
    assert "missing shard" in capsys.readouterr().err and [p.name for p in tmp_path.iterdir()] == ["broken"]


def test_a_failure_half_way_leaves_nothing_behind(source, tmp_path):
    def progress(text, fraction):
        if fraction > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_fp8_checkpoint(read_folder(source), tmp_path / "out", device=CPU, progress=progress, shard_bytes=20_000)
    assert list(tmp_path.iterdir()) == []
