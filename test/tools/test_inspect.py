"""``wam inspect`` on a complete folder and on damaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from test.tiny_checkpoint import write_checkpoint
from wam_policy_ros.model.config import DreamZeroConfig
from wam_policy_ros.tools.inspect import network_report
from wam_policy_ros.tools.main import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "DreamZero-tiny")


def inspect_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = main(["inspect", str(folder), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_complete_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = inspect_json(folder, capsys)
    assert status == 0 and report["problems"] == []
    assert len(report["files"]["shards"]) == 3
    droid = report["embodiments"]["oxe_droid"]
    assert droid["usable"] and droid["horizon"] == 24
    assert list(droid["cameras"]) == ["exterior_image_1_left", "exterior_image_2_left", "wrist_image_left"]
    assert droid["action"]["joint_position"] == "7 rad relative"
    assert report["network"]["parameters"] > 0
    assert set(report["network"]["ignored_config_keys"]) >= {"num_inference_timesteps", "noise_s"}


def test_text_form_names_what_a_person_needs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    for word in ("oxe_droid", "q01, q99 complete", "24 rows at 15 Hz", "tokenizer", "complete: it can be loaded"):
        assert word in text
    (folder / "about.json").write_text('{"what": "made up for a test"}')
    assert main(["inspect", str(folder)]) == 0
    assert "made up for a test" in capsys.readouterr().out


def test_the_published_network_on_cards_of_several_sizes() -> None:
    told = network_report(DreamZeroConfig.dreamzero_14b())
    assert told["fused_session_GiB"] == {"native": 12.95, "fp8": 6.97} and told["bf16_session_GiB"] == 9.6
    assert told["sessions_by_card_GB"] == {
        "bf16": {24: 0, 32: 0, 48: 0, 80: 1, 141: 4},
        "fp8": {24: 0, 32: 0, 48: 1, 80: 5, 141: 12},
    }


def test_every_fault_is_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()
    metadata = json.loads((folder / "experiment_cfg/metadata.json").read_text())
    del metadata["oxe_droid"]["statistics"]["action"]["gripper_position"]
    (folder / "experiment_cfg/metadata.json").write_text(json.dumps(metadata))
    (folder / "umt5-xxl/tokenizer.json").unlink()
    status, report = inspect_json(folder, capsys)
    text = "\n".join(report["problems"])
    assert status == 1
    for word in ("model-00002-of-00003.safetensors", "action.gripper_position", "tokenizer"):
        assert word in text


def test_weights_are_not_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Headers only: a shard whose data are garbage, but whose header is whole, is not noticed."""
    for shard in folder.glob("*.safetensors"):
        raw = bytearray(shard.read_bytes())
        header = 8 + int.from_bytes(raw[:8], "little")
        raw[header:] = b"\xff" * (len(raw) - header)
        shard.write_bytes(raw)
    assert inspect_json(folder, capsys)[0] == 0


def test_not_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == 1
    assert "config.json" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "nowhere")]) == 1
    assert "not found" in capsys.readouterr().err


def test_another_robot_than_the_folders(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder), "--embodiment", "droid"]) == 0
    assert main(["inspect", str(folder), "--embodiment", "agibot"]) == 1
    said = capsys.readouterr().out
    assert "agibot" in said and "oxe_droid" in said


def test_a_tokenizer_that_does_not_fit_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "umt5-xxl" / "tokenizer.json").write_text("{}")
    assert main(["inspect", str(folder)]) == 1
    assert "cannot read" in capsys.readouterr().out


def test_the_verdict_is_that_of_loading(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from wam_policy_ros.engine.build import build_policy

    assert main(["inspect", str(folder)]) == 0
    build_policy(embodiment="oxe_droid", checkpoint=str(folder), device="cpu")
