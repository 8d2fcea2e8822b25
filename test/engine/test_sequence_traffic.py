"""The tables of docs/parallel.md are what the formulas give. That these are what is sent: test_sequence_parallel.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from wam_policy_ros.engine.parallel.grid import Grid
from wam_policy_ros.engine.sequence_traffic import evaluation_bytes, prefill_bytes
from wam_policy_ros.engine.window_slots import SlotLayout
from wam_policy_ros.model.config import DiTConfig

PAGE = (Path(__file__).parents[2] / "docs/parallel.md").read_text(encoding="utf-8")
DIT = DiTConfig()
WIDTHS = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes(ranks, kind):
    w = WIDTHS[kind].itemsize
    one, first, block = (
        evaluation_bytes(DIT, ranks, kv_itemsize=w),
        *(prefill_bytes(DIT, ranks, frames, kv_itemsize=w) for frames in (1, 2)),
    )
    cells = " | ".join(f"{n / 1e6:.1f}" for n in (one, first, block, 8 * one + block))
    assert f"| {ranks} | {kind} | {cells} |\n" in PAGE
    assert evaluation_bytes(DIT, 1) == prefill_bytes(DIT, 1, 2) == 0


@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("b", [1, 2])
def test_formulas(n, b, kind):
    """As the page has them."""
    w, d, p, r = WIDTHS[kind].itemsize, 5120, 40 * b - (b - 1), 1760 // n
    how = {"branches": b, "kv_itemsize": w}
    with_video = (n - 1) * (w * d * (3 * p * r + p * (r + 25)) // n + 2 * 64 * b * r)
    without = (n - 1) * w * d * (3 * p * r + (p - b) * (r + 25) + 24) // n
    assert evaluation_bytes(DIT, n, **how) == with_video
    assert evaluation_bytes(DIT, n, **how, with_video=False) == without
    assert prefill_bytes(DIT, n, 2, **how) == (n - 1) * w * d * (3 * p * r + (p - b) * r) // n


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_memory_of_the_window(ranks):
    def size(kv_dtype: torch.dtype) -> float:
        layouts = (
            SlotLayout.of(
                DIT, branches=1, latent_frames=9, latent_hw=(44, 80), dtype=torch.bfloat16, kv_dtype=kv_dtype,
                device=torch.device("meta"), ranks=n,
            )
            for n in (ranks, DIT.num_heads)
        )  # fmt: skip
        some, least = (layout.nbytes for layout in layouts)
        # What is split is the window; the difference to 40 ranks is 1 / ranks - 1 / 40 of it.
        return (some - least) / (1 / ranks - 1 / DIT.num_heads) / ranks / 2**30

    assert f"| {ranks} | {size(torch.bfloat16):.2f} GiB | {size(torch.float8_e4m3fn):.2f} GiB |\n" in PAGE


def test_grids():
    for gpus in (2, 4, 8):
        guided, plain = (Grid.of(gpus, guided=guided) for guided in (True, False))
        line = f"| {gpus} | {guided.guidance} x {guided.sequence} | {plain.guidance} x {plain.sequence} |\n"
        assert line in PAGE
