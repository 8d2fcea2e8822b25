"""State and actions between the robot's units and the network's vectors, encode beside decode.

The order of the fields is the order given, i.e. that of the checkpoint's concatenation (DreamZero spec 1.3 and 1.7).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import ChunkError, ConfigError, InvalidState, MissingInput
from .interface import FieldSpec
from .normalization import FieldStatistics, Statistics


def encode_state(
    state: Mapping[str, npt.NDArray[Any]],
    fields: Sequence[FieldSpec],
    statistics: Statistics,
    max_state_dim: int = 64,
) -> npt.NDArray[np.float64]:
    """Normalise and concatenate the state, then pad with zeros at the end (DreamZero spec 1.3).

    The padding comes after normalisation: a padded entry is 0 for the network whatever the statistics.

    Args:
        state: field name -> ``[dim]`` in the units of the field.
        fields: which, in which order.
        max_state_dim: width of the network's state input.

    Returns:
        float64 ``[max_state_dim]``; real entries in [-1, 1].

    Raises:
        MissingInput: a field is absent.
        InvalidState: a field has a wrong length or is not finite.
        ConfigError: the fields are wider than the network's input.
    """
    total = sum(f.dim for f in fields)
    if total > max_state_dim:
        raise ConfigError("the state is wider than the network's input", got=total, expected=f"<= {max_state_dim}")
    out = np.zeros(max_state_dim, dtype=np.float64)
    at = 0
    for f in fields:
        out[at : at + f.dim] = _field(statistics.state, f, "state").forward(raw_state(state, f))
        at += f.dim
    return out


def raw_state(state: Mapping[str, npt.NDArray[Any]], field: FieldSpec) -> npt.NDArray[np.float64]:
    """One field of the state, checked: float64 ``[dim]``. Raises as ``encode_state`` does."""
    if not isinstance(state, Mapping):
        raise InvalidState(
            "the state is not a mapping",
            field=field.name,
            got=type(state).__name__,
            expected="field name -> numbers",
        )
    if field.name not in state:
        raise MissingInput(
            f"state field {field.name!r} is missing",
            field=field.name,
            got=f"fields {sorted(map(str, state))}",
            expected=f"{field.dim} numbers in {field.unit}",
            remedy="wait until every joint has been received; a state is never assumed",
        )
    value = np.asarray(state[field.name])
    expected = f"{field.dim} finite numbers in {field.unit}"
    if value.dtype.kind not in "fiu":
        raise InvalidState(
            f"state field {field.name!r} is not numeric", field=field.name, got=value.dtype, expected=expected
        )
    if value.shape != (field.dim,):
        raise InvalidState(
            f"state field {field.name!r} has the wrong length",
            field=field.name,
            got=f"shape {value.shape}",
            expected=expected,
        )
    value = value.astype(np.float64)
    if not np.isfinite(value).all():
        raise InvalidState(
            f"state field {field.name!r} is not finite", field=field.name, got=value.tolist(), expected=expected
        )
    return value


def decode_actions(
    normalised: npt.NDArray[np.float32],
    fields: Sequence[FieldSpec],
    statistics: Statistics,
    state: Mapping[str, npt.NDArray[Any]],
) -> npt.NDArray[np.float64]:
    """The network's output to absolute targets (DreamZero spec 1.7).

    The inverse normalisation is computed in float32 and not clamped. A relative field is added to the raw float64
    state of the same name, the same for every row: all rows are relative to the moment of the call. Values that are
    not finite stay so and are for the safety gate to refuse.

    Args:
        normalised: float32 ``[N, D]``, D >= the sum of the fields' dims; further columns are padding.
        fields: of the action, in order.
        state: field name -> ``[dim]``; only the relative fields are read.

    Returns:
        float64 ``[N, sum of dims]`` in the units of the fields.

    Raises:
        ChunkError: wrong rank or too few columns.
        MissingInput, InvalidState: the state of a relative field, as in ``encode_state``.
    """
    total = sum(f.dim for f in fields)
    if normalised.ndim != 2 or normalised.shape[1] < total:
        raise ChunkError("the network's action has the wrong shape", got=normalised.shape, expected=f"[N, >= {total}]")
    n = np.asarray(normalised, dtype=np.float32)
    out = np.empty((len(n), total), dtype=np.float64)
    at = 0
    for f in fields:
        value = _field(statistics.action, f, "action").inverse(n[:, at : at + f.dim]).astype(np.float64)
        out[:, at : at + f.dim] = value + raw_state(state, f) if f.relative else value
        at += f.dim
    return out


def encode_actions(
    actions: npt.NDArray[np.float64],
    fields: Sequence[FieldSpec],
    statistics: Statistics,
    state: Mapping[str, npt.NDArray[Any]],
    max_action_dim: int = 32,
) -> npt.NDArray[np.float32]:
    """The inverse of ``decode_actions``; not clamped, padded with zeros to ``max_action_dim`` columns.

    Where q01 == q99 the value passes through, and decodes to q01 whatever it was: nothing is learnt about it.

    Args:
        actions: float64 ``[N, sum of dims]``.

    Returns:
        float32 ``[N, max_action_dim]``.

    Raises:
        ChunkError: wrong shape, or wider than ``max_action_dim``.
        MissingInput, InvalidState: as in ``decode_actions``.
    """
    total = sum(f.dim for f in fields)
    if actions.ndim != 2 or actions.shape[1] != total or total > max_action_dim:
        raise ChunkError(
            "actions have the wrong shape", got=actions.shape, expected=f"[N, {total} <= {max_action_dim}]"
        )
    out = np.zeros((len(actions), max_action_dim), dtype=np.float32)
    at = 0
    for f in fields:
        value = np.asarray(actions[:, at : at + f.dim], dtype=np.float64)
        value = value - raw_state(state, f) if f.relative else value
        columns = value.astype(np.float32)
        out[:, at : at + f.dim] = _field(statistics.action, f, "action").forward(columns, clamp=False)
        at += f.dim
    return out


def _field(group: Mapping[str, FieldStatistics], field: FieldSpec, kind: str) -> FieldStatistics:
    if field.name not in group:
        raise ConfigError(
            f"no statistics for {kind} field {field.name!r}", got=sorted(group), remedy="read them for these fields"
        )
    return group[field.name]
