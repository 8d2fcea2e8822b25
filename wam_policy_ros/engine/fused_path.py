"""The optimised step: ``FastDiT`` on session slots, replayed as CUDA graphs. Its twin is ``PlainPath``.

Tier *numeric*: the same algorithm as the plain path with other rounding. With graphs or without, the bits are the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wam_policy_ros.contract.interface import ResetReason
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.model.errors import ShapeError

from . import preparing
from .asking import ask
from .config import NUM_STEPS, EngineConfig
from .encode import FirstFrame, Prompt, PromptEncoder
from .fast_dit import FastDiT
from .fast_encode import FastFirstFrame
from .fast_vae import FastVAE
from .graphs import GraphCache
from .inpaint import Committed
from .sampler import Noise, Probe, conditioning_slice, draw_noise
from .session import WindowState
from .solver_loop import SolverLoop, refuse_more_than_schedule
from .step_path import Denoised
from .streamed_text import StreamedTextEncoder
from .window_slots import SlotLayout, SlotPool

NOISES = 16
"""Seeds whose noise is kept: sessions may have seeds of their own."""


@dataclass(frozen=True)
class _Inputs:
    """Fixed addresses the graphs read. Everything is for one prefill or evaluation at a time."""

    first: Tensor  # latents of a prefill, one frame
    block: Tensor  # latents of a prefill, a whole block
    video: Tensor
    action: Tensor
    state: Tensor
    e: Tensor
    e6: Tensor
    action_steps: Tensor


class FusedPath:
    """See ``StepPath``. One session's tensors have batch 1.

    Args:
        network: its DiT is shared with, or taken over by, ``dit``.
        config: schedule, guidance, graphs.
        dit, vae: the networks as the fused step runs them; without ``vae`` nothing can be encoded here.
        text: runs the text encoder, if not the network's own module does.
        latent_hw: size of a latent frame.
        kv_dtype: of the windows.
    """

    def __init__(
        self,
        network: DreamZero,
        config: EngineConfig,
        dit: FastDiT,
        vae: FastVAE | None,
        *,
        text: Callable[[Tensor, Tensor], Tensor] | None = None,
        latent_hw: tuple[int, int],
        kv_dtype: torch.dtype,
    ) -> None:
        self.network, self.config, self.dit = network, config, dit
        self._text = text
        self.prompts = PromptEncoder(network, keys=dit.text_keys, encode=text)
        cfg, device, dtype = network.config, network.device, network.dtype
        self.pool = SlotPool(
            SlotLayout.of(
                cfg.dit,
                branches=1 if config.guidance_scale == 1.0 else 2,
                latent_frames=cfg.latent_frames,
                latent_hw=latent_hw,
                dtype=dtype,
                kv_dtype=kv_dtype,
                device=device,
                ranks=dit.exchange.ranks,
                first_shared=dit.share_first,
                image_tokens=cfg.image.num_tokens,
            )
        )
        self.graphs: GraphCache[tuple[Tensor | None, Tensor | None]] = GraphCache(
            device, enabled=config.graphs and (config.capture_exchange or dit.exchange.ranks == 1)
        )
        self._vae = vae
        self._beside = config.branches == "beside"
        # Of ranks that share every evaluation: what one of them cannot do, none of them may begin.
        self.agree: Callable[[bool], bool] = lambda here: here
        self._first = None if vae is None else FastFirstFrame(network, vae)
        self.encoders: GraphCache[Tensor] = GraphCache(device, enabled=config.graphs)
        self.first_frames: GraphCache[FirstFrame] = GraphCache(device, enabled=config.graphs)
        self._held_inputs: dict[tuple[str, torch.Size], Tensor] = {}
        self.loop = SolverLoop(network, config)
        self._noise: dict[int, Noise] = {}
        block, z, dim = cfg.dit.num_frame_per_block, cfg.dit.out_dim, cfg.dit.dim

        def buffer(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._in = _Inputs(
            first=buffer(1, z, 1, *latent_hw),
            block=buffer(1, z, block, *latent_hw),
            video=buffer(1, z, block, *latent_hw),
            action=buffer(1, cfg.action_horizon, cfg.dit.action_dim),
            state=buffer(1, 1, cfg.dit.max_state_dim),
            e=buffer(2, dim),
            e6=buffer(2, 6, dim),
            action_steps=buffer(1, cfg.action_horizon, dtype=torch.int64),
        )

    def serves(self, config: EngineConfig) -> bool:
        """Whether the prepared weights can be used as this configuration asks for."""
        same = ("step", "linears", "attention", "text", "sigma_shift")
        return all(getattr(config, name) == getattr(self.config, name) for name in same)

    def reconfigured(self, config: EngineConfig) -> FusedPath:
        """The same weights with another schedule or guidance, and windows of its own."""
        layout = self.pool.layout
        return FusedPath(
            self.network,
            config,
            self.dit,
            self._vae,
            text=self._text,
            latent_hw=layout.latent[2:],
            kv_dtype=layout.kv_dtype,
        )

    def rescheduled(self, config: EngineConfig) -> FusedPath:
        """The same windows and recorded work with another schedule: what an evaluation does, it does not decide. Only
        one of the two may have sessions.

        Raises:
            ConfigError: more than the schedule differs.
        """
        refuse_more_than_schedule(config, self.config)
        other = copy.copy(self)
        other.config, other.loop = config, SolverLoop(self.network, config)
        return other

    @torch.inference_mode()
    def prepare(
        self,
        progress: Callable[[str, float], None] = lambda text, fraction: None,
        fitting: Callable[[], int | None] = lambda: None,
    ) -> None:
        """See :mod:`.preparing`.

        Args:
            fitting: asked when all but further windows has its memory: how many fit; None: as many as the device gives.

        Raises:
            Overloaded: no memory for a window.
        """
        preparing.prepare(self, progress, fitting)

    @property
    def caches(self) -> tuple[GraphCache[Any], ...]:
        """Whatever is recorded."""
        return (self.graphs, self.encoders, self.first_frames)

    def settle(self, *, if_short: bool = False) -> None:
        """Wait for what goes on in the background: the text encoder on its way to the host.

        Args:
            if_short: only if the device has no memory for two windows while it is there.
        """
        if not isinstance(self._text, StreamedTextEncoder) or (if_short and self.has_room()):
            return
        self._text.settle()

    def has_room(self) -> bool:
        """Whether another window would leave as much again for what a step needs beside it."""
        device = self.network.device
        if device.type != "cuda":
            return True
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free > 2 * self.pool.layout.nbytes

    @property
    def window_bytes(self) -> int:
        """Of a session's window here, ``memory.features_bytes`` aside."""
        return self.pool.layout.nbytes

    def provide(self, windows: int) -> None:
        """Have so many windows, used ones included: what is promised to a session exists.

        Raises:
            Overloaded: the device has no memory for one of them.
        """
        self.pool.provide(windows)

    def bound(self, windows: int | None) -> None:
        """No more windows than this from now on, used ones included, but those that exist; None: no bound."""
        self.pool.most = windows

    @property
    def kept_noise(self) -> list[Noise]:
        return list(self._noise.values())

    @property
    def inputs(self) -> tuple[object, ...]:
        """The fixed places that recordings read."""
        return self._in, self._held_inputs

    @property
    def text(self) -> object:
        """What runs the text encoder, if not the network."""
        return self._text

    @property
    def has_encoders(self) -> bool:
        """Whether pictures are encoded here."""
        return self._vae is not None

    @property
    def vae(self) -> FastVAE:
        """For frames that are encoded ahead of their call."""
        assert self._vae is not None
        return self._vae

    # -- encoders -----------------------------------------------------------------------------------------------

    def encode_clip(self, clip: Tensor) -> Tensor:
        block = self.network.config.dit.num_frame_per_block
        into = self._held("clip", clip)
        # A clone: the next session's clip goes through the same memory.
        return self.encoders.run(("clip", clip.shape), lambda: self.vae.encode(into)[:, :, -block:]).clone()

    def encode_first(self, frame: Tensor) -> FirstFrame:
        assert self._first is not None
        run, into = self._first, self._held("first", frame)
        found = self.first_frames.run(("first", frame.shape), lambda: run(into))
        return FirstFrame(found.clip_features.clone(), found.ys.clone(), found.latent.clone())

    def _held(self, name: str, x: Tensor) -> Tensor:
        """A copy of ``x`` where a graph looks for it."""
        key = (name, x.shape)
        if key not in self._held_inputs:
            self._held_inputs[key] = torch.empty_like(x)
        return self._held_inputs[key].copy_(x)

    # -- windows ------------------------------------------------------------------------------------------------

    def restarted(
        self, state: WindowState, first: FirstFrame, prompt: Prompt, negative: Prompt | None, reason: ResetReason
    ) -> WindowState:
        if len(first.ys) != 1:
            raise ShapeError(f"the fused step runs one session at a time, got a batch of {len(first.ys)}")
        # A full window restarts whatever becomes of this call, so its memory can be used. Otherwise the old contents
        # must survive a call that is given up.
        slot = state.slot if reason is ResetReason.WINDOW_FULL and state.slot is not None else self.pool.acquire()
        draft = WindowState(clip_features=first.clip_features, ys=slot.ys, slot=slot)
        try:
            self.dit.load_image(slot, first.clip_features)
            slot.ys.copy_(first.ys)
            return self._with_prompts(draft, prompt, negative)
        except BaseException:
            self.let_go(draft, state)
            raise

    def continued(self, state: WindowState, prompt: Prompt, negative: Prompt | None) -> WindowState:
        return self._with_prompts(state, prompt, negative)

    def cloned(self, state: WindowState) -> WindowState:
        if state.slot is None:
            return state
        slot = self.pool.clone(state.slot)
        return replace(state, slot=slot, ys=slot.ys)

    def _with_prompts(self, draft: WindowState, prompt: Prompt, negative: Prompt | None) -> WindowState:
        assert draft.slot is not None
        for branch, text in enumerate((prompt, negative)):
            if text is not None:
                self.dit.load_text(draft.slot, branch, text.keys)
        return replace(draft, prompt=prompt, negative=negative)

    def let_go(self, unwanted: WindowState, kept: WindowState) -> None:
        if unwanted.slot is not None and unwanted.slot is not kept.slot:
            self.pool.release(unwanted.slot)

    # -- the two kinds of call ----------------------------------------------------------------------------------

    def prefill(self, draft: WindowState, latents: Tensor, start_frame: int, probe: Probe | None) -> WindowState:
        slot, frames, cached = draft.slot, latents.shape[2], draft.cached
        assert slot is not None
        x = self._in.first if frames == 1 else self._in.block
        x.copy_(latents)
        if probe is not None:
            probe("prefill0.x", latents)
            probe("prefill0.y", conditioning_slice(slot.ys, start_frame, frames))
            probe("prefill0.start_frame", torch.tensor(start_frame))
        branches = slot.layout.branches

        def work() -> tuple[None, None]:
            y = conditioning_slice(slot.ys, start_frame, frames)
            self.dit.prefill(slot, x, y, cached, start_frame, branches, beside=self._beside)
            return None, None

        kind = ("prefill", start_frame, frames, cached)
        self.graphs.run((*kind, slot.index), work, kind)
        end = cached + frames * self.network.config.dit.frame_seqlen
        if probe is not None:
            for k, v in zip(slot.k, slot.v, strict=True):
                probe("prefill0.k", k[:, cached:end])
                probe("prefill0.v", v[:, cached:end])
        return replace(draft, cached=end)

    def draw_noise(self, seed: int, latents: Tensor) -> Noise:
        if seed not in self._noise:
            while len(self._noise) >= NOISES:
                del self._noise[next(iter(self._noise))]
            self._noise[seed] = draw_noise(seed, latents, self.network, counted=self.config.deterministic)
        return self._noise[seed]

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
        def run(
            step: int, video: Tensor, action: Tensor, *, with_video: bool, guided: bool
        ) -> tuple[Sequence[Tensor] | None, Tensor]:
            given = draft, step, video, action, proprio, with_video, 2 if guided else 1
            if self.graphs.missing(self._evaluation(draft, with_video, given[-1])):
                # It takes about as long as an evaluation: nobody who is urgent waits for both.
                with self.graphs.recording_only():
                    self.evaluate(*given)
                before(step)
            flows, flow_action = self.evaluate(*given)
            return (None if flows is None else flows.split(1)), flow_action

        def before(step: int) -> None:
            where = f"solver step {step} of {NUM_STEPS}"
            ask(cancelled, self.network.device, "step cancelled between two evaluations", where)

        return self.loop.run(
            noise,
            run,
            want_video=want_video,
            committed=committed,
            before=before,
            probe=probe,
        )

    @property
    def encode_text(self) -> Callable[[Tensor, Tensor], Tensor]:
        return self._text or self.network.text_encoder

    def keys_of(self, states: Tensor, length: int) -> Any:
        return self.dit.text_keys(states, length)

    def wait(self) -> None:
        pass

    def close(self) -> None:
        # A process group whose exchanges were recorded is not given up before the graphs are.
        for cache in self.caches:
            cache.clear()

    def evaluate_branch(
        self, state: WindowState, step: int, video: Tensor, action: Tensor, proprio: Tensor, *, with_video: bool
    ) -> tuple[Tensor | None, Tensor]:
        return self.evaluate(state, step, video, action, proprio, with_video, 1)

    def evaluate(
        self,
        draft: WindowState,
        step: int,
        video: Tensor,
        action: Tensor,
        proprio: Tensor,
        with_video: bool,
        branches: int,
    ) -> tuple[Tensor | None, Tensor]:
        """Both flows at the noise level of a solver step; see ``FastDiT.evaluate``. Everything it reads is put in its
        place here: between two evaluations of a step those of another one may run."""
        slot, start, cached, times = draft.slot, draft.current_start_frame, draft.cached, self.dit.times
        assert slot is not None
        inputs = self._in
        inputs.video.copy_(video)
        inputs.action.copy_(action)
        inputs.state.copy_(proprio)
        inputs.e.copy_(times.e[step])
        inputs.e6.copy_(times.e6[step])
        inputs.action_steps.copy_(times.action_steps[step : step + 1])

        def work() -> tuple[Tensor | None, Tensor | None]:
            return self.dit.evaluate(
                slot,
                inputs.video,
                conditioning_slice(slot.ys, start, inputs.video.shape[2]),
                cached,
                start,
                branches,
                e=inputs.e,
                e6=inputs.e6,
                action=inputs.action,
                action_steps=inputs.action_steps,
                state=inputs.state,
                want_video=with_video,
                beside=self._beside,
            )

        key = self._evaluation(draft, with_video, branches)
        flows, flow_action = self.graphs.run(key, work, key[:-1])
        assert flow_action is not None
        # The next replay overwrites both; a flow may be used again in steps without an evaluation.
        return (flows.clone() if flows is not None else None), flow_action.clone()

    @staticmethod
    def _evaluation(draft: WindowState, with_video: bool, branches: int) -> tuple[Hashable, ...]:
        """Names a recording; what it has in common with those of other windows, and then the window."""
        assert draft.slot is not None
        return "evaluate", draft.current_start_frame, draft.cached, with_video, branches, draft.slot.index
