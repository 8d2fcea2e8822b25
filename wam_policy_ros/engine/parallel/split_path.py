"""A step whose guidance branches are evaluated apart: each on ranks of its own, or, as the twin, one after the other.

*Exact* between these two. Against the fused step, which runs both branches as one batch, *numeric*: matrix products of
another size may add in another order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import Tensor

from wam_policy_ros.contract.errors import Cancelled, Overloaded
from wam_policy_ros.contract.interface import ResetReason
from wam_policy_ros.engine.config import NUM_STEPS, EngineConfig
from wam_policy_ros.engine.encode import FirstFrame, Prompt, PromptEncoder
from wam_policy_ros.engine.inpaint import Committed
from wam_policy_ros.engine.sampler import Noise, Probe
from wam_policy_ros.engine.session import WindowState
from wam_policy_ros.engine.solver_loop import SolverLoop, refuse_more_than_schedule
from wam_policy_ros.engine.step_path import Denoised
from wam_policy_ros.model.dreamzero import DreamZero

from .far import BranchPath, Far, TextStates, own, report
from .ranks import Progress, RankReport


class SplitPath:
    """See ``StepPath``. Solver, schedule and guidance run here, and here alone: ranks that each ran their own would
    have to agree on every bit and every decision, and save one small broadcast per evaluation.

    Args:
        network: of ``local``.
        config: of the whole call.
        local: the conditional branch. far: everything else.
    """

    def __init__(self, network: DreamZero, config: EngineConfig, local: BranchPath, far: Far) -> None:
        self.network, self.config, self.local, self.far = network, config, local, far
        self.prompts = PromptEncoder(network, keys=TextStates, encode=local.encode_text)
        self._loop = SolverLoop(network, config)

    def rescheduled(self, config: EngineConfig) -> SplitPath:
        """See ``FusedPath.rescheduled``: no rank decides by the schedule but this one."""
        refuse_more_than_schedule(config, self.config)
        other = copy.copy(self)
        other.config, other._loop = config, SolverLoop(self.network, config)
        return other

    def encode_clip(self, clip: Tensor) -> Tensor:
        return self.local.encode_clip(clip)

    def encode_first(self, frame: Tensor) -> FirstFrame:
        return self.local.encode_first(frame)

    def draw_noise(self, seed: int, latents: Tensor) -> Noise:
        return self.local.draw_noise(seed, latents)

    # -- windows ------------------------------------------------------------------------------------------------

    def restarted(
        self, state: WindowState, first: FirstFrame, prompt: Prompt, negative: Prompt | None, reason: ResetReason
    ) -> WindowState:
        # The far side first: it works while this one does.
        far = self.far.restarted(state.far, first, prompt, negative, reason)
        near = self._both(state, far, lambda: self.local.restarted(state, first, own(self.local, prompt), None, reason))
        return replace(near, negative=negative, far=far)

    def continued(self, state: WindowState, prompt: Prompt, negative: Prompt | None) -> WindowState:
        far = self.far.continued(state.far, prompt, negative)
        try:
            near = self.local.continued(state, own(self.local, prompt), None)
        except BaseException:
            self.far.let_go(far, state.far)
            raise
        return replace(near, negative=negative, far=far)

    def cloned(self, state: WindowState) -> WindowState:
        if state.far is None:
            return self.local.cloned(state)
        far = self.far.cloned(state.far)
        return replace(self._both(state, far, lambda: self.local.cloned(state)), far=far)

    def _both(self, state: WindowState, far: Any, local: Callable[[], WindowState]) -> WindowState:
        """The near window beside a far one that was asked for; neither is left when somebody has no memory."""
        try:
            near = local()
        except BaseException:
            with suppress(Overloaded):
                self.far.confirm()
            self.far.let_go(far, state.far)
            raise
        try:
            self.far.confirm()
        except BaseException:
            self.far.let_go(far, state.far)  # some of several ranks may have it
            self.local.let_go(near, state)
            raise
        return near

    def let_go(self, unwanted: WindowState, kept: WindowState) -> None:
        self.far.let_go(unwanted.far, kept.far)
        self.local.let_go(unwanted, kept)

    # -- the two kinds of call ----------------------------------------------------------------------------------

    def prefill(self, draft: WindowState, latents: Tensor, start_frame: int, probe: Probe | None) -> WindowState:
        far = self.far.prefill(draft.far, latents, start_frame, probe)
        with self.far.together():
            return replace(self.local.prefill(draft, latents, start_frame, probe), far=far)

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
        def evaluate(
            step: int, video: Tensor, action: Tensor, *, with_video: bool, guided: bool
        ) -> tuple[Sequence[Tensor] | None, Tensor]:
            start = draft.current_start_frame
            self.far.begin(draft.far, start, step, video, action, proprio, with_video=with_video, guided=guided)
            other: Tensor | None = None
            try:
                with self.far.together():
                    flow, flow_action = self.local.evaluate_branch(
                        draft, step, video, action, proprio, with_video=with_video
                    )
            finally:
                # Also after a failure here: what the other side sends has to be taken.
                if guided:
                    other = self.far.flow()
            flows = None if flow is None else [flow, other] if other is not None else [flow]
            return flows, flow_action

        def before(step: int) -> None:
            if cancelled is not None:
                self.far.pace()
                if cancelled():
                    raise Cancelled("step cancelled between two evaluations", got=f"solver step {step} of {NUM_STEPS}")

        return self._loop.run(noise, evaluate, want_video=want_video, committed=committed, before=before, probe=probe)

    def wait(self) -> None:
        self.far.wait()

    def reports(self) -> list[RankReport]:
        """Of all ranks, this one first; its windows are the sessions', who alone know them: 0."""
        return [report(0, self.network.device, self.local, 0), *self.far.reports()]

    # -- life ---------------------------------------------------------------------------------------------------

    def prepare(self, progress: Progress, fitting: Callable[[], int | None] = lambda: None) -> None:
        """As ``FusedPath.prepare``, on all ranks; ``fitting`` is of this process's device."""
        self.far.prepare()
        self.local.prepare(progress, fitting)
        self.far.prepared(progress, fitting)

    def close(self) -> None:
        """The call is never made again. Other ranks are given up."""
        self.local.close()
        self.far.close()
