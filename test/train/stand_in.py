"""Episodes without a simulator: noise for pictures, smooth joints. Nothing can be learnt from them but by heart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from wam_policy_ros.contract.normalization import Statistics
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.model.tokenizer import UMT5Tokenizer
from wam_policy_ros.train.episodes import Episode, labels_of
from wam_policy_ros.train.fit import Sources
from wam_policy_ros.train.footage import Footage
from wam_policy_ros.train.latents import encode_all
from wam_policy_ros.train.preset import TOY
from wam_policy_ros.train.samples import Windows, statistics_of
from wam_policy_ros.train.start_weights import initialise
from wam_policy_ros.train.vocabulary import write_tokenizer

WORDS = ("pick up the white mug", "lift the red apple")


def episode(seed: int, steps: int = 40) -> Episode:
    rng = np.random.default_rng(seed)
    ramp = np.linspace(0, 1, steps + 1)[:, None] * rng.uniform(-0.5, 0.5, 7) + rng.uniform(-1, 1, 7)
    state = np.concatenate([ramp, (np.arange(steps + 1) > steps // 2)[:, None]], axis=1).astype(np.float32)
    action = state[1:] + 0.01
    action[:, 7] = state[1:, 7]
    wanted = np.ones(steps, bool)
    wanted[20:23] = seed % 2 == 0
    return Episode(
        seed=seed,
        task="lift_mug",
        instruction=WORDS[seed % 2],
        source="expert",
        success=True,
        views=rng.integers(0, 256, (1 + steps // TOY.stride, 3, TOY.view_height, TOY.view_width, 3), dtype=np.uint8),
        state=state,
        action=action,
        label=labels_of(action, wanted, TOY.horizon),
    )


def network(seed: int = 0) -> DreamZero:
    torch.manual_seed(seed)
    made = DreamZero(TOY.network())
    initialise(made, seed)
    return made


def sources(made: DreamZero, folder: Path, count: int = 2) -> Sources:
    """Windows and latents of ``count`` episodes; the tokenizer goes to ``folder``."""
    footage = Footage(TOY, torch.device("cpu"))
    footage.add([episode(k) for k in range(count)])
    page = TOY.embodiment
    metadata = TOY.metadata(statistics_of(footage.episodes))
    statistics = Statistics.from_metadata(metadata, page.tag, state=page.state, action=page.action)
    write_tokenizer(folder)
    windows = Windows(footage, TOY, statistics, UMT5Tokenizer.from_folder(folder, TOY.text_len))
    return Sources(footage, windows, encode_all(made.vae, footage, windows.anchors, batch=16, dtype=torch.float32))
