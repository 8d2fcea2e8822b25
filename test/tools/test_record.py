"""``wam record``, ``wam serve --record`` and ``wam replay --verify`` on the tiny network and on no network at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from test.records.tools import flip, look, rewrite
from wam_policy_ros.contract.errors import ConfigError, MissingDependency
from wam_policy_ros.records.events import OBSERVATION, START
from wam_policy_ros.records.files import record_files
from wam_policy_ros.tools import lazy, serve
from wam_policy_ros.tools import record as record_tool
from wam_policy_ros.tools.main import main
from wam_policy_ros.tools.replay import _is_record


def arguments(module, *words):
    import argparse

    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args([str(w) for w in words])


def recorded(folder, *words, calls=(1, 4)):
    """What ``wam serve ... --record`` does with the policy's thread, without its sockets."""
    args = arguments(serve, *words, "--record", folder)
    policy = serve.policy_factory(args, serve.make_recorder(args))(lambda text, fraction: None)
    session = policy.open("a", seed=9)
    for i, frames in enumerate(calls):
        policy.infer(session, look(policy.spec, i, frames=frames))
    policy.close(session)
    policy.disconnect()
    return policy


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    words = ("--random-weights", "tiny", "--deterministic", "--evaluations", "5", "--device", "cpu", "--record-stages")
    recorded(folder, *words)
    return folder


def copy(folder, tmp_path):
    for path in record_files(folder):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_the_same_bits_again(tiny, tmp_path, capsys):
    assert main(["replay", str(tiny), "--verify", "--json", str(tmp_path / "report.json")]) == 0
    out = capsys.readouterr().out
    assert "2 in 1 sessions, 2 the same bit for bit, stages compared" in out and out.endswith("the same bits\n")
    assert "RANDOM WEIGHTS" in out and "wam1-" in out and "ELSEWHERE" not in out
    (report,) = json.loads((tmp_path / "report.json").read_text())
    assert report["proven"] and report["calls"] == 2 and report["deterministic"]


def test_one_bit_of_an_observation(tiny, tmp_path, capsys):
    folder = copy(tiny, tmp_path)
    rewrite(
        folder,
        lambda e: (
            flip(e, "frames/exterior_image_2_left", 70_001, 6)
            if e.topic == OBSERVATION and e.values["call"] == 2
            else e
        ),
    )
    assert main(["replay", str(folder), "--verify"]) == 1
    out = capsys.readouterr().out
    assert "DIFFERENT   call 2 (session 'a', step 1): first at preprocess" in out
    assert "not the one that was recorded" in out and "the same bits" not in out


def test_another_engine_option_is_told_and_differs(tiny, capsys):
    assert main(["replay", str(tiny), "--verify", "--engine", "evaluations=6"]) == 1
    out = capsys.readouterr().out
    assert "ELSEWHERE   config.evaluations: 5, 6" in out and "first at evaluation 2" in out
    assert main(["replay", str(tiny), "--verify", "--engine", "evaluation=6"]) == 1
    assert "evaluation" in capsys.readouterr().err


def test_a_record_without_a_network_needs_none(tmp_path, capsys):
    recorded(tmp_path, "--fake", "hold", calls=(1, 4, 4))
    assert main(["replay", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "1 sessions, 3 calls, 0 refused" in out and "--verify" in out
    assert main(["replay", str(tmp_path), "--verify"]) == 0
    assert "NOT in the deterministic tier" in capsys.readouterr().out
    (path,) = record_files(tmp_path)
    path.write_bytes(path.read_bytes()[:-4000])
    assert main(["replay", str(path), "--verify"]) == 3
    out = capsys.readouterr().out
    assert "INCOMPLETE" in out and "the record is not whole" in out
    assert main(["replay", str(path)]) == 0 and "INCOMPLETE" in capsys.readouterr().out


def test_replicas_are_recorded_one_by_one(tmp_path, capsys):
    args = arguments(serve, "--fake", "hold", "--replicas", "2", "--record", tmp_path)
    policy = serve.policy_factory(args, serve.make_recorder(args))(lambda text, fraction: None)
    try:
        for place in policy.places:
            session = place.open(f"at {place.place}")
            place.infer(session, look(policy.spec, place.place))
            place.close(session)
    finally:
        policy.disconnect()
    assert main(["replay", str(tmp_path), "--verify"]) == 0
    assert "2 in 2 sessions, 2 the same" in capsys.readouterr().out


def test_what_cannot_be_verified_says_why(tmp_path, capsys):
    bag = tmp_path / "bag"
    bag.mkdir()
    (bag / "metadata.yaml").write_text("rosbag2_bagfile_information: {}")
    assert main(["replay", str(bag), "--verify"]) == 1 and "no record of a policy" in capsys.readouterr().err
    assert main(["replay", str(bag), "--engine", "evaluations=5"]) == 1 and "--verify" in capsys.readouterr().err
    folder = tmp_path / "remote"
    recorded(folder, "--fake", "hold")

    def change(event):
        if event.topic != START:
            return event
        return replace(event, values={**event.values, "how": {**event.values["how"], "policy": "openpi"}})

    rewrite(folder, change)
    assert main(["replay", str(folder), "--verify"]) == 1 and "cannot be made again" in capsys.readouterr().err


def test_recordings_of_ros_stay_with_the_node(tmp_path, monkeypatch):
    (tmp_path / "metadata.yaml").write_text("")
    assert not _is_record(tmp_path)
    other = tmp_path / "other"
    recorded(other, "--fake", "hold", calls=(1,))
    assert _is_record(other)
    monkeypatch.setitem(__import__("sys").modules, "wam_policy_ros.tools.verify_record", None)
    with pytest.raises(ModuleNotFoundError):
        _is_record(other)
    assert lazy._EXTRAS["mcap"] == "record" and issubclass(MissingDependency, ConfigError)


def test_the_options_of_serve(tmp_path):
    args = arguments(serve, "--fake", "hold", "--record", tmp_path, "--record-mb", "2", "--record-stages")
    recorder = serve.make_recorder(args)
    assert recorder is not None and recorder.limits.file_bytes == 2 * 2**20
    with pytest.raises(ConfigError, match="no stages"):
        serve.policy_factory(args, recorder)(lambda text, fraction: None)
    assert serve.make_recorder(arguments(serve, "--fake", "hold")) is None
    with pytest.raises(ConfigError, match="without --record"):
        serve.make_recorder(arguments(serve, "--fake", "hold", "--record-stages"))
    how = serve.how_made(arguments(serve, "relative/folder", "--tokenizer", "t", "--engine", "guidance_steps=[0, 1]"))
    assert how["policy"] == "engine" and Path(how["checkpoint"]).is_absolute() and Path(how["tokenizer"]).is_absolute()
    assert how["options"] == {"guidance_steps": (0, 1)} and json.dumps(how)


def test_a_dry_run_says_that_the_package_is_missing(tmp_path, capsys, monkeypatch):
    from wam_policy_ros.tools import serve_report

    words = ["serve", "--fake", "hold", "--dry-run", "--port", "0", "--record", str(tmp_path)]
    assert main(words) == 0
    original = serve_report.importlib.util.find_spec
    monkeypatch.setattr(serve_report.importlib.util, "find_spec", lambda n: None if n == "mcap" else original(n))
    assert main(words) == 1 and "wam_policy_ros[record]" in capsys.readouterr().out


def test_wam_record_is_the_other_command_with_its_options(tmp_path):
    def words(*given):
        return record_tool.words(arguments(record_tool, *given))

    folder = str(tmp_path.resolve())
    assert words(tmp_path, "--stages", "serve", "/c", "--port", "9") == [
        "--record", folder, "--record-stages", "--record-mb", "1024", "/c", "--port", "9",
    ]  # fmt: skip
    tail = ["-p", f"record.folder:='{folder}'", "-p", "record.stages:=false", "-p", "record.max_file_mb:=5.0"]
    assert words("--max-mb", "5", tmp_path, "up", "--config", "x") == ["--config", "x", "--", *tail]
    assert words("--max-mb", "5", tmp_path, "up", "--", "-p", "a:=1") == ["--", "-p", "a:=1", *tail]
    assert words("--max-mb", "5", tmp_path, "up", "--config", "x", "--", "-p", "a:=1") == [
        "--config", "x", "--", "-p", "a:=1", *tail,
    ]  # fmt: skip
    for inner in (["serve", "--record", "x"], ["up", "--", "-p", "record.folder:=x"]):
        with pytest.raises(ConfigError, match="given twice"):
            words(tmp_path, *inner)
