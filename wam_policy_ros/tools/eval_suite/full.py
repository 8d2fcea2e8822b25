"""``wam eval CHECKPOINT --full FOLDER``: everything that is said of a checkpoint, in one folder.

One JSON file per section, written when the section is complete: called again, what is there is not played again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wam_policy_ros.contract.errors import ConfigError, MissingDependency
from wam_policy_ros.model.packaged import located

from .controls import BLANK, EXPERT, HOLD, REPLAY
from .plan import Plan
from .predicted import video_table
from .summary import price, price_table, summary, table
from .tiers import with_tier

FEW, DOOR_SEEDS, DRAWN = 20, 3, 3
"""Seeds of a control; of the comparison of the doors; of videos to look at."""
MEANT, SAID = "lift_mug", "lift the red apple"
DOORS = ("engine", "openpi", "ros")
TIER_ORDER = ("16", "8", "5", "4", "dynamic", "guidance-part", "fp8", "deterministic")

Play = Callable[[Plan, range], tuple[list[Any], list[str]]]


@dataclass(frozen=True)
class Section:
    """``name`` of its file; ``title`` for people; ``plan``: what is played, or why it cannot be."""

    name: str
    title: str
    plan: Plan | str
    seeds: range


def sections(plan: Plan, seeds: range, folder: Path) -> Iterator[Section]:
    """In the order of their worth: who has no time for all of it has the first ones."""
    few, doors = seeds[:FEW], seeds[:DOOR_SEEDS]
    shown = replace(plan, video_error=True, pictures=str(folder / "failures"))
    yield Section("policy", "the policy", shown, seeds)
    drawn = replace(shown, pictures=str(folder / "episodes"), every=True, shown=DRAWN)
    yield Section("drawn", "the first of these, drawn whatever came of them", drawn, seeds[:DRAWN])
    exact = replace(plan, options=(*(o for o in plan.options if o[0] != "deterministic"), ("deterministic", True)))
    for door in DOORS:
        yield Section(f"door-{door}", f"door {door}, deterministic", replace(exact, door=door), doors)

    def without(control: str) -> Plan:
        return replace(plan, checkpoint=None, random_weights=None, options=(), tokenizer=None, control=control)

    yield Section("hold", "control: stands still", without(HOLD), few)
    yield Section("blank-cameras", "control: the policy sees grey", replace(plan, control=BLANK), few)
    yield Section("wrong-seed-replay", "control: another scene's motion", without(REPLAY), few)
    other = replace(plan, tasks=(MEANT,), instruction=SAID)
    yield Section("other-object", f'"{SAID}" where {MEANT} counts', other, few)
    yield Section("expert", "the scripted expert, the upper bound", without(EXPERT), seeds)
    for tier in TIER_ORDER:
        try:
            yield Section(f"tier-{tier}", f"tier {tier}", with_tier(plan, tier), seeds)
        except ConfigError as error:
            yield Section(f"tier-{tier}", f"tier {tier}", str(error), seeds)


def run_full(plan: Plan, seeds: range, folder: Path, play: Play, margin: float, say: Callable[[str], None]) -> int:
    """Play what is not there yet; write ``report.json`` and ``report.md``. Exit status 0 when every section that can be
    played was played to its end.

    Raises:
        ConfigError: no checkpoint in this process.
    """
    if plan.door != "engine" or plan.url or plan.control or not (plan.checkpoint or plan.random_weights):
        raise ConfigError(
            "the whole report is of a checkpoint, through all doors", expected="wam eval CHECKPOINT --full"
        )
    folder.mkdir(parents=True, exist_ok=True)
    todo = list(sections(plan, seeds, folder))
    found: dict[str, dict[str, Any]] = {}
    titles: dict[str, str] = {}
    for number, section in enumerate(todo, 1):
        titles[section.name] = section.title
        say(f"\n== {number}/{len(todo)} {section.title}: {len(section.seeds)} seeds")
        found[section.name] = _section(section, folder / f"{section.name}.json", play, say)
        whole = assemble(found, titles, margin)
        (folder / "report.json").write_text(json.dumps(whole, indent=1), encoding="utf-8")
        (folder / "report.md").write_text(markdown(whole), encoding="utf-8")
    say(f"\n{folder / 'report.md'}")
    return 0 if all(r.get("complete") or "not_run" in r for r in found.values()) else 1


def _section(section: Section, path: Path, play: Play, say: Callable[[str], None]) -> dict[str, Any]:
    if isinstance(section.plan, str):
        say(f"not run: {section.plan}")
        return {"not_run": section.plan}
    key = _key(section.plan, section.seeds)
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if known.get("key") == key and known.get("complete"):
        say("is there already")
        return known
    begin_s = time.monotonic()
    try:
        episodes, errors = play(section.plan, section.seeds)
    except (ConfigError, MissingDependency) as error:
        say(f"not run: {error}")
        return {"not_run": str(error)}
    report = summary(section.plan, section.seeds, episodes, errors)
    report |= {"key": key, "minutes": round((time.monotonic() - begin_s) / 60, 2)}
    say(table(report))
    path.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return report


def _key(plan: Plan, seeds: range) -> str:
    """Of what a section's result depends on: the plan, the seeds, the weights' files."""
    folder = located(plan.checkpoint) if plan.checkpoint else None
    files = sorted([*folder.glob("*.safetensors"), *folder.rglob("metadata.json")]) if folder else []
    stamps = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return json.dumps([plan.described(), list(seeds)[:1], len(seeds), stamps], default=str)


def assemble(found: Mapping[str, dict[str, Any]], titles: Mapping[str, str], margin: float) -> dict[str, Any]:
    """The whole report from its sections; JSON."""
    played = {n: r for n, r in found.items() if r.get("episodes")}
    tiers = {n.removeprefix("tier-"): r for n, r in played.items() if n.startswith("tier-")}
    refused = {n.removeprefix("tier-"): r["not_run"] for n, r in found.items() if n[:5] == "tier-" and "not_run" in r}
    doors = {door: played[f"door-{door}"] for door in DOORS if f"door-{door}" in played}
    hashes = {door: r["actions_sha256"] for door, r in doors.items()}
    seeds = {r["episodes"] for r in doors.values()}
    first = TIER_ORDER[0]
    policy = played.get("policy", {})
    return {
        "policy": policy.get("policy"),
        "fingerprint": policy.get("fingerprint"),
        "versions": policy.get("versions"),
        "sections": {
            n: {"title": titles[n], **{k: r.get(k) for k in _SHOWN}} if "not_run" not in r
            else {"title": titles[n], "not_run": r["not_run"]}
            for n, r in found.items()
        },
        "doors": {"seeds": max(seeds, default=0), "actions_sha256": hashes,
                  "equal": len(set(hashes.values())) == 1 if len(hashes) > 1 else None},
        "price_list": price(tiers, refused, first, margin) if first in tiers else None,
        "video_error": policy.get("video_error"),
    }  # fmt: skip


_SHOWN = ("episodes", "successes", "success_rate", "wilson_95", "complete", "errors", "by_task", "others_taken",
          "call_s_p50", "ticks_of_successes", "minutes")  # fmt: skip


def markdown(whole: Mapping[str, Any]) -> str:
    """For a README."""
    policy, versions = whole["policy"] or {}, whole["versions"] or {}
    lines = [f"# Closed loop in the simulator: {policy.get('weights', 'no policy was played')}", ""]
    if policy.get("random_weights"):
        lines += ["**RANDOM WEIGHTS: this shows that the machinery runs, nothing else.**", ""]
    lines += [
        "| | episodes | lifted | rate | 95 % (Wilson) | took another | call p50 |",
        "|---|---|---|---|---|---|---|",
    ]
    for section in whole["sections"].values():
        lines.append(_row(section))
    lines += ["", "| task | episodes | lifted | 95 % (Wilson) |", "|---|---|---|---|"]
    for task, part in (whole["sections"].get("policy", {}).get("by_task") or {}).items():
        low, high = part["wilson_95"]
        lines.append(f"| {task} | {part['episodes']} | {part['successes']} | {low:.2f} to {high:.2f} |")
    lines += ["", "## Doors", "", *_doors(whole["doors"])]
    if whole["price_list"] is not None:
        lines += ["", "## Price list", "", "```", price_table(whole["price_list"]), "```"]
    if whole["video_error"] is not None:
        lines += ["", "## Predicted video", "", "```", video_table(whole["video_error"]), "```"]
        lines += ["", "Seen above predicted: `episodes/*_predicted.png`, and of failures `failures/*_predicted.png`."]
    lines += ["", f"Machine: {', '.join(f'{k} {v}' for k, v in versions.items() if isinstance(v, str | int))}."]
    return "\n".join(lines) + "\n"


def _row(section: Mapping[str, Any]) -> str:
    if "not_run" in section:
        return f"| {section['title']} | not run: {section['not_run']} | | | | | |"
    if not section["episodes"]:
        return f"| {section['title']} | 0 | | | | | |"
    low, high = section["wilson_95"]
    others = ", ".join(f"{n} {c}x" for n, c in sorted((section["others_taken"] or {}).items())) or "-"
    call = f"{section['call_s_p50']:.3f} s" if section["call_s_p50"] is not None else "-"
    cut = "" if section["complete"] else " (not complete)"
    return (f"| {section['title']}{cut} | {section['episodes']} | {section['successes']} | "
            f"{section['success_rate']:.2f} | {low:.2f} to {high:.2f} | {others} | {call} |")  # fmt: skip


def _doors(doors: Mapping[str, Any]) -> Sequence[str]:
    hashes = doors["actions_sha256"]
    words = {True: "the same actions, bit for bit", False: "NOT the same actions", None: "nothing to compare"}
    return [f"On {doors['seeds']} seeds in the deterministic tier: {words[doors['equal']]}.", "",
            *(f"- {door}: `{digest}`" for door, digest in hashes.items())]  # fmt: skip
