"""Train the DiT with its text and image encoders by flow matching, on latents of a finished VAE.

Video and rows of a block share one noise level, as at inference. The levels are drawn along the shifted schedule
(DreamZero spec 4.8); the network is given the truncated integer timestep, as at inference.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wam_policy_ros.model.attention import KV, CrossKV
from wam_policy_ros.model.dreamzero import DreamZero

from .footage import Footage
from .forward import run_layer, window_forward
from .latents import Latents
from .runlog import Budget, RunLog
from .samples import Batch, Windows
from .stepper import Stepper, adamw

SHIFT = 5.0


@dataclass(frozen=True)
class Recipe:
    """
    Attributes:
        batch: windows per step; lr: largest learning rate; warmup: steps.
        video_weight: of the video's loss; the rows' is 1.
        gripper_weight: of the gripper among the eight numbers of a row.
        state_noise: standard deviation added to the normalised state, so that it is not trusted beyond what is seen.
        latent_noise: largest standard deviation added to the latents of observed frames.
        ema: decay of the average of the weights, which is what is exported.
        words_steps: at most so many steps teach the text encoder alone which thing is named, before the rest.
    """

    batch: int = 48
    lr: float = 7e-4
    warmup: int = 200
    video_weight: float = 0.15
    gripper_weight: float = 1.0
    state_noise: float = 0.05
    latent_noise: float = 0.1
    ema: float = 0.999
    weight_decay: float = 0.01
    words_steps: int = 600
    report_s: float = 10.0
    save_s: float = 120.0


class Average:
    """Exponential moving average of the weights."""

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.decay, self.steps = decay, 0
        self._live = [p for p in network.parameters() if p.requires_grad]
        self.values = [p.detach().clone() for p in self._live]

    @torch.no_grad()
    def update(self) -> None:
        self.steps += 1
        keep = min(self.decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(self.values, [p.detach() for p in self._live], 1 - keep)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange live weights and average; call again to go back."""
        for p, value in zip(self._live, self.values, strict=True):
            kept = p.detach().clone()
            p.copy_(value)
            value.copy_(kept)


def cross_keys(network: DreamZero, ids: Tensor, mask: Tensor, prompt: Tensor, picture: Tensor) -> list[CrossKV]:
    """Keys and values of text and image for a batch.

    Args:
        ids, mask: ``[P, text_len]`` of all prompts, on the device; prompt: ``[B]`` which one.
        picture: ``[B, 3, H, W]`` the window's first frame.
    """
    # All prompts, whichever are in the batch: which ones these are would have to be waited for.
    states = network.text_encoder(ids, mask)
    states = states * mask[..., None]  # the padding of every prompt on its own, as one prompt alone gets it
    texts = network.model.text_kv(states)
    images = network.model.image_kv(network.image_encoder(picture))
    return [CrossKV(KV(t.k[prompt], t.v[prompt]), i) for t, i in zip(texts, images, strict=True)]


@dataclass
class Sources:
    """What batches are made of."""

    footage: Footage
    windows: Windows
    latents: Latents


def given(sources: Sources, batch: Batch) -> tuple[Tensor, Tensor]:
    """What the blocks of windows look back at: conditioning ``[B, 4 + z, 3, h, w]``, latents of observed frames."""
    ys = sources.latents.conditioning(batch.anchor).float()
    seen = sources.latents.block[batch.observed[:, 1:]].float()  # [B, K - 1, z, F, h, w]
    return ys, torch.cat([ys[:, 4:, :1], seen.transpose(1, 2).flatten(2, 3)], dim=2)


def batch_loss(
    network: DreamZero,
    sources: Sources,
    batch: Batch,
    recipe: Recipe,
    noise: torch.Generator | None,
    *,
    sigma: float | None = None,
    layer: Callable[..., Any] = run_layer,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of one batch and its parts.

    Args:
        layer: ``forward.run_layer``, or that compiled.
        noise: of the draws; None: PyTorch's own. sigma: a fixed noise level, for validation.
    """
    device, latents = sources.footage.device, sources.latents
    count, blocks = batch.observed.shape
    kind = torch.float32

    def randn(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=noise, device=device, dtype=kind)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=noise, device=device)

    ys, observed = given(sources, batch)
    if recipe.latent_noise and sigma is None:
        observed = observed + recipe.latent_noise * rand(count, 1, 1, 1, 1) * randn(observed)
    target_video = latents.block[batch.following].to(kind)
    target_rows = batch.rows
    state = batch.state
    if recipe.state_noise and sigma is None:
        state = state + recipe.state_noise * randn(state)

    level = rand(count, blocks) if sigma is None else torch.full((count, blocks), sigma, device=device)
    if sigma is None:
        level = SHIFT * level / (1 + (SHIFT - 1) * level)
    level = level.clamp(1e-3, 0.9998)
    timestep = (level * 1000).to(torch.int64)
    noise_video, noise_rows = randn(target_video), randn(target_rows)
    wide = level[:, :, None, None, None, None]
    noisy_video = (1 - wide) * target_video + wide * noise_video
    noisy_rows = (1 - level[..., None, None]) * target_rows + level[..., None, None] * noise_rows

    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        picture = sources.footage.video(batch.anchor[:, None])[:, :, 0]
        cross = cross_keys(network, sources.windows.ids, sources.windows.mask, batch.prompt, picture)
        flows = window_forward(
            network.model, observed, ys, cross, noisy_video, noisy_rows, state, timestep, layer=layer
        )
    error_video = (flows.video.float() - (noise_video - target_video)).square().mean(dim=(2, 3, 4, 5))
    error_rows = (flows.action.float() - (noise_rows - target_rows)).square()
    weight = error_rows.new_ones(error_rows.shape[-1])
    weight[7:] = recipe.gripper_weight
    video = _mean(error_video, batch.has_video)
    rows = _mean((error_rows * weight).mean(dim=(2, 3)), batch.has_rows)
    return rows + recipe.video_weight * video, {"rows": rows.detach(), "video": video.detach()}


def _mean(values: Tensor, where: Tensor) -> Tensor:
    return (values * where).sum() / where.sum().clamp(min=1)


class Trainer:
    """One training of the DiT and its two encoders. The VAE is left alone.

    Args:
        measure: called with the average in place of the live weights, after validation.
        save: called with a text when weights are worth keeping, with the average in place of the live weights.
        layer: as of ``batch_loss``.
    """

    def __init__(
        self, network: DreamZero, sources: Sources, recipe: Recipe, log: RunLog, *, seed: int,
        save: Callable[[str], None] = lambda why: None, validation: Sources | None = None,
        measure: Callable[[], None] = lambda: None, layer: Callable[..., Any] = run_layer,
    ) -> None:  # fmt: skip
        self.network, self.sources, self.recipe, self.log = network, sources, recipe, log
        self.validation, self._save, self._measure = validation, save, measure
        network.train().requires_grad_(True)
        network.vae.eval().requires_grad_(False)
        decayed = [p for n, p in self._trained() if p.ndim >= 2]
        plain = [p for n, p in self._trained() if p.ndim < 2]
        device = sources.footage.device
        self.optimiser = adamw(
            [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            recipe.lr, device,
        )  # fmt: skip
        self.average = Average(network, recipe.ema)
        self.step = 0
        torch.manual_seed(seed)
        self.generator = torch.Generator(device).manual_seed(seed)
        self._layer = layer
        self.take(sources)

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self.network.named_parameters() if p.requires_grad]

    def take(self, sources: Sources) -> None:
        """Train on these from now on; the recorded step reads the tensors of the old ones, so it is recorded anew."""
        self.sources = sources
        graph = sources.footage.device.type == "cuda"
        noise = None if graph else self.generator

        def loss(*parts: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return batch_loss(self.network, sources, Batch(*parts), self.recipe, noise, layer=self._layer)

        self._stepper = Stepper(loss, [p for _, p in self._trained()], self.optimiser, graph=graph,
                                say=self.log.line)  # fmt: skip

    def run(
        self, budget: Budget, *, until: float | None = None, max_steps: int | None = None, stop_at: int | None = None
    ) -> None:
        """Until the budget is over or ``max_steps`` were made in all; the rate follows whatever of that is nearer.

        Args:
            until, stop_at: stop here already, in seconds spent of the budget and in steps; a later call goes on.
        """
        recipe, device = self.recipe, self.sources.footage.device
        until = budget.seconds if until is None else min(until, budget.seconds)
        stop_at = max_steps if stop_at is None else stop_at
        told = saved = budget.spent
        sums: dict[str, Tensor] = {}
        since = 0
        while budget.spent < until and (stop_at is None or self.step < stop_at):
            fraction = budget.fraction if max_steps is None else max(budget.fraction, self.step / max_steps)
            rate = (
                recipe.lr
                * min(1.0, (self.step + 1) / recipe.warmup)
                * max(0.5 * (1 + math.cos(math.pi * fraction)), 0.01)
            )
            self._stepper.set_rate(rate)
            parts = self._one()
            sums = {k: sums[k] + v if k in sums else v.clone() for k, v in parts.items()}
            since += 1
            if budget.spent - told >= recipe.report_s or budget.spent >= until or self.step == stop_at:
                values = {k: float(v) / since for k, v in sums.items()}
                per_s = since * recipe.batch / max(budget.spent - told, 1e-6)
                self.log.point("dit", self.step, values | {"lr": rate, "per_s": per_s})
                told, sums, since = budget.spent, {}, 0
            if budget.spent - saved >= recipe.save_s:
                saved = budget.spent
                self.keep(f"step {self.step}")
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        whole = until >= budget.seconds and stop_at == max_steps
        self.keep("end" if whole else f"step {self.step}, the end of a part")

    def _one(self) -> dict[str, Tensor]:
        anchors = self.sources.windows.anchors
        pick = torch.randint(len(anchors), (self.recipe.batch,), generator=self.generator, device=anchors.device)
        batch = self.sources.windows.batch(anchors[pick])
        parts = self._stepper(*(getattr(batch, f.name) for f in dataclasses.fields(Batch)))
        if self.sources.footage.device.type == "cuda" and self.step % 20 == 0:
            torch.cuda.current_stream().synchronize()  # the clock is to count steps that are done
        self.average.update()
        self.step += 1
        return parts

    def keep(self, why: str) -> None:
        """Validate the averaged weights and hand them to ``save``."""
        self.average.swap()
        self.network.eval()
        try:
            if self.validation is not None:
                self.log.point("validation", self.step, self.validate(self.validation))
            self._measure()
            self._save(why)
        finally:
            self.network.train()
            self.network.vae.eval()
            self.average.swap()

    @torch.no_grad()
    def validate(self, sources: Sources, count: int = 64) -> dict[str, float]:
        """Losses at fixed noise levels on windows that are never trained on; the draws are the same every time."""
        anchors = sources.windows.anchors
        device = anchors.device
        pick = torch.linspace(0, len(anchors) - 1, min(count, len(anchors))).long().to(device)
        out: dict[str, float] = {}
        for sigma in (0.95, 0.6):
            generator = torch.Generator(device).manual_seed(1)
            batch = sources.windows.batch(anchors[pick])
            parts = batch_loss(self.network, sources, batch, self.recipe, generator, sigma=sigma)[1]
            out |= {f"{k}_{sigma}": float(v) for k, v in parts.items()}
        return out

    # -- going on later ------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "network": self.network.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "average": self.average.values,
            "average_steps": self.average.steps,
            "step": self.step,
            "generator": self.generator.get_state(),
            "recipe": dataclasses.asdict(self.recipe),
            "saved_at": time.time(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        self.optimiser.load_state_dict(state["optimiser"])
        for value, stored in zip(self.average.values, state["average"], strict=True):
            value.copy_(stored)
        self.average.steps, self.step = state["average_steps"], state["step"]
        self.generator.set_state(state["generator"].cpu())
