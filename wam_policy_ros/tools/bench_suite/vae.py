"""``wam bench vae``: the fast encoder against the plain one at the sizes that run, on random weights.

Times are medians on the device's clock. *graph*: the same call replayed from a CUDA graph. Errors are to the plain
encoder in float32 without TF32, ``|a - b| / |b|``, so the plain encoder's own error in bf16 is the yardstick.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from wam_policy_ros.contract.embodiments import DROID
from wam_policy_ros.engine.build import resolve_device, resolve_dtype
from wam_policy_ros.engine.conv_check import ConvReport, measure_plan
from wam_policy_ros.engine.conv_plan import ConvPlan, Form, convolution_flags
from wam_policy_ros.engine.device_resize import DeviceMosaic
from wam_policy_ros.engine.encode import encode_first_frame, expand_observation
from wam_policy_ros.engine.fast_encode import FastFirstFrame
from wam_policy_ros.engine.fast_vae import FastVAE, conv_keys
from wam_policy_ros.engine.preprocess import stitch_views, to_model_video
from wam_policy_ros.model.config import DreamZeroConfig
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.model.image_encoder import ImageEncoder
from wam_policy_ros.model.vae import VideoVAE
from wam_policy_ros.tools.provenance import provenance

from .clock import median_seconds
from .conv_cases import check_cases
from .records import write_json

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--network", choices=["tiny", "14b"], default="tiny", help="random weights of this size")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--benchmark", action="store_true", help="also: let cuDNN (MIOpen) time its algorithms")
    parser.add_argument("--kernels", action="store_true", help="also: the kernels of a pass and their times")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")


def run(args: argparse.Namespace) -> int:
    device = resolve_device(args.device)
    bench = Bench(args.network, device, resolve_dtype(args.dtype, device), args.repeats)
    report = bench.measure(benchmark=args.benchmark, kernels=args.kernels)
    print(summary(report))
    if args.json:
        write_json(report, args.json)
        print(f"written: {args.json}")
    return 0 if report["ok"] else 1


class Bench:
    """Networks, inputs and references of one run."""

    def __init__(self, network: str, device: torch.device, dtype: torch.dtype, repeats: int) -> None:
        self.device, self.dtype, self.repeats, self.name = device, dtype, repeats, network
        big = network == "14b"
        config = DreamZeroConfig.dreamzero_14b() if big else DreamZeroConfig.tiny()
        self.size = (352, 640) if big else (32, 48)
        self.num_frames = config.num_frames
        self.network = _encoders(config, device, dtype)
        self.vae = self.network.vae
        g = torch.Generator(device=device).manual_seed(1)

        def pictures(count: int) -> Tensor:
            images = torch.randint(0, 256, (1, count, *self.size, 3), generator=g, device=device, dtype=torch.uint8)
            return to_model_video(images, dtype)

        self.frame = pictures(1)
        self.clip = expand_observation(pictures(4), 2)
        grey = torch.zeros_like(self.frame).expand(-1, -1, self.num_frames - 1, -1, -1)
        self.conditioning = torch.cat([self.frame, grey], dim=2)

    def measure(self, *, benchmark: bool, kernels: bool) -> dict[str, Any]:
        """JSON-serialisable."""
        begin = time.perf_counter()
        with torch.inference_mode():
            cases = self._step("conv3d cases", lambda: check_cases(self.device, self.dtype))
            plans = self._step("plans", lambda: self._plans(benchmark))
            references = self._step("float32", self._references)
            plain = self._step("plain", lambda: self._plain(references))
            fast = [self._step(name, partial(self._fast, name, plan, references)) for name, plan in plans.items()]
            first = self._step("first frame", lambda: self._first_frame(plans["measured"].plan))
            mosaic = self._step("preprocess", self._mosaic)
            traced = self._kernels(plans["measured"].plan) if kernels else None
        exact = all(f["pieces_equal_whole"] and f["graph_equals_eager"] is not False for f in fast)
        return {
            "network": f"random {self.name}",
            "dtype": str(self.dtype).removeprefix("torch."),
            "size": self.size,
            "conv3d_cases": cases,
            "plans": {name: report.as_dict() for name, report in plans.items()},
            "plain": plain,
            "fast": fast,
            "first_frame": first,
            "preprocess": mosaic,
            "kernels": traced,
            "ok": exact and all(c["right"] for c in cases["results"] if c["served"]),
            "seconds": round(time.perf_counter() - begin, 1),
            "provenance": provenance(self.device),
        }

    # -- parts ----------------------------------------------------------------------------------------------------

    def _plans(self, benchmark: bool) -> dict[str, ConvReport]:
        keys, (height, width) = conv_keys(self.vae), self.size

        def measured(frames: int, benchmark: bool = False) -> ConvReport:
            return measure_plan(
                keys, height, width, frames=frames, device=self.device, dtype=self.dtype, benchmark=benchmark
            )

        out = {"measured": measured(2), "measured, 8 frames": measured(8)}
        if benchmark:
            out["measured, library's own search"] = measured(2, True)
        forms: tuple[Form, ...] = ("channels_last", "stacked")
        for form in forms:
            out[form] = ConvReport(ConvPlan(default=form), (), (), "", "", str(self.device))
        return out

    def _references(self) -> dict[str, Tensor]:
        full = type(self.vae)(self.vae.config).requires_grad_(False).to(self.device)
        full.load_state_dict(self.vae.state_dict())
        with convolution_flags(benchmark=False, deterministic=True, allow_tf32=False):
            return {"clip": full.encode(self.clip.float()), "conditioning": full.encode(self.conditioning.float())}

    def _plain(self, references: dict[str, Tensor]) -> Row:
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

        def conditioning() -> Tensor:
            with autocast:
                return self.vae.encode(self.conditioning)

        return {
            "clip": self._timed(lambda: self.vae.encode(self.clip), references["clip"]),
            "conditioning": self._timed(conditioning, references["conditioning"]),
        }

    def _fast(self, name: str, report: ConvReport, references: dict[str, Tensor]) -> Row:
        row: Row = {"plan": name}
        stepwise = self.dtype != torch.bfloat16
        for pieces in (2, 4, None):
            vae = FastVAE(self.vae, plan=report.plan, pieces=pieces)
            key = f"clip, pieces of {pieces or 8}"
            row[key] = self._timed(partial(vae.encode, self.clip), references["clip"], graph=True)
        vae = FastVAE(self.vae, plan=report.plan)
        row["conditioning"] = self._timed(
            lambda: vae.encode_conditioning(self.frame, self.num_frames, stepwise=stepwise),
            references["conditioning"],
            graph=True,
        )
        state, latent = vae.begin(self.clip[:, :, :1])
        states, latents = [state], [latent]
        for t in range(1, 9, 2):
            state, more = vae.push(states[-1].compact(), self.clip[:, :, t : t + 2])
            states.append(state)
            latents += [] if more is None else [more]
        row["pieces_equal_whole"] = torch.equal(torch.cat(latents, dim=2), vae.encode(self.clip))
        row["graph_equals_eager"] = row["clip, pieces of 2"]["graph_equals_eager"]
        after_f1, after_f2 = states[2].compact(), states[3].compact()
        row["state_MiB"] = round(after_f2.nbytes / 2**20, 1)
        del states, state
        row["first frame of a clip"] = self._timed(lambda: vae.begin(self.clip[:, :, :1])[1], None, graph=True)
        row["last 4 of 9"] = self._timed(lambda: vae.push(after_f1, self.clip[:, :, 5:])[1], None, graph=True)
        row["last 2 of 9"] = self._timed(lambda: vae.push(after_f2, self.clip[:, :, 7:])[1], None, graph=True)
        row["compact"] = self._timed(lambda: vae.push(after_f1, self.clip[:, :, 5:7])[0].compact().memory[0], None)
        twin = FastVAE(self.vae, plan=report.plan, plain=True)
        row["last 2 of 9, twins"] = self._timed(lambda: twin.push(after_f2, self.clip[:, :, 7:])[1], None, graph=True)
        return row

    def _first_frame(self, plan: ConvPlan) -> Row:
        fast = FastFirstFrame(self.network, FastVAE(self.vae, plan=plan))
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

        def clip() -> Tensor:
            with autocast:
                return self.network.image_encoder(self.frame.transpose(1, 2))

        return {
            "plain": self._timed(lambda: encode_first_frame(self.network, self.frame).ys, None),
            "fast": self._timed(lambda: fast(self.frame).ys, None, graph=True),
            "clip alone": self._timed(clip, None, graph=True),
        }

    def _mosaic(self) -> Row:
        rng = np.random.default_rng(0)
        views = {c.name: rng.integers(0, 256, (4, c.height, c.width, 3), dtype=np.uint8) for c in DROID.cameras}
        newest = {name: v[-1:] for name, v in views.items()}
        mosaic = DeviceMosaic(DROID, self.device)
        calls: dict[str, Callable[[], Tensor]] = {
            "host, 4 frames": lambda: stitch_views(views, DROID, self.device),
            "device, 4 frames": lambda: mosaic(views),
            "host, 1 frame": lambda: stitch_views(newest, DROID, self.device),
            "device, 1 frame": lambda: mosaic(newest),
        }
        row: Row = {"equal": mosaic.matches_host(), "cpu_threads": torch.get_num_threads()}
        for name, call in calls.items():
            row[name] = self._host_ms(call)
        return row

    def _kernels(self, plan: ConvPlan) -> dict[str, list[Row]]:
        """Longest kernels of one pass."""
        if self.device.type != "cuda":
            return {}
        from torch.profiler import ProfilerActivity, profile

        vae, out = FastVAE(self.vae, plan=plan), {}
        whole = FastVAE(self.vae, plan=plan, pieces=None)
        state = vae.begin(self.clip[:, :, :1])[0]
        for t in range(1, 7, 2):
            state = vae.push(state, self.clip[:, :, t : t + 2])[0]
        calls: dict[str, Callable[[], object]] = {
            "last 2 of 9": lambda: vae.push(state, self.clip[:, :, 7:]),
            "clip, pieces of 8": lambda: whole.encode(self.clip),
            "conditioning": lambda: vae.encode_conditioning(self.frame, self.num_frames),
        }
        for name, call in calls.items():
            call()
            with profile(activities=[ProfilerActivity.CUDA]) as recorded:
                call()
                torch.cuda.synchronize()
            events = sorted(recorded.key_averages(), key=lambda e: -e.device_time_total)
            out[name] = [
                {"kernel": e.key[:110], "calls": e.count, "ms": round(e.device_time_total / 1e3, 3)}
                for e in events[:20]
            ]
        return out

    # -- measuring ------------------------------------------------------------------------------------------------

    def _step(self, name: str, part: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = part()
        print(f"  {name}: {time.perf_counter() - begin:.1f} s", file=sys.stderr)
        return result

    def _timed(self, call: Callable[[], Any], reference: Tensor | None, *, graph: bool = False) -> Row:
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        result = call()
        row: Row = {}
        if cuda:
            torch.cuda.synchronize(self.device)
            row["memory_MiB"] = round((torch.cuda.max_memory_allocated(self.device) - before) / 2**20, 1)
        row["ms"] = self._ms(lambda i: call())
        if reference is not None:
            error = (result.double() - reference.double()).norm() / reference.double().norm()
            row["error"] = float(error)
        row["graph_ms"] = row["graph_equals_eager"] = None
        if graph and cuda:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                replayed = call()
            row["graph_ms"] = self._ms(lambda i: captured.replay())
            row["graph_equals_eager"] = bool(torch.equal(replayed, result))
        return row

    def _ms(self, work: Callable[[int], object]) -> float:
        seconds, _ = median_seconds(work, self.device, repeats=self.repeats, warmup=2)
        return round(seconds * 1e3, 3)

    def _host_ms(self, call: Callable[[], Tensor]) -> dict[str, float]:
        """Until the call returns, and until its result is there."""
        returned, done = [], []
        for _ in range(self.repeats + 2):
            begin = time.perf_counter()
            call()
            returned.append(time.perf_counter() - begin)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            done.append(time.perf_counter() - begin)
        return {name: round(float(np.median(v[2:])) * 1e3, 3) for name, v in (("host", returned), ("done", done))}


def _encoders(config: DreamZeroConfig, device: torch.device, dtype: torch.dtype) -> DreamZero:
    """CLIP and VAE of a network whose other parts are never made."""
    torch.manual_seed(0)
    with torch.device(device):
        vae, image_encoder = VideoVAE(config.vae), ImageEncoder(config.image)
    for p in image_encoder.parameters():
        torch.nn.init.normal_(p, std=config.image.vision_dim**-0.5)
    parts = {"vae": vae, "image_encoder": image_encoder}
    for part in parts.values():
        part.to(dtype).requires_grad_(False).eval()
    return cast(DreamZero, SimpleNamespace(config=config, dtype=dtype, device=device, **parts))


def summary(report: dict[str, Any]) -> str:
    """Tables for people."""
    where = report["provenance"]
    machine = where["gpu"]["name"] if where["gpu"] else f"{where['cpu']}, {where['cpu_threads']} threads"
    lines = [
        f"VAE of the {report['network']} network, {report['dtype']}, {report['size'][0]}x{report['size'][1]}; "
        f"{machine}; torch {where['torch']}, {report['plans']['measured']['backend']}; commit {where['commit']}",
    ]
    lines += [f"{'conv3d case':52}{'ms':>9}{'MiB':>8}{'error':>10}"]
    for c in report["conv3d_cases"]["results"]:
        size = "" if c["workspace_bytes"] is None else f"{c['workspace_bytes'] / 2**20:.0f}"
        name = f"{c['key']}, {c['dtype']}, {c['form']}"
        lines.append(f"{name[:51]:52}{c['convolution_ms']:9.3f}{size:>8}{c['relative_error']:10.2e}")
    lines += report["conv3d_cases"]["warnings"] + report["conv3d_cases"]["skipped"]
    for name in [n for n in report["plans"] if n.startswith("measured")]:
        forms = report["plans"][name]["results"]
        lines.append(f"{name}: convolution ms, with norm ms, error (* chosen)")
        for key in dict.fromkeys(r["key"] for r in forms):
            cells = [
                f"{r['form']} {r['convolution_ms']:.3f} {r['with_norm_ms']:.3f} {r['relative_error']:.1e}"
                + ("*" if report["plans"][name]["plan"]["forms"][key] == r["form"] else "")
                for r in forms
                if r["key"] == key
            ]
            lines.append(f"  {key:20}" + " | ".join(cells))
    lines.append(f"{'ms: eager / graph, error':36}{'':>12}")
    for part, row in report["plain"].items():
        lines.append(f"{'plain, ' + part:44}{_cell(row)}")
    for fast in report["fast"]:
        lines.append(
            f"fast, plan {fast['plan']}: pieces equal whole {fast['pieces_equal_whole']}, graph equals eager "
            f"{fast['graph_equals_eager']}, state {fast['state_MiB']} MiB"
        )
        lines += [f"{'  ' + part:44}{_cell(row)}" for part, row in fast.items() if isinstance(row, dict)]
    lines += [f"{'first frame, ' + part:44}{_cell(row)}" for part, row in report["first_frame"].items()]
    mosaic = report["preprocess"]
    lines.append(f"mosaic on the device equals the host's: {mosaic['equal']}; ms until return / until done")
    lines += [f"{'  ' + n:44}{r['host']:9.3f} /{r['done']:9.3f}" for n, r in mosaic.items() if isinstance(r, dict)]
    for name, kernels in (report["kernels"] or {}).items():
        lines.append(f"kernels of {name}")
        lines += [f"  {k['ms']:8.3f} ms {k['calls']:4} x {k['kernel'][:90]}" for k in kernels[:14]]
    lines.append(f"measured in {report['seconds']} s; {'ok' if report['ok'] else 'NOT OK'}")
    return "\n".join(lines)


def _cell(row: Row) -> str:
    graph = "" if row["graph_ms"] is None else f"{row['graph_ms']:9.3f}"
    error = f"{row['error']:10.2e}" if "error" in row else ""
    memory = f"{row['memory_MiB']:9.0f} MiB" if "memory_MiB" in row else ""
    return f"{row['ms']:9.3f} /{graph:>9}{error:>10}{memory}"
