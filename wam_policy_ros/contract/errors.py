"""Every error that crosses a door between rooms.

An error says *what* went wrong, what was *got*, what was *expected* and the *remedy*. It never carries data that
could be taken for an action.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class WamError(Exception):
    """Base of all errors of this package.

    Args:
        what: one sentence, names the thing that is wrong.
        got: the offending value, as found.
        expected: what would have been accepted; alternatives are listed when a look-up by name failed.
        remedy: what a person can do now.
    """

    def __init__(self, what: str, *, got: object = None, expected: object = None, remedy: str | None = None) -> None:
        self.what, self.got, self.expected, self.remedy = what, got, expected, remedy
        parts = [what]
        if got is not None:
            parts.append(f"got: {got}")
        if expected is not None:
            parts.append(f"expected: {expected}")
        if remedy is not None:
            parts.append(f"remedy: {remedy}")
        super().__init__("; ".join(parts))

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process: the subclasses' own arguments are in the attributes."""
        return _again, (type(self), self.args), self.__dict__


class ConfigError(WamError):
    """A parameter, option or configuration file is wrong; nothing was started."""


class MissingDependency(ConfigError):
    """An optional dependency is not installed; the message names the extra, or says what else to do."""

    def __init__(self, package: str, extra: str, purpose: str, *, remedy: str | None = None) -> None:
        super().__init__(
            f"{purpose} needs the Python package {package!r}, which is not installed",
            remedy=remedy or f"pip install 'wam_policy_ros[{extra}]'",
        )
        self.package, self.extra = package, extra


class CheckpointError(WamError):
    """A checkpoint folder cannot be used. ``problems`` lists every fault found, not only the first."""

    def __init__(
        self,
        what: str,
        *,
        problems: Sequence[str] = (),
        got: object = None,
        expected: object = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(what, got=got, expected=expected, remedy=remedy)
        self.problems = tuple(problems)

    SHOWN = 40

    def __str__(self) -> str:
        shown = "".join(f"\n  - {p}" for p in self.problems[: self.SHOWN])
        more = len(self.problems) - self.SHOWN
        return super().__str__() + shown + (f"\n  ... and {more} more" if more > 0 else "")

    def lines(self) -> list[str]:
        """One line per fault, for a list that gathers several errors."""
        return list(self.problems) or [super().__str__()]


class StatisticsError(CheckpointError):
    """Normalisation statistics are absent or do not fit the embodiment. There is no identity fallback."""


class TokenizerError(CheckpointError):
    """No usable tokenizer was found, or its ids do not fit the text encoder."""


class ObservationError(WamError):
    """An observation cannot be used. ``field`` names the stream or key."""

    def __init__(
        self, what: str, *, field: str, got: object = None, expected: object = None, remedy: str | None = None
    ) -> None:
        self.field = field
        super().__init__(what, got=got, expected=expected, remedy=remedy)


class MissingInput(ObservationError):
    """A camera or joint has never been received."""


class StaleInput(ObservationError):
    """A camera or joint was received, but too long ago (or is dated in the future beyond the tolerance)."""


class InvalidImage(ObservationError):
    """A camera message cannot be decoded, or has a shape or dtype that is not accepted."""


class InvalidState(ObservationError):
    """A joint state is not finite, or has the wrong length."""


class PromptError(ObservationError):
    """The instruction is missing, empty where it may not be, or too long."""


class ChunkError(WamError):
    """An action chunk may not reach the robot."""


class UnsafeChunk(ChunkError):
    """The safety gate refused a chunk; nothing of it was published."""


class LimitViolation(UnsafeChunk):
    """A chunk would break a limit of position, speed or acceleration, or begins with a jump.

    Args:
        kind: ``first step``, ``position``, ``speed`` or ``acceleration``.
        far: so far outside that it is no matter of degree: wrong units, a wrong joint.
    """

    def __init__(
        self,
        what: str,
        *,
        kind: str,
        far: bool = False,
        got: object = None,
        expected: object = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(what, got=got, expected=expected, remedy=remedy)
        self.kind, self.far = kind, far


class LateChunk(ChunkError):
    """All rows of a chunk, or all but too few, lie in the past."""


class SessionError(WamError):
    """A session is unknown, closed, or belongs to another policy."""


class SessionBusy(SessionError):
    """Something is still under way in this session. Nothing was changed."""


class EngineError(WamError):
    """The engine failed during a step."""


class NotDeterministic(EngineError):
    """An operation has no deterministic form here, so the deterministic tier does not run it. ``op`` names it."""

    def __init__(self, op: str, why: str) -> None:
        super().__init__(
            f"the operation {op} is not deterministic: it {why}",
            remedy="set deterministic: false, or choose engine options that do without it",
        )
        self.op = op


class NotReady(EngineError):
    """The policy is still loading or warming up."""


class Cancelled(EngineError):
    """The step was cancelled between two network evaluations; the session is as it was before the call."""


class DeadlineExceeded(Cancelled):
    """The caller's deadline passed before the step ended; the session is as it was before the call."""


class Superseded(Cancelled):
    """A newer observation of the same caller took this one's place before its step began."""


class Overloaded(WamError):
    """Something is full: the queue, the sessions or the memory. Nothing was changed; trying again later may work."""


class PolicyUnavailable(EngineError):
    """A remote policy cannot be reached, went away or did not answer in time. It may come back by itself; no session
    outlives it: go on with a new one."""


class PolicyLost(EngineError):
    """A part of the policy died or does not answer, so that it can answer no call again, whoever asks. It does not come
    back by itself: load it again. Sessions are lost with it."""


class ReplicaDied(PolicyUnavailable):
    """The process of one replica of the policy ended, or was ended because it hung. Its sessions are lost, those of the
    other replicas are not."""


class RemoteError(EngineError):
    """A policy server answered with an error instead of an action."""


class ContractMismatch(ConfigError):
    """A policy server is not the one that was asked for: embodiment, cameras, action space, horizon or rate."""


def _again(kind: type[WamError], args: tuple[Any, ...]) -> WamError:
    error = kind.__new__(kind)
    error.args = args
    return error


def bare(error: WamError) -> WamError:
    """Only the text of an error. One that lives on in results and states would otherwise keep the frames of the failed
    step alive through its traceback: activations and key/value windows, in a cycle that only the collector ends."""
    if error.__cause__ is not None:
        error.add_note(f"caused by {type(error.__cause__).__name__}: {error.__cause__}")
    for name in ("got", "expected"):
        value = getattr(error, name)
        setattr(error, name, None if value is None else str(value))
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
