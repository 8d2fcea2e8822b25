"""The VAE's encoder made fast, applied from outside: the plain :class:`~wam_policy_ros.model.vae.VideoVAE` stays.

What differs from the plain encoder, none of it in the algorithm (DreamZero spec 5.3):

- frames are channels-last; norm, SiLU, residual sum and layout for the next convolution are one pass over memory;
- a convolution takes the form its :class:`~.conv_plan.ConvPlan` names;
- the first frame of a clip is convolved with the newest tap alone, the other two would multiply zeros;
- frames that repeat are computed once (:meth:`FastVAE.encode_conditioning`): a causal convolution of frames that no
  longer change gives frames that no longer change, three frames later at the latest;
- only the mean of the latents is computed.

Tier *numeric*: in real arithmetic the results are those of the plain encoder; rounding differs where a kernel sums in
another order. :meth:`FastVAE.encode` is :meth:`FastVAE.begin` followed by :meth:`FastVAE.push` of the same pieces, so
frames encoded as they arrive give exactly its bits.

Everything is free of host reads and has static shapes, so that each call can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wam_policy_ros.contract.errors import MissingDependency
from wam_policy_ros.model.errors import ShapeError
from wam_policy_ros.model.vae import VideoVAE, latent_statistics
from wam_policy_ros.model.vae_blocks import AttentionBlock, CausalConv3d, Downsample, ResidualBlock

from .conv_plan import CausalConv, ConvKey, ConvPlan, over_plane
from .kernels.conv3d_ops import extend, has_triton, norm_silu_window, padded_sum, past_of, rms_norm, window

# Tensor cores take channels by the eight; of three colours a kernel would make a slow exception.
_COLOURS = 8


@dataclass(frozen=True)
class EncodeState:
    """A clip encoded so far. Never written to: a clip can be continued from it any number of times.

    Attributes:
        frames: encoded so far.
        memory: per layer that looks back, the frames it needs of the past, ``[B, 1 or 2, H, W, C]``.
    """

    frames: int
    memory: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Memory kept alive."""
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.memory}.values())

    def compact(self) -> EncodeState:
        """The same state without the activations that its frames are parts of: for states that are kept."""
        return EncodeState(self.frames, tuple(t if _owns(t) else t.clone() for t in self.memory))


class _Pass:
    """One pass over a piece of a clip: what to remember of it, and in which order."""

    def __init__(self, past: Sequence[Tensor] | None, total: int, *, stepwise: bool, plain: bool) -> None:
        self._past = past
        self.memory: list[Tensor] = []
        self.total = total  # frames at the current rate, repeated ones included
        self.stepwise, self.plain = stepwise, plain

    @property
    def first(self) -> bool:
        return self._past is None

    def recall(self) -> Tensor | None:
        return None if self._past is None else self._past[len(self.memory)]

    def skip_rest(self) -> None:
        """No frame reached the layers that follow: they remember what they did."""
        assert self._past is not None
        self.memory += self._past[len(self.memory) :]

    def frames_after(self, count: int) -> int:
        """Frames of a causal convolution's result that differ, of ``count`` frames of which the last repeats."""
        return min(count + 2, self.total)

    def convolve(self, conv: CausalConv, x: Tensor, residual: Tensor | None, gamma: Tensor) -> tuple[Tensor, Tensor]:
        """Norm, SiLU and convolution of ``x + residual``; returns the sum and the convolution."""
        count = x.shape[1] if residual is None else residual.shape[1]
        frames = 1 if self.first else self.frames_after(count)
        total, seen = norm_silu_window(
            x,
            residual,
            gamma,
            self.recall(),
            frames=frames,
            stacked=conv.stacked and not self.first,
            stepwise=self.stepwise,
            plain=self.plain,
        )
        return total, self._convolved(conv, seen)

    def convolve_raw(self, conv: CausalConv, x: Tensor) -> Tensor:
        """Convolution without a norm before it."""
        frames = 1 if self.first else self.frames_after(x.shape[1])
        return self._convolved(conv, window(extend(x, frames), self.recall(), stacked=conv.stacked and not self.first))

    def _convolved(self, conv: CausalConv, seen: Tensor) -> Tensor:
        self.memory.append(past_of(seen, stacked=conv.stacked and not self.first))
        return conv.first(seen[:, -1:]) if self.first else conv(seen)


class _Residual:
    def __init__(self, block: ResidualBlock, plan: ConvPlan, reduction: int) -> None:
        layers: list[Any] = list(block.residual)
        self.gammas = [layers[0].gamma.detach().flatten(), layers[3].gamma.detach().flatten()]
        self.convs = [_causal(layers[2], plan, reduction), _causal(layers[6], plan, reduction)]
        self.shortcut = None if block.shortcut is None else _Linear(block.shortcut.weight, block.shortcut.bias)

    def __call__(self, p: _Pass, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Takes and gives a sum that is not carried out yet."""
        x, inner = p.convolve(self.convs[0], x, residual, self.gammas[0])
        _, inner = p.convolve(self.convs[1], inner, None, self.gammas[1])
        return (x if self.shortcut is None else self.shortcut(x)), inner


class _Linear:
    """A 1x1 convolution: a matrix product over the channels."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight.detach().flatten(1), None if bias is None else bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class _Attention:
    def __init__(self, block: AttentionBlock) -> None:
        self.gamma = block.norm.gamma.detach().flatten()
        self.qkv = _Linear(block.to_qkv.weight, block.to_qkv.bias)
        self.proj = _Linear(block.proj.weight, block.proj.bias)

    def __call__(self, p: _Pass, x: Tensor) -> Tensor:
        qkv = self.qkv(rms_norm(x, self.gamma, stepwise=p.stepwise)).flatten(2, 3).flatten(0, 1)
        q, k, v = qkv[:, None].chunk(3, dim=-1)
        return x + self.proj(F.scaled_dot_product_attention(q, k, v).reshape(x.shape))


class _Downsample:
    def __init__(self, block: Downsample) -> None:
        conv: Any = block.resample[1]
        self.weight = conv.weight.detach().contiguous(memory_format=torch.channels_last)
        self.bias = conv.bias.detach()
        time = block.time_conv
        # [C, C, 3, 1, 1] -> three taps side by side, oldest first
        self.time = None if time is None else _Linear(time.weight[..., 0, 0].transpose(1, 2), time.bias)

    def __call__(self, p: _Pass, x: Tensor, residual: Tensor) -> Tensor | None:
        """None: the piece ends before the next frame at half the rate is complete."""
        x = over_plane(padded_sum(x, residual, plain=p.plain), self.weight, self.bias, stride=2)
        if self.time is None:
            return x
        waiting = p.recall()
        if waiting is None:
            p.memory.append(x)
            return x
        # waiting: the last frame that an output has used, and the one after it where the piece before ended at half.
        x = torch.cat([waiting, x], dim=1)
        total = p.total + waiting.shape[1]
        p.total = (total - 1) // 2
        # Output j sees 2j, 2j + 1, 2j + 2; the outputs from x.shape[1] / 2 on see the last frame only.
        count = min(x.shape[1] // 2 + 1, p.total)
        x = extend(x, min(total, 2 * count + 1))
        p.memory.append(x[:, 2 * count :])
        if count == 0:
            return None
        taps = [x[:, 0 : 2 * count : 2], x[:, 1 : 2 * count : 2], x[:, 2 : 2 * count + 1 : 2]]
        return self.time(torch.cat(taps, dim=-1))


class FastVAE:
    """Encoder of clips ``[B, 3, T, H, W]`` in [-1, 1]; results are normalised means ``[B, z, t, h, w]``.

    Args:
        vae: the plain network; its weights must not change afterwards (large ones are copied into other layouts).
        plan: form of each convolution.
        pieces: frames per pass of :meth:`encode` after the first frame; the last number repeats. Smaller pieces leave
            less to do when the newest frame arrives, larger ones use the device better.
        plain: take the plain twins of the fused kernels on a GPU as well.

    Raises:
        MissingDependency: the network is on a GPU, Triton is not installed, and ``plain`` is not set.
    """

    def __init__(
        self, vae: VideoVAE, *, plan: ConvPlan | None = None, pieces: int | None = 2, plain: bool = False
    ) -> None:
        self.config = vae.config
        self.plan = plan or ConvPlan()
        self.pieces = pieces
        self.plain = plain
        encoder: Any = vae.model.encoder
        self._device_type = encoder.conv1.weight.device.type
        if self._device_type == "cuda" and not plain and not has_triton():
            raise MissingDependency("triton", "kernels", "the fast VAE on a GPU")
        self._conv1 = _colour_conv(encoder.conv1)
        self._layers: list[_Residual | _Downsample] = []
        reduction = 1
        for layer in encoder.downsamples:
            if isinstance(layer, Downsample):
                self._layers.append(_Downsample(layer))
                reduction *= 2
            else:
                self._layers.append(_Residual(layer, self.plan, reduction))
        first, attention, last = encoder.middle
        self._middle = (_Residual(first, self.plan, reduction), _Attention(attention))
        self._last = _Residual(last, self.plan, reduction)
        self._head_gamma = encoder.head[0].gamma.detach().flatten()
        self._head = _causal(encoder.head[2], self.plan, reduction)
        top, z = vae.model.conv1, self.config.z_dim
        self._mean = _Linear(top.weight[:z], None if top.bias is None else top.bias[:z])

    # -- pieces of a clip -----------------------------------------------------------------------------------------

    def begin(self, frame: Tensor, *, stepwise: bool = True) -> tuple[EncodeState, Tensor]:
        """The first frame of a clip, ``[B, 3, 1, H, W]``.

        Returns:
            The state to continue from, and the first latent ``[B, z, 1, h, w]``.
        """
        self._check(frame, 1)
        with self._run():
            p = _Pass(None, 1, stepwise=stepwise, plain=self.plain)
            latent = self._encode(p, _to_frames(frame))
        assert latent is not None  # the first frame has a latent of its own
        return EncodeState(1, tuple(p.memory)), latent

    def push(self, state: EncodeState, frames: Tensor, *, stepwise: bool = True) -> tuple[EncodeState, Tensor | None]:
        """The next frames of a clip, ``[B, 3, T, H, W]`` with T even.

        Returns:
            The state after them, and the latents they complete ``[B, z, t, h, w]``: None where they end in the middle
            of the first latent.
        """
        self._check(frames, None)
        with self._run():
            p = _Pass(state.memory, frames.shape[2], stepwise=stepwise, plain=self.plain)
            latents = self._encode(p, _to_frames(frames))
        return EncodeState(state.frames + frames.shape[2], tuple(p.memory)), latents

    # -- whole clips ----------------------------------------------------------------------------------------------

    def encode(self, clip: Tensor, *, stepwise: bool = True) -> Tensor:
        """As ``VideoVAE.encode``: ``[B, 3, T, H, W]`` -> ``[B, z, 1 + (T - 1) // 4, h, w]``.

        Args:
            stepwise: round after every operation, as upstream does in later calls; False: norms in float32, as it does
                in the first call of a window (spec 10, item 21).
        """
        factor = self.config.temporal_factor
        state, latent = self.begin(clip[:, :, :1], stepwise=stepwise)
        latents = [latent]
        used = (clip.shape[2] - 1) // factor * factor
        for piece in clip[:, :, 1 : 1 + used].split(self.pieces or max(used, 1), dim=2) if used else ():
            state, more = self.push(state, piece, stepwise=stepwise)
            latents += [] if more is None else [more]
        return torch.cat(latents, dim=2)

    def encode_conditioning(self, frame: Tensor, num_frames: int, *, stepwise: bool = False) -> Tensor:
        """Latents of ``frame`` followed by mid-grey, ``num_frames`` in all (spec 5.4): ``[B, z, t, h, w]``.

        The grey frames are equal, so behind every causal layer all frames from some index on are equal too, and are
        computed once. For 33 frames of the published network that leaves half of the arithmetic.

        Args:
            frame: ``[B, 3, 1, H, W]``.

        Raises:
            ShapeError: other shapes, or ``num_frames - 1`` is no positive multiple of the temporal factor.
        """
        factor = self.config.temporal_factor
        if num_frames <= 1 or (num_frames - 1) % factor:
            raise ShapeError(f"conditioning clip of {num_frames} frames; expected one more than a multiple of {factor}")
        state, latent = self.begin(frame, stepwise=stepwise)
        with self._run():
            p = _Pass(state.memory, num_frames - 1, stepwise=stepwise, plain=self.plain)
            rest = self._encode(p, _to_frames(torch.zeros_like(frame)))
        assert rest is not None
        missing = (num_frames - 1) // factor - rest.shape[2]
        return torch.cat([latent, rest, *[rest[:, :, -1:]] * missing], dim=2)

    # -- details --------------------------------------------------------------------------------------------------

    @contextmanager
    def _run(self) -> Iterator[None]:
        # Autocast would widen the sums that are rounded on purpose.
        with torch.inference_mode(), torch.autocast(self._device_type, enabled=False), self.plan.flags():
            yield

    def _encode(self, p: _Pass, x: Tensor) -> Tensor | None:
        x = p.convolve_raw(self._conv1, F.pad(x, (0, self._conv1.inputs - x.shape[-1])))
        residual: Tensor | None = None
        for layer in self._layers:
            if isinstance(layer, _Residual):
                x, residual = layer(p, x, residual)
                continue
            assert residual is not None  # every stage has a residual block
            down = layer(p, x, residual)
            if down is None:
                p.skip_rest()
                return None
            x, residual = down, None
        first, attention = self._middle
        x, residual = first(p, x, residual)
        x = attention(p, extend(x, residual.shape[1]) + residual)
        x, residual = self._last(p, x, None)
        _, x = p.convolve(self._head, x, residual, self._head_gamma)
        mean = self._mean(x).permute(0, 4, 1, 2, 3)
        shift, inverse_std = latent_statistics(self.config, mean)
        return ((mean - shift) * inverse_std).contiguous()

    def _check(self, frames: Tensor, count: int | None) -> None:
        factor = self.config.spatial_factor
        shape = frames.shape
        bad = frames.ndim != 5 or shape[1] != 3 or 0 in shape or any(n % factor for n in shape[3:])
        if bad or (shape[2] != count if count else shape[2] % 2):
            expected = f"[B, 3, {count or 'an even number'}, H, W] with H and W multiples of {factor}"
            raise ShapeError(f"frames for the VAE have shape {list(shape)}, expected {expected}")


def conv_keys(vae: VideoVAE) -> list[ConvKey]:
    """The shapes of the encoder's 3x3x3 convolutions behind a norm, each once, in order of use."""
    keys: dict[ConvKey, None] = {}
    reduction = 1
    encoder: Any = vae.model.encoder
    for layer in (*encoder.downsamples, *encoder.middle, encoder.head):
        if isinstance(layer, Downsample):
            reduction *= 2
            continue
        for module in layer.modules():
            if isinstance(module, CausalConv3d) and module.kernel_size == (3, 3, 3):
                keys[ConvKey(module.in_channels, module.out_channels, reduction)] = None
    return list(keys)


def _causal(conv: CausalConv3d, plan: ConvPlan, reduction: int) -> CausalConv:
    form = plan.form(ConvKey(conv.in_channels, conv.out_channels, reduction))
    return CausalConv(conv.weight.detach(), None if conv.bias is None else conv.bias.detach(), form)


def _colour_conv(conv: CausalConv3d) -> CausalConv:
    """The first layer: three colours are too few channels for a fast convolution, so zeros are added."""
    weight = F.pad(conv.weight.detach(), (0, 0) * 3 + (0, _COLOURS - conv.in_channels))
    return CausalConv(weight, None if conv.bias is None else conv.bias.detach(), "stacked")


def _owns(t: Tensor) -> bool:
    return t.untyped_storage().nbytes() == t.nbytes


def _to_frames(video: Tensor) -> Tensor:
    """``[B, C, T, H, W]`` -> ``[B, T, H, W, C]``."""
    return video.permute(0, 2, 3, 4, 1).contiguous()
