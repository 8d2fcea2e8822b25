"""The runner itself: what it does not know fails, and no expectation of ours is met by everything."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from .case import Case, Outcome, allowed, complaints, load, same
from .test_cases import OWN, area_of

# What a person reads; the verdict settles it, or another key does.
PROSE = {"alternative", "either", "or_verdict", "rule", "aspect_rule", "good_shape", "note", "see", "skip", "finger_m",
         "must_not", "never", "published_after_stop", "on_mismatch", "tolerance", "tolerance_s", "option"}  # fmt: skip
LOCAL = [c for c in load(OWN) if c.kind in ("mcap", "npz", "json") and c.area != "MOD"]
LOCAL = [c for c in LOCAL if c.kind != "json" or "publishers" not in c.json()]


def case(expect: dict[str, Any], verdict: str = "accept") -> Case:
    return Case("X-1", "json", (), verdict, expect, "", False, Path(), {})


def test_an_expectation_that_nobody_knows_fails_the_case_by_its_name() -> None:
    found = complaints(case({"colour_of_the_sky": "blue"}), Outcome(frozenset({"accept"}), ""))
    assert found == ["colour_of_the_sky: the runner does not know this expectation"]


def test_a_verdict_that_nobody_knows_fails_the_case() -> None:
    assert "the runner does not know the verdict 'cheer'" in complaints(case({}, "cheer"), Outcome(frozenset(), ""))[0]


@pytest.mark.parametrize(
    ("expect", "verdict", "got", "good"),
    [
        ({}, "accept", "accept", True),
        ({}, "accept", "hold", False),
        ({}, "accept", "drop_sample", False),
        ({"alternative": "accept as tightly packed if documented"}, "drop_sample", "accept", True),
        ({"alternative": "refuse by name"}, "accept", "drop_sample", True),
        ({"alternative": "resample by a rule"}, "refuse_start", "accept", True),
        ({"or_verdict": "reject_chunk"}, "accept", "reject_chunk", True),
        ({"or_verdict": "reject_chunk"}, "accept", "drop_sample", False),
        ({"rule": "receive time, or refuse with a reason"}, "accept", "drop_sample", True),
        ({"either": ["hold", "refuse_start"]}, "accept", "refuse_start", True),
    ],
)
def test_verdicts_and_what_is_permitted_beside_them(expect: Any, verdict: str, got: str, good: bool) -> None:
    assert (not complaints(case(expect, verdict), Outcome(frozenset({got}), ""))) is good
    assert verdict in allowed(case(expect, verdict))


def test_words_are_looked_for_in_what_a_person_was_told() -> None:
    outcome = Outcome(frozenset({"accept"}), "camera 'wrist': stamp in the future")
    assert not complaints(case({"reason_mentions": "Stamp", "message_contains": ["wrist", "future"]}), outcome)
    assert "['left']" in complaints(case({"log_contains": ["wrist", "left"]}), outcome)[0]


def test_values_are_equal_up_to_the_tolerance_and_in_their_type() -> None:
    assert same([1.0, 2], [1.05, 2.0], case({"tolerance": 0.1})) and not same(1.0, 1.05, case({}))
    assert not same(True, 1, case({})) and not same([1], [1, 2], case({})) and same("a", "a", case({}))


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {}


@pytest.mark.parametrize("one", LOCAL, ids=[c.id for c in LOCAL])
def test_every_expectation_fails_when_it_is_changed(one: Case, outcomes: dict[str, Outcome]) -> None:
    outcome = area_of(one).run(one)
    untouched = complaints(one, outcome)
    for key, value in one.expect.items():
        if key in PROSE or (key == "published_max_abs_velocity" and not outcome.facts.get("published")):
            continue
        # Of a pixel that may not be there, one that is.
        wrong = one.expect["wrist_frame2_first_px"] if key == "no_pixel_equals" else other(value)
        changed = dataclasses.replace(one, expect={**one.expect, key: wrong})
        found = [c for c in complaints(changed, outcome) if c.startswith(f"{key}:")]
        assert found or any(c.startswith(f"{key}:") for c in untouched), f"{key}: {wrong!r} is met, too"


def other(value: Any) -> Any:
    """A value of the same kind that is wrong."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        # For bounds, the tighter side; for numbers to be met, both sides are wrong.
        return -1000.0 if isinstance(value, float) else -1000
    if isinstance(value, str):
        return f"{value} no such thing"
    return [other(v) for v in value]


def test_the_data_is_what_its_generator_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rosbags", reason="writing recordings needs the package rosbags (extra replay)")
    from . import make_data

    monkeypatch.setattr(make_data, "DATA", tmp_path / "data")
    make_data.main()
    for name in ("index.json", "reference_config.yaml"):
        assert (tmp_path / "data" / name).read_text() == (OWN / name).read_text(), "run python -m test.cases.make_data"
    index = json.loads((OWN / "index.json").read_text())
    assert all((OWN / f).exists() for c in index["cases"] for f in c["files"])
    assert len({c["id"] for c in index["cases"]}) == len(index["cases"])
