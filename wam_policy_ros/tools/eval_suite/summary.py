"""What an evaluation found, as JSON and as a table."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.engine.build import resolve_device
from wam_policy_ros.tools.provenance import provenance
from wam_policy_ros.train.evaluate import wilson

from .episode import Episode, sha256_of_all
from .paired import Paired
from .plan import Plan
from .predicted import total_error

FORMAT = 1


def versions(device: str) -> dict[str, Any]:
    """Of everything that decides the numbers, as seen by this process."""
    found = {"numpy": np.__version__, "torch": torch.__version__, "mujoco": importlib.metadata.version("mujoco")}
    return {**provenance(resolve_device(device)), **found}


def summary(
    plan: Plan, seeds: Sequence[int], episodes: Sequence[Episode], errors: Sequence[str] = ()
) -> dict[str, Any]:
    """The report of one plan.

    Raises:
        ConfigError: the episodes are of different policies.
    """
    said = {e.policy["fingerprint"]["id"] if e.policy["fingerprint"] else e.policy["weights"] for e in episodes}
    if len(said) > 1:
        raise ConfigError("the policy changed between the episodes", got=sorted(said), expected="one fingerprint")
    hits = [e for e in episodes if e.success]
    policy = dict(episodes[0].policy) if episodes else {}
    fingerprint = policy.pop("fingerprint", None)
    calls = [s for e in episodes for s in e.calls_s[1:]]
    others: dict[str, int] = {}
    for name in (n for e in episodes for n in e.taken or ()):
        others[name] = others.get(name, 0) + 1
    return {
        "format": FORMAT,
        "episodes": len(episodes),
        "successes": len(hits),
        "success_rate": len(hits) / len(episodes) if episodes else None,
        "wilson_95": [round(x, 4) for x in wilson(len(hits), len(episodes))],
        "actions_sha256": sha256_of_all(episodes),
        "complete": len(episodes) == len(seeds),
        "errors": list(errors),
        "by_task": {t: by_task(episodes, t) for t in sorted({e.task for e in episodes})},
        "others_taken": others,
        "ticks_of_successes": round(float(np.mean([e.ticks for e in hits])), 1) if hits else None,
        **({"video_error": total.summary()} if (total := total_error(e.video for e in episodes)) else {}),
        "call_s_p50": round(float(np.median(calls)), 4) if calls else None,
        "configuration": plan.described() | {"seeds": [seeds[0], seeds[-1] + 1] if len(seeds) else []},
        "policy": policy,
        "fingerprint": fingerprint,
        "versions": versions(plan.device),
        "rows": [e.row() for e in episodes],
    }


def by_task(episodes: Sequence[Episode], task: str) -> dict[str, Any]:
    of = [e for e in episodes if e.task == task]
    hits = sum(e.success for e in of)
    return {"episodes": len(of), "successes": hits, "wilson_95": [round(x, 4) for x in wilson(hits, len(of))],
            "moved_another": sum(len(set(e.moved_m) - {task.removeprefix("lift_")}) > 0 for e in of),
            "took_another": sum(bool(e.taken) for e in of)}  # fmt: skip


def table(report: dict[str, Any]) -> str:
    """For the terminal."""
    head = (
        f"{'task':18} {'episodes':>8} {'success':>8} {'rate':>6}  {'95 % (Wilson)':15} {'moved other':>11} {'took':>5}"
    )
    lines = [head]
    for name, part in report["by_task"].items():
        lines.append(_line(name, part, f"{part['moved_another']:11d} {part['took_another']:5d}"))
    lines.append(_line("all", report))
    return "\n".join(lines)


def _line(name: str, part: dict[str, Any], more: str = "") -> str:
    count, hits = part["episodes"], part["successes"]
    low, high = part["wilson_95"]
    rate = f"{hits / count:6.2f}" if count else "     -"
    return f"{name:18} {count:8d} {hits:8d} {rate}  {low:.2f} to {high:.2f}    {more}".rstrip()


def price(reports: dict[str, dict[str, Any]], refused: dict[str, str], reference: str, margin: float) -> dict[str, Any]:
    """What each tier costs in success and saves in time, against ``reference`` on the seeds both played."""
    out: dict[str, Any] = {"reference": reference, "margin": margin, "not_run": refused, "tiers": {}}
    base = {r["seed"]: r["success"] for r in reports[reference]["rows"]}
    for name, report in reports.items():
        mine = {r["seed"]: r["success"] for r in report["rows"]}
        shared = sorted(set(mine) & set(base))
        pair = Paired.of([mine[s] for s in shared], [base[s] for s in shared])
        low, high = pair.interval()
        out["tiers"][name] = {
            "episodes": len(shared),
            "successes": sum(mine[s] for s in shared),
            "difference": round(pair.difference, 4),
            "interval_95": [round(low, 4), round(high, 4)],
            "only_here": pair.only_new,
            "only_reference": pair.only_reference,
            "not_worse": None if name == reference or not shared else pair.not_worse(margin),
            "call_s_p50": report["call_s_p50"],
        }
    return out


def price_table(found: dict[str, Any]) -> str:
    """For the terminal."""
    lines = [f"{'tier':15} {'episodes':>8} {'success':>8} {'difference':>10}  {'95 % (Newcombe)':17} {'call p50':>9}  "
             f"not worse by {found['margin']:g} than {found['reference']}"]  # fmt: skip
    words = {None: "reference", True: "yes", False: "not shown"}
    for name, t in found["tiers"].items():
        low, high = t["interval_95"]
        took = f"{t['call_s_p50']:.3f} s" if t["call_s_p50"] is not None else "-"
        lines.append(f"{name:15} {t['episodes']:8d} {t['successes']:8d} {t['difference']:+10.3f}  "
                     f"{low:+.3f} to {high:+.3f}  {took:>9}  {words[t['not_worse']]}")  # fmt: skip
    lines += [f"{name:15} not run: {why}" for name, why in found["not_run"].items()]
    return "\n".join(lines)
