"""Train the video VAE on the clips that inference encodes: observed frames twice each, and first frames before grey."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from wam_policy_ros.model.config_encoders import VAEConfig
from wam_policy_ros.model.vae import VideoVAE

from .errors import TrainError
from .footage import Footage
from .fused_norm import PADDED, STACKED, why_not_fused
from .runlog import Budget, RunLog
from .stepper import WARM_UP, Parts, Stepper, adamw
from .whole_clip import WholeClip


@dataclass(frozen=True)
class VAERecipe:
    """
    Attributes:
        batch: clips of nine frames per step; lr: largest learning rate; warmup: steps.
        kl: weight of the latents' divergence from a standard normal.
        busy: how much more a pixel counts that differs from its surroundings (things and arm, not the table).
        edges: weight of the error of the differences between neighbouring pixels, which a blur gets wrong.
        grey: share of clips that are a first frame followed by grey.
        form: of convolutions over time, see :mod:`.fused_norm`; empty: the fastest here, which takes a while to find.
        second: share decoded without their first latent, as a predicted block is shown behind an observed one.
    """

    batch: int = 64
    lr: float = 2e-3
    warmup: int = 100
    kl: float = 1e-6
    busy: float = 6.0
    edges: float = 1.0
    grey: float = 0.25
    second: float = 0.25
    form: str = STACKED
    report_s: float = 10.0


def compute_dtype(device: torch.device) -> torch.dtype:
    """Of activations; weights stay in float32."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


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
    max_steps: int | None = None,
) -> None:
    """Until the budget is over or ``max_steps`` are done."""
    device = footage.device
    cuda = device.type == "cuda"
    vae.train().requires_grad_(True)
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    pool = footage.observable().to(device)
    optimiser = adamw(vae.parameters(), 0.05 * recipe.lr, device, weight_decay=1e-4)
    if reason := why_not_fused(device):
        log.line(f"VAE: norms in plain operations: {reason}")
    forms = (recipe.form,) if recipe.form else (STACKED, PADDED) if cuda else (STACKED,)
    steppers = {
        form: Stepper(clip_loss(WholeClip(vae.model, form), recipe, device), vae.parameters(), optimiser, graph=cuda,
                      say=log.line)
        for form in forms
    }  # fmt: skip
    batch = draw_clips(footage, pool, recipe, generator)
    form = fastest(steppers, batch, log.line) if cuda else forms[0]
    stepper = steppers[form]
    step, told, began, since = 0, budget.spent, budget.spent, 0
    while not budget.over and (max_steps is None or step < max_steps):
        rate = recipe.lr * min(1.0, (step + 1) / recipe.warmup) * 0.5 * (1 + math.cos(math.pi * budget.fraction))
        stepper.set_rate(max(rate, recipe.lr * 0.01))
        parts = stepper(draw_clips(footage, pool, recipe, generator))
        step += 1
        if cuda and step % 20 == 0:
            torch.cuda.current_stream().synchronize()  # the clock is to count steps that are done
        if budget.spent - told > recipe.report_s or step == max_steps:
            values = {k: float(v) for k, v in parts.items()}
            per_s = (step - since) * recipe.batch / max(budget.spent - told, 1e-6)
            log.point("vae", step, values | {"per_s": per_s})
            told, since = budget.spent, step
    log.line(f"VAE: {step} steps in {budget.spent - began:.1f} s")
    vae.eval().requires_grad_(False)


def fastest(steppers: dict[str, Stepper], batch: Tensor, say: Callable[[str], None], repeats: int = 6) -> str:
    """Which of the forms takes the shortest step on this device; these are steps of training at a small rate."""
    seconds: dict[str, float] = {}
    for form, stepper in steppers.items():
        try:
            for k in range(WARM_UP + 2 + repeats):
                if k == WARM_UP + 2:
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                stepper(batch)
            torch.cuda.synchronize()
            seconds[form] = (time.perf_counter() - begin) / repeats
        except RuntimeError as error:  # a form the device cannot do
            say(f"VAE, {form}: {str(error).splitlines()[0]}")
    if not seconds:
        raise TrainError("the VAE's step runs in no form on this device", got=", ".join(steppers))
    best = min(seconds, key=lambda f: seconds[f])
    told = ", ".join(f"{f} {t:.4f}" for f, t in seconds.items())
    say(f"VAE, seconds per step of {len(batch)} clips: {told}; taken: {best}")
    return best


def draw_clips(footage: Footage, pool: Tensor, recipe: VAERecipe, generator: torch.Generator) -> Tensor:
    """Observed clips, then first frames followed by grey: ``[batch, 3, 9, H, W]``."""
    grey = round(recipe.batch * recipe.grey)
    pick = pool[torch.randint(len(pool), (recipe.batch,), generator=generator, device=pool.device)]
    return torch.cat([footage.observed_clip(pick[grey:]), footage.first_clip(pick[:grey])])


def clip_loss(whole: WholeClip, recipe: VAERecipe, device: torch.device) -> Callable[[Tensor], tuple[Tensor, Parts]]:
    """The loss of a batch of clips, the first ``second`` of which are decoded without their first latent."""
    kind = compute_dtype(device)

    def loss(clip: Tensor) -> tuple[Tensor, Parts]:
        late = round(recipe.second * len(clip))
        mean, log_variance = whole.encode(clip.to(kind)).float().chunk(2, dim=1)
        log_variance = log_variance.clamp(-20.0, 5.0)
        drawn = (mean + torch.randn_like(mean) * (0.5 * log_variance).exp()).to(kind)
        # A stream's first latent is one frame: the newest of the four it stands for.
        pairs = [(drawn[late:], clip[late:]), (drawn[:late, :, 1:], clip[:late, :, 4:])]
        images, errors = [], []
        for latents, wanted in (p for p in pairs if len(p[0])):
            image, error = picture_loss(whole.decode(latents).float(), wanted, recipe)
            images.append(image * len(latents))
            errors.append(error * len(latents))
        image, error = torch.stack(images).sum() / len(clip), torch.stack(errors).sum() / len(clip)
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=1).mean()
        return image + recipe.kl * kl, {"l1": error.detach(), "loss": image.detach(), "kl": kl.detach()}

    return loss


def picture_loss(decoded: Tensor, wanted: Tensor, recipe: VAERecipe) -> tuple[Tensor, Tensor]:
    """The loss of frames ``[B, 3, T, H, W]`` and their mean absolute error."""
    weight = 1 + recipe.busy * busy(wanted).clamp(max=0.5)
    error = decoded - wanted
    image = (weight * error.abs()).mean() + 2.0 * (weight * error.square()).mean()
    if recipe.edges:
        image = image + recipe.edges * (error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean())
    return image, error.abs().mean()


def busy(frames: Tensor) -> Tensor:
    """How far a pixel is from the average of some 20 x 20 around it: ``[B, 3, T, H, W]`` -> ``[B, 1, T, H, W]``."""
    flat = frames.transpose(1, 2).flatten(0, 1)
    around = F.avg_pool2d(F.avg_pool2d(flat, 4), 5, 1, 2, count_include_pad=False)
    far = (flat - F.interpolate(around, scale_factor=4.0, mode="nearest-exact")).abs().mean(dim=1, keepdim=True)
    return far.unflatten(0, (frames.shape[0], -1)).transpose(1, 2)


@torch.no_grad()
def latent_statistics_of(
    vae: VideoVAE, footage: Footage, *, seed: int = 0, count: int = 512, batch: int = 16
) -> tuple[list[float], list[float]]:
    """Mean and standard deviation per channel of the latents of observed blocks, before normalisation."""
    generator = torch.Generator().manual_seed(seed)
    pool = footage.observable()
    pick = pool[torch.randperm(len(pool), generator=generator)[:count]].to(footage.device)
    found = []
    for part in pick.split(batch):
        clip = footage.observed_clip(part).to(compute_dtype(footage.device))
        found.append(WholeClip(vae.model).encode(clip).float()[:, : vae.config.z_dim])
    flat = torch.cat(found).transpose(0, 1).flatten(1)
    return flat.mean(dim=1).tolist(), flat.std(dim=1).clamp(min=1e-3).tolist()


@torch.no_grad()
def reconstruction(vae: VideoVAE, footage: Footage, frames: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Decoded clips beside the originals, for a picture, and mean absolute errors in [-1, 1].

    ``all`` pixels; ``busy`` ones, the 5 % that differ most from their surroundings, which are things and gripper;
    ``blur_all``, ``blur_busy``: those of averages of 8 x 8 pixels, which a VAE of any use is far below.
    """
    clip = footage.observed_clip(frames.to(footage.device))
    back = vae.decode(vae.encode(clip))
    blur = F.interpolate(F.avg_pool3d(clip, (1, 8, 8)), scale_factor=(1.0, 8.0, 8.0), mode="nearest-exact")
    far = busy(clip)
    where = far >= far.flatten()[::7].quantile(0.95) if far.numel() < 7 * 2**24 else far >= 0.3
    errors = {}
    for name, picture in (("", back), ("blur_", blur)):
        off = (picture - clip).abs().mean(dim=1, keepdim=True)
        errors[f"{name}all"], errors[f"{name}busy"] = off.mean().item(), off[where].mean().item()
    return torch.cat([clip, back], dim=3), errors
