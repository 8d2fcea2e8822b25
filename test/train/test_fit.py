"""Training: a batch is learnt, a run goes on where it was, a whole clip's VAE is the one that runs chunk by chunk."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from wam_policy_ros.model.vae import VideoVAE, latent_statistics
from wam_policy_ros.model.vae_blocks import VAEStream
from wam_policy_ros.train.action_error import action_error
from wam_policy_ros.train.fit import Recipe, Trainer, batch_loss, cross_keys
from wam_policy_ros.train.fit_vae import (
    VAERecipe,
    busy,
    fit_vae,
    latent_statistics_of,
    new_vae,
    picture_loss,
    reconstruction,
)
from wam_policy_ros.train.fused_norm import PADDED, STACKED
from wam_policy_ros.train.preset import TOY
from wam_policy_ros.train.runlog import Budget, RunLog
from wam_policy_ros.train.whole_clip import WholeClip

from .stand_in import episode, network, sources

QUIET = Recipe(batch=4, lr=3e-3, warmup=5, state_noise=0.0, latent_noise=0.0, report_s=1e9, save_s=1e9, ema=0.9)


def _trainer(made, found, folder, **options):
    return Trainer(made, found, QUIET, RunLog(folder, lambda line: None), seed=0, **options)


def test_the_loss_of_one_batch_falls(tmp_path):
    made = network()
    found = sources(made, tmp_path, count=1)
    trainer = _trainer(made, found, tmp_path)
    found.windows.anchors = found.windows.anchors[:1]
    before = trainer.validate(found)
    trainer.run(Budget(1e9), max_steps=80)
    after = trainer.validate(found)
    assert after["rows_0.6"] < 0.3 * before["rows_0.6"], (before, after)
    assert after["video_0.6"] < 0.95 * before["video_0.6"]
    assert not made.vae.training and all(not p.requires_grad for p in made.vae.parameters())


def test_a_training_that_was_stopped_goes_on_as_if_it_was_not(tmp_path):
    whole = network()
    _trainer(whole, sources(whole, tmp_path), tmp_path).run(Budget(1e9), max_steps=6)
    first = network()
    half = _trainer(first, sources(first, tmp_path), tmp_path)
    for _ in range(2):
        _step(half, 6)
    torch.save(half.state(), tmp_path / "half.pt")
    second = network(seed=1)
    second.vae.load_state_dict(first.vae.state_dict())
    rest = _trainer(second, sources(second, tmp_path), tmp_path)
    rest.restore(torch.load(tmp_path / "half.pt", weights_only=False))
    rest.run(Budget(1e9), max_steps=6)
    for (name, a), b in zip(whole.state_dict().items(), second.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


def _step(trainer: Trainer, of: int) -> None:
    """One step of a run that would make ``of``."""
    import math

    rate = QUIET.lr * min(1.0, (trainer.step + 1) / QUIET.warmup)
    rate *= max(0.5 * (1 + math.cos(math.pi * trainer.step / of)), 0.01)
    for group in trainer.optimiser.param_groups:
        group["lr"] = rate
    trainer._one()


def test_what_is_taken_in_later_is_trained_on_as_if_it_had_been_there_from_the_start(tmp_path):
    one, two = network(), network()
    early, late = sources(one, tmp_path, count=1), sources(one, tmp_path, count=3)
    grown, whole = _trainer(one, early, tmp_path), _trainer(two, late, tmp_path)
    grown.take(late)
    for trainer in (grown, whole):
        trainer.run(Budget(1e9), max_steps=4)
    for (name, a), b in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


def test_a_training_in_parts_is_the_training_in_one(tmp_path):
    """What stops and goes on within a process: rate, steps and what is said of each part."""
    one, two, kept = network(), network(), []
    found = sources(one, tmp_path, count=1)
    whole, parts = _trainer(one, found, tmp_path), _trainer(two, found, tmp_path, save=kept.append)
    # By steps, so that the rate is the same: the budget never ends.
    whole.run(Budget(1e9), max_steps=6)
    budget = Budget(1e9)
    for stop_at in (2, 4, 6):
        parts.run(budget, max_steps=6, stop_at=stop_at)
    parts.run(budget, until=0.0, max_steps=6)
    assert parts.step == 6
    assert kept[:3] == ["step 2, the end of a part", "step 4, the end of a part", "end"]
    for (name, a), b in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


def test_saved_weights_are_the_average(tmp_path):
    made, kept = network(), []
    found = sources(made, tmp_path, count=1)

    def save(why: str) -> None:
        kept.append(made.model.head.head.weight.detach().clone())

    trainer = _trainer(made, found, tmp_path, save=save, validation=found)
    trainer.run(Budget(1e9), max_steps=4)
    position = next(k for k, p in enumerate(trainer.average._live) if p is made.model.head.head.weight)
    assert torch.equal(kept[-1], trainer.average.values[position])
    assert not torch.equal(kept[-1], made.model.head.head.weight)
    assert made.training
    assert (tmp_path / "curves.jsonl").read_text().count("validation") == 1


def test_blocks_without_labels_do_not_count(tmp_path):
    made = network().eval()
    found = sources(made, tmp_path, count=1)
    batch = found.windows.batch(found.windows.anchors[:2])
    spoilt = batch.rows.clone()
    spoilt[:, 1:] = 1e3
    only = torch.zeros_like(batch.has_rows)
    only[:, 0] = True
    losses = []
    for rows in (batch.rows, spoilt):
        changed = type(batch)(**{**vars(batch), "rows": rows, "has_rows": only})
        generator = torch.Generator().manual_seed(0)
        losses.append(batch_loss(made, found, changed, QUIET, generator, sigma=0.5)[1]["rows"])
    assert torch.equal(losses[0], losses[1])


@torch.no_grad()
def test_prompts_of_a_batch_are_encoded_as_one_alone(tmp_path):
    made = network().eval()
    found = sources(made, tmp_path)
    w = found.windows
    picture = found.footage.video(torch.tensor([[0], [0], [30]]))[:, :, 0]
    prompts = torch.tensor([1, 0, 1])
    together = cross_keys(made, w.ids, w.mask, prompts, picture)
    from wam_policy_ros.engine.encode import PromptEncoder

    for row, number in enumerate(prompts.tolist()):
        alone = PromptEncoder(made)(w.ids[number : number + 1], w.mask[number : number + 1]).text_kv
        for layer, one in zip(together, alone, strict=True):
            torch.testing.assert_close(layer.text.k[row], one.k[0], atol=1e-5, rtol=1e-4)
    assert (together[0].text.k[0] - together[0].text.k[1]).abs().max() > 1e-3


def test_the_vae_learns_and_its_latents_have_unit_scale(tmp_path):
    found = sources(network(), tmp_path, count=1)
    vae = new_vae(TOY.network().vae, 0, torch.device("cpu"))
    pick = torch.tensor([5, 9])
    before = reconstruction(vae, found.footage, pick)[1]["all"]
    fit_vae(
        vae,
        found.footage,
        VAERecipe(batch=4, report_s=1e9),
        Budget(1e9),
        RunLog(tmp_path, lambda _: None),
        max_steps=25,
    )
    assert reconstruction(vae, found.footage, pick)[1]["all"] < 0.9 * before
    mean, std = latent_statistics_of(vae, found.footage, count=16)
    config = type(TOY.network()).from_config_json(TOY.config_json(mean, std))
    trained = VideoVAE(config.vae)
    trained.load_state_dict(vae.state_dict())
    with torch.no_grad():
        z = trained.encode(found.footage.observed_clip(found.footage.observable()))
    assert abs(float(z.mean())) < 0.2 and 0.7 < float(z.std()) < 1.4


@pytest.mark.parametrize("form", [STACKED, PADDED])
def test_a_whole_clip_is_encoded_and_decoded_as_its_chunks_are(form):
    torch.manual_seed(0)
    vae = VideoVAE(TOY.network().vae)
    whole = WholeClip(vae.model, form)
    clip, latents = torch.randn(2, 3, 9, 32, 64), torch.randn(2, 16, 3, 4, 8)
    z = vae.config.z_dim
    mean, inverse_std = latent_statistics(vae.config, clip)
    torch.testing.assert_close((whole.encode(clip)[:, :z] - mean) * inverse_std, vae.encode(clip), atol=1e-4, rtol=1e-4)
    shown = vae.decode((latents - mean) * inverse_std, clamp=False)
    torch.testing.assert_close(whole.decode(latents), shown, atol=1e-4, rtol=1e-4)
    # The gradients that training follows are those of the network that is exported.
    whole.encode(clip).square().mean().backward()
    fast = {n: p.grad.clone() for n, p in vae.named_parameters() if p.grad is not None}
    vae.zero_grad()
    stream = VAEStream()
    moments = []
    for part in (clip[:, :, :1], clip[:, :, 1:5], clip[:, :, 5:]):
        with stream.chunk():
            moments.append(vae.model.encode(part, stream))
    torch.cat(moments, dim=2).square().mean().backward()
    for name, p in vae.named_parameters():
        assert (p.grad is None) == (name not in fast)
        if p.grad is not None:
            torch.testing.assert_close(fast[name], p.grad, atol=1e-5, rtol=1e-3, msg=name)


def test_an_error_at_an_edge_and_on_a_thing_costs_more():
    wanted = torch.zeros(1, 3, 1, 32, 32)
    wanted[..., 12:16, 12:16] = 1.0
    recipe = VAERecipe()
    plain, thing = wanted.clone(), wanted.clone()
    plain[..., 24:28, 24:28] += 0.5  # on the table
    thing[..., 12:16, 12:16] -= 0.5
    assert busy(wanted)[..., 13, 13] > 5 * busy(wanted)[..., 30, 30]
    costs = [float(picture_loss(p, wanted, recipe)[0]) for p in (plain, thing)]
    assert costs[1] > 1.5 * costs[0], costs


def test_the_rows_of_a_policy_that_knows_its_windows_are_close_and_those_of_one_that_does_not_are_not(tmp_path):
    made = network()
    found = sources(made, tmp_path, count=1)
    found.windows.anchors = found.windows.anchors[:1]
    average = found.windows.average_rows()
    before = action_error(made.eval(), found, average)
    _trainer(made, found, tmp_path).run(Budget(1e9), max_steps=120)
    after = action_error(made.eval(), found, average)
    assert after["rad"] < 0.4 * before["rad"] and after["rad"] < after["hold_rad"], (before, after)
    assert after["rad"] <= after["rad_95"] and 0 <= after["gripper"] <= 1
    # Whoever holds is off by what the expert moves: rows in radians, on the executed rows only.
    batch = found.windows.batch(found.windows.anchors)
    e = episode(0)
    at = batch.observed[batch.has_rows].numpy() * TOY.stride
    moves = np.abs(e.label[at] - e.state[at][:, None])[:, : TOY.steps, :7].mean()
    assert after["hold_rad"] == pytest.approx(before["hold_rad"]) == pytest.approx(moves, rel=0.02)


FUSED = """
import torch
from wam_policy_ros.train import fused_norm as f
torch.manual_seed(0)
for channels in (8, 12):
    for form in (f.PADDED, f.STACKED):
        x = torch.randn(2 * 5, channels, 4, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
        gamma = torch.rand(channels).requires_grad_()
        plain = f.look_back(f.plain_norm_silu(x, gamma), 2, form)
        fused = f._Fused.apply(x, gamma, 2, form)
        torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-4)
        into = torch.randn_like(plain)
        for a, b in zip(*(torch.autograd.grad(y, (x, gamma), into) for y in (fused, plain)), strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
"""


def test_one_pass_of_norm_activation_and_past_computes_what_plain_operations_do():
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-c", FUSED], env=os.environ | {"TRITON_INTERPRET": "1"},
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
