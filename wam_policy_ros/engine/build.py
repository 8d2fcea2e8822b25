"""From a checkpoint folder, or from nothing but a seed, to a policy that can be called.

What the checkpoint says about the robot (raw camera sizes, field order, relative keys, horizon) wins over the
embodiment page; what neither says raises.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from wam_policy_ros.contract.embodiment import Embodiment, get_embodiment
from wam_policy_ros.contract.errors import CheckpointError, ConfigError, StatisticsError, TokenizerError
from wam_policy_ros.contract.interface import FieldSpec
from wam_policy_ros.contract.normalization import Statistics
from wam_policy_ros.contract.prompts import NEGATIVE_PROMPT
from wam_policy_ros.model.checkpoint import CheckpointFolder, check_weights, load_weights, read_folder
from wam_policy_ros.model.config import DreamZeroConfig
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.model.errors import CheckpointFileError, ModelError, TokenizerFileError
from wam_policy_ros.model.tokenizer import ByteTokenizer, Tokenizer, UMT5Tokenizer, find_tokenizer_folder

from .config import EngineConfig
from .policy import DreamZeroPolicy

Progress = Callable[[str, float], None]

RANDOM_PRESETS = ("tiny", "14b")


def build_policy(
    *,
    embodiment: str,
    checkpoint: str | None = None,
    random_weights: str | None = None,
    tokenizer: str | None = None,
    device: str = "auto",
    config: EngineConfig | None = None,
    progress: Progress = lambda text, fraction: None,
) -> DreamZeroPolicy:
    """Build the policy the node, the server and the tools use.

    Args:
        embodiment: tag or alias.
        checkpoint: folder of a published checkpoint; or
        random_weights: ``tiny`` or ``14b``: an untrained network for tests and benchmarks. Exactly one of the two.
        tokenizer: folder with ``tokenizer.json`` of umt5-xxl; default: looked for inside the checkpoint folder.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1``, ... (``cuda`` also names AMD GPUs in PyTorch).
        progress: called with a text and a fraction in [0, 1].

    Raises:
        ConfigError: contradictory or unknown options.
        CheckpointError, StatisticsError, TokenizerError: the folder cannot be used; every fault is named.
    """
    config = config or EngineConfig.reference()
    if bool(checkpoint) == bool(random_weights):
        raise ConfigError(
            "exactly one of checkpoint and random_weights must be given",
            got=f"checkpoint={checkpoint!r}, random_weights={random_weights!r}",
            remedy="give the checkpoint folder, or random_weights: tiny to try the machinery without weights",
        )
    where = resolve_device(device)
    dtype = resolve_dtype(config.dtype, where)
    if random_weights:
        return _random_policy(get_embodiment(embodiment), random_weights, tokenizer, where, dtype, config, progress)
    assert checkpoint is not None
    try:
        folder = read_folder(checkpoint)
        robot, statistics, tokens = check_folder(folder, embodiment, tokenizer or None)
        network = load_weights(folder, device=where, dtype=dtype, progress=progress)
    except CheckpointFileError as error:
        raise CheckpointError(error.what, problems=error.problems, remedy=error.remedy) from error
    return DreamZeroPolicy(network, robot, statistics, tokens, config, weights=f"checkpoint {folder.path.name}")


def check_folder(
    folder: CheckpointFolder, embodiment: str, tokenizer: str | None
) -> tuple[Embodiment, Statistics, UMT5Tokenizer]:
    """Everything about a checkpoint folder that can be known without reading weights.

    Raises:
        StatisticsError, TokenizerError: that is the only thing wrong.
        CheckpointError: several things, or the network's own files; ``problems`` lists them all.
    """
    faults: list[CheckpointError | ConfigError] = []
    network_config: DreamZeroConfig | None = None
    try:
        network_config = folder.config
        problems = check_weights(folder)
    except ModelError as error:
        problems = [f"config.json: {error}", *folder.problems]
    if problems:
        remedy = "download the folder again, completely, or fix config.json; nothing was loaded"
        faults.append(CheckpointError("the network cannot be loaded", problems=problems, remedy=remedy))
    robot = statistics = tokens = None
    try:
        robot, statistics = describe_robot(folder, embodiment)
    except (CheckpointError, ConfigError) as error:
        faults.append(error)
    try:
        tokens = _umt5(folder.path, tokenizer, network_config)
    except TokenizerError as error:
        faults.append(error)
    if len(faults) == 1:
        raise faults[0]
    if faults:
        every = [line for f in faults for line in (f.lines() if isinstance(f, CheckpointError) else [str(f)])]
        raise CheckpointError(
            f"checkpoint {folder.path} cannot be used ({len(every)} problems)",
            problems=every,
            remedy="wam inspect shows the folder; nothing was loaded",
        )
    assert robot is not None and statistics is not None and tokens is not None
    return robot, statistics, tokens


def resolve_device(device: str) -> torch.device:
    """``auto`` picks a GPU if PyTorch sees one.

    Raises:
        ConfigError: no such device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
        if where.type not in ("cpu", "cuda"):
            raise RuntimeError("the engine runs on cpu and cuda (NVIDIA and AMD GPUs)")
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            "device is not available",
            got=repr(device),
            expected="auto, cpu, or cuda when PyTorch was built with CUDA or ROCm and sees a GPU",
            remedy=str(error).splitlines()[0],
        ) from error
    return where


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """``auto``: bfloat16, as published, on a GPU; float32 on a CPU, where bfloat16 is slower."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}[dtype]


def describe_robot(folder: CheckpointFolder, embodiment: str) -> tuple[Embodiment, Statistics]:
    """The robot as this checkpoint was trained on it, with its statistics. Reads no weights.

    Raises:
        StatisticsError: no metadata.json, no such embodiment in it, or incomplete statistics.
        ConfigError: unknown embodiment, or an action field of unknown kind.
    """
    page = get_embodiment(embodiment)
    horizon = page.horizon
    with contextlib.suppress(ModelError):  # reported by whoever loads the network; statistics can still be judged
        horizon = folder.config.action_horizon
    if folder.metadata is None:
        raise StatisticsError(
            "the checkpoint has no normalisation statistics",
            got=f"no experiment_cfg/metadata.json in {folder.path}",
            remedy="copy experiment_cfg/ of the published checkpoint; there is no identity fallback",
        )
    entry = folder.metadata.get(page.tag)
    if not isinstance(entry, Mapping):
        Statistics.from_metadata(folder.metadata, page.tag, state=page.state, action=page.action)  # raises, names tags
        raise AssertionError("unreachable")
    order, relative = _orders(folder.conf, page.tag)
    state = _fields(page, page.state, order.get("state"), entry, "state")
    action = _fields(page, page.action, order.get("action"), entry, "action")
    if relative is not None:
        action = tuple(dataclasses.replace(f, relative=f.name in relative) for f in action)
    widths = {f.name: f.dim for f in state}
    if lost := [f.name for f in action if f.relative and widths.get(f.name) != f.dim]:
        raise ConfigError(
            f"relative action fields {lost} have no state field of the same name and width to be relative to",
            got=f"state {widths}",
            remedy="fix the concatenation orders or relative_action_keys in experiment_cfg/conf.yaml",
        )
    robot = dataclasses.replace(
        page,
        cameras=_cameras(page, order.get("video"), entry),
        state=state,
        action=action,
        horizon=horizon,
    )
    statistics = Statistics.from_metadata(folder.metadata, page.tag, state=state, action=action)
    return robot, statistics


def _orders(conf: str | None, tag: str) -> tuple[dict[str, list[str]], list[str] | None]:
    """Concatenation orders and relative keys of ``conf.yaml`` (DreamZero spec 6.4); empty where it does not say."""
    if conf is None:
        return {}, None
    try:
        parsed = yaml.safe_load(conf)
    except yaml.YAMLError as error:
        raise CheckpointError("experiment_cfg/conf.yaml is not valid YAML", got=str(error)) from error
    if not isinstance(parsed, Mapping):
        return {}, None
    orders: dict[str, list[str]] = {}
    block = (parsed.get("transforms") or {}).get(tag) if isinstance(parsed.get("transforms"), Mapping) else None
    for transform in (block or {}).get("transforms", []) if isinstance(block, Mapping) else []:
        if isinstance(transform, Mapping) and str(transform.get("_target_", "")).endswith("ConcatTransform"):
            for kind in ("video", "state", "action"):
                names = transform.get(f"{kind}_concat_order")
                if names:
                    orders[kind] = [str(n).removeprefix(f"{kind}.") for n in names]
    relative = parsed.get("relative_action_keys") if parsed.get("relative_action", True) else []
    return orders, None if relative is None else [str(r).removeprefix("action.") for r in relative]


def _fields(
    page: Embodiment, known: tuple[FieldSpec, ...], order: list[str] | None, entry: Mapping[str, Any], kind: str
) -> tuple[FieldSpec, ...]:
    """Fields in the checkpoint's order, with the checkpoint's widths."""
    # State and action share names but not flags; the page's own entry of this kind wins.
    by_name = {f.name: f for f in (*page.state, *page.action, *known)}
    names = order or [f.name for f in known]
    fields = []
    for name in names:
        if name not in by_name:
            raise ConfigError(
                f"the checkpoint's {kind} field {name!r} is not on the embodiment page {page.tag!r}",
                expected=f"fields {sorted(by_name)}",
                remedy="add the field, with its unit and kind, to the embodiment page",
            )
        field = by_name[name]
        (dim,) = _numbers(entry, kind, name, "shape", 1) or (field.dim,)
        fields.append(dataclasses.replace(field, dim=dim))
    return tuple(fields)


def _cameras(page: Embodiment, order: list[str] | None, entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Cameras in the checkpoint's view order with the raw sizes of its metadata."""
    by_name = {c.name: c for c in page.cameras}
    cameras = []
    for name in order or list(by_name):
        if name not in by_name:
            raise ConfigError(
                f"the checkpoint's camera {name!r} is not on the embodiment page {page.tag!r}",
                expected=f"cameras {list(by_name)}",
            )
        camera = by_name[name]
        width, height = _numbers(entry, "video", name, "resolution", 2) or (camera.width, camera.height)
        cameras.append(dataclasses.replace(camera, width=width, height=height))
    return tuple(cameras)


def _numbers(entry: Mapping[str, Any], kind: str, name: str, key: str, count: int) -> tuple[int, ...] | None:
    """``count`` positive integers of ``modalities.<kind>.<name>.<key>`` in ``metadata.json``; None if it is absent.

    Raises:
        CheckpointError: something else is there.
    """
    value: Any = entry
    for part in ("modalities", kind, name, key):
        if not isinstance(value, Mapping):
            raise CheckpointError(f"metadata.json: no object above {part!r} of {kind}.{name}", got=repr(value)[:80])
        value = value.get(part)
        if value is None:
            return None
    if not isinstance(value, list) or len(value) != count or any(type(v) is not int or v < 1 for v in value):
        raise CheckpointError(
            f"metadata.json: {key} of {kind} {name!r} is unusable",
            got=repr(value)[:80],
            expected=f"{count} positive integer(s)",
        )
    return tuple(value)


def synthetic_metadata(embodiment: Embodiment) -> dict[str, Any]:
    """Made-up statistics for networks without weights: relative joints within 0.05 units, fractions within [0, 1].

    They exist so that the machinery can run; they describe no robot.
    """

    def entry(field: FieldSpec) -> dict[str, list[float]]:
        low, high = (0.0, 1.0) if field.kind == "gripper" and not field.relative else (-3.0, 3.0)
        if field.relative:
            low, high = -0.05, 0.05
        return {"q01": [low] * field.dim, "q99": [high] * field.dim}

    return {
        embodiment.tag: {
            "embodiment_tag": embodiment.tag,
            "statistics": {
                "state": {f.name: entry(f) for f in embodiment.state},
                "action": {f.name: entry(f) for f in embodiment.action},
            },
            "modalities": {
                "video": {c.name: {"resolution": [c.width, c.height], "channels": 3} for c in embodiment.cameras},
                "state": {f.name: {"shape": [f.dim]} for f in embodiment.state},
                "action": {f.name: {"shape": [f.dim]} for f in embodiment.action},
            },
        }
    }


def _umt5(checkpoint: Path | None, given: str | None, network: DreamZeroConfig | None) -> UMT5Tokenizer | None:
    """Find and try the tokenizer, before minutes are spent on weights; None when the network is not known.

    Raises:
        TokenizerError: absent, unreadable, or with ids beyond the text encoder's vocabulary.
    """
    try:
        place = find_tokenizer_folder(checkpoint, given)
        if network is None:
            return None
        tokens = UMT5Tokenizer.from_folder(place, network.dit.text_len, vocab_size=network.text.vocab)
    except TokenizerFileError as error:
        raise TokenizerError(error.what, got="; ".join(error.problems) or None, remedy=error.remedy) from error
    try:
        tokens([NEGATIVE_PROMPT])
    except ModelError as error:
        raise TokenizerError(f"the tokenizer in {place} does not fit the network", got=str(error)) from error
    return tokens


def _random_policy(
    robot: Embodiment,
    preset: str,
    tokenizer: str | None,
    device: torch.device,
    dtype: torch.dtype,
    config: EngineConfig,
    progress: Progress,
) -> DreamZeroPolicy:
    if preset not in RANDOM_PRESETS:
        raise ConfigError("unknown random network", got=repr(preset), expected=f"one of {list(RANDOM_PRESETS)}")
    network_config = DreamZeroConfig.tiny() if preset == "tiny" else DreamZeroConfig.dreamzero_14b()
    progress(f"making the {preset} network with random weights", 0.0)
    network = DreamZero.with_random_weights(network_config, device=device, dtype=dtype)
    robot = dataclasses.replace(robot, horizon=network_config.action_horizon)
    tokens: Tokenizer
    if tokenizer:
        found = _umt5(None, tokenizer, network_config)
        assert found is not None
        tokens = found
    else:
        tokens = ByteTokenizer(network_config.dit.text_len, truncate=preset == "14b")
    statistics = Statistics.from_metadata(synthetic_metadata(robot), robot.tag, state=robot.state, action=robot.action)
    progress("network ready", 1.0)
    return DreamZeroPolicy(
        network,
        robot,
        statistics,
        tokens,
        config,
        weights=f"RANDOM WEIGHTS ({preset} network, never trained): not a policy",
        random_weights=True,
    )
