"""One step of a session: the job for the policy's thread, and what its client is told about it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wam_policy_ros.contract.errors import ObservationError, SessionError
from wam_policy_ros.contract.interface import ActionChunk, Policy, PolicySpec
from wam_policy_ros.contract.policy_thread import AskCancelled, Ticket

from .config import ServerConfig
from .dialects import Dialect, reply
from .sessions import ServedSession
from .wire import InferRequest


@dataclass(frozen=True)
class Answered:
    """What a step gives: the message to send, timings aside, and how long it took, whatever ran inside it included."""

    chunk: ActionChunk
    message: Any
    infer_s: float


def check_meaning(dialect: Dialect, spec: PolicySpec, request: InferRequest, config: ServerConfig) -> None:
    """Refuse joint positions to whoever asks as clients do that execute velocities and read no metadata.

    OpenPI's own DROID loop and inspect-robots-franka send one exterior camera and integrate what they get. A client
    with the views this policy was trained with was written for it.

    Raises:
        ObservationError: the operator has to say that these clients execute positions.
    """
    if not dialect.blind or "" not in request.cameras or spec.action_space != "joint_position":
        return
    if config.blind_positions == "refuse":
        raise ObservationError(
            "one exterior camera is what clients send that execute joint velocities, without reading that this policy "
            "gives joint positions",
            field="observation",
            got=f"dialect {dialect.name}, cameras {[c for c in request.cameras if c]}",
            remedy="choose the dialect of a client that executes positions (sim_evals, polaris, ...), or start the "
            "server with blind_positions: send when this client does",
        )


def check_continuity(session: ServedSession, request: InferRequest) -> None:
    """Raises ObservationError when an episode changes its cameras or its seed."""
    if session.cameras is not None and session.cameras != request.cameras:
        raise ObservationError(
            "the cameras are not those of the session's first request",
            field=next(iter(set(session.cameras) - set(request.cameras) - {""}), "observation"),
            got=[c for c in request.cameras if c],
            expected=[c for c in session.cameras if c],
            remedy="an episode keeps its cameras; send reset before changing them",
        )
    if session.steps and request.seed is not None and request.seed != session.seed:
        raise ObservationError(
            "the seed is not that of the session",
            field="seed",
            got=request.seed,
            expected=session.seed,
            remedy="give the seed with the first request, or reset",
        )


def job(dialect: Dialect, session: ServedSession, request: InferRequest) -> Callable[[Policy, AskCancelled], Answered]:
    """For the policy's thread. The session gets its handle there, and only when the first step has succeeded."""

    def work(policy: Policy, cancelled: AskCancelled) -> Answered:
        start_s = time.monotonic()
        handle = session.handle
        _refuse_lost(session)
        if handle is None:
            handle = policy.open(None if session.private else session.key, seed=request.seed)
        try:
            chunk = policy.infer(handle, request.observation, cancelled=cancelled)
            _refuse_lost(session)  # while it ran, if it hung
            # Here, so that rows that may not be sent count as a failure of the policy.
            message = reply(dialect, chunk.actions, policy.spec)
        except BaseException:
            if session.handle is None:
                policy.close(handle)
            raise
        if session.handle is None:
            session.handle, session.seed = handle, request.seed
        return Answered(chunk, message, time.monotonic() - start_s)

    return work


def _refuse_lost(session: ServedSession) -> None:
    if session.lost is not None:
        raise SessionError(f"the session has ended: {session.lost}", remedy="start afresh with a new session")


def with_timings(
    answered: Answered,
    ticket: Ticket[Any],
    *,
    seq: int,
    session_step: int,
    previous_total_ms: float | None,
    extras: bool = False,
) -> dict[str, Any]:
    """The reply map with its timings: numbers only, in the order that clients read them (OpenPI spec 0.12, 1.6); with
    ``extras`` the chunk's fingerprint behind them. ``interrupted_ms`` is there when the robot's step ran inside this
    one, and is in neither ``infer_ms``."""
    chunk = answered.chunk
    assert ticket.started_s is not None
    infer_s = answered.infer_s - ticket.interrupted_s
    server_timing = {"infer_ms": infer_s * 1e3}
    if previous_total_ms is not None:
        server_timing["prev_total_ms"] = previous_total_ms
    server_timing |= {
        "queue_ms": (ticket.started_s - ticket.submitted_s) * 1e3,
        "seq": float(seq),
        "session_step": float(session_step),
        "history_reset": float(chunk.reset is not None),
    }
    if ticket.interrupted_s:
        server_timing["interrupted_ms"] = ticket.interrupted_s * 1e3
    stages = {f"{name}_ms": seconds * 1e3 for name, seconds in chunk.timings_s.items() if name != "total"}
    total_s = chunk.timings_s.get("total", infer_s)
    policy_timing = {"infer_ms": total_s * 1e3} | stages
    told = {"fingerprint": chunk.fingerprint} if extras and chunk.fingerprint else {}
    return dict(answered.message) | {"policy_timing": policy_timing, "server_timing": server_timing} | told
