"""Errors of the model room. The engine translates them into ``contract.errors`` at its door."""

from __future__ import annotations

from collections.abc import Sequence


class ModelError(Exception):
    """Base: the network or its files are not as described."""


class ShapeError(ModelError, ValueError):
    """A tensor handed to the network has the wrong shape; the message says which, got and expected."""


class ModelConfigError(ModelError):
    """A configuration value is missing, unknown or inconsistent."""


class CheckpointFileError(ModelError):
    """A checkpoint folder is incomplete or does not fit the network. ``problems`` names every fault found."""

    def __init__(self, what: str, problems: Sequence[str] = (), remedy: str | None = None) -> None:
        self.what, self.problems, self.remedy = what, tuple(problems), remedy
        tail = f"\nremedy: {remedy}" if remedy else ""
        super().__init__(what + "".join(f"\n  - {p}" for p in self.problems) + tail)


class TokenizerFileError(CheckpointFileError):
    """No tokenizer files were found, or they cannot be read."""
