"""Where a network's weights come from, in a form that another process can be told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from wam_policy_ros.contract.errors import CheckpointError, ConfigError
from wam_policy_ros.model.checkpoint import read_folder
from wam_policy_ros.model.config import DreamZeroConfig
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.model.errors import CheckpointFileError

from .config import EngineConfig
from .fp8 import fp8_for
from .fp8_checkpoint import load_network, online

DIT = "model."
"""Beginning of the names of the DiT's tensors: all that a rank without encoders needs."""


@dataclass(frozen=True)
class WeightSource:
    """A checkpoint folder, or a network whose weights are drawn. Exactly one of the two.

    Attributes:
        checkpoint: folder.
        random: numbers of a network that was never trained; seed: of the draw.
    """

    checkpoint: str = ""
    random: DreamZeroConfig | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if bool(self.checkpoint) == (self.random is not None):
            raise ConfigError("weights come from a checkpoint or are drawn", got=repr(self))

    def load(
        self,
        config: EngineConfig,
        device: torch.device,
        dtype: torch.dtype,
        progress: Callable[[str, float], None],
        *,
        only: str = "",
    ) -> DreamZero:
        """The network as ``config`` runs it, the same bits in every process.

        Args:
            only: beginning of the names that are loaded; the other modules stay on the meta device.

        Raises:
            CheckpointError: the folder cannot be used.
        """
        fp8 = fp8_for(device) if config.linears == "fp8" else None
        if self.random is not None:
            # Quantised as they are drawn, so that no more than the step needs is ever on the device.
            convert = None if fp8 is None else online(fp8)
            return DreamZero.with_random_weights(
                self.random, seed=self.seed, device=device, dtype=dtype, convert=convert, only=only
            )
        try:
            folder = read_folder(self.checkpoint)
            return load_network(folder, fp8=fp8, device=device, dtype=dtype, progress=progress, only=only)
        except CheckpointFileError as error:
            raise CheckpointError(error.what, problems=error.problems, remedy=error.remedy) from error
