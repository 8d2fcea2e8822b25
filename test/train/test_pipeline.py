"""A run from nothing to a checkpoint and on from there, with stand-ins for the simulators' processes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.engine.build import build_policy
from wam_policy_ros.model.checkpoint import load_weights, read_folder
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.tools.main import main
from wam_policy_ros.train import dagger, pipeline
from wam_policy_ros.train import meanwhile as beside
from wam_policy_ros.train.dagger import Dagger
from wam_policy_ros.train.episodes import write_shard
from wam_policy_ros.train.errors import DataError
from wam_policy_ros.train.evaluate import Follower
from wam_policy_ros.train.export import export
from wam_policy_ros.train.fit import Recipe
from wam_policy_ros.train.fit_vae import VAERecipe
from wam_policy_ros.train.footage import Footage
from wam_policy_ros.train.generate import Progress
from wam_policy_ros.train.latents import encode_all
from wam_policy_ros.train.pipeline import Run
from wam_policy_ros.train.plan import TASKS_OF_THE_MUG, Plan
from wam_policy_ros.train.preset import MUG, TOY
from wam_policy_ros.train.samples import statistics_of

from .stand_in import episode, network

PLAN = Plan(
    preset="toy", minutes=60.0, workers=1, device="cpu", first_seed=10_240, evaluation_seeds=0, max_steps=6, rounds=3,
    vae=VAERecipe(batch=2, report_s=1e9), recipe=Recipe(batch=2, report_s=1e9, save_s=1e9, words_steps=3),
)  # fmt: skip


class StandIn:
    """A ``Generator`` whose work is done when it is begun.

    Attributes:
        begun: all of them: folder, options, and what was there already.
    """

    begun: ClassVar[list[tuple[Path, dict[str, Any], list[str]]]] = []
    errors_of: ClassVar[dict[str, list[str]]] = {}
    """By the folder's name: what its processes say instead of making anything."""

    def __init__(self, folder: Path, what: Any, **options: Any) -> None:
        there = sorted(p.name for p in folder.parent.iterdir())
        self.begun.append((folder, options | {"what": what}, there))
        self.running, self.errors, self.progress = False, self.errors_of.get(folder.name, []), Progress()
        if self.errors:
            return
        played = options.get("make") is Follower
        number = len(list(folder.glob("*.npz")))
        for k in range(number, number + 3):  # each folder's second one is held out
            seed = options["first_seed"] + 8 * k
            made = dataclasses.replace(episode(seed), source="policy" if played else "expert")
            write_shard(folder, f"seeds-{seed:08d}", [made])
        self.progress = Progress(episodes=3, shards=3)

    def poll(self) -> Progress:
        return self.progress

    def stop(self, patience_s: float = 20.0) -> Progress:
        return self.progress


@pytest.fixture(autouse=True)
def simulators(monkeypatch):
    monkeypatch.setattr(StandIn, "begun", [])
    monkeypatch.setattr(StandIn, "errors_of", {})
    for module in (pipeline, dagger, beside):
        monkeypatch.setattr(module, "Generator", StandIn)
    for picture in ("draw_curves", "save_picture"):  # seconds each
        monkeypatch.setattr(pipeline, picture, lambda *_: None)


@pytest.fixture
def watched(monkeypatch):
    """What the trainer was given, part by part."""
    given, take = [], pipeline.Trainer.take
    monkeypatch.setattr(pipeline.Trainer, "take", lambda self, sources: (given.append(sources), take(self, sources))[1])
    return given


def log_of(out: Path) -> str:
    return (out / "log.txt").read_text()


def loaded(folder: Path) -> DreamZero:
    cpu = torch.device("cpu")
    return load_weights(read_folder(folder), device=cpu, dtype=torch.float32, progress=lambda text, share: None)


def test_parts_are_trained_on_what_was_made_beside_them(tmp_path, watched):
    assert Run(tmp_path, PLAN).everything() == {}  # no evaluation was asked for
    # Demonstrations; more of them beside the first part; beside the second the weights of the first play; then nobody.
    assert [folder.name for folder, _, _ in StandIn.begun] == ["data", "data", "played-1"]
    assert "checkpoint" not in StandIn.begun[1][2] and "checkpoint" in StandIn.begun[2][2]
    assert StandIn.begun[2][1]["what"].checkpoint == str(tmp_path / "checkpoint")
    assert [len(s.footage.episodes) for s in watched] == [7, 7, 7]  # one footage that grew
    counts = [len(s.windows.anchors) for s in watched]
    assert counts[0] < counts[1] < counts[2]
    last = watched[-1]
    assert sum(e.source == "policy" for e in last.footage.episodes) == 2
    trained = loaded(tmp_path / "checkpoint")
    # Latents were carried over from part to part.
    vae = pipeline.new_vae(trained.config.vae, 0, torch.device("cpu"))
    vae.load_state_dict(torch.load(tmp_path / "vae.pt", weights_only=True))
    anew = encode_all(vae.eval(), last.footage, last.windows.anchors, batch=8, dtype=torch.float32)
    torch.testing.assert_close(last.latents.block, anew.block, atol=1e-4, rtol=1e-4)
    said = log_of(tmp_path)
    assert said.count("made meanwhile: 3 episodes") == 2 and "7 in all, 2 of them played" in said
    assert "2 for training, 1 for validation" in said and "rows, validation 6" in said
    assert "words: steps 3" in said and said.count("the end of a part") == 2 and "saved: end" in said
    state = torch.load(tmp_path / "trainer.pt", weights_only=True)
    assert state["step"] == 6 and not (tmp_path / "trainer.partial").exists()
    card = (tmp_path / "checkpoint" / "README.md").read_text()
    assert (
        "trained on | 5 episodes of a scripted" in card
        and "and 2 that the network played" in card
        and "Seed 0, 6 steps." in card
    )
    policy = build_policy(embodiment="droid", checkpoint=str(tmp_path / "checkpoint"), device="cpu")
    assert not policy.spec.random_weights


def test_a_later_call_goes_on(tmp_path):
    Run(tmp_path, PLAN).everything()
    again = dataclasses.replace(PLAN, max_steps=8, rounds=1)
    Run(tmp_path, again).everything()
    said = log_of(tmp_path)
    assert "VAE: taken from vae.pt" in said and "training goes on at step 6" in said
    assert said.count("words:") == 1  # what was learnt is not taught over
    assert torch.load(tmp_path / "trainer.pt", weights_only=True)["step"] == 8
    assert json.loads((tmp_path / "plan.json").read_text())["rounds"] == 1


def test_simulators_that_fail_beside_a_training_do_not_end_it(tmp_path):
    StandIn.errors_of = {"played-1": ["RuntimeError: no picture"]}
    Run(tmp_path, PLAN).everything()
    said = log_of(tmp_path)
    assert "a simulator ended: RuntimeError: no picture" in said and "saved: end" in said


def test_without_any_demonstration_it_ends_at_once(tmp_path):
    StandIn.errors_of = {"data": ["RuntimeError: no picture"]}
    with pytest.raises(DataError, match="no picture"):
        Run(tmp_path, PLAN).everything()


def test_only_what_trains_the_dit_is_compiled(tmp_path, monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(pipeline, "compiled_layer", lambda preset, batch, *_: asked.append(batch) or pipeline.run_layer)
    plan = dataclasses.replace(PLAN, compiled=True)
    report = Run(tmp_path / "a", plan).vae_only()
    assert report["all"] > 0 and not asked and not (tmp_path / "a" / "checkpoint").exists()
    behind = dataclasses.replace(plan, vae_file=str(tmp_path / "a" / "vae.pt"), rounds=1)
    Run(tmp_path / "b", behind).dit_only()
    assert asked == [2] and "saved: end" in log_of(tmp_path / "b")
    assert PLAN.settled(gpu=False).compiled is False


def test_from_a_checkpoint_on_with_its_vae_its_statistics_and_its_words(tmp_path):
    made = network()
    made.model.head.head.weight.data.normal_(std=0.02)  # it begins at zero, and hardly moves in two steps
    statistics = statistics_of([episode(0), episode(1)])
    first = export(made, TOY, statistics, tmp_path / "a", about={})
    plan = dataclasses.replace(PLAN, start=str(first), vae_file="some/vae.pt", rounds=1, max_steps=2)
    Run(tmp_path / "b", plan).dit_only()
    said = log_of(tmp_path / "b")
    assert f"VAE: that of {first}; some/vae.pt is not used" in said and "words:" not in said
    a, b = (read_folder(f) for f in (first, tmp_path / "b" / "checkpoint"))
    assert a.metadata == b.metadata
    one, two = (loaded(f.path) for f in (a, b))
    assert all(torch.equal(x, y) for x, y in zip(one.vae.parameters(), two.vae.parameters(), strict=True))
    assert any(not torch.equal(x, y) for x, y in zip(one.model.parameters(), two.model.parameters(), strict=True))
    assert "going on from weights" in (tmp_path / "b" / "checkpoint" / "README.md").read_text()
    with pytest.raises(ConfigError, match=r"not of the preset small.*dit\.dim"):
        Run(tmp_path / "c", dataclasses.replace(plan, preset="small")).given()

    Dagger(tmp_path / "d", dataclasses.replace(plan, rounds=2), rollout_share=0.3).everything()
    said = log_of(tmp_path / "d")
    assert "played: 3 episodes; demonstrations: 3" in said and "made meanwhile: 3" in said and "saved: end" in said


def test_who_plays_beside_a_part(tmp_path):
    plan = dataclasses.replace(PLAN, workers=16, round_episodes=20, tasks=("lift_mug",))
    write_shard(tmp_path / "data", "seeds-00010000", [episode(0)])
    beside.meanwhile(plan, tmp_path, 0)
    beside.meanwhile(plan, tmp_path, 2)
    (_, first, _), (folder, later, _) = StandIn.begun
    assert first["workers"] == later["workers"] == 14 and first["what"].tasks == later["what"].tasks == ("lift_mug",)
    assert first["count"] == 1 + 3 and "make" not in first
    assert folder.name == "played-2" and later["make"] is Follower and later["count"] is None
    assert later["first_seed"] > 20_000_000 and later["what"].per_shard == 1


def test_the_defaults_are_those_of_the_mug():
    plan = Plan().settled(gpu=True)
    assert plan.rounds == 4 and plan.compiled and plan.teach_words and plan.recipe.video_weight == 0.15
    assert plan.tasks.count("lift_mug") == 3 and len(plan.tasks) == 7 and plan.vae.form == "stacked"
    small = Plan(start="x").settled(gpu=False)
    assert small.rounds == 1 and not small.compiled and not small.teach_words


@pytest.mark.parametrize("name", ["round", "recipe.words", "vae", "dit.lr", "recipe.lr.x"])
def test_unknown_options_are_named(name):
    with pytest.raises(ConfigError, match="unknown option") as told:
        Plan.of({}, {name: 1})
    assert told.value.got == name and "recipe.lr" in str(told.value)
    assert Plan.of({}, {"recipe.lr": 0.5, "rounds": 2}).recipe.lr == 0.5
    with pytest.raises(ConfigError, match="rounds=0"):
        Plan.of({}, {"rounds": 0})


def test_the_words_of_the_command_line(tmp_path, monkeypatch):
    plans: list[Plan] = []

    class Noted:
        def __init__(self, out: Path, plan: Plan, **more: Any) -> None:
            plans.append(plan)

        everything = vae_only = dit_only = lambda self: {}

    monkeypatch.setattr(pipeline, "Run", Noted)
    out = ["--out", str(tmp_path / "run")]
    assert main(["train", "all", *out]) == 0
    assert plans[-1].tasks == TASKS_OF_THE_MUG and plans[-1].minutes == 20 and plans[-1].compiled is None
    assert 0.05 < plans[-1].evaluation_share < 0.15
    # The mug's own calls.
    assert main(["train", "vae", *out, "--minutes", "4.6", "--episodes", "1100", "--set", "vae.form=stacked"]) == 0
    assert plans[-1].episodes == 1100 and plans[-1].vae.form == "stacked"
    words = ["--minutes", "9.4", "--vae", "vae.pt", "--compile", "--tasks", "lift_mug,lift the red apple"]
    for word in ("start=c", "rounds=4", "recipe.video_weight=0.15", "fit_share=0.83"):
        words += ["--set", word]
    assert main(["train", "dit", *out, *words]) == 0
    plan = plans[-1]
    assert (plan.start, plan.vae_file, plan.rounds, plan.compiled, plan.fit_share) == ("c", "vae.pt", 4, True, 0.83)
    assert plan.tasks == ("lift_mug", "lift_red_apple")
    assert main(["train", "dit", *out, "--start", "c", "--no-compile"]) == 0
    assert plans[-1].start == "c" and plans[-1].vae_file is None and plans[-1].compiled is False
    count = len(plans)
    assert main(["train", "dit", *out]) != 0 and len(plans) == count


def test_pictures_of_another_preset_are_refused():
    with pytest.raises(DataError, match="another preset than mug"):
        Footage(MUG, torch.device("cpu")).add([episode(0)])
    assert TOY.view_height != MUG.view_height
