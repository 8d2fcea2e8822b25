"""``wam quantize CHECKPOINT OUT``: an FP8 checkpoint that loads in seconds."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from wam_policy_ros.contract.errors import CheckpointError
from wam_policy_ros.engine.build import resolve_device
from wam_policy_ros.engine.fp8_checkpoint import write_fp8_checkpoint
from wam_policy_ros.model.checkpoint import read_folder
from wam_policy_ros.model.errors import CheckpointFileError, ModelConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="folder with config.json and weights as published")
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument("--device", default="auto", help="where to quantise; the result does not depend on it")


def run(args: argparse.Namespace) -> int:
    begin = time.perf_counter()
    try:
        folder = read_folder(args.checkpoint)
        write_fp8_checkpoint(folder, args.out, device=resolve_device(args.device), progress=_progress)
    except CheckpointFileError as error:
        raise CheckpointError(error.what, problems=error.problems, remedy=error.remedy) from error
    except ModelConfigError as error:
        raise CheckpointError(str(error)) from error
    print(file=sys.stderr)
    size = sum(p.stat().st_size for p in args.out.rglob("*") if p.is_file())
    print(f"written: {args.out}, {size / 2**30:.2f} GiB in {time.perf_counter() - begin:.0f} s")
    print("tier numeric: linear layers of the blocks in e4m3fn, one scale per output row; everything else as it was")
    return 0


def _progress(text: str, fraction: float) -> None:
    print(f"\r  {text} {fraction:.0%}   ", end="", file=sys.stderr)
