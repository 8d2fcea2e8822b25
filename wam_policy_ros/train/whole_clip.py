"""The VAE over whole clips at once, for training: what ``VideoVAE`` computes chunk by chunk, in a third of the calls.

A clip's first frame has a latent of its own and passes the temporal layers as it is; apart from that every layer is a
causal convolution over all frames. Frames are kept as pictures with their channels last, ``[B * T, C, H, W]``.
A test compares with ``model.encode`` and ``model.decode``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wam_policy_ros.model.vae import CausalVAE
from wam_policy_ros.model.vae_blocks import (
    AttentionBlock,
    CausalConv3d,
    ChannelRMSNorm,
    Downsample,
    ResidualBlock,
    Upsample,
)

from .fused_norm import STACKED, look_back, norm_silu_look_back


class WholeClip:
    """
    Args:
        form: of the convolutions over time, ``stacked`` or ``padded`` (see :mod:`.fused_norm`).
    """

    def __init__(self, model: CausalVAE, form: str = STACKED) -> None:
        self.model, self.form = model, form

    def encode(self, clip: Tensor) -> Tensor:
        """``[B, 3, 1 + 4 n, H, W]`` -> moments ``[B, 2 * z_dim, 1 + n, H / 8, W / 8]``."""
        batch, coder = clip.shape[0], self.model.encoder
        x = self._first(coder.conv1, _pictures(clip), batch)
        x = self._chain(coder.downsamples, x, batch)
        x = self._chain(coder.middle, x, batch)
        return _clip(_pointwise(self.model.conv1, self._normed(coder.head[0], coder.head[2], x, batch)), batch)

    def decode(self, latents: Tensor) -> Tensor:
        """``[B, z_dim, 1 + n, h, w]``, not normalised -> frames ``[B, 3, 1 + 4 n, 8 h, 8 w]``."""
        batch, coder = latents.shape[0], self.model.decoder
        x = self._first(coder.conv1, _pointwise(self.model.conv2, _pictures(latents)), batch)
        x = self._chain(coder.middle, x, batch)
        x = self._chain(coder.upsamples, x, batch)
        return _clip(self._normed(coder.head[0], coder.head[2], x, batch), batch)

    def _chain(self, layers: nn.Sequential, x: Tensor, batch: int) -> Tensor:
        for layer in layers:
            if isinstance(layer, ResidualBlock):
                norm1, conv1, norm2, conv2 = (layer.residual[k] for k in (0, 2, 3, 6))
                inner = self._normed(norm2, conv2, self._normed(norm1, conv1, x, batch), batch)
                x = inner + (x if layer.shortcut is None else _pointwise(layer.shortcut, x))
            elif isinstance(layer, AttentionBlock):
                x = _pictures(layer(_clip(x, batch)))
            elif isinstance(layer, Downsample):
                x = _halve(layer, x, batch)
            elif isinstance(layer, Upsample):
                x = _double(layer, x, batch)
            else:
                raise TypeError(f"no whole-clip form of {type(layer).__name__}")
        return x

    def _first(self, conv: nn.Module, x: Tensor, batch: int) -> Tensor:
        return self._conv(conv, look_back(x, batch, self.form))

    def _normed(self, norm: nn.Module, conv: nn.Module, x: Tensor, batch: int) -> Tensor:
        assert isinstance(norm, ChannelRMSNorm)
        return self._conv(conv, norm_silu_look_back(x, norm.gamma.flatten(), batch, self.form))

    def _conv(self, conv: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(conv, CausalConv3d)
        if self.form == STACKED:
            weight = conv.weight.transpose(1, 2).flatten(1, 2)
            return F.conv2d(x, weight.to(x.dtype), _like(conv.bias, x), padding=1)
        return _pictures(F.conv3d(x, conv.weight.to(x.dtype), _like(conv.bias, x), padding=(0, 1, 1)))


def _like(bias: Tensor | None, x: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(x.dtype)


def _pictures(clip: Tensor) -> Tensor:
    """``[B, C, T, H, W]`` -> ``[B * T, C, H, W]``, channels last."""
    return clip.transpose(1, 2).flatten(0, 1).contiguous(memory_format=torch.channels_last)


def _clip(pictures: Tensor, batch: int) -> Tensor:
    return pictures.unflatten(0, (batch, -1)).transpose(1, 2)


def _pointwise(conv: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(conv, CausalConv3d)
    return F.conv2d(x, conv.weight[:, :, 0].to(x.dtype), _like(conv.bias, x))


def _plane(conv: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(conv, nn.Conv2d)
    return F.conv2d(x, conv.weight.to(x.dtype), _like(conv.bias, x), conv.stride, conv.padding)  # type: ignore


def _over_time(conv: nn.Conv3d, frames: Tensor, stride: int) -> Tensor:
    """A convolution over three frames and no plane: ``[B, T, C, H, W]`` -> ``[B, n, C', H, W]``."""
    count = (frames.shape[1] - 3) // stride + 1
    side = torch.cat([frames[:, k : k + stride * count : stride][:, :count] for k in range(3)], dim=2)
    flat = side.flatten(0, 1).contiguous(memory_format=torch.channels_last)
    weight = conv.weight[..., 0, 0].transpose(1, 2).flatten(1, 2)[..., None, None]
    return F.conv2d(flat, weight.to(flat.dtype), _like(conv.bias, flat)).unflatten(0, (frames.shape[0], count))


def _halve(layer: Downsample, x: Tensor, batch: int) -> Tensor:
    x = _plane(layer.resample[1], F.pad(x, (0, 1, 0, 1)))
    if layer.time_conv is None:
        return x
    frames = x.unflatten(0, (batch, -1))
    if frames.shape[1] == 1:
        return x
    later = _over_time(layer.time_conv, frames, 2)
    return torch.cat([frames[:, :1], later], dim=1).flatten(0, 1).contiguous(memory_format=torch.channels_last)


def _double(layer: Upsample, x: Tensor, batch: int) -> Tensor:
    if layer.time_conv is not None and x.shape[0] > batch:
        frames = x.unflatten(0, (batch, -1))
        # The second latent does not look back at the first.
        padded = torch.cat([frames.new_zeros(batch, 2, *frames.shape[2:]), frames[:, 1:]], dim=1)
        pairs = _over_time(layer.time_conv, padded, 1)
        later = pairs.unflatten(2, (2, -1)).flatten(1, 2)  # the halves of the channels are consecutive frames
        x = torch.cat([frames[:, :1], later], dim=1).flatten(0, 1)
    x = x.contiguous(memory_format=torch.channels_last)
    return _plane(layer.resample[1], F.interpolate(x, scale_factor=2.0, mode="nearest-exact"))
