"""What a fused step compiles, builds and records at first use, done before the first call, on made-up numbers.

First every piece of work is gone through once with its kernels noted instead of launched, so that they can be compiled
in as many threads as there are: one after the other they took most of a start. Then the graphs of
``config.prepared_windows`` windows are recorded. The kernels of the later ones are those of the first, so these are
recorded without being run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wam_policy_ros.contract.errors import Overloaded
from wam_policy_ros.contract.interface import ResetReason

from .encode import FirstFrame, Prompt
from .kernels.launch import collecting, compile_together
from .sampler import Noise
from .session import WindowState

if TYPE_CHECKING:
    from .fused_path import FusedPath

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class _MadeUp:
    """What a window starts from and goes on with."""

    first: FirstFrame
    clip: Tensor
    prompt: Prompt
    negative: Prompt | None
    noise: Noise
    proprio: Tensor


def prepare(path: FusedPath, progress: Progress, fitting: Callable[[], int | None]) -> None:
    """One of each piece of work at each length of the window.

    Args:
        fitting: see ``FusedPath.prepare``.

    Raises:
        Overloaded: no memory for a window.
    """
    path.settle(if_short=True)
    calls = range(1, path.network.config.dit.local_attn_size, path.network.config.dit.num_frame_per_block)
    if path.network.device.type == "cuda":
        progress("compiling kernels", 0.0)
        with collecting() as launches, ExitStack() as stack:
            for cache in path.caches:
                stack.enter_context(cache.paused())
            _compile(path, calls)
        count = compile_together(launches, path.network.device)
        progress(f"recording the encoders ({count} of {len(launches)} kernels compiled)", 0.0)
    made_up = _made_up(path)
    windows: list[WindowState] = []
    most: int | None = None
    try:
        for number in range(wanted := path.config.prepared_windows):
            if number == 1:
                most = _fitting(path, fitting)
                wanted = wanted if most is None else min(wanted, most)
            if windows and not path.agree(number < wanted and (most is not None or path.has_room())):
                break
            state, full = _tried(path, made_up)
            windows += [] if state is None else [state]
            if not path.agree(state is not None):
                if number == 0:
                    raise full or Overloaded("another GPU has no memory for a window")
                break  # one session works; who wants more is told then
            assert state is not None
            text = f"recording window {number + 1} of {wanted}" if number else "recording the step"
            tell = partial(_tell, progress, text, number, wanted)
            with path.graphs.recording_only():
                _walk(path, state, made_up, calls, tell)
    finally:
        for state in reversed(windows):
            path.let_go(state, WindowState())
    progress("moving the text encoder to the host", 1.0)
    path.settle()
    if path.network.device.type == "cuda":
        torch.cuda.empty_cache()  # what the runs before the recordings needed


def _fitting(path: FusedPath, fitting: Callable[[], int | None]) -> int | None:
    """With a window recorded, and without what goes before the first call."""
    path.settle()
    if path.network.device.type == "cuda":
        torch.cuda.empty_cache()
    return fitting()


def _tell(progress: Progress, text: str, window: int, windows: int, done: float) -> None:
    progress(text, (window + done) / windows)


def _compile(path: FusedPath, calls: range) -> None:
    """Launch everything whose kernels differ: of the window's lengths, the first and one with something cached."""
    made_up = _made_up(path)
    state, _ = _tried(path, made_up)
    if path.agree(state is not None):
        assert state is not None
        _walk(path, state, made_up, calls[:2], lambda done: None)
    if state is not None:
        path.let_go(state, WindowState())


def _made_up(path: FusedPath) -> _MadeUp:
    cfg = path.network.config
    dit, factor = cfg.dit, cfg.vae.spatial_factor
    height, width = (factor * side for side in path.pool.layout.latent[2:])

    def grey(frames: int) -> Tensor:
        return torch.zeros(1, 3, frames, height, width, dtype=path.network.dtype, device=path.network.device)

    if path.has_encoders:
        first, clip = path.encode_first(grey(1)), path.encode_clip(grey(4 * dit.num_frame_per_block + 1))
    else:
        first, clip = _without_encoders(path, grey(1))
    keys = path.dit.text_keys(first.ys.new_zeros(1, dit.text_len, dit.text_dim), 1)
    prompt = Prompt(torch.zeros(1, dit.text_len, dtype=torch.int64), first.ys, keys)
    negative = prompt if path.pool.layout.branches == 2 else None
    proprio = first.ys.new_zeros(1, 1, dit.max_state_dim)
    return _MadeUp(first, clip, prompt, negative, path.draw_noise(path.config.seed, first.latent), proprio)


def _without_encoders(path: FusedPath, like: Tensor) -> tuple[FirstFrame, Tensor]:
    """What the encoders would give."""
    cfg, latent = path.network.config, path.pool.layout.latent
    features = like.new_zeros(1, cfg.image.num_tokens, cfg.image.vision_dim)
    z = cfg.dit.out_dim
    frame, block = (like.new_zeros(1, z, frames, *latent[2:]) for frames in (1, cfg.dit.num_frame_per_block))
    return FirstFrame(features, like.new_zeros(1, *latent), frame), block


def _tried(path: FusedPath, made_up: _MadeUp) -> tuple[WindowState | None, Overloaded | None]:
    """A fresh window, or why there is none."""
    given = made_up.first, made_up.prompt, made_up.negative
    try:
        return path.restarted(WindowState(), *given, ResetReason.FIRST_CALL), None
    except Overloaded as error:
        return None, error


def _walk(path: FusedPath, state: WindowState, made_up: _MadeUp, calls: range, tell: Callable[[float], None]) -> None:
    """Prefill and every form of an evaluation, at one length of the window after the other."""
    latents, start = made_up.first.latent, 0
    for call, frame in enumerate(calls):
        tell(call / len(calls))
        state = replace(path.prefill(state, latents, start, None), current_start_frame=frame)
        for with_video, guided in sorted(path.loop.forms()):
            noise, proprio = made_up.noise, made_up.proprio
            path.evaluate(state, 0, noise.video, noise.action, proprio, with_video, 2 if guided else 1)
        start, latents = frame, made_up.clip
