"""What the fused step leaves out because it is the same, or read by nobody, against its twins that compute it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from test.engine.tiny_policy import look, make_network, make_policy
from wam_policy_ros.engine import paths
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.fast_dit import FastDiT

# Products with fewer rows may add in another order; in 8 bits the last place decides roundings that are steps of 1/16.
LIMITS = {"native": 2e-5, "fp8": 0.15}
FUSED = EngineConfig(evaluations=5, step="fused")
EIGHT = replace(FUSED, linears="fp8", attention="fp8")


@dataclass
class Counted:
    """A layer that notes how many rows it is given."""

    layer: Any
    rows: list[int]

    def __call__(self, x):
        self.rows.append(len(getattr(x, "values", x)) if not isinstance(x, torch.Tensor) else len(x))
        return self.layer(x)


def policy(config, monkeypatch, **how):
    with monkeypatch.context() as patch:
        patch.setattr(paths, "FastDiT", functools.partial(FastDiT, **how))
        return make_policy(config, network=make_network())


def run(chosen, want_video):
    session = chosen.open()
    plan = (1, 4, 4, 4, 4)
    seen = [replace(look(chosen.spec, i, frames=n), want_video=want_video) for i, n in enumerate(plan)]
    chunks = [chosen.infer(session, observation) for observation in seen]
    chosen.close(session)
    return chunks


@pytest.mark.parametrize("want_video", [True, False], ids=["video", "actions only"])
@pytest.mark.parametrize(
    "config",
    [FUSED, EIGHT, replace(FUSED, guidance_scale=1.0), replace(EIGHT, guidance_steps=(0, 2))],
    ids=["native", "fp8", "one branch", "fp8, guidance at some steps"],
)
@pytest.mark.parametrize("left_out", ["share_first", "trim_last"])
def test_equals_the_twin(config, want_video, left_out, monkeypatch):
    fast, twin = policy(config, monkeypatch), policy(config, monkeypatch, **{left_out: False})
    limit = LIMITS[config.linears]
    for a, b in zip(run(fast, want_video), run(twin, want_video), strict=True):
        assert np.abs(a.actions - b.actions).max() / np.std(b.actions) < limit
        assert a.info == b.info and (a.video is None) == (not want_video)
        if want_video:
            assert (a.video.latents - b.video.latents).abs().max() < limit * b.video.latents.std()


@pytest.mark.parametrize("config", [FUSED, EIGHT], ids=["native", "fp8"])
@pytest.mark.parametrize("want_video", [True, False], ids=["video", "actions only"])
def test_rows_that_are_multiplied(config, want_video, monkeypatch):
    """The first layer's once for both branches, the last evaluation's last layer on the action rows alone."""
    chosen = policy(config, monkeypatch)
    dit = chosen.path.dit
    rows: dict[str, list[int]] = {}
    for layer in (0, 1):
        for name in ("qkv", "o", "cross_q", "cross_o", "up", "down"):
            rows[f"{layer} {name}"] = []
            object.__setattr__(
                dit.blocks[layer], name, Counted(getattr(dit.blocks[layer], name), rows[f"{layer} {name}"])
            )
    session = chosen.open()
    chosen.infer(session, replace(look(chosen.spec, 0, frames=1), want_video=want_video))
    frame, block, actions = 2, 4 + 24 + 1, 24  # tokens of a frame, of a block with its registers, and of its actions
    last = 2 * block if want_video else block  # without a video the unguided branch has no part in it
    assert rows["0 qkv"] == rows["0 o"] == rows["0 cross_q"] == [frame, *[block] * 5]
    assert rows["0 cross_o"] == rows["0 up"] == rows["0 down"] == [2 * frame, *[2 * block] * 4, last]
    assert rows["1 qkv"] == [2 * frame, *[2 * block] * 4, last]
    rest = [*[2 * block] * 4, last if want_video else actions]
    assert all(rows[f"1 {name}"] == rest for name in ("o", "cross_q", "cross_o", "up", "down"))


@pytest.mark.parametrize("want_video", [True, False], ids=["video", "actions only"])
@pytest.mark.parametrize(
    "config", [FUSED, EIGHT, replace(EIGHT, guidance_steps=(0, 2))], ids=["native", "fp8", "guidance at some steps"]
)
def test_branches_beside_each_other(config, want_video, monkeypatch):
    """Exact against one after the other, which computes the first layer twice; close to both as one batch."""
    beside, apart, together = (
        run(policy(replace(config, branches=branches), monkeypatch), want_video)
        for branches in ("beside", "apart", "together")
    )
    limit = LIMITS[config.linears]
    for a, b, c in zip(beside, apart, together, strict=True):
        assert np.array_equal(a.actions, b.actions) and a.info == b.info
        assert np.abs(a.actions - c.actions).max() / np.std(c.actions) < limit
        if want_video:
            assert torch.equal(a.video.latents, b.video.latents)


def test_the_first_layers_keys_are_held_once(monkeypatch):
    fast, twin = policy(FUSED, monkeypatch), policy(FUSED, monkeypatch, share_first=False)
    slots = [p.path.pool.acquire() for p in (fast, twin)]
    assert [k.shape[0] for k in slots[0].k] == [1, 2] and [v.shape[0] for v in slots[1].v] == [2, 2]
    one = slots[0].k[0].numel() + slots[0].v[0].numel()
    assert twin.path.pool.layout.nbytes - fast.path.pool.layout.nbytes == 4 * one
