"""The kernels with other block sizes and warps than the planned ones, for choosing by measurement on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .kernel_cases import EPS, Inputs, Sizes, cross_arguments

if TYPE_CHECKING:
    from wam_policy_ros.engine.kernels.launch import Launch

_SETS = 3


class Variant(NamedTuple):
    name: str
    text: str
    work: Callable[[int], object]


def _variant(name: str, launches: list[Launch], changes: dict[str, Any], warps: int, stages: int = 1) -> Variant:
    changed = [replace(x, arguments={**x.arguments, **changes}, num_warps=warps, num_stages=stages) for x in launches]
    text = " ".join([*(f"{k} {v}" for k, v in changes.items() if k != "COUNT"), f"warps {warps} stages {stages}"])
    return Variant(name, text, lambda i: changed[i % _SETS].run())


def variants(sizes: Sizes, device: torch.device) -> Iterator[Variant]:
    """8-bit outputs, the case that the engine uses most."""
    # Triton is imported here, not where there is none.
    from wam_policy_ros.engine.kernels import activation, cross, norms, rope
    from wam_policy_ros.engine.kernels.launch import machine_for
    from wam_policy_ros.engine.kernels.tensors import Product, quantized_like

    make, s, machine = Inputs(sizes, device), sizes, machine_for(device)
    mods = make.draw(2, 6, s.width, scale=0.01)
    modulated: dict[str, Any] = {"shift": mods[:, 3], "scale": mods[:, 4], "weight": None, "bias": None}
    modulated |= {"eps": EPS, "tokens": s.tokens, "video_tokens": s.video_tokens, "limit": make.fp8.max}
    launches = []
    for _ in range(_SETS):
        x, y = make.draw(s.rows, s.width), make.product(s.width, scaled=True)
        out = quantized_like(x, make.fp8)
        launches.append(norms.plan_residual_norm(machine, x, y, mods[:, 2], out, **modulated))
    yield from _chunks("residual_norm", launches, s.width)
    launches = []
    for _ in range(_SETS):
        u = make.product(s.ffn, scaled=True)
        launches.append(
            activation.plan_rows(machine, u, quantized_like(u.raw, make.fp8), limit=make.fp8.max, gelu=True)
        )
    yield from _chunks("gelu_quant", launches, s.ffn)
    launches = []
    for _ in range(_SETS):
        p = Product(make.draw(s.rows, s.width))
        launches.append(
            activation.plan_rows(machine, p, quantized_like(p.raw, make.fp8), limit=make.fp8.max, gelu=False)
        )
    yield from _chunks("quantize_rows", launches, s.width)
    launches = []
    for _ in range(_SETS):
        qkv, weight = make.product(3 * s.width, scaled=True), make.draw(s.width)
        table = make.draw(s.tokens, s.head_dim // 2, dtype=torch.float32)
        q, cache = (
            torch.zeros(s.branches, n, s.heads, s.head_dim, dtype=make.fp8.dtype, device=device)
            for n in (s.tokens, s.keys[0])
        )
        where = (q, cache, torch.zeros_like(cache), s.keys[0] - s.tokens, EPS, (30.0, 30.0, 30.0))
        launches.append(rope.plan_qk_norm_rope_store(machine, qkv, weight, weight, table, table, *where))
    for heads in (2, 4, 8):
        for warps in (1, 2, 4, 8):
            yield _variant("qk_norm_rope_store", launches, {"BLOCK_H": heads}, warps)
    launches = []
    for _ in range(_SETS):
        *given, tokens = cross_arguments(make, scaled=True)
        target = torch.empty(s.rows, s.width, dtype=make.fp8.dtype, device=device)
        scale = torch.full((1,), 100.0, device=device)
        launches.append(cross.plan_cross_attention(machine, *(*given, target, tokens, scale, make.fp8.max)))
    for m in (64, 128):
        grids = [replace(x, grid=(-(-s.tokens // m), *x.grid[1:])) for x in launches]
        for n in (32, 64, 128):
            for warps in (4, 8):
                for stages in (1, 2, 3):
                    yield _variant("cross_attention", grids, {"BLOCK_M": m, "BLOCK_N": n}, warps, stages)


def _chunks(name: str, launches: list[Launch], width: int) -> Iterator[Variant]:
    for chunk in (512, 1024, 2048, 4096):
        count = -(-width // chunk)
        for warps in (2, 4, 8, 16):
            # Between 4 and 32 elements of a chunk a thread; beyond that are spills or idle threads.
            if 4 <= chunk // (32 * warps) <= 32:
                yield _variant(name, launches, {"CHUNK": chunk, "COUNT": count}, warps)
