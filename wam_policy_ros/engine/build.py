"""From a checkpoint folder, or from nothing but a seed, to a policy that can be called."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from wam_policy_ros.contract.embodiment import Embodiment, get_embodiment
from wam_policy_ros.contract.errors import CheckpointError, ConfigError
from wam_policy_ros.contract.interface import FieldSpec
from wam_policy_ros.contract.normalization import Statistics
from wam_policy_ros.contract.policy_thread import WARNING
from wam_policy_ros.contract.predicted import KEY as VIDEO_STEPS
from wam_policy_ros.contract.predicted import trained_steps
from wam_policy_ros.model.checkpoint import read_folder
from wam_policy_ros.model.config import DreamZeroConfig
from wam_policy_ros.model.errors import CheckpointFileError
from wam_policy_ros.model.fingerprint import FullHash, fingerprint, known_hash, tensors_hash
from wam_policy_ros.model.tokenizer import ByteTokenizer, Tokenizer

from .config import EngineConfig
from .device import no_memory_is_overload, on_device
from .parallel.ranks import Ranks
from .policy import DreamZeroPolicy, picture_hw
from .preflight import Platform, refuse_impossible, warnings_of
from .recommended import recommended
from .survey import load_tokenizer, survey
from .weights import WeightSource

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
    hash_all: bool = False,
    progress: Progress = lambda text, fraction: None,
) -> DreamZeroPolicy:
    """Build the policy the node, the server and the tools use.

    Args:
        embodiment: tag or alias.
        checkpoint: folder of a published checkpoint; or
        random_weights: ``tiny`` or ``14b``: an untrained network for tests and benchmarks. Exactly one of the two.
        tokenizer: folder with ``tokenizer.json`` of umt5-xxl; default: looked for inside the checkpoint folder.
        hash_all: let ``weights_hash`` cover every byte of the weights; the deterministic tier always does. Without, it
            does where that was computed before.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1``, ... (``cuda`` also names AMD GPUs in PyTorch).
        config: None: as the checkpoint recommends, else as published.
        progress: called with a text and a fraction in [0, 1]; a text that begins with ``WARNING`` is one.

    Raises:
        ConfigError: contradictory or unknown options.
        CheckpointError, StatisticsError, TokenizerError: the folder cannot be used; every fault is named.
        Overloaded: the device has no memory for it.
    """
    if bool(checkpoint) == bool(random_weights):
        raise ConfigError(
            "exactly one of checkpoint and random_weights must be given",
            got=f"checkpoint={checkpoint!r}, random_weights={random_weights!r}",
            remedy="give the checkpoint folder, or random_weights: tiny to try the machinery without weights",
        )
    wanted = recommended(checkpoint, embodiment)
    config = config or EngineConfig.from_dict(wanted.options)
    where = resolve_device(device)
    with on_device(where), no_memory_is_overload("the network"):
        known = warnings_of(config, Platform.of(where))
        for line in known:
            progress(WARNING + line, 0.0)
        policy = _build(embodiment, checkpoint, random_weights, tokenizer, where, config, hash_all, progress)
        for line in policy.warnings:
            progress(WARNING + line, 1.0)
    policy.warnings[:0] = known
    if wanted.execute_steps is not None:
        details = {**policy.spec.details, "execute_steps": wanted.execute_steps}
        frames = 4 * policy.network.config.dit.num_frame_per_block
        if wanted.frame_offsets is not None and (
            due := trained_steps(wanted.frame_offsets, wanted.execute_steps, frames)
        ):
            details[VIDEO_STEPS] = due
        policy.spec = dataclasses.replace(policy.spec, details=details)
    return policy


def _build(
    embodiment: str,
    checkpoint: str | None,
    random_weights: str | None,
    tokenizer: str | None,
    where: torch.device,
    config: EngineConfig,
    hash_all: bool,
    progress: Progress,
) -> DreamZeroPolicy:
    dtype = resolve_dtype(config.dtype, where)
    if random_weights:
        return _random_policy(get_embodiment(embodiment), random_weights, tokenizer, where, dtype, config, progress)
    assert checkpoint is not None
    try:
        folder = read_folder(checkpoint)
        found = survey(folder, embodiment=embodiment, tokenizer=tokenizer or None)
        robot, statistics, tokens = found.demand(get_embodiment(embodiment).tag)
        # Before gigabytes are read; the step asks again for what it is given.
        assert found.config is not None
        refuse_impossible(config, Platform.of(where), found.config.dit, dtype)
        source, shards = WeightSource(checkpoint=checkpoint), {entry.shard for entry in folder.tensors.values()}
        with _ranks(config, source, where, dtype, found.config, robot) as ranks:
            # Beside the loading: both read the same pages.
            with FullHash(shards) if hash_all or config.deterministic else nullcontext() as hashing:
                network = source.load(config, where, dtype, progress)
                if hashing is not None and not hashing.done:
                    progress("hashing the weights", 1.0)
                known = known_hash(shards) or fingerprint(shards) if hashing is None else hashing.result()
            policy = DreamZeroPolicy(
                network,
                robot,
                statistics,
                tokens,
                config,
                weights=folder.title,
                weights_hash=known,
                ranks=ranks,
                progress=progress,
            )
            policy.prepare(progress)
    except CheckpointFileError as error:
        raise CheckpointError(error.what, problems=error.problems, remedy=error.remedy) from error
    return policy


@contextmanager
def _ranks(
    config: EngineConfig,
    weights: WeightSource,
    device: torch.device,
    dtype: torch.dtype,
    network: DreamZeroConfig,
    robot: Embodiment,
) -> Iterator[Ranks | None]:
    """The processes of the other GPUs, which read their weights while this one does; None on one GPU. A policy that
    does not come about ends them."""
    if config.gpus == 1:
        yield None
        return
    hw = picture_hw(network, robot)
    ranks = Ranks(config, weights, device=device, dtype=dtype, picture_hw=hw)
    try:
        yield ranks
    except BaseException:
        ranks.end()
        raise


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
    refuse_impossible(config, Platform.of(device), network_config.dit, dtype)
    progress(f"making the {preset} network with random weights", 0.0)
    robot = dataclasses.replace(robot, horizon=network_config.action_horizon)
    tokens: Tokenizer
    if tokenizer:
        found = load_tokenizer(None, tokenizer, network_config)
        assert found is not None
        tokens = found
    else:
        # The 14b network stands for the published one in benchmarks, so its texts are as long as that one's.
        tokens = ByteTokenizer(network_config.dit.text_len, bytes_per_token=4 if preset == "14b" else 1)
    statistics = Statistics.from_metadata(synthetic_metadata(robot), robot.tag, state=robot.state, action=robot.action)
    source = WeightSource(random=network_config)
    # Drawn by a generator of PyTorch's whose numbers depend on the kind of device.
    drawn = f"random {preset}, seed 0, {dtype}, {device.type}, torch {torch.__version__}"
    with _ranks(config, source, device, dtype, network_config, robot) as ranks:
        network = source.load(config, device, dtype, progress)
        progress("network ready", 1.0)
        policy = DreamZeroPolicy(
            network,
            robot,
            statistics,
            tokens,
            config,
            weights=f"RANDOM WEIGHTS ({preset} network, never trained): not a policy",
            random_weights=True,
            weights_hash=tensors_hash(network.state_dict()) if preset == "tiny" else drawn,
            ranks=ranks,
            progress=progress,
        )
        policy.prepare(progress)
    return policy
