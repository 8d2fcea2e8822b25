"""Linear layers of the fused step: native precision, or FP8 weights with one scale per output row.

A layer gives a ``Product``: the raw GEMM output with its scales and bias still to be applied, because the kernel that
reads it next applies them for free. See the table ``KEPT_NATIVE`` for what is never quantised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wam_policy_ros.contract.errors import ConfigError

from .fp8 import Fp8
from .kernels.ops import Product, Quantized, quantize_rows

KEPT_NATIVE: dict[str, str] = {
    "patch_embedding": "first layer on raw latents; 0.01 % of the operations",
    "text_embedding": "runs once per prompt",
    "img_emb": "runs once per window",
    "time_embedding, time_projection": "tables of 17 timesteps, computed once; their error would reach every token",
    "state_encoder, action_encoder, action_decoder": "25 tokens; their error is the action's error",
    "head": "last layer, 64 outputs; its error is the flow's error",
    "norms, modulation": "element-wise, float32 arithmetic",
    "text encoder, image encoder, VAE": "outside the loop; a prompt or a window at a time",
}
"""What stays in the network's dtype when ``linears`` is ``fp8``, and why."""


class Linear(Protocol):
    """A linear layer of the fused step."""

    def __call__(self, x: Tensor | Quantized) -> Product: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class NativeLinear:
    """``x @ weight.T`` in the network's dtype.

    Attributes:
        weight: ``[N, K]``; bias: ``[N]`` or None.
    """

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor | Quantized) -> Product:
        if isinstance(x, Quantized):
            raise TypeError("a native layer was given quantised activations")
        return Product(F.linear(x, self.weight), None, None, self.bias)

    @property
    def nbytes(self) -> int:
        return _nbytes(self.weight) + (_nbytes(self.bias) if self.bias is not None else 0)


@dataclass(frozen=True)
class Fp8Linear:
    """FP8 weights with one float32 scale per output row; activations with one per token.

    On a GPU ``torch._scaled_mm``, on a CPU its plain twin in float32.

    Attributes:
        weight: fp8 ``[N, K]``; scale: float32 ``[N]``, the weight is ``weight.float() * scale[:, None]``.
        bias: ``[N]`` in the network's dtype, or None.
        fp8: the format; dtype: of the raw product.
        scales_in_gemm: apply both scales inside the GEMM (row-wise kernel) instead of in the kernel that follows.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    fp8: Fp8
    dtype: torch.dtype
    one: Tensor
    scales_in_gemm: bool = True

    @classmethod
    def from_weight(cls, weight: Tensor, bias: Tensor | None, fp8: Fp8, *, scales_in_gemm: bool = True) -> Fp8Linear:
        """Quantise ``weight [N, K]`` row by row, round to nearest."""
        q = quantize_rows(weight, fp8)
        one = torch.ones((), dtype=torch.float32, device=weight.device)
        return cls(q.values, q.row_scale, bias, fp8, weight.dtype, one, scales_in_gemm)

    @classmethod
    def from_layers(cls, layers: Sequence[nn.Linear], fp8: Fp8, *, scales_in_gemm: bool = True) -> Fp8Linear:
        """Layers with the same input, stacked: quantised here, or as they are when their weights are 8-bit already."""
        weight = torch.cat([p.weight for p in layers]) if len(layers) > 1 else layers[0].weight
        bias = torch.cat([p.bias for p in layers])
        if not is_quantised(layers[0]):
            return cls.from_weight(weight, bias, fp8, scales_in_gemm=scales_in_gemm)
        if weight.dtype != fp8.dtype:
            raise ConfigError("8-bit weights of another format", got=weight.dtype, expected=fp8.name)
        scale = torch.cat([cast(Tensor, p.weight_scale) for p in layers])
        one = torch.ones((), dtype=torch.float32, device=weight.device)
        return cls(weight, scale, bias, fp8, bias.dtype, one, scales_in_gemm)

    def __call__(self, x: Tensor | Quantized) -> Product:
        q = x if isinstance(x, Quantized) else quantize_rows(x, self.fp8)
        if self.weight.device.type == "cpu":
            raw = (q.values.float() @ self.weight.float().T).to(self.dtype)
            return Product(raw, q.row_scale, self.scale, self.bias)
        if self.scales_in_gemm:
            raw = torch._scaled_mm(
                q.values,
                self.weight.t(),
                scale_a=q.row_scale.expand(len(q.values)).unsqueeze(1),
                scale_b=self.scale.unsqueeze(0),
                out_dtype=self.dtype,
                use_fast_accum=True,
            )
            return Product(raw, None, None, self.bias)
        raw = torch._scaled_mm(
            q.values, self.weight.t(), scale_a=self.one, scale_b=self.one, out_dtype=self.dtype, use_fast_accum=True
        )
        return Product(raw, q.row_scale, self.scale, self.bias)

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(t) for t in (self.weight, self.scale, self.bias) if t is not None)


def finished(product: Product) -> Tensor:
    """The value of a product ``[M, N]``, for callers outside the loop."""
    out = product.raw.float()
    if product.row_scale is not None:
        out = out * product.row_scale.reshape(-1, 1)
    if product.col_scale is not None:
        out = out * product.col_scale
    if product.bias is not None:
        out = out + product.bias.float()
    return out.to(product.raw.dtype)


def is_quantised(layer: nn.Linear) -> bool:
    """Whether the weights are 8-bit, with ``weight_scale`` beside them (see ``model.fp8_layout``)."""
    return hasattr(layer, "weight_scale")


def native_weight(layer: nn.Linear) -> Tensor:
    """``[N, K]`` in the dtype of the bias: the weights, or what 8-bit weights stand for."""
    if not is_quantised(layer):
        return layer.weight
    scale = cast(Tensor, layer.weight_scale)
    return (layer.weight.float() * scale.unsqueeze(1)).to(layer.bias.dtype)


def fused(*layers: nn.Linear) -> tuple[Tensor, Tensor]:
    """Weights ``[sum N, K]`` and biases of layers with the same input, stacked.

    The layers' own parameters become views of the result, so that the plain network goes on working with them and
    nothing is held twice.
    """
    weight = torch.cat([layer.weight for layer in layers])
    bias = torch.cat([layer.bias for layer in layers])
    start = 0
    for layer in layers:
        stop = start + layer.out_features
        layer.weight = nn.Parameter(weight[start:stop], requires_grad=False)
        layer.bias = nn.Parameter(bias[start:stop], requires_grad=False)
        start = stop
    return weight, bias


def _nbytes(t: Tensor) -> int:
    return t.numel() * t.element_size()


def layer_bytes(layers: Iterator[Linear]) -> int:
    """Device memory of the layers."""
    return sum(layer.nbytes for layer in layers)
