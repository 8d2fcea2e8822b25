"""Ways to compute the VAE's convolutions in training. Which is fastest depends on the device: it is tried."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wam_policy_ros.model.vae_blocks import Conv3d

FORMS = ("plain", "channels_last", "planes")


def stacked(conv: nn.Conv3d) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """A convolution over time and plane as one over the plane, with the frames of its reach in its channels."""
    reach, padding = conv.kernel_size[0], conv.padding[1:]

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        batch, _, frames, height, width = x.shape
        count = frames - reach + 1
        side = torch.cat([x[:, :, k : k + count] for k in range(reach)], dim=1)
        flat = (
            side.transpose(1, 2).reshape(batch * count, -1, height, width).contiguous(memory_format=torch.channels_last)
        )
        out = F.conv2d(flat, weight.transpose(1, 2).flatten(1, 2), bias, padding=padding)  # type: ignore[arg-type]
        return out.unflatten(0, (batch, count)).transpose(1, 2)

    return run


def apply_form(vae: nn.Module, form: str) -> None:
    """Compute the convolutions of ``vae`` in one of ``FORMS``, with the same result up to rounding."""
    for module in vae.modules():
        if isinstance(module, Conv3d):
            module.__dict__.pop("_conv_forward", None)
            if form == "planes" and module.kernel_size[0] > 1 and module.stride[0] == 1:
                module._conv_forward = stacked(module)  # type: ignore[method-assign,assignment]
            layout = torch.channels_last_3d if form == "channels_last" else torch.contiguous_format
            module.weight.data = module.weight.data.contiguous(memory_format=layout)


def fastest_form(vae: nn.Module, work: Callable[[], object], say: Callable[[str], None], repeats: int = 3) -> str:
    """Try all forms on ``work`` on a GPU, keep the fastest one and say how they compare."""
    seconds = {}
    for form in FORMS:
        apply_form(vae, form)
        try:
            for k in range(2 + repeats):
                if k == 2:
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                work()
            torch.cuda.synchronize()
            seconds[form] = (time.perf_counter() - begin) / repeats
        except RuntimeError as error:  # a form the device cannot do
            say(f"VAE convolutions, {form}: {str(error).splitlines()[0]}")
    best = min(seconds, key=lambda f: seconds[f])
    apply_form(vae, best)
    say(
        "VAE convolutions, seconds per step: "
        + ", ".join(f"{f} {s:.3f}" for f, s in seconds.items())
        + f"; taken: {best}"
    )
    return best
