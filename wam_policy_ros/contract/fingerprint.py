"""What an action depends on besides seed and observation: one short name for it, and the whole list."""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wam_policy_ros import __version__

from .errors import ConfigError

PREFIX = "wam1-"
DIGITS = 16


@dataclass(frozen=True)
class Fingerprint:
    """Two policies with the same fingerprint in the deterministic tier give the same bits for the same inputs.

    Attributes:
        parts: section (``weights``, ``code``, ``config``, ``inputs``, ``device``, ``libraries``) -> name -> value, as
            JSON has them.
    """

    parts: Mapping[str, Any]

    @functools.cached_property
    def id(self) -> str:
        """The name: it changes with any value of any section."""
        text = json.dumps(self.parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return PREFIX + hashlib.sha256(text.encode()).hexdigest()[:DIGITS]

    @classmethod
    def of(cls, **sections: Mapping[str, Any]) -> Fingerprint:
        """Values are brought to what JSON has: tuples are lists, everything unknown its text."""
        return cls(json.loads(json.dumps(sections, default=str)))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Fingerprint:
        """From ``as_dict``.

        Raises:
            ConfigError: the id is not that of the parts.
        """
        parts = {k: v for k, v in raw.items() if k != "id"}
        found = cls.of(**parts)
        if raw.get("id", found.id) != found.id:
            raise ConfigError("a fingerprint that was changed", got=raw["id"], expected=found.id)
        return found

    def as_dict(self) -> dict[str, Any]:
        """``id`` and all sections; JSON-serialisable."""
        return {"id": self.id, **self.parts}

    def differences(self, other: Fingerprint) -> list[str]:
        """One line per value that is another one in ``other``: ``device.name: this, that``."""
        mine, theirs = dict(_leaves(self.parts)), dict(_leaves(other.parts))
        names = [*mine, *(n for n in theirs if n not in mine)]
        return [f"{n}: {mine.get(n)}, {theirs.get(n)}" for n in names if mine.get(n) != theirs.get(n)]


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else key)
    else:
        yield name, value


@functools.cache
def code() -> dict[str, str | None]:
    """The code that runs: ``version``, ``source`` (SHA-256 of every Python file of the package), and ``commit`` for
    people, with ``+`` when the tree has local changes; None outside a git checkout."""
    root = Path(__file__).resolve().parents[1]
    return {"version": __version__, "source": source_hash(root), "commit": commit(root.parent)}


def source_hash(root: Path) -> str:
    """Of the names and contents of all Python files below a folder."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]


def commit(tree: Path) -> str | None:
    """Commit of a git checkout, ``+`` appended when it has local changes; None when it is none."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=tree, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        if not (tree / ".git").exists():  # a checkout of somebody else around an installation is not ours
            return None
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
