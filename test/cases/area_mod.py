"""Area MOD: checkpoints that must be refused, and normalisation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from wam_policy_ros.contract.errors import WamError
from wam_policy_ros.contract.normalization import FieldStatistics

from . import rows_mod, settings
from .case import Case, Outcome, Unavailable, contains, note

EMBODIMENT = "oxe_droid"


def run(case: Case) -> Outcome:
    if case.kind == "json" and "row" in case.json():
        return rows_mod.run(case, case.json())
    if case.kind == "ckpt_dir":
        return _checkpoint(case)
    if case.kind == "json" and "stats" in case.json():
        return _normalisation(case)
    if case.kind == "yaml":
        return settings.run(case)
    raise Unavailable(f"no part here runs {case.area} cases of kind {case.kind!r} like this one")


def _checkpoint(case: Case) -> Outcome:
    pytest.importorskip("torch", reason="needs torch (extra engine)")
    from wam_policy_ros.engine.build import build_policy
    from wam_policy_ros.engine.config import EngineConfig

    loaded: list[str] = []
    try:
        build_policy(
            embodiment=EMBODIMENT,
            checkpoint=str(case.path()),
            random_weights=None,
            tokenizer=None,
            device="cpu",
            config=EngineConfig.reference(),
            progress=lambda line, fraction: loaded.append(line),
        )
    except WamError as error:
        outcome = Outcome(frozenset({"refuse_start"}), str(error))
    else:
        outcome = Outcome(frozenset({"accept"}), f"it was loaded: {loaded}")
    tensors = [line for line in loaded if "tensor" in line.lower()]
    outcome.checks |= {
        "before": lambda e, c, o: f"weights were read: {tensors}" if tensors else None,
        "never": lambda e, c, o: None if "refuse_start" in o.verdicts else "it was accepted",
        "message_mentions": contains,
        "note": note,
    }
    return outcome


def _normalisation(case: Case) -> Outcome:
    data: dict[str, Any] = case.json()
    stats = FieldStatistics("case", **{k: np.array(v, dtype=np.float64) for k, v in data["stats"].items()})
    wrong = []
    for given, wanted, convert in (
        ("raw", "normalised_clipped", stats.forward),
        ("action_normalised", "action_raw", stats.inverse),
    ):
        if given in data:
            found = convert(np.array(data[given], dtype=np.float64), data["mode"])
            if np.abs(found - np.array(data[wanted])).max() > float(case.expect.get("tolerance", 1e-6)):
                wrong.append(f"{given} -> {found.tolist()}, expected {data[wanted]}")
    return Outcome(frozenset({"refuse_start"} if wrong else {"accept"}), "; ".join(wrong))
