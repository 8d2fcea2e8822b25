"""By the clock: demonstrations, VAE, latents, DiT, checkpoint, evaluation; all in one go or in stages of their own.

Each stage has a share of the time and leaves what it made in the folder, so that a later call goes on from there.
No simulator runs while the VAE is trained. On a GPU the DiT is trained in parts, and simulators go on beside all but
the last one (``meanwhile``).
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.contract.normalization import Statistics
from wam_policy_ros.model.config import DreamZeroConfig
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.model.tokenizer import UMT5Tokenizer
from wam_policy_ros.model.vae import VideoVAE

from .action_error import action_error
from .bundle import write_bundle
from .compiled import compiled_layer
from .episodes import read_shard, shards
from .errors import DataError, TrainError
from .evaluate import Rollouts, evaluate, write_summary
from .export import export
from .fit import Sources, Trainer
from .fit_text import encode_prompts, teach_words
from .fit_vae import fit_vae, latent_statistics_of, new_vae, reconstruction
from .footage import Footage
from .forward import run_layer
from .generate import EVALUATION_SEEDS, Demonstrations, Generator, Progress
from .latents import encode_all, normalised_latents
from .meanwhile import PLAYED, meanwhile
from .plan import Plan
from .preset import PRESETS
from .runlog import Budget, RunLog, draw_curves, save_picture
from .samples import Windows, statistics_of
from .start_weights import initialise
from .vocabulary import write_tokenizer

VALIDATE_EVERY = 32
"""Of so many shards one is for validation only."""
ENCODE_BATCH = 128
SEEN_SEEDS = 8
"""Training seeds that are played before the evaluation."""


class Run:
    """One training in a folder.

    Files: ``data/`` shards, ``played*/`` those of a policy, ``vae.pt``, ``trainer.pt``, ``statistics.json``,
    ``checkpoint/``, ``evaluation.json``, ``log.txt``, ``curves.jsonl``, ``curves.png``, ``plan.json``.
    """

    def __init__(self, out: Path, plan: Plan) -> None:
        self.out = out
        self.preset = PRESETS[plan.preset]
        self.log = RunLog(out)
        self.clock = Budget(60 * plan.minutes)
        name = plan.device if plan.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
        self.device = torch.device(name)
        self.plan = plan = plan.settled(gpu=self.device.type == "cuda")
        self.version = 0
        self.footage = Footage(self.preset, self.device)
        self.held_out = Footage(self.preset, self.device)
        self._loaded: set[Path] = set()
        self.statistics: dict[str, Any] = {}
        self.layer: Callable[..., Any] = run_layer
        if self.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
            torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, 4
        (out / "plan.json").write_text(json.dumps(dataclasses.asdict(plan), indent=1), encoding="utf-8")

    # -- stages -------------------------------------------------------------------------------------------------

    def everything(self) -> dict[str, Any]:
        """All stages; the report of the evaluation."""
        self._data(compiling=True)
        return self._rest(self._vae(self.clock.seconds * (self.plan.data_share + self.plan.vae_share)))

    def vae_only(self) -> dict[str, Any]:
        """Demonstrations and the VAE; how well it draws what it never saw."""
        self._data(compiling=False)
        vae = self._vae(self.clock.seconds - 10.0)
        report = self._look_at(vae)
        self.bundle()
        return report

    def dit_only(self) -> dict[str, Any]:
        """Demonstrations, then everything behind the VAE of ``plan.vae_file`` or ``plan.start``."""
        self._data(compiling=True)
        return self._rest(self._vae(0.0))

    def _data(self, *, compiling: bool) -> None:
        plan, clock = self.plan, self.clock
        self.log.line(f"{self.preset.name} on {self.device}, {plan.minutes:g} minutes, {plan.workers} simulators")
        what = Demonstrations(plan.preset, tasks=plan.tasks)
        count = None if plan.episodes is None else -(-plan.episodes // what.per_shard)
        generator = Generator(self.out / "data", what, workers=plan.workers, first_seed=plan.first_seed, count=count)
        try:
            if compiling:
                self.compile_layers()
            self._wait_for_data(generator, clock.seconds * plan.data_share)
        finally:
            made = self.stopped(generator, 3.0)
        self.load_new()
        counts = f"{len(self.footage.episodes)} for training, {len(self.held_out.episodes)} for validation"
        self.log.line(
            f"data: {made.episodes} episodes made now ({made.dropped} dropped), {counts}, {self.footage.frames} frames"
        )
        if not self.footage.episodes:
            raise DataError("no demonstration was made in time", got=f"{clock.spent:.0f} s", remedy="give more minutes")

    def compile_layers(self) -> None:
        """If the plan says so; while simulators run, as it takes more than a minute."""
        if self.plan.compiled:
            begin = self.clock.spent
            self.layer = compiled_layer(self.preset, self.plan.recipe.batch, self.device, self.log.line)
            self.log.line(f"layers: {self.clock.spent - begin:.0f} s for compiling them")

    def stopped(self, generator: Generator, patience_s: float) -> Progress:
        """Stop it and say what its processes said. Whether there is too little then is for others to judge."""
        made = generator.stop(patience_s)
        for line in generator.errors[:3]:
            self.log.line(f"a simulator ended: {line}")
        return made

    def _rest(self, vae: VideoVAE) -> dict[str, Any]:
        network, sources, validation = self.sources(vae)
        self.fit(network, sources, validation, self.clock.seconds * (1 - self.plan.evaluation_share))
        del network, sources, validation
        self.footage = self.held_out = Footage(self.preset, self.device)
        return self.evaluate()

    def _wait_for_data(self, generator: Generator, until_s: float) -> None:
        enough = 4 if self.plan.max_steps is not None else 100
        while generator.running and self.clock.spent < until_s:
            time.sleep(0.2)
            self.load_new()
        # Later than planned rather than with next to nothing; the held-out shard may be the only one yet.
        while generator.running and len(self.footage.episodes) < enough and not self.clock.over:
            time.sleep(0.5)
            self.load_new()
        generator.poll()
        self.load_new()
        made = generator.progress
        if generator.errors and not self.footage.episodes:
            raise DataError("the simulator does not run", got=generator.errors[0])
        self.log.line(
            f"data so far: {made.episodes} episodes made now ({made.dropped} dropped), {self.footage.frames} frames"
        )

    def load_new(self) -> None:
        """Take in all shards that are complete by now."""
        played = sorted(self.out.glob(PLAYED + "*"))
        places = [self.out / "data", *played, *(Path(p) for p in self.plan.extra_data)]
        for path in dict.fromkeys(p for place in places for p in shards(place)):
            if path in self._loaded:
                continue
            self._loaded.add(path)
            number = int("".join(c for c in path.stem if c.isdigit()) or 0) // Demonstrations.per_shard
            target = self.held_out if number % VALIDATE_EVERY == 1 else self.footage
            target.add(read_shard(path))

    def _vae(self, until_s: float) -> VideoVAE:
        plan, config = self.plan, self.preset.network().vae
        if plan.start is not None:
            beside = "" if plan.vae_file is None else f"; {plan.vae_file} is not used"
            self.log.line(f"VAE: that of {plan.start}{beside}")
            return self.given().vae.eval().requires_grad_(False)
        vae = new_vae(config, plan.seed, self.device)
        stored = Path(plan.vae_file) if plan.vae_file is not None else self.out / "vae.pt"
        if plan.vae_file is not None or stored.exists():
            try:
                vae.load_state_dict(torch.load(stored, map_location=self.device, weights_only=True))
            except (OSError, RuntimeError) as error:
                raise DataError("no VAE of this preset", got=f"{stored}: {error}", remedy="wam train vae") from error
            self.log.line(f"VAE: taken from {stored.name}")
            return vae.eval().requires_grad_(False)
        if not len(self.footage.observable()):
            raise DataError("no episode is long enough to train on", got=f"{len(self.footage.episodes)} episodes")
        budget = Budget(max(1.0, until_s - self.clock.spent))
        fit_vae(vae, self.footage, plan.vae, budget, self.log, seed=plan.seed, max_steps=plan.max_steps)
        torch.save(vae.state_dict(), stored)
        return vae

    def given(self) -> DreamZero:
        """``plan.start``; sets the statistics to its own.

        Raises:
            ConfigError: it is of another preset.
        """
        from wam_policy_ros.model.checkpoint import load_weights, read_folder

        assert self.plan.start is not None
        folder = read_folder(self.plan.start)
        found, wanted = sizes(folder.config), sizes(self.preset.network())
        if other := {name for name in wanted if found[name] != wanted[name]}:
            raise ConfigError(
                f"{folder.path} is not of the preset {self.preset.name}",
                got={name: found[name] for name in sorted(other)},
                expected={name: wanted[name] for name in sorted(other)},
                remedy="name its preset with --preset",
            )
        self.statistics = (folder.metadata or {})[self.preset.embodiment.tag]["statistics"]
        return load_weights(folder, device=self.device, dtype=torch.float32, progress=lambda text, share: None)

    def sources(self, vae: VideoVAE, network: DreamZero | None = None) -> tuple[DreamZero, Sources, Sources | None]:
        """The network to train, and windows with their latents for training and validation.

        Args:
            network: to go on from; None: ``plan.start`` if there is one, else a new one.
        """
        plan, preset = self.plan, self.preset
        if plan.start is not None:
            network = network or self.given()
        else:
            mean, std = latent_statistics_of(vae, self.footage, seed=plan.seed)
            config = type(preset.network()).from_config_json(preset.config_json(mean, std))
            network = DreamZero(config).to(self.device)
            initialise(network, plan.seed)
            network.vae.load_state_dict(vae.state_dict())
            self.statistics = statistics_of(self.footage.episodes)
        (self.out / "statistics.json").write_text(json.dumps(self.statistics), encoding="utf-8")
        if plan.teach_words and plan.recipe.words_steps and not self.stored.exists():
            ids, mask, things = encode_prompts(self._tokens(network), preset.embodiment.prompt_template)
            found = teach_words(network, ids, mask, things, steps=plan.recipe.words_steps)
            self.log.line("words: " + ", ".join(f"{k} {v:.3g}" for k, v in found.items()))
        network.vae.eval().requires_grad_(False)
        self._look_at(network.vae)
        begin = self.clock.spent
        self._shorten(network.vae)
        sources = self._encoded(network, self.footage)
        validation = self._encoded(network, self.held_out) if self.held_out.episodes else None
        self.log.line(f"latents: {len(sources.windows.anchors)} windows in {self.clock.spent - begin:.1f} s")
        return network, sources, validation

    def _look_at(self, vae: VideoVAE) -> dict[str, Any]:
        """A picture of what it makes of clips that are not trained on, and how far off that is."""
        if not self.held_out.episodes:
            return {}
        pick = self.held_out.observable()
        pairs, errors = reconstruction(vae, self.held_out, pick[:: max(1, len(pick) // 32)][:32])
        save_picture(self.out / "vae.png", pairs[:: max(1, len(pairs) // 4), :, -1][:4])
        self.log.line(
            f"VAE: on unseen clips the mean absolute error is {errors['all']:.4f} of [-1, 1], where things are "
            f"{errors['busy']:.4f}; a blur is off by {errors['blur_all']:.4f} and {errors['blur_busy']:.4f}"
        )
        return errors

    def _shorten(self, vae: VideoVAE) -> None:
        """Leave out episodes whose latents would take longer than their share of the time."""
        if self.device.type != "cuda":
            return
        allowed = self.clock.seconds * self.plan.latents_share
        clips = self.footage.observable().to(self.device).split(ENCODE_BATCH)[:8]
        for k, part in enumerate(clips):
            if k == 3:
                torch.cuda.synchronize()
                begin = time.monotonic()
            normalised_latents(vae, self.footage.observed_clip(part))
        torch.cuda.synchronize()
        per_clip = (time.monotonic() - begin) / sum(len(c) for c in clips[3:]) if len(clips) > 3 else 0.0
        # A clip for every frame and one for every second frame, the anchors.
        needed = 1.5 * self.footage.frames * per_clip
        self.log.line(f"latents: {1 / max(per_clip, 1e-9):.0f} clips/s, {needed:.0f} s needed, {allowed:.0f} s planned")
        if needed > 1.3 * allowed:
            keep = max(1, int(len(self.footage.episodes) * 1.3 * allowed / needed))
            self.footage.keep_first(keep)
            self.log.line(f"latents: {keep} episodes are taken")

    def _tokens(self, network: DreamZero) -> UMT5Tokenizer:
        folder = self.out / "tokenizer"
        write_tokenizer(folder)
        return UMT5Tokenizer.from_folder(folder, self.preset.text_len, vocab_size=network.config.text.vocab)

    def _encoded(self, network: DreamZero, footage: Footage, known: Sources | None = None) -> Sources:
        metadata, page = self.preset.metadata(self.statistics), self.preset.embodiment
        statistics = Statistics.from_metadata(metadata, page.tag, state=page.state, action=page.action)
        tokens = self._tokens(network)
        windows = Windows(footage, self.preset, statistics, tokens, every=2)
        cuda = self.device.type == "cuda"
        latents = encode_all(
            network.vae,
            footage,
            windows.anchors,
            batch=ENCODE_BATCH if cuda else 8,
            dtype=torch.bfloat16 if cuda else torch.float32,
            known=None if known is None else known.latents,
        )
        return Sources(footage, windows, latents)

    @property
    def stored(self) -> Path:
        """The state of the DiT's training."""
        return self.out / "trainer.pt"

    def fit(self, network: DreamZero, sources: Sources, validation: Sources | None, until_s: float) -> None:
        """Train on, in ``plan.rounds`` parts, until so many seconds of the run are spent."""
        plan = self.plan
        assert plan.rounds is not None
        average = sources.windows.average_rows()

        def measure() -> None:
            for name, found in (("training", trainer.sources), ("validation", validation)):
                if found is not None:
                    self.log.point(f"rows, {name}", trainer.step, action_error(network, found, average))

        trainer = Trainer(
            network, sources, plan.recipe, self.log, seed=plan.seed,
            save=lambda why: self._save(network, trainer.step, why),
            measure=measure, validation=validation, layer=self.layer,
        )  # fmt: skip
        if self.stored.exists():
            trainer.restore(torch.load(self.stored, map_location=self.device, weights_only=True))
            self.log.line(f"training goes on at step {trainer.step}")
        budget = Budget(max(1.0, until_s - self.clock.spent))
        for k in range(plan.rounds):
            share = (k + 1) / plan.rounds
            stop_at = None if plan.max_steps is None else round(plan.max_steps * share)
            simulators = meanwhile(plan, self.out, k) if k < plan.rounds - 1 else None
            try:
                trainer.run(budget, until=budget.seconds * share, max_steps=plan.max_steps, stop_at=stop_at)
            finally:
                made = self.stopped(simulators, 1.0) if simulators is not None else None
            self._store(trainer)
            if budget.over:
                break
            if made is not None:
                self._take_in(made, trainer)

    def _store(self, trainer: Trainer) -> None:
        partial = self.stored.with_suffix(".partial")
        torch.save(trainer.state(), partial)
        os.replace(partial, self.stored)

    def _take_in(self, made: Progress, trainer: Trainer) -> None:
        """Train on what the simulators made meanwhile, too; what is for validation stays as it was."""
        begin, frames = self.clock.spent, self.footage.frames
        self.load_new()
        if self.footage.frames > frames:
            trainer.take(self._encoded(trainer.network, self.footage, trainer.sources))
        played = sum(e.source == "policy" for e in self.footage.episodes)
        self.log.line(
            f"made meanwhile: {made.episodes} episodes ({made.dropped} dropped); {len(self.footage.episodes)} in all, "
            f"{played} of them played; taken in within {self.clock.spent - begin:.1f} s"
        )

    def _save(self, network: DreamZero, step: int, why: str) -> None:
        episodes = len(self.footage.episodes)
        names = dict.fromkeys(t.removeprefix("lift_").replace("_", " ") for t in self.plan.tasks)
        further = "" if self.plan.start is None else ", going on from weights that were trained before"
        about = {"episodes": episodes, "played": sum(e.source == "policy" for e in self.footage.episodes),
                 "tasks": list(names), "more": f"Seed {self.plan.seed}, {step} steps{further}."}  # fmt: skip
        export(network, self.preset, self.statistics, self.out / "checkpoint", about=about)
        self.bundle()
        self.log.line(f"saved: {why}")

    def bundle(self) -> None:
        if self.plan.bundle is None:
            return
        self.version += 1
        draw_curves(self.out)
        names = ("log.txt", "curves.jsonl", "curves.png", "vae.png", "vae.pt", "evaluation.json")
        beside = [self.out / n for n in names]
        folder = self.out / "checkpoint"
        write_bundle(
            Path(self.plan.bundle), self.preset.name, self.version, folder if folder.is_dir() else None, beside
        )

    def evaluate(self) -> dict[str, Any]:
        plan, left = self.plan, self.clock.seconds - self.clock.spent
        if not (self.out / "checkpoint").is_dir():
            raise TrainError("no checkpoint was written; there was not enough time", got=f"{plan.minutes} minutes")
        draw_curves(self.out)
        if plan.evaluation_seeds < 1 or left < 10:
            self.log.line("no time for an evaluation")
            self.bundle()
            return {}
        what = Rollouts(str(self.out / "checkpoint"), plan.preset, tasks=plan.tasks)
        seeds = list(EVALUATION_SEEDS)[: plan.evaluation_seeds]
        # First some that it was trained on: a policy that fails there has not learnt, whatever it does elsewhere.
        known = list(range(plan.first_seed, plan.first_seed + min(SEEN_SEEDS, plan.evaluation_seeds)))
        outcomes, errors = evaluate(what, known + seeds, workers=plan.workers, seconds=left - 5)
        seen, outcomes = outcomes[: len(known)], outcomes[len(known) :]
        self.log.line(f"on training seeds: {sum(o.success for o in seen)} of {len(seen)}")
        report = write_summary(self.out / "evaluation.json", outcomes, what)
        counts = f"{report['success']} of {report['episodes']} unseen seeds ({len(seeds)} planned)"
        self.log.line(
            f"evaluation: {counts}, 95 % interval {report['interval_95']}, by task {report['by_task']}, "
            f"a call takes {report['call_s_p50']} s on one thread"
        )
        for line in errors[:3]:
            self.log.line(f"a simulator ended: {line}")
        self.bundle()
        return report


def sizes(config: DreamZeroConfig) -> dict[str, Any]:
    """All of a network that two trainings of a preset have in common; a text may be longer in one."""
    own = {"text_len", "latent_mean", "latent_std"}
    parts = {part: dataclasses.asdict(getattr(config, part)) for part in ("dit", "text", "image", "vae")}
    return {f"{part}.{k}": v for part, values in parts.items() for k, v in values.items() if k not in own}
