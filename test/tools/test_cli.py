"""The ``wam`` command: sub-commands, exit statuses, what ``wam up`` starts."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.tools import up
from wam_policy_ros.tools.bench import BENCHES
from wam_policy_ros.tools.main import COMMANDS, main


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    assert COMMANDS[command].split()[0] in capsys.readouterr().out


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["fly"])
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert all(c in said for c in COMMANDS)


@pytest.mark.parametrize(
    "words, said",
    [
        (
            ["demo", "--report", "r", "--sead", "3"],
            "wam demo: error: unrecognized arguments: --sead 3; did you mean --seed?",
        ),
        (["bench", "priority", "--client=2", "--secnds=4"], "--secnds=4; did you mean --seconds?"),
        (["golden", ".", "extra"], "wam golden: error: unrecognized arguments: extra; wam golden --help lists"),
    ],
)
def test_a_mistyped_option_is_answered_by_its_command(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err


def test_the_expert_is_not_quietly_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--expert", "--report", str(tmp_path / "report")]) == 1
    assert "--expert without --sim" in capsys.readouterr().err and not (tmp_path / "report").exists()


def test_up_passes_parameters_in_order() -> None:
    words = up.ros_arguments(
        arguments("--checkpoint", "/data/x y", "--instruction", "don't spill", "--namespace", "arm")
    )
    files = [words[i + 1] for i, w in enumerate(words) if w == "--params-file"]
    assert [Path(f).name for f in files] == ["dreamzero.yaml", "droid.yaml"]
    given = dict(words[i + 1].split(":=", 1) for i, w in enumerate(words) if w == "-p")
    assert yaml.safe_load(given["checkpoint"]) == "/data/x y"
    assert yaml.safe_load(given["instruction"]) == "don't spill"
    assert "__ns:=/arm" in words


def test_commands_are_shown_as_a_shell_would_take_them() -> None:
    words = ["-p", "checkpoint:='mug'", "a b", "it's $HOME", "plain"]
    text = up.shown(words)
    assert shlex.split(text) == words and "\"checkpoint:='mug'\"" in text


def test_text_that_yaml_would_take_for_something_else_stays_text() -> None:
    words = up.ros_arguments(arguments("--instruction", "42"))
    given = dict(words[i + 1].split(":=", 1) for i, w in enumerate(words) if w == "-p")
    assert yaml.safe_load(given["instruction"]) == "42"
    assert given["exit_on_failure"] == "true"


def test_up_with_random_weights_takes_back_the_checkpoint_of_a_file() -> None:
    words = up.ros_arguments(arguments("--config", "sim_demo", "--random-weights", "tiny"))
    given = dict(words[i + 1].split(":=", 1) for i, w in enumerate(words) if w == "-p")
    assert yaml.safe_load(given["checkpoint"]) == "" and yaml.safe_load(given["random_weights"]) == "tiny"
    words = up.ros_arguments(arguments("--config", "sim_demo", "--random-weights", "tiny", "--checkpoint", "x"))
    assert "checkpoint:='x'" in words, "both named: the node refuses"


def test_up_names_the_packaged_configurations() -> None:
    with pytest.raises(ConfigError, match="droid"):
        up.config_file("dorid")
    with pytest.raises(ConfigError, match="not found"):
        up.config_file("nowhere.yaml")


def test_up_sets_the_fast_dds_profile_it_was_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[str | None] = []
    name = "FASTDDS_DEFAULT_PROFILES_FILE"
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k != name})
    monkeypatch.setattr(os, "execv", lambda *_: seen.append(os.environ.get(name)))
    mine = tmp_path / "mine.xml"
    mine.write_text("<dds/>")
    for words in ((), ("--fastdds-profile",), ("--fastdds-profile", str(mine))):
        up.run(arguments(*words))
    assert seen[0] is None and Path(str(seen[1])).name == "fastdds.xml" and seen[2] == str(mine)
    with pytest.raises(ConfigError, match="not found"):
        up.run(arguments("--fastdds-profile", str(tmp_path / "none.xml")))


def test_bench_needs_to_know_what(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["bench"], ["bench", "everything"]):
        with pytest.raises(SystemExit) as exit_:
            main(words)
        assert exit_.value.code == 2
        said = capsys.readouterr().err
    assert "everything" in said and all(name in said for name in BENCHES)


@pytest.mark.parametrize("name", BENCHES)
def test_help_of_every_bench(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", name, "--help"])
    assert exit_.value.code == 0
    assert f"wam bench {name}" in capsys.readouterr().out


def test_a_missing_package_names_the_extra() -> None:
    """In a fresh interpreter that cannot import torch."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from wam_policy_ros.tools.main import main\n"
        "sys.exit(main(['golden', '.']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "wam_policy_ros[engine]" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_reads_is_no_error(unbuffered: str) -> None:
    """`wam inspect CHECKPOINT | head -1`: no traceback, and the status that a shell knows."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "wam_policy_ros.tools.main", "inspect", "mug"]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    ended = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_another_broken_pipe_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: argparse.Namespace) -> int:
        raise BrokenPipeError("of a socket")

    monkeypatch.setattr("wam_policy_ros.tools.inspect.run", run)
    with pytest.raises(BrokenPipeError, match="of a socket"):
        main(["inspect", "mug"])
