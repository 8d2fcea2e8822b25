"""The loop over the solver's steps, for paths that evaluate the network their own way. Its twin is ``sampler.denoise``.

*Exact*: the same operations in the same order; only what nobody looks at is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.model.dreamzero import DreamZero

from .config import NUM_STEPS, EngineConfig
from .inpaint import Committed, constrained_flow
from .sampler import Guidance, Noise, Probe, noise_levels
from .step_path import Denoised
from .step_schedule import fixed_steps, make_schedule
from .unipc import UniPC, UniPCTables


class Evaluate(Protocol):
    """One evaluation of the network."""

    def __call__(
        self, step: int, video: Tensor, action: Tensor, *, with_video: bool, guided: bool
    ) -> tuple[Sequence[Tensor] | None, Tensor]:
        """
        Args:
            step: solver step, which sets the noise level.
            video ``[1, z, F, h, w]``, action ``[1, N, action_dim]``: the samples.
            with_video: compute the video flow. guided: of the unguided branch, too.

        Returns:
            The video flows ``[1, z, F, h, w]``, the conditional one first, or None, and the conditional action flow.
            All of them stay as they are in later evaluations.
        """
        ...


class SolverLoop:
    """What all calls of a path have in common: schedule, guidance and the solvers' tables."""

    def __init__(self, network: DreamZero, config: EngineConfig) -> None:
        self.config = config
        sigmas_video, sigmas_action = noise_levels(network, config)
        self._tables = UniPCTables.of(sigmas_video), UniPCTables.of(sigmas_action)
        self._sigmas_action = [float(s) for s in sigmas_action]
        fixed = fixed_steps(config.schedule, config.evaluations, NUM_STEPS)
        # Solver steps that may evaluate the network, and the last that surely does; 16 where the flows decide.
        self.steps: Sequence[int] = range(NUM_STEPS) if fixed is None else fixed
        self.last = NUM_STEPS if fixed is None else fixed[-1]

    def form(self, step: int, want_video: bool) -> tuple[bool, bool]:
        """What an evaluation computes: whether the video flow, and whether of the unguided branch, too.

        The video flow of the last evaluation moves the video only, so without a video it is not needed, nor is the
        unguided branch, which moves nothing else. In the deterministic tier they are computed all the same: products of
        other sizes may be other kernels, and the actions must not depend on who watches.
        """
        with_video = want_video or step < self.last or self.config.deterministic
        return with_video, with_video and self.config.guides(step)

    def forms(self) -> set[tuple[bool, bool]]:
        """Every ``form`` that occurs with this schedule."""
        return {self.form(step, want_video) for step in self.steps for want_video in (True, False)}

    def run(
        self,
        noise: Noise,
        evaluate: Evaluate,
        *,
        want_video: bool,
        committed: Committed | None,
        before: Callable[[int], None],
        probe: Probe | None,
    ) -> Denoised:
        """Denoise one block.

        Args:
            before: called with the solver step before each evaluation; may raise ``Cancelled``.
        """
        config = self.config
        solver_video, solver_action = (UniPC(tables) for tables in self._tables)
        schedule = make_schedule(config.schedule, config.evaluations, NUM_STEPS)
        guidance = Guidance(config)
        video, action = noise.video.transpose(1, 2), noise.action  # the solver keeps frames before channels
        flow_video: Tensor | None = None
        flow_action: Tensor | None = None
        evaluated: list[int] = []
        for i in range(NUM_STEPS):
            if flow_action is None or schedule.should_run(i):
                before(i)
                with_video, guided = self.form(i, want_video)
                flows, flow_action = evaluate(i, video.transpose(1, 2), action, with_video=with_video, guided=guided)
                flow_video = None if flows is None else guidance(list(flows))
                if flow_video is not None:
                    schedule.evaluated(flow_video)
                evaluated.append(i)
                _report(probe, i, flows, flow_action)
            assert flow_action is not None
            if flow_video is not None:
                video = solver_video.step(flow_video.transpose(1, 2), video)
            action = solver_action.step(
                constrained_flow(flow_action, action, self._sigmas_action[i], committed), action
            )
            if probe is not None:
                probe(f"after_step{i}.video", video)
                probe(f"after_step{i}.action", action)
        return Denoised(video.transpose(1, 2) if want_video else None, action, evaluated)


def refuse_more_than_schedule(config: EngineConfig, like: EngineConfig) -> None:
    """
    Raises:
        ConfigError: they differ in more than which solver steps evaluate the network.
    """
    if replace(config, schedule=like.schedule, evaluations=like.evaluations) != like:
        raise ConfigError("more than the schedule differs", got=config, expected=like)


def _report(probe: Probe | None, step: int, flows: Sequence[Tensor] | None, flow_action: Tensor) -> None:
    if probe is None:
        return
    for name, flow in zip(("cond", "neg"), flows or (), strict=False):
        probe(f"step{step}.video_flow_{name}", flow)
    probe(f"step{step}.action_flow_cond", flow_action)
