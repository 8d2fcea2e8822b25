"""The kernels with other block sizes and warps than the planned ones, for choosing by measurement on a GPU.

Everything is compiled first, in threads: Triton gives up the interpreter's lock while it compiles. Each variant must
compute what the planned kernel does, and its time is of graph replays, as for the operations themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .kernel_cases import EPS, Inputs, Sizes, cross_arguments

if TYPE_CHECKING:
    from wam_policy_ros.engine.kernels.launch import Launch, Machine

_SETS = 3
# Text keys of a short instruction and of a long one.
TEXTS = (120, 512)
# Relative difference to the planned kernel: 8-bit values next to a rounding boundary, softmax summed in other blocks.
BOUND = 2e-2


class Variant(NamedTuple):
    """``launches``: the same kernel on several sets of inputs. The first variant of a name is the planned kernel."""

    name: str
    text: str
    launches: list[Launch]

    def work(self, i: int) -> None:
        self.launches[i % len(self.launches)].run()


class Shape(NamedTuple):
    """What is changed about a launch."""

    changes: dict[str, Any]
    warps: int
    options: dict[str, Any] = {}  # noqa: RUF012 (never written)


def variants(sizes: Sizes, device: torch.device, only: list[str]) -> Iterator[Variant]:
    """Per operation the planned kernel, then the others; operations whose name starts with a word of ``only``."""
    # Triton is imported here, not where there is none.
    from wam_policy_ros.engine.kernels.launch import machine_for

    make, machine = Inputs(sizes, device), machine_for(device)
    wide, ffn = (partial(_chunks, width=n) for n in (sizes.width, sizes.ffn))
    families: list[tuple[str, Callable[[], Launch], Callable[[Launch, Machine], Iterator[Shape]]]] = [
        ("residual_norm fp8", partial(_residual, make, machine, eight=True), wide),
        ("residual_norm bf16", partial(_residual, make, machine, eight=False), wide),
        ("gelu_quant fp8", partial(_gelu, make, machine), ffn),
        ("quantize_rows", partial(_quantize, make, machine), wide),
        ("rms_rstd", partial(_rstd, make, machine), wide),
        ("qk_norm_rope_store fp8", partial(_rope, make, machine), _heads),
        *((f"cross_attention {n} words", partial(_cross, make, machine, words=n), _blocks) for n in TEXTS),
    ]
    for name, plan, shapes in families:
        if not any(name.startswith(word) for word in only):
            continue
        planned = [plan() for _ in range(_SETS)]
        first = planned[0]
        yield Variant(name, _text(first, {}), planned)
        for shape in shapes(first, machine):
            changed = [_changed(x, shape, sizes) for x in planned]
            if _text(changed[0], shape.changes) != _text(first, shape.changes):
                yield Variant(name, _text(changed[0], shape.changes), changed)


def _changed(launch: Launch, shape: Shape, sizes: Sizes) -> Launch:
    grid = launch.grid
    if "BLOCK_M" in shape.changes:
        grid = (-(-sizes.tokens // shape.changes["BLOCK_M"]), *grid[1:])
    return replace(
        launch,
        grid=grid,
        arguments={**launch.arguments, **shape.changes},
        num_warps=shape.warps,
        options=shape.options,
    )


def _text(launch: Launch, changes: dict[str, Any]) -> str:
    named = changes or {k: launch.arguments[k] for k in _SHOWN if k in launch.arguments}
    words = [f"{k} {launch.arguments[k]}" for k in named if k not in ("COUNT", "REST_N")]
    words += [f"{k} {v}" for k, v in launch.options.items()]
    return " ".join([*words, f"warps {launch.num_warps}"])


_SHOWN = ("CHUNK", "BLOCK_M", "BLOCK_N", "STAGES", "BLOCK_H")


def compile_all(found: list[Variant], device: torch.device) -> dict[int, str]:
    """Compile every variant; errors by its place in ``found``."""

    def build(launch: Launch) -> str | None:
        try:
            # Each thread has a current device of its own.
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                launch.compile()
        except Exception as error:  # of a compiler for one of many variants: reported with it
            return _first_line(error)
        return None

    # Other inputs are often the same kernel.
    kernels = [_kernel(variant.launches[0]) for variant in found]
    once = {kernel: variant.launches[0] for kernel, variant in zip(kernels, found, strict=True)}
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        errors = dict(zip(once, threads.map(build, once.values()), strict=True))
    return {i: error for i, kernel in enumerate(kernels) if (error := errors[kernel]) is not None}


def _kernel(launch: Launch) -> str:
    """Equal for launches that are compiled to the same."""
    arguments = {k: v.dtype if isinstance(v, Tensor) else v for k, v in launch.arguments.items()}
    return repr((launch.kernel, arguments, launch.num_warps, launch.num_stages, launch.options))


def difference(variant: Variant, planned: Variant) -> float:
    """Relative, between the outputs of a variant and of the planned kernel on equal inputs; NaN is infinite."""
    got, wanted = (_output(v.launches[0]) for v in (variant, planned))
    error = float((got - wanted).norm() / wanted.norm())
    return error if error == error else float("inf")


def _output(launch: Launch) -> Tensor:
    held = {k: v.clone() for k in ("x_ptr",) if isinstance(v := launch.arguments.get(k), Tensor)}
    outputs = [launch.arguments[k] for k in ("out_ptr", "q_ptr", "k_ptr") if k in launch.arguments]
    for out in outputs:
        out.view(torch.uint8).fill_(0)
    replace(launch, arguments={**launch.arguments, **held}).run()
    return torch.cat([out.float().flatten() for out in outputs])


def measure_variants(
    found: list[Variant], device: torch.device, seconds: Callable[[Callable[[int], object]], float]
) -> list[dict[str, Any]]:
    """One row per variant: microseconds or why there are none, and the difference to the planned kernel."""
    failed = compile_all(found, device)
    rows = []
    planned: dict[str, Variant] = {}
    for i, variant in enumerate(found):
        first = planned.setdefault(variant.name, variant)
        row: dict[str, Any] = {"name": variant.name, "variant": variant.text, "planned": first is variant}
        try:
            if i in failed:
                row["us"] = f"not available: {failed[i]}"
            else:
                row["difference"] = difference(variant, first)
                row["us"] = round(seconds(variant.work) * 1e6, 2)
                if not row["difference"] <= BOUND:
                    row["us"] = f"wrong: {row['difference']:.1e} from the planned kernel, in {row['us']} us"
        except Exception as error:  # too many registers, too much shared memory: known when it is first launched
            row["us"] = f"not available: {_first_line(error)}"
        rows.append(row)
    return rows


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """For people: per operation the planned kernel, the best one and what it would gain, then the next ones."""
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = [row for row in rows if row["name"] == name]
        timed = sorted((row for row in mine if not isinstance(row["us"], str)), key=lambda row: row["us"])
        planned = next(row for row in mine if row["planned"])
        if planned not in timed:
            yield f"{name}: planned kernel {planned['us']}"
        elif timed[0] is planned:
            yield f"{name}: planned {planned['us']} us ({planned['variant']}) is the best of {len(timed)}"
        else:
            gain = planned["us"] / timed[0]["us"] - 1
            yield f"{name}: planned {planned['us']} us, {gain:+.1%} over {timed[0]['us']} us ({timed[0]['variant']})"
        yield from (f"    {row['us']:8.1f}  {row['variant']}" for row in timed[:4])
        yield from (f"    {row['variant']}: {row['us']}" for row in mine if str(row["us"]).startswith("wrong"))
        if len(timed) < len(mine):
            yield f"    {len(mine) - len(timed)} of {len(mine)} not available"


# -- shapes -------------------------------------------------------------------------------------------------------


def _chunks(launch: Launch, machine: Machine, *, width: int) -> Iterator[Shape]:
    """Rows in chunks: few elements past the end, no more than 100 in the registers of a thread."""
    for chunk in (512, 1024, 2048, 4096):
        count = -(-width // chunk)
        if count * chunk <= width * 1.21:
            for elements in (4, 8, 16):
                warps = chunk // elements // machine.warp_size
                if 1 <= warps <= 16 and count * elements <= 100:
                    yield Shape({"CHUNK": chunk, "COUNT": count}, warps)


def _heads(launch: Launch, machine: Machine) -> Iterator[Shape]:
    width = launch.arguments["BLOCK_D"]
    for heads in (2, 4, 8):
        for elements in (4, 8, 16):
            warps = heads * width // elements // machine.warp_size
            if launch.arguments["HEADS"] % heads == 0 and 1 <= warps <= 16:
                yield Shape({"BLOCK_H": heads}, warps)


def _blocks(launch: Launch, machine: Machine) -> Iterator[Shape]:
    """Queries of a program, keys of a block, warps, blocks fetched ahead."""
    from wam_policy_ros.engine.kernels.cross import rest_block

    nvidia = machine.backend == "cuda"
    size = launch.arguments["BLOCK_D"] * 2
    # Two programs of 64 queries on one multiprocessor hide each other's waits and fetch every key twice.
    sizes = (
        (128, 64, 256, (2, 3, 4)), (128, 128, 256, (2, 3)), (128, 32, 256, (3,)), (64, 64, 128, (2, 3)),
        (64, 32, 128, (3,)),
    )  # fmt: skip
    for m, n, threads, ahead in sizes:
        for stages in ahead if nvidia else (1, 2):
            if (m + 2 * n * stages) * size > machine.shared_bytes:
                continue
            rest = rest_block(launch.arguments["IMAGE_KEYS"], n)
            shape = {"BLOCK_M": m, "BLOCK_N": n, "REST_N": rest, "STAGES": stages}
            yield Shape(shape, machine.warps(threads))
            if nvidia and m == 64:  # three programs instead of two
                yield Shape(shape, machine.warps(threads), options={"maxnreg": 168})


# -- launches -----------------------------------------------------------------------------------------------------


def _residual(make: Inputs, machine: Machine, *, eight: bool) -> Launch:
    from wam_policy_ros.engine.kernels import norms
    from wam_policy_ros.engine.kernels.tensors import quantized_like

    s, mods = make.sizes, make.draw(2, 6, make.sizes.width, scale=0.01)
    x, y = make.draw(s.rows, s.width), make.product(s.width)
    return norms.plan_residual_norm(
        machine, x, y, mods[:, 2], quantized_like(x, make.fp8) if eight else torch.empty_like(x), shift=mods[:, 3],
        scale=mods[:, 4], weight=None, bias=None, eps=EPS, tokens=s.tokens, video_tokens=s.video_tokens,
        limit=make.fp8.max,
    )  # fmt: skip


def _gelu(make: Inputs, machine: Machine) -> Launch:
    from wam_policy_ros.engine.kernels import activation
    from wam_policy_ros.engine.kernels.tensors import quantized_like

    u = make.product(make.sizes.ffn)
    return activation.plan_rows(machine, u, quantized_like(u.raw, make.fp8), limit=make.fp8.max, gelu=True)


def _quantize(make: Inputs, machine: Machine) -> Launch:
    from wam_policy_ros.engine.kernels import activation
    from wam_policy_ros.engine.kernels.tensors import Product, quantized_like

    x = make.draw(make.sizes.rows, make.sizes.width)
    return activation.plan_rows(machine, Product(x), quantized_like(x, make.fp8), limit=make.fp8.max, gelu=False)


def _rstd(make: Inputs, machine: Machine) -> Launch:
    from wam_policy_ros.engine.kernels import norms

    q = make.draw(make.sizes.rows, make.sizes.width)
    return norms.plan_rms_rstd(machine, q, torch.empty(make.sizes.rows, device=make.device), EPS)


def _rope(make: Inputs, machine: Machine) -> Launch:
    from wam_policy_ros.engine.kernels import rope

    s = make.sizes
    qkv, weight = make.product(3 * s.width), make.draw(s.width)
    table = make.draw(s.tokens, s.head_dim // 2, dtype=torch.float32)
    q, k, v = (
        torch.zeros(s.branches, n, s.heads, s.head_dim, dtype=make.fp8.dtype, device=make.device)
        for n in (s.tokens, s.keys[0], s.keys[0])
    )
    where = (q, k, v, s.keys[0] - s.tokens, EPS, (30.0, 30.0, 30.0))
    return rope.plan_qk_norm_rope_store(machine, qkv, weight, weight, table, table, *where)


def _cross(make: Inputs, machine: Machine, *, words: int) -> Launch:
    from wam_policy_ros.engine.kernels import cross

    s = make.sizes
    *given, tokens = cross_arguments(make, words=words)
    out = torch.empty(s.rows, s.width, dtype=make.fp8.dtype, device=make.device)
    scale = torch.full((1,), 100.0, device=make.device)
    return cross.plan_cross_attention(machine, *(*given, out, tokens, scale, make.fp8.max))
