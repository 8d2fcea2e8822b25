"""Are the device's 3-D convolutions right, and which form of them is fast? Asked of the very shapes that will run.

Some versions of cuDNN give wrong bf16 results at some sizes, others are slow or take far more memory than in float32.
Each form of :mod:`.conv_plan` is compared with a sum of three float32 convolutions over the plane and timed on random
data; a form that is wrong is never chosen, and where none is right nothing is served.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wam_policy_ros.contract.errors import EngineError

from .conv_plan import FORMS, CausalConv, ConvKey, ConvPlan, Form, convolution_flags
from .kernels.conv3d_ops import norm_silu_window

MAX_RELATIVE_ERROR = 0.02
# Relative to float32: more than this is worth a warning.
WORKSPACE_FACTOR = 1.5


@dataclass(frozen=True)
class ConvResult:
    """One form of one convolution.

    Attributes:
        key: ``str(ConvKey)``, or the shape of a case of its own.
        form, dtype: what was run.
        relative_error: of the result to float32, ``|out - ref| / |ref|``; not finite where the result is not.
        convolution_ms: median; with_norm_ms: together with the pass that lays out its input.
        workspace_bytes: memory beyond input and output; None on a CPU.
    """

    key: str
    form: Form
    dtype: str
    relative_error: float
    convolution_ms: float
    with_norm_ms: float
    workspace_bytes: int | None

    @property
    def right(self) -> bool:
        return self.relative_error <= MAX_RELATIVE_ERROR


@dataclass(frozen=True)
class ConvReport:
    """What was found, JSON-serialisable with ``as_dict``."""

    plan: ConvPlan
    results: tuple[ConvResult, ...]
    warnings: tuple[str, ...]
    torch_version: str
    backend: str
    device: str

    def as_dict(self) -> dict[str, Any]:
        out = dataclasses.asdict(self)
        out["plan"]["forms"] = dict(self.plan.forms)
        return out


def measure_plan(
    keys: Sequence[ConvKey],
    height: int,
    width: int,
    *,
    frames: int,
    device: torch.device,
    dtype: torch.dtype,
    forms: Sequence[Form] = FORMS,
    benchmark: bool = False,
    repeats: int = 5,
) -> ConvReport:
    """Check and time every form at every shape, and choose the fastest right one.

    Args:
        keys: convolutions of the encoder. height, width: of the picture. frames: per pass.
        benchmark: as ``ConvPlan.benchmark``.

    Raises:
        EngineError: no form of a convolution is right on this device.
    """
    chosen: dict[str, Form] = {}
    results: list[ConvResult] = []
    base = ConvPlan(benchmark=benchmark)
    for key in keys:
        size = (frames, height // key.reduction, width // key.reduction)
        found = [probe(key, size, form, device=device, dtype=dtype, plan=base, repeats=repeats) for form in forms]
        results += found
        right = [r for r in found if r.right]
        _refuse_wrong(key, found)
        chosen[str(key)] = min(right, key=lambda r: r.with_norm_ms).form
    plan = ConvPlan(forms=chosen, benchmark=benchmark)
    warnings = [f"{r.key}, {r.form}: wrong results, not used" for r in results if not r.right]
    return ConvReport(plan, tuple(results), tuple(warnings), str(torch.__version__), backend_version(), str(device))


def checked_plan(
    plan: ConvPlan,
    keys: Sequence[ConvKey],
    height: int,
    width: int,
    *,
    frames: int,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[ConvPlan, list[str]]:
    """Check the forms a plan names at the shapes that will run; a wrong one is replaced by the next right one.

    Returns:
        The plan to run with, and a warning per replacement.

    Raises:
        EngineError: no form of a convolution is right on this device.
    """
    forms, warnings = dict(plan.forms), []
    for key in keys:
        size = (frames, height // key.reduction, width // key.reduction)
        planned = plan.form(key)
        found = []
        for form in (planned, *(f for f in FORMS if f != planned)):
            found.append(probe(key, size, form, device=device, dtype=dtype, plan=plan, repeats=1))
            if found[-1].right:
                break
        _refuse_wrong(key, found)
        if len(found) > 1:
            forms[str(key)] = found[-1].form
            error = f"relative error {found[0].relative_error:.3g}, torch {torch.__version__}, {backend_version()}"
            warnings.append(f"the convolution {key} is wrong as {planned} ({error}); {found[-1].form} is used")
    return dataclasses.replace(plan, forms=forms), warnings


def _refuse_wrong(key: ConvKey, found: Sequence[ConvResult]) -> None:
    if any(r.right for r in found):
        return
    raise EngineError(
        f"no form of the convolution {key} gives right results on this device; nothing is served",
        got=", ".join(f"{r.form}: relative error {r.relative_error:.3g}" for r in found),
        expected=f"at most {MAX_RELATIVE_ERROR} of float32",
        remedy=f"install another cuDNN (this is {backend_version()}), or run with dtype float32",
    )


def probe(
    key: ConvKey,
    size: tuple[int, int, int],
    form: Form,
    *,
    device: torch.device,
    dtype: torch.dtype,
    plan: ConvPlan,
    repeats: int = 5,
    seed: int = 0,
) -> ConvResult:
    """Check and time one form. ``size``: frames, height and width of the activation."""
    g = torch.Generator(device=device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=device).to(dtype)

    frames, height, width = size
    x = draw(1, frames, height, width, key.inputs)
    past = draw(1, 2, height, width, key.inputs)
    weight = draw(key.outputs, key.inputs, 3, 3, 3) / math.sqrt(27 * key.inputs)
    bias, gamma = draw(key.outputs), 1 + 0.1 * draw(key.inputs)
    conv = CausalConv(weight, bias, form)
    wrong = math.inf

    def lay_out() -> Tensor:
        return norm_silu_window(x, None, gamma, past, frames=frames, stacked=conv.stacked, stepwise=True)[1]

    with torch.inference_mode(), plan.flags():
        window = lay_out()
        before = _peak(device)
        out = conv(window)
        after = _peak(device)
        wrong = _relative_error(conv, window, out, weight, bias)
        alone = median_ms(lambda: conv(window), device, repeats)
        both = median_ms(lambda: conv(lay_out()), device, repeats)
    workspace = None if before is None or after is None else max(0, after - before - out.nbytes)
    return ConvResult(str(key), form, str(dtype).removeprefix("torch."), wrong, alone, both, workspace)


def _relative_error(conv: CausalConv, window: Tensor, out: Tensor, weight: Tensor, bias: Tensor) -> float:
    """Against float32, frame by frame: as a sum over the three taps, which no 3-D kernel touches."""
    error = reference = 0.0
    wide = torch.promote_types(out.dtype, torch.float32)
    frames = out.shape[1]
    # TF32 would compare one rounding with another.
    with convolution_flags(benchmark=False, deterministic=True, allow_tf32=False):
        for t in range(frames):
            if conv.stacked:
                taps = [s.contiguous() for s in window[:, t].chunk(3, dim=-1)]
            else:
                taps = [window[:, t + k] for k in range(3)]
            planes = [tap.permute(0, 3, 1, 2).to(wide).contiguous() for tap in taps]
            parts = [F.conv2d(p, weight[:, :, k].to(wide), padding=1) for k, p in enumerate(planes)]
            want = parts[0] + parts[1] + parts[2] + bias.to(wide).view(-1, 1, 1)
            got = out[:, t].permute(0, 3, 1, 2).to(wide)
            error += float((got - want).square().sum())
            reference += float(want.square().sum())
    result = math.sqrt(error / reference) if reference > 0 else math.inf
    return result if math.isfinite(result) else math.inf


def median_ms(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of ``run`` in milliseconds, two calls first that do not count. Events on a GPU."""
    times: list[float] = []
    for _ in range(2):
        run()
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def _peak(device: torch.device) -> int | None:
    """Highest memory since the last call."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def backend_version() -> str:
    """cuDNN or MIOpen and its version, as PyTorch reports it."""
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if version is None:
        return "no cuDNN"
    return f"MIOpen {version}" if torch.version.hip else f"cuDNN {version}"


# -- plain conv3d calls, for shapes that are not the encoder's -----------------------------------------------------


@dataclass(frozen=True)
class PlainConv:
    """A ``torch.nn.functional.conv3d`` with padding that keeps the size.

    Attributes:
        inputs, outputs: channels. size: frames, height, width. kernel: of the same three axes.
    """

    inputs: int
    outputs: int
    size: tuple[int, int, int]
    kernel: tuple[int, int, int]


def check_conv3d(
    case: PlainConv, *, device: torch.device, dtype: torch.dtype, channels_last: bool, repeats: int = 3
) -> ConvResult:
    """Compare one conv3d call with float32 convolutions over the plane, and time it."""
    g = torch.Generator(device=device).manual_seed(0)
    layout = torch.channels_last_3d if channels_last else torch.contiguous_format
    x = torch.randn(1, case.inputs, *case.size, generator=g, device=device, dtype=dtype).contiguous(
        memory_format=layout
    )
    fan_in = case.inputs * math.prod(case.kernel)
    weight = torch.randn(case.outputs, case.inputs, *case.kernel, generator=g, device=device) / math.sqrt(fan_in)
    weight = weight.to(dtype).contiguous(memory_format=layout)
    padding = tuple(k // 2 for k in case.kernel)
    with torch.inference_mode():
        _peak(device)
        base = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        out = F.conv3d(x, weight, padding=padding)
        peak = _peak(device)
        error = _plane_error(case, x, weight, out)
        ms = median_ms(lambda: F.conv3d(x, weight, padding=padding), device, repeats)
    name = f"{case.inputs}->{case.outputs}, {'x'.join(map(str, case.size))}, kernel {'x'.join(map(str, case.kernel))}"
    workspace = None if peak is None else max(0, peak - base - out.nbytes)
    form: Form = "channels_last" if channels_last else "contiguous"
    return ConvResult(name, form, str(dtype).removeprefix("torch."), error, ms, ms, workspace)


def _plane_error(case: PlainConv, x: Tensor, weight: Tensor, out: Tensor) -> float:
    error = reference = 0.0
    frames, reach = case.size[0], case.kernel[0] // 2
    padding = (case.kernel[1] // 2, case.kernel[2] // 2)
    with convolution_flags(benchmark=False, deterministic=True, allow_tf32=False):
        for t in range(frames):
            want: Tensor | float = 0.0
            for k in range(case.kernel[0]):
                if 0 <= (source := t + k - reach) < frames:
                    plane = x[:, :, source].float().contiguous()
                    want = want + F.conv2d(plane, weight[:, :, k].float().contiguous(), padding=padding)
            assert isinstance(want, Tensor)
            error += float((out[:, :, t].float() - want).square().sum())
            reference += float(want.square().sum())
    result = math.sqrt(error / reference) if reference > 0 else math.inf
    return result if math.isfinite(result) else math.inf


def compare_with_float32(half: ConvResult, full: ConvResult) -> list[str]:
    """Warnings where a half-precision convolution costs more than the float32 one."""
    out = []
    where = f"{half.key}, {half.form}, torch {torch.__version__}, {backend_version()}"
    if half.convolution_ms > full.convolution_ms:
        out.append(
            f"conv3d in {half.dtype} is slower than in float32 "
            f"({half.convolution_ms:.2f} ms, {full.convolution_ms:.2f} ms): {where}"
        )
    if half.workspace_bytes is not None and full.workspace_bytes is not None:
        floor = 64 << 20  # below this the allocator's rounding is what is compared
        if half.workspace_bytes > max(WORKSPACE_FACTOR * full.workspace_bytes, floor):
            out.append(
                f"conv3d in {half.dtype} takes {half.workspace_bytes / 2**20:.0f} MiB of workspace, "
                f"{full.workspace_bytes / 2**20:.0f} MiB in float32: {where}"
            )
    return out
