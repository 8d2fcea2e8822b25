"""``wam bench load``: how fast weights come from the page cache to the device, and the whole network with them.

With ``--network`` files of a network of random numbers are written first, and a policy is started from them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from wam_policy_ros.engine.build import resolve_device, resolve_dtype
from wam_policy_ros.engine.fp8 import fp8_for
from wam_policy_ros.engine.fp8_checkpoint import load_network
from wam_policy_ros.model.checkpoint import read_folder
from wam_policy_ros.model.config import DreamZeroConfig
from wam_policy_ros.model.shard_reader import Extent, read_tensors
from wam_policy_ros.tools.provenance import provenance

from .configurations import CONFIGURATIONS, engine_config
from .from_files import start, write_random_network
from .network import free_memory
from .records import write_json
from .stages import Stages, line

TENSOR_BYTES = 2 * 13824 * 5120  # the largest linear layer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--checkpoint", type=Path, help="folder to load; default: files of random numbers")
    source.add_argument("--network", choices=["tiny", "14b"], help="write a network of this size (14b: 30 GB, or 46 GB "
                        "with native layers) and start a policy from it, stage by stage")  # fmt: skip
    parser.add_argument("--layers", choices=["fp8", "native"], default="fp8", help="of the files of --network")
    parser.add_argument("--config", default="", help="to start with; default: what the layers are for; one of "
                        f"{','.join(CONFIGURATIONS)}")  # fmt: skip
    parser.add_argument("--evaluations", type=int, default=4, help="of the calls after the start")
    parser.add_argument("--gib", type=float, default=2.0, help="of random numbers, or to read at most for a rate")
    parser.add_argument("--folder", type=Path, help="where to put them; default: the temporary folder")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE")


def run(args: argparse.Namespace) -> int:
    device = resolve_device(args.device)
    stages = Stages(device)
    report: dict[str, Any] = {"provenance": provenance(device)}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        place = args.checkpoint or Path(folder) / "network"
        if args.network:
            config = DreamZeroConfig.tiny() if args.network == "tiny" else DreamZeroConfig.dreamzero_14b()
            with stages.stage("files written"):
                write_random_network(config, place, device, eight_bit=args.layers == "fp8")
                free_memory(device)
        elif not args.checkpoint:
            place = Path(folder)
            _write(place, args.gib)
        files = sorted(place.glob("*.safetensors"))
        report["bytes"] = sum(p.stat().st_size for p in files)
        report["rates_GBps"] = rates(files, device, most_bytes=args.gib * 2**30)
        for name, rate in report["rates_GBps"].items():
            print(f"{name:34} {rate:6.2f} GB/s", flush=True)
        if args.checkpoint:
            report["network_s"] = _networks(args.checkpoint, device)
            for name, seconds in report["network_s"].items():
                print(f"{name:34} {seconds:6.1f} s")
        if args.network:
            report |= _start(args, place, device, stages)
    if args.json:
        write_json(report, args.json)
    return 0


def _start(args: argparse.Namespace, folder: Path, device: torch.device, stages: Stages) -> dict[str, Any]:
    gpu = device.type == "cuda"
    name = args.config or ("fp8" if args.layers == "fp8" else "bf16" if gpu else "plain")
    before = len(stages.rows)
    start(folder, engine_config(name, args.evaluations, gpu=gpu), device, stages)
    rows = stages.rows[before:]
    for row in rows:
        print(line(row).strip("\r"))
    ready = sum(row["seconds"] for row in rows if row["stage"] not in ("first call", "second call"))
    print(f"{'files to a policy that is ready':34} {ready:6.1f} s ({name}, {args.layers} layers, random numbers)")
    return {"network": args.network, "configuration": name, "layers": args.layers, "stages": stages.rows,
            "files_to_ready_s": ready}  # fmt: skip


def rates(files: list[Path], device: torch.device, *, most_bytes: float) -> dict[str, float]:
    """GB/s of files in the page cache to tensors on the device, by reader. The first pass fills the cache.

    Args:
        most_bytes: no further file is read after these.
    """
    sizes = [p.stat().st_size for p in files]
    files = [p for i, p in enumerate(files) if sum(sizes[:i]) < most_bytes]
    extents = [e for p in files for e in _extents(p)]
    size = sum(e.end - e.begin for e in extents)
    _drain(extents, device, 2)
    out = {f"large reads, {n} threads": size / _drain(extents, device, n) / 1e9 for n in (1, 2, 4, 8)}
    begin = time.perf_counter()
    for path in files:
        with safe_open(path, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118 (not a mapping)
                tensor = f.get_tensor(name)
                tensor = tensor.clone() if device.type == "cpu" else tensor.to(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return out | {"tensor by tensor, mapped file": size / (time.perf_counter() - begin) / 1e9}


def _drain(extents: list[Extent], device: torch.device, threads: int) -> float:
    begin = time.perf_counter()
    for _ in read_tensors(extents, device, threads=threads):
        pass
    return time.perf_counter() - begin


def _extents(path: Path) -> list[Extent]:
    """Tensors as large as the largest layers, whatever the file holds: the rate is that of bytes."""
    size = path.stat().st_size // 8 * 8
    starts = range(0, size, TENSOR_BYTES)
    return [Extent(path, s, e, "BF16", ((e - s) // 2,)) for s in starts for e in (min(size, s + TENSOR_BYTES),)]


def _write(folder: Path, gib: float) -> list[Path]:
    files: list[Path] = []
    left = int(gib * 2**30)
    while left > 0:
        size = min(left, TENSOR_BYTES * 4)
        data = torch.randint(0, 256, (max(size, 8),), dtype=torch.uint8)
        files.append(folder / f"{len(files):03}.safetensors")
        save_file({"x": data}, files[-1])
        left -= size
    return files


def _networks(path: Path, device: torch.device) -> dict[str, float]:
    out = {}
    folder = read_folder(path)
    kinds = {"network, 8-bit layers": fp8_for(device)} | ({} if folder.fp8 else {"network, native precision": None})
    for name, fp8 in kinds.items():
        begin = time.perf_counter()
        load_network(
            read_folder(path), fp8=fp8, device=device, dtype=resolve_dtype("auto", device), progress=lambda t, f: None
        )
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        out[name] = time.perf_counter() - begin
    return out
