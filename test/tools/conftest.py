"""Fixtures of the tools' tests."""

from __future__ import annotations

from dataclasses import replace

import pytest


@pytest.fixture(scope="module")
def smaller_network():
    """``random_weights: tiny`` with pictures of 16x32: a tenth of the work in the VAE."""
    pytest.importorskip("torch")
    from wam_policy_ros.model.config import DreamZeroConfig

    usual = DreamZeroConfig.tiny()
    smaller = replace(usual, dit=replace(usual.dit, frame_seqlen=2), target_video_hw=(16, 32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DreamZeroConfig, "tiny", classmethod(lambda cls: smaller))
        yield smaller
