"""Text to token ids: the cleaning the published model was trained with, then umT5's vocabulary (DreamZero spec 1.4).

A tokenizer is anything called with a list of texts that returns ``(ids, mask)``, both int64 ``[B, L]``: ids end with
the end token and are padded with 0, the mask is 1 on real tokens, the end token included.
"""

from __future__ import annotations

import html
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import ftfy
import torch
from torch import Tensor

from .errors import ModelConfigError, ModelError, TokenizerFileError

PAD_ID = 0
EOS_ID = 1
SUBFOLDERS = ("umt5-xxl", "google/umt5-xxl", "tokenizer")
_FAST, _SLOW = "tokenizer.json", "spiece.model"


class PromptTooLong(ModelError, ValueError):
    """A text has more tokens than the text encoder takes. It is not cut: the robot would obey half a sentence."""


class TokenIdError(ModelError, ValueError):
    """A token id lies outside the text encoder's vocabulary: tokenizer and checkpoint do not belong together."""


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    max_length: int

    def __call__(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        """(ids int64 ``[B, L]``, mask int64 ``[B, L]``); raises PromptTooLong."""
        ...


def clean_text(text: str) -> str:
    """Repair mis-decoded Unicode, unescape HTML entities twice, collapse runs of whitespace, strip."""
    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return re.sub(r"\s+", " ", text.strip()).strip()


def check_token_ids(ids: Tensor, vocab_size: int) -> None:
    """Raise TokenIdError unless all ``ids`` are in [0, vocab_size)."""
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise TokenIdError(
            f"token ids from {low} to {high} do not fit a text encoder of {vocab_size} rows; "
            "use the tokenizer that belongs to the checkpoint"
        )


class _Padded(ABC):
    """Cleaning, the end token, the length limit and padding, shared by every vocabulary.

    Args:
        max_length: L; every text becomes exactly this long.
        truncate: cut longer texts as the published code does, instead of raising PromptTooLong.
        vocab_size: rows of the text encoder's embedding; ids beyond raise TokenIdError. None: not checked.
    """

    def __init__(self, max_length: int, truncate: bool, vocab_size: int | None) -> None:
        if max_length < 1:
            raise ModelConfigError(f"max_length must be at least 1, got {max_length}")
        self.max_length, self._truncate, self._vocab_size = max_length, truncate, vocab_size

    @abstractmethod
    def _encode(self, text: str) -> Sequence[int]:
        """Ids of a cleaned text, without the end token."""

    def __call__(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        """Clean and tokenize: (ids int64 ``[B, max_length]``, mask int64 ``[B, max_length]``).

        Raises:
            PromptTooLong: more than ``max_length`` tokens, the end token included, unless ``truncate``.
            TokenIdError: an id outside the vocabulary.
        """
        ids = torch.full((len(texts), self.max_length), PAD_ID, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(texts):
            tokens = list(self._encode(clean_text(text)))
            if len(tokens) + 1 > self.max_length and not self._truncate:
                raise PromptTooLong(
                    f"the text has {len(tokens) + 1} tokens with the template around it, at most {self.max_length} "
                    f"are allowed: {text[:60]!r}...; shorten the instruction"
                )
            tokens = [*tokens[: self.max_length - 1], EOS_ID]
            ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
            mask[row, : len(tokens)] = 1
        if self._vocab_size is not None and len(texts):
            check_token_ids(ids, self._vocab_size)
        return ids, mask


class ByteTokenizer(_Padded):
    """A stand-in without files, one token per UTF-8 byte, for tests and the tiny network only: id = 3 + byte.

    With ``vocab_size`` below 259 the ids are folded, ``3 + byte % (vocab_size - 3)``: they stay valid for a tiny
    embedding and different bytes may share one.

    Args:
        bytes_per_token: one token for so many bytes, their first byte's. A trained tokenizer makes about one token of
            four bytes, and how long a text is decides what a step costs.
    """

    def __init__(
        self,
        max_length: int = 512,
        *,
        truncate: bool = False,
        vocab_size: int | None = None,
        bytes_per_token: int = 1,
    ) -> None:
        if vocab_size is not None and vocab_size < 4:
            raise ModelConfigError(f"a byte tokenizer needs at least 4 ids, got vocab_size {vocab_size}")
        super().__init__(max_length, truncate, vocab_size)
        self._bytes = bytes_per_token
        self._modulus = 256 if vocab_size is None else min(256, vocab_size - 3)

    def _encode(self, text: str) -> Sequence[int]:
        return [3 + byte % self._modulus for byte in text.encode("utf-8")[:: self._bytes]]


class UMT5Tokenizer(_Padded):
    """The vocabulary of ``google/umt5-xxl``, from files on disk; nothing is downloaded."""

    def __init__(self, backend: Any, max_length: int, truncate: bool, vocab_size: int | None) -> None:
        super().__init__(max_length, truncate, vocab_size)
        self._backend = backend

    @classmethod
    def from_folder(
        cls, folder: Path | str, max_length: int = 512, *, truncate: bool = False, vocab_size: int | None = None
    ) -> UMT5Tokenizer:
        """Read ``tokenizer.json``, or ``spiece.model`` when the package ``sentencepiece`` is installed.

        Raises:
            TokenizerFileError: neither is there, a file cannot be read, or pad and end are not 0 and 1.
        """
        folder = Path(folder)
        if (folder / _FAST).is_file():
            backend = _load_fast(folder / _FAST)
        elif (folder / _SLOW).is_file():
            backend = _load_slow(folder / _SLOW)
        else:
            raise TokenizerFileError(f"no tokenizer in {folder}", [f"neither {_FAST} nor {_SLOW} is there"], _REMEDY)
        return cls(backend, max_length, truncate, vocab_size)

    def _encode(self, text: str) -> Sequence[int]:
        return self._backend(text)


_REMEDY = f"copy {_FAST} of google/umt5-xxl there, or name the folder that has it"


def find_tokenizer_folder(checkpoint: Path | str | None = None, given: Path | str | None = None) -> Path:
    """The folder with tokenizer files.

    Args:
        checkpoint: checkpoint folder; it and its subfolders ``umt5-xxl``, ``google/umt5-xxl`` and ``tokenizer`` are
            tried.
        given: the file or folder a person named; when given, only it and the same subfolders of it are tried.

    Raises:
        TokenizerFileError: none found; ``problems`` lists the places looked at.
    """
    named = given if given is not None else checkpoint
    root = Path(named).expanduser() if named is not None else None
    if root is not None and root.name in (_FAST, _SLOW):
        root = root.parent
    places = [root, *(root / s for s in SUBFOLDERS)] if root is not None else []
    for place in places:
        if any((place / name).is_file() for name in (_FAST, _SLOW)):
            return place
    raise TokenizerFileError("no umT5 tokenizer found", [f"looked in {p}" for p in places], _REMEDY)


def _load_fast(path: Path) -> Any:
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises bare Exception
        raise TokenizerFileError(f"cannot read {path}", [str(e)], _REMEDY) from e
    found = {name: tokenizer.token_to_id(name) for name in ("<pad>", "</s>")}
    if found != {"<pad>": PAD_ID, "</s>": EOS_ID}:
        raise TokenizerFileError(
            f"{path} is not umT5's", [f"expected <pad> = {PAD_ID} and </s> = {EOS_ID}, found {found}"], _REMEDY
        )
    # A file may carry its own limits; ours are applied afterwards, the same for every vocabulary.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def _load_slow(path: Path) -> Any:
    try:
        import sentencepiece
    except ImportError as e:
        raise TokenizerFileError(
            f"{path.parent} has only {_SLOW}, which needs the Python package sentencepiece",
            remedy=f"copy {_FAST} of google/umt5-xxl there, or pip install sentencepiece",
        ) from e
    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except Exception as e:
        raise TokenizerFileError(f"cannot read {path}", [str(e)], _REMEDY) from e
    if (processor.pad_id(), processor.eos_id()) != (PAD_ID, EOS_ID):
        found = f"pad {processor.pad_id()}, end {processor.eos_id()}"
        raise TokenizerFileError(f"{path} is not umT5's", [f"expected pad 0 and end 1, found {found}"], _REMEDY)
    return lambda text: processor.encode(text, out_type=int)
