"""What an observation is, what an action chunk is, and the four-verb protocol every policy follows.

Rooms meet here. A policy is anything with ``spec``, ``open``, ``infer``, ``reset`` and ``close``: the in-process
DreamZero engine, a remote OpenPI server, or a scripted fake in a test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from .errors import InvalidState
from .fingerprint import Fingerprint

FieldKind = Literal["joint_position", "gripper", "velocity"]


@dataclass(frozen=True)
class CameraSpec:
    """One camera of an embodiment.

    Attributes:
        name: key in the checkpoint's ``metadata.json``, e.g. ``exterior_image_1_left``.
        topic: suggested relative ROS topic namespace, e.g. ``camera_exterior_1``.
        height, width: raw size in pixels the network was trained with.
    """

    name: str
    topic: str
    height: int
    width: int


@dataclass(frozen=True)
class FieldSpec:
    """One named group of numbers in the state or the action.

    Attributes:
        name: key in ``metadata.json``, e.g. ``joint_position``.
        dim: number of values.
        unit: SI unit (``rad``, ``m``, ``m/s``) or ``1`` for a fraction.
        kind: how a robot executes it.
        relative: the network predicts differences to the state of the same name at the time of the call.
    """

    name: str
    dim: int
    unit: str
    kind: FieldKind
    relative: bool = False


@dataclass(frozen=True)
class PolicySpec:
    """What a policy needs and gives; checked once, at the door.

    Attributes:
        embodiment: tag, e.g. ``oxe_droid``.
        cameras: in the order of the network's views.
        state, action: in the order of the concatenated vectors.
        control_rate_hz: rows of a chunk per second.
        horizon: rows of a chunk.
        frame_offsets: control steps relative to the newest frame at which later calls look, e.g. (-23, -16, -8, 0);
            the first call of a session uses the newest frame alone.
        action_space: ``joint_position``: rows are absolute joint targets.
        inpainting: the policy honours ``Observation.committed``. A policy that does not refuses such an observation
            with an ``ObservationError``: a caller that asked for it must not get an unconstrained chunk in silence.
        weights: human-readable origin of the weights; shown wherever the policy is shown.
        random_weights: True when the weights were never trained. Such a policy is for tests of the machinery.
        details: anything else worth reporting (schedule, evaluations, dtype, device); JSON-serialisable.
        fingerprint: what decides the bits of an action; None: a policy that does not say.
    """

    embodiment: str
    cameras: tuple[CameraSpec, ...]
    state: tuple[FieldSpec, ...]
    action: tuple[FieldSpec, ...]
    control_rate_hz: float
    horizon: int
    frame_offsets: tuple[int, ...]
    action_space: str = "joint_position"
    inpainting: bool = False
    weights: str = ""
    random_weights: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: Fingerprint | None = None

    @property
    def state_dim(self) -> int:
        return sum(f.dim for f in self.state)

    @property
    def action_dim(self) -> int:
        return sum(f.dim for f in self.action)

    @property
    def dt_s(self) -> float:
        return 1.0 / self.control_rate_hz


@dataclass(frozen=True)
class CommittedRows:
    """What the robot will do in the near future whatever the policy says, or probably will (real-time chunking).

    A policy with ``PolicySpec.inpainting`` lets its denoising agree with these rows: row k of the chunk it makes is
    drawn to ``rows[k]`` with ``weights[k]``. Rows that will have run when the chunk arrives have weight 1, the rows
    after them decay, so that the new chunk leaves the old plan without a jump.

    Attributes:
        rows: float64 ``[K, action_dim]``, K from 1 to ``PolicySpec.horizon``, in the order and units of
            ``PolicySpec.action`` (absolute joint targets, grippers as fractions), exactly as ``ActionChunk.actions``.
            Row k is due at ``Observation.stamp_ns + (k + 1) * dt_s``.
        weights: float64 ``[K]`` in [0, 1], not increasing; 1: as given, 0: free.

    Raises:
        InvalidState: shapes that do not fit each other, values that are not finite, weights outside [0, 1] or
            increasing.
    """

    rows: npt.NDArray[np.float64]
    weights: npt.NDArray[np.float64]

    def __post_init__(self) -> None:
        rows, weights = self.rows, self.weights
        if rows.ndim != 2 or not len(rows) or weights.shape != (len(rows),):
            raise InvalidState(
                "committed rows have the wrong shape",
                field="committed",
                got=f"rows {rows.shape}, weights {weights.shape}",
                expected="rows [K, action_dim] and weights [K], K at least 1",
            )
        if not np.isfinite(rows).all() or not np.isfinite(weights).all():
            raise InvalidState("committed rows or their weights are not finite", field="committed")
        if weights.min() < 0.0 or weights.max() > 1.0 or (np.diff(weights) > 0).any():
            raise InvalidState(
                "weights of committed rows", field="committed", got=weights.tolist(), expected="0 to 1, not increasing"
            )

    def check_fit(self, spec: PolicySpec) -> None:
        """Raises InvalidState when these rows are not rows of this policy, or the policy cannot use them."""
        if not spec.inpainting:
            raise InvalidState(
                "this policy cannot take committed rows into account",
                field="committed",
                remedy="set control.rtc: blend",
            )
        if len(self.rows) > spec.horizon or self.rows.shape[1] != spec.action_dim:
            raise InvalidState(
                "committed rows do not fit the policy",
                field="committed",
                got=self.rows.shape,
                expected=f"at most {spec.horizon} rows of {spec.action_dim} columns",
            )


@dataclass(frozen=True)
class Observation:
    """What the robot sees and feels at one moment.

    Attributes:
        frames: camera name -> uint8 ``[T, H, W, 3]`` RGB, oldest first. T may be 1 (only the newest frame) or more;
            with stamps every camera carries the same T.
        state: field name -> float64 ``[dim]`` in the units of the spec.
        prompt: instruction in plain language.
        stamp_ns: time of the newest frame on the robot's clock in ns, or None when the caller has no clock.
        frame_stamps_ns: camera name -> int64 ``[T]``; None for callers without a clock, whose frames then count by
            order of arrival.
        session_start_ns: frames older than this belong to another episode and are never used.
        committed: rows of the running plan the new chunk shall agree with; only for a policy whose spec says
            ``inpainting``. None: no constraint.
        want_video: somebody will look at the predicted video (``Policy.render_video``). Without, a policy may leave out
            what only the video needs; the actions are the same.
    """

    frames: Mapping[str, npt.NDArray[np.uint8]]
    state: Mapping[str, npt.NDArray[np.float64]]
    prompt: str
    stamp_ns: int | None = None
    frame_stamps_ns: Mapping[str, npt.NDArray[np.int64]] | None = None
    session_start_ns: int | None = None
    committed: CommittedRows | None = None
    want_video: bool = True


class ResetReason(str, Enum):
    """Why a call started from an empty window (DreamZero spec 3.2)."""

    FIRST_CALL = "first call of the session"
    PROMPT_CHANGED = "instruction changed"
    SINGLE_FRAME = "only one frame in the call"
    WINDOW_FULL = "the window of latent frames is full"


@dataclass(frozen=True)
class ActionChunk:
    """Targets for the next ``horizon`` control steps.

    Attributes:
        actions: float64 ``[N, action_dim]`` in the order and units of ``PolicySpec.action``; absolute joint targets
            (relative predictions are already added to the state of the call).
        dt_s: seconds between rows; row k is due at ``stamp_ns + (k + 1) * dt_s``.
        stamp_ns: ``Observation.stamp_ns`` of the call.
        session_id: the session that produced it.
        step: 0-based number of the call within its session.
        reset: why the window was started afresh in this call, or None.
        timings_s: seconds per stage, key ``total`` included; ``interrupted``, not part of the total: how long another
            session's step had the policy meanwhile.
        video: opaque handle to the predicted video of this call; give it to ``Policy.render_video``. None if absent.
        info: anything worth logging (evaluations run, frames taken, ...); JSON-serialisable.
        fingerprint: ``Fingerprint.id`` of the policy that made it; empty when it does not say.
        stages: stage of the call, in order -> digest of what it gave; empty unless asked for (``HashesStages``).
    """

    actions: npt.NDArray[np.float64]
    dt_s: float
    stamp_ns: int | None
    session_id: str
    step: int
    reset: ResetReason | None = None
    timings_s: Mapping[str, float] = field(default_factory=dict)
    video: Any = None
    info: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    stages: Mapping[str, str] = field(default_factory=dict)


@runtime_checkable
class PolicySession(Protocol):
    """One episode. Opaque to callers except for its name."""

    session_id: str


@runtime_checkable
class Reserves(Protocol):
    """A policy that has memory for so many sessions and no more: ``open`` refuses what has no room."""

    def reserve(self) -> PolicySession | None:
        """Keep room for one session, for whoever opens it right after the ``close`` of what this returns, with no other
        call in between. None: there is room for any number.

        Raises:
            Overloaded: there is no room.
        """
        ...


@runtime_checkable
class EncodesAhead(Protocol):
    """A policy that can work on frames before the call that looks at them. It gives the same chunk, sooner."""

    def observe(self, session: Any, slot: int, frames: Mapping[str, npt.NDArray[np.uint8]]) -> bool:
        """Say which frame the next call will probably look at.

        Args:
            slot: place of the frame in ``PolicySpec.frame_offsets``; 0 begins anew, then in order.
            frames: camera name -> uint8 ``[H, W, 3]`` of the raw size.

        Returns:
            False when nothing was done with it.
        """
        ...


@runtime_checkable
class Forks(Protocol):
    """A policy whose sessions can be copied. A copy that is kept is a snapshot: fork it to go back there."""

    def fork(self, session: Any, session_id: str | None = None, *, seed: int | None = None) -> PolicySession:
        """Another session at the same point of its episode. Both go on, each as if it were alone: given the same
        observations and seed they give the same bits. Frames of a next call that were told ahead are not copied.

        Args:
            session: is not changed. session_id: of the copy; a fresh one when none is given.
            seed: of the copy's later calls; None: that of ``session``.

        Raises:
            Overloaded: no memory for a second window.
            SessionError: the session is closed or foreign, or cannot be copied.
        """
        ...


@runtime_checkable
class Interleaves(Protocol):
    """A policy that can say that its steps can be nested.

    Attributes:
        interleaves: while ``cancelled`` of a step runs, every method may be called for *other* sessions, by the same
            thread; both steps give what they would have given one after the other. The time spent in ``cancelled`` is
            not part of the step's ``timings_s`` but their entry ``interrupted``, when it is worth mentioning.
    """

    @property
    def interleaves(self) -> bool: ...


def interleaves(policy: object) -> bool:
    """See ``Interleaves``; False for a policy that does not say."""
    return isinstance(policy, Interleaves) and policy.interleaves


@runtime_checkable
class HashesStages(Protocol):
    """A policy that can tell what every stage of a call gave.

    Attributes:
        stage_hashes: fill ``ActionChunk.stages`` from now on. A call then takes longer; its result is the same.
    """

    stage_hashes: bool


@runtime_checkable
class Policy(Protocol):
    """The whole protocol. Not thread-safe: one thread owns a policy and calls it."""

    @property
    def spec(self) -> PolicySpec: ...

    def open(self, session_id: str | None = None, *, seed: int | None = None) -> PolicySession:
        """Start an episode; a fresh id is made when none is given.

        Args:
            seed: of every call's starting noise; None: the policy's own (1140 as published, the same for every call).
        """
        ...

    def infer(
        self, session: Any, observation: Observation, *, cancelled: Callable[[], bool] | None = None
    ) -> ActionChunk:
        """One closed-loop step.

        Raises:
            ObservationError: the observation does not fit the spec; the session is unchanged.
            Cancelled: ``cancelled()`` returned True between two network evaluations; the session is unchanged.
            SessionError: the session is closed or foreign.
        """
        ...

    def reset(self, session: Any) -> None:
        """Forget everything of the episode; the next call is a first call."""
        ...

    def close(self, session: Any) -> None:
        """Free the session's memory. Idempotent."""
        ...

    def render_video(self, chunk: ActionChunk) -> npt.NDArray[np.uint8] | None:
        """Decode the predicted video: uint8 ``[T, H, W, 3]`` RGB, or None when the policy predicts none."""
        ...
