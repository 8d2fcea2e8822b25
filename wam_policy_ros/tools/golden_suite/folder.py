"""A folder of recordings and the table of comparisons."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

COMPONENT_LIMIT = 5e-5  # float32
CLOSED_LOOP_LIMIT = 2e-4  # float32, end to end
BF16_COMPONENT_LIMIT = 0.08
BF16_CLOSED_LOOP_LIMIT = 0.2
BF16_CORRELATION = 0.999


# Recorded tensors that are deliberately not compared: file pattern, tensor pattern, why.
SKIPPED = (
    (r"e2e_inputs\..*", r".*", "inputs; a folder may hold more calls than its recordings"),
    (
        r"data\..*",
        r"convert_action\.out_no_joint",
        "zeros instead of a missing joint action: refused here",
    ),
    (r".*", r"(.*\.)?in\..*|.*\.noise_\w+", "inputs"),
)


class Recording(dict[str, Tensor]):
    """Tensors of one file, floating ones as float32, and the decoded metadata. Remembers which were looked at."""

    metadata: dict[str, Any]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.used: set[str] = set()

    def __getitem__(self, key: str) -> Tensor:
        self.used.add(key)
        return super().__getitem__(key)

    def weights(self, prefix: str = "") -> dict[str, Tensor]:
        """The tensors under ``prefix`` with the prefix removed: a state dict."""
        return {k.removeprefix(prefix): self[k] for k in self if k.startswith(prefix)}


@dataclass(frozen=True)
class Row:
    """One line of the table: ``worst`` is max|a - b| / std(b) over all tensors of the group, or a count of faults."""

    file: str
    what: str
    tensors: int
    worst: float
    limit: float
    note: str = ""

    @property
    def ok(self) -> bool:
        # "not (worst > limit)" would pass NaN.
        return self.worst <= self.limit and self.tensors > 0


class GoldenFolder:
    """Reads files of a folder laid out like the recordings."""

    def __init__(self, path: Path, device: str = "cpu") -> None:
        self.path, self.device = path, device
        self.used: set[str] = set()
        self._recordings: list[tuple[str, Recording]] = []

    def has(self, *names: str) -> bool:
        return all((self.path / n).is_file() for n in names)

    def read(self, name: str, *, on_cpu: bool = False) -> Recording:
        """Tensors on the folder's device, or on the CPU where the compared code is numpy.

        Raises:
            SafetensorError, OSError: unreadable file.
        """
        self.used.add(name)
        with safe_open(self.path / name, "pt", device="cpu" if on_cpu else self.device) as f:
            out = Recording({k: f.get_tensor(k) for k in f.keys()})  # noqa: SIM118
            out.metadata = {k: _json(v) for k, v in (f.metadata() or {}).items()}
        for k, v in out.items():
            if v.dtype in (torch.bfloat16, torch.float16):  # weights may be stored losslessly in a narrow type
                out[k] = v.float()
        self._recordings.append((name, out))
        return out

    def json(self, name: str) -> Any:
        self.used.add(name)
        return json.loads((self.path / name).read_text(encoding="utf-8"))

    def unused(self) -> list[str]:
        """Files that no comparison read."""
        names = {p.relative_to(self.path).as_posix() for p in self.path.rglob("*") if p.is_file()}
        return sorted(n for n in names - self.used if n.startswith("msgpack/") or not _is_prose(n))

    def uncompared(self) -> dict[str, list[str]]:
        """File -> recorded tensors that no comparison looked at, without the deliberate skips."""
        keys: dict[str, set[str]] = {}
        used: dict[str, set[str]] = {}
        for name, recording in self._recordings:
            keys.setdefault(name, set()).update(recording)
            used.setdefault(name, set()).update(recording.used)
        left = {n: sorted(k for k in keys[n] - used[n] if not _is_skipped(n, k)) for n in keys}
        return {n: k for n, k in left.items() if k}


def _is_prose(name: str) -> bool:
    base = name.rsplit("/", 1)[-1].lower()
    return base.startswith((".", "readme", "license", "sha256", "md5")) or base.endswith((".md", ".txt"))


def _is_skipped(file: str, tensor: str) -> bool:
    return any(re.fullmatch(f, file) and re.fullmatch(t, tensor) for f, t, _ in SKIPPED)


def difference(a: Tensor, b: Tensor) -> float:
    """max|a - b| / std(b) in float64; inf for another shape or values that are not finite; exact match is 0."""
    if a.shape != b.shape or not torch.isfinite(a.double()).all():
        return float("inf")
    a, b = a.double().cpu(), b.double().cpu()
    if torch.equal(a, b):
        return 0.0
    spread = b.std() if b.numel() > 1 else b.abs().max()
    return float((a - b).abs().max() / spread.clamp_min(1e-12))


def correlation(a: Tensor, b: Tensor) -> float:
    """Pearson correlation over all values."""
    return float(torch.corrcoef(torch.stack([a.double().flatten().cpu(), b.double().flatten().cpu()]))[0, 1])


class Group:
    """Collects comparisons that make one row."""

    def __init__(self, file: str, what: str, limit: float, *, min_correlation: float | None = None) -> None:
        self.file, self.what, self.limit, self.min_correlation = file, what, limit, min_correlation
        self.count, self.worst, self.where = 0, 0.0, ""

    def compare(self, name: str, got: Tensor, expected: Tensor) -> None:
        error = difference(got, expected)
        if self.min_correlation is not None and error < float("inf"):
            r = correlation(got, expected)
            if not r > self.min_correlation:
                name, error = f"{name}: correlation {r:.5f}, max|a-b|/std {error:.2g}", float("inf")
        self._add(name, error)

    def check(self, got: Tensor, recording: Recording, key: str) -> None:
        """Compare with ``recording[key]`` if it is recorded."""
        if key in recording:
            self.compare(key, got, recording[key])

    def exact(self, name: str, got: object, expected: object) -> None:
        """For integers, strings, bytes: a difference counts as one fault."""
        self._add(name, 0.0 if got == expected else float("inf"))

    def fail(self, name: str, reason: str) -> None:
        self._add(f"{name} ({reason})", float("inf"))

    def _add(self, name: str, error: float) -> None:
        self.count += 1
        if error != error:  # NaN
            error = float("inf")
        if error > self.worst or not self.where:
            self.worst, self.where = max(error, self.worst), name

    def row(self) -> Row:
        return Row(self.file, self.what, self.count, self.worst, self.limit, self.where)


def _json(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value
