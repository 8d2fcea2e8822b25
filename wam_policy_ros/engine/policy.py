"""The DreamZero policy: one observation in, one action chunk out. :meth:`DreamZeroPolicy.infer` names every station."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wam_policy_ros.contract.embodiment import Embodiment
from wam_policy_ros.contract.errors import ConfigError, EngineError, PromptError, SessionError, WamError
from wam_policy_ros.contract.interface import ActionChunk, Observation, PolicySpec
from wam_policy_ros.contract.normalization import Statistics
from wam_policy_ros.contract.prompts import NEGATIVE_PROMPT, build_prompt
from wam_policy_ros.contract.transforms import decode_actions, encode_actions, encode_state
from wam_policy_ros.model.config import DreamZeroConfig
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.model.errors import ModelError
from wam_policy_ros.model.tokenizer import Tokenizer

from .admission import Admission
from .asking import Asking
from .closed_loop import StepInputs, StepResult, closed_loop_step
from .config import EngineConfig
from .determinism import Determinism
from .device import DeviceWatch, no_memory_is_overload, on_device
from .device_resize import DeviceMosaic, Views
from .fingerprint import fingerprint_of
from .fp8 import fp8_for
from .fused_path import FusedPath
from .inpaint import Committed
from .memory import Account, Capacity
from .noise import ALGORITHM as COUNTED
from .observe_ahead import ObserveAhead, can_encode_ahead
from .parallel.ranks import Ranks
from .parallel.split_path import SplitPath
from .paths import make_path
from .plain_path import PlainPath
from .preprocess import stitch_views, to_model_video
from .sampler import Noise, Probe
from .session import Session, WindowState
from .stages import StageHashes
from .step_path import StepPath
from .timing import StageTimer


@dataclass(frozen=True)
class PredictedVideo:
    """Predicted latents ``[1, z, 1 + block, h, w]``, the first one observed, so that decoding has its context."""

    latents: Tensor


class DreamZeroPolicy:
    """Implements ``contract.interface.Policy``. One thread owns it; sessions are independent of each other.

    Args:
        network: weights, on their device and in their dtype.
        embodiment: cameras with the raw sizes of the checkpoint, fields in the checkpoint's order.
        statistics: normalisation of these fields.
        tokenizer: texts to ids of the network's ``text_len``.
        config: how to run.
        weights: where the weights come from, for people.
        random_weights: True when they were never trained.
        like: a policy of the same network whose prepared weights may be used again.
        weights_hash: of the weights, for the fingerprint.
        ranks: the other processes of ``config.gpus``; progress: told what they do.
        ask_device: see ``DeviceWatch``.

    Attributes:
        warnings: of this machine, for people.
        stage_hashes: fill ``ActionChunk.stages``.
    """

    def __init__(
        self,
        network: DreamZero,
        embodiment: Embodiment,
        statistics: Statistics,
        tokenizer: Tokenizer,
        config: EngineConfig | None = None,
        *,
        weights: str,
        random_weights: bool = False,
        like: DreamZeroPolicy | None = None,
        weights_hash: str | None = None,
        ranks: Ranks | None = None,
        progress: Callable[[str, float], None] = lambda text, fraction: None,
        ask_device: Callable[[], None] | None = None,
    ) -> None:
        self.network = network
        self.embodiment = embodiment
        self.statistics = statistics
        self.tokenizer = tokenizer
        self.config = config or EngineConfig.reference()
        picture = picture_hw(network.config, embodiment)
        self.warnings: list[str] = []
        self.stage_hashes = False
        self._prepared: dict[str, Any] = {}
        prepared = like.path if like is not None else None
        self._determinism = Determinism(network.device, enabled=self.config.deterministic)
        self._watch = DeviceWatch(network.device, ask_device)
        with on_device(network.device), no_memory_is_overload("the network"), self._determinism.switched():
            self.path: StepPath = make_path(
                network, self.config, picture, prepared, ranks=ranks, warn=self.warnings.append, progress=progress
            )
        self._stitch = self._make_stitch()
        self.admission = Admission(self)
        self._negative = tokenizer([NEGATIVE_PROMPT])
        self._tokens: tuple[str, tuple[Tensor, Tensor]] = ("", self._negative)
        self.spec = PolicySpec(
            embodiment=embodiment.tag,
            cameras=embodiment.cameras,
            state=embodiment.state,
            action=embodiment.action,
            control_rate_hz=embodiment.control_rate_hz,
            horizon=network.config.action_horizon,
            frame_offsets=embodiment.frame_offsets,
            inpainting=True,
            weights=weights,
            random_weights=random_weights,
            details={
                **self._how(),
                "dtype": str(network.dtype).removeprefix("torch."),
                "device": str(network.device),
                "evaluations": self.config.evaluations_text,
                "guidance_scale": self.config.guidance_scale,
                "seed": self.config.seed,
                "tier": self.config.tier,
                "deterministic": self.config.deterministic,
                "noise": COUNTED if self.config.deterministic else "torch, on the device",
                "parameters": sum(p.numel() for p in network.parameters()),
                "weights_hash": weights_hash,
            },
            fingerprint=fingerprint_of(network, self.config, embodiment, statistics, tokenizer, weights_hash),
        )

    @property
    def interleaves(self) -> bool:
        """See ``contract.interface.Interleaves``. Ranks that share a step would have to change over together."""
        path = self.path
        return isinstance(path, FusedPath | PlainPath) and self.config.gpus == 1

    # -- contract.interface.Policy ------------------------------------------------------------------------------

    def open(self, session_id: str | None = None, *, seed: int | None = None) -> Session:
        """Start an episode. Its place on the device is reserved until ``close``; on a CPU without a budget it costs
        nothing before the first call. ``seed`` replaces the configuration's.

        Raises:
            Overloaded: as many sessions are open as the device has memory for; nothing was changed.
        """
        session = Session(self, self.spec, session_id, seed=seed)
        self.admission.admit(session)
        return session

    def reserve(self) -> Session | None:
        """A place for a session that is opened later; see ``contract.interface.Reserves``."""
        return self.open("reserved") if self.admission.bounded else None

    def infer(
        self,
        session: Session,
        observation: Observation,
        *,
        cancelled: Callable[[], bool] | None = None,
        noise: Noise | None = None,
        probe: Probe | None = None,
    ) -> ActionChunk:
        """One closed-loop step. The session changes only when the step succeeds.

        Args:
            observation: raw-size frames and state, see ``Observation``.
            cancelled: asked before the prefill and before every evaluation, when the device has done what was launched.
                See ``interleaves`` for what it may do.
            noise: starting noise to use instead of the seed's; probe: see ``closed_loop_step``.

        Raises:
            ObservationError: the observation does not fit ``spec`` (also MissingInput, InvalidImage, InvalidState,
                PromptError, StaleInput).
            Cancelled: ``cancelled()`` was true.
            SessionError: closed or foreign session.
            EngineError: the network gave values that are not finite; the session is as it was.
            NotDeterministic: in the deterministic tier, an operation that is not.
            Overloaded: no memory; the session is as it was.
            PolicyLost: the device answers no call any more.
        """
        if not isinstance(session, Session):
            raise SessionError("not a session of this policy", got=type(session).__name__, remedy="use policy.open()")
        session.check(self)
        kind = ("step", session.step == 0, observation.want_video, observation.committed is not None)
        with self.running("this step", *kind), session.step_begun():
            return self._infer(session, observation, cancelled, noise, probe)

    def _infer(
        self,
        session: Session,
        observation: Observation,
        cancelled: Callable[[], bool] | None,
        noise: Noise | None,
        probe: Probe | None,
    ) -> ActionChunk:
        timer = StageTimer(self.network.device)
        if cancelled is not None:
            cancelled = Asking(cancelled, self.network.device, timer, self._determinism.outside)
        with timer.stage("preprocess", host=True):
            history = session.history.copy()
            history.add(observation, borrow=True)
            drawn = history.draw(first_call=session.step == 0)
            ids, mask = self._tokenize(observation.prompt)
            images = self._stitch(drawn.images)
            ahead = session.ahead
            proprio = self._encode_state(observation)
            committed = self._committed(observation)
        stages = StageHashes(probe) if self.stage_hashes else None
        if stages is not None:
            stages("mosaic", images)
            stages("proprio", proprio)
            if committed is not None:
                stages("committed.rows", committed.rows)
                stages("committed.weights", committed.weights)
        result = closed_loop_step(
            self.network,
            self.config if session.seed is None else replace(self.config, seed=session.seed),
            session.window,
            StepInputs(images, ids, mask, *self._negative, proprio),
            self.path,
            noise=noise,
            want_video=observation.want_video,
            committed=committed,
            observed=(lambda: ahead.latents(drawn.frames)) if ahead is not None and ahead.offered else None,
            cancelled=cancelled,
            probe=stages or probe,
            timer=timer,
        )
        try:
            history.settle()  # while the device works
            self.path.wait()
            if stages is not None:
                stages("normalised", result.action)
            normalised = result.action[0].float().cpu().numpy()  # the host's only wait for the device
            with timer.stage("decode_actions", host=True):
                rows = decode_actions(normalised, self.spec.action, self.statistics, observation.state)
            self._refuse_not_finite("action", int((~np.isfinite(rows)).sum()), rows.size)
            if result.video is not None:
                self._refuse_not_finite("video", int((~result.video.isfinite()).sum()), result.video.numel())
            if stages is not None:
                stages("rows", torch.from_numpy(rows))
            chunk = ActionChunk(
                actions=rows,
                dt_s=self.spec.dt_s,
                stamp_ns=observation.stamp_ns if observation.stamp_ns is not None else drawn.reference_ns,
                session_id=session.session_id,
                step=session.step,
                reset=result.reset,
                timings_s=timer.finish(),
                video=self._predicted(result),
                info={"evaluated": result.evaluated, **drawn.info},
                fingerprint=self.spec.fingerprint.id if self.spec.fingerprint else "",
                stages={} if stages is None else stages.result(),
            )
        except BaseException:
            self.path.let_go(result.state, session.window)
            raise
        self.path.let_go(session.window, result.state)
        session.history, session.window, session.step = history, result.state, session.step + 1
        if result.reset is not None:  # otherwise nothing was taken or given back
            self.admission.changed()
        return chunk

    def observe(self, session: Session, slot: int, frames: Mapping[str, npt.NDArray[np.uint8]]) -> bool:
        """Encode a frame of the next call before that call is made; what is left to do then is done sooner.

        A guess that costs nothing when it is wrong: the call compares the frames it draws with those it was told of,
        and encodes everything when they differ. The result of the call is the same, bit for bit.

        Args:
            slot: place of the frame in the next call's ``frame_offsets``; 0 starts a new guess.
            frames: camera -> uint8 ``[H, W, 3]`` of the raw size.

        Returns:
            False when this path does not encode ahead, when calls see one frame only, before the first call, or when
            ``slot`` is out of turn.

        Raises:
            InvalidImage, MissingInput: the frames do not fit the spec.
            SessionError: closed or foreign session.
        """
        session.check(self)
        count, block = len(self.spec.frame_offsets), self.network.config.dit.num_frame_per_block
        path = self._fused
        if path is None or session.window.slot is None or not can_encode_ahead(count, block):
            return False
        if session.ahead is None:
            network = self.network

            def to_video(views: Mapping[str, npt.NDArray[np.uint8]]) -> Tensor:
                images = self._stitch(views).to(network.device)
                return to_model_video(images, network.dtype, network.config.target_video_hw)

            session.ahead = ObserveAhead(path.vae, to_video, num_frames=count, block=block)
        with self.running("a frame ahead", "frame ahead", slot), torch.inference_mode():
            return session.ahead.offer(slot, frames)

    def prepare(self, progress: Callable[[str, float], None] = lambda text, fraction: None) -> None:
        """Whatever is compiled and recorded at first use, now; nothing without graphs. Then ``capacity`` is known.

        Raises:
            ConfigError: there is no memory for one session.
        """
        if isinstance(self.path, FusedPath | SplitPath) and self.config.graphs:
            with self.running("recording the step", "recording"):
                begin_s = time.perf_counter()
                self.path.prepare(progress, self.admission.fitting)
                took_s, fused = round(time.perf_counter() - begin_s, 1), self._fused
                self._prepared = {"prepared_windows": 0 if fused is None else fused.pool.made, "prepare_s": took_s}
                progress(f"{self._prepared['prepared_windows']} windows prepared in {took_s} s", 1.0)
        self.admission.measure().refuse_none()
        self.spec = replace(self.spec, details={**self.spec.details, **self.capacity.details(), **self._prepared})

    @property
    def capacity(self) -> Capacity:
        """How many sessions may be open, and why."""
        return self.admission.capacity

    @property
    def account(self) -> Account:
        """Bytes by what they are for, now. From the thread that calls the policy."""
        return self.admission.account()

    @property
    def fixed_memory(self) -> tuple[object, ...]:
        """Objects beside network and path whose tensors are there from the beginning."""
        return (self._stitch,)

    @property
    def details(self) -> dict[str, Any]:
        """Of memory and sessions, as of the last call that changed them. Any thread."""
        return self.admission.details

    def fork(self, session: Session, session_id: str | None = None, *, seed: int | None = None) -> Session:
        """Another episode at the same point; see ``contract.interface.Forks``. It has a place as every session has.
        Frames that were encoded ahead are not copied: the call encodes them, with the same bits."""
        session.check(self)
        twin = session.twin(session_id, seed=seed)
        self.admission.admit(twin)
        try:
            with self.running("a fork of a session", "fork"), torch.inference_mode():
                twin.window = self.path.cloned(session.window)
        except BaseException:
            self.admission.leave(twin)
            raise
        self.admission.changed()
        return twin

    def reset(self, session: Session) -> None:
        """Forget the episode; the next call is a first call. The session keeps its place."""
        session.check(self)
        self.path.let_go(session.window, WindowState())
        session.clear()
        self.admission.changed()

    def close(self, session: Session) -> None:
        """Free the session's memory. Idempotent."""
        if not session.closed:
            session.check(self)
            self.path.let_go(session.window, WindowState())
            session.close()
            self.admission.leave(session)

    def disconnect(self) -> None:
        """No call is made again: end the processes of other GPUs. Idempotent; nothing on one GPU."""
        self.path.close()

    @property
    def lost(self) -> WamError | None:
        """Why no call can succeed again: the device is lost, or another GPU's process died or hangs. Any thread."""
        if (lost := self._watch.lost) is not None:
            return lost
        return self.path.far.lost if isinstance(self.path, SplitPath) else None

    @torch.inference_mode()
    def render_video(self, chunk: ActionChunk) -> npt.NDArray[np.uint8] | None:
        """Decode the predicted frames of a chunk: uint8 ``[4 * block, H, W, 3]`` RGB at the network's resolution.

        The newest observed latent goes in front as context and its frame is left out of the result.
        """
        if not isinstance(chunk.video, PredictedVideo):
            return None
        with self.running("decoding the video", "video"):
            video = self.network.vae.decode(chunk.video.latents)[0, :, 1:]
        pixels = ((video.float() + 1) * 127.5).clamp(0, 255).to(torch.uint8)
        return pixels.permute(1, 2, 3, 0).cpu().numpy()

    # -- details ------------------------------------------------------------------------------------------------

    @contextmanager
    def running(self, what: str, *kind: Hashable) -> Iterator[None]:
        """Around everything that runs there. ``kind``: of work, for the deterministic tier."""
        device = self.network.device
        with self._watch.around(), on_device(device), no_memory_is_overload(what), self._determinism.around(*kind):
            yield

    @property
    def _fused(self) -> FusedPath | None:
        """The fused step that runs in this process."""
        path = self.path.local if isinstance(self.path, SplitPath) else self.path
        return path if isinstance(path, FusedPath) else None

    def _how(self) -> dict[str, Any]:
        """Of ``spec.details``: what runs, by the names of the options that decide it."""
        config = self.config
        several = {"gpus": config.gpus} if config.gpus > 1 else {}
        if config.step == "plain":
            return {"step": "plain", **several}
        eight = fp8_for(self.network.device).name if "fp8" in (config.linears, config.attention) else ""
        return {
            "step": config.step,
            "linears": f"fp8 {eight}" if config.linears == "fp8" else config.linears,
            "attention": f"fp8 {eight}" if config.attention == "fp8" else config.attention,
            "text": config.text,
            "graphs": config.graphs,
            **({"branches": config.branches} if config.branches != "together" else {}),
            **several,
        }

    def _make_stitch(self) -> Callable[[Views], Tensor]:
        """Camera views to the mosaic. The plain step resizes on the host, as published."""
        device = self.network.device
        if self.config.step == "plain" or device.type == "cpu":
            whole = lambda views: {name: np.asarray(images) for name, images in views.items()}  # noqa: E731
            return lambda views: stitch_views(whole(views), self.embodiment, device)
        return DeviceMosaic(self.embodiment, device, max_frames=len(self.embodiment.frame_offsets))

    def _tokenize(self, instruction: str) -> tuple[Tensor, Tensor]:
        text = build_prompt(instruction, self.embodiment.prompt_template)
        if text == self._tokens[0]:
            return self._tokens[1]
        try:
            self._tokens = (text, self.tokenizer([text]))
            return self._tokens[1]
        except ModelError as error:
            raise PromptError(
                "the instruction cannot be tokenized",
                field="prompt",
                got=str(error),
                remedy="use a shorter instruction",
            ) from error

    def _refuse_not_finite(self, what: str, wrong: int, size: int) -> None:
        if not wrong:
            return
        self.path.prompts.forget()  # all that outlives a call and is not the session's
        raise EngineError(
            f"the network's {what} is not finite; the session is unchanged",
            got=f"{wrong} of {size} values",
            remedy="check the weights and the observation; nothing of this chunk may be executed",
        )

    def _predicted(self, result: StepResult) -> PredictedVideo | None:
        if result.video is None:
            return None
        predicted = result.video[:, :, -self.network.config.dit.num_frame_per_block :]
        return PredictedVideo(torch.cat([result.context, predicted], dim=2))

    def _committed(self, observation: Observation) -> Committed | None:
        rows = observation.committed
        if rows is None:
            return None
        rows.check_fit(self.spec)
        width, live = self.network.config.dit.action_dim, self.spec.action_dim
        # Relative joints count from the state of this call, as those of the chunk do.
        encoded = encode_actions(rows.rows, self.spec.action, self.statistics, observation.state, width)
        target = np.zeros((self.spec.horizon, width))
        weights = np.zeros_like(target)
        target[: len(encoded)] = encoded
        weights[: len(encoded), :live] = rows.weights[:, None]  # the padding columns are nobody's
        where = (self.network.device, self.network.dtype)
        return Committed(torch.from_numpy(target)[None].to(*where), torch.from_numpy(weights)[None].to(*where))

    def _encode_state(self, observation: Observation) -> Tensor:
        width = self.network.config.dit.max_state_dim
        vector = encode_state(observation.state, self.spec.state, self.statistics, width)
        # float64 until here, as published; the network's dtype is the first and only rounding.
        state = torch.from_numpy(vector).view(1, 1, width).to(self.network.dtype)
        if self.network.device.type == "cuda":
            # From pageable memory the host would wait for everything the device has to do before.
            state = state.pin_memory()
        return state.to(self.network.device, non_blocking=True)


def picture_hw(network: DreamZeroConfig, embodiment: Embodiment) -> tuple[int, int]:
    """Size of the pictures the network sees."""
    return network.target_video_hw or (2 * embodiment.view_height, 2 * embodiment.view_width)


def with_config(policy: DreamZeroPolicy, **changes: Any) -> DreamZeroPolicy:
    """The same weights run differently, e.g. ``with_config(policy, evaluations=16)``."""
    return DreamZeroPolicy(
        policy.network,
        policy.embodiment,
        policy.statistics,
        policy.tokenizer,
        replace(policy.config, **changes),
        weights=policy.spec.weights,
        random_weights=policy.spec.random_weights,
        like=policy,
        weights_hash=policy.spec.details["weights_hash"],
    )


def with_schedule(policy: DreamZeroPolicy, **changes: Any) -> DreamZeroPolicy:
    """The same weights, windows and recorded work with another ``schedule`` or number of ``evaluations``: costs
    nothing. Only one of the two may have sessions.

    Raises:
        ConfigError: other changes, or a step that records nothing.
    """
    config = replace(policy.config, **changes)
    if not isinstance(policy.path, FusedPath | SplitPath):
        raise ConfigError("only the fused step is run with another schedule", got=f"step: {policy.config.step}")
    other = copy.copy(policy)
    other.config, other.path = config, policy.path.rescheduled(config)
    other.admission = policy.admission.shared_with(other)
    said = {"evaluations": config.evaluations_text, "tier": config.tier}
    other.spec = replace(policy.spec, details={**policy.spec.details, **said})
    return other
