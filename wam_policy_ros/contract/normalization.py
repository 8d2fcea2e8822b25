"""Normalisation statistics of a checkpoint, and the arithmetic between raw units and the network's [-1, 1].

The statistics come from the ``statistics`` block of one embodiment in ``metadata.json`` (DreamZero spec 6.4). There is
no default and no identity fallback: what is missing raises, and the message lists every fault found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .embodiment import get_embodiment
from .errors import StatisticsError
from .interface import FieldSpec

Mode = Literal["q99", "min_max", "mean_std", "scale", "binary"]
NAMES = ("q01", "q99", "min", "max", "mean", "std")
NEEDED: Mapping[Mode, tuple[str, ...]] = {
    "q99": ("q01", "q99"),
    "min_max": ("min", "max"),
    "mean_std": ("mean", "std"),
    "scale": ("min", "max"),
    "binary": (),
}
_REMEDY = "use the metadata.json that belongs to this checkpoint; statistics are never assumed"

Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class FieldStatistics:
    """Statistics of one field.

    Attributes:
        name: where they come from, e.g. ``action.joint_position``.
        q01, q99, min, max, mean, std: float64 ``[dim]``, or ``[horizon, dim]`` with one row per step of a chunk
            ("per horizon"); None where the file does not say.
    """

    name: str
    q01: npt.NDArray[np.float64] | None = None
    q99: npt.NDArray[np.float64] | None = None
    min: npt.NDArray[np.float64] | None = None
    max: npt.NDArray[np.float64] | None = None
    mean: npt.NDArray[np.float64] | None = None
    std: npt.NDArray[np.float64] | None = None

    @property
    def per_horizon(self) -> bool:
        """True when q01 has one row per step of a chunk."""
        return self.q01 is not None and self.q01.ndim == 2

    def forward(self, x: Floats, mode: Mode = "q99", *, clamp: bool = True) -> Floats:
        """Raw to normalised (DreamZero spec 1.3), computed in the dtype of ``x``; statistics are cast to it first.

        ``q99`` and ``min_max`` give ``2 (x - lo) / (hi - lo) - 1``, pass ``x`` through where lo == hi, then clamp to
        [-1, 1]. ``mean_std`` and ``scale`` divide, and pass ``x`` through where the divisor is 0. ``binary`` is
        ``x > 0.5``.

        Args:
            x: floats ``[..., dim]``; ``[N, dim]`` with N <= horizon for per-horizon statistics (row t, step t).
            clamp: False keeps values outside [lo, hi] (``q99`` and ``min_max``), which makes the pair invertible.

        Raises:
            StatisticsError: the mode needs a statistic that is absent, or the shapes do not fit.
        """
        if mode == "binary":
            return (x > 0.5).astype(x.dtype)
        if mode in ("q99", "min_max"):
            lo, hi = self._cast(mode, x)
            n = np.where(lo != hi, 2 * (x - lo) / _nonzero(hi - lo) - 1, x)
            return np.clip(n, -1, 1) if clamp else n
        if mode == "mean_std":
            mean, std = self._cast(mode, x)
            return np.where(std != 0, (x - mean) / _nonzero(std), x)
        largest = np.maximum(*(np.abs(a) for a in self._cast(mode, x)))
        return x / _nonzero(largest)

    def inverse(self, n: Floats, mode: Mode = "q99") -> Floats:
        """Normalised to raw (DreamZero spec 1.7), computed in the dtype of ``n``; statistics are cast to it first.

        ``q99`` and ``min_max`` give ``(n + 1) / 2 (hi - lo) + lo`` and do not clamp, so lo == hi decodes to lo. A
        value that is not finite stays so. Arguments and errors as in ``forward``.
        """
        if mode == "binary":
            return (n > 0.5).astype(n.dtype)
        if mode in ("q99", "min_max"):
            lo, hi = self._cast(mode, n)
            return (n + 1) / 2 * (hi - lo) + lo
        if mode == "mean_std":
            mean, std = self._cast(mode, n)
            return np.where(std != 0, n * std + mean, n)
        largest = np.maximum(*(np.abs(a) for a in self._cast(mode, n)))
        return n * _nonzero(largest)

    def _cast(self, mode: Mode, x: Floats) -> tuple[Floats, ...]:
        out = []
        for key in NEEDED[mode]:
            value = getattr(self, key)
            if value is None:
                raise StatisticsError(f"statistics of {self.name!r} have no {key!r}", remedy=_REMEDY)
            if value.ndim == 2:
                if x.ndim != 2 or len(x) > len(value):
                    raise StatisticsError(
                        f"{self.name!r} has statistics per step of the chunk",
                        got=f"values of shape {x.shape}",
                        expected=f"[N <= {value.shape[0]}, {value.shape[1]}]",
                    )
                value = value[: len(x)]
            if x.shape[-1:] != value.shape[-1:]:
                raise StatisticsError(
                    f"values do not fit the statistics of {self.name!r}", got=x.shape, expected=f"[..., {value.shape}]"
                )
            out.append(value.astype(x.dtype))
        return tuple(out)


def _nonzero(x: Floats) -> Floats:
    """``x`` with zeros replaced by one, so that the branch not taken divides silently."""
    return np.where(x == 0, x.dtype.type(1), x)


@dataclass(frozen=True)
class Statistics:
    """Statistics of every field a policy uses, by field name.

    A relative action field's statistics are those of (action - state at the start of the chunk), as stored.
    """

    tag: str
    state: Mapping[str, FieldStatistics]
    action: Mapping[str, FieldStatistics]

    @classmethod
    def from_metadata(
        cls,
        metadata: Mapping[str, Any],
        tag: str,
        *,
        state: Sequence[FieldSpec] | None = None,
        action: Sequence[FieldSpec] | None = None,
        mode: Mode = "q99",
    ) -> Statistics:
        """Read one embodiment's entry of a parsed ``metadata.json``.

        Args:
            metadata: the whole file, embodiment tag -> entry.
            tag: which entry.
            state, action: the fields that must be there; default: those of the embodiment page of ``tag``. Other
                fields in the file are not read.
            mode: the statistics this mode needs must be there; the others are taken when present.

        Raises:
            StatisticsError: the tag is absent (the message lists the tags present), or fields or statistics are
                missing, have a wrong shape or are not finite; ``problems`` lists every fault.
            ConfigError: no fields given and no embodiment page for ``tag``.
        """
        entry = metadata.get(tag) if isinstance(metadata, Mapping) else None
        if not isinstance(entry, Mapping):
            present = sorted(map(str, metadata)) if isinstance(metadata, Mapping) else type(metadata).__name__
            raise StatisticsError(
                f"metadata.json has no statistics for embodiment {tag!r}",
                got=f"embodiments {present}",
                expected=repr(tag),
                remedy=f"choose one of the embodiments the checkpoint was trained on; {_REMEDY}",
            )
        if state is None or action is None:
            page = get_embodiment(tag)
            state, action = (page.state if state is None else state), (page.action if action is None else action)
        problems: list[str] = []
        block = entry.get("statistics")
        parsed = {
            group: _parse_group(block, group, fields, NEEDED[mode], problems)
            for group, fields in (("state", state), ("action", action))
        }
        if problems:
            raise StatisticsError(
                f"normalisation statistics of embodiment {tag!r} are unusable", problems=problems, remedy=_REMEDY
            )
        return cls(tag, parsed["state"], parsed["action"])


def _parse_group(
    block: Any, group: str, fields: Sequence[FieldSpec], needed: Sequence[str], problems: list[str]
) -> dict[str, FieldStatistics]:
    entries = block.get(group) if isinstance(block, Mapping) else None
    if not isinstance(entries, Mapping):
        if fields:
            problems.append(f"no statistics.{group} block (needed: {[f.name for f in fields]})")
        return {}
    out = {}
    for f in fields:
        name, raw = f"{group}.{f.name}", entries.get(f.name)
        if not isinstance(raw, Mapping):
            problems.append(f"{name} is absent; present: {sorted(map(str, entries))}")
            continue
        problems.extend(f"{name} has no {k!r}" for k in needed if raw.get(k) is None)
        values = {k: _parse_array(f"{name}.{k}", raw[k], f.dim, problems) for k in NAMES if raw.get(k) is not None}
        good = {k: v for k, v in values.items() if v is not None}
        shapes = {k: good[k].shape for k in needed if k in good}
        if len(set(shapes.values())) > 1:
            problems.append(f"{name}: shapes differ: {shapes}")
        if "q01" in good and "q99" in good and good["q01"].shape == good["q99"].shape:
            crossed = np.argwhere(good["q01"] > good["q99"])
            if len(crossed):
                problems.append(f"{name}: q01 exceeds q99 at {crossed[:4].tolist()}, which would turn the sign around")
        if group == "state" and any(len(s) == 2 for s in shapes.values()):
            problems.append(f"{name}: one row per step makes sense for actions only")
        out[f.name] = FieldStatistics(name, **good)
    return out


def _parse_array(name: str, raw: Any, dim: int, problems: list[str]) -> npt.NDArray[np.float64] | None:
    try:
        value = np.array(raw)
        if value.dtype.kind not in "fiu":  # text and booleans would convert silently
            raise TypeError
        value = value.astype(np.float64)
    except (TypeError, ValueError):
        problems.append(f"{name} is not an array of numbers")
        return None
    if value.ndim not in (1, 2) or value.shape[-1] != dim or 0 in value.shape:
        problems.append(f"{name} has shape {value.shape}, expected [{dim}] or [horizon, {dim}]")
        return None
    if not np.isfinite(value).all():
        problems.append(f"{name} is not finite")
        return None
    value.setflags(write=False)
    return value
