"""Which form each causal convolution of the VAE takes. The forms compute the same sums; which is fastest differs.

A plan is data: fixed (the same kernels in every process), or the result of :mod:`.conv_check`, which measures. It
can be written down and used again.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from wam_policy_ros.contract.errors import ConfigError

Form = Literal["stacked", "channels_last", "contiguous"]
FORMS: tuple[Form, ...] = get_args(Form)


@dataclass(frozen=True)
class ConvKey:
    """A shape of convolution that the encoder contains.

    Attributes:
        inputs, outputs: channels.
        reduction: height and width of the picture over those of the activation.
    """

    inputs: int
    outputs: int
    reduction: int

    def __str__(self) -> str:
        return f"{self.inputs}->{self.outputs} at 1/{self.reduction}"


@dataclass(frozen=True)
class ConvPlan:
    """Form per convolution.

    Attributes:
        default: of the shapes that ``forms`` does not name.
        forms: ``str(ConvKey)`` -> form.
        benchmark: let cuDNN (MIOpen) time its algorithms at the first call of every shape. Off: its heuristic picks.
            On ROCm the search can take many minutes, so it is never turned on by itself.
        deterministic: only convolution algorithms that give the same bits every time.
    """

    default: Form = "channels_last"
    forms: Mapping[str, Form] = field(default_factory=dict)
    benchmark: bool = False
    deterministic: bool = True

    def __post_init__(self) -> None:
        if unknown := sorted({self.default, *self.forms.values()} - set(FORMS)):
            raise ConfigError("unknown form of convolution", got=unknown, expected=f"one of {list(FORMS)}")

    def form(self, key: ConvKey) -> Form:
        return self.forms.get(str(key), self.default)

    def flags(self) -> AbstractContextManager[None]:
        """Context in which the convolutions run."""
        return convolution_flags(benchmark=self.benchmark, deterministic=self.deterministic)


def fixed_plan() -> ConvPlan:
    """The plan to run with when nothing is measured: the same in every process.

    NVIDIA: stacked taps won on Hopper at all shapes but the smallest pictures (``wam bench vae``: 30 against 36 ms for
    the clip of a call). AMD: nothing was measured, and channels-last is what MIOpen prefers.
    """
    if torch.version.hip:
        return ConvPlan()
    small = {str(ConvKey(384, 384, 8)): "channels_last", str(ConvKey(192, 192, 2)): "channels_last"}
    return ConvPlan(default="stacked", forms=cast(Mapping[str, Form], small))


def convolution_flags(
    *, benchmark: bool, deterministic: bool, allow_tf32: bool | None = None
) -> AbstractContextManager[None]:
    """The convolution library's switches for a block of code; ``allow_tf32`` None: as it is."""
    cudnn = torch.backends.cudnn
    tf32 = cudnn.allow_tf32 if allow_tf32 is None else allow_tf32
    return cudnn.flags(enabled=cudnn.enabled, benchmark=benchmark, deterministic=deterministic, allow_tf32=tf32)


class CausalConv:
    """A 3x3x3 convolution over windows of frames, prepared in one form. Weights are those of the plain layer.

    Args:
        weight: ``[O, C, 3, 3, 3]``. bias: ``[O]``.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, form: Form) -> None:
        self.form, self.bias = form, bias
        self.inputs = weight.shape[1]
        # The newest tap alone: what is left of the sum where both frames before are zeros.
        self._newest = weight[:, :, -1].contiguous(memory_format=torch.channels_last)
        if form == "stacked":
            flat = weight.permute(0, 2, 1, 3, 4).flatten(1, 2)
            self._weight = flat.contiguous(memory_format=torch.channels_last)
        elif form == "channels_last":
            self._weight = weight.contiguous(memory_format=torch.channels_last_3d)
        else:
            self._weight = weight.contiguous()

    @property
    def stacked(self) -> bool:
        return self.form == "stacked"

    def __call__(self, window: Tensor) -> Tensor:
        """Window of T frames, as ``conv3d_ops`` describes it -> ``[B, T, H, W, O]``."""
        if self.stacked:
            return over_plane(window, self._weight, self.bias, padding=1)
        x = window.permute(0, 4, 1, 2, 3)
        if self.form == "contiguous":
            x = x.contiguous()
        return F.conv3d(x, self._weight, self.bias, padding=(0, 1, 1)).permute(0, 2, 3, 4, 1).contiguous()

    def first(self, frame: Tensor) -> Tensor:
        """The first frame of a clip, ``[B, 1, H, W, C]`` -> ``[B, 1, H, W, O]``: nothing precedes it."""
        return over_plane(frame, self._newest, self.bias, padding=1)


def over_plane(x: Tensor, weight: Tensor, bias: Tensor | None, *, padding: int = 0, stride: int = 1) -> Tensor:
    """2-D convolution of every frame: ``[B, T, H, W, C]`` -> ``[B, T, H', W', O]``."""
    flat = x.flatten(0, 1).permute(0, 3, 1, 2)
    out = F.conv2d(flat, weight, bias, stride=stride, padding=padding)
    return out.permute(0, 2, 3, 1).contiguous().unflatten(0, x.shape[:2])
