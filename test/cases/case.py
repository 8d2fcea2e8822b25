"""What a case is, what its run gives, and how the two are compared. Areas add their own checks to ``COMMON``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

REFUSALS = frozenset({"drop_sample", "reject_request", "reject_chunk", "refuse_start", "hold"})
VERDICTS = REFUSALS | {"accept", "reset_episode", "never_published"}


class Unavailable(Exception):
    """A case cannot be run here; the text says what is missing."""


@dataclass(frozen=True)
class Case:
    """One entry of ``index.json``.

    Attributes:
        folder: where ``files`` lie.
        config: ``reference_config.yaml``.
        expect: as written; never empty of meaning: a key that no check knows fails the case.
    """

    id: str
    kind: str
    files: tuple[str, ...]
    verdict: str
    expect: Mapping[str, Any]
    scenario: str
    use_sim_time: bool
    folder: Path
    config: Mapping[str, Any]

    @property
    def area(self) -> str:
        return self.id.split("-")[0]

    def path(self, suffix: str = "") -> Path:
        """The first file with a suffix; the first of all by default."""
        return self.folder / next(f for f in self.files if f.endswith(suffix))

    def json(self) -> Any:
        return json.loads(self.path(".json").read_text(encoding="utf-8"))

    def yaml(self) -> Any:
        return yaml.safe_load(self.path(".yaml").read_text(encoding="utf-8"))


def load(folder: Path) -> list[Case]:
    """All cases of a folder, in the order of its index."""
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    config = yaml.safe_load((folder / "reference_config.yaml").read_text(encoding="utf-8"))
    return [
        Case(
            id=c["id"],
            kind=c["kind"],
            files=tuple(c["files"]),
            verdict=c["verdict"],
            expect=c.get("expect", {}),
            scenario=c.get("scenario", ""),
            use_sim_time=bool(c.get("use_sim_time", False)),
            folder=folder,
            config=config,
        )
        for c in index["cases"]
    ]


@dataclass
class Outcome:
    """What the product did.

    Attributes:
        verdicts: words of ``VERDICTS`` that describe it; several may hold at once (it dropped a sample and held).
        message: everything a person was told: error, status reasons, log.
        facts: expectation key -> value found; compared for equality, floats with the case's ``tolerance``.
        checks: expectation key, or pattern that matches it whole -> check, for what equality cannot say.
    """

    verdicts: frozenset[str]
    message: str
    facts: dict[str, Any] = field(default_factory=dict)
    checks: dict[str, Check] = field(default_factory=dict)


Check = Callable[[Any, Case, Outcome], "str | None"]
"""(expected value, case, outcome) -> complaint, or None."""


def contains(expected: Any, case: Case, outcome: Outcome) -> str | None:
    """Every one of the words, whatever its case, in what a person was told."""
    words = [expected] if isinstance(expected, str) else expected
    missing = [w for w in words if str(w).lower() not in outcome.message.lower()]
    return f"{missing} not in what was said: {outcome.message[:2000]!r}" if missing else None


def note(expected: Any, case: Case, outcome: Outcome) -> str | None:
    """Prose that settles nothing by itself, or that the verdict settles."""
    return None


COMMON: dict[str, Check] = {
    r"(message|reason|log|status|error|warning)_(contains|mentions|names)": contains,
    # Words that ``allowed`` reads, tolerances that checks of other keys read, and remarks.
    "alternative|either|or_verdict|rule|tolerance|tolerance_s|note|see": note,
}


def allowed(case: Case) -> frozenset[str]:
    """The verdict of a case and those that its expectations permit beside it, in words like ``or refuse by name``."""
    words = [case.expect.get(k, "") for k in ("alternative", "either", "or_verdict", "rule")]
    text = " ".join(w if isinstance(w, str) else " ".join(map(str, w)) for w in words).lower()
    out = {case.verdict} | {v for v in VERDICTS if v in text}
    if re.search(r"\b(refus\w*|reject(s|ed|ion)?)\b", text):
        out |= REFUSALS
    if re.search(r"^(accept|resample|drop alpha)", text):
        out |= {"accept"}
    return frozenset(out)


def complaints(case: Case, outcome: Outcome) -> list[str]:
    """Why the outcome is not the expected one; empty when it is."""
    out = []
    unknown_verdict = case.verdict not in VERDICTS
    if unknown_verdict:
        out.append(f"the runner does not know the verdict {case.verdict!r}")
    elif not outcome.verdicts & allowed(case):
        out.append(
            f"verdict {sorted(outcome.verdicts)}, expected {sorted(allowed(case))}; said: {outcome.message[:2000]}"
        )
    for key, value in case.expect.items():
        check = find(key, outcome.checks) or find(key, COMMON)
        if check is not None:
            complaint = check(value, case, outcome)
        elif key in outcome.facts:
            found = outcome.facts[key]
            complaint = None if same(value, found, case) else f"found {found!r}, expected {value!r}"
        else:
            complaint = "the runner does not know this expectation"
        if complaint:
            out.append(f"{key}: {complaint}")
    return out


def find(key: str, checks: Mapping[str, Check]) -> Check | None:
    return next((check for pattern, check in checks.items() if re.fullmatch(pattern, key)), None)


def same(expected: Any, found: Any, case: Case) -> bool:
    """Equal; numbers and lists of numbers up to the case's ``tolerance``, 1e-9 without one."""
    if isinstance(expected, list) and isinstance(found, (list, tuple)):
        return len(expected) == len(found) and all(same(e, f, case) for e, f in zip(expected, found, strict=True))
    numbers = isinstance(expected, (int, float)) and isinstance(found, (int, float))
    if numbers and not isinstance(expected, bool) and not isinstance(found, bool):
        return abs(expected - found) <= float(case.expect.get("tolerance", case.expect.get("tolerance_s", 1e-9)))
    return type(expected) is type(found) and expected == found
