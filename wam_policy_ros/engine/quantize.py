"""Linear layers of the fused step: native precision, or FP8 weights with one scale per output row.

A layer gives a ``Product``: the GEMM's output with its bias still to be added, because the kernel that reads it next
adds it for free. An attention would have to take its queries through registers for that, so there the layer
``adds_bias`` itself: an epilogue, which on a GPU was measured to cost 1 % of the product. See the table ``KEPT_NATIVE``
for what is never quantised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wam_policy_ros.contract.errors import ConfigError

from .fp8 import Fp8
from .kernels.ops import Product, Quantized, quantize_rows

KEPT_NATIVE: dict[str, str] = {
    "model.patch_embedding": "first layer on raw latents; 0.01 % of the operations",
    "model.text_embedding": "runs once per prompt",
    "model.img_emb": "runs once per window",
    "model.time_embedding": "tables of 17 timesteps, computed once; their error would reach every token",
    "model.time_projection": "as time_embedding",
    "model.state_encoder": "1 token; its error is the action's error",
    "model.action_encoder": "24 tokens; their error is the action's error",
    "model.action_decoder": "24 tokens; their error is the action's error",
    "model.head": "last layer, 64 outputs; its error is the flow's error",
    "model.blocks.*.modulation": "element-wise, float32 arithmetic",
    "model.blocks.*.norm*": "element-wise, float32 arithmetic",
    "model.blocks.*.*.norm_*": "element-wise, float32 arithmetic",
    "model.blocks.*.bias": "added in float32",
    "text_encoder": "runs once per prompt",
    "image_encoder": "runs once per window",
    "vae": "convolutions; there are no 8-bit kernels for them",
}
"""What stays in the network's dtype when ``linears`` is ``fp8``: beginnings of parameter names, and why."""


class Linear(Protocol):
    """A linear layer of the fused step."""

    def __call__(self, x: Tensor | Quantized) -> Product: ...


@dataclass(frozen=True)
class NativeLinear:
    """``x @ weight.T`` in the network's dtype.

    Attributes:
        weight: ``[N, K]``; bias: ``[N]`` or None.
        adds_bias: whether the product has it already.
    """

    weight: Tensor
    bias: Tensor | None
    adds_bias: bool = False

    def __call__(self, x: Tensor | Quantized) -> Product:
        if isinstance(x, Quantized):
            raise TypeError("a native layer was given quantised activations")
        if self.adds_bias:
            return Product(F.linear(x, self.weight, self.bias))
        return Product(F.linear(x, self.weight), self.bias)


_ALIGNED = 16
"""Both widths of an 8-bit matrix product must be multiples of this; ``torch._scaled_mm`` refuses others."""


@dataclass(frozen=True)
class Fp8Linear:
    """FP8 weights with one float32 scale per output row; activations with one per token.

    On a GPU ``torch._scaled_mm``, which applies both scales itself (the row-wise kernel was the fastest form at every
    shape of the network), on a CPU its plain twin in float32. Widths that the GPU's kernel does not take are padded
    with zeros.

    Attributes:
        weight: fp8 ``[N, K]``, both rounded up; scale: float32 ``[N]``. Their product is the weight.
        bias: ``[outputs]`` in the network's dtype, or None.
        fp8: the format; dtype: of the raw product.
        outputs: columns of the product.
        adds_bias: whether the product has the bias already.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    fp8: Fp8
    dtype: torch.dtype
    outputs: int
    adds_bias: bool = False

    @classmethod
    def from_weight(cls, weight: Tensor, bias: Tensor | None, fp8: Fp8) -> Fp8Linear:
        """Quantise ``weight [N, K]`` row by row, round to nearest."""
        q = quantize_rows(weight, fp8)
        return cls._of(q.values, q.row_scale, bias, fp8, weight.dtype)

    @classmethod
    def from_layers(cls, layers: Sequence[nn.Linear], fp8: Fp8, *, adds_bias: bool = False) -> Fp8Linear:
        """Layers with the same input, stacked: quantised here, or as they are when their weights are 8-bit already."""
        weight = torch.cat([p.weight for p in layers]) if len(layers) > 1 else layers[0].weight
        bias = torch.cat([p.bias for p in layers])
        if not is_quantised(layers[0]):
            layer = cls.from_weight(weight, bias, fp8)
        elif weight.dtype == fp8.dtype:
            layer = cls._of(weight, torch.cat([cast(Tensor, p.weight_scale) for p in layers]), bias, fp8, bias.dtype)
        else:
            raise ConfigError("8-bit weights of another format", got=weight.dtype, expected=fp8.name)
        return replace(layer, adds_bias=adds_bias)

    @classmethod
    def _of(cls, values: Tensor, scale: Tensor, bias: Tensor | None, fp8: Fp8, dtype: torch.dtype) -> Fp8Linear:
        rows, columns = (-(-n // _ALIGNED) * _ALIGNED for n in values.shape)
        scale = F.pad(scale, (0, rows - len(scale)), value=1.0)
        return cls(_padded(values, rows, columns), scale, bias, fp8, dtype, outputs=len(values))

    def __call__(self, x: Tensor | Quantized) -> Product:
        values, row_scale = x if isinstance(x, Quantized) else quantize_rows(x, self.fp8)
        values = _padded(values, len(values), self.weight.shape[1])
        bias = self.bias if self.adds_bias else None
        if bias is not None and len(bias) < len(self.weight):
            bias = F.pad(bias, (0, len(self.weight) - len(bias)))
        if values.device.type == "cpu":
            raw = values.float() @ self.weight.float().T
            raw = raw * row_scale.unsqueeze(1) * self.scale
            raw = (raw if bias is None else raw + bias.float()).to(self.dtype)
        else:
            raw = torch._scaled_mm(
                values,
                self.weight.t(),
                scale_a=row_scale.unsqueeze(1),
                scale_b=self.scale.unsqueeze(0),
                bias=bias,
                out_dtype=self.dtype,
                use_fast_accum=True,
            )
        if raw.shape[1] != self.outputs:
            raw = raw[:, : self.outputs].contiguous()
        return Product(raw, None if self.adds_bias else self.bias)


def _padded(values: Tensor, rows: int, columns: int) -> Tensor:
    """8-bit ``values`` with zeros below and to the right. A zero is byte 0 in every format."""
    missing = (0, columns - values.shape[1], 0, rows - values.shape[0])
    return F.pad(values.view(torch.uint8), missing).view(values.dtype) if any(missing) else values


def finished(product: Product) -> Tensor:
    """The value of a product ``[M, N]``: outside the loop, or of a layer that ``adds_bias``."""
    raw, bias = product
    return raw if bias is None else (raw.float() + bias.float()).to(raw.dtype)


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
