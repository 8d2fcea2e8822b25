"""What a training is told: time, shares of it, data, device. The defaults are what the shipped mug was made with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.sim.tasks import TASKS

from .fit import Recipe
from .fit_vae import VAERecipe
from .generate import TRAINING_SEEDS

TASKS_OF_THE_MUG = ("lift_mug", "lift_mug", "lift_mug", *(name for name in TASKS if name != "lift_mug"))
"""A name that stands here more than once is drawn more often."""
ROUNDS = 4


@dataclass(frozen=True)
class Plan:
    """
    Attributes:
        minutes: of wall-clock time for everything.
        workers: simulators side by side.
        tasks: names; one that stands there more than once comes more often.
        episodes: no more than these; None: as many as there is time for.
        data_share: of the time, for demonstrations; vae_share, latents_share, fit_share: for these stages; the rest is
            evaluation.
        start: a checkpoint of this preset to go on from instead of a new network; its VAE stays as it is.
        vae_file: a VAE that was trained before (``vae.pt``); not used with ``start``.
        extra_data: folders of more shards.
        bundle: folder for the result in a few files of bounded size, written at every save.
        compiled: the layers of the DiT's training; None: on a GPU.
        teach_words: the text encoder learns the things' names before the rest is trained, see ``fit_text``; None: with
            a new network. One that was trained has found its own way to hear them, which this would overwrite.
        rounds: parts the DiT's training is cut into; None: 4 on a GPU, 1 on a CPU, whose cores train. While one part is
            trained the simulators go on: demonstrations first (at most ``round_episodes``), then the newest weights
            play with the expert watching (DAgger); what came of it is taken in before the next part.
        spare_cores: cores that the simulators leave to the training then.
        max_steps: of either training, for tests.
    """

    preset: str = "mug"
    minutes: float = 20.0
    workers: int = 2
    device: str = "auto"
    seed: int = 0
    first_seed: int = TRAINING_SEEDS
    tasks: tuple[str, ...] = TASKS_OF_THE_MUG
    episodes: int | None = None
    data_share: float = 0.09
    vae_share: float = 0.16
    latents_share: float = 0.03
    fit_share: float = 0.62
    evaluation_seeds: int = 100
    start: str | None = None
    extra_data: tuple[str, ...] = ()
    vae_file: str | None = None
    bundle: str | None = None
    compiled: bool | None = None
    teach_words: bool | None = None
    rounds: int | None = None
    round_episodes: int = 1600
    spare_cores: int = 2
    max_steps: int | None = None
    vae: VAERecipe = field(default_factory=VAERecipe)
    recipe: Recipe = field(default_factory=Recipe)

    def __post_init__(self) -> None:
        if self.rounds is not None and self.rounds < 1:
            raise ConfigError("the DiT's training has one part at least", got=f"rounds={self.rounds}")

    @property
    def evaluation_share(self) -> float:
        return max(0.0, 1 - self.data_share - self.vae_share - self.latents_share - self.fit_share)

    def settled(self, *, gpu: bool) -> Plan:
        """With a value for whatever depends on the machine and on what training begins with."""
        return dataclasses.replace(
            self,
            compiled=gpu if self.compiled is None else self.compiled,
            rounds=(ROUNDS if gpu else 1) if self.rounds is None else self.rounds,
            teach_words=self.start is None if self.teach_words is None else self.teach_words,
        )

    @classmethod
    def of(cls, values: Mapping[str, Any], words: Mapping[str, Any]) -> Plan:
        """``values`` by name; ``words`` may name a field of ``vae`` or ``recipe``: ``recipe.lr``.

        Raises:
            ConfigError: an unknown name.
        """
        groups: dict[str, type[VAERecipe | Recipe]] = {"vae": VAERecipe, "recipe": Recipe}
        known = [f.name for f in dataclasses.fields(cls) if f.name not in groups]
        known += [f"{group}.{f.name}" for group, kind in groups.items() for f in dataclasses.fields(kind)]
        flat, nested = dict(values), {group: dict[str, Any]() for group in groups}
        for key, value in words.items():
            if key not in known:
                raise ConfigError("unknown option of the plan", got=key, expected=f"one of {', '.join(known)}")
            group, dot, name = key.partition(".")
            (nested[group] if dot else flat)[name if dot else key] = value
        return cls(**flat, vae=VAERecipe(**nested["vae"]), recipe=Recipe(**nested["recipe"]))
