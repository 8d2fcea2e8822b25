"""The trained network as a checkpoint folder that the strict loader takes, with a card that says what it is."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from wam_policy_ros.model.checkpoint import ABOUT, save_folder
from wam_policy_ros.model.dreamzero import DreamZero

from .preset import Preset
from .vocabulary import write_tokenizer

WHAT = "toy, not DreamZero's weights: the architecture at small size, trained on demonstrations in the simulator"
CARD = """# {name}: a toy world-action model

These are **not** DreamZero weights. It is a network of DreamZero's architecture at toy size ({millions:.1f} million
parameters; the published one has 22.9 billion), trained from nothing on scripted demonstrations in the package's own
simulator. It exists so that the package can be tried, end to end, on a laptop.

| | |
| --- | --- |
| what it does | an arm in the simulator lifts the thing that is named: {tasks} |
| what it does not | anything else: no real robot, no other scene, no other thing, no other words for them |
| trained on | {episodes} episodes of a scripted expert that reads true poses{played}; no recorded robot, no web data |
| input | three cameras of {width}x{height} in a mosaic, seven joints, a gripper, a sentence |
| output | {horizon} rows of joint targets and gripper at 15 Hz, of which {steps} are executed; predicted video |
| run with | {evaluations} evaluations, guidance {guidance}; the loader reads this from `experiment_cfg/metadata.json` |
| licence | Apache-2.0, as the package |

{more}"""


def export(
    network: DreamZero,
    preset: Preset,
    statistics: Mapping[str, Any],
    out: Path,
    *,
    about: Mapping[str, Any],
    shards: int = 2,
) -> Path:
    """Write the folder ``out``; an older one of that name is replaced once the new one is complete.

    Args:
        about: ``episodes``, how many of them the network ``played``, ``tasks`` and a text ``more`` for the card.
    """
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    vae = network.config.vae
    config = preset.config_json(list(vae.latent_mean), list(vae.latent_std))
    half = copy.deepcopy(network).to(torch.bfloat16)
    save_folder(half, config, partial, shards=shards)
    experiment = partial / "experiment_cfg"
    experiment.mkdir()
    (experiment / "metadata.json").write_text(json.dumps(preset.metadata(statistics), indent=1), encoding="utf-8")
    (experiment / "conf.yaml").write_text(yaml.safe_dump(preset.conf_yaml()), encoding="utf-8")
    write_tokenizer(partial / "umt5-xxl")
    (partial / ABOUT).write_text(json.dumps({"name": preset.name, "what": WHAT}), encoding="utf-8")
    (partial / "README.md").write_text(card(network, preset, about), encoding="utf-8")
    old = out.with_name(out.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    partial.rename(out)
    shutil.rmtree(old, ignore_errors=True)
    return out


def card(network: DreamZero, preset: Preset, about: Mapping[str, Any]) -> str:
    page, played = preset.embodiment, about.get("played", 0)
    return CARD.format(
        name=preset.name,
        millions=sum(p.numel() for p in network.parameters()) / 1e6,
        tasks=", ".join(about.get("tasks", ())) or "as its training data say",
        episodes=about["episodes"] - played if "episodes" in about else "scripted",
        played=f", and {played} that the network played while the expert said what it would have done"
        if played
        else "",
        width=page.cameras[0].width,
        height=page.cameras[0].height,
        horizon=preset.horizon,
        steps=preset.steps,
        evaluations=preset.evaluations,
        guidance=preset.guidance_scale,
        more=about.get("more", ""),
    )
