"""A trained network as a checkpoint: the strict loader takes it, and it says how it wants to be run."""

from __future__ import annotations

import json
import re
import shutil
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest

from wam_policy_ros.contract.errors import CheckpointError
from wam_policy_ros.contract.fakes import example_observation
from wam_policy_ros.contract.prompts import NEGATIVE_PROMPT
from wam_policy_ros.engine.build import build_policy
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.recommended import Recommended, recommended, recommended_of
from wam_policy_ros.engine.replicas.build import EngineFactory
from wam_policy_ros.model import packaged as packaged_checkpoints
from wam_policy_ros.model.checkpoint import read_folder
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.model.errors import CheckpointFileError
from wam_policy_ros.model.tokenizer import UMT5Tokenizer
from wam_policy_ros.tools.main import main
from wam_policy_ros.train.bundle import PART_BYTES, write_bundle
from wam_policy_ros.train.export import export
from wam_policy_ros.train.preset import MUG, PRESETS, TOY
from wam_policy_ros.train.samples import statistics_of
from wam_policy_ros.train.vocabulary import pieces, write_tokenizer

from .stand_in import episode, network


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "checkpoint"
    about = {"episodes": 2, "tasks": ["mug"], "more": ""}
    statistics = statistics_of([episode(0)])
    export(network(), TOY, statistics, out, about=about)
    return export(network(), TOY, statistics, out, about=about)  # again: the older one makes room


def test_the_strict_loader_takes_it_and_the_policy_answers(folder):
    policy = build_policy(embodiment="droid", checkpoint=str(folder), device="cpu")
    assert policy.config == EngineConfig(evaluations=5, guidance_scale=1.0)
    assert policy.spec.frame_offsets == (-6, -4, -2, 0) and policy.spec.details["execute_steps"] == 8
    assert policy.spec.horizon == 16 and not policy.spec.random_weights
    session = policy.open()
    for _ in range(6):  # into the second window
        chunk = policy.infer(session, example_observation(policy.spec))
        assert chunk.actions.shape == (16, 8) and np.isfinite(chunk.actions).all()


@pytest.mark.parametrize("kind", ["native", "fp8"])
def test_the_fused_step_runs_it_too(folder, kind):
    """Its image encoder has another number of tokens than the published one."""
    rows = []
    for options in ({}, {"step": "fused", "linears": kind, "graphs": False}):
        config = EngineConfig(evaluations=5, guidance_scale=1.0, **options)
        policy = build_policy(embodiment="droid", checkpoint=str(folder), device="cpu", config=config)
        session = policy.open()
        rows.append([policy.infer(session, example_observation(policy.spec)).actions for _ in range(3)])
    np.testing.assert_allclose(rows[1], rows[0], atol=1e-5 if kind == "native" else 0.05)
    assert kind == "native" or not np.allclose(rows[1], rows[0], atol=1e-5)


def test_what_a_person_asks_for_wins(folder):
    given = EngineConfig(evaluations=8, guidance_scale=2.0)
    policy = build_policy(embodiment="droid", checkpoint=str(folder), device="cpu", config=given)
    assert policy.config == given


def test_rows_have_statistics_of_their_own(folder):
    metadata = json.loads((folder / "experiment_cfg" / "metadata.json").read_text())["oxe_droid"]
    assert np.shape(metadata["statistics"]["action"]["joint_position"]["q01"]) == (16, 7)
    assert metadata["inference"]["execute_steps"] == 8


def test_it_is_found_by_its_name_when_it_comes_with_the_package(folder, tmp_path, monkeypatch):
    shelf = tmp_path / "weights"
    monkeypatch.setattr(packaged_checkpoints, "WEIGHTS", shelf)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointFileError) as without:
        read_folder("lifter")
    assert "packaged" not in str(without.value) and recommended("lifter", "droid") == Recommended()
    shutil.copytree(folder, shelf / "lifter")
    assert read_folder("lifter").path == shelf / "lifter"
    assert recommended("lifter", "droid").execute_steps == 8
    policy = EngineFactory("droid", checkpoint="lifter", device="cpu").policy(lambda text, share: None)
    assert not policy.spec.random_weights and policy.spec.weights.startswith(
        "checkpoint lifter: toy, not DreamZero's weights"
    )
    assert EngineFactory("droid", checkpoint="lifter").described()["checkpoint"] == str(shelf / "lifter")
    assert main(["inspect", "lifter"]) == 0
    with pytest.raises(CheckpointFileError, match=r"packaged checkpoint by its name: lifter"):
        read_folder("lifters")
    shutil.copytree(folder, tmp_path / "lifter")  # a folder of one's own comes first
    assert read_folder("lifter").path == Path("lifter")


def test_everything_of_a_packaged_checkpoint_is_installed(folder):
    text = (Path(__file__).resolve().parents[2] / "setup.py").read_text()
    (patterns,) = (eval(found) for found in re.findall(r" package_data=\{NAME: (\[.*?\])\}", text))
    for path in folder.rglob("*"):
        parts = ("weights", "mug", *path.relative_to(folder).parts)
        same = [p for p in patterns if p.count("/") == len(parts) - 1 and fnmatch("/".join(parts), p)]
        assert path.is_dir() or same, path


def test_it_is_never_called_dreamzero(folder):
    about = read_folder(folder).title
    assert "the architecture at small size" in about and "toy, not DreamZero's weights" in about
    card = (folder / "README.md").read_text()
    assert "**not** DreamZero weights" in card and "scripted demonstrations" in card
    assert "dreamzero" not in folder.name


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"frame_offsets": [0, -2]}, "frame_offsets"),
        ({"frame_offsets": [-4, -2]}, "frame_offsets"),
        ({"frame_offsets": []}, "frame_offsets"),
        ({"execute_steps": 0}, "execute_steps"),
        ({"evaluations": 2.5}, "evaluations"),
        ({"guidance": 1.0}, "inference"),
        ([1], "inference"),
    ],
)
def test_recommendations_that_make_no_sense_are_refused(block, words):
    with pytest.raises(CheckpointError, match=words):
        recommended_of({"oxe_droid": {"inference": block}}, "oxe_droid")


def test_published_checkpoints_recommend_nothing(tmp_path):
    assert recommended_of({"oxe_droid": {}}, "oxe_droid") == Recommended() == recommended(None, "droid")
    assert recommended(tmp_path, "droid").options == {}


def test_every_preset_describes_a_network_and_fits_its_budget():
    for preset in PRESETS.values():
        config = preset.network()
        config.check_picture(2 * preset.view_height, 2 * preset.view_width, preset.name)
        assert config.image.num_tokens in (257, 17, 5)
    shipped = sum(p.numel() for p in DreamZero.on_meta(MUG.network()).parameters())
    assert 2 * shipped < 25e6  # bytes in bf16


def test_the_vocabulary_knows_the_words_of_its_task_and_spells_the_others(tmp_path):
    write_tokenizer(tmp_path)
    tokens = UMT5Tokenizer.from_folder(tmp_path, MUG.text_len, vocab_size=len(pieces()))
    ids, mask = tokens(["pick up the mug", "pick up the zyx", NEGATIVE_PROMPT])
    assert int(mask[0].sum()) == 5 and int(mask[1].sum()) > 5
    unknown = pieces().index("<unk>")
    assert not bool((ids == unknown).any())
    a, b = tokens(["lift the red apple"])[0], tokens(["lift the green apple"])[0]
    assert int((a != b).sum()) == 1


def test_a_bundle_is_whole_at_any_time(tmp_path, folder):
    (tmp_path / "log.txt").write_text("x")
    place = tmp_path / "bundle"
    write_bundle(place, "toy", 1, folder, [tmp_path / "log.txt", tmp_path / "absent"])
    parts = write_bundle(place, "toy", 2, folder)
    assert {p.name for p in place.iterdir()} == {"log.txt", *(p.name for p in parts)}
    assert all(p.stat().st_size <= PART_BYTES for p in parts)
    import io
    import tarfile

    with tarfile.open(fileobj=io.BytesIO(b"".join(p.read_bytes() for p in parts))) as tar:
        names = tar.getnames()
    assert f"{folder.name}/config.json" in names and f"{folder.name}/experiment_cfg/metadata.json" in names


def test_serve_and_node_run_it_as_it_recommends(folder):
    said = lambda text, share: None  # noqa: E731
    policy = EngineFactory("droid", checkpoint=str(folder), device="cpu").policy(said)
    assert policy.spec.details["evaluations"] == "5 of 16" and policy.spec.details["guidance_scale"] == 1.0
    policy = EngineFactory("droid", checkpoint=str(folder), device="cpu", options={"evaluations": 8}).policy(said)
    assert policy.spec.details["evaluations"] == "8 of 16" and policy.spec.details["guidance_scale"] == 1.0
