"""Compile every kernel for the architectures the package names, without a GPU. Prints one JSON line per kernel.

A program of its own: the interpreter, which the other tests use, replaces Triton's language in its process.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from wam_policy_ros.engine.fp8 import fp8_for_architecture
from wam_policy_ros.engine.kernels import activation, cross, norms, rope, swap
from wam_policy_ros.engine.kernels.launch import MACHINES, Launch, Machine
from wam_policy_ros.engine.kernels.tensors import Product, quantized_like, words

BF16, F32 = torch.bfloat16, torch.float32
NAMES = {
    BF16: "*bf16", F32: "*fp32", torch.int32: "*i32", torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e4m3fnuz: "*fp8e4b8", torch.int64: "*i64",
}  # fmt: skip
# The 14B network with both guidance branches.
B, L, VIDEO, H, DH, FFN, EPS = 2, 1785, 1760, 40, 128, 13824, 1e-6
D, M = H * DH, B * L


def _empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _product(columns: int) -> Product:
    return Product(_empty(M, columns), _empty(columns))


def launches(name: str, machine: Machine) -> Iterator[tuple[str, Launch]]:
    """Every kernel in every combination of dtypes that the engine uses."""
    hip = machine.backend == "hip"
    fp8 = fp8_for_architecture(machine.backend, str(machine.arch) if hip else divmod(int(machine.arch), 10))
    x, groups = _empty(M, D), _empty(2, D)
    sizes = {"eps": EPS, "tokens": L, "video_tokens": VIDEO, "limit": fp8.max}
    modulation = {"shift": groups, "scale": groups, "weight": None, "bias": None}
    affine = {"shift": None, "scale": None, "weight": _empty(D), "bias": _empty(D)}
    for kind, out in (("bf16", x), ("fp8", quantized_like(x, fp8))):
        y, gate = _product(D), groups
        yield f"residual_norm gated {kind}", norms.plan_residual_norm(machine, x, y, gate, out, **modulation, **sizes)
        yield f"residual_norm affine {kind}", norms.plan_residual_norm(machine, x, y, None, out, **affine, **sizes)
        u, scaled = quantized_like(_empty(M, FFN), fp8) if kind == "fp8" else _empty(M, FFN), kind == "fp8"
        yield f"gelu {kind}", activation.plan_rows(machine, _product(FFN), u, limit=fp8.max, gelu=True)
        dtype = fp8.dtype if scaled else BF16
        q, cache = _empty(B, L, H, DH, dtype=dtype), _empty(B, 7945, H, DH, dtype=dtype)
        qkv, weight, table = _product(3 * D), _empty(D), _empty(L, DH // 2, dtype=F32)
        scales = (16.0, 16.0, 16.0) if scaled else None
        yield (
            f"qk_norm_rope_store {kind}",
            rope.plan_qk_norm_rope_store(machine, qkv, weight, weight, table, table, q, cache, cache, 880, EPS, scales),
        )
        text, image, length = _empty(B, H, 512, DH), _empty(1, H, 257, DH), _empty(B, dtype=torch.int32)
        yield (
            f"cross_attention {kind}",
            cross.plan_cross_attention(
                machine, _empty(M, D), _empty(M, dtype=F32), text, text, length, _empty(B, dtype=F32),
                image, image, _empty(M, D, dtype=dtype), L, _empty(1, dtype=F32) if scaled else None, fp8.max,
            ),
        )  # fmt: skip
        for ranks in (2, 8):
            own, run = H // ranks, VIDEO // ranks
            received, sent = (
                words(_empty(*s, own, DH, dtype=dtype)) for s in ((ranks, 3, B, run), (ranks, B, run + 25))
            )
            local = words(_empty(3, B, run + 25, H, DH, dtype=dtype)[:, :, :, own : 2 * own])
            mine, window = (words(_empty(B, n, own, DH, dtype=dtype)) for n in (L, 7945))
            into = (mine, window[:, :L], window[:, :L])
            yield f"unpack_heads {kind} {ranks}", swap.plan_unpack_heads(machine, received, local, *into, VIDEO)
            yield f"pack_tokens {kind} {ranks}", swap.plan_pack_tokens(machine, mine, sent, VIDEO)
    yield "norm only", norms.plan_residual_norm(machine, x, None, None, quantized_like(x, fp8), **modulation, **sizes)
    yield "rms_rstd", norms.plan_rms_rstd(machine, x, _empty(M, dtype=F32), EPS)
    wide = _empty(M, FFN, dtype=F32)
    yield "quantize_rows", activation.plan_rows(machine, Product(x), quantized_like(x, fp8), limit=fp8.max, gelu=False)
    yield (
        "quantize_rows float32",
        activation.plan_rows(machine, Product(wide), quantized_like(wide, fp8), limit=fp8.max, gelu=False),
    )


def compiled(launch: Launch, machine: Machine) -> dict[str, Any]:
    """Compile as the launcher would: same constants, same warps, pointers and multiples of 16 marked as such."""
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        aligned = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = NAMES[value.dtype]
        else:
            signature[parameter.name] = "i32" if isinstance(value, int) else "fp32"
        if aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, **launch.options}
    target = GPUTarget(machine.backend, machine.arch, machine.warp_size)
    kernel = triton.compile(ASTSource(launch.kernel, signature, constants, attributes), target=target, options=options)
    text = kernel.asm["ptx"] if "ptx" in kernel.asm else kernel.asm["amdgcn"]
    narrowing = [s for s in text.splitlines() if "cvt." in s and ".e4m3x2.f32" in s]
    return {
        "shared": kernel.metadata.shared,
        "threads": launch.num_warps * machine.warp_size,
        "limit": launch.arguments.get("limit"),
        "saturating": bool(narrowing) and all(".satfinite." in s for s in narrowing),
    } | _wide_accesses(text)


def _wide_accesses(text: str) -> dict[str, int]:
    """How many loads from memory are 16 bytes wide, and how many are narrower than 4 bytes a thread and access."""
    lines = [line.strip() for line in text.splitlines()]
    loads = [s for s in lines if "ld.global" in s or s.startswith(("global_load", "buffer_load"))]
    return {"loads": len(loads), "wide": sum(any(w in s for w in (".v4.b32", ".v2.b64", "dwordx4")) for s in loads)}


def main(names: list[str]) -> int:
    for name in names or list(MACHINES):
        machine = MACHINES[name]
        for kernel, launch in launches(name, machine):
            line: dict[str, object] = {"machine": name, "kernel": kernel}
            try:
                line |= compiled(launch, machine)
            except Exception:
                line["error"] = traceback.format_exc()
            print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
