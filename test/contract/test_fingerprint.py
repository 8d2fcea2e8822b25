"""The name of what decides an action."""

from __future__ import annotations

import json
import subprocess

import pytest

from wam_policy_ros.contract import fingerprint as module
from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.contract.fingerprint import Fingerprint, code, commit, source_hash


def test_it_is_short_and_the_same_everywhere():
    one = Fingerprint.of(weights={"hash": "sha256:1"}, device={"name": "H200", "threads": 2})
    # Of the canonical JSON: another order of the same values is the same thing.
    assert one.id == Fingerprint.of(device={"threads": 2, "name": "H200"}, weights={"hash": "sha256:1"}).id
    assert one.id == "wam1-d683ec8121a925ea"
    assert Fingerprint.from_dict(json.loads(json.dumps(one.as_dict()))) == one
    assert Fingerprint.of(config={"steps": (1, 2), "x": None}).parts == {"config": {"steps": [1, 2], "x": None}}


def test_every_value_counts_and_is_told():
    one = Fingerprint.of(weights={"hash": "a"}, libraries={"torch": "2.11", "cudnn": 91})
    for other, line in (
        (Fingerprint.of(weights={"hash": "b"}, libraries={"torch": "2.11", "cudnn": 91}), "weights.hash: a, b"),
        (
            Fingerprint.of(weights={"hash": "a"}, libraries={"torch": "2.12", "cudnn": 91}),
            "libraries.torch: 2.11, 2.12",
        ),
        (Fingerprint.of(weights={"hash": "a"}, libraries={"torch": "2.11"}), "libraries.cudnn: 91, None"),
        (
            Fingerprint.of(weights={"hash": "a"}, libraries={"torch": "2.11", "cudnn": 91}, code={"x": 1}),
            "code.x: None, 1",
        ),
    ):
        assert other.id != one.id and one.differences(other) == [line]
    assert one.differences(one) == []


def test_one_that_was_changed_is_refused():
    raw = Fingerprint.of(weights={"hash": "a"}).as_dict()
    with pytest.raises(ConfigError, match="was changed"):
        Fingerprint.from_dict(raw | {"weights": {"hash": "b"}})


def test_the_code_is_named_by_its_source(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "b.py").write_text("y = 1\n")
    before = source_hash(tmp_path)
    (tmp_path / "notes.txt").write_text("no code")
    assert source_hash(tmp_path) == before
    (tmp_path / "inner" / "b.py").write_text("y = 2\n")
    changed = source_hash(tmp_path)
    (tmp_path / "inner" / "b.py").rename(tmp_path / "b.py")
    assert len({before, changed, source_hash(tmp_path)}) == 3
    assert set(code()) == {"version", "source", "commit"} and len(code()["source"] or "") == 32


def test_the_commit_of_a_checkout_and_of_none(tmp_path, monkeypatch):
    assert commit(tmp_path) is None

    def git(*words):
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@x", *words], cwd=tmp_path, check=True)

    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "one")
    clean = commit(tmp_path)
    (tmp_path / "a").write_text("2")
    assert clean is not None and len(clean) == 40 and commit(tmp_path) == clean + "+"
    inner = tmp_path / "site-packages"  # an installation inside somebody's checkout
    inner.mkdir()
    assert commit(inner) is None
    monkeypatch.setattr(module.subprocess, "run", lambda *a, **k: (_ for _ in ()).throw(FileNotFoundError("git")))
    assert commit(tmp_path) is None
