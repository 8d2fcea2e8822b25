"""The published algorithm in plain PyTorch, one guidance branch after the other. The twin of every faster path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from wam_policy_ros.contract.interface import ResetReason
from wam_policy_ros.model.dit import DiTOutput
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.model.exchange import ALONE, Exchange

from .config import EngineConfig
from .device import no_memory_is_overload
from .encode import FirstFrame, Prompt, PromptEncoder, encode_first_frame
from .inpaint import Committed
from .kv_cache import KVWindow
from .memory import plain_window_bytes
from .sampler import Noise, Probe, conditioning_slice, denoise, draw_noise, evaluate, noise_levels, prefill
from .session import WindowState
from .step_path import Denoised
from .unipc import timesteps_of


class PlainPath:
    """See ``StepPath``.

    Args:
        exchange: shares every evaluation with other ranks, which make the same calls with the same arguments.
    """

    def __init__(
        self,
        network: DreamZero,
        config: EngineConfig,
        prompts: PromptEncoder | None = None,
        *,
        exchange: Exchange = ALONE,
    ) -> None:
        self.network, self.config, self.exchange = network, config, exchange
        self.prompts = prompts or PromptEncoder(network)

    @property
    def window_bytes(self) -> int:
        """Of a session's window here, ``memory.features_bytes`` aside."""
        network, config = self.network, self.config
        branches = 1 if config.guidance_scale == 1.0 else 2
        ranks = self.exchange.ranks
        return plain_window_bytes(network.config, branches=branches, dtype=network.dtype, ranks=ranks)

    def provide(self, windows: int) -> None:
        """Nothing is taken before a call needs it."""

    def encode_clip(self, clip: Tensor) -> Tensor:
        return self.network.vae.encode(clip)

    def encode_first(self, frame: Tensor) -> FirstFrame:
        return encode_first_frame(self.network, frame)

    def restarted(
        self, state: WindowState, first: FirstFrame, prompt: Prompt, negative: Prompt | None, reason: ResetReason
    ) -> WindowState:
        return WindowState(
            current_start_frame=0,
            prompt=prompt,
            negative=negative,
            clip_features=first.clip_features,
            ys=first.ys,
            image_kv=self.network.model.image_kv(first.clip_features),
            cond=self._fresh_window(state.cond, reason),
            uncond=self._fresh_window(state.uncond, reason) if negative is not None else None,
        )

    def continued(self, state: WindowState, prompt: Prompt, negative: Prompt | None) -> WindowState:
        # The ids are those of the last call; the mask need not be.
        return replace(state.forked(), prompt=prompt, negative=negative)

    def cloned(self, state: WindowState) -> WindowState:
        with no_memory_is_overload("a copy of a session's window"):
            return state.cloned()

    def prefill(self, draft: WindowState, latents: Tensor, start_frame: int, probe: Probe | None) -> WindowState:
        prefill(self.network, draft, latents, start_frame, probe, self.exchange)
        return draft

    def draw_noise(self, seed: int, latents: Tensor) -> Noise:
        return draw_noise(seed, latents, self.network, counted=self.config.deterministic)

    def denoise(
        self,
        draft: WindowState,
        noise: Noise,
        proprio: Tensor,
        *,
        want_video: bool,
        committed: Committed | None,
        cancelled: Callable[[], bool] | None,
        probe: Probe | None,
    ) -> Denoised:
        video, action, evaluated = denoise(
            self.network,
            self.config,
            draft,
            noise,
            proprio,
            committed=committed,
            cancelled=cancelled,
            probe=probe,
            exchange=self.exchange,
        )
        return Denoised(video if want_video else None, action, evaluated)

    @property
    def encode_text(self) -> Callable[[Tensor, Tensor], Tensor]:
        return self.network.text_encoder

    def keys_of(self, states: Tensor, length: int) -> Any:
        return self.network.model.text_kv(states)

    def evaluate_branch(
        self, state: WindowState, step: int, video: Tensor, action: Tensor, proprio: Tensor, *, with_video: bool
    ) -> tuple[Tensor | None, Tensor]:
        assert state.ys is not None
        start = state.current_start_frame
        y = conditioning_slice(state.ys, start, video.shape[2])
        out = self.evaluate_once(state, Noise(video, action), proprio, y, start, step)
        assert out.action is not None  # action tokens went in
        return out.video, out.action

    def evaluate_once(
        self, state: WindowState, noise: Noise, proprio: Tensor, y: Tensor, start_frame: int, step: int
    ) -> DiTOutput:
        """One evaluation of the conditional branch at the noise level of a solver step, for comparisons.

        Args:
            noise: the samples; y: conditioning of the block that starts at ``start_frame``.
        """
        dit = self.network.model
        frames, height, width = noise.video.shape[2:]
        table = dit.rotary_table(start_frame, frames, height, width, registers=True)
        times = [timesteps_of(sigmas).tolist()[step] for sigmas in noise_levels(self.network, self.config)]
        prompt, window = state.branches()[0]
        branch = (state.cross(prompt), window.past())
        video = noise.video.transpose(1, 2)
        return evaluate(
            self.network, [branch], video, noise.action, y, table, proprio, times[0], times[1], self.exchange
        )[0]

    def let_go(self, unwanted: WindowState, kept: WindowState) -> None:
        pass  # memory goes with the last reference

    def wait(self) -> None:
        pass

    def bound(self, windows: int | None) -> None:
        """Windows are not made beforehand, so there is none too many."""

    def prepare(self, progress: Callable[[str, float], None], fitting: Callable[[], int | None] = lambda: None) -> None:
        pass  # nothing is compiled

    def close(self) -> None:
        pass

    def _fresh_window(self, old: KVWindow | None, reason: ResetReason) -> KVWindow:
        """An empty window. Buffers are reused only where the old contents can never be needed again: a full window
        restarts whatever happens to this call, the others must survive a cancelled step."""
        if old is not None and reason is ResetReason.WINDOW_FULL:
            return old.emptied()
        dit = self.network.config.dit
        # The block being denoised is never stored, so the cache holds one block less than the attention window.
        return KVWindow((dit.local_attn_size - dit.num_frame_per_block) * dit.frame_seqlen)
