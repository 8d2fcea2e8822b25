"""The words that ``docs/faults.md`` quotes are words that the code says."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@functools.cache
def said() -> str:
    """Every text in the package, with what is filled in left out."""
    texts = []
    for path in (ROOT / "wam_policy_ros").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values]
                texts.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def quoted() -> list[str]:
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    spans = re.findall(r"`([^`]+)`", text)
    return sorted({s for s in spans if " " in s and not s.startswith(("<", "preset:", "backend:", "deterministic:"))})


@pytest.mark.parametrize("words", quoted())
def test_what_is_quoted_is_said(words: str) -> None:
    parts = [p for one in words.split("…") if len(p := one.strip(" ;:,")) > 3]
    assert parts, words
    missing = [p for p in parts if p not in said()]
    assert not missing, f"nobody says {missing}"


def test_kinds_and_files_exist() -> None:
    from wam_policy_ros.contract import errors

    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    kinds = set(re.findall(r"`([A-Z]\w+[a-z])`", text))
    assert len(kinds) >= 7 and all(hasattr(errors, kind) for kind in kinds)
    files = re.findall(r"`(test/[\w/]+\.py)`", text)
    assert len(files) == 3 and all((ROOT / file).is_file() for file in files)
    assert len(quoted()) > 20
