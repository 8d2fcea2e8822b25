"""``wam serve CHECKPOINT``: the OpenPI endpoint on a machine without ROS.

``--dry-run`` says without weights or GPU what would run where and what would not work, ``--smoke`` loads, makes one
chunk and ends.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import json
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wam_policy_ros.contract.errors import ConfigError, MissingDependency
from wam_policy_ros.contract.fakes import HoldPolicy, example_observation
from wam_policy_ros.contract.interface import Policy
from wam_policy_ros.contract.policy_thread import Phase, PolicyThread
from wam_policy_ros.contract.progress import ProgressLog
from wam_policy_ros.engine.replicas.build import EngineFactory, make_policies
from wam_policy_ros.engine.replicas.policy import Replicas
from wam_policy_ros.serving.config import ServerConfig
from wam_policy_ros.serving.dialects import DIALECTS
from wam_policy_ros.serving.server import OpenPIServer

if TYPE_CHECKING:
    from wam_policy_ros.records.recorder import Recorder

SERVER_GRACE_S, OWNER_GRACE_S = 1.2, 0.4
"""Together well below the 2 s in which Ctrl-C must have worked, whatever a step does meanwhile."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("which policy")
    what.add_argument("checkpoint", nargs="?", help="checkpoint folder, or a packaged one's name")
    what.add_argument("--random-weights", choices=["tiny", "14b"], help="an untrained network instead: not a policy")
    what.add_argument("--fake", choices=["hold"], help="no network: every row repeats the state that was sent")
    what.add_argument("--fake-latency-s", type=float, default=0.0, help="how long a step of the fake takes")
    what.add_argument("--embodiment", default="oxe_droid")
    what.add_argument("--tokenizer", help="folder with tokenizer.json of umt5-xxl")
    what.add_argument("--device", default="auto")
    what.add_argument("--gpus", type=int, help="GPUs that share a step, --device and those after it; default: 1")
    what.add_argument(
        "--evaluations",
        type=int,
        help="network evaluations of 16 solver steps: 16, 8, 7, 6, 5; default: what the checkpoint recommends "
        "(the packaged mug: 5), else 8",
    )
    what.add_argument(
        "--preset",
        choices=["auto", "reference", "bf16", "fp8"],
        default="auto",
        help="reference: the published algorithm, plain; bf16, fp8: the same one fast, on a GPU; default: auto",
    )
    what.add_argument(
        "--deterministic", action="store_true", help="the same bits for the same requests in every process, see README"
    )
    what.add_argument("--engine", action="append", default=[], metavar="OPTION=VALUE", help="engine option")
    what.add_argument("--replicas", type=int, default=1, metavar="N", help="policies side by side, each on a GPU "
                      "of its own in a process of its own; a session stays where it was opened")  # fmt: skip
    where = parser.add_argument_group("whom it serves")
    where.add_argument("--host", default="127.0.0.1", help="default: this machine only")
    where.add_argument("--port", type=int, default=8000)
    names = ", ".join(DIALECTS)
    where.add_argument("--dialect", default="dreamzero", help=f"of clients on /: {names}. Each is also at /NAME")
    where.add_argument("--also", action="append", default=[], metavar="PORT=DIALECT", help="a further port")
    where.add_argument("--resize", choices=["refuse", "pad", "stretch"], default="refuse",
                       help="pictures that have not the announced size")  # fmt: skip
    where.add_argument("--single-exterior", choices=["refuse", "dropped_view"], default="refuse",
                       help="clients with one exterior camera")  # fmt: skip
    where.add_argument("--blind-positions", choices=["refuse", "send"], default="refuse",
                       help="joint positions for clients of dialect openpi that may execute velocities")  # fmt: skip
    where.add_argument("--instruction", default="", help="for requests without a prompt")
    where.add_argument("--api-key-file", type=Path, help="clients must send this file's content")
    where.add_argument("--max-sessions", type=int, default=64)
    where.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", dest="options",
                       help="any other option of the server, e.g. resume_s=30, errors=keep_open")  # fmt: skip
    add_record_arguments(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--dry-run", action="store_true", help="say what would happen; loads nothing, needs no GPU")
    how.add_argument("--smoke", action="store_true", help="load, make one chunk, end")
    parser.add_argument("--no-warm-up", action="store_true", help="ready at once; the first calls are slow")
    parser.add_argument("--json", action="store_true", help="the report of --dry-run or --smoke as JSON")


def add_record_arguments(parser: argparse.ArgumentParser) -> None:
    kept = parser.add_argument_group("what is kept")
    kept.add_argument("--record", type=Path, metavar="DIR", help="record what the policy gets and gives, see README")
    kept.add_argument("--record-stages", action="store_true", help="and a digest of every stage of a call; slower")
    kept.add_argument("--record-mb", type=float, default=1024.0, help="size of a file of the record; default: 1024")


def run(args: argparse.Namespace) -> int:
    if sum(map(bool, (args.checkpoint, args.random_weights, args.fake))) != 1:
        raise ConfigError(
            "give a checkpoint folder, or --random-weights, or --fake", got=f"checkpoint {args.checkpoint!r}"
        )
    if args.replicas < 1:
        raise ConfigError("--replicas must be at least 1", got=args.replicas)
    if args.smoke and (args.record is not None or args.record_stages):
        raise ConfigError("--smoke records nothing", remedy="leave --record out, or serve without --smoke")
    config = server_config(args)
    if args.dry_run:
        from .serve_report import dry_run

        return dry_run(args, config)
    if not args.fake and importlib.util.find_spec("torch") is None:
        raise MissingDependency("torch", "engine", "wam serve CHECKPOINT")
    return smoke(args) if args.smoke else serve(args, config)


def server_config(args: argparse.Namespace) -> ServerConfig:
    """From the command line.

    Raises:
        ConfigError: unknown options, or some that do not fit together.
    """
    ports = {}
    for word in args.also:
        port, equals, name = word.partition("=")
        if not equals or not port.isdecimal():
            raise ConfigError("--also wants PORT=DIALECT", got=word)
        ports[int(port)] = name
    key = ""
    if args.api_key_file is not None:
        try:
            key = args.api_key_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("the file with the key cannot be read", got=str(error)) from error
        if not key:
            raise ConfigError("the file with the key is empty", got=args.api_key_file)
    values = {
        "host": args.host,
        "port": args.port,
        "dialect": args.dialect,
        "ports": ports,
        "resize": args.resize,
        "single_exterior": args.single_exterior,
        "blind_positions": args.blind_positions,
        "instruction": args.instruction,
        "max_sessions": args.max_sessions,
        "api_key": key,
        "grace_s": SERVER_GRACE_S / 2,
    }
    return ServerConfig.from_dict(values | option_words(args.options))


def option_words(words: list[str]) -> dict[str, Any]:
    """``["resume_s=30", "guidance_steps=[0, 6]"]`` to values; they are JSON where they can be, lists are tuples."""
    out: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigError("an option must be OPTION=VALUE", got=word)
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        out[name] = tuple(value) if isinstance(value, list) else value
    return out


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """On top of the preset and of what the checkpoint recommends. Raises ConfigError for words that are no options."""
    options, flags = option_words(args.engine), dict[str, Any]()
    if args.evaluations is not None:
        flags |= {"schedule": "static", "evaluations": args.evaluations}
    if args.gpus is not None:
        flags["gpus"] = args.gpus
    if args.deterministic:
        flags["deterministic"] = True
    for name in sorted(flags.keys() & options.keys()):
        if flags[name] != options[name]:
            raise ConfigError(
                f"{name} is given twice, and not the same", got=f"{flags[name]} and --engine {name}={options[name]}"
            )
    return options | flags


def _hold(embodiment: str, latency_s: float, index: int, progress: Callable[[str, float], None]) -> Policy:
    return HoldPolicy(embodiment=embodiment, latency_s=latency_s)


def engine_factory(args: argparse.Namespace) -> EngineFactory:
    """What to build where. Raises ConfigError for words that are no options."""
    return EngineFactory(
        embodiment=args.embodiment,
        checkpoint=args.checkpoint,
        random_weights=args.random_weights,
        tokenizer=args.tokenizer,
        device=args.device,
        preset=args.preset,
        options=engine_options(args),
        hash_all=args.record is not None,
        stages=args.record_stages,
    )


def make_recorder(args: argparse.Namespace) -> Recorder | None:
    """None when nothing is to be recorded.

    Raises:
        ConfigError: nothing can be written there.
        MissingDependency: the extra ``record`` is not installed.
    """
    if args.record is None:
        if args.record_stages:
            raise ConfigError("--record-stages has no effect without --record DIR")
        return None
    if not math.isfinite(args.record_mb):
        raise ConfigError("--record-mb must be a number", got=args.record_mb, expected="MiB of a file")
    try:
        from wam_policy_ros.records.recorder import Recorder, RecordLimits
    except ModuleNotFoundError as error:
        raise MissingDependency(str(error.name), "record", "--record") from error
    return Recorder(args.record, log=say, limits=RecordLimits(file_bytes=round(args.record_mb * 2**20)))


def how_made(args: argparse.Namespace) -> dict[str, Any]:
    """For a replay: where the policy came from."""
    if args.fake:
        return {"policy": "hold", "embodiment": args.embodiment}
    return {"policy": "engine", **engine_factory(args).described()}


def policy_factory(
    args: argparse.Namespace, recorder: Recorder | None = None
) -> Callable[[Callable[[str, float], None]], Policy]:
    """What the policy's thread calls to get the policy."""

    def build(progress: Callable[[str, float], None]) -> Policy:
        if args.fake:
            make = functools.partial(_hold, args.embodiment, args.fake_latency_s)
            return make(0, progress) if args.replicas == 1 else Replicas(make, args.replicas, progress=progress)
        return make_policies(engine_factory(args), args.replicas, progress)

    def build_recorded(progress: Callable[[str, float], None]) -> Policy:
        policy = build(progress)
        if recorder is None:
            return policy
        from wam_policy_ros.records.policy import recorded

        return recorded(policy, recorder, stages=args.record_stages, how=how_made(args))

    return build_recorded


def say(level: str, line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {level:7} {line}", file=sys.stderr, flush=True)


def quiet_process() -> None:
    """When the policy is loaded: what may hold a request up for long, does no more."""
    gc.collect()
    gc.freeze()  # a network has a million objects that stay; every full collection would look at each of them
    # The event loop waits this long for the policy's thread when that computes in Python (5 ms unless set).
    sys.setswitchinterval(2e-4)


def serve(args: argparse.Namespace, config: ServerConfig) -> int:
    """Until SIGINT or SIGTERM, or until the policy cannot be loaded or is lost."""
    # An Event's lock may be held by the very thread the handler interrupts; this queue is made for handlers.
    woken: queue.SimpleQueue[None] = queue.SimpleQueue()
    signals: list[int] = []
    quiet: list[bool] = []

    def on_signal(number: int, frame: object) -> None:
        signals.append(number)
        if len(signals) > 1:
            os._exit(130)
        woken.put(None)

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    recorder = make_recorder(args)
    owner = PolicyThread(policy_factory(args, recorder), log=say, warm_up=not args.no_warm_up)
    progress = ProgressLog(lambda line: say("info", line))

    def changed() -> None:
        progress.update(owner.status)
        if owner.status.phase is Phase.READY and not quiet:
            quiet.append(True)
            spec = owner.status.spec
            if spec is not None and not spec.random_weights:
                say("info", f"policy: {spec.weights}")
            if spec is not None and (memory := spec.details.get("memory")) is not None:
                say("info", str(memory))
            quiet_process()
        if owner.status.phase is Phase.FAILED:
            woken.put(None)

    owner.subscribe(changed)
    server = OpenPIServer(config, owner, log=say, gauges=recorder.gauges() if recorder else {})
    try:
        server.start()
        if args.random_weights:  # before a load that may take minutes
            say("warning", f"RANDOM WEIGHTS ({args.random_weights} network, never trained): not a policy")
        owner.start()
        woken.get()
        failed = owner.status.phase is Phase.FAILED
        why = "the policy was lost; ending" if quiet else "the policy cannot be loaded; ending"
        say("info", "stopping" if signals else why)
        ended = [server.stop(SERVER_GRACE_S), owner.stop(OWNER_GRACE_S)]
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        gc.unfreeze()  # what was frozen would be missed, and reported as leaked, by libraries when the process ends
    if recorder is not None:
        told = recorder.status
        lost = f", INCOMPLETE: {told.dropped} dropped, {told.trouble}" if told.trouble else ""
        say("info", f"record in {told.folder}: {told.written} events, {told.nbytes / 2**20:.1f} MiB{lost}")
    if not all(ended):
        say("warning", "a step does not end; leaving without it")
        sys.stdout.flush()
        os._exit(1 if failed else 0)  # a thread that sits in a GPU call would keep the process
    return 1 if failed else 0


def smoke(args: argparse.Namespace) -> int:
    """Load, make one chunk from a made-up observation, end."""
    say_progress = ProgressLog(lambda line: say("info", line))
    owner = PolicyThread(policy_factory(args), log=say, warm_up=False)
    ended = threading.Event()

    def changed() -> None:
        say_progress.update(owner.status)
        if owner.status.phase in (Phase.READY, Phase.FAILED, Phase.STOPPED):
            ended.set()

    owner.subscribe(changed)
    start = time.monotonic()
    owner.start()
    ended.wait()
    if owner.status.phase is not Phase.READY:
        return 1
    loaded_s = time.monotonic() - start

    def one_chunk(policy: Policy, cancelled: Callable[[], bool]) -> Any:
        session = policy.open()
        try:
            return policy.infer(session, example_observation(policy.spec), cancelled=cancelled)
        finally:
            policy.close(session)

    ticket = owner.submit(one_chunk, lane="smoke")
    chunk = ticket.result()
    spec = owner.status.spec
    assert spec is not None and ticket.started_s is not None and ticket.ended_s is not None
    report = {
        "weights": spec.weights,
        "random_weights": spec.random_weights,
        "load_s": round(loaded_s, 3),
        "first_chunk_s": round(ticket.ended_s - ticket.started_s, 3),
        "rows": list(chunk.actions.shape),
        "finite": bool((abs(chunk.actions) < float("inf")).all()),
    }
    owner.stop(5.0)
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        print(f"{report['weights']}: loaded in {loaded_s:.1f} s, first chunk {report['rows']} in "
              f"{report['first_chunk_s']} s (cold), {'finite' if report['finite'] else 'NOT FINITE'}")  # fmt: skip
    return 0 if report["finite"] else 1
