"""The closed form against the published counts and against PyTorch's counter on the tiny network."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from wam_policy_ros.model.attention import CrossKV
from wam_policy_ros.model.config import DreamZeroConfig
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.tools.bench_suite import flops

BIG = DreamZeroConfig.dreamzero_14b()
SMALL = DreamZeroConfig.tiny()
T = 1e12


# -- DreamZero spec 9.2 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("position", "frames", "before", "evaluation", "prefill"),
    [(1, 1, 0, 47.70, 22.23), (2, 2, 880, 50.27, 46.99), (3, 2, 2640, 52.84, 49.53), (4, 2, 4400, 55.42, 52.07)],
)
def test_published_counts_of_the_dit(position, frames, before, evaluation, prefill):
    assert flops.evaluation(BIG, before + frames * 880).total / T == pytest.approx(evaluation, abs=0.03)
    whole = flops.prefill(BIG, frames, before, whole=True)
    assert whole.total / T == pytest.approx(prefill, abs=0.03)
    needed = flops.prefill(BIG, frames, before)
    assert 0.97 < needed.total / whole.total < 0.985  # "about 2 %" of the spec
    one = flops.step_stages(BIG, position, 8, 1, (352, 640))
    evaluated = flops.evaluation(BIG, before + frames * 880).total
    assert one["denoise"] == 8 * evaluated and one["prefill"] == needed.total


@pytest.mark.parametrize(("position", "frames", "before"), [(1, 1, 0), (4, 2, 4400)])
def test_what_is_common_or_unwatched_is_counted_once_or_not_at_all(position, frames, before):
    cached, tokens = before + frames * 880, 1785
    one, two, some, blind = (
        flops.step_stages(BIG, position, 8, branches, (352, 640), guided_evaluations=guided, want_video=video)
        for branches, guided, video in ((1, 0, True), (2, 8, True), (2, 3, True), (2, 7, False))
    )
    evaluated, same = flops.evaluation(BIG, cached).total, flops.common(BIG, tokens, cached + tokens).total
    assert two["denoise"] == 16 * evaluated - 8 * same and some["denoise"] == 11 * evaluated - 3 * same
    assert blind["denoise"] == 15 * evaluated - 7 * same - flops.unwatched(BIG, cached).total
    assert two["prefill"] == 2 * one["prefill"] - flops.common(BIG, frames * 880, cached).total
    # The first layer's share of 40 is less than whole; of the last layer all but keys and values goes.
    assert 0.005 < same / (2 * evaluated) < 0.5 / 40 and 0.017 < flops.unwatched(BIG, cached).total / evaluated < 1 / 40


def test_published_counts_of_the_encoders():
    assert flops.vae_encode(BIG.vae, 9, 352, 640) / T == pytest.approx(10.57, abs=0.01)
    assert flops.vae_encode(BIG.vae, 33, 352, 640) / T == pytest.approx(37.74, abs=0.03)
    assert flops.vae_encode(BIG.vae, 1, 352, 640) / T == pytest.approx(1.52, abs=0.01)
    assert flops.image_encoder(BIG.image) / T == pytest.approx(0.32, abs=0.01)
    assert flops.text_encoder(BIG.text) / T == pytest.approx(4.84, abs=0.03)
    assert (flops.text_keys(BIG.dit) + flops.image_keys(BIG.dit)) / T == pytest.approx(3.225 + 0.05, abs=0.03)


# -- PyTorch's counter ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def network():
    return DreamZero.with_random_weights(SMALL)


def _convolution(x_shape, w_shape, *rest, out_shape=None, **options) -> int:
    return conv_flop_count(x_shape, w_shape, out_shape)


# The counter knows convolutions by their general name alone; on a CPU, those of one clip are called directly.
UNCOUNTED = {torch.ops.aten.mkldnn_convolution: _convolution}


def _counted(function) -> int:
    counter = FlopCounterMode(display=False, custom_mapping=UNCOUNTED)
    with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH), counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("cached", [0, 28, 84])
def test_evaluation_and_prefill_against_the_counter(network, cached):
    dit, cfg = network.model, SMALL.dit
    text, image = dit.text_kv(torch.randn(1, cfg.text_len, cfg.text_dim)), dit.image_kv(torch.randn(1, 257, 40))
    cross = [CrossKV(t, i) for t, i in zip(text, image, strict=True)]
    latents = torch.randn(1, 16, 2, 8, 14)
    y = torch.randn(1, 20, 2, 8, 14)
    past = None
    if cached:
        heads = torch.randn(1, cached, cfg.num_heads, cfg.head_dim)
        past = [(heads, heads)] * cfg.num_layers
        past = [type(text[0])(*p) for p in past]
    steps, rows = torch.tensor([[5, 5]]), torch.full((1, 24), 5)

    def evaluate():
        time = dit.time_conditioning(steps, rows)
        table = dit.rotary_table(1, 2, 8, 14, registers=True)
        dit(latents, y, time, table, cross, past=past, action=torch.randn(1, 24, 32), timestep_action=rows,
            state=torch.randn(1, 1, 64))  # fmt: skip

    def prefill():
        time = dit.time_conditioning(steps)
        dit(latents, y, time, dit.rotary_table(1, 2, 8, 14, registers=False), cross, past=past)

    assert flops.evaluation(SMALL, cached).total == _counted(evaluate)
    assert flops.prefill(SMALL, 2, cached, whole=True).total == _counted(prefill)


def test_encoders_against_the_counter(network):
    ids = torch.ones(1, SMALL.text.text_len, dtype=torch.int64)
    assert flops.text_encoder(SMALL.text) == _counted(lambda: network.text_encoder(ids, ids))
    assert flops.image_encoder(SMALL.image) == _counted(lambda: network.image_encoder(torch.randn(1, 3, 64, 112)))
    states = torch.randn(1, SMALL.dit.text_len, SMALL.dit.text_dim)
    assert flops.text_keys(SMALL.dit) == _counted(lambda: network.model.text_kv(states))
    assert flops.image_keys(SMALL.dit) == _counted(lambda: network.model.image_kv(torch.randn(1, 257, 40)))
    for frames in (1, 5, 9):
        clip = torch.randn(1, 3, frames, 64, 112)
        assert flops.vae_encode(SMALL.vae, frames, 64, 112) == _counted(lambda c=clip: network.vae.encode(c))
