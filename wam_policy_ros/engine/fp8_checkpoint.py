"""FP8 checkpoints: written once by ``wam quantize``, read in seconds; or made while an ordinary one streams in.

Both give the same bits: the weights of the blocks' linear layers, rounded to bf16 as published, then to 8 bits with one
scale per output row. The network they give has 8-bit ``weight`` and float32 ``weight_scale`` in these layers; the fused
step reads them, the plain network cannot run with them. Tier *numeric*.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wam_policy_ros import __version__
from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.model.checkpoint import CheckpointFolder, Convert, check_weights, load_weights, stream_tensors
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.model.errors import CheckpointFileError, TokenizerFileError
from wam_policy_ros.model.fingerprint import full_hash, hash_file
from wam_policy_ros.model.fp8_layout import MANIFEST, Fp8Manifest, is_fp8_weight, is_scale, scale_name
from wam_policy_ros.model.key_maps import checkpoint_name
from wam_policy_ros.model.shard_writer import FolderWriter
from wam_policy_ros.model.tokenizer import find_tokenizer_folder

from .fp8 import E4M3FN, E4M3FNUZ, Fp8
from .kernels.ops import quantize_rows

Progress = Callable[[str, float], None]

_COPIED = ("config.json", "metadata.json", "experiment_cfg/metadata.json", "experiment_cfg/conf.yaml")
_TOKENIZER_FILES = ("tokenizer.json", "spiece.model", "tokenizer_config.json", "special_tokens_map.json")


def load_network(
    folder: CheckpointFolder,
    *,
    fp8: Fp8 | None,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    only: str = "",
) -> DreamZero:
    """The network as the step runs it, never larger on the device than in its final form.

    Args:
        fp8: format of the blocks' linear layers; None for native precision.
        only: see ``load_weights``.

    Raises:
        ConfigError: an FP8 folder for a step that computes in native precision.
        CheckpointFileError: see ``load_weights``.
    """
    if fp8 is None and folder.fp8 is not None:
        raise ConfigError(
            "this checkpoint holds 8-bit weights, which only the fused step with FP8 layers can use",
            got=f"{folder.path.name}, made from {folder.fp8.source}",
            remedy="set step: fused and linears: fp8, or give the checkpoint it was made from",
        )
    convert: Convert | None = None
    if fp8 is not None and folder.fp8 is None:
        convert = online(fp8)
    elif fp8 is not None and fp8.dtype != E4M3FN.dtype:
        convert = converted_format
    return load_weights(folder, device=device, dtype=dtype, progress=progress, convert=convert, only=only)


def online(fp8: Fp8) -> Convert:
    """Quantise the layers of the blocks as they arrive; everything else passes."""

    def convert(name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        if not is_fp8_weight(name):
            return {name: tensor}
        # Published weights are bf16; a float32 network for comparisons gets the same 8-bit values.
        # The plain twin: the same bits on every device.
        values, scale = quantize_rows(tensor.to(torch.bfloat16), fp8, plain=True)
        return {name: values, scale_name(name): scale}

    return convert


def converted_format(name: str, tensor: Tensor) -> Mapping[str, Tensor]:
    """e4m3fn as stored to e4m3fnuz, the format of gfx942, without rounding.

    The same byte means half as much there, so the scale doubles. Two kinds of byte change: minus zero, which is NaN
    there, becomes zero, and what is NaN here and a number there becomes NaN.
    """
    if is_scale(name):
        return {name: tensor * 2}
    if not is_fp8_weight(name):
        return {name: tensor}
    raw = tensor.view(torch.uint8)
    nan = (raw & 0x7F) == 0x7F
    return {name: raw.masked_fill(raw == 0x80, 0).masked_fill(nan, 0x80).view(E4M3FNUZ.dtype)}


def write_fp8_checkpoint(
    folder: CheckpointFolder, out: Path, *, device: torch.device, progress: Progress, **options: Any
) -> Fp8Manifest:
    """Quantise ``folder`` and write it to ``out``, with config, statistics and tokenizer beside the weights.

    Args:
        device: where to quantise; the bits do not depend on it.
        options: of ``FolderWriter``.

    Raises:
        CheckpointFileError: the source is incomplete, is FP8 already, or ``out`` exists.
    """
    if folder.fp8 is not None:
        raise CheckpointFileError(f"{folder.path} is an FP8 checkpoint already")
    if problems := check_weights(folder):
        raise CheckpointFileError(f"checkpoint {folder.path} cannot be quantised", problems)
    convert = online(E4M3FN)
    total = sum(e.end - e.begin for e in folder.tensors.values())
    done, layers = 0, []
    with ThreadPoolExecutor(4) as pool:
        shards = sorted({e.shard for e in folder.tensors.values()})
        hashes = {p.name: pool.submit(hash_file, p) for p in [*shards, folder.path / "config.json"]}
        with FolderWriter(out, **options) as writer:
            for name, tensor in stream_tensors(folder, device):
                done += tensor.numel() * tensor.element_size()
                for new, value in convert(name, tensor).items():
                    writer.add(checkpoint_name(new), value)
                layers += [name] if is_fp8_weight(name) else []
                progress("quantising", done / total)
            manifest = Fp8Manifest(folder.path.name, {n: h.result() for n, h in hashes.items()}, __version__)
            text = json.dumps(manifest.to_json(layers), indent=1)
            (writer.partial / MANIFEST).write_text(text, encoding="utf-8")
            _copy_others(folder.path, writer.partial)
    full_hash(out.glob("*.safetensors"))  # now, while their pages are in memory
    return manifest


def _copy_others(source: Path, target: Path) -> None:
    for name in _COPIED:
        if (source / name).is_file():
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, target / name)
    try:
        found = find_tokenizer_folder(source)
    except TokenizerFileError:
        return  # the published checkpoint has none
    place = target / found.relative_to(source) if found.is_relative_to(source) else None
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
        for name in _TOKENIZER_FILES:
            if (found / name).is_file():
                shutil.copyfile(found / name, place / name)
