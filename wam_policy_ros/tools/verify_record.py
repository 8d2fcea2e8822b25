"""``wam replay RECORD --verify``: a recorded policy made again, asked the same, and compared bit for bit."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wam_policy_ros.contract.errors import ConfigError, MissingDependency
from wam_policy_ros.contract.fakes import HoldPolicy
from wam_policy_ros.contract.interface import Policy

try:
    from wam_policy_ros.records.events import CHUNK, ERROR, OPEN
    from wam_policy_ros.records.read import Record, open_records
    from wam_policy_ros.records.verify import Report, verify
except ModuleNotFoundError as error:
    raise MissingDependency(str(error.name), "record", "reading a record of a policy") from error

PROVEN, DIFFERENT, UNPROVEN = 0, 1, 3
"""Exit status: everything is the same; something differs; what there is is the same, but some of it is missing."""

SHOWN = 10


def run(args: argparse.Namespace) -> int:
    """Verify every record of a folder."""
    policies: dict[str, Policy] = {}
    reports = []
    for record in open_records(args.recording):
        how = json.dumps([how_to_make(record, args), config_of(record, args)], sort_keys=True, default=str)
        if how not in policies:
            policies[how] = make_policy(record, args)
        reports.append(_verified(record, policies[how]))
        print(text(record, reports[-1]))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps([r.as_dict() for r in reports], indent=1) + "\n", encoding="utf-8")
    if any(r.differences for r in reports):
        return DIFFERENT
    return PROVEN if all(r.proven for r in reports) else UNPROVEN


def describe(args: argparse.Namespace) -> int:
    """What a folder of records holds, without a policy."""
    for record in open_records(args.recording):
        found = Counter(event.topic for event in record.events())
        header = record.header
        print(f"record      {record.name}, {len(record.files)} file(s)")
        print(f"policy      {header.get('weights')}, fingerprint {_id(record)}")
        print(f"holds       {found[OPEN]} sessions, {found[CHUNK]} calls, {found[ERROR]} refused"
              + (", digests of every stage" if header.get("stages") else ""))  # fmt: skip
        for fault in record.faults[:SHOWN]:
            print(f"INCOMPLETE  {fault}")
    print("verify it with --verify")
    return 0


def _verified(record: Record, policy: Policy) -> Report:
    shown_s = time.monotonic()

    def progress(report: Report) -> None:
        nonlocal shown_s
        if sys.stderr.isatty() and time.monotonic() - shown_s > 0.5:
            shown_s = time.monotonic()
            print(f"\r  {report.calls} calls, {report.same} the same   ", end="", file=sys.stderr, flush=True)

    report = verify(record, policy, progress=progress)
    if sys.stderr.isatty():
        print("\r" + " " * 50 + "\r", end="", file=sys.stderr)
    return report


# -- the policy ---------------------------------------------------------------------------------------------------


def how_to_make(record: Record, args: argparse.Namespace) -> dict[str, Any]:
    """As recorded, with what the command line says instead."""
    how = {"policy": "engine", **record.header.get("how", {})}
    given = {name: getattr(args, name, None) for name in ("checkpoint", "random_weights", "tokenizer", "device")}
    if given["checkpoint"]:
        how["random_weights"] = None
    if given["random_weights"]:
        how["checkpoint"] = None
    return how | {name: value for name, value in given.items() if value}


def config_of(record: Record, args: argparse.Namespace) -> dict[str, Any]:
    """The engine's options: all of them from the fingerprint, or those that were given; and ``--engine`` instead."""
    from .serve import option_words

    known = record.fingerprint.parts.get("config") if record.fingerprint else None
    options = record.header.get("how", {}).get("options", {}) if known is None else known
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    return plain | option_words(args.engine)


def make_policy(record: Record, args: argparse.Namespace) -> Policy:
    """
    Raises:
        ConfigError: the record does not say how its policy was made, or not in a way that can be followed here.
        CheckpointError: the weights are not where they were.
    """
    how = how_to_make(record, args)
    if how["policy"] == "hold":
        return HoldPolicy(embodiment=how["embodiment"])
    if how["policy"] != "engine":
        raise ConfigError(
            f"the recorded policy was of the kind {how['policy']!r}, which cannot be made again here",
            remedy="verify a record that was made where the network runs",
        )
    from wam_policy_ros.engine.replicas.build import EngineFactory

    factory = EngineFactory(
        embodiment=how["embodiment"],
        checkpoint=how.get("checkpoint"),
        random_weights=how.get("random_weights"),
        tokenizer=how.get("tokenizer"),
        device=str(how.get("device") or "auto").partition(",")[0],  # of replicas one is enough
        preset=how.get("preset", "auto") if record.fingerprint is None else "reference",  # then nothing is left to it
        options=config_of(record, args),
        hash_all=True,
    )
    return factory.policy(_progress())


def _progress() -> Callable[[str, float], None]:
    from wam_policy_ros.contract.policy_thread import WARNING

    last = [""]

    def told(line: str, fraction: float) -> None:
        if line.startswith(WARNING) or line != last[0]:
            last[0] = line
            print(line, file=sys.stderr, flush=True)

    return told


# -- for people ---------------------------------------------------------------------------------------------------


def text(record: Record, report: Report) -> str:
    """The report in lines."""
    header = record.header
    how = "deterministic" if report.deterministic else "NOT in the deterministic tier: other bits prove nothing"
    lines = [f"record      {report.record}, {len(record.files)} file(s)"]
    lines.append(f"policy      {header.get('weights')}, fingerprint {_id(record)}, {how}")
    lines += [f"ELSEWHERE   {line} (recorded, here)" for line in report.elsewhere]
    stages = ", stages compared" if report.stages else ""
    lines.append(
        f"calls       {report.calls} in {report.sessions} sessions, {report.same} the same bit for bit{stages}"
    )
    if report.refused:
        lines.append(f"            {report.refused} gave an error when they were recorded and are left out")
    if report.skipped:
        lines.append(f"            {report.skipped} not compared: what came before them is missing or differs")
    for d in report.differences[:SHOWN]:
        lines.append(
            f"DIFFERENT   call {d.call} (session {d.session_id!r}, step {d.step}): first at {d.stage}: {d.what}"
        )
        if d.observation_changed:
            lines.append("            its observation is not the one that was recorded: the record was changed")
        elif d.stage == "actions" and not report.stages:
            lines.append("            record with stages to learn where it begins")
    if report.changed and not report.differences:
        lines.append(f"CHANGED     the observations of the calls {report.changed[:SHOWN]} are not what was recorded")
    lines += [f"INCOMPLETE  {fault}" for fault in report.faults[:SHOWN]]
    if report.proven:
        lines.append("the same bits")
    elif not report.differences:
        lines.append("what could be compared is the same, but the record is not whole")
    return "\n".join(lines)


def _id(record: Record) -> str:
    return record.fingerprint.id if record.fingerprint else "unknown"


def is_record(path: Path) -> bool:
    """Whether ``path`` holds records of a policy; ROS recordings of the same file format do not."""
    from wam_policy_ros.records.files import is_record as found

    return found(path)
