"""``wam eval CHECKPOINT``: closed-loop success of a policy in the simulator, through the door it is used by.

Also controls that must fail, and with ``--tiers`` a price list: what each saving of the engine costs in success.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wam_policy_ros.contract.errors import ConfigError, WamError

from .lazy import load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("which policy")
    what.add_argument("checkpoint", nargs="?", help="checkpoint folder, or a packaged one's name")
    what.add_argument("--random-weights", choices=["tiny"], help="an untrained network instead: not a policy")
    what.add_argument("--control", default="", help="instead, or with it: hold, wrong-seed-replay, expert (no "
                      "checkpoint); blank-cameras (the policy, which sees grey)")  # fmt: skip
    what.add_argument("--door", default="engine", help="engine: in this process (default); openpi: through a policy "
                      "server that is started, or --url; ros: wam_sim and the node, which are started")  # fmt: skip
    what.add_argument("--attach", action="store_true", help="door ros: use the simulator and the node that run already "
                      "in this ROS domain, as without a checkpoint")  # fmt: skip
    what.add_argument("--url", default="", help="of a policy server that runs already, e.g. ws://host:8000")
    what.add_argument("--dialect", default="vllm_omni", help="how --url is spoken to")
    what.add_argument("--tokenizer")
    what.add_argument("--device", default="auto")
    what.add_argument("--preset", default="auto", help="of the engine: auto, reference, bf16, fp8")
    what.add_argument("--engine", action="append", default=[], metavar="OPTION=VALUE", help="engine option")
    what.add_argument("--deterministic", action="store_true", help="the same bits in every process")
    how = parser.add_argument_group("which episodes")
    how.add_argument("--seeds", default="0:50", metavar="A:B", help="scenes A to B - 1, or N: the first N; below 1000 "
                     "none was trained on")  # fmt: skip
    how.add_argument("--task", default="", help="names with commas between them; default: all, drawn by the seed")
    how.add_argument("--instruction", default="", help="said in every episode; --task still decides what success is")
    how.add_argument("--execute", type=int, help="rows of a chunk to execute; default: as the policy recommends")
    how.add_argument("--max-ticks", type=int, default=160, help="of 1/15 s, of an episode without success")
    how.add_argument("--workers", type=int, help="simulators, and in the engine's door policies, side by side; "
                     "default: processors on a CPU, 1 on a GPU or with --parallel")  # fmt: skip
    how.add_argument("--parallel", type=int, default=1, metavar="N", help="simulators at once in each process, which "
                     "share its policy; the actions do not depend on it")  # fmt: skip
    how.add_argument("--beside", type=int, default=0, metavar="N", help="clients that ask the same policy all the time "
                     "about something else, to show that the actions do not depend on them")  # fmt: skip
    how.add_argument("--minutes", type=float, help="stop after this time; what was played by then counts")
    how.add_argument("--tiers", default="", help="price list: names with commas between them, the first is compared "
                     "with: 16,8,4,dynamic,guidance-part,fp8,deterministic")  # fmt: skip
    how.add_argument("--margin", type=float, default=0.05, help="a tier may succeed so much less often")
    out = parser.add_argument_group("what is left")
    out.add_argument("--json", type=Path, default=Path("evaluation.json"), help="default: %(default)s")
    out.add_argument("--full", type=Path, metavar="FOLDER", help="instead of --json: everything that can be said of a "
                     "checkpoint; what is there already is not played again")  # fmt: skip
    out.add_argument("--pictures", default="", metavar="FOLDER", help="videos and plots of failures; of successes only "
                     "with --every")  # fmt: skip
    out.add_argument("--shown", type=int, default=3, help="how many of them, about")
    out.add_argument("--every", action="store_true", help="with --pictures: of successes, too")
    out.add_argument("--video-error", action="store_true", help="how far the predicted video is from what then was "
                     "seen, beside that of repeating the last frame; door engine")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    os.environ.setdefault("MUJOCO_GL", "egl")
    load("eval_suite.episode", "wam eval")  # says which extra is missing
    from .eval_suite.plan import seed_range
    from .eval_suite.tiers import tier_names

    seeds, plan, workers = seed_range(args.seeds), plan_of(args), workers_of(args)
    if args.full is not None:
        if args.tiers or args.minutes is not None:
            raise ConfigError("the whole report plays every tier, to its end", got="--full with --tiers or --minutes")
        from functools import partial

        from .eval_suite.full import run_full

        return run_full(plan, seeds, args.full, partial(play, workers=workers, minutes=None), args.margin, _say)
    if args.tiers:
        found, status = price_list(plan, tier_names(args.tiers), seeds, workers, args.minutes, args.margin)
    else:
        found, status = one(plan, seeds, workers, args.minutes)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(f"\n{args.json}")
    return status


def _say(line: str) -> None:
    print(line, flush=True)


def plan_of(args: argparse.Namespace) -> Any:
    """Raises ConfigError for options that do not fit together."""
    from .eval_suite.plan import Plan, task_names
    from .serve import option_words

    options = option_words(args.engine) | ({"deterministic": True} if args.deterministic else {})
    nothing = not (args.checkpoint or args.random_weights or args.control or args.url)
    return Plan(
        door=args.door, attach=args.attach or (args.door == "ros" and nothing),
        checkpoint=args.checkpoint, random_weights=args.random_weights, url=args.url,
        dialect=args.dialect, tokenizer=args.tokenizer, device=args.device, preset=args.preset,
        options=tuple(options.items()), control=args.control, tasks=task_names(args.task, args.instruction),
        instruction=args.instruction, execute=args.execute, max_ticks=args.max_ticks,
        threads=threads_of(args, bool(options.get("deterministic"))), pictures=args.pictures, shown=args.shown,
        every=args.every, video_error=args.video_error, parallel=args.parallel, beside=args.beside,
    )  # fmt: skip


def workers_of(args: argparse.Namespace) -> int:
    if args.workers is not None:
        if args.workers < 1:
            raise ConfigError("at least one simulator is needed", got=f"--workers {args.workers}")
        return int(args.workers)
    return 1 if _on_gpu(args) or args.parallel > 1 else os.cpu_count() or 1


def threads_of(args: argparse.Namespace, deterministic: bool) -> int:
    """Of PyTorch, per policy. A CPU's bits depend on their number, so in the deterministic tier it does not depend on
    how many policies share the processors."""
    if deterministic and not _on_gpu(args):
        return 1
    return max(1, (os.cpu_count() or 1) // workers_of(args))


def _on_gpu(args: argparse.Namespace) -> bool:
    import torch

    return args.device.startswith("cuda") or (args.device == "auto" and torch.cuda.is_available())


def one(plan: Any, seeds: range, workers: int, minutes: float | None) -> tuple[dict[str, Any], int]:
    """One report, on the terminal too."""
    from .eval_suite.predicted import video_table
    from .eval_suite.summary import summary, table

    episodes, errors = play(plan, seeds, workers, minutes)
    for line in errors:
        print(f"a simulator ended: {line}")
    report = summary(plan, seeds, episodes, errors)
    if report["policy"].get("random_weights"):
        print("RANDOM WEIGHTS, not a policy: this shows that the machinery runs, nothing else")
    print(f"\n{table(report)}\nactions {report['actions_sha256']}")
    if "video_error" in report:
        print(f"\n{video_table(report['video_error'])}")
    if report["others_taken"]:
        print("taken although another thing was meant: "
              + ", ".join(f"{n} {c}x" for n, c in sorted(report["others_taken"].items())))  # fmt: skip
    return report, 0 if episodes and not errors else 1


def price_list(
    plan: Any, names: Sequence[str], seeds: range, workers: int, minutes: float | None, margin: float
) -> tuple[dict[str, Any], int]:
    """Every tier on the same seeds, compared with the first one."""
    from .eval_suite.paired import Paired
    from .eval_suite.summary import price, price_table, summary
    from .eval_suite.tiers import with_tier

    Paired(1, 0, 0, 0).not_worse(margin)  # a wrong margin is said before the hours, not behind them
    share = None if minutes is None else minutes / len(names)
    reports: dict[str, dict[str, Any]] = {}
    refused: dict[str, str] = {}
    status = 0
    for name in names:
        print(f"\n-- {name}")
        try:
            one_plan = with_tier(plan, name)
            episodes, errors = play(one_plan, seeds, workers, share)
        except ConfigError as error:
            refused[name] = str(error)
            print(f"not run: {error}")
            continue
        if not episodes:
            refused[name] = errors[0] if errors else "no time"
            print(f"not run: {refused[name]}")
            # Another process can only say in words that this machine or policy has no such tier.
            status = status if refused[name].startswith("ConfigError") else 1
            continue
        status = 1 if errors else status
        reports[name] = summary(one_plan, seeds, episodes, errors)
    if names[0] not in reports:
        raise ConfigError("the tier to compare with was not run", got=f"{names[0]}: {refused[names[0]]}")
    found = price(reports, refused, names[0], margin)
    print(f"\n{price_table(found)}")
    return found | {"reports": reports}, status


def play(plan: Any, seeds: range, workers: int, minutes: float | None) -> tuple[list[Any], list[str]]:
    """Episodes in order, and errors of processes; one simulator runs in this process."""
    from .eval_suite.doors import serving

    if plan.door == "ros":
        from .eval_suite.ros_door import play_ros

        return play_ros(plan, seeds, Teller(len(seeds)), minutes)
    with serving(plan, print) as served:
        tell = Teller(len(seeds))
        if workers > 1 and len(seeds) > 1:
            from wam_policy_ros.train.evaluate import evaluate

            from .eval_suite.side_by_side import SideBySide

            seconds = None if minutes is None else 60 * minutes
            return evaluate(served, seeds, workers=workers, seconds=seconds, player=SideBySide, on_outcome=tell)
        return play_here(served, seeds, minutes, tell)


def play_here(plan: Any, seeds: range, minutes: float | None, tell: Any) -> tuple[list[Any], list[str]]:
    import time

    from wam_policy_ros.train.evaluate import without_gaps

    from .eval_suite.side_by_side import SideBySide

    end_s = time.monotonic() + 60 * minutes if minutes is not None else float("inf")
    left, episodes, errors = iter(seeds), [], []

    def give(episode: Any) -> None:
        episodes.append(episode)
        tell(episode)

    with SideBySide(plan) as table:
        try:
            table.play_all(lambda: next(left, None) if time.monotonic() < end_s else None, give)
        except WamError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return without_gaps(episodes, seeds), errors


class Teller:
    """One line per episode."""

    def __init__(self, count: int) -> None:
        self.count, self.done, self.hits = count, 0, 0

    def __call__(self, episode: Any) -> None:
        self.done, self.hits = self.done + 1, self.hits + episode.success
        moved = ", ".join(f"{n} {d:.2f} m" for n, d in episode.moved_m.items()) or "nothing"
        print(f"[{self.done}/{self.count}] seed {episode.seed} {episode.task}: "
              f"{'lifted' if episode.success else 'failed'} after {episode.ticks} ticks, highest "
              f"{episode.highest_m:.3f} m, moved {moved} ({self.hits} lifted so far)", flush=True)  # fmt: skip
