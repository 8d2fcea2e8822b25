"""The four networks of DreamZero under one roof, with the tensor names of the published checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .config import DreamZeroConfig
from .dit import CausalDiT
from .fp8_layout import is_scale
from .image_encoder import ImageEncoder
from .text_encoder import TextEncoder
from .vae import VideoVAE

Convert = Callable[[str, Tensor], Mapping[str, Tensor]]
"""A tensor to the entries that replace it in the network: itself, or 8-bit values and their scale."""


class DreamZero(nn.Module):
    """Weights of the DiT (``model``), umT5 (``text_encoder``), CLIP (``image_encoder``) and VAE (``vae``).

    ``state_dict()`` has the published names without their ``action_head.`` prefix (DreamZero spec 6.2). The module has
    no forward: the engine calls its parts.
    """

    def __init__(self, config: DreamZeroConfig) -> None:
        super().__init__()
        self.config = config
        self.model = CausalDiT(config.dit)
        self.text_encoder = TextEncoder(config.text)
        self.image_encoder = ImageEncoder(config.image)
        self.vae = VideoVAE(config.vae)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.patch_embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.model.patch_embedding.weight.device

    @classmethod
    def on_meta(cls, config: DreamZeroConfig) -> DreamZero:
        """Build without allocating: names, shapes and counts only."""
        with torch.device("meta"), _NothingToFill():
            return cls(config).requires_grad_(False).eval()

    @classmethod
    def with_random_weights(
        cls,
        config: DreamZeroConfig,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        convert: Convert | None = None,
        only: str = "",
    ) -> DreamZero:
        """A network that was never trained, for tests, demos of the machinery and benchmarks. It is not a policy.

        All parameters are random, also those that training starts at zero, and scaled so that activations stay finite.
        The draw depends on seed, device kind and dtype. ``convert``, ``only``: see ``checkpoint.load_weights``.
        """
        network = cls.on_meta(config)
        generator = torch.Generator(device=device).manual_seed(seed)
        state: dict[str, Tensor] = {}
        for name, p in network.state_dict().items():
            # One generator for all: what is not kept is drawn, unless nothing that is kept comes after it.
            if not name.startswith(only) and state:
                break
            drawn = _random_parameter(name, tuple(p.shape), generator, device, dtype)
            if name.startswith(only):
                state |= {name: drawn} if convert is None else convert(name, drawn)
        network.install(state, only=only)
        return network

    def install(self, state: Mapping[str, Tensor], *, only: str = "") -> None:
        """Give a network on the meta device all its tensors; scales of 8-bit weights become buffers of their layers.

        Args:
            only: beginning of the names that get one, e.g. ``model.``; the others stay on the meta device.
        """
        for name, tensor in state.items():
            if is_scale(name):
                layer, _, leaf = name.rpartition(".")
                self.get_submodule(layer).register_buffer(leaf, tensor)
        values = {n: t if is_scale(n) else nn.Parameter(t, requires_grad=False) for n, t in state.items()}
        there = {n: t for n, t in self.state_dict().items() if not n.startswith(only)}
        self.load_state_dict(there | values, strict=True, assign=True)
        self.requires_grad_(False).eval()


class _NothingToFill(TorchFunctionMode):
    """Layers fill their parameters when they are made. Without memory there is nothing to fill, and PyTorch's own way
    of finding that out imports its compiler, which takes seconds."""

    _fills = frozenset({nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_, torch.Tensor.uniform_,
                        torch.Tensor.normal_, torch.Tensor.fill_, torch.Tensor.zero_})  # fmt: skip

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in self._fills:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def _random_parameter(
    name: str, shape: tuple[int, ...], generator: torch.Generator, device: torch.device | str, dtype: torch.dtype
) -> Tensor:
    """Matrices N(0, 1/fan_in), gains 1 + N(0, 0.1), biases N(0, 0.1), modulation N(0, 0.3), embeddings N(0, 0.5)."""
    draw = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    leaf = name.rsplit(".", 1)[-1]
    if leaf in ("gamma",) or (leaf == "weight" and len(shape) == 1):
        value = 1 + 0.1 * draw
    elif leaf in ("bias", "b") or len(shape) < 2:
        value = 0.1 * draw
    elif "modulation" in name:
        value = 0.3 * draw
    elif "embedding" in name and "patch_embedding" not in name and leaf in ("weight", "cls_embedding", "pos_embedding"):
        linear = name.startswith(("model.text_embedding", "model.time_embedding"))
        value = draw / math.sqrt(shape[-1]) if linear else 0.5 * draw
    elif leaf == "W":
        value = draw / math.sqrt(shape[1])
    else:
        value = draw / math.sqrt(math.prod(shape[1:]))
    return value.to(dtype)
