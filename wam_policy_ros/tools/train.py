"""``wam train``: a small network of DreamZero's architecture, from nothing to a checkpoint and its success.

``all``: demonstrations, VAE, DiT, checkpoint, evaluation, by the clock; ``vae`` and ``dit``: the same in two calls.
``dagger``: play a checkpoint, let the expert say what it would have done, and train on. ``eval``: success of a
checkpoint on seeds that are never trained on.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from wam_policy_ros.contract.errors import ConfigError

SHARES: dict[str, dict[str, float]] = {
    "vae": {"data_share": 0.2, "vae_share": 0.8, "latents_share": 0.0, "fit_share": 0.0},
    "dit": {"data_share": 0.13, "vae_share": 0.0, "latents_share": 0.04, "fit_share": 0.75},
}
"""Of the time, when it is not for all stages."""
MINUTES = {"all": 20.0, "vae": 5.0, "dit": 13.0, "dagger": 10.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    everything = kinds.add_parser("all", help="demonstrations, VAE, DiT, checkpoint, evaluation")
    first = kinds.add_parser("vae", help="demonstrations and the VAE only: leaves vae.pt")
    second = kinds.add_parser("dit", help="demonstrations and everything behind the VAE")
    begin = second.add_argument_group("what it begins with, one of")
    begin.add_argument("--vae", type=Path, help="vae.pt of an earlier run, and a new network behind it")
    begin.add_argument("--start", type=Path, help="checkpoint of the same preset to go on from, with its own VAE")
    again = kinds.add_parser("dagger", help="play a checkpoint with the expert watching, train on")
    again.add_argument("--start", type=Path, required=True, help="checkpoint to go on from")
    again.add_argument("--rollout-share", type=float, default=0.3, help="of the time, for playing the checkpoint")
    for sub in (everything, first, second, again):
        sub.add_argument("--out", type=Path, required=True, help="folder of the run; a later call goes on in it")
        sub.add_argument("--minutes", type=float, help="wall-clock time for everything, of which each stage has a "
                         "share. Some take longer than theirs: demonstrations go on until there are 100 of them or the "
                         "time is over, all of their latents are made (on a GPU as many as fit), a training has at "
                         "least 1 s and ends its step. With less than 10 s left there "
                         "is no evaluation. Default: "
                         + ", ".join(f"{kind} {m:g}" for kind, m in MINUTES.items()))  # fmt: skip
        sub.add_argument("--preset", default="mug", help="mug (default), small (for a CPU), toy (for tests)")
        sub.add_argument("--seed", type=int, default=0, help="of weights and draws")
        sub.add_argument("--first-seed", type=int, help="of the demonstrations' scenes")
        sub.add_argument("--episodes", type=int, help="no more demonstrations than these; default: by time")
        sub.add_argument("--device", default="auto")
        sub.add_argument("--batch", type=int, help="windows per step")
        sub.add_argument("--lr", type=float, help="largest learning rate")
        sub.add_argument("--compile", action=argparse.BooleanOptionalAction,
                         help="let PyTorch compile the layers of the DiT's training; default: on a GPU")  # fmt: skip
        sub.add_argument("--bundle", type=Path, help="also leave the result there in files of at most 15 MiB")
        sub.add_argument("--evaluation-seeds", type=int, default=100)
        sub.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE",
                         help="any other option of the plan, several times; e.g. recipe.video_weight=0.3")  # fmt: skip
    measure = kinds.add_parser("eval", help="success of a checkpoint on unseen seeds")
    measure.add_argument("checkpoint", type=Path)
    measure.add_argument("--preset", default="mug")
    measure.add_argument("--seeds", type=int, default=100, help="how many, from 0")
    measure.add_argument("--first", type=int, default=0, help="first seed")
    measure.add_argument("--minutes", type=float, help="stop after this time")
    measure.add_argument(
        "--execute", type=int, help="rows of a chunk to execute; default: as the checkpoint recommends"
    )
    measure.add_argument("--engine", action="append", default=[], metavar="OPTION=VALUE", help="engine option")
    measure.add_argument("--blind", action="store_true", help="grey cameras: must fail")
    measure.add_argument("--out", type=Path, default=Path("evaluation.json"))
    for sub, tasks in (*((k, "the mug three times, the others once") for k in (everything, first, second, again)),
                       (measure, "all")):  # fmt: skip
        sub.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="simulators side by side")
        sub.add_argument("--tasks", help="names with commas between them, one that stands there twice comes twice as "
                         f"often; default: {tasks}")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    # The processes that draw are told here; on a machine with a GPU the same value means the GPU.
    os.environ.setdefault("MUJOCO_GL", "egl")
    return _evaluate(args) if args.kind == "eval" else _train(args)


def _tasks(args: argparse.Namespace, default: tuple[str, ...]) -> tuple[str, ...]:
    from wam_policy_ros.sim.tasks import find_task

    return tuple(find_task(name.strip()).name for name in args.tasks.split(",")) if args.tasks else default


def _train(args: argparse.Namespace) -> int:
    from wam_policy_ros.train.dagger import Dagger
    from wam_policy_ros.train.pipeline import Run
    from wam_policy_ros.train.plan import TASKS_OF_THE_MUG, Plan
    from wam_policy_ros.train.preset import PRESETS

    from .serve import option_words

    if args.preset not in PRESETS:
        raise ConfigError("unknown preset", got=args.preset, expected=f"one of {sorted(PRESETS)}")
    minutes = MINUTES[args.kind] if args.minutes is None else args.minutes
    values: dict[str, Any] = {
        "preset": args.preset, "minutes": minutes, "workers": args.workers, "device": args.device, "seed": args.seed,
        "tasks": _tasks(args, TASKS_OF_THE_MUG), "episodes": args.episodes, "evaluation_seeds": args.evaluation_seeds,
        "bundle": str(args.bundle) if args.bundle else None, "compiled": args.compile,
    }  # fmt: skip
    values |= SHARES.get(args.kind, {})
    values |= {k: str(v) for k, v in (("start", getattr(args, "start", None)), ("vae_file", getattr(args, "vae", None)))
               if v is not None}  # fmt: skip
    words = option_words(args.set)
    words |= {f"recipe.{n}": v for n, v in (("batch", args.batch), ("lr", args.lr)) if v is not None}
    if args.first_seed is not None:
        values["first_seed"] = args.first_seed
    plan = Plan.of(values, words)
    if args.kind == "dit" and plan.start is None and plan.vae_file is None:
        raise ConfigError("wam train dit needs a VAE", expected="--vae vae.pt or --start CHECKPOINT",
                          remedy="wam train vae makes one, wam train all does both")  # fmt: skip
    if args.kind == "dagger":
        report = Dagger(args.out, plan, rollout_share=args.rollout_share).everything()
    elif args.kind == "vae":
        report = Run(args.out, plan).vae_only()
    elif args.kind == "dit":
        report = Run(args.out, plan).dit_only()
    else:
        report = Run(args.out, plan).everything()
    if report:
        print(json.dumps(report, indent=1))
    print(_left(args.kind, args.out, evaluated=bool(report), planned=plan.evaluation_seeds > 0))
    return 0


def _left(kind: str, out: Path, *, evaluated: bool, planned: bool) -> str:
    """The last line: what was made and where it lies."""
    if kind == "vae":
        return f"VAE: {(out / 'vae.pt').resolve()}"
    checkpoint = f"checkpoint: {(out / 'checkpoint').resolve()}"
    if evaluated:
        return f"{checkpoint}; evaluation: {(out / 'evaluation.json').resolve()}"
    why = "there was no time for it" if planned else "none was asked for"
    return f"{checkpoint}; not evaluated, {why}: wam train eval does it"


def _evaluate(args: argparse.Namespace) -> int:
    from wam_policy_ros.sim.tasks import TASKS
    from wam_policy_ros.train.evaluate import Rollouts, evaluate, write_summary

    from .serve import option_words

    what = Rollouts(
        str(args.checkpoint), args.preset, tasks=_tasks(args, tuple(TASKS)),
        options=tuple(option_words(args.engine).items()), execute=args.execute, blind=args.blind,
        threads=max(1, (os.cpu_count() or 1) // args.workers),
    )  # fmt: skip
    seeds = range(args.first, args.first + args.seeds)
    seconds = None if args.minutes is None else 60 * args.minutes
    outcomes, errors = evaluate(what, seeds, workers=args.workers, seconds=seconds)
    for line in errors:
        print(f"a simulator ended: {line}")
    print(json.dumps(write_summary(args.out, outcomes, what), indent=1))
    return 0 if outcomes else 1
