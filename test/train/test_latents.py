"""Latents of footage that grows: what is known is kept, and the result is that of encoding everything."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from wam_policy_ros.contract.normalization import Statistics
from wam_policy_ros.model.tokenizer import UMT5Tokenizer
from wam_policy_ros.train import latents as module
from wam_policy_ros.train.footage import Footage
from wam_policy_ros.train.latents import Latents, encode_all
from wam_policy_ros.train.preset import OBSERVED, TOY
from wam_policy_ros.train.samples import Windows, statistics_of
from wam_policy_ros.train.vocabulary import write_tokenizer

from .stand_in import episode, network


@pytest.fixture
def grown(tmp_path):
    """A VAE, footage of two episodes that grew to four, windows before and after, and latents before."""
    vae, page = network().vae.eval(), TOY.embodiment
    write_tokenizer(tmp_path)
    tokens = UMT5Tokenizer.from_folder(tmp_path, TOY.text_len)
    footage = Footage(TOY, torch.device("cpu"))
    footage.add([episode(0), episode(1)])
    metadata = TOY.metadata(statistics_of(footage.episodes))
    statistics = Statistics.from_metadata(metadata, page.tag, state=page.state, action=page.action)
    before = Windows(footage, TOY, statistics, tokens, every=2)
    known = encode_all(vae, footage, before.anchors, batch=8, dtype=torch.float32)
    footage.add([episode(2), episode(3, steps=24)])
    return vae, footage, Windows(footage, TOY, statistics, tokens, every=2), known


def test_what_is_known_is_kept_and_the_rest_is_encoded(grown, monkeypatch):
    vae, footage, windows, known = grown
    counts, encode = [], module.normalised_latents
    monkeypatch.setattr(module, "normalised_latents", lambda v, clip: (counts.append(len(clip)), encode(v, clip))[1])
    found = encode_all(vae, footage, windows.anchors, batch=8, dtype=torch.float32, known=known)
    old = len(known.slot)
    new_frames = footage.frames - old - 2 * (OBSERVED - 1)
    assert sum(counts) == new_frames + int((windows.anchors >= old).sum())
    anew = encode_all(vae, footage, windows.anchors, batch=8, dtype=torch.float32)
    assert torch.equal(found.slot, anew.slot) and torch.equal(found.block[:old], known.block)
    torch.testing.assert_close(found.block, anew.block, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.first, anew.first, atol=1e-5, rtol=1e-5)
    picked = windows.anchors[[0, len(windows.anchors) // 2, -1]]
    torch.testing.assert_close(found.conditioning(picked), anew.conditioning(picked), atol=1e-5, rtol=1e-5)


def test_an_anchor_that_was_none_before_is_refused(grown):
    vae, footage, windows, known = grown
    lacking = dataclasses.replace(known, slot=known.slot.index_fill(0, windows.anchors[:1], -1))
    assert isinstance(lacking, Latents)
    with pytest.raises(ValueError, match="has no latents"):
        encode_all(vae, footage, windows.anchors, batch=8, dtype=torch.float32, known=lacking)
