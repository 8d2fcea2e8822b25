"""Building blocks of the causal video VAE, and the memory they share (DreamZero spec 5.3).

A clip is processed in chunks. What a convolution needs of earlier chunks lives in a :class:`VAEStream` that the caller
hands down; the modules hold weights only. Tensors are ``[B, C, T, H, W]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import ShapeError


class VAEStream:
    """Frames that the causal convolutions remember of one clip, in the order in which they are used.

    One per clip and direction: make a new one for every encode or decode. ``frames[i]`` is ``[B, C, t, H, W]``, or
    None where nothing is remembered. The memory changes only when a chunk is complete, so that a chunk that raised
    can be sent again.
    """

    def __init__(self) -> None:
        self.frames: list[Tensor | None] = []
        self.num_chunks = 0
        self._next: list[Tensor | None] = []

    @property
    def at_start(self) -> bool:
        """True during the first chunk, which is one frame (one latent) long."""
        return self.num_chunks == 0

    @contextmanager
    def chunk(self) -> Iterator[None]:
        """Around the network's pass over one chunk."""
        self._next = []
        yield
        self.frames, self._next = self._next, []
        self.num_chunks += 1

    def recall(self, x: Tensor) -> Tensor | None:
        """Frames before ``x`` for the convolution whose turn it is."""
        if self.at_start:
            return None
        frames = self.frames[len(self._next)] if len(self._next) < len(self.frames) else None
        if frames is not None and (frames.shape[:2] != x.shape[:2] or frames.shape[3:] != x.shape[3:]):
            raise ShapeError(
                f"chunk of shape {list(x.shape)} follows frames of shape {list(frames.shape)}; "
                "a stream serves one clip, in one direction"
            )
        return frames

    def remember(self, frames: Tensor | None) -> None:
        """Leave ``frames`` for the next chunk and pass the turn on."""
        # A view would keep the whole activation alive.
        self._next.append(None if frames is None else frames.clone())


class TakesStream:
    """Marks layers whose forward is ``(x, stream)``."""


class StreamSequential(nn.Sequential):
    """``nn.Sequential`` that hands the stream to the layers that look back in time."""

    def forward(self, x: Tensor, stream: VAEStream) -> Tensor:  # type: ignore[override]
        for layer in self:
            x = layer(x, stream) if isinstance(layer, TakesStream) else layer(x)
        return x


class Conv3d(nn.Conv3d):
    """PyTorch's, which leaves a float32 convolution of one clip on a CPU to a kernel that takes ten times as long."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        alone = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32 and x.shape[0] == 1
        if alone and self.kernel_size[0] > 1 and torch.backends.mkldnn.is_available():
            padding = [int(p) for p in self.padding]
            return torch.mkldnn_convolution(x, weight, bias, padding, self.stride, self.dilation, self.groups)
        return super()._conv_forward(x, weight, bias)


class CausalConv3d(Conv3d, TakesStream):
    """Convolution that sees the past only: time is padded on the left, with remembered frames or zeros."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: tuple[int, int, int]) -> None:
        _, kh, kw = kernel_size
        super().__init__(in_channels, out_channels, kernel_size, padding=(0, kh // 2, kw // 2))

    def forward(self, x: Tensor, stream: VAEStream) -> Tensor:  # type: ignore[override]
        look_back = self.kernel_size[0] - 1
        if look_back == 0:
            return super().forward(x)
        past = stream.recall(x)
        missing = look_back - (0 if past is None else past.shape[2])
        if past is not None:
            x = torch.cat([past, x], dim=2)
        stream.remember(x[:, :, -look_back:])
        if missing:
            x = F.pad(x, (0, 0, 0, 0, missing, 0))
        return super().forward(x)


class ChannelRMSNorm(nn.Module):
    """RMS norm over the channels (axis 1). ``spatial_dims`` is 3 for clips and 2 for single frames."""

    def __init__(self, dim: int, spatial_dims: int = 3) -> None:
        super().__init__()
        self.scale = dim**0.5
        self.gamma = nn.Parameter(torch.ones(dim, *[1] * spatial_dims))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1) * self.scale * self.gamma


class ResidualBlock(nn.Module, TakesStream):
    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.residual = StreamSequential(
            ChannelRMSNorm(in_dim),
            nn.SiLU(),
            CausalConv3d(in_dim, out_dim, (3, 3, 3)),
            ChannelRMSNorm(out_dim),
            nn.SiLU(),
            nn.Identity(),  # dropout in training; keeps the published index of the next layer
            CausalConv3d(out_dim, out_dim, (3, 3, 3)),
        )
        self.shortcut = CausalConv3d(in_dim, out_dim, (1, 1, 1)) if in_dim != out_dim else None

    def forward(self, x: Tensor, stream: VAEStream) -> Tensor:
        shortcut = x if self.shortcut is None else self.shortcut(x, stream)
        return shortcut + self.residual(x, stream)


class AttentionBlock(nn.Module):
    """Self-attention over the positions of each frame, one head."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = ChannelRMSNorm(dim, spatial_dims=2)
        self.to_qkv = nn.Conv2d(dim, 3 * dim, 1)
        self.proj = nn.Conv2d(dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        frames = _split_frames(x)
        # [N, 3C, H, W] -> q, k, v, each [N, 1 head, H * W, C]; contiguous, as upstream hands them to the kernel
        qkv = self.to_qkv(self.norm(frames)).flatten(2)[:, None].transpose(-1, -2).contiguous()
        q, k, v = qkv.chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(q, k, v)
        attended = attended[:, 0].transpose(-1, -2).reshape(frames.shape)
        return x + _join_frames(self.proj(attended), batch=x.shape[0])


class Downsample(nn.Module, TakesStream):
    """Halves height and width and, if ``temporal``, the number of frames after the first."""

    def __init__(self, dim: int, temporal: bool) -> None:
        super().__init__()
        self.resample = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(dim, dim, 3, stride=2))
        self.time_conv = Conv3d(dim, dim, (3, 1, 1), stride=(2, 1, 1)) if temporal else None

    def forward(self, x: Tensor, stream: VAEStream) -> Tensor:
        x = _join_frames(self.resample(_split_frames(x)), batch=x.shape[0])
        if self.time_conv is None:
            return x
        last = stream.recall(x)
        stream.remember(x[:, :, -1:])
        return x if last is None else self.time_conv(torch.cat([last, x], dim=2))


class Upsample(nn.Module, TakesStream):
    """Doubles height and width, halves the channels and, if ``temporal``, doubles the frames after the first."""

    def __init__(self, dim: int, temporal: bool) -> None:
        super().__init__()
        self.time_conv = CausalConv3d(dim, 2 * dim, (3, 1, 1)) if temporal else None
        # Nearest copies values, so the dtype it runs in cannot matter.
        self.resample = nn.Sequential(
            nn.Upsample(scale_factor=2.0, mode="nearest-exact"), nn.Conv2d(dim, dim // 2, 3, padding=1)
        )

    def forward(self, x: Tensor, stream: VAEStream) -> Tensor:
        if self.time_conv is not None:
            if stream.at_start:
                stream.remember(None)  # the first latent is one frame, and the next one does not look back at it
            else:
                x = _interleave_halves(self.time_conv(x, stream))
        return _join_frames(self.resample(_split_frames(x)), batch=x.shape[0])


def _split_frames(x: Tensor) -> Tensor:
    """``[B, C, T, H, W]`` -> ``[B * T, C, H, W]``."""
    return x.transpose(1, 2).flatten(0, 1)


def _join_frames(frames: Tensor, batch: int) -> Tensor:
    """``[B * T, C, H, W]`` -> ``[B, C, T, H, W]``."""
    return frames.unflatten(0, (batch, -1)).transpose(1, 2)


def _interleave_halves(x: Tensor) -> Tensor:
    """``[B, 2C, T, H, W]`` -> ``[B, C, 2T, H, W]``: the two halves of the channels are consecutive frames."""
    return x.unflatten(1, (2, -1)).permute(0, 2, 3, 1, 4, 5).flatten(2, 3)
