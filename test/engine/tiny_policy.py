"""Policies small enough for many calls: 16x32 pictures, 2 tokens per latent frame."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from test.tiny_checkpoint import tiny_network
from wam_policy_ros.contract.embodiment import get_embodiment
from wam_policy_ros.contract.fakes import example_observation
from wam_policy_ros.contract.interface import Observation, PolicySpec
from wam_policy_ros.contract.normalization import Statistics
from wam_policy_ros.engine.build import synthetic_metadata
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.policy import DreamZeroPolicy
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.model.tokenizer import PromptTooLong

TEXT_LEN = 256


class WordTokenizer:
    """One id per word. The byte stand-in needs a thousand ids for a prompt; the text encoder is quadratic in them."""

    max_length = TEXT_LEN

    def __call__(self, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.zeros(len(texts), TEXT_LEN, dtype=torch.int64)
        for row, text in enumerate(texts):
            words = [3 + zlib.crc32(w.encode()) % 61 for w in text.split()] + [1]
            if len(words) > TEXT_LEN:
                raise PromptTooLong(f"the text has {len(words)} tokens, at most {TEXT_LEN} are allowed")
            ids[row, : len(words)] = torch.tensor(words)
        return ids, (ids != 0).long()


@functools.cache
def shared_network() -> DreamZero:
    """One network for all tests that only read it."""
    return make_network()


def make_network(seed: int = 0) -> DreamZero:
    return tiny_network(seed, text_len=TEXT_LEN)


def make_policy(
    config: EngineConfig | None = None,
    *,
    embodiment: str = "oxe_droid",
    network: DreamZero | None = None,
    like: DreamZeroPolicy | None = None,
    ask_device: Callable[[], None] | None = None,
) -> DreamZeroPolicy:
    network = network or shared_network()
    robot = get_embodiment(embodiment)
    return DreamZeroPolicy(
        network,
        robot,
        Statistics.from_metadata(synthetic_metadata(robot), robot.tag),
        WordTokenizer(),
        config or EngineConfig(evaluations=5),
        weights="random, for tests",
        random_weights=True,
        like=like,
        ask_device=ask_device,
    )


def look(spec: PolicySpec, seed: int, **options: Any) -> Observation:
    """One unstamped frame per camera and a state, different for every seed."""
    return example_observation(spec, seed=seed, **options)


def same(a: Any, b: Any) -> bool:
    """Bit for bit: actions, predicted latents, reset and evaluations of two chunks."""
    return bool(
        np.array_equal(a.actions, b.actions)
        and a.video.latents.equal(b.video.latents)
        and (a.reset, a.step, a.info) == (b.reset, b.step, b.info)
    )
