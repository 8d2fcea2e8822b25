"""The causal video VAE of Wan2.1: clips to latents and back (DreamZero spec 5.3).

The first frame has a latent of its own, every later latent covers four frames; height and width shrink by eight.
Module names are those of the published checkpoint under ``action_head.vae.``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .config_encoders import VAEConfig
from .constants import constant
from .errors import ShapeError
from .vae_blocks import (
    AttentionBlock,
    CausalConv3d,
    ChannelRMSNorm,
    Downsample,
    ResidualBlock,
    StreamSequential,
    TakesStream,
    Upsample,
    VAEStream,
)
from .vae_tiling import Tiling, process_tiles

_RGB = 3


def _middle(dim: int) -> StreamSequential:
    return StreamSequential(ResidualBlock(dim, dim), AttentionBlock(dim), ResidualBlock(dim, dim))


def _head(in_dim: int, out_dim: int) -> StreamSequential:
    return StreamSequential(ChannelRMSNorm(in_dim), nn.SiLU(), CausalConv3d(in_dim, out_dim, (3, 3, 3)))


class Encoder(nn.Module, TakesStream):
    """Frames of one chunk -> features of its latents, ``2 * z_dim`` channels."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        widths = [config.dim * m for m in config.dim_mult]
        self.conv1 = CausalConv3d(_RGB, config.dim, (3, 3, 3))
        layers: list[nn.Module] = []
        in_dim = config.dim
        for stage, width in enumerate(widths):
            for _ in range(config.num_res_blocks):
                layers.append(ResidualBlock(in_dim, width))
                in_dim = width
            if stage < len(widths) - 1:
                layers.append(Downsample(width, temporal=config.temporal_downsample[stage]))
        self.downsamples = StreamSequential(*layers)
        self.middle = _middle(in_dim)
        self.head = _head(in_dim, 2 * config.z_dim)

    def forward(self, x: Tensor, stream: VAEStream) -> Tensor:
        for part in (self.conv1, self.downsamples, self.middle, self.head):
            x = part(x, stream)
        return x


class Decoder(nn.Module, TakesStream):
    """Latents of one chunk -> its frames."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        widths = [config.dim * m for m in reversed(config.dim_mult)]
        temporal_upsample = tuple(reversed(config.temporal_downsample))
        self.conv1 = CausalConv3d(config.z_dim, widths[0], (3, 3, 3))
        self.middle = _middle(widths[0])
        layers: list[nn.Module] = []
        in_dim = widths[0]
        for stage, width in enumerate(widths):
            for _ in range(config.num_res_blocks + 1):
                layers.append(ResidualBlock(in_dim, width))
                in_dim = width
            if stage < len(widths) - 1:
                layers.append(Upsample(width, temporal=temporal_upsample[stage]))
                in_dim = width // 2
        self.upsamples = StreamSequential(*layers)
        self.head = _head(in_dim, _RGB)

    def forward(self, x: Tensor, stream: VAEStream) -> Tensor:
        for part in (self.conv1, self.middle, self.upsamples, self.head):
            x = part(x, stream)
        return x


class CausalVAE(nn.Module):
    """The network as the checkpoint stores it."""

    def __init__(self, config: VAEConfig) -> None:
        super().__init__()
        self.encoder = Encoder(config)
        self.conv1 = CausalConv3d(2 * config.z_dim, 2 * config.z_dim, (1, 1, 1))
        self.conv2 = CausalConv3d(config.z_dim, config.z_dim, (1, 1, 1))
        self.decoder = Decoder(config)

    def encode(self, frames: Tensor, stream: VAEStream) -> Tensor:
        """Frames of one chunk -> mean and log-variance of its latents, one after the other in the channels."""
        return self.conv1(self.encoder(frames, stream), stream)

    def decode(self, latents: Tensor, stream: VAEStream) -> Tensor:
        return self.decoder(self.conv2(latents, stream), stream)


def latent_statistics(config: VAEConfig, like: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and reciprocal standard deviation, ``[1, z_dim, 1, 1, 1]``: computed in at least float32, then rounded."""
    wide = torch.promote_types(like.dtype, torch.float32)
    mean = constant(config.latent_mean, like.device, wide)
    inverse_std = 1.0 / constant(config.latent_std, like.device, wide)
    return mean.to(like.dtype).view(1, -1, 1, 1, 1), inverse_std.to(like.dtype).view(1, -1, 1, 1, 1)


class VideoVAE(nn.Module):
    """Causal video VAE; computes in the dtype of its weights.

    ``encode`` and ``decode`` take whole clips. ``encode_chunk`` and ``decode_chunk`` take the pieces as they arrive,
    with the memory of the clip in a :class:`~.vae_blocks.VAEStream`, and give the same bits.
    """

    def __init__(self, config: VAEConfig | None = None) -> None:
        super().__init__()
        self.config = config or VAEConfig()
        self.model = CausalVAE(self.config)

    def encode(self, video: Tensor, *, tiling: Tiling | None = None) -> Tensor:
        """Normalised mean of the latents; nothing is sampled.

        Args:
            video: ``[B, 3, T, H, W]`` in [-1, 1]; H and W are multiples of the spatial factor (8). Trailing frames
                that do not fill a chunk of four after the first frame are dropped.
            tiling: encode in tiles. Default: as the configuration says.

        Returns:
            ``[B, z_dim, 1 + (T - 1) // 4, H / 8, W / 8]``.

        Raises:
            ShapeError: another rank, number of channels or size.
        """
        factor = self.config.spatial_factor
        self._check_video(video)
        if tiling := tiling or self._configured_tiling():
            return process_tiles(video, self._encode_clip, tiling, unit_in=factor, unit_out=1)
        return self._encode_clip(video)

    def decode(self, latents: Tensor, *, clamp: bool = True, tiling: Tiling | None = None) -> Tensor:
        """Frames of normalised latents.

        Args:
            latents: ``[B, z_dim, T, h, w]``.
            clamp: bring the result into [-1, 1].
            tiling: decode in tiles. Default: as the configuration says.

        Returns:
            ``[B, 3, 4 * T - 3, 8 * h, 8 * w]``.

        Raises:
            ShapeError: another rank or number of channels.
        """
        self._check_latents(latents)
        if tiling := tiling or self._configured_tiling():
            video = process_tiles(latents, self._decode_clip, tiling, unit_in=1, unit_out=self.config.spatial_factor)
        else:
            video = self._decode_clip(latents)
        return video.clamp(-1.0, 1.0) if clamp else video

    def encode_chunk(self, stream: VAEStream, frames: Tensor) -> Tensor:
        """Normalised latents of the next frames of a clip.

        Args:
            stream: memory of this clip; new for the first chunk.
            frames: ``[B, 3, T, H, W]`` in [-1, 1]. T is 1 in the first chunk and a multiple of the temporal factor
                (4) later; more than four frames at once give the same latents up to rounding.

        Returns:
            ``[B, z_dim, 1 or T / 4, H / 8, W / 8]``.

        Raises:
            ShapeError: another shape, or one that does not continue this stream.
        """
        self._check_video(frames)
        num_frames, factor = frames.shape[2], self.config.temporal_factor
        if stream.at_start and num_frames != 1:
            raise ShapeError(f"first chunk of a stream has {num_frames} frames, expected 1")
        if not stream.at_start and num_frames % factor:
            raise ShapeError(f"chunk of a running stream has {num_frames} frames, expected a multiple of {factor}")
        with stream.chunk():
            moments = self.model.encode(frames, stream)
        mean, inverse_std = latent_statistics(self.config, moments)
        return (moments[:, : self.config.z_dim] - mean) * inverse_std

    def decode_chunk(self, stream: VAEStream, latents: Tensor) -> Tensor:
        """Frames of the next latents of a clip, not clamped.

        Args:
            stream: memory of this clip; new for the first chunk.
            latents: ``[B, z_dim, T, h, w]``. T is 1 in the first chunk.

        Returns:
            ``[B, 3, 1, 8 * h, 8 * w]`` for the first chunk, ``[B, 3, 4 * T, 8 * h, 8 * w]`` later.

        Raises:
            ShapeError: another shape, or one that does not continue this stream.
        """
        self._check_latents(latents)
        if stream.at_start and latents.shape[2] != 1:
            raise ShapeError(f"first chunk of a stream has {latents.shape[2]} latents, expected 1")
        mean, inverse_std = latent_statistics(self.config, latents)
        with stream.chunk():
            return self.model.decode(latents / inverse_std + mean, stream)

    def _encode_clip(self, video: Tensor) -> Tensor:
        stream, factor = VAEStream(), self.config.temporal_factor
        starts = range(1, video.shape[2] - factor + 1, factor)
        chunks = [video[:, :, :1], *(video[:, :, t : t + factor] for t in starts)]
        return torch.cat([self.encode_chunk(stream, chunk) for chunk in chunks], dim=2)

    def _decode_clip(self, latents: Tensor) -> Tensor:
        stream = VAEStream()
        return torch.cat([self.decode_chunk(stream, latent) for latent in latents.split(1, dim=2)], dim=2)

    def _configured_tiling(self) -> Tiling | None:
        c = self.config
        if not c.tiled:
            return None
        return Tiling((c.tile_size_height, c.tile_size_width), (c.tile_stride_height, c.tile_stride_width))

    def _check_video(self, video: Tensor) -> None:
        factor = self.config.spatial_factor
        sizes = video.shape[3:]
        if video.ndim != 5 or video.shape[1] != _RGB or 0 in video.shape or any(n % factor for n in sizes):
            raise ShapeError(
                f"video for the VAE has shape {list(video.shape)}, expected [B, 3, T, H, W] with H and W multiples "
                f"of {factor}"
            )

    def _check_latents(self, latents: Tensor) -> None:
        if latents.ndim != 5 or latents.shape[1] != self.config.z_dim or 0 in latents.shape:
            raise ShapeError(
                f"latents for the VAE have shape {list(latents.shape)}, expected [B, {self.config.z_dim}, T, h, w]"
            )
