"""Strict loading of a checkpoint folder: everything is checked from the file headers before a weight is read.

Layout (DreamZero spec 6.1): ``config.json``, ``model.safetensors.index.json`` with its shards (or one
``model.safetensors``), ``experiment_cfg/metadata.json``, ``experiment_cfg/conf.yaml``. An FP8 folder has ``fp8.json``
too (see ``fp8_layout``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .config import DreamZeroConfig
from .dreamzero import Convert, DreamZero
from .errors import CheckpointFileError, ModelConfigError
from .fp8_layout import MANIFEST, Fp8Manifest, is_fp8_weight, is_scale, scale_shapes
from .key_maps import PREFIX, checkpoint_name, is_lora, module_name
from .packaged import located, packaged
from .shard_reader import Extent, read_tensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ABOUT = "about.json"
"""Of a checkpoint folder, optional: its key ``what`` says in one line what the weights are."""

_FLOATING = {"F64", "F32", "F16", "BF16"}

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: shard file, name in it, shape, safetensors dtype, bytes ``begin`` to ``end`` of the file."""

    shard: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    begin: int
    end: int


@dataclass(frozen=True)
class CheckpointFolder:
    """The headers of a checkpoint folder. Nothing here reads weights.

    Attributes:
        tensors: module name -> entry, for tensors that belong to the network.
        skipped: names of tensors left out on purpose.
        problems: what was wrong with the files themselves (missing or unreadable shards, index mismatches).
        metadata: parsed ``experiment_cfg/metadata.json``, or None.
        conf: text of ``experiment_cfg/conf.yaml``, or None.
        lost: module names that the index places in missing or unreadable shards.
        fp8: what ``fp8.json`` says; None for an ordinary folder.
    """

    path: Path
    config_json: dict[str, Any]
    tensors: dict[str, TensorEntry]
    skipped: tuple[str, ...]
    problems: tuple[str, ...]
    metadata: dict[str, Any] | None
    conf: str | None
    lost: frozenset[str] = frozenset()
    fp8: Fp8Manifest | None = None
    about: str = ""

    @property
    def title(self) -> str:
        """For people: its name, and what it is when it says so."""
        return f"checkpoint {self.path.name}" + (f": {self.about}" if self.about else "")

    @property
    def config(self) -> DreamZeroConfig:
        try:
            return DreamZeroConfig.from_config_json(self.config_json)
        except ModelConfigError:
            raise
        except (TypeError, ValueError, KeyError) as error:
            raise ModelConfigError(f"{self.path / 'config.json'}: a value has the wrong type: {error}") from error

    @property
    def lora(self) -> int:
        """How many tensors are LoRA adapters. With any, the folder is not a plain network."""
        return sum(is_lora(entry.name) for entry in self.tensors.values())

    def compare(self, expected: dict[str, tuple[int, ...]]) -> list[str]:
        """Every difference between the files and a network with these names and shapes, one line each.

        A missing or unreadable shard is one line, not one more for each of its tensors.
        """
        lines = list(self.problems)
        if lines and not self.tensors:
            return lines
        missing = {n: shape for n, shape in expected.items() if n not in self.tensors and n not in self.lost}
        lines += [f"missing tensor: {checkpoint_name(n)} {list(s)}" for n, s in missing.items()]
        for name, entry in self.tensors.items():
            if name not in expected:
                lines.append(f"unexpected tensor: {entry.name} {list(entry.shape)} in {entry.shard.name}")
            elif entry.shape != expected[name]:
                lines.append(f"wrong shape: {entry.name} is {list(entry.shape)}, expected {list(expected[name])}")
            elif entry.dtype not in (accepted := self._dtypes(name)):
                lines.append(f"wrong dtype: {entry.name} is {entry.dtype}, expected one of {sorted(accepted)}")
        return lines

    def _dtypes(self, name: str) -> set[str]:
        if self.fp8 is not None and is_scale(name):
            return {"F32"}
        return {"F8_E4M3"} if self.fp8 is not None and is_fp8_weight(name) else _FLOATING


def read_folder(path: str | Path) -> CheckpointFolder:
    """Read config, index, metadata and all shard headers.

    Args:
        path: of the folder, or the name of one that comes with the package.

    Raises:
        CheckpointFileError: not a folder, or ``config.json`` is absent or unreadable. Faults of the weight files are
            collected in ``problems``.
    """
    folder = located(path)
    if not folder.is_dir():
        names = ", ".join(packaged())
        packages = f", or a packaged checkpoint by its name: {names}" if names else ""
        raise CheckpointFileError(
            f"checkpoint folder not found: {folder}", remedy=f"give the folder with config.json{packages}"
        )
    config = _read_json(folder / "config.json")
    if config is None:
        raise CheckpointFileError(f"no config.json in {folder}", remedy="give the folder of the published checkpoint")
    tensors, skipped, problems, lost = _read_headers(folder)
    metadata = _read_json(folder / "experiment_cfg" / "metadata.json")
    if metadata is None:
        metadata = _read_json(folder / "metadata.json")
    conf = folder / "experiment_cfg" / "conf.yaml"
    fp8, raw = None, _read_json(folder / MANIFEST)
    if raw is not None:
        fp8, faults = Fp8Manifest.from_json(raw)
        problems = [*faults, *problems]
    return CheckpointFolder(
        path=folder,
        config_json=config,
        tensors=tensors,
        skipped=tuple(skipped),
        problems=tuple(problems),
        metadata=metadata,
        conf=_read_text(conf),
        lost=lost,
        fp8=fp8,
        about=_about(_read_json(folder / ABOUT)),
    )


def _about(card: dict[str, Any] | None) -> str:
    """One line of a model card; nothing that is not one."""
    text = card.get("what") if card is not None else None
    return " ".join(text.split())[:200] if isinstance(text, str) else ""


def load_weights(
    folder: CheckpointFolder,
    *,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    convert: Convert | None = None,
    only: str = "",
) -> DreamZero:
    """Build the network on the meta device, check everything, then stream tensors one by one to ``device``.

    Every floating tensor becomes ``dtype`` (the published files may hold float32). From an FP8 folder the linear layers
    of the blocks keep their 8-bit ``weight`` and get a buffer ``weight_scale``.

    Args:
        progress: called with a text and a fraction.
        convert: called with each tensor's name and value as it arrives, so that a network can be quantised without ever
            being whole in its native precision.
        only: beginning of the names to load, e.g. ``model.`` for the DiT; the others are checked, and stay on the meta
            device.

    Raises:
        CheckpointFileError: names every missing, unexpected or misshaped tensor and every missing shard; or scales that
            are no positive numbers.
        ModelConfigError: ``config.json`` does not describe a supported network.
    """
    problems = check_weights(folder)
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise CheckpointFileError(
            f"checkpoint {folder.path} does not fit the network described by its config.json ({count})",
            problems,
            remedy="download the folder again, completely, or fix config.json; nothing was loaded",
        )
    network = DreamZero.on_meta(folder.config)
    names = [name for name in folder.tensors if name.startswith(only)]
    total = sum(torch.Size(folder.tensors[name].shape).numel() for name in names)
    done = 0
    state: dict[str, Tensor] = {}
    for name, tensor in stream_tensors(folder, device, names):
        done += tensor.numel()
        eight = folder.fp8 is not None and (is_fp8_weight(name) or is_scale(name))
        value = tensor if eight else tensor.to(dtype=dtype)
        state |= {name: value} if convert is None else convert(name, value)
        progress("loading weights", done / total)
    _check_scales(folder, state)
    network.install(state, only=only)
    return network


def _check_scales(folder: CheckpointFolder, state: Mapping[str, Tensor]) -> None:
    names = [n for n in state if is_scale(n)]
    if not names:
        return
    # One question to the device for all of them.
    sound = torch.stack([((state[n] > 0) & torch.isfinite(state[n])).all() for n in names]).tolist()
    if faults := [f"{checkpoint_name(n)} holds values that are no positive numbers"
                  for n, ok in zip(names, sound, strict=True) if not ok]:  # fmt: skip
        raise CheckpointFileError(f"scales of checkpoint {folder.path} cannot be used", faults)


def check_weights(folder: CheckpointFolder) -> list[str]:
    """Every reason why the weight files do not make the network of ``config.json``; reads headers only.

    Raises:
        ModelConfigError: ``config.json`` does not describe a supported network.
    """
    if folder.lora:
        return [
            f"{folder.lora} tensors are LoRA adapters (save_lora_only), which are not a network, and are not merged "
            "here: merge them into the base they were trained on and give the merged folder",
            *folder.problems,
        ]
    expected = {name: tuple(p.shape) for name, p in DreamZero.on_meta(folder.config).state_dict().items()}
    if folder.fp8 is not None:
        expected |= scale_shapes(expected)
    return folder.compare(expected)


def save_folder(network: DreamZero, config_json: dict[str, Any], path: str | Path, *, shards: int = 1) -> None:
    """Write ``config.json`` and weights under their published names, in ``shards`` files with an index."""
    from safetensors.torch import save_file

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json, indent=1), encoding="utf-8")
    items = sorted((checkpoint_name(n), t.detach().cpu().contiguous()) for n, t in network.state_dict().items())
    if shards == 1:
        save_file(dict(items), folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for i in range(shards):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(items[i::shards])
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are all different: of two values under one key nobody knows which was meant."""
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [k for k, _ in pairs]
        raise ValueError(f"keys {sorted({k for k in names if names.count(k) > 1})} occur twice in one object")
    return out


def _read_text(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointFileError(f"{path} is not text: {error}", remedy="download the file again") from error


def _read_json(path: Path) -> dict[str, Any] | None:
    """None when the file is absent.

    Raises:
        CheckpointFileError: the file is not valid JSON or not an object.
    """
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise CheckpointFileError(f"{path} is not valid JSON: {error}", remedy="download the file again") from error
    if not isinstance(value, dict):
        raise CheckpointFileError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _read_headers(folder: Path) -> tuple[dict[str, TensorEntry], list[str], list[str], frozenset[str]]:
    """Tensors by module name, skipped names, problems, and module names in shards that cannot be read."""
    index = _read_json(folder / INDEX)
    problems: list[str] = []
    if index is not None:
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointFileError(f"{folder / INDEX} has no weight_map", remedy="download the file again")
        # A shard lies beside its index; anything else could read files that nobody meant.
        odd = sorted({repr(s) for s in weight_map.values() if not isinstance(s, str) or Path(s).name != s})
        if odd:
            raise CheckpointFileError(f"{folder / INDEX} names shards that are not plain file names", odd)
        shards = sorted(set(weight_map.values()))
    elif (folder / SINGLE).is_file():
        weight_map, shards = None, [SINGLE]
    else:
        return {}, [], [f"no weights: neither {INDEX} nor {SINGLE} is there"], frozenset()

    tensors: dict[str, TensorEntry] = {}
    skipped: list[str] = []
    lost: set[str] = set()
    for shard in shards:
        listed = [n for n, s in weight_map.items() if s == shard] if weight_map else None
        try:
            header = dict(_shard_header(folder / shard))
        except (SafetensorError, OSError) as error:
            count = f" ({len(listed)} tensors, first {min(listed)})" if listed else ""
            absent = isinstance(error, FileNotFoundError)
            problems.append(
                f"missing shard: {shard}{count}" if absent else f"unreadable shard: {shard}{count}: {error}"
            )
            lost.update(m for n in listed or [] if (m := module_name(n)) is not None)
            continue
        if listed is not None:
            problems += [f"shard {shard} lacks {n}, which the index places there" for n in listed if n not in header]
            problems += [f"shard {shard} holds {n}, which the index does not place there"
                         for n in header if weight_map and weight_map.get(n) != shard]  # fmt: skip
        for name, (shape, dtype, begin, end) in header.items():
            module = module_name(name)
            if module is None:
                skipped.append(name)
            elif module in tensors:
                problems.append(f"tensor {name} occurs twice: in {tensors[module].shard.name} and {shard}")
            else:
                tensors[module] = TensorEntry(folder / shard, name, shape, dtype, begin, end)
    return tensors, skipped, problems, frozenset(lost)


def _shard_header(path: Path) -> Iterator[tuple[str, tuple[tuple[int, ...], str, int, int]]]:
    """(name, (shape, dtype, begin, end)) of every tensor, the last two in bytes of the file."""
    if not path.is_file():
        raise FileNotFoundError(path)
    with safe_open(path, framework="pt") as f:  # checks that header and file fit each other
        pieces = {name: f.get_slice(name) for name in f.keys()}  # noqa: SIM118 (safe_open is not a mapping)
        known = {name: (tuple(piece.get_shape()), piece.get_dtype()) for name, piece in pieces.items()}
    with path.open("rb") as f:
        size = int.from_bytes(f.read(8), "little")
        raw = json.loads(f.read(size))
    for name, (shape, dtype) in known.items():
        begin, end = raw[name]["data_offsets"]
        yield name, (shape, dtype, 8 + size + begin, 8 + size + end)


def stream_tensors(
    folder: CheckpointFolder, device: torch.device, names: Sequence[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(module name, tensor on ``device`` as stored) in file order; of all tensors, or of those with these names."""
    names = list(folder.tensors) if names is None else names
    entries = [folder.tensors[name] for name in names]
    extents = [Extent(e.shard, e.begin, e.end, e.dtype, e.shape) for e in entries]
    for index, tensor in read_tensors(extents, device):
        yield names[index], tensor


__all__ = [
    "PREFIX",
    "CheckpointFolder",
    "Convert",
    "TensorEntry",
    "check_weights",
    "load_weights",
    "read_folder",
    "save_folder",
    "stream_tensors",
]
