"""Shapes at which 3-D convolutions of published cuDNN versions were wrong, slow or greedy."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from wam_policy_ros.engine.conv_check import ConvResult, PlainConv, check_conv3d, compare_with_float32

# Wrong in bf16 with cuDNN 9.10.2 (pytorch/pytorch#163539): the first at more than 2^31 bytes, the second is this VAE's.
LARGE = PlainConv(16, 16, (124, 1282, 722), (1, 3, 3))
SERVED = PlainConv(96, 96, (4, 176, 320), (3, 3, 3))
# Slow and greedy in bf16 with cuDNN 9.8 to 9.14 (pytorch/pytorch#166643).
COST = PlainConv(128, 128, (4, 176, 320), (3, 3, 3))
SMALL = PlainConv(8, 8, (4, 16, 24), (3, 3, 3))


def check_cases(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Results, warnings and what did not fit. ``served``: this network runs such a shape, so it must be right."""
    results: list[dict[str, Any]] = []
    warnings: list[str] = []
    skipped: list[str] = []

    def check(case: PlainConv, kind: torch.dtype, channels_last: bool, served: bool) -> ConvResult:
        result = check_conv3d(case, device=device, dtype=kind, channels_last=channels_last)
        results.append(dataclasses.asdict(result) | {"right": result.right, "served": served})
        if not result.right:
            warnings.append(f"WRONG: {result.key}, {result.form}, {result.dtype}: {result.relative_error:.3g}")
        return result

    if device.type != "cuda":
        for channels_last in (False, True):
            check(SMALL, dtype, channels_last, True)
        return {"results": results, "warnings": warnings, "skipped": ["larger cases: on a GPU only"]}
    needed = 6 * LARGE.inputs * LARGE.size[0] * LARGE.size[1] * LARGE.size[2] * dtype.itemsize
    if torch.cuda.mem_get_info(device)[0] > needed:
        for channels_last in (False, True):
            check(LARGE, dtype, channels_last, False)
        torch.cuda.empty_cache()
    else:
        skipped.append(f"the large case: it needs {needed / 2**30:.0f} GiB of free memory")
    for channels_last in (False, True):
        check(SERVED, dtype, channels_last, True)
        half, full = (check(COST, kind, channels_last, False) for kind in (dtype, torch.float32))
        if dtype != torch.float32:
            warnings += compare_with_float32(half, full)
    return {"results": results, "warnings": warnings, "skipped": skipped}
