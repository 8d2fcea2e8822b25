"""The network that comes with the package, played: it lifts what is named, and only when it sees."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch._dynamo")  # before any OpenGL, see train/generate.py
pytest.importorskip("mujoco", reason="mujoco is not installed: pip install 'wam_policy_ros[sim]'")

from wam_policy_ros.model.packaged import packaged
from wam_policy_ros.sim.errors import RenderingUnavailable
from wam_policy_ros.sim.tasks import TASKS
from wam_policy_ros.train.evaluate import Player, Rollouts
from wam_policy_ros.train.export import ABOUT

MUG = packaged()["mug"]


@pytest.fixture(scope="module")
def player():
    try:
        made = Player(Rollouts(str(MUG), tasks=("lift_mug",)))
    except RenderingUnavailable as error:
        pytest.skip(str(error))
    yield made
    made.world.close()


def _play(player, seed, *, task="lift_mug", blind=False):
    player.what = Rollouts(str(MUG), tasks=(task,), blind=blind, max_ticks=100)
    return player.play(seed)


def test_it_lifts_the_mug_and_leaves_the_others(player):
    outcomes = [_play(player, seed) for seed in (100, 101, 102)]
    assert sum(o.success for o in outcomes) >= 2, outcomes
    assert sum(set(o.moved) <= {"mug"} for o in outcomes) >= 2, outcomes


def test_another_thing_that_is_named_is_taken_instead(player):
    outcomes = [_play(player, seed, task=task) for seed, task in ((100, "lift_red_apple"), (101, "lift_yellow_book"))]
    assert any(o.success for o in outcomes), outcomes
    assert all("mug" not in o.moved for o in outcomes if o.success), outcomes


def test_without_sight_it_lifts_nothing(player):
    assert not _play(player, 100, blind=True).success


def test_what_ships_is_small_and_says_what_it_is():
    files = [p for p in MUG.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) <= 25e6
    assert "**not** DreamZero weights" in (MUG / "README.md").read_text()
    assert "not DreamZero's weights" in (MUG / ABOUT).read_text()
    card = (MUG / "README.md").read_text()
    assert all(name.removeprefix("lift_").replace("_", " ") in card for name in TASKS)
    assert Path(MUG / "experiment_cfg" / "metadata.json").is_file() and (MUG / "config.json").is_file()
