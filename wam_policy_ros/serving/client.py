"""A policy that runs on another machine: the OpenPI client behind the same four verbs. Needs no torch.

What cannot be trusted over a network is decided here: every call has a deadline, a connection that was left in the
middle of an exchange is dropped, an error text never becomes an action, and no session outlives its connection.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

import numpy as np

from wam_policy_ros.contract.embodiment import get_embodiment
from wam_policy_ros.contract.errors import (
    ConfigError,
    ContractMismatch,
    EngineError,
    InvalidState,
    PolicyUnavailable,
    PromptError,
    RemoteError,
    SessionError,
)
from wam_policy_ros.contract.fakes import spec_of
from wam_policy_ros.contract.history import FrameHistory
from wam_policy_ros.contract.interface import ActionChunk, Observation, PolicySpec, ResetReason

from .client_link import Cancel, Link, LinkConfig, fetch_contract, never
from .client_wire import (
    MAX_TEXT,
    UNNAMED,
    acknowledged,
    infer_request,
    profile,
    read_actions,
    read_greeting,
    reset_request,
    timed_as,
)
from .codec import Codec, CodecError, pack, unpack

Progress = Callable[[str, float], None]

FORGET_S = 3.0
"""How long a session that ends waits for the server's word. Longer: the connection is dropped, which ends it, too."""

MAX_FORGOTTEN = 16


@dataclass(frozen=True)
class ClientConfig:
    """A policy server and what is expected of it.

    Attributes:
        link: address, key, limits.
        embodiment: tag of the robot the server must serve.
        dialect: see ``client_wire.PROFILES``.
        codec: how arrays are written, ``openpi`` or ``msgpack_numpy``; replies are read in either.
        timeout_s: a call that takes longer is given up; a reconnection counts.
        greeting_s: how long a connected server may withhold its greeting, as it does while it loads.
        retry_s: between two attempts to reach a server that is not there yet.
        action_space: for servers that do not announce it: what their documentation says.
        follow_timing: take the horizon and the frame offsets that the server announces, as networks of other timing
            than the published ones have; without, a server that announces others is refused.
    """

    link: LinkConfig
    embodiment: str = "oxe_droid"
    dialect: str = "dreamzero"
    codec: str = "openpi"
    timeout_s: float = 8.0
    greeting_s: float = 10.0
    retry_s: float = 1.0
    action_space: str = ""
    follow_timing: bool = False

    def __post_init__(self) -> None:
        profile(self.dialect)
        if self.codec not in get_args(Codec):
            raise ConfigError("unknown codec", got=repr(self.codec), expected=f"one of {get_args(Codec)}")
        for name in ("timeout_s", "greeting_s", "retry_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} of the policy server must be more than 0 s", got=getattr(self, name))


@dataclass
class RemoteSession:
    """One episode at the server.

    Attributes:
        session_id: its name there.
        link: the connection that carries it; None before the first call.
        lost: the connection is gone, and what the server remembers is not known.
    """

    session_id: str
    owner: object
    history: FrameHistory
    seed: int | None = None
    step: int = 0
    prompt: str = ""
    link: Link | None = None
    lost: bool = False
    closed: bool = False


class RemotePolicy:
    """A connected policy. Not thread-safe, as every policy. Made by ``connect_policy``.

    Attributes:
        spec: the embodiment's, with what the server announced; ``details["uri"]`` says where it is.
    """

    def __init__(self, config: ClientConfig, link: Link, spec: PolicySpec) -> None:
        self._config, self._profile = config, profile(config.dialect)
        self._codec = cast(Codec, config.codec)
        self._link: Link | None = link
        self._forgotten: list[str] = []
        self.spec = spec

    def open(self, session_id: str | None = None, *, seed: int | None = None) -> RemoteSession:
        """``seed`` is sent along; whether it is used is the server's business."""
        return RemoteSession(session_id or uuid.uuid4().hex, self, FrameHistory(self.spec), seed=seed)

    def infer(self, session: Any, observation: Observation, *, cancelled: Cancel | None = None) -> ActionChunk:
        """One call, within ``timeout_s``.

        Raises:
            PolicyUnavailable: no answer in time, or the connection is gone; the session is lost, too.
            RemoteError: the server answered with an error; the session is lost.
            ChunkError: the answer is not a chunk of this policy.
            ContractMismatch: after a reconnection: another policy answers.
            ObservationError, Cancelled, SessionError: as in ``Policy.infer``; a cancelled session is lost.
        """
        self._check(session)
        start_s = time.monotonic()
        deadline_s = start_s + self._config.timeout_s
        history = session.history.copy()
        history.add(observation)
        drawn = history.draw(first_call=session.step == 0)
        _check_state(observation, self.spec)
        request = infer_request(drawn.frames, observation, self.spec, session.session_id)
        message = pack(request if session.seed is None else {**request, "seed": session.seed}, self._codec)
        cancel = cancelled or never
        sent_s = time.monotonic()
        link = self._linked(session, deadline_s, cancel)
        try:
            reply = self._exchange(link, message, deadline_s, cancel)
            rows, rest = read_actions(reply, self.spec, self._profile)
            link.answered(_timing(rest).get("seq"))
        except BaseException:
            # Whatever it was: the server may have taken the observation into its history, or not.
            session.lost = True
            raise
        total_s = time.monotonic() - start_s
        session.history, step, session.step = history, session.step, session.step + 1
        timing = _timing(rest)
        interrupted_s = timing.get("interrupted_ms", 0.0) / 1e3
        total_s -= interrupted_s
        timings = {"total": total_s, "pack": sent_s - start_s}
        if interrupted_s:
            timings["interrupted"] = interrupted_s
        if (server_ms := timing.get("infer_ms")) is not None:
            timings |= {"server": server_ms / 1e3, "wire": total_s - timings["pack"] - server_ms / 1e3}
        reason = _reset_reason(step, observation.prompt != session.prompt, bool(timing.get("history_reset")))
        session.prompt = observation.prompt
        return ActionChunk(
            actions=rows,
            dt_s=self.spec.dt_s,
            stamp_ns=observation.stamp_ns,
            session_id=session.session_id,
            step=step,
            reset=reason,
            timings_s=timings,
            info={**drawn.info, "request_bytes": len(message)},
            fingerprint=self._fingerprint(rest),
        )

    def _fingerprint(self, rest: dict[str, Any]) -> str:
        """As the reply says, or as the server said when it was reached."""
        told, known = rest.get("fingerprint"), self.spec.fingerprint
        return told if isinstance(told, str) else known.id if known else ""

    def reset(self, session: Any) -> None:
        """The server has forgotten the episode when this returns. Raises PolicyUnavailable, RemoteError."""
        self._check_owner(session)
        self._forget(session, self._config.timeout_s)
        session.history, session.step, session.link, session.lost = FrameHistory(self.spec), 0, None, False

    def close(self, session: Any) -> None:
        """Never raises for a server that is gone; it is told at the next occasion."""
        if session.closed:
            return
        session.closed = True
        with suppress(EngineError):
            self._forget(session, min(FORGET_S, self._config.timeout_s))
        session.history = FrameHistory(self.spec)

    def render_video(self, chunk: ActionChunk) -> None:
        return None

    def disconnect(self) -> None:
        """Close the connection. The next call would open another one."""
        if self._link is not None:
            self._link.close(politely=True)
            self._link = None

    def _check_owner(self, session: Any) -> None:
        if not isinstance(session, RemoteSession) or session.owner is not self:
            raise SessionError("session belongs to another policy", got=getattr(session, "session_id", session))
        if session.closed:
            raise SessionError("session is closed", got=session.session_id, remedy="open a new one with policy.open()")

    def _check(self, session: Any) -> None:
        self._check_owner(session)
        self._check_link(session)

    def _check_link(self, session: RemoteSession) -> None:
        """Raises PolicyUnavailable when the connection that carried the session is gone: no other one may go on."""
        link: Link | None = session.link
        if session.lost or (link is not None and not (link is self._link and link.open)):
            session.lost = True
            raise PolicyUnavailable(
                f"the connection to {self._config.link.uri} that carried the session is gone",
                got=session.session_id,
                remedy="reset the session, or open a new one",
            )

    def _linked(self, session: RemoteSession, deadline_s: float, cancel: Cancel) -> Link:
        # Asked again: since the call began the connection may have been found closed.
        self._check_link(session)
        if self._link is None or not self._link.open:
            self.disconnect()
            link, spec = _connect(self._config, deadline_s, cancel)
            self._link = link
            self._expect_same(spec)
            self.spec = replace(self.spec, fingerprint=spec.fingerprint)  # it may have come back with other options
        while self._forgotten:
            self._reset_remote(self._forgotten[0], deadline_s, cancel)
            self._forgotten.pop(0)
        if self._link is None:
            raise PolicyUnavailable(f"the policy server {self._config.link.uri} was left")
        self._check_link(session)
        session.link = self._link
        return self._link

    def _expect_same(self, spec: PolicySpec) -> None:
        """A server that came back with other weights is not the one that was chosen.

        Raises:
            ContractMismatch: it is another one.
            PolicyUnavailable: it does not say, and did before.
        """
        if spec.weights == UNNAMED != self.spec.weights:
            self.disconnect()
            raise PolicyUnavailable(f"the policy server {self._config.link.uri} does not say what it serves")
        for name in ("cameras", "weights", "random_weights", "horizon", "frame_offsets"):
            got, expected = getattr(spec, name), getattr(self.spec, name)
            if got != expected:
                self.disconnect()
                raise ContractMismatch(
                    f"the policy server came back with other {name}",
                    got=got,
                    expected=expected,
                    remedy="configure again to use it as it is now",
                )

    def _forget(self, session: RemoteSession, timeout_s: float) -> None:
        """Tell the server that an episode is over, if it knows of it; at the next occasion if it cannot be told now."""
        if session.link is None:
            return
        if session.lost or session.link is not self._link or not session.link.open:
            self._remember(session.session_id)
            return
        try:
            self._reset_remote(session.session_id, time.monotonic() + timeout_s, never)
        except EngineError:
            self._remember(session.session_id)
            raise

    def _remember(self, session_id: str) -> None:
        self._forgotten = [*(s for s in self._forgotten if s != session_id), session_id][-MAX_FORGOTTEN:]

    def _reset_remote(self, session_id: str, deadline_s: float, cancel: Cancel) -> None:
        assert self._link is not None
        reply = self._exchange(self._link, pack(reset_request(session_id)), deadline_s, cancel, text_is_error=False)
        if not acknowledged(reply, self._profile):
            self.disconnect()
            raise RemoteError("the policy server does not acknowledge a reset", got=str(reply)[:MAX_TEXT])

    def _exchange(
        self, link: Link, message: bytes, deadline_s: float, cancel: Cancel, *, text_is_error: bool = True
    ) -> Any:
        """Send one message, wait for the one reply. The link is closed unless the reply was whole and no error."""
        link.send(message, deadline_s)
        reply = link.receive(deadline_s, cancel)
        if isinstance(reply, str):
            if text_is_error:
                link.close()
                raise _error_of(_first_line(reply))
            return reply
        try:
            return unpack(reply)
        except CodecError as error:
            link.close()
            raise RemoteError("the reply of the policy server cannot be read", got=str(error)) from error


def connect_policy(
    config: ClientConfig, progress: Progress = lambda line, fraction: None, *, wait_s: float | None = None
) -> RemotePolicy:
    """Reach a server and check that it is the right one. Waits for a server that is not there yet or still loads.

    Args:
        config: see there.
        progress: told a line about every attempt; may raise ``Cancelled`` to give up.
        wait_s: give up after so long; None: never.

    Raises:
        PolicyUnavailable: not reached within ``wait_s``.
        ContractMismatch: the server serves something else.
        ConfigError: the address, the key or the path is wrong.
    """
    start_s = time.monotonic()
    attempt, line = 0, f"connecting to the policy server {config.link.uri}"
    while True:
        attempt += 1
        progress(line, 0.0)
        deadline_s = time.monotonic() + config.link.open_timeout_s + config.greeting_s
        try:
            link, spec = _connect(config, deadline_s, _slowly(lambda: progress(line, 0.0)))  # noqa: B023
            return RemotePolicy(config, link, spec)
        except PolicyUnavailable as error:
            waited_s = time.monotonic() - start_s
            if wait_s is not None and waited_s + config.retry_s > wait_s:
                raise
            line = f"waiting for the policy server: {error.what} (attempt {attempt}, {waited_s:.0f} s)"
        until_s = time.monotonic() + config.retry_s
        while time.monotonic() < until_s:
            progress(line, 0.0)
            time.sleep(min(0.1, config.retry_s))


def _connect(config: ClientConfig, deadline_s: float, cancel: Cancel) -> tuple[Link, PolicySpec]:
    link = Link(config.link, deadline_s)
    try:
        greeting = link.receive(min(deadline_s, time.monotonic() + config.greeting_s), cancel)
        if isinstance(greeting, str):
            raise RemoteError("the policy server greets with an error", got=_first_line(greeting))
        expected = spec_of(get_embodiment(config.embodiment), weights="")
        try:
            said = unpack(greeting)
        except CodecError as error:
            raise RemoteError("the greeting of the policy server cannot be read", got=str(error)) from error
        if isinstance(said, dict) and "contract" not in said:
            said = {**said, "contract": fetch_contract(config.link)}
        if config.follow_timing:
            expected = timed_as(said, expected)
        spec = read_greeting(said, expected, action_space=config.action_space)
    except BaseException:
        link.close()
        raise
    details = {**spec.details, "uri": config.link.uri, "dialect": config.dialect}
    return link, PolicySpec(**{**spec.__dict__, "details": details})


def _reset_reason(step: int, new_prompt: bool, told: bool) -> ResetReason | None:
    """Why the server started from an empty window; only some servers tell that they did."""
    if step == 0:
        return ResetReason.FIRST_CALL
    if not told:
        return None
    return ResetReason.PROMPT_CHANGED if new_prompt else ResetReason.WINDOW_FULL


def _slowly(ask: Callable[[], None], period_s: float = 0.2) -> Cancel:
    """``ask``, which raises to cancel, as something that is polled often."""
    last_s = time.monotonic()

    def poll() -> bool:
        nonlocal last_s
        if time.monotonic() - last_s >= period_s:
            last_s = time.monotonic()
            ask()
        return False

    return poll


def _check_state(observation: Observation, spec: PolicySpec) -> None:
    for f in spec.state:
        value = observation.state.get(f.name)
        if not isinstance(value, np.ndarray) or value.shape != (f.dim,) or not np.isfinite(value).all():
            got = "nothing" if value is None else f"{np.asarray(value).tolist()}"
            raise InvalidState(
                f"state field {f.name!r} cannot be sent", field=f.name, got=got, expected=f"[{f.dim}] finite, {f.unit}"
            )


# A server of this package says first what kind of error it is.
_PASSES = ("Cancelled", "DeadlineExceeded", "NotReady", "Overloaded", "PolicyUnavailable", "ReplicaDied", "Superseded")


def _error_of(line: str) -> EngineError | PromptError:
    """The error of a text frame. What a later attempt may cure is PolicyUnavailable, what an operator's next words may
    cure is PromptError, everything else RemoteError."""
    kind, _, text = line.partition(": ")
    if kind in _PASSES:
        return PolicyUnavailable(f"the policy server cannot answer now: {text.split('; ')[0]}", got=line)
    if kind == "PromptError":
        return PromptError("the policy server refuses the instruction", field="prompt", got=text)
    return RemoteError("the policy server answers with an error", got=line)


def _first_line(text: str) -> str:
    """The sentence of an error text: some servers send a traceback, whose last line says what happened."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    if not lines:
        return "an empty text"
    return (lines[-1] if lines[0].startswith("Traceback") else lines[0]).strip()[:MAX_TEXT]


def _timing(rest: dict[str, Any]) -> dict[str, float]:
    given = rest.get("server_timing")
    items = given.items() if isinstance(given, dict) else ()
    return {str(k): float(v) for k, v in items if isinstance(v, int | float)}
