"""Self-attention of the fused step: which kernel runs, and the scales of its FP8 form.

*Exact* in its algorithm: all of them compute unmasked softmax attention over the filled rows of the window.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from wam_policy_ros.contract.errors import ConfigError

from .fp8 import Fp8
from .kernels.cudnn_attention import CudnnFp8


class Attention(Protocol):
    """``q [B, L, H, Dh]``, ``k, v [B, T, H, Dh]`` (views of a window) to ``[B, L, H, Dh]``.

    Attributes:
        kv_dtype: of q, k and v; None for the network's dtype.
    """

    @property
    def kv_dtype(self) -> torch.dtype | None: ...

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor: ...


class TorchAttention:
    """``scaled_dot_product_attention``; ``cudnn`` asks for cuDNN's kernel, else PyTorch chooses."""

    kv_dtype = None

    def __init__(self, *, cudnn: bool) -> None:
        self._backends = [SDPBackend.CUDNN_ATTENTION] if cudnn else None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        heads_first = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        if self._backends is None:
            out = F.scaled_dot_product_attention(*heads_first)
        else:
            with sdpa_kernel(self._backends):
                out = F.scaled_dot_product_attention(*heads_first)
        return out.transpose(1, 2)

    def check(self, like: Tensor) -> None:
        """Whether the kernel that was asked for takes ``[B, L, H, Dh]`` tensors like this one here.

        Raises:
            ConfigError: it does not.
        """
        try:
            self(like, like, like, 0)
        except RuntimeError as error:
            raise ConfigError(
                "cuDNN has no attention for this network on this device",
                got=f"{str(like.dtype).removeprefix('torch.')} {list(like.shape)}: {str(error).splitlines()[0]}",
                remedy="set attention: torch",
            ) from error


class Fp8Scales:
    """Static scales of q, k and v per layer, from the weights alone: no value can saturate, none has to be measured.

    A row normalised to mean square one has no entry above sqrt(D), and rotating pairs keeps their norm, so
    ``|q| <= sqrt(D) * max|w_q|`` (the same for k). For v, with ``h = n * (1 + scale) + shift`` and ``|n| <= sqrt(D)``:
    ``|v_j| <= |W_j * (1 + scale)| * sqrt(D) + |W_j . shift + b_j|`` (Cauchy-Schwarz), over all modulations that can
    occur. FP8 is a floating-point format: a bound that is ten times too wide costs no precision, only range.

    Attributes:
        q, k, v: per layer, the factor a value is multiplied with before it is rounded to fp8.
    """

    def __init__(self, fp8: Fp8) -> None:
        self.fp8 = fp8
        self.q: list[float] = []
        self.k: list[float] = []
        self.v: list[float] = []

    def add_layer(
        self, norm_q: Tensor, norm_k: Tensor, weight_v: Tensor, bias_v: Tensor, scale: Tensor, shift: Tensor
    ) -> None:
        """
        Args:
            norm_q, norm_k: weights of the norms ``[D]``.
            weight_v: ``[D, D]``; bias_v ``[D]``.
            scale, shift: every modulation of this layer that occurs, ``[n, D]``.
        """
        root = math.sqrt(norm_q.numel())
        weight = weight_v.float()
        gains = (weight.square() @ (1 + scale.float()).square().T).sqrt() * root  # [D, n]
        offsets = (weight @ shift.float().T + bias_v.float()[:, None]).abs()
        top = self.fp8.max
        self.q.append(top / (root * float(norm_q.float().abs().max())))
        self.k.append(top / (root * float(norm_k.float().abs().max())))
        self.v.append(top / float((gains + offsets).max()))


class PlainFp8Attention:
    """What an FP8 attention kernel computes, in float32: the twin, and the path of machines without such a kernel.

    The weights of the softmax are not quantised here; a kernel may quantise them.
    """

    def __init__(self, scales: Fp8Scales) -> None:
        self.scales = scales
        self.kv_dtype = scales.fp8.dtype

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        s = self.scales
        out = F.scaled_dot_product_attention(
            q.float().transpose(1, 2) / s.q[layer],
            k.float().transpose(1, 2) / s.k[layer],
            v.float().transpose(1, 2) / s.v[layer],
        ).transpose(1, 2)
        # The result is a mean of rows of v, so v's scale is enough.
        top = s.fp8.max
        return (out * s.v[layer]).clamp(-top, top).to(s.fp8.dtype)


class CudnnFp8Attention:
    """cuDNN's 8-bit kernel with the scales of ``Fp8Scales``; its twin is ``PlainFp8Attention``. For sm_90 and later."""

    def __init__(self, scales: Fp8Scales, device: torch.device) -> None:
        self.scales = scales
        self.kv_dtype = scales.fp8.dtype
        self._kernel = CudnnFp8(device)
        self._scalars: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        if layer not in self._scalars:
            s = self.scales
            self._scalars[layer] = self._kernel.scalars(s.q[layer], s.k[layer], s.v[layer])
        return self._kernel(q, k, v, self._scalars[layer])
