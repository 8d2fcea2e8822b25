"""The layer of training through the compiler's door: plain tensors in and out, the same numbers."""

from __future__ import annotations

import pytest
import torch

from wam_policy_ros.train import compiled
from wam_policy_ros.train.compiled import compiled_layer
from wam_policy_ros.train.fit import Recipe, batch_loss
from wam_policy_ros.train.preset import TOY

from .stand_in import network, sources

QUIET = Recipe(state_noise=0.0, latent_noise=0.0)


def test_the_compiled_layer_gives_the_loss_and_gradients_of_the_plain_one(tmp_path, monkeypatch):
    seen, said = [], []
    # The compiler itself takes a minute on a CPU; what surrounds it is what is tested.
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: _noting(function, seen))
    layer = compiled_layer(TOY, 2, torch.device("cpu"), said.append)
    assert layer is not compiled.run_layer and not said
    assert len(seen) == TOY.layers
    assert all(type(t) is torch.Tensor for call in seen for t in call)
    made = network()
    found = sources(made, tmp_path)
    made.requires_grad_(True)
    batch = found.windows.batch(found.windows.anchors[:2])
    results = []
    for run in (compiled.run_layer, layer):
        made.zero_grad()
        loss = batch_loss(made, found, batch, QUIET, torch.Generator().manual_seed(0), sigma=0.6, layer=run)[0]
        loss.backward()
        results.append((loss.item(), [p.grad.clone() for p in made.model.parameters() if p.grad is not None]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def _noting(function, seen):
    def counted(*args):
        out = function(*args)
        seen.append([t for t in (*args[1], *out) if t is not None])
        return out

    return counted


@pytest.mark.parametrize(
    ("compiler", "words"),
    [
        (lambda f: lambda *a: (_ for _ in ()).throw(RuntimeError("no such instruction")), "no such instruction"),
        (lambda f: lambda *a: tuple(None if t is None else 1.5 * t for t in f(*a)), "off by"),
    ],
)
def test_a_compiler_that_fails_or_computes_something_else_is_not_used(monkeypatch, compiler, words):
    said: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: compiler(function))
    assert compiled_layer(TOY, 2, torch.device("cpu"), said.append) is compiled.run_layer
    assert words in said[0]
