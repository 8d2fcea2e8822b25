"""What a checkpoint folder says about the robot, the network and the tokenizer, without reading a weight.

What the checkpoint says about the robot (raw camera sizes, crop, field order, relative keys, horizon) wins over the
embodiment page; what neither says raises.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from wam_policy_ros.contract.embodiment import Embodiment, get_embodiment
from wam_policy_ros.contract.embodiments import ALL
from wam_policy_ros.contract.errors import CheckpointError, ConfigError, StatisticsError, TokenizerError, WamError
from wam_policy_ros.contract.interface import CameraSpec, FieldSpec
from wam_policy_ros.contract.normalization import Statistics
from wam_policy_ros.contract.prompts import NEGATIVE_PROMPT
from wam_policy_ros.model.checkpoint import CheckpointFolder, check_weights
from wam_policy_ros.model.config import DreamZeroConfig
from wam_policy_ros.model.errors import ModelError, TokenizerFileError
from wam_policy_ros.model.tokenizer import UMT5Tokenizer, find_tokenizer_folder

from .recommended import recommended_of

Robot = tuple[Embodiment, Statistics]


@dataclass(frozen=True)
class Survey:
    """Each part of a folder, or the error that makes it unusable.

    Attributes:
        config: the network's; None when ``config.json`` does not describe a supported one.
        network: why the weights cannot be loaded, or None.
        robots: embodiment tag -> robot or error, for every tag of ``metadata.json`` and the one asked for.
        tokenizer: tried on the negative prompt; None when the network is not known.
    """

    folder: CheckpointFolder
    config: DreamZeroConfig | None
    network: CheckpointError | None
    robots: Mapping[str, Robot | WamError]
    tokenizer: UMT5Tokenizer | TokenizerError | None

    def faults(self, tag: str | None = None) -> list[WamError]:
        """What would stop ``build_policy``, for one embodiment or, with None, for the best of them."""
        out: list[WamError] = [self.network] if self.network is not None else []
        chosen = [self.robots[tag]] if tag is not None else list(self.robots.values())
        if not any(isinstance(r, tuple) for r in chosen):
            out += [r for r in chosen if isinstance(r, WamError)]
        return [*out, self.tokenizer] if isinstance(self.tokenizer, WamError) else out

    def demand(self, tag: str) -> tuple[Embodiment, Statistics, UMT5Tokenizer]:
        """The robot, its statistics and the tokenizer.

        Raises:
            StatisticsError, TokenizerError, ConfigError: that is the only thing wrong.
            CheckpointError: several things, or the network's own files; ``problems`` lists them all.
        """
        faults = self.faults(tag)
        if len(faults) == 1:
            raise faults[0]
        if faults:
            lines = [line for fault in faults for line in fault_lines(fault)]
            raise CheckpointError(
                f"checkpoint {self.folder.path} cannot be used ({len(lines)} problems)",
                problems=lines,
                remedy="wam inspect shows the folder; nothing was loaded",
            )
        robot, tokenizer = self.robots[tag], self.tokenizer
        assert isinstance(robot, tuple) and isinstance(tokenizer, UMT5Tokenizer)  # no faults: they are there
        return *robot, tokenizer


def fault_lines(fault: WamError) -> list[str]:
    """One line per problem."""
    return fault.lines() if isinstance(fault, CheckpointError) else [str(fault)]


def survey(folder: CheckpointFolder, *, embodiment: str | None = None, tokenizer: str | None = None) -> Survey:
    """Look at everything once. Never raises for what is wrong in the folder.

    Args:
        embodiment: tag or alias that must be among ``robots``; None: all tags of the folder.
        tokenizer: file or folder a person named.

    Raises:
        ConfigError: ``embodiment`` is not known.
    """
    config, network = None, None
    try:
        config = folder.config
        problems = check_weights(folder)
    except ModelError as error:
        problems = [f"config.json: {error}", *folder.problems]
    if problems:
        remedy = "download the folder again, completely, or fix config.json; nothing was loaded"
        network = CheckpointError("the network cannot be loaded", problems=problems, remedy=remedy)
    tags = [get_embodiment(embodiment).tag] if embodiment is not None else list(folder.metadata or {})
    if not tags:  # no metadata.json, nothing asked for: one entry that says so
        tags = [ALL[0].tag]
    robots = {tag: _robot_or_error(folder, tag) for tag in tags}
    return Survey(folder, config, network, robots, _tokenizer_or_error(folder, tokenizer, config))


def _robot_or_error(folder: CheckpointFolder, tag: str) -> Robot | WamError:
    try:
        return describe_robot(folder, tag)
    except WamError as error:
        return error


def _tokenizer_or_error(
    folder: CheckpointFolder, given: str | None, config: DreamZeroConfig | None
) -> UMT5Tokenizer | TokenizerError | None:
    try:
        return load_tokenizer(folder.path, given, config)
    except TokenizerError as error:
        return error


def describe_robot(folder: CheckpointFolder, embodiment: str) -> tuple[Embodiment, Statistics]:
    """The robot as this checkpoint was trained on it, with its statistics. Reads no weights.

    Raises:
        StatisticsError: no metadata.json, no such embodiment in it, or incomplete statistics.
        ConfigError: unknown embodiment, or an action field of unknown kind.
    """
    page = get_embodiment(embodiment)
    config: DreamZeroConfig | None = None
    with contextlib.suppress(ModelError):  # reported by whoever loads the network; statistics can still be judged
        config = folder.config
    horizon = page.horizon if config is None else config.action_horizon
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
    conf = _read_conf(folder.conf, page.tag)
    state = _fields(page, page.state, conf.orders.get("state"), entry, "state")
    action = _fields(page, page.action, conf.orders.get("action"), entry, "action")
    if conf.relative is not None:
        # A misspelled name would turn relative predictions into absolute targets. Fields of other robots are fine: a
        # checkpoint may have been trained on several.
        known = {f.name for e in ALL for f in e.action} | {f.name for f in action}
        if lost := [name for name in conf.relative if name not in known]:
            raise CheckpointError(
                f"experiment_cfg/conf.yaml: relative_action_keys {lost} are no action fields",
                expected=f"names among {[f.name for f in action]}",
            )
        action = tuple(dataclasses.replace(f, relative=f.name in conf.relative) for f in action)
    used = {f"{kind}.{f.name}" for kind, fields in (("state", state), ("action", action)) for f in fields}
    if odd := {k: v for k, v in conf.modes.items() if k in used and v != "q99"}:
        raise CheckpointError(
            "experiment_cfg/conf.yaml asks for another normalisation", got=odd, expected="q99 for every field"
        )
    widths = {f.name: f.dim for f in state}
    if lost := [f.name for f in action if f.relative and widths.get(f.name) != f.dim]:
        raise ConfigError(
            f"relative action fields {lost} have no state field of the same name and width to be relative to",
            got=f"state {widths}",
            remedy="fix the concatenation orders or relative_action_keys in experiment_cfg/conf.yaml",
        )
    robot = dataclasses.replace(
        page,
        cameras=_cameras(page, conf.orders.get("video"), entry),
        state=state,
        action=action,
        horizon=horizon,
        crop_scale=page.crop_scale if conf.crop_scale is None else conf.crop_scale,
        view_height=page.view_height if conf.view_hw is None else conf.view_hw[0],
        view_width=page.view_width if conf.view_hw is None else conf.view_hw[1],
        frame_offsets=recommended_of(folder.metadata, page.tag).frame_offsets or page.frame_offsets,
    )
    if config is not None and config.target_video_hw is None:
        try:
            config.check_picture(2 * robot.view_height, 2 * robot.view_width, "the mosaic of the three views")
        except ModelError as error:
            raise CheckpointError("the pictures do not fit the network", got=str(error)) from error
    statistics = Statistics.from_metadata(folder.metadata, page.tag, state=state, action=action)
    short = [
        f.name
        for f in action
        if (q01 := statistics.action[f.name].q01) is not None and q01.ndim == 2 and len(q01) < horizon
    ]
    if short:
        raise StatisticsError(
            f"statistics per step of {short} have fewer rows than the chunk", expected=f"{horizon} rows"
        )
    flat = [f.name for f in action if f.relative and not statistics.action[f.name].per_horizon]
    if conf.per_horizon and flat:
        raise StatisticsError(
            "conf.yaml says relative_action_per_horizon, but the statistics have one row for all steps",
            got=f"fields {flat}",
            expected="q01 and q99 with one row per step",
            remedy="use the metadata.json that belongs to this checkpoint",
        )
    return robot, statistics


@dataclass(frozen=True)
class _Conf:
    """What inference takes from ``conf.yaml`` (DreamZero spec 6.4); empty where it does not say."""

    orders: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    relative: list[str] | None = None
    per_horizon: bool = False
    crop_scale: float | None = None
    view_hw: tuple[int, int] | None = None
    modes: dict[str, str] = dataclasses.field(default_factory=dict)


def _read_conf(text: str | None, tag: str) -> _Conf:
    if text is None:
        return _Conf()
    try:
        parsed = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise CheckpointError("experiment_cfg/conf.yaml is not valid YAML", got=str(error)) from error
    if not isinstance(parsed, Mapping):
        return _Conf()
    orders: dict[str, Any] = {}
    modes: dict[str, str] = {}
    crop, view = None, None
    for transform in _transforms(parsed, tag):
        target = str(transform.get("_target_", ""))
        if isinstance(found := transform.get("normalization_modes"), Mapping):
            modes |= {str(k): str(v) for k, v in found.items()}
        if target.endswith("ConcatTransform"):
            for kind in ("video", "state", "action"):
                if names := transform.get(f"{kind}_concat_order"):
                    orders[kind] = names
        # The spec names the values, not the classes: a crop with a scale, a resize with a height and a width.
        elif "Crop" in target and transform.get("scale") is not None:
            crop = _number(transform["scale"], "scale", 0.0, 1.0)
        elif "Resize" in target and None not in (transform.get("height"), transform.get("width")):
            view = tuple(int(_number(transform[k], k, 1, 10_000)) for k in ("height", "width"))
    return _Conf(
        {kind: _names(names, f"{kind}_concat_order", kind) for kind, names in orders.items()},
        _relative_keys(parsed),
        _flag(parsed, "relative_action_per_horizon", False),
        crop,
        view,  # type: ignore[arg-type]
        modes,
    )


def _relative_keys(parsed: Mapping[str, Any]) -> list[str] | None:
    """``relative_action_keys``; empty when ``relative_action`` is false, None where the file does not say."""
    if not _flag(parsed, "relative_action", True):
        return []
    keys = parsed.get("relative_action_keys")
    return None if keys is None else _names(keys, "relative_action_keys", "action")


def _names(value: Any, key: str, kind: str) -> list[str]:
    """A list of different field names, without their ``kind.`` prefix. A string is not a list of letters."""
    names = [str(n).removeprefix(f"{kind}.") for n in value] if isinstance(value, list) else []
    if not isinstance(value, list) or not all(isinstance(n, str) for n in value) or len(set(names)) != len(names):
        raise CheckpointError(
            f"experiment_cfg/conf.yaml: {key} is unusable",
            got=repr(value)[:120],
            expected="a list of different field names",
        )
    return names


def _flag(parsed: Mapping[str, Any], key: str, default: bool) -> bool:
    value = default if parsed.get(key) is None else parsed[key]
    if not isinstance(value, bool):
        raise CheckpointError(f"experiment_cfg/conf.yaml: {key} is unusable", got=repr(value), expected="true or false")
    return value


def _transforms(parsed: Mapping[str, Any], tag: str) -> list[Mapping[str, Any]]:
    """The transforms of an embodiment: under ``transforms``, or in the copy that the data set's configuration holds."""
    for path in (("transforms",), ("train_dataset", "all_transforms")):
        block: Any = parsed
        for key in (*path, tag, "transforms"):
            block = block.get(key) if isinstance(block, Mapping) else None
        if isinstance(block, list):
            return [t for t in block if isinstance(t, Mapping)]
    return []


def _number(value: Any, name: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
        wanted = f"more than {low}, at most {high}"
        raise CheckpointError(f"experiment_cfg/conf.yaml: {name} is unusable", got=repr(value)[:80], expected=wanted)
    return float(value)


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


def _cameras(page: Embodiment, order: list[str] | None, entry: Mapping[str, Any]) -> tuple[CameraSpec, ...]:
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
        size = _numbers(entry, "video", name, "resolution", 2)
        if size is None and not page.raw_size_published:
            raise CheckpointError(
                f"metadata.json does not say how large the pictures of camera {name!r} are",
                expected=f"modalities.video.{name}.resolution = [width, height]",
            )
        width, height = size or (camera.width, camera.height)
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


def load_tokenizer(checkpoint: Path | None, given: str | None, network: DreamZeroConfig | None) -> UMT5Tokenizer | None:
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
