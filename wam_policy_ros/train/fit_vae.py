"""Train the video VAE on the clips that inference encodes: observed frames twice each, and first frames before grey."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from wam_policy_ros.model.config_encoders import VAEConfig
from wam_policy_ros.model.vae import VideoVAE
from wam_policy_ros.model.vae_blocks import VAEStream

from .conv_forms import fastest_form
from .footage import Footage
from .runlog import Budget, RunLog


@dataclass(frozen=True)
class VAERecipe:
    """
    Attributes:
        batch: clips of nine frames per step; lr: largest learning rate.
        kl: weight of the latents' divergence from a standard normal.
        busy: how much more a pixel counts that differs from the average picture (things and arm, not the table).
        grey: share of clips that are a first frame followed by grey.
        min_steps: with fewer in sight the budget grows, at most to 1.7 times itself.
    """

    batch: int = 16
    lr: float = 2e-3
    kl: float = 1e-6
    busy: float = 6.0
    grey: float = 0.25
    min_steps: int = 900
    report_s: float = 10.0


def new_vae(config: VAEConfig, seed: int, device: torch.device) -> VideoVAE:
    torch.manual_seed(seed)
    vae = VideoVAE(config)
    with torch.no_grad():
        bias = vae.model.conv1.bias
        assert bias is not None
        bias[config.z_dim :] = -6.0  # little noise on the latents at first
    return vae.to(device)


def fit_vae(
    vae: VideoVAE,
    footage: Footage,
    recipe: VAERecipe,
    budget: Budget,
    log: RunLog,
    *,
    seed: int = 0,
    more: Callable[[], None] = lambda: None,
    max_steps: int | None = None,
    compiled: bool = False,
) -> str:
    """Until the budget is over or ``max_steps`` are done; the form of convolution that was fastest here.

    Args:
        more: called now and then; may add episodes to the footage.
        compiled: let PyTorch compile the two networks.
    """
    device = footage.device
    cuda = device.type == "cuda"
    vae.train().requires_grad_(True)
    optimiser = torch.optim.AdamW(vae.parameters(), lr=0.05 * recipe.lr, betas=(0.9, 0.98), weight_decay=1e-4)
    generator = torch.Generator().manual_seed(seed)
    average = _average(footage, generator)
    pool = footage.observable()
    work = torch.compile(_loss) if compiled else _loss

    def one() -> dict[str, Tensor]:
        clip = _clips(footage, pool, recipe, generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            loss, parts = work(vae, clip, average, recipe, torch.rand((), generator=generator).item() < 0.3)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimiser.step()
        return parts

    form = fastest_form(vae, one, log.line) if cuda else "plain"
    step, told, check, began, judged = 0, budget.spent, budget.spent, budget.spent, False
    while not budget.over and (max_steps is None or step < max_steps):
        if budget.spent - check > 5.0:
            check = budget.spent
            before = footage.frames
            more()
            if footage.frames != before:
                pool = torch.cat([pool, footage.observable(before)])
        rate = recipe.lr * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * budget.fraction))
        for group in optimiser.param_groups:
            group["lr"] = max(rate, recipe.lr * 0.01)
        parts = one()
        step += 1
        if not judged and budget.fraction > 0.3 and max_steps is None:
            judged = True
            if cuda:
                torch.cuda.synchronize()
            needed = recipe.min_steps * (budget.spent - began) / step
            if needed > budget.seconds:
                budget.seconds = min(1.7 * budget.seconds, needed)
                log.line(f"VAE: {step / (budget.spent - began):.1f} steps/s; it gets {budget.seconds:.0f} s")
        if budget.spent - told > recipe.report_s or step == max_steps:
            told = budget.spent
            log.point(
                "vae",
                step,
                {k: float(v) for k, v in parts.items()} | {"per_s": step * recipe.batch / (budget.spent - began)},
            )
    vae.eval().requires_grad_(False)
    return form


def _clips(footage: Footage, pool: Tensor, recipe: VAERecipe, generator: torch.Generator) -> Tensor:
    grey = round(recipe.batch * recipe.grey)
    pick = pool[torch.randint(len(pool), (recipe.batch,), generator=generator)].to(footage.device)
    return torch.cat([footage.observed_clip(pick[grey:]), footage.first_clip(pick[:grey])])


def _loss(
    vae: VideoVAE, clip: Tensor, average: Tensor, recipe: VAERecipe, from_second: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """``from_second``: decode without the first latent, as a predicted block is shown behind an observed one."""
    frames = clip.shape[2]
    moments = _encode(vae, clip)
    mean, log_variance = moments.float().chunk(2, dim=1)
    log_variance = log_variance.clamp(-20.0, 5.0)
    drawn = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
    if from_second:
        # A stream's first latent is one frame: the newest of the four it stands for.
        decoded, wanted = _decode(vae, drawn[:, :, 1:]), torch.cat([clip[:, :, 4:5], clip[:, :, 5:]], dim=2)
    else:
        decoded, wanted = _decode(vae, drawn), clip
    weight = 1 + recipe.busy * (wanted - average).abs().mean(dim=1, keepdim=True).clamp(max=0.5)
    error = decoded.float() - wanted
    image = (weight * error.abs()).mean() + 2.0 * (weight * error.square()).mean()
    kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=1).mean()
    assert frames > 1
    return image + recipe.kl * kl, {"l1": error.abs().mean().detach(), "loss": image.detach(), "kl": kl.detach()}


def _encode(vae: VideoVAE, clip: Tensor) -> Tensor:
    """Moments of a whole clip: chunk by chunk, as ``VideoVAE.encode`` does."""
    stream, factor, out = VAEStream(), vae.config.temporal_factor, []
    starts = range(1, clip.shape[2] - factor + 1, factor)
    for chunk in (clip[:, :, :1], *(clip[:, :, t : t + factor] for t in starts)):
        with stream.chunk():
            out.append(vae.model.encode(chunk, stream))
    return torch.cat(out, dim=2)


def _decode(vae: VideoVAE, latents: Tensor) -> Tensor:
    """Frames of latents that are not normalised."""
    stream, out = VAEStream(), []
    for latent in latents.split(1, dim=2):
        with stream.chunk():
            out.append(vae.model.decode(latent, stream))
    return torch.cat(out, dim=2)


@torch.no_grad()
def _average(footage: Footage, generator: torch.Generator, count: int = 256) -> Tensor:
    """The average picture ``[1, 3, 1, H, W]``."""
    pick = torch.randint(footage.frames, (count, 1), generator=generator)
    return torch.stack([footage.video(part).mean(dim=0) for part in pick.split(32)]).mean(dim=0)[None]


@torch.no_grad()
def latent_statistics_of(
    vae: VideoVAE, footage: Footage, *, seed: int = 0, count: int = 512, batch: int = 16
) -> tuple[list[float], list[float]]:
    """Mean and standard deviation per channel of the latents of observed blocks, before normalisation."""
    generator = torch.Generator().manual_seed(seed)
    pool = footage.observable()
    pick = pool[torch.randint(len(pool), (count,), generator=generator)].to(footage.device)
    found = []
    for part in pick.split(batch):
        with torch.autocast(footage.device.type, torch.bfloat16, enabled=footage.device.type == "cuda"):
            found.append(_encode(vae, footage.observed_clip(part)).float()[:, : vae.config.z_dim])
    flat = torch.cat(found).transpose(0, 1).flatten(1)
    return flat.mean(dim=1).tolist(), flat.std(dim=1).clamp(min=1e-3).tolist()


@torch.no_grad()
def reconstruction(vae: VideoVAE, footage: Footage, frames: Tensor) -> tuple[Tensor, float]:
    """Decoded clips beside the originals, for a picture, and their mean absolute error in [-1, 1]."""
    clip = footage.observed_clip(frames.to(footage.device))
    back = _decode(vae, _encode(vae, clip)[:, : vae.config.z_dim].float()).clamp(-1, 1)
    error = F.l1_loss(back, clip).item()
    return torch.cat([clip, back], dim=3), error
